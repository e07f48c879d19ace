"""Files that nobody vouches for: bytes are taken apart and nothing in them is run."""

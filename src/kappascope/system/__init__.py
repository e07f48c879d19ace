"""Worker processes that may hang or die, and files that are whole or absent."""

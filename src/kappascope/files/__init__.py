"""Bytes that nobody vouches for, taken apart without running anything in them."""

"""How models name, join and lay out their weights."""

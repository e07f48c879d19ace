"""Study of corrections in a character GPT on real text."""

"""Study of which parts of a GPT's matrices are learned, and which only noise and decay made."""

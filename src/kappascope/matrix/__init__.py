"""One matrix: its components, its spectrum, and how well its storage type lets them be known."""

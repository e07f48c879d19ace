"""What a model learns while it learns, and whether its optimizer does what its name says."""

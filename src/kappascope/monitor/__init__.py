"""What a model learns, while it learns: measured around the optimizer's steps, kept on disk."""

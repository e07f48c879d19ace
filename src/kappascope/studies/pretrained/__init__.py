"""Study of checkpoints that other people trained."""

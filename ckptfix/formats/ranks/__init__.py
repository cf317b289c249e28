"""Checkpoints that each rank of a job saved for itself, in separate files."""

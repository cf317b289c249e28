"""Sharded checkpoints as Hugging Face writes them: several files, and an index of the tensors in each."""

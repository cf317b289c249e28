"""Tensor files that torch.save does not write, or no longer: they are read and converted, never edited or written."""

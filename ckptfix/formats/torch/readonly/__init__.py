"""Formats of tensor files that current torch.save does not write: they are read and converted, never edited or
written.
"""

"""Weights in the files of other frameworks: tensors by name, which are read and neither edited nor written."""

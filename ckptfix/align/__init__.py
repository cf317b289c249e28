"""Alignment of the tensors of two models: slots in, a matching out, without files."""

"""Files of tensors that torch.save does not write, or no longer: read, converted, and never edited or written."""

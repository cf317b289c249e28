"""Programs with weights in them, of which the state dict alone is read."""

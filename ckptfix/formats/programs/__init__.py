"""Programs with weights in them; only their state dicts are read."""

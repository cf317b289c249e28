"""Loading into a model."""

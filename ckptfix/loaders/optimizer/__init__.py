"""Loading into an optimizer."""

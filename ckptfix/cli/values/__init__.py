"""Commands about values: which tensors, what numbers, and what proves that they are the same."""

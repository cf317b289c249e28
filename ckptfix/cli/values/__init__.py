"""Commands about values: select, cast, average, merge, count and hash tensors."""

"""Names of parameters: work on strings and shapes, without files."""

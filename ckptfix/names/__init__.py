"""Names of parameters: strings and shapes, no file."""

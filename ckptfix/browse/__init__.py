"""A browser for checkpoints in the terminal: `model` holds the data, `view` draws it."""

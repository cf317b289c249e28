"""A browser for checkpoints in the terminal: `model` is what is shown, `view` is how."""

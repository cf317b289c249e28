"""What can be said of a file: every finding, what it means and what fixes it."""

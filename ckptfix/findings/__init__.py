"""The catalogue of findings: every finding, its meaning, and the command that fixes it."""

"""Code shared by the formats whose checkpoints are folders."""

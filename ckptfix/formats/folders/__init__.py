"""What the formats whose checkpoints are folders share."""

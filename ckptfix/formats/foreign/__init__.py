"""Files that are not checkpoints that ckptfix reads: what they are, and what to do instead."""

"""ckptfix: fix PyTorch checkpoints without loading them."""

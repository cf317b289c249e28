"""Folders of torch.distributed.checkpoint (DCP), read, edited and written as one checkpoint."""

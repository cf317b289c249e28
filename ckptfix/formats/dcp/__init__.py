"""Folders of torch.distributed.checkpoint (DCP): what they state, read, edited and written as one checkpoint."""

"""safetensors: a JSON header, followed by the bytes of the tensors."""

SHARDING_INFO = "DCP_SHARDING_INFO"
"""The metadata key of a file that one rank wrote for torch.distributed.checkpoint: JSON of where its slices begin."""

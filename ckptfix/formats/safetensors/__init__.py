"""safetensors: a JSON header, followed by the bytes of the tensors."""

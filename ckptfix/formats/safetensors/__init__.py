"""safetensors: a header of JSON, and the bytes of the tensors behind it."""

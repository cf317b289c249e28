"""The keys and shapes that a target model expects: from a checkpoint, a file of keys, or the model itself."""

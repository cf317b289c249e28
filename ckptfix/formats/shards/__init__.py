"""A checkpoint of several files and an index that says which of them holds which tensor, as Hugging Face writes it."""

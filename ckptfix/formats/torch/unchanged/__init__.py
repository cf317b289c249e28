"""Proof that an edit of a torch file keeps its tensors, by a comparison of pickles and places."""

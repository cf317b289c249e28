"""What torch.save writes: a pickled object, and storages beside it, in a zip archive or one after another."""

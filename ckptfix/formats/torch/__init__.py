"""Files of torch.save: a pickled object and its storages, in a zip archive or one after the other."""

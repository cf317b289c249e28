"""The object of a torch file in plain values, which ``torch.load(weights_only=True)`` accepts."""

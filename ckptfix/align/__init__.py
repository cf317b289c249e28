"""Which tensor of one model is which of another: slots in, a matching out, no file."""

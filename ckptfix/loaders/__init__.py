"""Loaders for torch: they read any format, map the file where the format allows it, and never run a pickle.

torch is imported inside the functions, so that the rest of ckptfix starts without it. Nothing is imported here: each
loader is imported from its own module, because a program that loads a model needs no optimizer and no writer.
"""

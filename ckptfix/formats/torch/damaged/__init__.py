"""Torch files that lost some of their parts: what is left of them, and a fresh file of it."""

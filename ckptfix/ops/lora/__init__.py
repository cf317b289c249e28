"""Adapters as checkpoints: what they are, merged into a base, in another layout, made from two models."""

"""The layer that a key belongs to: what the first number, or some components, of its name state."""

from __future__ import annotations


def layer_of(key: str, depth: int | None = None) -> str:
    """Return the part of a key that its layer shares: `depth` components, or those up to the first number."""
    parts = key.split(".")
    module = parts[:-1] or parts
    if depth is not None:
        return ".".join(module[:depth])
    first = next((index for index, part in enumerate(module) if part.isdecimal()), None)
    return ".".join(module if first is None else module[: first + 1])

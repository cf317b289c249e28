"""The sign that a checkpoint may hold an adapter.

Most files do not have it, and need neither the table of layouts (`names.adapters`) nor the code that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable

MARKS = ("lora", "hada_w", "lokr_w", "lycoris_", ".adapter.linear_")
"""Parts of keys. Every adapter has a key with one of them, or with one of `ENDS`."""

ENDS = (".diff", ".diff_b", ".w_norm", ".b_norm")
"""Ends of keys of the differences that LyCORIS and ComfyUI write."""


def has_signs(keys: Iterable[str]) -> bool:
    """Return whether one of the keys may be an adapter's."""
    return any(key.endswith(ENDS) or any(mark in key for mark in MARKS) for key in keys)

"""Counts and lists in sentences: ``1 tensor``, ``2,000 tensors``, ``a, b and 3 more``."""

from __future__ import annotations

from collections.abc import Sequence

IRREGULAR = {
    "address": "addresses",
    "copy": "copies",
    "entry": "entries",
    "prefix": "prefixes",
}
"""What has a plural of its own."""


def plural(count: int, noun: str, several: str | None = None) -> str:
    """``1 tensor``, ``2,000 tensors``; `several` is the plural where it is not `noun` with an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {several or IRREGULAR.get(noun, f'{noun}s')}"


def several(count: int, what: str) -> str:
    """``2 numpy arrays of float32``; a class or a function (``argparse.Namespace``) keeps its name."""
    for link in (" of ", " in "):
        head, found, rest = what.partition(link)
        if found:
            break
    if "." in head or "_" in head:
        return f"{count:,} {what}"
    return f"{plural(count, head)}{found}{rest}"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names, and how many there are beyond them."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def where_else(addresses: Sequence[str], most: int = 8) -> str:
    """Where what was looked for is instead: ``there is one at model``, ``there are 2, at model, ema``."""
    named = [address or "the top level ('')" for address in addresses]
    if len(named) == 1:
        return f"there is one at {named[0]}"
    return f"there are {len(named):,}, at {some(named, most)}"

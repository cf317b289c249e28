"""Counts, sizes, shapes and lists in readable text: ``1 tensor``, ``2,000 tensors``, ``a, b and 3 more``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckptfix.errors import printable

TOP = "the top level"
"""The words for the address of the whole checkpoint, ``""``."""

IRREGULAR = {
    "address": "addresses",
    "copy": "copies",
    "entry": "entries",
    "prefix": "prefixes",
}
"""Words with an irregular plural."""


def plural(count: int, noun: str, several: str | None = None) -> str:
    """Return a count with its noun: ``1 tensor``, ``2,000 tensors``.

    Args:
        several: the plural, where it is not `noun` with an s.
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {several or IRREGULAR.get(noun, f'{noun}s')}"


def several(count: int, what: str) -> str:
    """Return a count with its noun: ``2 numpy arrays of float32``; a class (``argparse.Namespace``) keeps its name."""
    for link in (" of ", " in "):
        head, found, rest = what.partition(link)
        if found:
            break
    if "." in head or "_" in head:
        return f"{count:,} {what}"
    return f"{plural(count, head)}{found}{rest}"


def some(names: Sequence[str], most: int = 8) -> str:
    """Return the first `most` names and the number of the remaining ones; 0 means all names."""
    most = most or len(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def where_else(addresses: Sequence[str], most: int = 8) -> str:
    """Tell where the object is instead: ``there is one at model``, ``there are 2, at model, ema``."""
    named = [address or f"{TOP} ('')" for address in addresses]
    if len(named) == 1:
        return f"there is one at {named[0]}"
    return f"there are {len(named):,}, at {some(named, most)}"


def size(nbytes: float) -> str:
    """Format a byte count in decimal units with three digits: ``44.7 MB``."""
    if nbytes < 1000:
        return f"{int(nbytes)} B"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB", "EB"):
        value /= 1000
        if value < 999.5 or unit == "EB":
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    raise AssertionError(nbytes)


def short(count: int) -> str:
    """Format a large number with three digits: ``56.1k``, ``11.7M``, ``7.24B``."""
    if count < 10_000:
        return f"{count:,}"
    value = float(count)
    for unit in ("k", "M", "B", "T"):
        value /= 1000
        if value < 999.5 or unit == "T":
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}{unit}"
    raise AssertionError(count)


MOST_SIZES = 64
"""The most dimensions that a tensor of torch can have; a header may state millions."""


def shape(sizes: Sequence[int]) -> str:
    """Format a shape as torch does: ``[64, 3, 7, 7]``.

    With more dimensions than torch can have, only the first sizes and the number of dimensions are shown.
    """
    if len(sizes) > MOST_SIZES:
        return f"[{', '.join(map(str, sizes[:8]))}, ... {len(sizes):,} dimensions]"
    return f"[{', '.join(map(str, sizes))}]"


def facts(rows: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Format rows as lines of ``name  value``.

    A value of several lines is aligned under its first line; rows without a value are skipped.
    """
    kept = [(name, values) for name, values in rows if values]
    width = max((len(name) for name, _ in kept), default=0)
    lines = []
    for name, values in kept:
        for index, value in enumerate(values):
            lines.append(f"{(name if index == 0 else '').ljust(width)}  {printable(value)}".rstrip())
    return lines


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places ``layers.2`` before ``layers.10``."""
    return [
        (len(part.lstrip("0")) + 1, part.lstrip("0")) if part.isdecimal() else (0, part)
        for part in re.split(r"(\d+)", name)
    ]

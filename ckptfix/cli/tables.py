"""Tables, and numbers for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckptfix.errors import printable


def table(rows: Iterable[Sequence[object]], headers: Sequence[str], *, right: Iterable[int] = ()) -> str:
    """A table with a line under its headers; `right` are the columns set flush right. No rows, no table."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        return ""
    from tabulate import tabulate

    flush = set(right)
    align = ["right" if column in flush else "left" for column in range(len(headers))]
    text = tabulate(cells, headers, tablefmt="simple", disable_numparse=True, colalign=align, headersglobalalign="left")
    return "\n".join(line.rstrip() for line in text.splitlines())


def facts(rows: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Lines of ``name  value``, a value of several lines set under its first; rows without a value are left out."""
    kept = [(name, values) for name, values in rows if values]
    width = max((len(name) for name, _ in kept), default=0)
    lines = []
    for name, values in kept:
        for index, value in enumerate(values):
            lines.append(f"{(name if index == 0 else '').ljust(width)}  {printable(value)}".rstrip())
    return lines


def more(hidden: int, what: str = "") -> str:
    """The line under a list that was cut, or ``""`` when nothing was."""
    noun = f" {what}" if what else ""
    return f"... {hidden:,} more{noun} (--limit 0 shows all)" if hidden > 0 else ""


def size(nbytes: float) -> str:
    """Bytes in decimal units, three digits: ``44.7 MB``."""
    if nbytes < 1000:
        return f"{int(nbytes)} B"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB", "EB"):
        value /= 1000
        if value < 999.5 or unit == "EB":
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    raise AssertionError(nbytes)


def duration(seconds: float) -> str:
    """Seconds for a person: ``8 s``, ``2 min 05 s``, ``1 h 12 min``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plural(count: int, noun: str) -> str:
    """``1 tensor``, ``2,000 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


MOST_SIZES = 64
"""What torch has at most; a header may state millions."""


def shape(sizes: Sequence[int]) -> str:
    """``[64, 3, 7, 7]``, as torch writes it; of more dimensions than torch can have, the first ones and how many."""
    if len(sizes) > MOST_SIZES:
        return f"[{', '.join(map(str, sizes[:8]))}, ... {len(sizes):,} dimensions]"
    return f"[{', '.join(map(str, sizes))}]"


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which ``layers.2`` comes before ``layers.10``."""
    return [
        (len(part.lstrip("0")) + 1, part.lstrip("0")) if part.isdecimal() else (0, part)
        for part in re.split(r"(\d+)", name)
    ]

"""Tables, and readable numbers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from ckptfix.errors import printable
from ckptfix.words import facts as facts
from ckptfix.words import natural as natural
from ckptfix.words import shape as shape
from ckptfix.words import size as size

LONG = 1000
"""Rows of a table from which on it is drawn here: tabulate takes 4 s for 100,000."""


def table(
    rows: Iterable[Sequence[object]],
    headers: Sequence[str],
    *,
    right: Iterable[int] = (),
    spare: Sequence[str] = (),
    whole: Sequence[str] = (),
    names: Sequence[str] = (),
    width: int = 0,
) -> str:
    """A table with a line under its headers; `right` are the columns set flush right. No rows, no table.

    Args:
        spare: headers of the columns that are left out first where there is no room.
        whole: headers of those that are never cut.
        names: headers of those that are cut after all others; the first is always one.
        width: of the terminal that the table must fit; 0 for a table that is complete.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        return ""
    flush = {headers[column] for column in right}
    text = _drawn(cells, headers, flush) if len(cells) < LONG else _lined(cells, headers, flush, 2)
    if width and max(map(len, text)) > width:
        from ckptfix.cli.shared import fit

        cells, headers, left_out = fit.columns(cells, headers, width, spare, whole, names)
        text = _lined(cells, headers, flush)
        if left_out:
            text += fit.wrapped(f"... no room for {', '.join(left_out)} (a pipe gets all)", width)
    return "\n".join(text)


def _drawn(cells: Sequence[Sequence[str]], headers: Sequence[str], flush: Container[str]) -> list[str]:
    from tabulate import tabulate

    align = ["right" if header in flush else "left" for header in headers]
    text = tabulate(cells, headers, tablefmt="simple", disable_numparse=True, colalign=align, headersglobalalign="left")
    return [line.rstrip() for line in text.splitlines()]


def _lined(
    cells: Sequence[Sequence[str]], headers: Sequence[str], flush: Container[str], around: int = 0
) -> list[str]:
    """The same as tabulate draws it, in a tenth of the time; it has headers two columns wider than they are."""
    widths = [
        max(len(header) + around, max(map(len, column)))
        for header, column in zip(headers, zip(*cells, strict=True), strict=True)
    ]
    sides = [">" if header in flush else "<" for header in headers]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True)).format
    head = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (headers, ["-" * width for width in widths]))
    return [*head, *(form(*row).rstrip() for row in cells)]


def more(hidden: int, what: str = "") -> str:
    """The line under a list that was cut, or ``""`` when nothing was."""
    noun = f" {what}" if what else ""
    return f"... {hidden:,} more{noun} (--limit 0 shows all)" if hidden > 0 else ""


def middle_cut(lines: Sequence[str], most: int) -> list[str]:
    """`lines`, of which a long middle is left out: what was done is summed up at both ends. 0 for all."""
    hidden = len(lines) - most
    if not most or hidden <= 0:
        return list(lines)
    tail = most // 4
    return [*lines[: most - tail], f"... {hidden:,} more lines (a pipe gets all)", *lines[len(lines) - tail :]]


def duration(seconds: float) -> str:
    """Seconds for a person: ``8 s``, ``2 min 05 s``, ``1 h 12 min``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

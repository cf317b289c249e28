"""Tables, and readable numbers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from ckptfix.errors import printable
from ckptfix.words import facts as facts
from ckptfix.words import natural as natural
from ckptfix.words import shape as shape
from ckptfix.words import size as size

AROUND = 2
"""Columns by which a column is wider than its header where there is room."""


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
    """Draw a table with a line under its headers; the columns `right` are right-aligned. Without rows, return "".

    Args:
        spare: headers of the columns to leave out first if there is no room.
        whole: headers of the columns that are never cut.
        names: headers of the columns that are cut last, besides the first column.
        width: width of the terminal that the table must fit; 0 for a complete table.
    """
    cells = [[printable(cell).strip() for cell in row] for row in rows]
    if not cells:
        return ""
    flush = {headers[column] for column in right}
    text = _drawn(cells, headers, flush, AROUND)
    if width and max(map(len, text)) > width:
        from ckptfix.cli.shared import terminal_width

        cells, headers, left_out = terminal_width.columns(cells, headers, width, spare, whole, names)
        text = _drawn(cells, headers, flush)
        if left_out:
            text += terminal_width.wrapped(f"... hidden to fit: {', '.join(left_out)} (a pipe gets all)", width)
    return "\n".join(text)


def _drawn(
    cells: Sequence[Sequence[str]], headers: Sequence[str], flush: Container[str], around: int = 0
) -> list[str]:
    """Draw the table; a column is at least `around` columns wider than its header."""
    widths = [
        max(columns_of(header) + around, max(map(columns_of, column)))
        for header, column in zip(headers, zip(*cells, strict=True), strict=True)
    ]
    sides = [str.rjust if header in flush else str.ljust for header in headers]

    def line(row: Sequence[str], sides: Sequence[Callable[[str, int], str]]) -> str:
        # A character may take no column or two: the padding counts columns, and str counts characters.
        fit = (width - columns_of(cell) + len(cell) for cell, width in zip(row, widths, strict=True))
        return "  ".join(side(cell, width) for side, cell, width in zip(sides, row, fit, strict=True)).rstrip()

    head = [headers, ["-" * width for width in widths]]
    return [*(line(row, [str.ljust] * len(widths)) for row in head), *(line(row, sides) for row in cells)]


def columns_of(text: str) -> int:
    """Return the number of columns of a terminal that `text` takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def more(hidden: int, what: str = "") -> str:
    """Return the line under a list that was cut, or ``""`` if nothing was cut."""
    noun = f" {what}" if what else ""
    return f"... {hidden:,} more{noun} (--limit 0 shows all)" if hidden > 0 else ""


def middle_cut(lines: Sequence[str], most: int) -> list[str]:
    """Leave out the middle of a long list, as both ends summarize what was done. 0 keeps all lines."""
    hidden = len(lines) - most
    if not most or hidden <= 0:
        return list(lines)
    tail = most // 4
    return [*lines[: most - tail], f"... {hidden:,} more lines (a pipe gets all)", *lines[len(lines) - tail :]]


def duration(seconds: float) -> str:
    """Format seconds for a person: ``8 s``, ``2 min 05 s``, ``1 h 12 min``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

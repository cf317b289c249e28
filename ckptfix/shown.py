"""A result as text and as HTML for a notebook: its sentences, and tables of its rows.

Keys come from untrusted files: in HTML all text is escaped, and control characters are made visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from ckptfix.errors import printable
from ckptfix.hooks import Hook

MOST = 200
"""The most rows that a table shows; a malicious file could have millions."""

LONGEST = 300
"""The most characters that a cell shows."""

Table = tuple[str, Sequence[str], Sequence[Sequence[object]]]
"""A title, the headers, and the rows."""


def text(command: str, result: object) -> str:
    """Return the text that ``ckptfix COMMAND`` prints for `result` into a pipe: all rows, with untruncated keys.

    The command line formats it.
    """
    format: Hook[Callable[[object], str]] = Hook(f"{command}.text")
    return format.get()(result)


def page(verb: str, result: object, **how: object) -> str:
    """Return the page that ``ckptfix VERB --html`` writes for `result`."""
    make: Hook[Callable[..., str]] = Hook(f"{verb}.page")
    return make.get()(result, **how)


def html(lines: Iterable[str], tables: Iterable[Table] = ()) -> str:
    """Return the lines as HTML, followed by each table that has rows."""
    parts = [f"<p>{'<br>'.join(_text(line, len(line)) for line in lines)}</p>"]
    for title, headers, rows in tables:
        if rows:
            parts.append(_table(title, headers, rows))
    return f"<div>{''.join(parts)}</div>"


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{_text(header)}</th>" for header in headers)
    cells = ("".join(f"<td>{_text(_readable(cell))}</td>" for cell in row) for row in islice(rows, MOST))
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    more = f"<p>... {len(rows) - MOST:,} more</p>" if len(rows) > MOST else ""
    name = f"<caption>{_text(title)}</caption>" if title else ""
    return f"<table>{name}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _readable(value: object) -> object:
    """Return a number with few digits, or with its thousands apart; other values as they are."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


def _text(value: object, most: int = LONGEST) -> str:
    from html import escape  # a table of all entities, which few commands need

    text = "" if value is None else str(value)
    return escape(printable(text if len(text) <= most else f"{text[:most]}..."))

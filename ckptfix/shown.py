"""A result as text and as HTML for a notebook: its sentences, and tables of its rows.

Keys come from untrusted files: in HTML all text is escaped, and control characters are made visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from itertools import islice

from ckptfix.errors import printable

MOST = 200
"""The most rows that a table shows; a malicious file could have millions."""

LONGEST = 300
"""The most characters that a cell shows."""

Table = tuple[str, Sequence[str], Sequence[Sequence[object]]]
"""A title, the headers, and the rows."""


def text(command: str, result: object) -> str:
    """Return the text that ``ckptfix COMMAND`` prints for `result` into a pipe: all rows, with untruncated keys.

    The command line formats it, and is imported on demand.
    """
    shown: str = import_module(f"ckptfix.cli.{command}").text(result)
    return shown


def page(verb: str, result: object, **how: object) -> str:
    """Return the page that ``ckptfix VERB --html`` writes for `result`; the code for pages is imported on demand."""
    made: str = import_module(f"ckptfix.html.{verb}").page(result, **how)
    return made


def html(lines: Iterable[str], tables: Iterable[Table] = ()) -> str:
    """Return the lines as HTML, followed by each table that has rows."""
    parts = [f"<p>{'<br>'.join(_text(line, len(line)) for line in lines)}</p>"]
    for title, headers, rows in tables:
        if rows:
            parts.append(_table(title, headers, rows))
    return f"<div>{''.join(parts)}</div>"


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{_text(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in islice(rows, MOST))
    more = f"<p>... {len(rows) - MOST:,} more</p>" if len(rows) > MOST else ""
    name = f"<caption>{_text(title)}</caption>" if title else ""
    return f"<table>{name}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _text(value: object, most: int = LONGEST) -> str:
    text = "" if value is None else str(value)
    return escape(printable(text if len(text) <= most else f"{text[:most]}..."))

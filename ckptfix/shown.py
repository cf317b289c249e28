"""What a result is as text, and in a notebook: its sentences, and tables of what it found, as HTML.

Names come from untrusted files: in HTML all text is escaped, and control characters are made visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from itertools import islice

from ckptfix.errors import printable

MOST = 200
"""Rows of a table; a file could be made to have millions."""

LONGEST = 300
"""Characters of a cell."""

Table = tuple[str, Sequence[str], Sequence[Sequence[object]]]
"""A title, the headers, and the rows."""


def text(command: str, result: object) -> str:
    """What ``ckptfix COMMAND`` prints of `result` into a pipe: all rows, and whole names.

    The command line has the words, and is imported when they are asked for.
    """
    shown: str = import_module(f"ckptfix.cli.{command}").text(result)
    return shown


def page(verb: str, result: object, **how: object) -> str:
    """The page that ``ckptfix VERB --html`` writes of `result`; what makes pages is imported when one is asked for."""
    made: str = import_module(f"ckptfix.html.{verb}").page(result, **how)
    return made


def html(lines: Iterable[str], tables: Iterable[Table] = ()) -> str:
    """The lines, then each table that has rows."""
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

"""Fitting text to the terminal: lines break at spaces, and table cells lose their middle.

A width of 0 means a pipe: every line and name stays whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from typing import IO

LEAST = 16
"""Minimum characters of a cell in a column that is cut."""

LEAST_NAME = 20
"""Minimum characters in the first column, which has the names."""

_GAP = 2
_COMMAND = re.compile(r"`[^`]*`")
_LABEL = re.compile(r" *(?:\S+(?: \S+)*)?  +")
_HANG = 4
_TO_DO = ("Fix: ", "Or: ", "Then: ", "Try: ", "hint: ")
_NO_BREAK = "\0"


def width_of(stream: IO[str] | None) -> int:
    """Return the columns of the terminal behind `stream`, 0 for anything else."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream is not None and stream.isatty() else 0
    except (AttributeError, OSError, ValueError):  # no stream, a closed one, or one without a file
        return 0


def wrapped(line: str, width: int) -> list[str]:
    """Wrap `line` into as many lines as needed; later lines are indented, to the value of a fact or by a little.

    Text to be pasted is never broken: a command in backticks, and every word of a line with instructions. Other words
    longer than a line, such as file names, lose their middle.
    """
    if not width or len(line) <= width:
        return [line]
    from textwrap import wrap

    label = _LABEL.match(line)
    indent = label.end() if label is not None and label.end() <= width // 2 else _HANG
    text = _COMMAND.sub(lambda command: command[0].replace(" ", _NO_BREAK), line[indent:] if label else line)
    if not line.lstrip().startswith(_TO_DO):
        room = max(width - indent, LEAST)
        text = " ".join(word if "`" in word else cut(word, room) for word in text.split(" "))
    head = line[:indent] if label else ""
    lines = wrap(
        text,
        width,
        initial_indent=" " * len(head),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    whole = [part.replace(_NO_BREAK, " ") for part in lines]
    return [head + whole[0][len(head) :], *whole[1:]]


def cut(text: str, most: int) -> str:
    """Shorten `text` to at most `most` characters, without its middle: the end of a name says more than its start."""
    if len(text) <= most:
        return text
    head = min(most // 4, 6)
    return f"{text[:head]}...{text[len(text) - (most - 3 - head) :]}"


def columns(
    cells: Sequence[Sequence[str]],
    headers: Sequence[str],
    width: int,
    spare: Sequence[str] = (),
    whole: Sequence[str] = (),
    names: Sequence[str] = (),
) -> tuple[list[list[str]], list[str], list[str]]:
    """Return the rows and headers of a table that fits `width` columns, and the headers left out.

    Columns without text go first. Then the widest columns outside `names` are cut, then those in `names` (always with
    the first column). Then columns in `spare` are left out in order, then the last columns. Columns in `whole` are
    never cut. A column in `spare` is also left out where two names of the first column would be cut to the same text.
    """
    full = [at for at in range(len(headers)) if any(row[at] for row in cells)]
    needs = {at: max(len(headers[at]), *(len(row[at]) for row in cells)) for at in full}
    called = {headers[full[0]], *names}
    least = {
        at: need if headers[at] in whole else min(need, LEAST_NAME if headers[at] in called else LEAST)
        for at, need in needs.items()
    }
    kept = list(full)
    while len(kept) > 1 and sum(least[at] for at in kept) + _GAP * (len(kept) - 1) > width:
        left_out = next((at for name in spare for at in kept[1:] if headers[at] == name), kept[-1])
        kept.remove(left_out)
    while True:
        rows = _cut(cells, headers, kept, needs, least, called, width)
        left_out = next((at for name in spare for at in kept[1:] if headers[at] == name), -1)
        if left_out < 0 or len({row[0] for row in rows}) == len({row[kept[0]] for row in cells}):
            break
        kept.remove(left_out)
    return rows, [headers[at] for at in kept], [headers[at] for at in full if at not in kept]


def _cut(
    cells: Sequence[Sequence[str]],
    headers: Sequence[str],
    kept: Sequence[int],
    needs: Mapping[int, int],
    least: Mapping[int, int],
    called: Container[str],
    width: int,
) -> list[list[str]]:
    """Return the columns `kept` of the rows, cut to `width`: first those that are not `called`, the widest first."""
    needs = dict(needs)
    room = width - _GAP * (len(kept) - 1)
    named = [at for at in kept if headers[at] in called]
    for some in ([at for at in kept if at not in named], named):
        while sum(needs[at] for at in kept) > room and any(needs[at] > least[at] for at in some):
            needs[max(some, key=lambda at: needs[at] - least[at])] -= 1
    needs[kept[0]] = min(needs[kept[0]], max(room, LEAST)) if len(kept) == 1 else needs[kept[0]]
    return [[cut(row[at], needs[at]) for at in kept] for row in cells]

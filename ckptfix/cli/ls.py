"""ckptfix ls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ckptfix.cli.shared import tables
from ckptfix.cli.shared.colors import SEVERITIES
from ckptfix.cli.shared.common import files_argument, reads
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import TROUBLE
from ckptfix.cli.shared.terminal_width import LEAST, cut
from ckptfix.errors import printable
from ckptfix.findings.table import RANK
from ckptfix.words import plural, short, size

if TYPE_CHECKING:
    from ckptfix.ops.listing import ListedCheckpoint

_SORTS: dict[str, Callable[[ListedCheckpoint], Any]] = {
    "name": lambda row: tables.natural(row.path),
    "size": lambda row: -row.size,
    "tensors": lambda row: -row.tensors,
    "parameters": lambda row: -row.parameters,
    "format": lambda row: row.format or "~",
    "finding": lambda row: (RANK[row.severity or "info"], row.finding or ""),
}

NOTES = 20
"""Notes printed below the table; --json has all."""

HEADERS = ("name", "format", "size", "tensors", "parameters", "dtypes", "devices", "wrappers")
KNOWN = ("quantization", "step", "epoch", "loss", "state")
"""Columns that are shown only if a row has a value."""

SPARE = ("wrappers", "devices", "tensors", "dtypes", "format", "parameters", "loss", "epoch")
"""Columns that are dropped first if the terminal is too narrow."""


@reads(
    "ls",
    files_argument("paths", "FILE... | DIR"),
    click.Option(["-r", "--recursive"], is_flag=True, help="Search the folders in DIR too."),
    click.Option(
        ["--sort"], type=click.Choice(list(_SORTS)), default="name", show_default=True,
        help="Order of the lines: largest numbers first, worst findings first.",
    ),
    click.Option(["--check"], is_flag=True, help="Read all data: which checkpoints are whole?"),
)  # fmt: skip
def command(console: Console, *, paths: Sequence[str], recursive: bool, sort: str, check: bool) -> int:
    """List checkpoints, one line each.

    For a DIR, lists the files that have the suffix or the content of a checkpoint; a folder that is a checkpoint is one
    line. Only headers are read. The last column is the worst finding of `ckptfix doctor --fast`, or the reason why the
    file cannot be read. --json prints one JSON object per checkpoint, each on its own line.

    The exit code is 0, or 2 if no checkpoint can be read; with --check, 1 if a checkpoint is not whole.
    """
    from ckptfix.ops import listing
    from ckptfix.runner.inputs import expanded

    inputs = expanded(paths, recursive=recursive)
    rows = [row for input in inputs for row in listing.rows(input.path, check=check)]
    rows = [replace(row, path=console.streams.get(row.path, row.path)) for row in rows]
    rows.sort(key=_SORTS[sort])
    if console.json:
        for row in rows:
            console.emit(row.as_dict(), TROUBLE if row.error is not None else int(_is_bad(row)), line=len(rows) > 1)
    elif not rows:
        where = " and ".join(map(printable, paths))
        console.note(f"no checkpoints in {where}" + ("" if recursive else "; -r searches the folders in it too"))
    elif len(rows) == 1 and rows[0].error is not None and not rows[0].size:
        # A table of one file that is not there has nothing to compare.
        console.note(f"{printable(rows[0].path)}: {printable(rows[0].error)}", "damage")
    else:
        _show(console, rows)
    if rows and all(row.error is not None for row in rows):
        return TROUBLE
    return int(check and any(row.error is not None or _is_bad(row) for row in rows))


def _is_bad(row: ListedCheckpoint) -> bool:
    """Return whether a checkpoint that was checked is not whole, or cannot be resumed from."""
    return row.state is not None and row.state.partition(":")[0] not in ("whole", "usable", "weights")


def _show(console: Console, rows: Sequence[ListedCheckpoint]) -> None:
    few = bool(console.width)
    folder = _common([row.path for row in rows]) if few else ""
    known = [name for name in KNOWN if any(getattr(row, name) is not None for row in rows)]
    cells = [_cells(row, few, folder, known) for row in rows]
    headers = (*HEADERS, *known, "finding")
    right = (2, 3, 4, *(headers.index(name) for name in known if name not in ("quantization", "state")))
    table = tables.table(
        cells, headers, right=right, spare=SPARE, whole=("finding",), width=console.width
    ).splitlines()
    names = min(len(table[1].split()[0]), max(console.width // 2, LEAST)) if few else 0
    for index, line in enumerate(table):
        row = rows[index - 2] if 2 <= index < len(rows) + 2 else None
        if row is not None and row.error is not None and few:
            # A file that cannot be read has no other columns: the reason takes their room.
            reason = cut(printable(row.error), max(console.width - names - 2, LEAST))
            line = f"{cut(line.rstrip(), names).ljust(names)}  {reason}"
        color = SEVERITIES[row.severity] if row is not None and row.severity in ("error", "warning") else None
        console.say(line, color)
    if few and len(rows) > 1:
        console.say()
        console.prose(_summary(rows, folder))
    notes = [replace(note, where=row.path.removeprefix(folder) or row.path) for row in rows for note in row.notes]
    console.findings(notes, most=NOTES)


def _cells(row: ListedCheckpoint, few: bool, folder: str, known: Sequence[str]) -> tuple[str, ...]:
    name = row.path.removeprefix(folder) or row.path
    more = tuple(_shown(getattr(row, column)) for column in known)
    if row.error is not None:
        return name, *[""] * (len(HEADERS) - 1), *more, "" if few else row.error
    many = (_most(row.dtypes, few), _most(row.devices, few), _listed(row.wrappers, few))
    numbers = (size(row.size), f"{row.tensors:,}", short(row.all_parameters))
    return name, row.format or "", *numbers, *many, *more, row.finding or ""


def _shown(value: float | str | None) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else value


def _most(counts: Mapping[str, int], few: bool) -> str:
    return _listed(sorted(counts, key=lambda name: -counts[name]), few)


def _listed(names: Iterable[str], few: bool) -> str:
    """Join all `names`; with `few`, show only the first name and the number of the rest."""
    rows = list(names)
    return f"{rows[0]} +{len(rows) - 1}" if few and len(rows) > 1 else ", ".join(rows)


def _common(paths: Sequence[str]) -> str:
    """Return the folder that contains all of several paths, with its trailing slash."""
    folders = [os.path.dirname(path) for path in paths]  # noqa: PTH120 (as the user wrote it)
    with contextlib.suppress(ValueError):  # absolute and relative ones
        if len(paths) > 1 and (folder := os.path.commonpath(folders)):
            return os.path.join(folder, "")  # noqa: PTH118
    return ""


def _summary(rows: Sequence[ListedCheckpoint], folder: str) -> str:
    broken = sum(row.severity == "error" for row in rows)
    warned = sum(row.severity == "warning" for row in rows)
    where = f" in {printable(folder)}" if folder else ""
    judged = [f"{count:,} with {what}" for count, what in ((broken, "errors"), (warned, "warnings")) if count]
    return f"{plural(len(rows), 'checkpoint')}{where}, {size(sum(row.size for row in rows))}: " + (
        ", ".join(judged) if judged else "no problems found"
    )

"""ckptfix inspect."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckptfix.cli.shared import reports, tables
from ckptfix.cli.shared.batch import FullText
from ckptfix.cli.shared.common import files_argument, reads
from ckptfix.cli.shared.console import Console, TextConsole
from ckptfix.cli.shared.operands import Inputs, search_options
from ckptfix.errors import NoSuchTensor
from ckptfix.io.source import shares_open_files
from ckptfix.names.globs import pattern
from ckptfix.ops import inspect

if TYPE_CHECKING:
    from ckptfix.checkpoint import TensorEntry
    from ckptfix.ops.inspect.describe import Inspection

ROWS = 40
"""Rows of tensors shown on a terminal, unless --limit changes that."""

FINDINGS = 100
"""Findings shown; --json has all of them."""

_SORTS: dict[str, Callable[[TensorEntry], Any]] = {
    "name": lambda entry: tables.natural(entry.name),
    "size": lambda entry: -entry.nbytes,
    "dtype": lambda entry: entry.dtype,
    "device": lambda entry: tables.natural(entry.location),
    "file": lambda entry: 0,
}


@reads(
    "inspect",
    files_argument("path", "FILE..."),
    click.Option(["--tensors"], is_flag=True, help="Show only the tensors. Leave out facts about the file."),
    click.Option(["--tree"], is_flag=True, help="Show the tensors as a tree of modules; similar layers are folded."),
    click.Option(["--depth"], metavar="N", type=click.IntRange(min=1), help="Levels of the tree. Implies --tree."),
    click.Option(
        ["--filter", "globs"], metavar="GLOB | /REGEX/", multiple=True,
        help="Show only tensors whose keys match. GLOB matches whole keys, REGEX a part. Repeatable.",
    ),
    click.Option(
        ["--sort"], type=click.Choice(list(_SORTS)), default="file", show_default=True, help="Order of the tensors."
    ),
    click.Option(
        ["--limit"],
        metavar="N",
        type=click.IntRange(min=0),
        help=f"Rows to show, 0 for all. [default: {ROWS} on a terminal, all in a pipe]",
    ),
    *reports.html_options(),
    click.Option(["--values"], is_flag=True, help="With --html: add histograms and statistics. It reads tensors."),
    *search_options(),
    operands=Inputs("path", FullText),
)
def command(
    console: Console,
    *,
    path: str,
    tensors: bool,
    tree: bool,
    depth: int | None,
    globs: tuple[str, ...],
    sort: str,
    limit: int | None,
    html: str | None,
    force: bool,
    values: bool,
) -> int:
    """Show what FILE is, and list its tensors.

    Only headers are read, so large files take no longer than small ones. Nothing in the file is run: its pickle is
    read as text. The tensors of a whole pickled module have the keys of its state dict. The exit code is 0 if the file
    can be read; use `ckptfix doctor` to judge it.

    Each tensor is one line: key, dtype, shape, size, device and notes, with two or more spaces between them. In a pipe
    the list is complete: ckptfix inspect FILE --tensors | awk -F '  +' '{print $1}'
    """

    html = reports.checked(html, (path,), force=force)
    if values and html is None:
        raise click.UsageError("--values needs --html OUT; `ckptfix stats` prints statistics.")
    with shares_open_files():
        inspection = inspect.inspect(path)
        entries = sorted(chosen(inspection.named_entries, globs, path, inspection.entries), key=_SORTS[sort])
        if html is not None:
            with console.progress() as progress:
                make = partial(inspection.to_html, values=values, entries=entries, progress=progress)
                reports.write(console, html, (path,), lambda line: make(command=line), force=force)
    if console.json:
        kept = _in_file(inspection, entries, globs, sort)[: limit or None]
        console.emit(dataclasses.replace(inspection, entries=tuple(kept)).as_dict(), 0)
    else:
        levels = depth or 0
        if tree and not levels:
            from ckptfix.cli.shared.tree import DEPTH

            levels = DEPTH
        _show(console, inspection, entries, tensors, levels, console.rows(limit, ROWS))
    reports.say(console, html)
    return 0


def text(inspection: Inspection) -> str:
    """Return the text that the command prints."""
    lines = TextConsole()
    _show(lines, inspection, list(inspection.named_entries), tensors=False, levels=0, limit=0)
    return str(lines)


def _show(
    console: Console, inspection: Inspection, entries: list[TensorEntry], tensors: bool, levels: int, limit: int
) -> None:
    if not tensors:
        from ckptfix.ops.inspect.describe import LINES, summary

        for line in summary(inspection, most=console.rows(None, LINES)):
            console.prose(line)
    if entries:
        if not tensors:
            console.say()
        plain = inspection.plain_shapes
        width = console.width
        for line in _tree(entries, levels, limit, width) if levels else _table(entries, limit, width, plain):
            console.say(line)
    # The summary already names the globals that weights_only=True refuses.
    findings = (finding for finding in inspection.findings if finding.id != "foreign-global")
    console.findings(findings, most=FINDINGS)


def chosen(
    entries: Sequence[TensorEntry], globs: Sequence[str], path: str, others: Sequence[TensorEntry] = ()
) -> list[TensorEntry]:
    """Return the entries whose name or key matches one of `globs`; all entries without a glob.

    Args:
        others: the same tensors under different names, used if none of `entries` matches.

    Raises:
        NoSuchTensor: no tensor matches.
        UsageError: a regular expression is not valid.
        Refused: a regular expression takes too long on a name; see `names.regexes`.
    """
    if not globs:
        return list(entries)
    patterns = [_pattern(glob) for glob in globs]
    for rows in (entries, others):
        fits = [fits for match in patterns for fits in (match([r.name for r in rows]), match([r.key for r in rows]))]
        found = [row for row, *any_of in zip(rows, *fits, strict=True) if any(any_of)]
        if found:
            return found
    from difflib import get_close_matches

    names = [entry.name for entry in entries[:20000]]
    near = tuple(get_close_matches(globs[0], names, 3, 0.5))
    hint = f"similar names: {', '.join(near)}" if near else None
    raise NoSuchTensor(f"no tensor has a key like {' or '.join(globs)}", near=near, path=path, hint=hint)


def _pattern(glob: str) -> Callable[[Sequence[str]], Sequence[bool]]:
    try:
        return pattern(glob)
    except re.error as error:
        raise click.UsageError(f"{glob} is not a regular expression: {error}") from None


def _in_file(
    inspection: Inspection, entries: Sequence[TensorEntry], globs: Sequence[str], sort: str
) -> Sequence[TensorEntry]:
    """Return the sorted `entries` as the file has them: for a whole module, by their addresses in the file."""
    if not inspection.modules:
        return entries
    from ckptfix.ops.candidates import view

    kept = {view(entry) for entry in entries}
    return sorted((row for row in inspection.entries if not globs or view(row) in kept), key=_SORTS[sort])


def _table(
    entries: Sequence[TensorEntry], limit: int, width: int, plain: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    shown = entries[: limit or None]
    from ckptfix.ops.inspect.describe import notes as notes_of

    notes = notes_of(shown, entries, plain)
    columns: dict[str, list[str]] = {
        "name": [entry.name for entry in shown],
        "dtype": [entry.dtype for entry in shown],
        "shape": [tables.shape(entry.shape) for entry in shown],
        "size": [tables.size(entry.nbytes) for entry in shown],
        "device": [entry.location for entry in shown],
    }
    if any(notes):
        columns["note"] = notes
    yield tables.table(zip(*columns.values(), strict=True), list(columns), right=[3], width=width)
    if hidden := tables.more(len(entries) - len(shown)):
        yield hidden


def _tree(entries: Sequence[TensorEntry], levels: int, limit: int, width: int) -> Iterator[str]:
    from ckptfix.cli.shared.tree import lines

    shown = list(lines(entries, depth=levels, width=width))
    yield from shown[: limit or None]
    if limit and (hidden := tables.more(len(shown) - limit, "lines")):
        yield hidden

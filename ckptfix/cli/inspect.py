"""ckptfix inspect."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptfix.cli import tables
from ckptfix.cli.common import file_argument, reads
from ckptfix.cli.console import Console
from ckptfix.errors import NoSuchTensor
from ckptfix.words import plural

if TYPE_CHECKING:
    from ckptfix.checkpoint import StateDict, TensorEntry
    from ckptfix.ops.inspect import Inspection

ROWS = 40
"""Rows of the tensors that a terminal gets, unless --limit says otherwise."""

LINES = 8
"""Lines of one fact in the summary that a terminal gets."""

FINDINGS = 100
"""Findings shown; --json has all."""

_SORTS: dict[str, Callable[[TensorEntry], Any]] = {
    "name": lambda entry: tables.natural(entry.name),
    "size": lambda entry: -entry.nbytes,
    "dtype": lambda entry: entry.dtype,
    "device": lambda entry: tables.natural(entry.location),
    "file": lambda entry: 0,
}


@reads(
    "inspect",
    file_argument("path", "FILE"),
    click.Option(["--tensors"], is_flag=True, help="Only the tensors, without what is said of the file."),
    click.Option(["--tree"], is_flag=True, help="The tensors as a tree of modules, layers that are alike as one."),
    click.Option(
        ["--filter", "globs"], metavar="GLOB", multiple=True, help="Only tensors whose names match. Repeatable."
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
    example="ckptfix inspect model.pth --filter '*.weight' --sort size",
)
def command(
    console: Console, *, path: str, tensors: bool, tree: bool, globs: tuple[str, ...], sort: str, limit: int | None
) -> int:
    """Say what FILE is, and list its tensors.

    Only headers are read, so a large file answers as fast as a small one. Nothing in it is run: its pickle is read as
    text. A finding about the file makes the exit code 1.

    A tensor is a line: name, dtype, shape, size, device and notes, with two or more spaces between them. In a pipe the
    list is complete: ckptfix inspect FILE --tensors | awk -F '  +' '{print $1}'
    """
    from ckptfix import api

    inspection = api.inspect(path)
    entries = sorted(chosen(inspection.entries, globs, path), key=_SORTS[sort])
    if console.json:
        kept = entries[: limit or None]
        console.emit(dataclasses.replace(inspection, entries=tuple(kept)).as_dict())
    else:
        _show(console, inspection, entries, tensors, tree, console.rows(limit, ROWS))
    return 1 if any(finding.severity != "info" for finding in inspection.findings) else 0


def _show(
    console: Console, inspection: Inspection, entries: list[TensorEntry], tensors: bool, tree: bool, limit: int
) -> None:
    if not tensors:
        for line in summary(inspection, most=console.rows(None, LINES)):
            console.say(line)
    if entries:
        if not tensors:
            console.say()
        listing = _tree(entries, limit) if tree else _table(entries, limit)
        for line in listing:
            console.say(line)
    # The summary has named the globals that are refused, a line each.
    findings = (finding for finding in inspection.findings if tensors or finding.id != "foreign-global")
    console.findings(findings, most=FINDINGS)


def chosen(entries: Sequence[TensorEntry], globs: Sequence[str], path: str) -> list[TensorEntry]:
    """The entries whose name, or key alone, matches one of `globs`; all without any.

    Raises:
        NoSuchTensor: none does.
    """
    if not globs:
        return list(entries)
    from fnmatch import translate

    pattern = re.compile("|".join(map(translate, globs)))
    found = [entry for entry in entries if pattern.match(entry.name) or pattern.match(entry.key)]
    if not found:
        from difflib import get_close_matches

        names = [entry.name for entry in entries[:20000]]
        near = tuple(get_close_matches(globs[0], names, 3, 0.5))
        hint = f"near it: {', '.join(near)}" if near else None
        raise NoSuchTensor(f"no tensor is called {' or '.join(globs)}", near=near, path=path, hint=hint)
    return found


def summary(inspection: Inspection, most: int = LINES) -> list[str]:
    """What is said of the file, a fact a line, of a fact with several lines at most so many; 0 for all."""
    size = tables.size
    rows: list[tuple[str, Sequence[str]]] = [
        ("file", [inspection.path]),
        ("format", [inspection.title]),
        ("traits", [", ".join(_trait(name, value) for name, value in inspection.traits.items())]),
        ("size", [f"{size(inspection.size)} ({inspection.size:,} bytes)"]),
        ("tensors", [f"{inspection.tensors:,} holding {size(inspection.nbytes)}"]),
        ("parameters", [f"{inspection.parameters:,}"]),
        ("dtypes", [_counts(inspection.dtypes)]),
        ("devices", [_counts(inspection.devices)]),
        ("wrappers", _capped([_wrapper(*item) for item in inspection.wrappers.items()], most)),
        ("state dicts", _capped(list(_state_dicts(inspection.state_dicts)), most)),
        ("metadata", _capped([f"{name}: {_short(value)}" for name, value in inspection.metadata.items()], most)),
        ("globals", _capped(_globals(inspection.globals), 5 * most)),
        ("weights_only", [_verdict(inspection)]),
    ]
    return tables.facts([(name, [value for value in values if value]) for name, values in rows])


def _trait(name: str, value: object) -> str:
    label = name.replace("_", " ")
    if value is True:
        return label
    if isinstance(value, list | tuple):
        return f"{label} {', '.join(map(str, value))}"
    return f"no {label}" if value is False or value is None else f"{label} {value}"


def _counts(counts: Any) -> str:
    return ", ".join(f"{name} x {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _wrapper(component: str, found: tuple[int, str]) -> str:
    count, example = found
    return f"{component} on {plural(count, 'key')}, as in {example}"


def _state_dicts(state_dicts: Sequence[StateDict]) -> Iterator[str]:
    """A line a state dict; the many small ones of an optimizer's state are one line together."""
    for state in state_dicts:
        if not state.optimizer:
            extra = f" and {plural(state.extra, 'other value')}" if state.extra else ""
            yield f"{state.at or 'the file itself'}: {plural(state.tensors, 'tensor')}{extra}"
    inner = [state for state in state_dicts if state.optimizer]
    if len(inner) == 1:
        yield f"{inner[0].at or 'the file itself'}: {plural(inner[0].tensors, 'tensor')} of an optimizer"
    elif inner:
        total = sum(state.tensors for state in inner)
        yield f"{inner[0].at} to {inner[-1].at}: {plural(total, 'tensor')} of an optimizer"


def _globals(names: Sequence[tuple[str, bool]]) -> list[str]:
    """Those that weights_only=True refuses first, each on its line; the accepted ones share one."""
    refused = [f"{name} (refused by weights_only=True)" for name, accepted in names if not accepted]
    accepted = ", ".join(name for name, accepted in names if accepted)
    return [*refused, accepted] if accepted else refused


def _verdict(inspection: Inspection) -> str:
    if not inspection.globals and inspection.weights_only is None:
        return ""
    if inspection.weights_only is None:
        return "torch.load(weights_only=True) accepts it"
    return f"torch.load(weights_only=True) refuses it: {inspection.weights_only}"


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _capped(values: list[str], most: int) -> list[str]:
    hidden = len(values) - most
    return values if hidden <= 0 or not most else [*values[:most], f"... {hidden:,} more (--json has all)"]


def _table(entries: Sequence[TensorEntry], limit: int) -> Iterator[str]:
    shown = entries[: limit or None]
    first: dict[str, str] = {}
    for entry in entries:
        if entry.storage is not None:
            first.setdefault(entry.storage.key, entry.name)
    notes = [_note(entry, first) for entry in shown]
    columns: dict[str, list[str]] = {
        "name": [entry.name for entry in shown],
        "dtype": [entry.dtype for entry in shown],
        "shape": [tables.shape(entry.shape) for entry in shown],
        "size": [tables.size(entry.nbytes) for entry in shown],
        "device": [entry.location for entry in shown],
    }
    if any(notes):
        columns["note"] = notes
    yield tables.table(zip(*columns.values(), strict=True), list(columns), right=[3])
    if hidden := tables.more(len(entries) - len(shown)):
        yield hidden


def _note(entry: TensorEntry, first: dict[str, str]) -> str:
    notes = []
    if entry.kind != "dense":
        notes.append(f"{entry.kind} {entry.detail}".rstrip())
    if entry.requires_grad:
        notes.append("requires grad")
    if not entry.is_contiguous:
        notes.append(f"stride {tables.shape(entry.stride)}")
    if entry.storage is not None and entry.numel and first[entry.storage.key] != entry.name:
        notes.append(f"shares storage with {first[entry.storage.key]}")
    return ", ".join(notes)


def _tree(entries: Sequence[TensorEntry], limit: int) -> Iterator[str]:
    from ckptfix.cli.tree import lines

    shown = list(lines(entries))
    yield from shown[: limit or None]
    if limit and (hidden := tables.more(len(shown) - limit, "lines")):
        yield hidden

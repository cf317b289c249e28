"""Shell completion for the values of options: addresses in the file, formats, findings, devices.

Completion must be fast and must never fail: files that cannot be read within `BUDGET` give no proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Thread
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckptfix.checkpoint import Checkpoint

BUDGET = 1.0
"""Seconds allowed for reading files."""

MOST = 200
"""Maximum number of proposals; a file can be crafted to have millions."""

INPUTS = ("source", "path", "a", "b")
"""Names of command arguments that hold an input."""

DEVICES = ("cpu", "cuda", *(f"cuda:{number}" for number in range(8)), "mps", "xpu", "meta")


def addresses(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete addresses of the state dicts in the inputs, with their tensor counts."""
    return _of_files(_inputs(ctx), _addresses, incomplete)


def target_addresses(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete addresses in the model that --like names."""
    return _of_files([ctx.params.get("like")], _addresses, incomplete)


def names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the conversions of the tables of names."""
    from ckptfix.names.tables import shipped

    rows: dict[str, list[str]] = {}
    for one in (way for row in shipped() for way in row.ways):
        rows.setdefault(f"{one.old}:{one.new}", []).append(one.family)
    return _items(((pair, ", ".join(dict.fromkeys(families))) for pair, families in rows.items()), incomplete)


def formats(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the formats that can be written."""
    from ckptfix.formats import FORMATS

    return _items(((format.name, format.title) for format in FORMATS.values() if format.writes), incomplete)


def findings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the ids of all findings."""
    from ckptfix.findings.table import ENTRIES

    return _items(((entry.id, entry.title) for entry in ENTRIES.values()), incomplete)


def devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a device, the first half ``cuda:1=`` of a pair for each device of the input, or its second half."""
    before, sign, _ = incomplete.rpartition("=")
    if sign:
        return _items(((f"{before}={device}", "") for device in DEVICES), incomplete)
    pairs = _of_files(_inputs(ctx), lambda checkpoint: [(f"{name}=", "") for name in checkpoint.devices], incomplete)
    return [*pairs, *_items(((device, "") for device in DEVICES), incomplete)]


def _inputs(ctx: click.Context) -> list[object]:
    """Return the files that the command line names so far."""
    named: list[object] = []
    for value in map(ctx.params.get, INPUTS):
        named += value if isinstance(value, list | tuple) else [value]
    # If the last word is an option without its value, click leaves the arguments before it in `args`.
    count = sum(MOST if param.nargs < 0 else 1 for param in ctx.command.params if param.name in INPUTS)
    return named if any(named) else list(ctx.args[:count])


def _addresses(checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    from ckptfix.ops.candidates import candidates
    from ckptfix.words import plural

    tensors = {state.at: state.tensors for state in checkpoint.state_dicts}
    for row in candidates(checkpoint):
        yield row.at, "a whole module" if row.module is not None else plural(tensors.get(row.at, 0), "tensor")


def _of_files(
    names: Iterable[object], values: Callable[[Checkpoint], Iterable[tuple[str, str]]], incomplete: str
) -> list[CompletionItem]:
    """Apply `values` to the checkpoints among `names`, and complete the results that arrive in time."""
    # Imports take time too, and must not count against the budget for the file.
    from ckptfix.formats import open_checkpoint

    found: list[tuple[str, str]] = []

    def read() -> None:
        for name in names:
            try:
                if isinstance(name, str) and name:
                    found.extend(values(open_checkpoint(name)))
            except Exception:  # a file that cannot be read gives no proposals
                continue

    # A daemon thread that still reads does not keep the process from ending.
    thread = Thread(target=read, daemon=True)
    thread.start()
    thread.join(BUDGET)
    return _items(list(found), incomplete)


def _items(values: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    """Return the completions of `incomplete`; skip values that a shell could not show or read as one word."""
    from click.shell_completion import CompletionItem

    seen: dict[str, CompletionItem] = {}
    for value, text in values:
        if value and value.startswith(incomplete) and value.isprintable() and value not in seen:
            seen[value] = CompletionItem(value, help=text if text.isprintable() else None)
            if len(seen) == MOST:
                break
    return list(seen.values())

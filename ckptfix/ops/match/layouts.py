"""Matchings of another framework's file: its names and layouts become torch's by table, and the result is matched.

Keras, Flax and TensorFlow store kernels with the outputs last, and call parameters gamma, scale or moving_mean. Shapes
alone cannot tell how a square kernel is stored, but the words of its framework do: if each key of the source has a line
in a table that leads to torch's layers (`names.tables`), the operations of the table come before those of the matching.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import overload

from ckptfix.align.fused import FusedTensors
from ckptfix.align.result import MatchedPair, Matching
from ckptfix.checkpoint import Checkpoint
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.names.operations import Operation
from ckptfix.ops.match.fused import Operations
from ckptfix.ops.rename import by_table
from ckptfix.ops.rename.groups import grouped
from ckptfix.ops.target import targets
from ckptfix.ops.target.targets import ExpectedModel

LAYERS = "torch"
"""The ecosystem of tables whose conversions keep the names of modules, and turn what is in them."""


@dataclass(frozen=True, slots=True)
class Turned:
    """A checkpoint with the names and layouts of torch's layers.

    Attributes:
        side: its tensors, as the table would make them, with dots in place of TensorFlow's slashes.
        steps: new key -> the old keys, and the operations that make it from them.
        table: the conversion, in words.
    """

    side: ExpectedModel
    steps: Mapping[str, tuple[tuple[str, ...], tuple[Operation, ...]]]
    table: str


def turned(checkpoint: Checkpoint, at: str | None) -> Turned | None:
    """Return the checkpoint as the table of its framework makes it; None if no table has a line for each key."""
    with suppress(CkptfixError):
        (one,) = by_table.steps(checkpoint, None, LAYERS, at=at)
        after = by_table.converted(checkpoint, (one,), at)
        keys = [name for site in checkpoint.sites if site.kind == "state_dict" for name in site.names]
        found = grouped(keys, one.rules, {key: key for key in keys})
        steps: dict[str, tuple[tuple[str, ...], tuple[Operation, ...]]]
        steps = {_dotted(new): ((old,), ()) for old, new in found.names.items()}
        for group in found.groups.values():
            if group.rule.new is not None:
                steps[_dotted(group.new((0, 0)))] = group.old(), group.rule.operations
        side = targets.of_checkpoint(after, at)
        slots = tuple(replace(slot, name=_dotted(slot.name), tied=_dotted(slot.tied)) for slot in side.slots)
        entries = [replace(entry, key=_dotted(entry.key)) for entry in side.entries]
        changed = any(old != (new,) or own for new, (old, own) in steps.items())
        if changed and len(steps) == len(slots):
            return Turned(replace(side, slots=slots, entries=entries), steps, str(one.conversion))
    return None


@overload
def _dotted(name: str) -> str: ...


@overload
def _dotted(name: None) -> None: ...


def _dotted(name: str | None) -> str | None:
    return None if name is None else name.replace("/", ".")


def of_original(found: Turned, matching: Matching, operations: Operations) -> tuple[Matching, Operations] | None:
    """Return a matching of the turned checkpoint as one of the original; None if a line cannot express it."""
    taken = dict(_taken(found, operations))
    if None in taken.values():
        return None
    steps = found.steps
    pairs: list[MatchedPair] = []
    for pair in matching.pairs:
        old, own = steps[pair.source]
        if not own or pair.source in taken:
            pairs += [replace(pair, source=key) for key in old]
            continue
        taken[pair.source] = FusedTensors(old, (pair.target,), own, 0, joins=len(old) > 1)
        said = " | ".join(map(str, own))
        pairs += [replace(pair, source=key, operation=said) for key in old]
    back = {new: old for new, (old, _) in steps.items()}
    made = replace(
        matching,
        pairs=tuple(pairs),
        rules=(),
        left=tuple(key for name in matching.left for key in back[name]),
        skipped_source=tuple(
            replace(row, name=key) for row in matching.skipped_source for key in back[row.name]
        ),
        notes=(*matching.notes, f"names and layouts are turned into torch's by the table {found.table}"),
    )
    whole = {one.old: one for one in taken.values() if one is not None}
    return made, replace(operations, taken=tuple(whole.values()))


def _taken(found: Turned, operations: Operations) -> Iterator[tuple[str, FusedTensors | None]]:
    """Yield the turned keys that the matching splits or joins, with all operations from the original keys."""
    for one in operations.taken:
        rows = [found.steps[name] for name in one.old]
        old = tuple(key for keys, _ in rows for key in keys)
        alike = len(rows) == 1 or (all(own == rows[0][1] for _, own in rows) and len(old) == len(rows))
        made = replace(one, old=old, operations=(*rows[0][1], *one.operations)) if alike else None
        yield from ((name, made) for name in one.old)


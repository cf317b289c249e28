"""Matchings of another framework's file: its names and layouts become torch's by table, and the result is matched.

Keras, Flax and TensorFlow store kernels with the outputs last, and call parameters gamma, scale or moving_mean. Shapes
alone cannot tell how a square kernel is stored, but the words of its framework do: the operations of the table that
leads to torch's layers (`names.tables`) come before those of the matching. A file in a framework's own format is never
matched without its table: where the table or the matching cannot say how a tensor is stored, the match is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import overload

from ckptfix import formats
from ckptfix.align.fused import FusedTensors
from ckptfix.align.result import MatchedPair, Matching
from ckptfix.checkpoint import Checkpoint
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused
from ckptfix.io.virtual_files import SplicedFile
from ckptfix.names import tables
from ckptfix.names.operations import Operation
from ckptfix.names.rulefile import several
from ckptfix.names.tables import NameConversion
from ckptfix.ops.match.fused import Operations
from ckptfix.ops.rename import by_table
from ckptfix.ops.rename.groups import grouped
from ckptfix.ops.target import targets
from ckptfix.ops.target.targets import ExpectedModel

LAYERS = "torch"
"""The ecosystem of tables whose conversions keep the names of modules, and turn what is in them."""

SHOWN = 64
"""Keys that must have a line each before all keys are looked up in a table."""

_BIAS = re.compile(r"(bias_[ih]h)(?:_l\d+)?$")


class Unturned(Refused):
    """The table of the file's framework does not say how a tensor is stored in torch."""


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
    """Return the checkpoint as the table of its framework makes it.

    Returns:
        None if no table is for its format, and none has a line for each key.

    Raises:
        Unturned: a line of the table for its format does not fit a tensor, or refuses its layer.
    """
    one, own = _table(checkpoint, at)
    if one is None:
        return None
    try:
        return _by(one, checkpoint, at)
    except CkptfixError as error:
        if own:
            raise Unturned(error.message, path=error.path, where=error.where, hint=error.hint) from None
        return None


def _table(checkpoint: Checkpoint, at: str | None) -> tuple[NameConversion | None, bool]:
    """Return the table for a checkpoint, and whether it is for the format of the file.

    A table for its format needs a line for half of the keys; any other one needs a line for each.
    """
    keys = checkpoint.all_keys()
    format = _format(checkpoint)
    rows = [one for one in tables.shipped() if one.new == LAYERS and one.made_for(format) and one.rules().tensors]
    left = {one.family: len(one.rules().unmatched(keys)[0]) for one in rows}
    for one in sorted(rows, key=lambda one: left[one.family]):
        if 2 * left[one.family] <= len(keys):
            return one, True
    shown = keys[:: max(1, len(keys) // SHOWN)]
    ways = [way[0] for way in tables.routes(tables.shipped(), None, LAYERS) if all(map(way[0].may_match, keys[:1]))]
    if all(way.rules().unmatched(shown)[0] for way in ways):
        return None, False
    with suppress(CkptfixError):
        (step,) = by_table.steps(checkpoint, None, LAYERS, at=at)
        return step.conversion, False
    return None, False


def _format(checkpoint: Checkpoint) -> str:
    """Return the format of the file that the user named. The checkpoint may be a planned conversion of it."""
    path = checkpoint.path
    if isinstance(path, SplicedFile) and path.origin:
        with suppress(CkptfixError):
            return formats.open_checkpoint(formats.located(path.origin)).format
    return checkpoint.format


def _by(one: NameConversion, checkpoint: Checkpoint, at: str | None) -> Turned | None:
    rules = one.rules()
    by_table.refuse_misread(checkpoint, rules, at)
    after = by_table.converted(checkpoint, (by_table.RouteStep(one, rules),), at)
    keys = checkpoint.all_keys()
    found = grouped(keys, rules, {key: key for key in keys})
    steps: dict[str, tuple[tuple[str, ...], tuple[Operation, ...]]] = {
        _dotted(new): ((old,), ()) for old, new in found.names.items()
    }
    for group in found.groups.values():
        if group.rule.new is not None:
            for part in range(len(group.rule.new.names)):
                steps[_dotted(group.new((0, part)))] = group.old(), group.rule.operations
    for key in keys:
        if key not in found.names and key not in found.members:
            steps[_dotted(key)] = (key,), ()
    side = targets.of_checkpoint(after, at)
    slots = tuple(replace(slot, name=_dotted(slot.name), tied=_dotted(slot.tied)) for slot in side.slots)
    entries = [replace(entry, key=_dotted(entry.key)) for entry in side.entries]
    changed = any(old != (new,) or own for new, (old, own) in steps.items())
    if not changed or len(steps) != len(slots):
        return None
    left, _ = rules.unmatched(keys)
    said = str(one)
    if left:
        said += f"; it has no line for {several(left)}, which stay as they are"
    return Turned(replace(side, slots=slots, entries=entries), steps, said)


@overload
def _dotted(name: str) -> str: ...


@overload
def _dotted(name: None) -> None: ...


def _dotted(name: str | None) -> str | None:
    return None if name is None else name.replace("/", ".")


def of_original(found: Turned, matching: Matching, operations: Operations) -> tuple[Matching, Operations]:
    """Return a matching of the turned checkpoint as one of the original.

    Raises:
        Refused: a line cannot express it.
    """
    taken = dict(_taken(found, operations))
    steps = found.steps
    pairs: list[MatchedPair] = []
    turns: dict[tuple[str, ...], FusedTensors] = {}
    parts: dict[tuple[str, ...], list[str]] = {}
    for name, (keys, _) in steps.items():
        parts.setdefault(keys, []).append(name)
    target = {pair.source: pair.target for pair in matching.pairs}
    for pair in matching.pairs:
        old, own = steps[pair.source]
        if not own or pair.source in taken:
            pairs += [replace(pair, source=key) for key in old]
            continue
        new = parts[old]
        if any(name in taken or name not in target for name in new):
            raise _inexpressible(old)
        turns[old] = FusedTensors(old, tuple(target[name] for name in new), own, 0, joins=len(old) > 1)
        said = " | ".join(map(str, own))
        pairs += [replace(pair, source=key, operation=said) for key in old]
    made = replace(
        matching,
        pairs=tuple(pairs),
        rules=(),
        left=tuple(dict.fromkeys(key for name in matching.left for key in steps[name][0])),
        skipped_source=tuple(
            replace(row, name=key) for row in matching.skipped_source for key in steps[row.name][0]
        ),
        notes=(*matching.notes, f"names and layouts are turned into torch's by the table {found.table}"),
    )
    whole = {one.old: one for one in taken.values()} | turns
    questions = (*_one_bias(found, matching), *operations.questions)
    return made, replace(operations, taken=tuple(whole.values()), questions=questions)


def _one_bias(found: Turned, matching: Matching) -> Iterator[str]:
    """Yield what an LSTM lacks: Keras and Flax have one bias for both products of a gate."""
    for name in matching.missing:
        end = _BIAS.search(name)
        if end is not None and not any(key.endswith(end[0]) for key in found.steps):
            yield f"IN has no {name}: its layer has one bias where torch has two; set {name} to zeros"


def _taken(found: Turned, operations: Operations) -> Iterator[tuple[str, FusedTensors]]:
    """Yield the turned keys that the matching splits or joins, with all operations from the original keys.

    Raises:
        Refused: a line cannot express it.
    """
    for one in operations.taken:
        rows = [found.steps[name] for name in one.old]
        old = tuple(key for keys, _ in rows for key in keys)
        same_steps = len(rows) == 1 or (all(own == rows[0][1] for _, own in rows) and len(old) == len(rows))
        parts = sum(row == rows[0] for row in found.steps.values())
        if not same_steps or (rows[0][1] and parts > 1):
            raise _inexpressible(old)
        made = replace(one, old=old, operations=(*rows[0][1], *one.operations))
        yield from ((name, made) for name in one.old)


def _inexpressible(old: Sequence[str]) -> Refused:
    message = f"no line of a rules file both turns and splits or joins {several(old)}"
    return Refused(message, hint="run `ckptfix convert IN OUT --names torch` first, and match its output")

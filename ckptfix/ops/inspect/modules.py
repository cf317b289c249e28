"""Whole pickled modules, listed under the keys of their ``state_dict()``, which people know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.checkpoint.address import is_inside
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.ops.candidates import beside_state_dict, candidates, state_dict_of


@dataclass(frozen=True, slots=True)
class PickledModule:
    """A whole module.

    Attributes:
        at: its address.
        name: its class, as named by the pickle; ``""`` where it has no name.
        entries: the tensors of its state dict, followed by its other tensors.
        taken: how many are in the state dict.
    """

    at: str
    name: str
    entries: tuple[TensorEntry, ...]
    taken: int


def modules_in(checkpoint: Checkpoint) -> tuple[PickledModule, ...]:
    """List the whole modules of a checkpoint; a broken one is skipped."""
    found = []
    for row in candidates(checkpoint):
        if row.module is None:
            continue
        from ckptfix.checkpoint.tree import ObjectValue

        try:
            entries = state_dict_of(checkpoint, row)
            others = beside_state_dict(checkpoint, row.at, entries)
        except CkptfixError:
            continue
        kind = row.module.cls if isinstance(row.module, ObjectValue) else None
        named = (replace(entry, at=row.at) for entry in entries)
        found.append(PickledModule(row.at, "" if kind is None else kind.full, (*named, *others), len(entries)))
    return tuple(found)


def renamed(entries: Sequence[TensorEntry], modules: Sequence[PickledModule]) -> tuple[TensorEntry, ...]:
    """Return `entries`, with those of each module in `modules` under state dict keys, where its first entry was."""
    if not modules:
        return tuple(entries)
    made: list[TensorEntry] = []
    left = list(modules)
    for entry in entries:
        inside = next((whole for whole in modules if is_inside(entry.name, whole.at)), None)
        if inside is None:
            made.append(entry)
        elif inside in left:
            left.remove(inside)
            made += inside.entries
    return tuple(made)

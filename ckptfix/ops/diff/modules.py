"""Conversion of whole pickled modules to state dicts, so that they can be compared with one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from ckptfix.checkpoint import Checkpoint, NameList, StateDict, TensorEntry
from ckptfix.checkpoint.address import is_inside_any
from ckptfix.formats.torch.module import Module
from ckptfix.ops import choose
from ckptfix.ops.candidates import Candidate, beside_state_dict, module_entries, read_module
from ckptfix.ops.diff.result import ModuleRead


def as_state_dicts(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint, tuple[ModuleRead, ...]]:
    """Return both checkpoints, with the state dict of every module that is not a module in the other one.

    Modules at the same address are compared as they were pickled, with everything that state dicts lack. So are modules
    among hyper-parameters, which are not models.

    Raises:
        CkptfixError: a module is malformed, or one of its tensors cannot be read.
    """
    modules_a, modules_b = ({row.at: row for row in choose.models(each) if row.module is not None} for each in (a, b))
    both = modules_a.keys() & modules_b.keys()
    new_a, read_a = _without_modules(a, "a", [row for at, row in modules_a.items() if at not in both])
    new_b, read_b = _without_modules(b, "b", [row for at, row in modules_b.items() if at not in both])
    return new_a, new_b, (*read_a, *read_b)


def _without_modules(
    checkpoint: Checkpoint, side: Literal["a", "b"], rows: list[Candidate]
) -> tuple[Checkpoint, list[ModuleRead]]:
    if not rows:
        return checkpoint, []
    modules = [(row, read_module(checkpoint, row)) for row in rows]
    made = {row.at: _entries(checkpoint, row, module) for row, module in modules}

    def outside(address: str) -> bool:
        return not is_inside_any(address, made)

    entries = [entry for entry in checkpoint.entries if outside(entry.name)]
    entries += [entry for own in made.values() for entry in own]
    states = [state for state in checkpoint.state_dicts if outside(state.at)]
    states += [StateDict(at, len(own), 0) for at, own in made.items()]
    sites = [site for site in checkpoint.sites if outside(site.at)]
    sites += [NameList(at, "state_dict", tuple(entry.key for entry in own)) for at, own in made.items()]
    noticed = [finding for _, module in modules for finding in module.findings]

    def values() -> Iterator[tuple[str, object]]:
        return ((address, value) for address, value in checkpoint.values() if outside(address))

    made_of = replace(
        checkpoint,
        load_entries=lambda: tuple(entries),
        load_values=values,
        state_dicts=tuple(states),
        sites=tuple(sites),
        findings=(*checkpoint.findings, *noticed),
    )
    left = {row.at: beside_state_dict(checkpoint, row.at, made[row.at]) for row in rows}
    return made_of, [ModuleRead(side, row.at, tuple(entry.name for entry in left[row.at])) for row in rows]


def _entries(checkpoint: Checkpoint, row: Candidate, module: Module) -> tuple[TensorEntry, ...]:
    return tuple(replace(entry, at=row.at) for entry in module_entries(checkpoint, module))

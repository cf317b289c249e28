"""The optimizer state of all ranks for each parameter, by key, in the layout of torch.distributed.checkpoint.

::

    {"state": {NAME: {"exp_avg": tensor, "exp_avg_sq": tensor, "step": tensor}},
     "param_groups": [{"lr": ..., "params": [NAME, ...]}, ...]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from ckptfix.checkpoint import TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.assembly import Assembly, mapping
from ckptfix.formats.folders.nodes import listed
from ckptfix.formats.torch.state import fields
from ckptfix.formats.torch.tensors import is_tensor
from ckptfix.formats.zero.joined_tensors import Joiner, Table
from ckptfix.formats.zero.partitions import Cuts, Shape
from ckptfix.formats.zero.states import Lost, Model, Optim, ZeroRankFile
from ckptfix.pickles.graph import Node, new_text, pairs


@dataclass(frozen=True, slots=True)
class JoinedMoment:
    """An optimizer tensor that is joined from the ranks' files: `number` is its number in the joiner."""

    dtype: str
    shape: Shape
    number: int


@dataclass(slots=True)
class OptimizerMoments:
    """The state of the optimizer.

    Attributes:
        states: parameter -> key -> a joined tensor, a small tensor that every rank has, or a plain node.
        groups: the options of each group, and the names of its parameters.
        file: the file of the nodes of options and plain values.
    """

    file: ZeroRankFile
    states: dict[str, dict[str, JoinedMoment | TensorEntry | Node]] = field(default_factory=dict)
    groups: list[tuple[Node, list[str]]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def node(self, assembly: Assembly, joiner: Joiner) -> Node:
        """Return the node of the whole optimizer state."""
        storages = self.file.storages
        state: dict[str, Node] = {}
        for name, rows in self.states.items():
            made: dict[str, Node] = {}
            for key, value in rows.items():
                if isinstance(value, JoinedMoment):
                    place = assembly.storage(joiner.place(value.number))
                    made[key] = assembly.tensor(place, value.dtype, value.shape)
                elif isinstance(value, TensorEntry):
                    # Each parameter counts its own steps: in-place increments of one shared storage would count for all
                    # of them.
                    place = assembly.storage(value.data)
                    made[key] = assembly.tensor(place, value.dtype, value.shape)
                else:
                    made[key] = assembly.adopt(value, storages, "optimizer.", location="cpu")
            state[name] = mapping(made)
        groups: list[Node] = []
        for options, names in self.groups:
            own = assembly.adopt(options, storages, "optimizer.", location="cpu")
            rest = [(key, value) for key, value in pairs(own) or () if key != "params"]
            groups.append(mapping([*rest, ("params", list(map(new_text, names)))]))
        return mapping({"state": mapping(state), "param_groups": groups})


def moments(model: Model, optims: Sequence[Optim | Lost], cuts: Cuts, joiner: Joiner) -> OptimizerMoments | None:
    """Return the moments of all ranks; None if no rank's file is there."""
    there = [own for own in optims if isinstance(own, Optim)]
    if not there:
        return None
    first = there[0]
    made = OptimizerMoments(first.file)
    tables = {key: _table(key, optims) for key in _keys(there)}
    for key, table in tables.items():
        if isinstance(table, str):
            made.findings.append(
                found("not-taken", f"the optimizer state {key} was left out: it {table}", where="optimizer")
            )
    for group, shapes in enumerate(model.groups):
        for name, shape in shapes.items():
            cut = cuts[group][name]
            place = next((run for _, run in cut.touched()), min(group, len(first.flat) - 1))
            own = first.states[place] if 0 <= place < len(first.states) else {}
            rows: dict[str, JoinedMoment | TensorEntry | Node] = {}
            for key, node in own.items():
                table = tables[key]
                if isinstance(table, str):
                    continue
                if table is not None:
                    known = next(row for row in table if not isinstance(row, Lost))
                    dtype = known[place].dtype
                    rows[key] = JoinedMoment(dtype, shape, joiner.add(f"{key} of {name}", dtype, shape, cut, table))
                elif is_tensor(node):
                    rows[key] = first.file.tensor(node, f"state/{place}/{key}")
                else:
                    rows[key] = node
            if rows:
                made.states[name] = rows
    made.groups = groups_of(first.options, model.groups)
    return made


def _keys(there: Sequence[Optim]) -> list[str]:
    return list(dict.fromkeys(key for own in there for state in own.states for key in state))


def _table(key: str, optims: Sequence[Optim | Lost]) -> Table | str | None:
    """Return the flat tensors of `key`; None for a value that a group has once; otherwise, a message."""
    rows: list[Sequence[TensorEntry] | Lost] = []
    once = 0
    for own in optims:
        if isinstance(own, Lost):
            rows.append(own)
            continue
        row = []
        for group, state in enumerate(own.states):
            node = state.get(key)
            if not is_tensor(node):
                if node is not None:
                    once += 1
                    continue
                if own.flat[group].numel:
                    return "is not in the states of all groups and ranks"
                row.append(own.flat[group])
                continue
            entry = own.file.tensor(node, f"state/{group}/{key}")
            if entry.shape == ():
                once += 1
            elif len(entry.shape) == 1 and entry.numel >= own.flat[group].numel:
                row.append(entry)
            else:
                return f"has a different shape than the weights: {list(entry.shape)} in {own.file.path}"
        rows.append(row)
    flat = sum(len(row) for row in rows if not isinstance(row, Lost))
    if once and flat:
        return "is a number in one group, and a flat tensor in another"
    return None if once else rows


def groups_of(options: Sequence[Node], groups: Sequence[Mapping[str, Shape]]) -> list[tuple[Node, list[str]]]:
    """Return the options of each group of the optimizer, and the names of its parameters."""
    numbers = [
        [number for number in listed(fields(own).get("params")) if type(number) is int] for own in options
    ]
    if sorted(number for own in numbers for number in own) != list(range(len(groups))):
        numbers = [[place] for place in range(len(groups))] if len(options) == len(groups) else [[]] * len(options)
    return [
        (own, [name for place in places for name in groups[place]])
        for own, places in zip(options, numbers, strict=True)
    ]

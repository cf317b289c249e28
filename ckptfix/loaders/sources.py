"""The state dicts of a file as a loader sees them: a key and a location for each tensor.

A whole pickled module counts as a state dict too. Its class is not needed to read it (`formats.torch_module`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field

from ckptfix.checkpoint import Checkpoint, TensorEntry, same_place
from ckptfix.checkpoint.tree import Item, named
from ckptfix.dataclass import dataclass
from ckptfix.errors import NoSuchTensor, Refused
from ckptfix.formats import weights_of, without_optimizer
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.names.slots import Slot
from ckptfix.ops.candidates import Candidate, at_address, candidates, module_entries, read_module

EXTRA_STATE = "_extra_state"
"""Last component of the key for a module's data that is not a tensor (torch.nn.Module.get_extra_state)."""


@dataclass(frozen=True, slots=True)
class StateSource:
    """A state dict in a file.

    Attributes:
        row: the part of the file that it was read from.
        entries: key -> tensor, in file order, including tied keys.
        versions: module path -> its ``_metadata``.
        extra: key -> item, for values that are not tensors and that the model may accept.
        made: key of a tensor built from other tensors -> address of the first of these.
    """

    row: Candidate
    entries: Mapping[str, TensorEntry]
    versions: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    extra: Mapping[str, Item] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def at(self) -> str:
        """Address of the state dict."""
        return self.row.at

    @property
    def names(self) -> list[str]:
        return [*self.entries, *self.extra]

    def slots(self) -> list[Slot]:
        """Return a slot per tensor for the matchers. A tensor with the same memory as an earlier one is tied to it."""
        first: dict[object, str] = {}
        rows = []
        for name, entry in self.entries.items():
            place = same_place(entry)
            known = first.setdefault(place, name) if place is not None else name
            rows.append(Slot(name, entry.shape, entry.dtype, None if known == name else known))
        return rows


def sources(checkpoint: Checkpoint, leaves: Collection[str] = ()) -> list[StateSource]:
    """Return every state dict of the file that a model could have written, in file order.

    If anything looks like a model's state dict, parts of an optimizer's state and other dicts that happen to hold
    tensors are left out.

    Args:
        leaves: last key components of the other values to include.

    Raises:
        Refused: the file has no state dict.
        CkptfixError: a whole module in the file is invalid, or cannot be read.
    """
    found = candidates(checkpoint)
    if not found:
        hint = "run `ckptfix inspect` to see what it holds"
        raise Refused("no state dict was found in it", path=checkpoint.path, hint=hint)
    return _sources(checkpoint, found, leaves)


def chosen(checkpoint: Checkpoint, at: str | None, leaves: Collection[str] = ()) -> list[StateSource]:
    """Return the state dict at the address `at`, or all of them if `at` is None.

    Raises:
        NoSuchTensor: there is no state dict at `at`.
        Refused: the file has no state dict.
    """
    if at is None:
        return sources(checkpoint, leaves)
    return _sources(checkpoint, [at_address(checkpoint, at)], leaves)


def _sources(checkpoint: Checkpoint, found: Sequence[Candidate], leaves: Collection[str]) -> list[StateSource]:
    below: dict[str, dict[str, TensorEntry]] = {}
    for entry in weights_of(checkpoint):
        below.setdefault(entry.at, {})[entry.key] = entry
    return [
        StateSource(row, _own(below.get(row.at, {})), *_beside(checkpoint, row.at, leaves))
        if row.module is None
        else _of_module(checkpoint, row)
        for row in found
    ]


def _own(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    return {entry.key: entry for entry in without_optimizer(tuple(entries.values()))}


def _of_module(checkpoint: Checkpoint, row: Candidate) -> StateSource:
    """Read a whole pickled module.

    Raises:
        CkptfixError: it is not a module, or holds a tensor that cannot be read.
    """
    module = read_module(checkpoint, row)
    return StateSource(row, {entry.key: entry for entry in module_entries(checkpoint, module)}, module.versions)


def _beside(
    checkpoint: Checkpoint, at: str, leaves: Collection[str]
) -> tuple[Mapping[str, Mapping[str, object]], Mapping[str, Item]]:
    """Return the module versions and the other values of the state dict at `at`."""
    parts = maybe_pickled_object(checkpoint)
    if parts is None:
        return {}, {}
    versions = parts.found.module_metadata(at) or {}
    site = checkpoint.names_at(at)
    if site is None or not any(name.rpartition(".")[2] in leaves for name in site.names):
        return versions, {}
    try:
        values = named(checkpoint.tree.at(at))
    except NoSuchTensor:  # the address has a number added to keep it unique, so no key has that name
        return versions, {}
    tensors = {entry.key for entry in checkpoint.entries_at(at)}
    found = {name: item for name, item in values.items() if name.rpartition(".")[2] in leaves and name not in tensors}
    return versions, found

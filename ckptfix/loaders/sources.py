"""The state dicts of a file as a loader sees them: a name and a place for each tensor.

Beside the mappings that a file calls its state dicts, a whole pickled module is one; its class is not needed to read it
(`formats.torch_module`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.errors import CkptfixError, NoSuchTensor, Refused
from ckptfix.formats import safetensors, torch_module
from ckptfix.formats.torch_common import Parts
from ckptfix.formats.torch_drop import node_at
from ckptfix.loaders.objects import mapping_of
from ckptfix.ops.extract_sources import is_inside, module_entries
from ckptfix.ops.match import Slot

EXTRA_STATE = "_extra_state"
"""Last component of the name under which a module keeps what is no tensor (torch.nn.Module.get_extra_state)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A state dict in a file.

    Attributes:
        at: its address.
        entries: name -> tensor, in file order, tied names too.
        versions: module path -> its ``_metadata``.
        extra: names of values that are no tensors and that the model may take -> their nodes.
        weights: it looks like what ``Module.state_dict()`` gives.
    """

    at: str
    entries: Mapping[str, TensorEntry]
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    weights: bool = True

    @property
    def names(self) -> list[str]:
        return [*self.entries, *self.extra]

    def slots(self) -> list[Slot]:
        """For matchers; a tensor that is the same part of the same storage as an earlier one is tied to it."""
        first: dict[object, str] = {}
        rows = []
        for name, entry in self.entries.items():
            place = same_place(entry)
            known = first.setdefault(place, name) if place is not None else name
            rows.append(Slot(name, entry.shape, entry.dtype, None if known == name else known))
        return rows


def same_place(entry: TensorEntry) -> object | None:
    """Equal for entries that are one tensor under several names; None for one that has no bytes."""
    if entry.storage is None or not entry.numel:
        return None
    return entry.storage, entry.dtype, entry.offset, entry.shape, entry.stride


def sources(checkpoint: Checkpoint, leaves: Collection[str] = ()) -> list[Source]:
    """Every state dict of the file that a model could have written, in file order.

    Parts of an optimizer's state and other mappings that happen to hold tensors are left out where there is anything
    that looks like a model's.

    Args:
        leaves: last components of the names of other values to be taken.

    Raises:
        Refused: there is none at all.
        CkptfixError: a whole module in the file is none, or cannot be read.
    """
    entries: tuple[TensorEntry, ...] = checkpoint.entries
    if checkpoint.format == safetensors.NAME:
        entries = safetensors.restore_ties(entries, checkpoint.metadata)
    below: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries:
        below.setdefault(entry.at, {})[entry.key] = entry
    modules = torch_module.modules(checkpoint)
    found = [
        Source(state.at, below.get(state.at, {}), *_beside(checkpoint, state.at, leaves), weights=state.weights)
        for state in checkpoint.state_dicts
        if not state.optimizer and not any(is_inside(state.at, at) for at, _ in modules)
    ]
    found += _modules(checkpoint, modules)
    weights = [source for source in found if source.weights]
    if not found:
        hint = "`ckptfix inspect` shows what it holds"
        raise Refused("no state dict was found in it", path=checkpoint.path, hint=hint)
    return weights or found


def chosen(checkpoint: Checkpoint, at: str | None, leaves: Collection[str] = ()) -> list[Source]:
    """The state dict at the address `at`, or all of them.

    Raises:
        NoSuchTensor: there is none at `at`.
        Refused: there is none at all.
    """
    if at is None:
        return sources(checkpoint, leaves)
    at = at.strip("/")
    everything = sources(checkpoint, leaves)
    found = [source for source in everything if source.at == at] or _by_address(checkpoint, at, leaves)
    if not found:
        near = tuple(source.at or "''" for source in everything)
        hint = f"there is one at {', '.join(near)}"
        raise NoSuchTensor(f"no state dict at {at!r}", near=near, path=checkpoint.path, hint=hint)
    return found


def _by_address(checkpoint: Checkpoint, at: str, leaves: Collection[str]) -> list[Source]:
    """The mapping at `at` even though it does not look like a model's."""
    for state in checkpoint.state_dicts:
        if state.at == at:
            entries = {entry.key: entry for entry in checkpoint.entries if entry.at == at}
            return [Source(at, entries, *_beside(checkpoint, at, leaves), weights=state.weights)]
    return []


def _beside(checkpoint: Checkpoint, at: str, leaves: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Versions and other values of the state dict at `at`."""
    if not isinstance(checkpoint.graph, Parts):
        return {}, {}
    versions = checkpoint.graph.found.module_metadata(at) or {}
    names = next((site.names for site in checkpoint.sites if site.at == at and site.kind == "state_dict"), ())
    if not any(name.rpartition(".")[2] in leaves for name in names):
        return versions, {}
    try:
        values = mapping_of(node_at(checkpoint.graph.graph.root, at))
    except NoSuchTensor:  # an address with a number that tells it from another: no key is called so
        return versions, {}
    tensors = {entry.key for entry in checkpoint.entries if entry.at == at}
    found = {name: node for name, node in values.items() if name.rpartition(".")[2] in leaves and name not in tensors}
    return versions, found


def _modules(checkpoint: Checkpoint, found: Sequence[tuple[str, Any]]) -> Iterator[Source]:
    """Whole pickled modules, by their addresses and nodes.

    Raises:
        CkptfixError: one that is none, or holds a tensor that cannot be read.
    """
    for at, node in found:
        try:
            module = torch_module.read_module(node, at)
        except CkptfixError as error:
            error.path = checkpoint.path
            raise
        entries = {entry.key: entry for entry in module_entries(checkpoint, module)}
        yield Source(at, entries, module.versions)

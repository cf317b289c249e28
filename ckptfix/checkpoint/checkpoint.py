"""A checkpoint as read, before any tensor byte is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from ckptfix.checkpoint.places import Spliced
from ckptfix.checkpoint.stamp import Mark
from ckptfix.checkpoint.tensors import TensorEntry
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding

Made = TypeVar("Made")

SiteKind = Literal["state_dict", "metadata", "param_names", "optimizer_state"]


@dataclass(frozen=True, slots=True)
class NameSite:
    """A place that holds parameter or module names, all of which change together.

    Attributes:
        at: its address. The ``_metadata`` of a state dict has the address of that state dict.
        kind: ``"state_dict"`` (names are keys of tensors), ``"metadata"`` (names are module paths, the root
            being ``""``), ``"param_names"`` (a list of names), ``"optimizer_state"`` (name -> its state).
        names: in order. A state dict's non-tensor keys are here too.
    """

    at: str
    kind: SiteKind
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateDict:
    """A mapping with string keys and a tensor among its values, and where it is.

    Attributes:
        at: its address.
        tensors, extra: how many of its values are tensors, and how many are not.
        optimizer: it is a part of an optimizer's state.
        weights: it looks like what ``Module.state_dict()`` gives, rather than RNG state or statistics that
            happen to be tensors. Only such mappings get a prefix added or become a safetensors file.
        payload: it is in what a class gets to make or fill an object of: its arguments, its slots, a state for its
            ``__setstate__``. Only the class knows what the keys mean, so no edit changes them.
    """

    at: str
    tensors: int
    extra: int
    optimizer: bool = False
    weights: bool = True
    payload: bool = False


class Inside:
    """What a format keeps of a file for its own edits; each format that keeps something has a class of its own."""

    __slots__ = ()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read: names, shapes and places; no tensor byte has been read.

    Attributes:
        path: the file, or the folder of its files.
        format: name of the format that read it.
        size: bytes of all files.
        traits: what else the format states about the file, for `inspect` (protocol, zip root, byte order ...).
        byteorder: of the tensor data.
        metadata: string pairs that the format keeps beside the tensors (safetensors ``__metadata__``).
        sites: every place that holds names.
        devices: location -> how often it stands in the file.
        fixed_devices: places whose device cannot be edited, as text.
        inside: what the format keeps for its own edits; other code asks the format's functions.
        findings: what reading noticed; building `entries` may add to it.
        files: the files that it was read from, as they were before, to see that they are still the same.
    """

    path: str
    format: str
    size: int
    traits: Mapping[str, object]
    load_entries: Callable[[], tuple[TensorEntry, ...]] = field(repr=False, compare=False)
    load_values: Callable[[], Iterator[tuple[str, object]]] = field(repr=False, compare=False)
    byteorder: Literal["little", "big"] = "little"
    metadata: Mapping[str, str] = field(default_factory=dict)
    sites: tuple[NameSite, ...] = ()
    state_dicts: tuple[StateDict, ...] = ()
    devices: Mapping[str, int] = field(default_factory=dict)
    fixed_devices: tuple[str, ...] = ()
    inside: Inside | None = field(default=None, repr=False, compare=False)
    findings: Sequence[Finding] = ()
    files: tuple[Mark, ...] = ()

    def size_of(self, path: str) -> int:
        """Bytes of one of its files."""
        if isinstance(path, Spliced):
            return path.size
        return next((mark.stamp.size for mark in self.files if mark.path == path), self.size)

    @cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Every tensor, in file order; built at the first use."""
        return self.load_entries()

    def entries_at(self, at: str) -> tuple[TensorEntry, ...]:
        """The tensors of the mapping at an address, in file order."""
        return self._by_mapping.get(at, ())

    def shaped(self, at: str, names: Sequence[str]) -> frozenset[str]:
        """Those of the keys `names` of the mapping at an address that hold a tensor with at least one dimension.

        Numbers, text, other mappings and tensors without a dimension may be a trainer's own (``epoch``,
        ``best_loss``). All of the keys where none holds such a tensor, or where the tensors cannot be read.
        """
        try:
            found = frozenset(entry.key for entry in self.entries_at(at) if entry.shape)
        except CkptfixError:
            return frozenset(names)
        return found.intersection(names) or frozenset(names)

    @cached_property
    def _by_mapping(self) -> dict[str, tuple[TensorEntry, ...]]:
        rows: dict[str, list[TensorEntry]] = {}
        for entry in self.entries:
            rows.setdefault(entry.at, []).append(entry)
        return {at: tuple(entries) for at, entries in rows.items()}

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def once(self, make: Callable[[Checkpoint], Made]) -> Made:
        """What `make` makes of it, kept: a checkpoint never changes, and several callers ask."""
        if make not in self._made:
            self._made[make] = make(self)
        made: Made = self._made[make]
        return made

    def values(self) -> Iterator[tuple[str, object]]:
        """Every leaf that is not a tensor, as (address, plain value); foreign objects are inert records."""
        return self.load_values()

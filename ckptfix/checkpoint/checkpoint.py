"""A checkpoint as read, before any tensor data is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckptfix.checkpoint.byte_ranges import Spliced
from ckptfix.checkpoint.file_version import FileVersion
from ckptfix.checkpoint.tensors import TensorEntry
from ckptfix.dataclass import cached_property, dataclass
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding

if TYPE_CHECKING:
    from ckptfix.checkpoint.tree import ValueTree

Made = TypeVar("Made")

SiteKind = Literal["state_dict", "metadata", "param_names", "optimizer_state"]


@dataclass(frozen=True, slots=True)
class NameList:
    """A list of parameter or module names, which change together.

    Attributes:
        at: its address. The ``_metadata`` of a state dict has the address of that state dict.
        kind: ``"state_dict"`` (names are keys of tensors), ``"metadata"`` (names are module paths, ``""`` is the root),
            ``"param_names"`` (a list of names), ``"optimizer_state"`` (name -> its state).
        names: in order, including a state dict's keys of values that are not tensors.
    """

    at: str
    kind: SiteKind
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateDict:
    """A mapping with string keys and at least one tensor among its values, and its address.

    Attributes:
        at: its address.
        tensors, extra: the number of its values that are tensors, and of those that are not.
        optimizer: it is a part of an optimizer's state.
        weights: it looks like the result of ``Module.state_dict()``, rather than RNG state or statistics that happen to
            be tensors. Only such mappings get a prefix added or become a safetensors file.
        payload: it is data from which a class builds an object: its arguments, its slots, a state for its
            ``__setstate__``, its attributes, or the items of a class that is not known to be a mapping. Only the class
            knows the meaning of the keys, so no edit changes them.
    """

    at: str
    tensors: int
    extra: int
    optimizer: bool = False
    weights: bool = True
    payload: bool = False


class FormatState:
    """Data of a format for its own edits; each format that needs some defines its own class."""

    __slots__ = ()

    def forget_entries(self) -> None:
        """Free what is kept for the entries; it is made again on the next use."""


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A checkpoint as read: keys, shapes and positions, without any tensor data.

    Attributes:
        path: the file, or the folder of its files.
        format: name of the format that read it.
        size: bytes of all files.
        traits: further facts about the file, for `inspect` (protocol, zip root, byte order ...).
        byteorder: of the tensor data.
        metadata: string pairs that the format keeps beside the tensors (safetensors ``__metadata__``).
        sites: every place that holds names.
        devices: location -> number of occurrences in the file.
        fixed_devices: places whose device cannot be edited, as text.
        inside: the format's data for its own edits; other code uses the format's functions instead.
        findings: problems noticed while reading; building `entries` may add to them.
        files: the state of its files before they were read, to detect later changes.
        load_tree: function that makes `tree`, for a format that stores an object, or more tensors than `entries` lists.
    """

    path: str
    format: str
    size: int
    traits: Mapping[str, object]
    load_entries: Callable[[], tuple[TensorEntry, ...]] = field(repr=False, compare=False)
    load_values: Callable[[], Iterator[tuple[str, object]]] = field(repr=False, compare=False)
    byteorder: Literal["little", "big"] = "little"
    metadata: Mapping[str, str] = field(default_factory=dict)
    sites: tuple[NameList, ...] = ()
    state_dicts: tuple[StateDict, ...] = ()
    devices: Mapping[str, int] = field(default_factory=dict)
    fixed_devices: tuple[str, ...] = ()
    inside: FormatState | None = field(default=None, repr=False, compare=False)
    findings: Sequence[Finding] = ()
    files: tuple[FileVersion, ...] = ()
    load_tree: Callable[[Checkpoint], ValueTree] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        tensors = sum(state.tensors for state in self.state_dicts)
        states = f"{len(self.state_dicts):,} state dict{'s' * (len(self.state_dicts) != 1)}"
        return f"<Checkpoint {self.path!r}: {self.format}, {self.size:,} bytes, {states} with {tensors:,} tensors>"

    def size_of(self, path: str) -> int:
        """Return the size in bytes of one of its files."""
        if isinstance(path, Spliced):
            return path.size
        return next((mark.stamp.size for mark in self.files if mark.path == path), self.size)

    @cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Every tensor, in file order; built on first use."""
        return self.load_entries()

    @cached_property
    def tree(self) -> ValueTree:
        """All values, as a tree; a format that stores no object nests its tensors by address."""
        if self.load_tree is not None:
            return self.load_tree(self)
        from ckptfix.checkpoint.tree import EntryTree

        return EntryTree(self.entries, self.values(), self.metadata)  # type: ignore[arg-type]

    def forget_entries(self) -> None:
        """Free `entries`; they are built again on the next use. With findings they stay: building adds to these."""
        if not self.findings:
            for name in ("entries", "_by_mapping"):
                self.__dict__.pop(name, None)
            if self.inside is not None:
                self.inside.forget_entries()

    def entries_at(self, at: str) -> tuple[TensorEntry, ...]:
        """Return the tensors of the state dict at an address, in file order."""
        return self._by_mapping.get(at, ())

    def state_at(self, at: str) -> StateDict | None:
        """Return the state dict at an address, or None."""
        return self._by_address.get(at)

    def names_at(self, at: str) -> NameList | None:
        """Return the list of the keys of the state dict at an address, or None."""
        return self._name_lists.get(at)

    def keys_at(self, at: str) -> tuple[str, ...]:
        """Return the keys of the state dict at an address; empty if none is there."""
        found = self._name_lists.get(at)
        return () if found is None else found.names

    def all_keys(self) -> list[str]:
        """Return the keys of all state dicts, in the order of the file."""
        return [name for site in self.sites if site.kind == "state_dict" for name in site.names]

    def shaped(self, at: str, names: Sequence[str]) -> frozenset[str]:
        """Return those of the keys `names` whose value is a tensor with at least one dimension, at an address.

        Numbers, text, other mappings and tensors without a dimension may belong to the trainer (``epoch``,
        ``best_loss``). Returns all of the keys if none holds such a tensor, or if the tensors cannot be read.
        """
        try:
            found = frozenset(entry.key for entry in self.entries_at(at) if entry.shape)
        except CkptfixError:
            return frozenset(names)
        return found.intersection(names) or frozenset(names)

    @cached_property
    def _by_address(self) -> dict[str, StateDict]:
        return {row.at: row for row in reversed(self.state_dicts)}

    @cached_property
    def _name_lists(self) -> dict[str, NameList]:
        return {site.at: site for site in reversed(self.sites) if site.kind == "state_dict"}

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
        """Return the result of `make`, cached: a checkpoint never changes, and several callers need the result."""
        if make not in self._made:
            self._made[make] = make(self)
        made: Made = self._made[make]
        return made

    def values(self) -> Iterator[tuple[str, object]]:
        """Iterate over the leaves that are not tensors as (address, plain value).

        Foreign objects become inert records.
        """
        return self.load_values()

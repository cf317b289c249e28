"""The object of a torch file that lost some of its storages: its tensors, and a fresh file of those that are intact.

Values are named by their `identity` in the tree of values, so that a caller need not know how the file spells them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ckptfix.checkpoint import Data, OutputFile, Plan, Storage, TensorEntry, address, dtypes, storages_of
from ckptfix.checkpoint.tree import Item
from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported
from ckptfix.formats.torch import weights_only, zip_layout
from ckptfix.formats.torch.common import ByteOrder, StorageTable, fields, typed_apart, view_of
from ckptfix.formats.torch.object import TorchObject
from ckptfix.formats.torch.rewrite import legacy_plan, renumbered, storage_keys
from ckptfix.formats.torch.tensors import BadTensor, UnknownTensor, is_tensor, tensor_entry
from ckptfix.formats.torch.tree import value_of
from ckptfix.pickles import Call, PersId
from ckptfix.pickles.reemit import Rewritten, children_to_write, every_node, reemit, still_written
from ckptfix.pickles.unwritten import UnwrittenGraph
from ckptfix.zips.names import safe_name

MAX_BELOW = 1_000_000
"""Nodes that are visited below calls that do not describe a tensor; such calls may be nested."""


Identities = Collection[int]
"""The `identity` of values in the tree."""

Positions = Mapping[int, Collection[int]]
"""The `identity` of a mapping -> positions of its items, as they were written."""


@dataclass(frozen=True, slots=True)
class IntactStorage:
    """An intact storage: its bytes, their CRC-32 if it was computed, and the element count stored in a legacy file."""

    data: Data
    crc32: int | None = None
    count: int = 0


class DamagedTensor(NamedTuple):
    """A tensor of the object.

    Attributes:
        entry: None if the file does not describe a tensor there.
        lost: keys of the lost storages that it needs.
        unusable: why every loader fails on it; "" if none does, or only for an unknown name.
        identity, holder: of the tensor, and of the value that holds it under this name.
    """

    name: str
    entry: TensorEntry | None
    lost: Collection[str]
    unusable: str
    identity: int
    holder: int


class DamagedObject(StorageTable):
    """An object whose storages are partly lost.

    Attributes:
        counts: key -> elements of each storage that the object refers to.
        viewed: keys of storages whose references name a view.

    Args:
        parts: key -> storage, of the intact ones.
        faults: key -> why the storage is not intact, where that is known.
        filled: keys of storages that are complete at any size.
    """

    def __init__(
        self,
        found: TorchObject,
        path: str,
        parts: Mapping[str, IntactStorage],
        faults: Mapping[str, str],
        *,
        legacy: bool,
        filled: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.apart = typed_apart(found.graph)
        self.counts: dict[str, int] = {}
        self.viewed: set[str] = set()
        self._found, self._path, self._parts, self._faults = found, path, parts, faults
        self._legacy, self._filled = legacy, filled
        self._lost: dict[str, str] = {}
        self._unusable: dict[int, str] = {}
        self._budget = MAX_BELOW

    @property
    def root(self) -> Item:
        """The whole object, as an item of the tree of values."""
        return value_of(self._found.graph.root)

    def globals(self) -> Iterator[tuple[int, str, int]]:
        """Yield (identity, name in Python 3, offset) of each class and function that the pickle names, also unused."""
        return ((id(node), weights_only.canonical(node), node.start) for node in self._found.graph.globals)

    def texts(self) -> Iterator[tuple[int, object]]:
        """Yield (identity, value) of each text and string of bytes, except those in plain tensors."""
        for node in every_node(self._found.graph.root, folded=False):
            for part in children_to_write(node):
                if isinstance(part, (str, bytes, bytearray)):
                    yield id(part), part

    def addresses(self) -> Iterator[tuple[str, int]]:
        """Yield (address, identity) of each value that has an address of its own."""
        return ((at, id(node)) for at, node in self._found.values)

    def tensors(self) -> list[DamagedTensor]:
        """List every tensor of the object that has a name."""
        self._see_all()
        rows: list[DamagedTensor] = []
        for at, key, node in self._found.tensors:
            entry, lost = self._look(node, key, at)
            # A tensor with a second address is lost at this one together with the object that holds it here.
            holder = self._found.holders.get(at, node)
            unusable = self._unusable.get(id(node), "")
            rows.append(DamagedTensor(address.join(at, key), entry, lost, unusable, id(node), id(holder)))
        return rows

    def filled(self, keys: frozenset[str]) -> DamagedObject:
        """Return the same object after the storages `keys` were filled."""
        made = DamagedObject(self._found, self._path, self._parts, self._faults, legacy=self._legacy, filled=keys)
        made._unusable.update(self._unusable)
        made._see_all()
        return made

    def gone(self) -> set[int]:
        """Return the values that need a lost storage or do not describe a tensor, named or not."""
        gone: set[int] = set()
        if not self._lost and not self._unusable:
            return gone
        self._budget = MAX_BELOW
        for node in every_node(self._found.graph.root):
            if type(node) is PersId or (type(node) is Call and is_tensor(node)):
                _, lost = self._look(node)
                if lost or id(node) in self._unusable:
                    gone.add(id(node))
        return gone

    def still_written(self, gone: Identities, items: Positions | None = None) -> set[int]:
        """Return the values that the object has after these and items at these positions are left out."""
        return still_written(self._found.graph.root, gone, items)

    def rewritten(
        self, gone: Identities, items: Positions, counts: Mapping[str, int], *, unused: bool = False
    ) -> Rewritten:
        """Return the pickle of the object without some of its values.

        Args:
            gone: values that are left out where they are the value of a mapping, and are None elsewhere.
            items: positions of items that are left out.
            counts: storage key -> its new number of elements.
            unused: leave out the calls whose results an unpickler drops, too.
        """
        graph = self._found.graph
        resized = self._resized(counts)
        if gone or resized or unused or isinstance(graph, UnwrittenGraph):
            return reemit(graph, items=items, gone=gone, replaced=resized)
        return Rewritten(graph.data[graph.start : graph.end], tuple(graph.persids))

    def plan(
        self,
        rewritten: Rewritten,
        dest: str,
        extras: Mapping[str, tuple[Data, int | None]],
        byteorder: ByteOrder,
    ) -> Plan:
        """Plan a fresh file of the same format.

        Args:
            extras: name below the root -> data and CRC-32, of records that torch does not write itself.
        """
        keys = [key for key in storage_keys(rewritten, self._path) if key in self._parts]
        parts = [(key, self._parts[key]) for key in keys]
        if self._legacy:
            return legacy_plan(rewritten.pickle, [(key, part.data, part.count) for key, part in parts], dest)
        names = _distinct(keys)
        if any(name != key for key, name in names.items()):
            rewritten = renumbered(rewritten, names, self._path)
        storages = [(names[key], part.data, part.crc32) for key, part in parts]
        segments = zip_layout.fresh(rewritten.pickle, storages, byteorder, _safely_named(extras, names.values()))
        return Plan((OutputFile.of(dest, segments),))

    def __call__(self, persid: PersId) -> Storage:
        if view_of(persid) is not None:
            self.viewed.add(fields(persid)[0])
        return super().__call__(persid)

    def make(self, key: str, kind: str, location: str, nbytes: int) -> Storage:
        self.counts[key] = nbytes // dtypes.by_name(kind).itemsize
        part = self._parts.get(key)
        whole = part is not None and (part.data.length == nbytes or key in self._filled)
        data = part.data if part is not None and whole and location != "meta" else None
        # torch asks for the record of a storage on the meta device too, and a legacy file has none.
        if not whole and (location != "meta" or not self._legacy):
            reason = self._faults.get(key, "its storage is missing from the file")
            if part is not None:
                reason = f"its storage has {part.data.length} bytes where {nbytes} are promised"
            self._lost[key] = reason
        return Storage(key, kind, nbytes, location, data, part.crc32 if part is not None else None)

    def reason(self, keys: Iterable[str]) -> str:
        return "; ".join(dict.fromkeys(f"storage {key}: {self._lost[key]}" for key in sorted(keys)))

    def _look(self, node: Call | PersId, key: str = "", at: str = "") -> tuple[TensorEntry | None, Collection[str]]:
        """Return the entry of a tensor's node, and the keys of the lost storages that it needs."""
        try:
            entry = tensor_entry(node, key, at, self)
        except (BadTensor, OverflowError) as error:
            lost = self._lost_below(node)
            if not lost and not isinstance(error, UnknownTensor):
                self._unusable[id(node)] = str(error)
            return None, lost
        storages = list(storages_of([entry]))
        return entry, {storage.key for storage in storages if storage.key in self._lost}

    def _lost_below(self, node: Call | PersId) -> set[str]:
        """Return the keys of lost storages anywhere in a call that is not a known kind of tensor."""
        keys: set[str] = set()
        if not self._lost:
            return keys
        for below in every_node(node):
            self._budget -= 1
            if self._budget < 0:
                raise Unsupported("it lacks storages, and its calls are nested too deeply", path=self._path)
            if type(below) is PersId:
                try:
                    key = self(below).key
                except BadTensor:
                    continue
                if key in self._lost:
                    keys.add(key)
        return keys

    def _see_all(self) -> None:
        """Ask for every storage once, to find out which are lost."""
        for persid in self._found.graph.references():
            with suppress(BadTensor):
                self(persid)

    def _resized(self, counts: Mapping[str, int]) -> dict[int, PersId]:
        """Map ``id`` of each reference to a storage of `counts` to a copy with that number of elements."""
        made: dict[int, PersId] = {}
        for node in self._found.graph.persids if counts else ():
            with suppress(BadTensor):
                key = fields(node)[0]
                if key in counts:
                    made[id(node)] = PersId((*node.fields[:4], counts[key], *node.fields[5:]), node.position, -1)
        return made


def _distinct(keys: Sequence[str]) -> dict[str, str]:
    """Map each storage key to its new one, because torch cannot tell apart names that differ only in case."""
    taken = {key.lower() for key in keys}
    used: set[str] = set()
    names: dict[str, str] = {}
    for key in keys:
        number = len(keys)
        name = key
        while name.lower() in used or (name != key and name in taken):
            name, number = str(number), number + 1
        used.add(name.lower())
        names[key] = name
    return names


def _safely_named(
    extras: Mapping[str, tuple[Data, int | None]], keys: Iterable[str]
) -> dict[str, tuple[Data, int | None]]:
    """Return the records that torch does not write, under names that stay inside the folder and are unique."""
    taken = {"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment"}
    taken.update(f"data/{key}".lower() for key in keys)
    named: dict[str, tuple[Data, int | None]] = {}
    for name, row in extras.items():
        safe = safe_name(name, taken)
        taken.add(safe.lower())
        named[safe] = row
    return named

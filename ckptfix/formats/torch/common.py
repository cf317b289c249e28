"""Code shared by the zip and the legacy format of torch: a pickled object, and its storages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from ckptfix.checkpoint import Checkpoint, Data, FormatState, Storage, TensorEntry, dtypes, with_parts
from ckptfix.errors import BadPickle, CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.formats.torch import weights_only
from ckptfix.formats.torch.object import Devices, TorchObject, find_devices
from ckptfix.formats.torch.tensors import BadTensor, storage_dtype
from ckptfix.io.derived import byteswapped
from ckptfix.pickles import Graph, PersId, Text
from ckptfix.pickles.folded import Phrases
from ckptfix.pickles.graph import Node
from ckptfix.pickles.molds import CallTemplate
from ckptfix.pickles.new_tensors import NewTensorArguments, NewTensors

if TYPE_CHECKING:
    from ckptfix.checkpoint.tree import Item, ValueTree

ByteOrder = Literal["little", "big"]


class PickledObject(FormatState):
    """The torch-specific content of a checkpoint: the walked object, its storages and its container."""

    __slots__ = ("container", "found", "storages")

    def __init__(self, found: TorchObject, storages: Storages, container: Any) -> None:
        self.found = found
        self.storages = storages
        self.container = container

    @property
    def graph(self) -> Graph:
        """The parsed pickle of the object."""
        return self.found.graph

    def forget_entries(self) -> None:
        self.storages.forget()

    def storage_keys(self) -> set[str]:
        """Return the keys of the storages that the object refers to."""
        return self.graph.storages()

    def all_there(self) -> bool:
        """Return whether every storage in the file has exactly the size that the references to it state."""
        return self.storages.all_there(self.graph)

    def global_names(self) -> list[str]:
        """Return every class and function that the pickle names, as Python 3 spells it, each once."""
        return list(dict.fromkeys(map(weights_only.canonical, self.graph.globals)))

    def refusal(self) -> str | None:
        """Return why ``torch.load(weights_only=True)`` would refuse the object, or None if no reason is known."""
        return weights_only.refusal(self.graph)

    def devices(self) -> Devices:
        """Find every device in the object."""
        return find_devices(self.graph)

    def named_arrays(self) -> Iterator[tuple[str, int]]:
        """Yield (address, number) of each mapping that holds NumPy arrays of floating-point numbers by name."""
        from ckptfix.formats.torch.call_classes import named_arrays

        return named_arrays(self.graph.root)

    @property
    def root(self) -> Item:
        """The whole object, as an item of the tree of values."""
        return self.value(self.graph.root)

    def value(self, node: Node) -> Item:
        """Return the item of the tree that `node` stands for."""
        from ckptfix.formats.torch.tree import value_of

        return value_of(node, self.storages)

    def tensors(self, is_meant: Callable[[str], bool]) -> Iterator[tuple[str, str, Item]]:
        """Yield (address, key, item) of each tensor and storage in a mapping at an address that is meant."""
        return ((at, key, self.value(node)) for at, key, node in self.found.tensors if is_meant(at))

    def tensors_at(self, at: str) -> Iterator[tuple[str, Item]]:
        """Yield (key, item) of each tensor and storage in the mapping at `at`."""
        return ((key, item) for _, key, item in self.tensors(at.__eq__))


def build(
    path: str,
    *,
    format: str,
    size: int,
    found: TorchObject,
    container: Any,
    storages: Storages,
    traits: Mapping[str, Any],
    byteorder: ByteOrder,
    findings: list[Finding],
) -> Checkpoint:
    """Build the Checkpoint of a parsed object; its entries are built when code first asks for them."""
    graph = found.graph
    storages.apart = typed_apart(graph)
    devices = find_devices(graph)
    findings = [*findings, *weights_only.global_findings(graph), *found.findings]

    def load_entries() -> tuple[TensorEntry, ...]:
        from ckptfix.formats.torch.failing_calls import of_tensors

        entries, bad = found.entries(storages, storages.alike)
        findings.extend(bad)
        findings.extend(of_tensors(entries))
        return tuple(entries)

    def load_values() -> Iterator[tuple[str, Any]]:
        return found.plain_values()

    def load_tree(checkpoint: Checkpoint) -> ValueTree:
        from ckptfix.formats.torch.tree import PickledTree

        return PickledTree(graph.root, storages, found.holders)

    return Checkpoint(
        path=path,
        format=format,
        size=size,
        traits={"pickle protocol": graph.protocol, **traits},
        load_entries=load_entries,
        load_values=load_values,
        byteorder=byteorder,
        sites=tuple(site.noun() for site in found.sites),
        state_dicts=tuple(found.state_dicts),
        devices=devices.counts(),
        fixed_devices=tuple(devices.fixed),
        inside=PickledObject(found, storages, container),
        findings=findings,
        load_tree=load_tree,
    )


def maybe_pickled_object(checkpoint: Checkpoint) -> PickledObject | None:
    """Return the object of a checkpoint; None if the checkpoint holds only named tensors."""
    inside = checkpoint.inside
    return inside if isinstance(inside, PickledObject) else None


def pickled_object(checkpoint: Checkpoint) -> PickledObject:
    """Return the object of a checkpoint that has one."""
    parts = maybe_pickled_object(checkpoint)
    assert parts is not None
    return parts


def all_findings(checkpoint: Checkpoint) -> Sequence[Finding]:
    """Return the findings of reading, including those of building the entries."""
    _ = checkpoint.entries
    return checkpoint.findings


def size_of(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the number of tensors that a torch checkpoint lists, and the bytes of the storages that it refers to."""
    parts = pickled_object(checkpoint)
    return len(parts.found.tensors), promised_bytes(parts.graph)


def referred(checkpoint: Checkpoint, *, in_object: bool = False) -> Iterator[Storage]:
    """Yield every storage that the pickle of a torch checkpoint refers to, whatever holds the reference.

    Args:
        in_object: skip references that the pickle makes and discards, which needs a walk over the whole object.
    """
    parts = maybe_pickled_object(checkpoint)
    if parts is None:
        return
    from ckptfix.pickles.reemit import every_node

    graph = parts.graph
    nodes = every_node(graph.root) if in_object else ()
    for persid in (node for node in nodes if type(node) is PersId) if in_object else graph.references():
        with suppress(BadTensor):
            yield parts.storages(persid)


Lookup = Callable[[str], tuple[Data | None, int, int | None]]
"""Function from a key to (location of the bytes, their number, their CRC-32); the number is negative for a missing
key.
"""


class StorageTable(ABC):
    """The storages that references name, each created once, by `make`.

    Attributes:
        apart: key -> dtypes, for each key that references name under several dtypes (see `typed_apart`).
    """

    def __init__(self) -> None:
        self.apart: Mapping[str, tuple[str, ...]] = {}
        self._made: dict[str, Storage] = {}
        # Those that references name once more with another dtype or location.
        self._others: dict[tuple[str, str, str], Storage] = {}

    @abstractmethod
    def make(self, key: str, kind: str, location: str, nbytes: int) -> Storage:
        """Create the storage of `nbytes` bytes for the first reference to it. Raises BadTensor if it does not exist."""

    def __call__(self, persid: PersId) -> Storage:
        """Return the storage that `persid` refers to.

        Raises:
            BadTensor: it does not refer to a storage that can be created.
        """
        key, kind, location, numel = fields(persid)
        return self._of(key, kind, location, expected_bytes(kind, numel))

    def forget(self) -> None:
        """Free the storages; they are made again for the next references to them."""
        self._made.clear()
        self._others.clear()

    def alike(self, key: str, like: Storage) -> Storage:
        """Return the storage `key`, for a reference with the same fields as one to `like`.

        Raises BadTensor like a call.
        """
        return self._of(key, like.dtype, like.location, like.nbytes)

    def _of(self, key: str, kind: str, location: str, nbytes: int) -> Storage:
        if key in self.apart and location != "meta":
            both = " and as ".join(self.apart[key])
            raise BadTensor(f"storage {key} is declared as {both}, and torch.load uses the first for all tensors on it")
        made = self._made.get(key)
        if made is not None and (made.dtype != kind or made.location != location):
            made = self._others.get((key, kind, location))
        if made is None:
            made = self.make(key, kind, location, nbytes)
            if self._made.setdefault(key, made) is not made:
                self._others[key, kind, location] = made
        elif made.nbytes != nbytes:
            message = f"storage {key} has {made.nbytes} bytes, and a second reference to it states a different size"
            raise BadTensor(message)
        return made


class Storages(StorageTable):
    """The storages of a file: `place` returns the location of a key's bytes and their CRC-32.

    A storage on the meta device has no data. With `meta_has_bytes` the file must hold its bytes all the same. `sizes`
    returns the number of bytes of each key, if that is known without the location. `forget` frees what `place` keeps.
    `graph` is the pickle of the references; it is only needed for a pickle from which `build` makes no checkpoint.
    """

    def __init__(
        self,
        place: Lookup,
        *,
        meta_has_bytes: bool = False,
        sizes: Callable[[Sequence[str]], list[int]] | None = None,
        forget: Callable[[], None] | None = None,
        graph: Graph | None = None,
    ) -> None:
        super().__init__()
        if graph is not None:
            self.apart = typed_apart(graph)
        self.place = place
        self.meta_has_bytes = meta_has_bytes
        self.sizes = sizes or (lambda keys: [place(key)[1] for key in keys])
        self._forget_places = forget

    def forget(self) -> None:
        super().forget()
        if self._forget_places is not None:
            self._forget_places()

    def make(self, key: str, kind: str, location: str, nbytes: int) -> Storage:
        absent = location == "meta" and not self.meta_has_bytes
        try:
            data, found, crc32 = (None, nbytes, None) if absent else self.place(key)
        except CkptfixError as error:
            raise BadTensor(error.message) from None
        if found < 0:
            raise BadTensor(f"the file has no storage {key!r}")
        if found != nbytes:
            raise BadTensor(f"storage {key} has {found} bytes instead of {nbytes}")
        if location == "meta":
            data, crc32 = None, None
        return Storage(key, kind, nbytes, location, data, crc32)

    def all_there(self, graph: Graph) -> bool:
        """Return whether every storage in the file has exactly the size that the references to it state."""
        if self.apart:
            return False
        try:
            loose = [one for one in loose_references(graph) if not self._is_absent(one[2])]
            if self.sizes([key for key, *_ in loose]) != [expected_bytes(kind, numel) for _, kind, _, numel in loose]:
                return False
            if graph.phrases is None:
                return True
            keys, promised = folded_references(graph.phrases, self._is_absent)
            # A storage of an unknown class states no size.
            return all(nbytes in (None, found) for found, nbytes in zip(self.sizes(keys), promised, strict=True))
        except CkptfixError:
            return False

    def _is_absent(self, location: str) -> bool:
        """Return whether the file can lack the bytes of a storage at this location."""
        return location == "meta" and not self.meta_has_bytes


MAX_KEY = 1024
"""Most characters in a storage key: torch writes numbers, and the name of a zip record has at most 65,535 bytes."""


def expected_bytes(kind: str, numel: int) -> int:
    """Return the length in bytes of a storage of `numel` elements of the dtype `kind`."""
    return numel * dtypes.by_name(kind).itemsize


def fields(persid: PersId) -> tuple[str, str, str, int]:
    """Return (key, dtype, location, elements) of a storage reference.

    Raises:
        BadTensor: it is not a storage reference as torch writes them.
    """
    pid = persid.pid
    if type(pid) is not tuple or not 5 <= len(pid) <= 6 or pid[0] != "storage":
        raise BadTensor("a persistent id is not a storage reference")
    _, kind, key, location, numel = pid[:5]
    if type(key) is not Text or type(location) is not Text or type(numel) is not int or numel < 0:
        raise BadTensor("a storage reference has unusable fields")
    if "/" in key or "\\" in key or "\0" in key:
        raise BadTensor(f"a storage key is a path: {key!r}")
    if len(key) > MAX_KEY or not (key.isascii() or all(not "\ud800" <= char <= "\udfff" for char in key)):
        raise BadTensor("a storage key cannot be the name of a record")
    dtype = storage_dtype(kind)
    if numel * dtypes.by_name(dtype).itemsize >= 1 << 63 and location != "meta":
        raise BadTensor(f"a storage of {numel:#x} elements is over the limit of 2**63 bytes")
    return str(key), dtype, str(location), numel


def view_of(persid: PersId) -> Node:
    """Return the part of a storage that a reference views, (name, first, count); None for the whole storage.

    Only torch before 0.4 wrote views.
    """
    return persid.fields[5] if len(persid.fields) > 5 else None


def loose_references(graph: Graph) -> Iterator[tuple[str, str, str, int]]:
    """Yield the `fields` of every valid storage reference outside folded calls."""
    for persid in graph.loose_persids:
        with suppress(BadTensor):
            yield fields(persid)


def folded_references(
    phrases: Phrases | NewTensors, is_absent: Callable[[str], bool] = lambda location: False
) -> tuple[list[str], list[int | None]]:
    """Return the keys in folded calls, and the bytes that each reference states; None for an unknown storage class.

    Args:
        is_absent: return None also for a storage at a location for which this returns true.
    """
    nbytes: list[int | None] = []
    for mold in phrases.molds:
        nbytes.append(None)
        with suppress(BadTensor):
            if mold.numel >= 0 and not is_absent(mold.location):
                nbytes[-1] = expected_bytes(storage_dtype(mold.type), mold.numel)
    return phrases.storages(), list(map(nbytes.__getitem__, phrases.of))


def typed_apart(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the storages that references name under several dtypes: key -> these dtypes, in order.

    ``torch.save`` refuses to write one, and ``torch.load`` gives the first dtype that it meets to all tensors on it. An
    UntypedStorage counts as one of bytes, as it does in both functions: tensors on it state their own dtypes. Storages
    on the meta device have no data, and are not compared.
    """
    found: dict[str, dict[str, None]] = {}
    for key, kind, location, _ in loose_references(graph):
        if location != "meta":
            found.setdefault(key, {})[kind] = None
    if graph.phrases is not None:
        keys = graph.phrases.storages()
        # Nearly every storage has a single reference; then there is nothing to compare.
        if len({*found, *keys}) < len(found) + len(keys):
            kinds = [_kind(mold) for mold in graph.phrases.molds]
            for key, number in zip(keys, graph.phrases.of, strict=True):
                known = kinds[number]
                if known is not None:
                    found.setdefault(key, {})[known] = None
    return {key: tuple(kinds) for key, kinds in found.items() if len(kinds) > 1}


def _kind(mold: CallTemplate | NewTensorArguments) -> str | None:
    """Return the dtype of the storage class in folded calls; None if it is unknown, or the storage has no data."""
    with suppress(BadTensor):
        return None if mold.location == "meta" else storage_dtype(mold.type)
    return None


def promised_bytes(graph: Graph) -> int:
    """Return the total bytes of the storages that a pickle refers to, each counted once."""
    found: dict[str, int | None] = {key: expected_bytes(kind, numel) for key, kind, _, numel in loose_references(graph)}
    if graph.phrases is not None:
        keys, promised = folded_references(graph.phrases)
        if None not in promised and len({*found, *keys}) == len(found) + len(keys):
            return sum(filter(None, found.values())) + sum(filter(None, promised))
        found |= {key: nbytes for key, nbytes in zip(keys, promised, strict=True) if nbytes is not None}
    return sum(nbytes or 0 for nbytes in found.values())


def element_sizes(checkpoint: Checkpoint) -> dict[tuple[str, str], int]:
    """Return `Storage.identity` -> bytes of the unit whose byte order matters; a complex number is two such units.

    Raises:
        BadPickle: two tensors read one storage with different units.
    """
    sizes: dict[tuple[str, str], int] = {}
    for entry in with_parts(checkpoint.entries):
        if entry.storage is None:
            continue
        size = dtypes.by_name(entry.dtype).unit
        if sizes.setdefault(entry.storage.identity, size) != size:
            message = "a big-endian storage is read with two element sizes"
            raise BadPickle(message, path=checkpoint.path, where=entry.name)
    return sizes


def little_endian(data: Data, byteorder: ByteOrder, itemsize: int) -> Data:
    """Return `data` as little-endian elements of `itemsize` bytes."""
    return data if byteorder == "little" or itemsize == 1 else byteswapped(data, itemsize)

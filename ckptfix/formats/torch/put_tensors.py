"""Replacement of tensors in a torch pickle: patches for a new shape, and new calls for other bytes.

A new shape is a different size and stride tuple in the rebuild call of a contiguous tensor. A pickler writes a tuple
once, and fetches it from its memo wherever the same object occurs again. Each use is edited separately: if the tuple in
a memo entry changes, the other uses of the entry are written out unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import field
from itertools import count as numbers

from ckptfix.checkpoint import (
    ByteRange,
    Data,
    Put,
    Storage,
    TensorEntry,
    contiguous_stride,
    dtypes,
    refuse_unusable,
    same_bytes,
)
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.errors import NoSuchTensor, Unsupported
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.emit import reference, tensor_call
from ckptfix.formats.torch.object import TorchObject
from ckptfix.formats.torch.tensors import BadTensor, StorageOf, sizes, storage_entry, tensor_entry
from ckptfix.pickles import Call, Dict, Global, Graph, Patch, PersId
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.graph import Node, labels
from ckptfix.pickles.patch import PushedValue, int_opcode, items_pushed
from ckptfix.pickles.places import NodesByAddress
from ckptfix.pickles.reemit import Rewritten, reemit

_PLAIN = frozenset((op.BININT, op.BININT1, op.BININT2, op.LONG1, op.LONG4, op.INT, op.LONG, op.MARK)) | {
    *(op.TUPLE, op.TUPLE1, op.TUPLE2, op.TUPLE3, op.EMPTY_TUPLE),
}
"""Opcodes that push a tuple of sizes; such bytes can be repeated elsewhere."""

Lookup = Callable[[str], tuple[Data | None, int, int | None]]
"""Function from a key to (location of the bytes, their number, their CRC-32), as in `common`, which imports this
module.
"""


@dataclass(frozen=True, slots=True)
class _Use:
    """A tuple in the arguments of a rebuild call, as bytes of the stream, and the bytes that push the new tuple."""

    item: PushedValue
    new: bytes


Placed = dict[str, dict[str, Call | PersId]]
"""Address of a mapping -> key -> node of its tensors."""


def placed(found: TorchObject) -> Placed:
    """Group the tensors of an object by the address of their mapping."""
    rows: Placed = {}
    for at, key, node in found.tensors:
        rows.setdefault(at, {})[key] = node
    return rows


def current(tensors: Placed, storage_of: StorageOf, put: Put) -> dict[str, tuple[Call | PersId, TensorEntry]]:
    """Return key -> (node, entry) for the tensors that `put` replaces.

    Raises:
        NoSuchTensor: the mapping lacks a key.
    """
    here = {key: node for key, node in tensors.get(put.at, {}).items() if key in put.tensors}
    missing = put.tensors.keys() - here.keys()
    if missing:
        raise NoSuchTensor("no such tensor", where=join(put.at, min(missing)))
    rows: dict[str, tuple[Call | PersId, TensorEntry]] = {}
    for key, node in here.items():
        if type(node) is PersId:
            rows[key] = node, storage_entry(node, key, put.at, storage_of)
        else:
            rows[key] = node, tensor_entry(node, key, put.at, storage_of)
    return rows


def moves_no_bytes(tensors: Placed, storage_of: StorageOf, put: Put) -> bool:
    """Return whether `put` changes at most the shapes of its tensors. Raises like `current`."""
    here = current(tensors, storage_of, put)
    return all(
        type(here[key][0]) is Call and same_bytes(here[key][1], entry) for key, entry in put.tensors.items()
    )


def shape_patches(found: TorchObject, edit: Put) -> list[Patch]:
    """Return the patches that carry out `edit`, which moves no bytes (see `moves_no_bytes`).

    Raises:
        Unsupported: one tensor would get two shapes, or its shape is not stored next to its storage reference.
    """
    wanted: dict[int, tuple[int, ...]] = {}
    uses: list[_Use] = []
    for at, key, node in found.tensors:
        if at != edit.at or key not in edit.tensors:
            continue
        shape = edit.tensors[key].shape
        where = join(at, key)
        call, args = _dense_call(node, where)
        if wanted.setdefault(id(call), shape) != shape:
            raise Unsupported("the tensor has a second key, and would get two shapes", where=where)
        if shape != _old_shape(args, where):
            uses += _uses(found.graph.data, call, args, shape, where)
    return _patches(found, {use.item.start: use for use in uses}) if uses else []


@dataclass(slots=True)
class PutStorages:
    """References to the storages of put tensors: those of the file keep their keys, others get new ones.

    Attributes:
        legacy: references have the sixth field of a legacy file.
        place: returns the location of a storage of the file.
        new: key -> storage and bytes of its elements, for storages that the file lacks.
    """

    legacy: bool
    place: Lookup
    new: dict[str, tuple[Storage, int]] = field(default_factory=dict)
    _kinds: dict[str, set[str]] = field(default_factory=dict)
    _keys: dict[object, str] = field(default_factory=dict)

    def __call__(self, key: str) -> tuple[Data | None, int, int | None]:
        """Return the location of the storage `key`, old or new."""
        if key not in self.new:
            return self.place(key)
        made, _ = self.new[key]
        return made.data, made.nbytes, made.crc32

    def note(self, graph: Graph) -> None:
        """Record the keys and storage classes in the references of `graph`."""
        for persid in graph.persids:
            pid = persid.pid
            if type(pid) is tuple and len(pid) >= 5 and type(pid[1]) is Global:
                self._kinds.setdefault(str(pid[2]), set()).add(pid[1].name)

    def reference(self, kind: Global, storage: Storage, count: int, where: str) -> PersId:
        """Return a reference to `storage`, as `count` elements of the storage class `kind`."""
        row = dtypes.by_storage_class(kind.name)
        if row is not None and storage.nbytes % row.itemsize:
            raise Unsupported(f"a storage of {storage.nbytes} bytes holds a fraction of a {row.name}", where=where)
        return reference(kind, self._key(kind, storage, row), storage.location, count, legacy=self.legacy)

    def _key(self, kind: Global, storage: Storage, row: dtypes.Dtype | None) -> str:
        if self._kinds.get(storage.key) == {kind.name}:
            data, nbytes, _ = self(storage.key)
            on_meta = storage.location == "meta" and storage.nbytes == nbytes
            if data == storage.data or on_meta:
                return storage.key
        place = storage.data if isinstance(storage.data, ByteRange) else id(storage.data)
        same = (storage.key, place, kind.name)
        if same not in self._keys:
            key = next(key for key in map(str, numbers(len(self._kinds))) if self._unused(key))
            self._keys[same] = key
            self._kinds[key] = {kind.name}
            self.new[key] = storage, 1 if row is None else row.itemsize
        return self._keys[same]

    def _unused(self, key: str) -> bool:
        """Return whether neither the pickle nor the file has the storage `key`: an in-place edit leaves old ones."""
        return key not in self._kinds and self.place(key)[0] is None


def with_tensors(found: TorchObject, puts: Iterable[Put], storages: PutStorages) -> Rewritten:
    """Return the pickle of `found` with each tensor of `puts` in place of the one under its key.

    Attributes, hooks and the subclass of a replaced tensor are dropped.

    Raises:
        NoSuchTensor: no mapping or list is at the address, or it lacks the key.
        Unsupported: a tensor cannot be put; or as `reemit`.
    """
    storages.note(found.graph)
    node_at = NodesByAddress(found.graph.root, found.holders)
    replaced: dict[int, Node] = {}
    for put in puts:
        holder = node_at(put.at)
        # A mapping with several addresses gets the tensors for all of them.
        replaced[id(holder)] = _with(replaced.get(id(holder), holder), put, storages)
    return reemit(found.graph, replaced=replaced)


def _with(holder: Node, put: Put, storages: PutStorages) -> Node:
    """Return the mapping or list with the tensors of `put`."""
    calls_of: dict[str, Call] = {}
    for name, entry in put.tensors.items():
        where = join(put.at, name)
        refuse_unusable(entry, where)
        calls_of[name] = tensor_call(entry, storages)
    made = holder
    if isinstance(holder, (list, tuple)):
        parts = [calls_of.pop(str(index), node) for index, node in enumerate(holder)]
        made = tuple(parts) if isinstance(holder, tuple) else parts
    elif (type(holder) is Dict or type(holder) is Call) and holder.items:
        made = copy(holder)
        names = labels([key for key, _ in holder.items])
        made.items = [
            (key, calls_of.get(name, value)) for name, (key, value) in zip(names, holder.items, strict=True)
        ]
        for name in names:
            calls_of.pop(name, None)
    if calls_of:
        name = min(calls_of)
        message = "it cannot be replaced: it is not an item of a dict or list"
        raise Unsupported(message, where=join(put.at, name))
    return made


def _dense_call(node: Node, where: str) -> tuple[Call, tuple[Node, ...]]:
    """Return the call whose opcodes push the tensor, and the arguments, which begin with its storage."""
    for _ in range(16):
        if type(node) is not Call or type(node.args) is not tuple or not node.args:
            break
        row, args = calls.of(node.func), node.args
        if row is calls.FROM_TYPE and len(args) > 2:
            row, args = calls.of(args[0]), args[2] if type(args[2]) is tuple else ()
        if row is None:
            break
        if row.dense and len(args) >= 4 and type(args[0]) is PersId:
            return node, args
        if row.kind != "parameter" or not args:
            break
        node = args[0]
    raise Unsupported("only a dense tensor can get a new shape", where=where)


def _old_shape(args: tuple[Node, ...], where: str) -> tuple[int, ...]:
    try:
        shape, stride = sizes(args[2]), sizes(args[3])
    except BadTensor as error:
        raise Unsupported(str(error), where=where) from None
    if len(shape) != len(stride):
        raise Unsupported("its shape and its stride differ in length", where=where)
    return shape


def _uses(data: bytes, call: Call, args: tuple[Node, ...], shape: tuple[int, ...], where: str) -> list[_Use]:
    """Return the size and the stride in the arguments of `call`, with the bytes that push the new ones."""
    persid = args[0]
    assert type(persid) is PersId
    try:
        # The storage is followed by offset, size and stride, then by requires_grad, or by the tuple of the arguments.
        first, *after = op.walk(data, persid.position, call.position)
        stop = next((opcode.start for opcode in after if _is_bool(data, opcode)), 0)
        stop = stop or [opcode.start for opcode in after if opcode.code not in op.PUTS][-1]
        _, size, stride = items_pushed(data, first.end, stop)
    except (ValueError, IndexError, Unsupported):
        raise Unsupported("its shape is not stored next to its storage reference", where=where) from None
    return [_Use(size, _pushed(shape)), _Use(stride, _pushed(contiguous_stride(shape)))]


def _is_bool(data: bytes, opcode: op.Op) -> bool:
    if opcode.code == op.INT:  # protocols before 2 push a bool this way
        return data[opcode.arg : opcode.end] in (b"00\n", b"01\n")
    return opcode.code in (op.NEWTRUE, op.NEWFALSE)


def _pushed(values: tuple[int, ...]) -> bytes:
    """Return the opcodes that push a tuple of sizes, without a PUT."""
    items = b"".join(map(int_opcode, values))
    short = (bytes((op.EMPTY_TUPLE,)), bytes((op.TUPLE1,)), bytes((op.TUPLE2,)), bytes((op.TUPLE3,)))
    if len(values) < len(short):
        return items + short[len(values)]
    return bytes((op.MARK,)) + items + bytes((op.TUPLE,))


def _patches(found: TorchObject, uses: dict[int, _Use]) -> list[Patch]:
    """Return patches for `uses`, and for every other use of a memo entry whose tuple changes."""
    graph = found.graph
    data = graph.data
    patches = []
    stored: dict[int, bytes] = {}
    for use in uses.values():
        item = use.item
        last = next(op.walk(data, item.last, item.end))
        if data[item.start : last.end] == use.new:
            continue
        patches.append(Patch(item.start, last.end, use.new))
        if last.end < item.end:
            if last.code in op.GETS:
                raise Unsupported("a size tuple is fetched from the memo and stored again", offset=item.start)
            stored.update((put.start, data[item.start : last.end]) for put in op.walk(data, last.end, item.end))
    if not stored:
        return patches
    owner: dict[int, int] = {}
    for opcode in op.walk(data, graph.start, graph.end):
        if opcode.code in op.PUTS:
            owner[len(owner) if opcode.code == op.MEMOIZE else _index(data, opcode)] = opcode.start
        elif opcode.code in op.GETS and opcode.start not in uses:
            old = stored.get(owner.get(_index(data, opcode), -1))
            if old is not None:
                patches.append(Patch(opcode.start, opcode.end, _plain(old, opcode.start)))
    return patches


def _index(data: bytes, opcode: op.Op) -> int:
    """Return the memo index of a GET or PUT opcode."""
    argument = data[opcode.arg : opcode.end]
    return int(argument) if opcode.code in (op.GET, op.PUT) else int.from_bytes(argument, "little")


def _plain(pushing: bytes, offset: int) -> bytes:
    """Return `pushing`, after a check that it only pushes numbers and makes a tuple of them."""
    if any(opcode.code not in _PLAIN for opcode in op.walk(pushing, 0, len(pushing))):
        raise Unsupported("its shape is shared and is not a tuple of plain integers", offset=offset)
    return pushing

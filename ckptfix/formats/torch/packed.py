"""The bytes of each storage that the tensors of a torch checkpoint use, and references that reach only these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Plan, contiguous_stride, dtypes, is_contiguous
from ckptfix.checkpoint.tensors import reach
from ckptfix.dataclass import dataclass
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.common import Storages, fields, pickled_object
from ckptfix.formats.torch.emit import reference
from ckptfix.formats.torch.rewrite import NewStorage, plan_rewrite
from ckptfix.formats.torch.tensors import BadTensor, dtype_name, sizes, viewed
from ckptfix.io.derived import gathered
from ckptfix.pickles import Call, Dict, Global, PersId, Set
from ckptfix.pickles.graph import Node
from ckptfix.pickles.reemit import every_node, reemit


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of a storage.

    Attributes:
        args: the tuple that begins with storage, offset, size and stride.
        itemsize, shape, stride: layout of its elements.
        first: offset of its first byte in the storage; `end` is the offset after its last byte.
    """

    args: tuple[Node, ...]
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    end: int

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.itemsize

    @property
    def place(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        return self.first, self.itemsize, self.shape, self.stride


@dataclass(slots=True)
class Used:
    """A storage of the file and its references; `whole` if something other than a dense tensor refers to it."""

    key: str
    kind: Global
    location: str
    itemsize: int
    data: Data
    crc32: int | None
    views: list[View] = field(default_factory=list)
    references: list[PersId] = field(default_factory=list)
    whole: bool = False


@dataclass(slots=True)
class PackedStorage:
    """A storage of the output: its views, moved down by `start` bytes, or a single `contiguous` tensor."""

    key: str
    used: Used
    data: Data
    crc32: int | None
    start: int
    views: list[View]
    contiguous: bool = False


def find_used(checkpoint: Checkpoint, gone: Iterable[int] = ()) -> dict[str, Used]:
    """Find the storages that the object of a torch checkpoint refers to, by key; meta tensors have no storage.

    Args:
        gone: identities of values that do not count, nor do those in them alone.

    Raises:
        BadTensor: a reference is malformed.
    """
    parts = pickled_object(checkpoint)
    root, storages = parts.graph.root, parts.storages
    found: dict[str, Used] = {}
    without = frozenset(gone)
    for node in nodes_left(root, without):
        if type(node) is PersId:
            _note_reference(found, node, storages)
    dense: dict[int, tuple[Node, ...]] = {}
    for node in nodes_left(root, without):
        if type(node) is Call:
            for args in _dense_args(node):
                dense[id(args)] = args
                _note_view(found, node, args, storages)
    for node in nodes_left(root, without):
        for part in _parts(node):
            if type(part) is PersId and not (id(node) in dense and part is dense[id(node)][0]):
                used = _of(found, part)
                if used is not None:
                    used.whole = True
    return found


def nodes_left(root: Node, gone: frozenset[int]) -> Iterable[Node]:
    """Yield every node that can be reached without those in `gone`, once."""
    if not gone:
        yield from every_node(root)
        return
    seen: set[int] = set(gone)
    stack = [root]
    while stack:
        node = stack.pop()
        if type(node) not in (tuple, list, Dict, Set, Call, PersId) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        stack += _parts(node)


def _parts(node: Node) -> list[Node]:
    if type(node) is Call:
        held = [node.func, node.args, node.kwargs, node.state, node.elements]
        return held + [part for pair in node.items or () for part in pair]
    if type(node) is Dict:
        return [part for pair in node.items for part in pair]
    if type(node) is Set:
        return list(node.elements)
    if type(node) is PersId:
        return [node.pid]
    return list(node) if isinstance(node, (tuple, list)) else []


def _note_reference(found: dict[str, Used], node: PersId, storages: Storages) -> None:
    if node.fields[:1] == ("module",):
        return
    key, kind, location, _ = fields(node)
    cls = node.fields[1]
    assert type(cls) is Global
    storage = storages(node)
    if location == "meta":
        return
    assert storage.data is not None
    used = found.get(key)
    if used is None:
        itemsize = dtypes.by_name(kind).itemsize
        used = found[key] = Used(key, cls, location, itemsize, storage.data, storage.crc32)
    if (used.kind.name, used.location) != (cls.name, location) or not isinstance(used.data, ByteRange):
        used.whole = True
    used.references.append(node)


def _of(found: Mapping[str, Used], node: PersId) -> Used | None:
    pid = node.pid
    return found.get(str(pid[2])) if type(pid) is tuple and len(pid) > 2 else None


def _dense_args(node: Call) -> list[tuple[Node, ...]]:
    """Return the argument tuples of dense tensors in a call: its own, those it passes on, or an old tensor's state."""
    if type(node.func) is not Global:
        return []
    row = calls.of(node.func)
    if row is calls.FROM_TYPE and type(node.args) is tuple and len(node.args) > 2:
        row = calls.of(node.args[0])
        candidates = [node.args[2]] if row is not None and row.on_storage else []
    elif row is not None and row.on_storage:
        candidates = [node.args]
    else:
        candidates = [node.state] if node.func.name.endswith("Tensor") else []
    return [args for args in candidates if type(args) is tuple and len(args) >= 4 and type(args[0]) is PersId]


def _note_view(found: Mapping[str, Used], node: Call, args: tuple[Node, ...], storages: Storages) -> None:
    persid = args[0]
    used = _of(found, persid) if type(persid) is PersId else None
    if used is None or type(persid) is not PersId:
        return
    call = calls.of(node.func)
    call = calls.of(node.arguments[0]) if call is calls.FROM_TYPE else call
    row = dtypes.by_storage_class(used.kind.name)
    if call is not None and call.dtype is not None and len(args) > call.dtype:
        row = dtypes.find(dtype_name(args[call.dtype]))
    shape, stride = sizes(args[2]), sizes(args[3])
    if row is None or row.per_item != 1 or type(args[1]) is not int or len(shape) != len(stride):
        used.whole = True
        return
    if args[1] < 0:
        raise BadTensor("a negative storage offset")
    base, _ = viewed(persid, storages(persid))
    first = args[1] * row.itemsize + base * used.itemsize
    elements = 0 if 0 in shape else reach(shape, stride)
    if elements and first + elements * row.itemsize > used.data.length:
        raise BadTensor(f"needs {first + elements * row.itemsize} bytes of storage {used.key}, not {used.data.length}")
    used.views.append(View(args, row.itemsize, shape, stride, first, first + elements * row.itemsize))


def units_of(used: Used, new_key: Callable[[], str], *, contiguous: bool = False) -> list[PackedStorage]:
    """Return storages that hold only the bytes that the views of `used` reach; the unchanged one if that saves nothing.

    Views that touch or overlap stay on one storage.

    Args:
        new_key: returns a storage key that the file does not have.
        contiguous: make a strided view with gaps contiguous if it is alone on its part of a storage.
    """
    nbytes = used.data.length
    whole = [PackedStorage(used.key, used, used.data, used.crc32, 0, used.views)]
    if used.whole or not used.views or not isinstance(used.data, ByteRange):
        return whole
    runs: list[tuple[int, int, list[View]]] = []
    for view in sorted(used.views, key=lambda view: (view.first, view.end)):
        unit = max(view.itemsize, used.itemsize)
        start, end = view.first // unit * unit, min(-(-view.end // unit) * unit, nbytes)
        if view.first == view.end:
            start = end = min(start, nbytes)
        if runs and start <= runs[-1][1] and (end > start or start < runs[-1][1]):
            first, before, views = runs[-1]
            views.append(view)
            runs[-1] = (first, max(before, end), views)
        else:
            runs.append((start, end, [view]))
    made: list[PackedStorage] = []
    for start, end, views in runs:
        key = used.key if not made else new_key()
        part = used.data.sub(start, end - start)
        data: Data = part
        crc32 = used.crc32 if end - start == nbytes else None
        gather = contiguous and len({view.place for view in views}) == 1 and _has_gaps(views[0])
        if gather:
            view = views[0]
            itemsize = view.itemsize
            offset = (view.first - start) // itemsize
            data, crc32 = gathered(part, itemsize, view.shape, view.stride, offset), None
        made.append(PackedStorage(key, used, data, crc32, start, views, gather))
    saved = nbytes - sum(unit.data.length for unit in made)
    return made if saved > 0 else whole


def _has_gaps(view: View) -> bool:
    """Return whether a strided view reaches each of its elements once, and leaves gaps between them."""
    if is_contiguous(view.shape, view.stride) or view.nbytes >= view.end - view.first or not view.nbytes:
        return False
    reach = 1
    for step, size in sorted((step, size) for step, size in zip(view.stride, view.shape, strict=True) if size > 1):
        if step < reach:
            return False
        reach += (size - 1) * step
    return True


def references(units: Iterable[PackedStorage], same: Mapping[str, str], legacy: bool) -> dict[int, Node]:
    """Map the ``id`` of argument tuples and references that change to the nodes that replace them.

    Args:
        same: key of a unit -> key of the unit with the same bytes that replaces it.
    """
    replaced: dict[int, Node] = {}
    for unit in units:
        used = unit.used
        key = same.get(unit.key, unit.key)
        as_it_was = unit.key == used.key and unit.data is used.data
        if as_it_was and key == unit.key:
            continue
        if as_it_was:
            for node in used.references:
                replaced[id(node)] = PersId((*node.fields[:2], key, *node.fields[3:]), node.position, -1)
            continue
        count = unit.data.length // used.itemsize
        shared = reference(used.kind, key, used.location, count, legacy=legacy)
        for view in unit.views:
            offset = 0 if unit.contiguous else (view.first - unit.start) // view.itemsize
            stride = contiguous_stride(view.shape) if unit.contiguous else view.args[3]
            replaced[id(view.args)] = (shared, offset, view.args[2], stride, *view.args[4:])
    return replaced


def plan_with(
    checkpoint: Checkpoint,
    dest: str,
    units: Sequence[PackedStorage],
    same: Mapping[str, str],
    gone: Iterable[int],
    *,
    legacy: bool,
) -> Plan:
    """Plan a file at `dest` with the object of a checkpoint on other storages, `units`.

    Args:
        same: as for `references`.
        gone: identities of values that are left out.
        legacy: the references are those of a legacy file.

    Raises:
        Unsupported: the object cannot be written again with its meaning kept.
        DamagedFile: the file lacks a storage.
    """
    graph = pickled_object(checkpoint).graph
    rewritten = reemit(graph, gone=frozenset(gone), replaced=references(units, same, legacy))
    storages = {unit.key: NewStorage(unit.data, unit.used.itemsize, unit.crc32) for unit in units}
    return plan_rewrite(checkpoint, rewritten, dest, storages)

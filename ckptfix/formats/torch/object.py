"""The object in a torch checkpoint, and the locations of its tensors, names and plain values.

One walk over the inert graph, with a stack and a set of visited nodes, in the order in which the mappings
were saved. Addresses are the keys on the way, joined by slashes: ``optimizer/state/0/exp_avg``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import Any, NamedTuple, TypeGuard

from ckptfix.checkpoint import NameList, SiteKind, StateDict, Storage, TensorEntry
from ckptfix.checkpoint.address import join, keys_of, numbered
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadPickle, about
from ckptfix.findings import table
from ckptfix.findings.row import Finding
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.attributes import tensor_state
from ckptfix.formats.torch.call_classes import encoded_bytes, is_tensor_class
from ckptfix.formats.torch.state import apart
from ckptfix.formats.torch.tensors import StorageOf, is_tensor, tensor_entry
from ckptfix.names import kinds
from ckptfix.pickles import Call, Dict, Global, Graph, PersId, Set, Text, parse
from ckptfix.pickles.folded import Alone, Phrases
from ckptfix.pickles.graph import (
    Node,
    attributes,
    children_with,
    is_attributes_of,
    is_known_mapping,
    is_only_metadata,
    is_versions,
    label,
    pairs,
    payload_of,
)
from ckptfix.pickles.new_tensors import NewTensorArguments
from ckptfix.pickles.rows import Rows, rows_of

StorageLike = Callable[[str, Storage], Storage]
"""Function from a key and a storage to the storage of that key, if its reference has the fields of the given one's."""


@dataclass(slots=True)
class NodeSite:
    """A NameSite and the uses of its strings, in the same order: nodes, or keys that are not nodes yet."""

    at: str
    kind: SiteKind
    keys: list[Text] | Rows

    @property
    def nodes(self) -> list[Text]:
        """The uses that are already nodes."""
        return self.keys.nodes() if isinstance(self.keys, Rows) else self.keys

    def noun(self) -> NameList:
        """Return the NameSite, which does not depend on the format."""
        names = self.keys.names() if isinstance(self.keys, Rows) else tuple(map(str, self.keys))
        return NameList(self.at, self.kind, names)


class TensorNodes:
    """(address of the mapping, key, node) of each tensor, in order; nodes of those in `Rows` are created on request."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, Rows] | list[tuple[str, str, Call | PersId]]] = []

    def add(self, tensors: list[tuple[str, str, Call | PersId]]) -> None:
        """Append tensors that are nodes."""
        if not tensors:
            return
        if self._parts and isinstance(self._parts[-1], list):
            self._parts[-1] += tensors
        else:
            self._parts.append(tensors)

    def add_rows(self, at: str, rows: Rows) -> None:
        """Append the tensors of the mapping at `at` whose values are not nodes yet."""
        self._parts.append((at, rows))

    def __len__(self) -> int:
        return sum(len(part) if isinstance(part, list) else len(part[1]) for part in self._parts)

    def __iter__(self) -> Iterator[tuple[str, str, Call | PersId]]:
        for part in self._parts:
            if isinstance(part, list):
                yield from part
            else:
                at, rows = part
                # `_note_rows` accepts only values that are calls.
                yield from ((at, name, node) for name, node in zip(rows.names(), rows.values(), strict=True))  # type: ignore[misc]

    def unmade(self) -> Iterator[tuple[str, str, Node | Alone]]:
        """Yield the same tensors, without creating nodes for those in `Rows`."""
        for part in self._parts:
            if isinstance(part, list):
                yield from part
            else:
                at, rows = part
                yield from ((at, name, made) for name, made in zip(rows.names(), rows.unmade(), strict=True))

    def any_other_than_plain(self, or_named: Callable[[str], bool]) -> bool:
        """Return whether a tensor is more than a folded call, or has a key that `or_named` accepts; no node is made."""
        return any(
            or_named(key) or not (isinstance(made, Alone) or _is_alone(made)) for _, key, made in self.unmade()
        )


@dataclass(slots=True)
class TorchObject:
    """The results of the walk.

    Attributes:
        tensors: (address of the mapping, key, node) of every tensor and free-standing storage, in order.
        values: (address, node) of every other leaf.
        metadata: address of a state dict -> the mapping node of its ``_metadata``.
        odd_keys: address of a state dict -> the keys of its tensors that are not names: neither text nor a whole
            number (bytes, tuples), or a number with the same text as another key (1 and "1").
    """

    graph: Graph
    tensors: TensorNodes = field(default_factory=TensorNodes)
    values: list[tuple[str, Node]] = field(default_factory=list)
    sites: list[NodeSite] = field(default_factory=list)
    state_dicts: list[StateDict] = field(default_factory=list)
    metadata: dict[str, Node] = field(default_factory=dict)
    odd_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    holders: dict[str, Node] = field(default_factory=dict)

    def hold(self, address: str, node: Node) -> str:
        """Register the address of `node` for its parts, and return it: `address`, or a numbered form if that is in use.

        For example, 'a/b' and 'b' in 'a' have the same address, and so may an empty key. Every mapping needs its own.
        """
        own, number = address, len(self.holders)
        while str(own) in self.holders:
            own = numbered(address, number)
            number += 1
        self.holders[str(own)] = node
        return own

    def entries(self, storage_of: StorageOf, alike: StorageLike) -> tuple[list[TensorEntry], list[Finding]]:
        """Return the entries of all tensors, and a finding for each call that does not describe a tensor."""
        entries = []
        findings = []
        firsts: dict[object, TensorEntry] = {}
        for at, key, made in self.tensors.unmade():
            try:
                if type(made) is Call and type(made.folded) is NewTensorArguments and _is_alone(made):
                    entries.append(_new_entry(made, key, at, storage_of, alike, firsts))
                    continue
                if type(made) is Call and type(made.folded) is Phrases and _is_alone(made):
                    made = made.folded.alone(made)
                if not isinstance(made, Alone):
                    entries.append(tensor_entry(made, key, at, storage_of))
                    continue
                first = firsts.get(made.mold.place)
                if first is None or first.storage is None:
                    entries.append(tensor_entry(made.phrases.call(made.row), key, at, storage_of))
                    firsts[made.mold.place] = entries[-1]
                    continue
                held = alike(made.storage, first.storage)
                # Each entry gets its own tuples: a tuple that two tensors share would be written as shared.
                layout = (*first.shape,), (*first.stride,), first.offset
                entries.append(TensorEntry(key, at, held, first.dtype, *layout, first.requires_grad))
            except (ValueError, OverflowError) as error:
                where = join(at, key)
                findings.append(table.found("bad-tensor", str(error), where=where))
        return entries, findings

    def plain_values(self) -> Iterator[tuple[str, Any]]:
        """Yield every leaf that is not a tensor, as (address, plain value)."""
        for at, node in self.values:
            kind = type(node)
            if kind is Text:
                yield at, str(node)
            elif kind in _SIMPLE:
                yield at, node
            else:
                yield at, _plain(node)

    def unread(self, at: str) -> list[str]:
        """Return the addresses, in the mapping at `at`, of calls that create a tensor from a list or from sizes."""
        calls = (name for name, node in self.values if type(node) is Call and is_tensor_class(node.func))
        own = keys_of(at)
        return [name for name in calls if keys_of(name)[:-1] == own]

    def module_metadata(self, at: str) -> dict[str, dict[str, Any]] | None:
        """Return the ``_metadata`` of the state dict at `at`: module path -> the version entries of the module."""
        from ckptfix.checkpoint.plain_values import versions_of
        from ckptfix.formats.torch.tree import value_of

        return versions_of(value_of(self.metadata.get(at)))


def _new_entry(
    call: Call, key: str, at: str, storage_of: StorageOf, alike: StorageLike, firsts: dict[object, TensorEntry]
) -> TensorEntry:
    """Return the entry of a tensor in an object that no stream holds; `firsts` has the first entry of each layout."""
    made = call.folded
    assert type(made) is NewTensorArguments
    kind = made.type.name, made.location, made.numel, made.offset, made.shape, made.stride
    first = firsts.get(kind)
    if first is None or first.storage is None:
        firsts[kind] = entry = tensor_entry(call, key, at, storage_of)
        return entry
    held = alike(made.key, first.storage)
    return TensorEntry(key, at, held, first.dtype, made.shape, made.stride, made.offset, made.requires_grad)


def object_of_pickle(pickle: bytes, path: str, where: str) -> TorchObject:
    """Return the object of a pickle; inside `reads_equal_once`, the last one if it is that of the same bytes.

    Raises:
        BadPickle: no unpickler accepts it.
    """
    last = _last.get()
    if last and last[0].graph.data == pickle:
        return last[0]
    if last is not None:
        last.clear()  # before another one takes memory
    made = object_of(parse(pickle, path=path, where=where), path)
    if last is not None:
        last.append(made)
    return made


def object_of(graph: Graph, path: str) -> TorchObject:
    """Return the object of a graph of the file `path`. Raises like `walk`."""
    with about(path, always=True):
        return walk(graph)


_last: ContextVar[list[TorchObject] | None] = ContextVar("the last object", default=None)


@contextmanager
def reads_equal_once() -> Iterator[None]:
    """Read equal pickles only once inside; decorate a function that reads a file in several ways, or its copy."""
    if _last.get() is not None:
        yield
        return
    token = _last.set([])
    try:
        yield
    finally:
        _last.reset(token)


MAX_ADDRESS = 1024
"""Most characters in an address: every name below repeats it, and no program writes longer ones."""


def walk(graph: Graph) -> TorchObject:
    """Find all tensors, names and values in the object of `graph`.

    Raises:
        BadPickle: an operation occurs in no torch pickle, such as items set on a tensor.
    """
    found = TorchObject(graph)
    visited: set[int] = set()
    stack: list[tuple[str, str, Node, _Of]] = [("", "", graph.root, _Of())]
    while stack:
        at, key, node, of = stack.pop()
        if is_tensor(node) or _is_storage(node):
            if type(node) is Call and (node.items or node.elements):
                # An unpickler would write into the tensor, or beyond it (CVE-2026-24747).
                raise BadPickle("items are set on a tensor", where="data.pkl", offset=node.position)
            found.tensors.add([(at, key, node)])
            if (attributes_of := tensor_state(node)) is not None and id(node) not in visited:
                visited.add(id(node))
                address = found.hold(join(at, key) if node is not graph.root or key else "", node)
                inner = of._replace(payload=True)
                stack += [(address, name, value, inner) for name, value in reversed(attributes_of)]
            continue
        address = join(at, key) if node is not graph.root or key else ""
        if (literal := encoded_bytes(node)) is not None:
            found.values.append((address, literal))
            continue
        if not _is_container(node) or (isinstance(node, (tuple, list)) and not any(map(_is_container, node))):
            # A tuple of plain values is one value: picklers share equal tuples, so that sharing has no meaning here.
            found.values.append((address, node))
            continue
        if id(node) in visited:
            found.values.append((address, f"<same object as before: {_described(node)}>"))
            continue
        visited.add(id(node))
        address = found.hold(address, node)
        if len(address) > MAX_ADDRESS:
            message = "nested too deeply, or under too long a key: its contents are not listed"
            found.findings.append(table.found("too-deep", message, where=address[:80] + "..."))
            continue
        if _note_rows(found, address, node, of):
            continue
        mapping = pairs(node)
        if mapping is None and type(node) is Call:
            found.values.append((address, node))
        if mapping is not None:
            if not of.optimizer and _is_optimizer(mapping):
                of = of._replace(optimizer=True)
            _note_mapping(found, address, node, mapping, of)
        if of.attributes:
            of = of._replace(attributes=False)
        named = apart([row for row in children_with(node, mapping) if row[0] != "_metadata" or not is_versions(row[1])])
        if not named and type(node) is not Call:
            found.values.append((address, node))
        first = next((index for index, (_, child) in enumerate(named) if not _is_alone(child)), len(named))
        found.tensors.add([(address, name, child) for name, child in named[:first]])  # type: ignore[misc]
        own = payload_of(node)
        stack += [(address, name, child, _owner(of, node, child, own)) for name, child in reversed(named[first:])]
    return found


_CONTAINERS = frozenset((tuple, list, Dict, Call, Set, PersId))


def _is_container(node: Node) -> bool:
    """Return whether `node` holds other nodes."""
    return type(node) in _CONTAINERS


_SIMPLE = frozenset((bool, float, bytes, type(None)))
"""Types of nodes that are plain values; text and long ints are not."""


def _plain(node: Node) -> Any:
    # Imported where a value needs it: the values of most files are text and numbers.
    if type(node) is int and node.bit_length() < 64:
        return node
    from ckptfix.checkpoint.plain_values import plain
    from ckptfix.formats.torch.tree import value_of

    return plain(value_of(node))


def _described(node: Node) -> str:
    from ckptfix.checkpoint.plain_values import described
    from ckptfix.formats.torch.tree import value_of

    return described(value_of(node))


class _Of(NamedTuple):
    """The owner of a node.

    Attributes:
        optimizer: the node belongs to an optimizer's state.
        payload: it belongs to the data from which a class builds an object.
        attributes: it is itself the ``__dict__`` of an object.
    """

    optimizer: bool = False
    payload: bool = False
    attributes: bool = False


def _owner(of: _Of, node: Node, child: Node, own: Collection[int]) -> _Of:
    """Return the owner of `child`, a child of `node`: the owner of `node` is `of`, and its `payload_of` is `own`."""
    if id(child) in own:
        return of._replace(payload=True)
    return of._replace(attributes=True) if is_attributes_of(node, child) else of


def _is_alone(node: Node) -> bool:
    """Return whether this is a tensor without attributes or parts, like most: nothing is below it."""
    return (
        type(node) is Call
        and node.folded is not None
        and node.items is node.elements is node.state is None
    )  # fmt: skip


def _is_bare(node: Node) -> bool:
    """Return whether this is a tensor on which no attributes and no items were set."""
    if not is_tensor(node) or node.items or node.elements:
        return False
    return _is_alone(node) or tensor_state(node) is None


def _is_storage(node: Node) -> TypeGuard[PersId]:
    return type(node) is PersId and len(node.fields) >= 5 and node.fields[0] == "storage"


def _is_optimizer(mapping: list[tuple[Node, Node]]) -> bool:
    return kinds.is_optimizer([key for key, _ in mapping if isinstance(key, str)])


def _note_mapping(
    found: TorchObject, at: str, node: Node, mapping: list[tuple[Node, Node]], of: _Of
) -> None:
    """Record the names in `mapping`: a state dict, its metadata, an optimizer's references."""
    named = [key for key, value in mapping if is_tensor(value)]
    tensors = len(named)
    uses = [key for key, _ in mapping if type(key) is Text]
    if tensors and uses:
        nested = tensors < len(mapping) and any(pairs(value) is not None for _, value in mapping)
        if odd := _odd_keys(named, mapping):
            found.odd_keys[at] = odd
        metadata = _metadata_of(node)
        optimizer = of.optimizer or kinds.is_flat_optimizer([str(key) for key in named if isinstance(key, str)])
        weights = metadata is not None or _looks_like_weights(named, mapping, at, nested=nested)
        own = of if optimizer == of.optimizer else of._replace(optimizer=optimizer)
        found.state_dicts.append(_state_dict(at, node, tensors, len(mapping) - tensors, own, weights))
        found.sites.append(NodeSite(at, "state_dict", _key_uses(node)))
        if metadata is not None:
            found.metadata[at] = metadata
            found.sites.append(NodeSite(at, "metadata", _key_uses(metadata)))
    elif uses and not _is_payload(node, of) and kinds.is_flat_optimizer(list(map(str, uses))):
        # Of SGD without momentum there are options alone.
        found.sites.append(NodeSite(at, "optimizer_state", _key_uses(node)))
    if of.optimizer and not _is_payload(node, of):
        parts = {key: value for key, value in mapping if isinstance(key, str)}
        if kinds.OPTIMIZER <= parts.keys():
            _note_optimizer(found, at, parts)


def _is_payload(node: Node, of: _Of) -> bool:
    """Return whether only a class knows the meaning of the keys of the mapping `node`."""
    return of.payload or of.attributes or not is_known_mapping(node)


def _state_dict(at: str, node: Node, tensors: int, extra: int, of: _Of, weights: bool) -> StateDict:
    """Return the state dict at `at`. An object of an unknown class of mappings may hold weights, unlike its parts."""
    weights = weights and not (of.optimizer or of.payload or of.attributes)
    return StateDict(at, tensors, extra, of.optimizer, weights, _is_payload(node, of))


def _note_rows(found: TorchObject, at: str, node: Node, of: _Of) -> bool:
    """Record a state dict whose tensors are not nodes yet, and return True; return False for any other node.

    Each of its tensors has no attributes or parts, so nothing is below them.
    """
    rows = rows_of(node)
    if rows is None or not all(type(key) is Text and _is_bare(value) for key, value in rows.others()):
        return False
    if type(node) is Call and (node.args != () or node.kwargs or node.elements or not is_only_metadata(node.state)):
        return False
    names = rows.names()
    if len(set(names)) < len(names) or {"state", "param_groups"} <= set(names):
        return False
    metadata = _metadata_of(node)
    weights = metadata is not None or _looks_like_weights(names, rows, at)
    own = of._replace(optimizer=of.optimizer or kinds.is_optimizer(names))
    found.state_dicts.append(_state_dict(at, node, len(names), 0, own, weights))
    found.sites.append(NodeSite(at, "state_dict", rows))
    if metadata is not None:
        found.metadata[at] = metadata
        found.sites.append(NodeSite(at, "metadata", _key_uses(metadata)))
    found.tensors.add_rows(at, rows)
    return True


def _odd_keys(named: list[Node], mapping: list[tuple[Node, Node]]) -> tuple[str, ...]:
    """Return the keys of tensors, as they are listed, whose text is not a name of its own."""
    keys = [key for key in named if not isinstance(key, str)]
    if not keys:
        return ()
    texts = {str(key) for key, _ in mapping if isinstance(key, str)}
    return tuple(label(key) for key in keys if type(key) is not int or str(key) in texts)


def _key_uses(node: Node) -> list[Text]:
    """Return every use of a string key of a mapping node, repeated keys included."""
    items = node.items if type(node) is Dict or type(node) is Call else None
    return [key for key, _ in items or pairs(node) or () if type(key) is Text]


def _metadata_of(node: Node) -> Node:
    for key, value in pairs(node.state) or () if type(node) is Call else ():
        if key == "_metadata" and pairs(value):
            return value
    return None


def _looks_like_weights(
    named: Sequence[Node], mapping: Rows | list[tuple[Node, Node]], at: str, *, nested: bool = False
) -> bool:
    """Return whether tensors with these keys are a model's weights.

    They are if the keys are dotted names or names of a single layer, or if all values are numeric tensors.

    Scalars in an inner mapping, under names that are not those of parameters, are a trainer's statistics: a callback's
    ``best_model_score``, losses.

    Args:
        nested: the mapping also holds other mappings, like a trainer's.
    """
    if nested:
        shaped = [str(key) for key in named if isinstance(key, str)]
        scalars = {str(key) for key, value in mapping if is_tensor(value) and _is_scalar(value)}
        return kinds.are_parameters([name for name in shaped if name not in scalars])
    if at and not any(
        type(key) is Text
        and is_tensor(value)
        and (not _is_scalar(value) or kinds.PATH_OF_PARAMETER.fullmatch(str(key)))
        for key, value in mapping
    ):
        return False
    names = [key for key in named if isinstance(key, str)]
    if any("." in name or name in kinds.LEAVES for name in names):
        return True
    return len(names) == len(mapping) and any(_is_number(value) for _, value in mapping)


def _is_scalar(node: Node) -> bool:
    """Return whether a tensor has no dimensions; parameters are calls around their tensors."""
    while type(node) is Call and type(node.args) is tuple and node.args and is_tensor(node.args[0]):
        node = node.args[0]
    return type(node) is Call and type(node.args) is tuple and len(node.args) > 2 and node.args[2] == ()


def _is_number(node: Node) -> bool:
    """Return whether the dtype of a tensor is not uint8, the dtype of random generator states."""
    while type(node) is Call and type(node.args) is tuple and node.args:
        node = node.args[0]
    kinds = node.pid[1:2] if type(node) is PersId and type(node.pid) is tuple else ()
    return not any(getattr(kind, "name", "") == "ByteStorage" for kind in kinds)


def _note_optimizer(found: TorchObject, at: str, parts: dict[str, Node]) -> None:
    """Record the places where an optimizer's state refers to parameters by name."""
    prefix = f"{at}/" if at else ""
    state = parts["state"]
    named = [key for key, value in pairs(state) or () if type(key) is Text and pairs(value) is not None]
    if named:
        found.sites.append(NodeSite(f"{prefix}state", "optimizer_state", _key_uses(state)))
    groups = parts["param_groups"]
    for index, group in enumerate(groups if isinstance(groups, (list, tuple)) else ()):
        for key, value in pairs(group) or ():
            if key in ("params", "param_names") and isinstance(value, (list, tuple)):
                uses = [name for name in value if type(name) is Text]
                if uses:
                    found.sites.append(NodeSite(f"{prefix}param_groups/{index}/{key}", "param_names", uses))


_DEVICE_TENSORS = tuple(row.name for row in calls.TABLE if row.kind == "device")


@dataclass(slots=True)
class Devices:
    """Every place where a device appears.

    Attributes:
        tags: location tags of storages, and device arguments that are one string, outside folded calls.
        folded: (offset of the first one, tag, number) for the location tags in folded calls.
        calls: calls of ``torch.device``, with the location that each states.
        fixed: descriptions of places that cannot be edited.
    """

    tags: list[Text] = field(default_factory=list)
    folded: list[tuple[int, Text, int]] = field(default_factory=list)
    calls: list[tuple[Call, str]] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return how often each location appears, in order of first use."""
        places = [(tag.start, tag, 1) for tag in self.tags]
        found: Counter[str] = Counter()
        for _, tag, count in sorted([*places, *self.folded]) if self.folded else places:
            found[str(tag)] += count
        found.update(location for _, location in self.calls)
        return dict(found)


def find_devices(graph: Graph) -> Devices:
    """Find every device in the pickle."""
    found = Devices()
    names = {node.full for node in graph.globals}
    inside = any(
        name == "torch.device" or name.endswith(_DEVICE_TENSORS) or name.endswith(".DeviceMesh") for name in names
    )
    if inside:
        graph.unfold()
    for persid in graph.loose_persids:
        pid = persid.pid
        if type(pid) is tuple and len(pid) >= 5 and type(pid[3]) is Text:
            found.tags.append(pid[3])
    if graph.phrases is not None:
        found.folded = graph.phrases.locations()
    if inside:
        _find_in_calls(graph.root, found)
    return found


def _find_in_calls(root: Any, found: Devices) -> None:
    visited: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind not in (tuple, list, Dict, Call, Set) or id(node) in visited:
            continue
        visited.add(id(node))
        if kind is Call:
            _note_call(node, found)
            stack += [node.args, node.state, node.elements, node.kwargs]
            stack += [value for _, value in node.items or ()]
        elif kind is Dict:
            stack += [value for _, value in node.items]
        elif kind is Set:
            stack += node.elements
        else:
            stack += node


def _note_call(call: Call, found: Devices) -> None:
    func = call.func
    if type(func) is not Global or type(call.args) is not tuple:
        return
    if func.full == "torch.device":
        if call.args and type(call.args[0]) is Text:
            index = call.args[1] if len(call.args) > 1 else None
            if index is not None and not (type(index) is int and 0 <= index < 1 << 16):
                found.fixed.append("a torch.device with an invalid index")
                return
            location = call.args[0] if index is None else f"{call.args[0]}:{index}"
            found.calls.append((call, location))
        else:
            found.fixed.append("a torch.device whose type is not a string")
    elif func.name in _DEVICE_TENSORS and len(call.args) > 2 and type(call.args[2]) is Text:
        found.tags.append(call.args[2])
    elif func.name == "DeviceMesh":
        kinds = [value for key, value in attributes(call.state) if key in ("device_type", "_device_type")]
        names = sorted({str(kind) for kind in kinds if isinstance(kind, str)})
        found.fixed.append(f"a DeviceMesh of {', '.join(names) or 'some device'}")

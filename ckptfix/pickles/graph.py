"""Inert nodes: they describe the objects of a pickle, without building them.

None, bool, int, float, bytes, tuple and list represent themselves; everything that Python would hash, import or call
is a node. Nodes may be shared and may form cycles, as in the pickle: walk them with a stack and a set of ids, never by
recursion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, final

Node: TypeAlias = (
    "bool | int | float | bytes | bytearray | str | tuple[Node, ...] | list[Node] "
    "| Global | Call | PersId | Dict | Set | None"
)
"""Every value that the machine builds, or that a pickle to be written contains, such as a str that is not a `Text`."""


class Text(str):
    """A string at one of its uses.

    Each use is a separate object, so that one use can be edited while others of the same memo entry
    do not change. ``data[start:end]`` are the bytes that push it (without the PUT that may follow).

    Attributes:
        origin: the use that defined the memo entry that this one fetches; None if the string is written out here.
    """

    __slots__ = ("end", "origin", "start")
    start: int
    end: int
    origin: Text | None


def use_of(value: str, start: int, end: int, origin: Text | None = None) -> Text:
    """Return a use of `value`, which the bytes from `start` to `end` push."""
    use = Text(value)
    use.start, use.end, use.origin = start, end, origin
    return use


def new_text(value: str) -> Text:
    """Return a use of `value` that no stream pushes; written, it is unicode."""
    return use_of(str(value), -1, -1)


@final
class Global:
    """A name that an unpickler would import: `module` and `name`, pushed from `start` on. It is never resolved."""

    __slots__ = ("module", "name", "start")

    def __init__(self, module: str, name: str, start: int) -> None:
        self.module = module
        self.name = name
        self.start = start

    @property
    def full(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"Global({self.full})"


class Folded(Protocol):
    """Calls whose arguments are not nodes yet: each rebuilds a plain tensor (see `folded`)."""

    def arguments(self, call: Call) -> tuple[Node, ...]:
        """Return the arguments of `call`, newly created."""

    def plain(self, call: Call) -> object:
        """Return the arguments of `call` without places in a stream, as `new_tensors.NewTensorArguments`."""


class LazyItems(Protocol):
    """Items of a mapping that are not nodes yet (see `rows`)."""

    def pairs(self) -> list[tuple[Node, Node]]:
        """Return all pairs as nodes, always the same ones."""

    def extend(self, items: Iterable[tuple[Node, Node]]) -> None:
        """Append pairs."""


@final
class Call:
    """A call that an unpickler would make: ``func(*args)``, then the items, elements and state set on the result.

    Attributes:
        func: usually a Global.
        args: a tuple, in a well-formed pickle.
        kwargs: for NEWOBJ_EX.
        how: the opcode's name: REDUCE, NEWOBJ, NEWOBJ_EX, OBJ or INST.
        items: (key, value) pairs set on it, as on an OrderedDict; None if no items were set.
        rows: source of `items` until code reads them; None once they are nodes.
        elements: values appended or added to it; None if no values were added.
        state: the state that BUILD set; None if it set nothing.
        position: offset of the opcode.
        folded: source of `args` until code reads them; None once they are nodes.
    """

    __slots__ = ("args", "elements", "folded", "func", "how", "items", "kwargs", "position", "rows", "state")

    def __init__(self, func: Node, args: Node, how: str, position: int, kwargs: Node = None) -> None:
        self.func = func
        self.args = args
        self.how = how
        self.position = position
        self.kwargs = kwargs
        self.items: list[tuple[Node, Node]] | None = None
        self.rows: LazyItems | None = None
        self.elements: list[Node] | None = None
        self.state: Node = None
        self.folded: Folded | None = None

    @classmethod
    def folded_at(cls, func: Node, position: int, folded: Folded) -> Call:
        """Create a call whose arguments become nodes when they are first read."""
        call = cls.__new__(cls)
        call.func, call.how, call.position = func, "REDUCE", position
        call.kwargs = call.items = call.rows = call.elements = call.state = None
        call.folded = folded
        return call

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Node:
            """Create `args` or `items`, the only attributes that can be missing."""
            if name == "items":
                return _items_of(self)
            if name != "args" or self.folded is None:
                raise AttributeError(name)
            self.args = self.folded.arguments(self)
            self.folded = None
            return self.args

    def peek(self) -> Node:
        """Return `args` for one look: if they are not nodes yet, they are not kept."""
        return self.args if self.folded is None else self.folded.arguments(self)

    @property
    def arguments(self) -> tuple[Node, ...]:
        """`args` if they are a tuple, as in a well-formed pickle; otherwise an empty tuple."""
        return self.args if type(self.args) is tuple else ()

    def is_call_of(self, module: str, name: str) -> bool:
        """Return whether the call is one of ``module.name``."""
        func = self.func
        return type(func) is Global and func.name == name and func.module == module

    def __repr__(self) -> str:
        return f"Call({self.func!r} @ {self.position})"


@final
class PersId:
    """A persistent id: torch's reference to a storage.

    Attributes:
        pid: the id itself; in torch a tuple ``('storage', class, key, location, numel)``.
        position: offset of the opcode.
        tuple_end: offset of the TUPLE opcode that created `pid` right here; -1 if it came from elsewhere.
    """

    __slots__ = ("pid", "position", "tuple_end")

    def __init__(self, pid: Node, position: int, tuple_end: int) -> None:
        self.pid = pid
        self.position = position
        self.tuple_end = tuple_end

    @property
    def fields(self) -> tuple[Node, ...]:
        """`pid` if it is a tuple, as torch writes it; otherwise an empty tuple."""
        return self.pid if type(self.pid) is tuple else ()

    def __repr__(self) -> str:
        return f"PersId(@ {self.position})"


@final
class Dict:
    """A plain dict as ordered pairs: keys may repeat (the last one wins) or, in a hostile pickle, be unhashable.

    Attributes:
        items: the pairs.
        rows: source of the pairs until code reads them; None once they are nodes.
    """

    __slots__ = ("items", "rows")

    def __init__(self) -> None:
        self.items: list[tuple[Node, Node]] = []
        self.rows: LazyItems | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Node:
            """Create `items`, the only attribute that can be missing."""
            if name != "items":
                raise AttributeError(name)
            return _items_of(self)

    def __repr__(self) -> str:
        return "Dict"


def _items_of(node: Dict | Call) -> list[tuple[Node, Node]]:
    """Return the items of a mapping that has them in `rows`, as nodes from now on."""
    assert node.rows is not None
    node.items = node.rows.pairs()
    node.rows = None
    return node.items


def set_rows(node: Dict | Call, rows: LazyItems) -> None:
    """Attach `rows` to a mapping as its items, which become nodes when code asks for them."""
    node.rows = rows
    del node.items


@final
class Set:
    """A set or frozenset as a list."""

    __slots__ = ("elements", "kind")

    def __init__(self, kind: Literal["set", "frozenset"], elements: list[Node]) -> None:
        self.kind = kind
        self.elements = elements

    def __repr__(self) -> str:
        return self.kind


def pairs(node: Node) -> list[tuple[Node, Node]] | None:
    """Return the (key, value) pairs of a mapping node; a repeated key has its first position and its last value.

    A mapping is a `Dict`, or a `Call` on which items were set (OrderedDict, defaultdict, Counter). None
    if `node` is not a mapping.
    """
    found: list[tuple[Node, Node]]
    if type(node) is Dict:
        found = node.items
    elif type(node) is Call and (node.items is not None or _is_empty_mapping(node)):
        found = node.items or []
        first = node.arguments[0] if node.arguments else None
        if not found and type(first) is list:
            # Python 2 pickled an OrderedDict as OrderedDict([[key, value], ...]).
            found = [(pair[0], pair[1]) for pair in first if isinstance(pair, (list, tuple)) and len(pair) == 2]
        elif not found and type(first) is Dict:
            # A Counter is pickled as Counter({...}).
            found = first.items
    else:
        return None
    if len({key if type(key) is Text else _identity(key) for key, _ in found}) == len(found):
        return found
    last: dict[object, int] = {}
    out: list[tuple[Node, Node]] = []
    for key, value in found:
        place = last.setdefault(_identity(key), len(out))
        if place < len(out):
            out[place] = (out[place][0], value)
        else:
            out.append((key, value))
    return out


def _identity(key: Node) -> object:
    """Return a value that two keys of a dict share if and only if they are the same key.

    Numbers become text, whose hash cannot be predicted: thousands of chosen ints can have colliding hashes.
    """
    if type(key) is Text:
        return key
    if isinstance(key, float) and not key.is_integer():
        return ("float", key.hex())
    if isinstance(key, (int, float)):
        return ("int", hex(int(key)))
    return key if isinstance(key, bytes) or key is None else id(key)


def attributes(state: Node) -> list[tuple[Node, Node]]:
    """Return the (name, value) pairs that BUILD with `state` sets on an object.

    A class with ``__slots__``, such as DTensor, has a pair as its state: its ``__dict__`` or None, and its slots.
    """
    mappings = state if type(state) is tuple else (state,)
    return [pair for mapping in mappings for pair in pairs(mapping) or ()]


def is_attributes(state: Node) -> bool:
    """Return whether `state` consists only of `attributes`."""
    mappings = state if type(state) is tuple and len(state) == 2 else (state,)
    return all(part is None or is_mapping(part) for part in mappings)


_MAPPINGS = {
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("collections", "Counter"),
    ("torch.nn.modules.container", "ParameterDict"),
}


def _is_empty_mapping(node: Call) -> bool:
    """Return whether `node` calls a class of mappings."""
    func = node.func
    return type(func) is Global and (func.module, func.name) in _MAPPINGS


def is_known_mapping(node: Node) -> bool:
    """Return whether `node` is a dict, or an object of a class that is known to keep its items as they are.

    The ``__setitem__`` of any other class, a subclass of dict too, may depend on the keys.
    """
    return type(node) is Dict or (type(node) is Call and _is_empty_mapping(node))


def children(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield (label, child) for a container node; labels are address parts. A leaf has no children."""
    return children_with(node, pairs(node))


def children_with(node: Node, mapping: list[tuple[Node, Node]] | None) -> Iterator[tuple[str, Node]]:
    """Yield the `children` of a node whose `pairs` are `mapping`."""
    if type(node) is Call:
        yield from parts_of_call(node, mapping)
    elif type(node) is Dict:
        yield from labelled(mapping or ())
    elif type(node) is tuple or type(node) is list or type(node) is Set:
        for index, value in enumerate(node.elements if type(node) is Set else node):
            yield str(index), value


def parts_of_call(node: Call, mapping: list[tuple[Node, Node]] | None) -> Iterator[tuple[str, Node]]:
    """Yield the `children` of a call, with `mapping` in place of the `pairs` that were set on it."""
    if type(node.func) is Call:
        yield "()func", node.func
    if mapping is not None:
        yield from labelled(mapping)
        if node.args and (node.rows is not None or node.items):
            yield "()", node.args
    elif node.args:
        yield "()", node.args
    if node.kwargs:
        yield "()kwargs", node.kwargs
    for index, value in enumerate(node.elements or ()):
        yield str(index), value
    if mapping is not None:
        if not is_only_metadata(node.state):
            yield "()state", node.state
    elif node.state is not None:
        yield from children(node.state) if type(node.state) is Dict else (("()state", node.state),)


def payload_of(node: Node) -> frozenset[int]:
    """Return the ``id`` of each child that `node`'s class consumes: its arguments, and a state that is not a dict.

    Such a state is slots, or the input of ``__setstate__``. A dict is the object's ``__dict__`` (`is_attributes_of`).
    """
    if type(node) is not Call:
        return frozenset()
    rest = (node.func, node.args, node.kwargs, None if type(node.state) is Dict else node.state)
    return frozenset(id(part) for part in rest if part is not None)


def is_attributes_of(node: Node, child: Node) -> bool:
    """Return whether `child` is the ``__dict__`` of the object `node`: its keys are attributes, not parameters.

    The objects among its values are the program's own. So a dict there is a mapping like any other.
    """
    return type(node) is Call and type(node.state) is Dict and node.state is child


def labelled(mapping: Iterable[tuple[Node, Node]]) -> Iterator[tuple[str, Node]]:
    """Yield the values of a mapping by their labels, and keys that are objects themselves."""
    rows = list(mapping)
    for (key, value), name in zip(rows, labels([key for key, _ in rows]), strict=True):
        if holds_objects(key):
            yield "()key", key
        yield name, value


def labels(keys: Sequence[Node]) -> list[str]:
    """Return the address part of each key of one mapping; different keys have different parts, even 1 and "1".

    A key that is text is its own part.
    """
    if all(isinstance(key, str) for key in keys):
        return list(map(str, keys))
    used = {str(key) for key in keys if isinstance(key, str)}
    given: dict[object, str] = {}
    made = []
    for key in keys:
        if isinstance(key, str):
            made.append(str(key))
            continue
        same = _identity(key)
        if same not in given:
            name, number = label(key), 1
            own = name
            while own in used:
                number += 1
                own = f"{name}#{number}"
            used.add(own)
            given[same] = own
        made.append(given[same])
    return made


def is_mapping(node: Node) -> bool:
    """Return whether a node is only a mapping: it has no arguments, elements or attributes besides its items."""
    if pairs(node) is None or type(node) is not Call:
        return type(node) is Dict
    return is_only_metadata(node.state) and not (node.elements or node.kwargs or (node.items and node.args))


def is_only_metadata(state: Node) -> bool:
    """Return whether a state is one of a state dict: None, or ``_metadata`` of plain values by module path."""
    if state is None:
        return True
    if pairs(state) is None:
        return type(state) is tuple and not state
    return all(key == "_metadata" and is_versions(value) for key, value in attributes(state))


def is_versions(metadata: Node) -> bool:
    """Return whether `metadata` is the ``_metadata`` of a state dict: ``{module path: {name: plain value}}``."""
    rows = pairs(metadata)
    return rows is not None and not any(holds_objects(own) for _, own in rows)


def holds_objects(value: Node) -> bool:
    """Return whether a value is or holds anything but plain values, or containers nested deeper than in any program."""
    if type(value) not in _NODES:
        return False
    level, seen = [value], set[int]()
    for _ in range(5):
        nodes = {id(node): node for node in level if type(node) in _NODES and id(node) not in seen}
        seen.update(nodes)
        level = []
        for node in nodes.values():
            rows = pairs(node)
            more = type(node) is Call and (node.kwargs or (node.items and node.args) or node.elements)
            if type(node) is PersId or more or (type(node) is Call and (rows is None or node.state is not None)):
                return True
            level += (child for _, child in children(node)) if rows is None else (part for row in rows for part in row)
    return any(type(node) in _NODES for node in level)


def label(key: Node) -> str:
    """Return a mapping key as an address part."""
    if type(key) is Text:
        return str(key)
    if isinstance(key, int) and key.bit_length() > 4096:
        return hex(key)
    if type(key) is tuple and len(key) <= 8 and all(isinstance(part, _PLAIN) for part in key):
        return f"({', '.join(map(label, key))})"
    return str(key) if isinstance(key, _PLAIN) else f"<{type(key).__name__}>"


_NODES = frozenset((Call, PersId, Dict, Set, tuple, list))
_PLAIN = (str, int, float, bytes, type(None))

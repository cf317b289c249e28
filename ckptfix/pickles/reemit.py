"""A parsed pickle written again, without some of its nodes: what a splice could only do with a new memo.

Whatever `parse` gives can be written: calls of every kind, sets, bytes, shared nodes and cycles. The opcodes are those
of protocol 2 as far as they go, which is what ``torch.load(weights_only=True)`` knows, under the PROTO of the
original: names of globals are looked up by it (``pickle.Unpickler.find_class`` maps old names below 3 and takes dotted
ones from 4 on). Frames are left out; no unpickler needs them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptfix.errors import Unsupported
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.emit import BATCH
from ckptfix.pickles.graph import Call, Dict, Global, Graph, Node, PersId, Set, Text
from ckptfix.pickles.patch import int_opcode, string_opcode
from ckptfix.pickles.rare import UNRESOLVABLE

Steps = Iterator[Node]
"""What a node is written by: it yields the nodes that are written in between."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A fresh stream, and the persistent ids in it, in order and once for each time it names one."""

    pickle: bytes
    persids: tuple[PersId, ...]


def reemit(
    graph: Graph,
    *,
    items: Mapping[int, Collection[int]] | None = None,
    gone: Collection[int] = (),
    replaced: Mapping[int, Node] | None = None,
) -> Rewritten:
    """The stream of `graph` without some of its nodes. What other nodes share with the dropped ones is kept whole.

    Args:
        items: ``id`` of a Dict or Call -> places in its ``items`` that are left out; or of a list -> of its elements.
        gone: ``id`` of nodes that are left out wherever they are the value of a mapping, and are None elsewhere.
        replaced: ``id`` of nodes -> what is written in their place, wherever they stand.

    Raises:
        Unsupported: something that cannot be written as it was meant: a global that was computed, state that was
            set twice on one object.
    """
    writer = _Writer(graph, items or {}, frozenset(gone), replaced or {})
    writer.run(graph.root)
    if writer.pairs_of_states:
        # Two states of one object are kept as a pair, like the state of a class with __slots__: BUILDs show which.
        builds = sum(opcode.code == op.BUILD for opcode in op.walk(graph.data, graph.start, graph.end))
        if builds > sum(type(node) is Call and node.state is not None for node in every_node(graph.root)):
            raise Unsupported("state that is set twice on one object, or on one that was thrown away")
    protocol = max(graph.protocol, 2)
    return Rewritten(b"".join((bytes((op.PROTO, protocol)), *writer.out, b".")), tuple(writer.persids))


def every_node(root: Node) -> Iterator[Node]:
    """Every node that holds others, once, in no certain order; whatever hangs on it, under whatever key."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if type(node) not in _NODES or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        stack += parts_of(node)


def parts_of(node: Node) -> Iterable[Node]:
    """What hangs on a node that holds others, in no certain order."""
    if type(node) is Call:
        pairs = (part for pair in node.items or () for part in pair)
        return (node.func, node.args, node.kwargs, node.state, *(node.elements or ()), *pairs)
    if type(node) is Dict:
        return [part for pair in node.items for part in pair]
    if type(node) is Set:
        return list(node.elements)
    if type(node) is PersId:
        return (node.pid,)
    return node if type(node) is tuple or type(node) is list else ()


class _Writer:
    def __init__(
        self, graph: Graph, items: Mapping[int, Collection[int]], gone: frozenset[int], replaced: Mapping[int, Node]
    ) -> None:
        self.data = graph.data
        head = graph.data[graph.start : graph.start + 2]
        # Protocols 0 to 2 have no bytes but the str of Python 2.
        self.python2 = not (head[:1] == b"\x80" and head[1] >= 3)
        self.items = items
        self.gone = gone
        self.replaced = replaced
        self.out: list[bytes] = []
        self.memo: dict[object, int] = {}
        self.persids: list[PersId] = []
        self.pairs_of_states = 0

    def run(self, root: Node) -> None:
        """Write `root`. By a stack: a hostile depth must not become Python's."""
        stack: list[Steps] = [iter((root,))]
        while stack:
            node = next(stack[-1], stack)
            if node is stack:
                stack.pop()
                continue
            if self.replaced:
                node = self.replaced.get(id(node), node)
            write = _LEAVES.get(type(node))
            if id(node) in self.gone:
                self.out.append(b"N")
            elif write is not None:
                write(self, node)
            else:
                steps = _NODES.get(type(node))
                if steps is None:
                    raise Unsupported(f"a {type(node).__name__}, which cannot be written to a pickle")
                if node == () and type(node) is tuple:
                    self.out.append(b")")
                elif not self.fetched(id(node)):
                    stack.append(steps(self, node))

    def put(self, key: object) -> None:
        index = len(self.memo)
        self.memo[key] = index
        self.out.append(_indexed(op.BINPUT, op.LONG_BINPUT, index))

    def fetched(self, key: object) -> bool:
        index = self.memo.get(key)
        if index is not None:
            self.out.append(_indexed(op.BINGET, op.LONG_BINGET, index))
        return index is not None

    def closed(self, node: object, pops: bytes, makes: bytes) -> bool:
        """Make `node` of what was pushed; if a cycle through that made it already, pop and fetch. True if made here."""
        if id(node) in self.memo:
            self.out.append(pops)
            self.fetched(id(node))
            return False
        self.out.append(makes)
        self.put(id(node))
        return True

    def text(self, value: Text | str) -> None:
        like = op.BINUNICODE
        if type(value) is Text:
            like = self.data[(value.origin or value).start]
        if like not in _BYTE_STRINGS:
            like = op.BINUNICODE
        if not self.fetched((like, str(value))):
            self.out.append(string_opcode(value, 2, like))
            self.put((like, str(value)))

    def raw(self, value: bytes) -> None:
        if self.fetched(("b", value)):
            return
        if self.python2:
            short, long = op.SHORT_BINSTRING, op.BINSTRING
        else:
            short, long = op.SHORT_BINBYTES, op.BINBYTES
        size = len(value)
        self.out += (bytes((short, size)) if size < 256 else bytes((long,)) + size.to_bytes(4, "little"), value)
        self.put(("b", value))

    def number(self, value: int) -> None:
        if 0 <= value < 1 << 31:
            self.out.append(int_opcode(value))
        elif -(1 << 31) <= value < 0:
            self.out.append(bytes((op.BININT,)) + value.to_bytes(4, "little", signed=True))
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            wide = bytes((op.LONG4,)) + len(raw).to_bytes(4, "little")
            self.out.append((bytes((op.LONG1, len(raw))) if len(raw) < 256 else wide) + raw)

    def name(self, value: Global) -> None:
        if value.full.startswith(UNRESOLVABLE) or "\n" in value.module or "\n" in value.name:
            raise Unsupported("a global whose name is computed", offset=value.start)
        if not self.fetched((value.module, value.name, "g")):
            self.out.append(f"c{value.module}\n{value.name}\n".encode("utf-8", "surrogatepass"))
            self.put((value.module, value.name, "g"))

    def tuple_(self, node: tuple[Node, ...]) -> Steps:
        short = len(node) <= 3
        if not short:
            self.out.append(b"(")
        yield from node
        self.closed(node, b"0" * len(node) if short else b"1", _TUPLES[len(node)] if short else b"t")

    def list_(self, node: list[Node]) -> Steps:
        self.begin(node, b"]")
        without = self.items.get(id(node), ())
        yield from self.batches([(value,) for index, value in enumerate(node) if index not in without], b"a", b"e")

    def dict_(self, node: Dict) -> Steps:
        self.begin(node, b"}")
        yield from self.batches(self.left(node, node.items), b"s", b"u")

    def set_(self, node: Set) -> Steps:
        if node.kind == "set":
            self.begin(node, bytes((op.EMPTY_SET,)))
            if node.elements:
                self.out.append(b"(")
                yield from node.elements
                self.out.append(bytes((op.ADDITEMS,)))
            return
        self.out.append(b"(")
        yield from node.elements
        self.closed(node, b"1", bytes((op.FROZENSET,)))

    def bytearray_(self, node: bytearray) -> Steps:
        self.begin(node, bytes((op.BYTEARRAY8,)) + len(node).to_bytes(8, "little") + bytes(node))
        yield from ()

    def persid(self, node: PersId) -> Steps:
        self.persids.append(node)
        if type(node.pid) is str:
            self.out.append(b"P" + node.pid.encode("ascii") + b"\n")
            return
        yield node.pid
        self.out.append(b"Q")

    def call(self, node: Call) -> Steps:
        if node.how in ("OBJ", "INST"):
            self.out.append(b"(")
            yield node.func
            yield from node.arguments
            made = self.closed(node, b"1", b"o")
        else:
            yield node.func
            yield node.args
            if node.how == "NEWOBJ_EX":
                yield node.kwargs
            made = self.closed(node, b"000" if node.how == "NEWOBJ_EX" else b"00", _CALLS[node.how])
        if not made:
            return
        yield from self.batches([(value,) for value in node.elements or ()], b"a", b"e")
        yield from self.batches(self.left(node, node.items or []), b"s", b"u")
        if node.state is not None:
            self.pairs_of_states += type(node.state) is tuple and len(node.state) == 2
            yield node.state
            self.out.append(b"b")

    def begin(self, node: object, makes: bytes) -> None:
        self.out.append(makes)
        self.put(id(node))

    def left(self, node: object, rows: Sequence[tuple[Node, Node]]) -> list[tuple[Node, Node]]:
        without = self.items.get(id(node), ())
        gone = self.gone
        return [row for index, row in enumerate(rows) if index not in without and id(row[1]) not in gone]

    def batches(self, rows: Sequence[Iterable[Node]], single: bytes, several: bytes) -> Steps:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            if len(batch) > 1:
                self.out.append(b"(")
            for row in batch:
                yield from row
            self.out.append(several if len(batch) > 1 else single)


def _indexed(short: int, long: int, index: int) -> bytes:
    return bytes((short, index)) if index < 256 else bytes((long,)) + index.to_bytes(4, "little")


_BYTE_STRINGS = frozenset((op.SHORT_BINSTRING, op.BINSTRING, op.STRING))
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_CALLS = {"REDUCE": b"R", "NEWOBJ": b"\x81", "NEWOBJ_EX": b"\x92"}

_LEAVES: dict[type, Callable[..., None]] = {
    type(None): lambda writer, value: writer.out.append(b"N"),
    bool: lambda writer, value: writer.out.append(b"\x88" if value else b"\x89"),
    int: _Writer.number,
    float: lambda writer, value: writer.out.append(b"G" + struct.pack(">d", value)),
    Text: _Writer.text,
    str: _Writer.text,
    bytes: _Writer.raw,
    Global: _Writer.name,
}
"""Nodes that hold no others, and how each is written."""

_NODES: dict[type, Callable[..., Steps]] = {
    tuple: _Writer.tuple_,
    list: _Writer.list_,
    Dict: _Writer.dict_,
    Set: _Writer.set_,
    bytearray: _Writer.bytearray_,
    PersId: _Writer.persid,
    Call: _Writer.call,
}

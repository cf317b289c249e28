"""Writing of a pickle of protocol 2 from inert nodes, opcode for opcode as CPython's pickler writes it.

Equal strings and equal globals share a memo entry, like one object in several places; tuples, lists and calls share
one only if they are the same node.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, cast

from ckptfix.errors import Unsupported
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.fresh import TUPLES, ints, tail
from ckptfix.pickles.graph import Call, Dict, Global, Node, PersId, Set, Text
from ckptfix.pickles.machine import UNRESOLVABLE
from ckptfix.pickles.new_tensors import NewTensorArguments
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.patch import int_opcode, string_opcode

BATCH = 1000

Steps = Iterator[Node]
"""The steps that write a node: an iterator over the nodes that are written in between."""


class Key(str):
    """A string that shares no memo entry with an equal one of a different kind: torch creates one for each storage."""

    __slots__ = ()


def emit(root: Node) -> bytes:
    """Return the stream that builds `root`, which can be any node; all strings become unicode.

    Raises:
        Unsupported: a value cannot be written, or a global was computed.
    """
    writer = Writer(None)
    writer.run(root)
    return writer.stream(2)


class Writer:
    """Writer of the opcodes of nodes.

    Args:
        graph: the pickle that the nodes come from, whose strings and bytes keep their opcodes; None for fresh nodes.
        items: ``id`` of a Dict or Call -> positions in its ``items`` that are left out; or of a list -> of its
            elements.
        gone: ``id`` of nodes that are left out wherever they are the value of a mapping, and are None elsewhere.
        replaced: ``id`` of nodes -> the node that is written in their place, wherever they occur.

    Attributes:
        out: the opcodes, without PROTO and STOP.
        persids: the persistent ids that were written, in order.
        pairs_of_states: number of objects whose state is a pair.
    """

    def __init__(
        self,
        graph: Graph | None,
        items: Mapping[int, Collection[int]] | None = None,
        gone: Collection[int] = (),
        replaced: Mapping[int, Node] | None = None,
    ) -> None:
        head = b"\x80\x03" if graph is None else graph.strings[graph.start : graph.start + 2]
        # In protocols 0 to 2 the only bytes are the str of Python 2.
        self.python2 = not (head[:1] == b"\x80" and head[1] >= 3)
        self.data = None if graph is None else graph.strings
        self.whole = not (gone or replaced)
        self.items = items or {}
        self.gone = frozenset(gone)
        self.replaced = replaced or {}
        self.out = BytesIO()
        self.memo: dict[object, int] = {}
        self.count = 0
        self.heads: dict[tuple[str, str, str], tuple[bytes, bytes, bytes]] = {}
        self.tails: dict[tuple[object, ...], tuple[bytes, Callable[..., bytes], tuple[bytes, bytes, bytes, bytes]]] = {}
        self.persids: list[PersId] = []
        self.pairs_of_states = 0

    def run(self, root: Node) -> None:
        """Write `root`, with an explicit stack: a hostile depth must not become recursion in Python."""
        gone, replaced, out = self.gone, self.replaced, self.out
        steps: Steps = iter((root,))
        stack = [steps]
        while True:
            node = next(steps, stack)
            if node is stack:
                stack.pop()
                if not stack:
                    return
                steps = stack[-1]
                continue
            if replaced:
                node = replaced.get(id(node), node)
            kind = type(node)
            if gone and id(node) in gone:
                out.write(b"N")
            elif kind in _LEAVES:
                _LEAVES[kind](self, node)
            elif kind is tuple and not node:
                out.write(b")")
            elif kind not in NODES:
                raise Unsupported(f"a {kind.__name__} cannot be written to a pickle")
            elif not self.fetched(id(node)) and not (type(node) is Call and self.whole and self.tensor(node)):
                steps = NODES[kind](self, node)
                stack.append(steps)

    def stream(self, protocol: int) -> bytes:
        """Return the whole stream, with PROTO and STOP."""
        return b"".join((bytes((op.PROTO, protocol)), self.out.getbuffer(), b"."))

    def tensor(self, node: Call) -> bool:
        """Write the call that rebuilds a plain tensor, and return whether `node` is one.

        A checkpoint can have very many of them.
        """
        fresh: Any = node.folded
        if type(fresh) is NewTensorArguments and self.fresh(node, fresh):
            return True
        args: Any = node.args
        if not _is_plain(node) or type(args) is not tuple or len(args) != 6:
            return False
        persid, offset, shape, stride, requires_grad, hooks = args
        pid = persid.pid if type(persid) is PersId else None
        if tuple(map(type, args)) not in _TENSOR or not (type(hooks) is Call and _is_plain(hooks) and hooks.args == ()):
            return False
        if type(pid) is not tuple or tuple(map(type, pid)) not in _REFERENCE:
            return False
        if id(pid) in self.memo or id(args) in self.memo or id(hooks) in self.memo:
            return False
        if not {*map(type, shape), *map(type, stride)} <= _INT:
            return False
        self.name(cast(Global, node.func))
        self.persids.append(persid)
        self.out.write(b"((")
        for value in pid:
            _LEAVES[type(value)](self, value)
        self.out.write(b"t")
        self.put(id(pid))
        self.out.writelines((b"Q", int_opcode(offset)))
        self.sizes(shape)
        self.sizes(stride)
        self.out.write(b"\x88" if requires_grad else b"\x89")
        self.name(cast(Global, hooks.func))
        for made, opcode in ((hooks, b")R"), (args, b"t"), (node, b"R")):
            self.out.write(opcode)
            self.put(id(made))
        return True

    def fresh(self, node: Call, args: NewTensorArguments) -> bool:
        """Write a call like `tensor`, in one piece, from arguments that are not nodes.

        Return False, and write nothing, if the call would memoize something that other nodes may share.
        """
        func, kind, location, hooks = cast("Global", node.func), args.type, args.location, args.hooks
        heads = self.heads.get((func.name, kind.name, location))
        key = (op.BINUNICODE, args.key)
        number = self.count
        if heads is None or number < 256 or key in self.memo or not _is_plain(node):
            names = [(name.module, name.name, "g") for name in (func, kind, hooks)]
            keys = [names[0], (op.BINUNICODE, "storage"), names[1], (op.BINUNICODE, location), names[2]]
            if number >= 256 and self.memo.keys() >= {*keys}:
                a, b, c, d, e = (_get(self.memo[one]) for one in keys)
                self.heads[func.name, kind.name, location] = (a + b"((" + b + c, d, e)
            return False
        shape, stride, memo = args.shape, args.stride, self.memo
        if not shape or shape is stride or id(shape) in memo or id(stride) in memo:
            return self._sharing(node, args, heads)
        alike = func.name, kind.name, location, args.numel, args.offset, shape, stride, args.requires_grad
        found = self.tails.get(alike)
        if found is None:
            found = self.tails[alike] = tail(heads, args)
        head, pack, (a, b, c, d) = found
        named = string_opcode(args.key, 2, op.BINUNICODE)
        puts = pack(
            *(number, a, number + 1, b, number + 2, c, number + 3, d),
            *(number + 4, b"tr", number + 5, b"Rr", number + 6),
        )
        self.out.write(b"%b%br%b" % (head, named, puts))
        memo[key] = number
        memo[id(shape)] = number + 2
        memo[id(stride)] = number + 3
        memo[id(node)] = number + 6
        self.count = number + 7
        self.persids.append(args.reference())
        return True

    def _sharing(self, node: Call, args: NewTensorArguments, heads: tuple[bytes, bytes, bytes]) -> bool:
        """Write a 0-d tensor, or a tensor that shares a size tuple, like `fresh`."""
        head, place, last = heads
        number = self.count
        parts = [head, string_opcode(args.key, 2, op.BINUNICODE), _LONG(op.LONG_BINPUT, number), place]
        parts += (int_opcode(args.numel), b"t", _LONG(op.LONG_BINPUT, number + 1), b"Q", int_opcode(args.offset))
        self.memo[op.BINUNICODE, args.key] = number
        self.count = number + 2
        self.persids.append(args.reference())
        self.out.write(b"".join(parts))
        self.sizes(args.shape)
        self.sizes(args.stride)
        number = self.count
        puts = (_LONG(op.LONG_BINPUT, number + index) for index in range(3))
        flag = b"\x88" if args.requires_grad else b"\x89"
        self.out.write(b"%b%b)R%bt%bR%b" % (flag, last, *puts))
        self.memo[id(node)] = number + 2
        self.count = number + 3
        return True

    def sizes(self, node: tuple[int, ...]) -> None:
        if not node:
            self.out.write(b")")
        elif not self.fetched(id(node)):
            self.out.write(ints(node))
            self.put(id(node))

    def put(self, key: object) -> None:
        index = self.count
        self.count += 1
        self.memo[key] = index
        self.out.write(bytes((op.BINPUT, index)) if index < 256 else _LONG(op.LONG_BINPUT, index))

    def fetched(self, key: object) -> bool:
        index = self.memo.get(key)
        if index is None:
            return False
        self.out.write(_get(index))
        return True

    def closed(self, node: object, pops: bytes, makes: bytes) -> bool:
        """Create `node` from the pushed values, and return True.

        If a cycle has already created it, pop the values, fetch it and return False.
        """
        if id(node) in self.memo:
            self.out.write(pops)
            self.fetched(id(node))
            return False
        self.out.write(makes)
        self.put(id(node))
        return True

    def text(self, value: Text | str) -> None:
        like = op.BINUNICODE
        if type(value) is Text and self.data is not None and value.start >= 0:
            like = self.data[(value.origin or value).start]
        if like not in BYTE_STRINGS:
            like = op.BINUNICODE
        key = (like, str(value))
        if not self.fetched(key):
            self.out.write(string_opcode(value, 2, like))
            self.put(key)

    def key(self, value: Key) -> None:
        if not self.fetched((Key, value)):
            self.out.write(string_opcode(value, 2, op.BINUNICODE))
            self.put((Key, value))

    def raw(self, value: bytes) -> None:
        if self.fetched(("b", value)):
            return
        if self.python2:
            short, long = op.SHORT_BINSTRING, op.BINSTRING
        else:
            short, long = op.SHORT_BINBYTES, op.BINBYTES
        size = len(value)
        self.out.write(bytes((short, size)) if size < 256 else bytes((long,)) + size.to_bytes(4, "little"))
        self.out.write(value)
        self.put(("b", value))

    def name(self, value: Global) -> None:
        key = (value.module, value.name, "g")
        if self.fetched(key):
            return
        if value.full.startswith(UNRESOLVABLE) or "\n" in value.module or "\n" in value.name:
            raise Unsupported("a global whose name is computed", offset=value.start)
        self.out.write(f"c{value.module}\n{value.name}\n".encode("utf-8", "surrogatepass"))
        self.put(key)

    def tuple_(self, node: tuple[Node, ...]) -> Steps:
        short = len(node) <= 3
        if not short:
            self.out.write(b"(")
        yield from node
        self.closed(node, b"0" * len(node) if short else b"1", TUPLES[len(node)] if short else b"t")

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
                self.out.write(b"(")
                yield from node.elements
                self.out.write(bytes((op.ADDITEMS,)))
            return
        self.out.write(b"(")
        yield from node.elements
        self.closed(node, b"1", bytes((op.FROZENSET,)))

    def bytearray_(self, node: bytearray) -> Steps:
        self.begin(node, bytes((op.BYTEARRAY8,)) + len(node).to_bytes(8, "little") + bytes(node))
        yield from ()

    def persid(self, node: PersId) -> Steps:
        self.persids.append(node)
        if type(node.pid) is str and node.pid.isascii() and "\n" not in node.pid:
            self.out.write(b"P" + node.pid.encode("ascii") + b"\n")
            return
        yield node.pid
        self.out.write(b"Q")

    def call(self, node: Call) -> Steps:
        if node.how in ("OBJ", "INST"):
            self.out.write(b"(")
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
        if node.elements:
            yield from self.batches([(value,) for value in node.elements], b"a", b"e")
        if node.items:
            yield from self.batches(self.left(node, node.items), b"s", b"u")
        if node.state is not None:
            self.pairs_of_states += type(node.state) is tuple and len(node.state) == 2
            yield node.state
            self.out.write(b"b")

    def begin(self, node: object, makes: bytes) -> None:
        self.out.write(makes)
        self.put(id(node))

    def left(self, node: object, rows: Sequence[tuple[Node, Node]]) -> list[tuple[Node, Node]]:
        without = self.items.get(id(node), ())
        gone = self.gone
        return [row for index, row in enumerate(rows) if index not in without and id(row[1]) not in gone]

    def batches(self, rows: Sequence[Iterable[Node]], single: bytes, several: bytes) -> Steps:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            if len(batch) > 1:
                self.out.write(b"(")
            for row in batch:
                yield from row
            self.out.write(several if len(batch) > 1 else single)


def _get(index: int) -> bytes:
    """Return the opcode that fetches a memo entry."""
    return bytes((op.BINGET, index)) if index < 256 else _LONG(op.LONG_BINGET, index)


_LONG = struct.Struct("<BL").pack
_DOUBLE = struct.Struct(">cd").pack
BYTE_STRINGS = (op.SHORT_BINSTRING, op.BINSTRING, op.STRING)
"""Opcodes that push the bytes of a str of Python 2."""

_CALLS = {"REDUCE": b"R", "NEWOBJ": b"\x81", "NEWOBJ_EX": b"\x92"}

_LEAVES: dict[type, Callable[..., None]] = {
    type(None): lambda writer, value: writer.out.write(b"N"),
    bool: lambda writer, value: writer.out.write(b"\x88" if value else b"\x89"),
    int: lambda writer, value: writer.out.write(int_opcode(value)),
    float: lambda writer, value: writer.out.write(_DOUBLE(b"G", value)),
    Text: Writer.text,
    str: Writer.text,
    Key: Writer.key,
    bytes: Writer.raw,
    Global: Writer.name,
}
"""Nodes that hold no other nodes, and the function that writes each."""

_TENSOR = {(PersId, int, tuple, tuple, bool, Call)}
_REFERENCE = {(a, Global, b, c, int) for a in (str, Text) for b in (str, Text) for c in (str, Text)}
_INT = {int}


def _is_plain(call: Call) -> bool:
    """Return whether `call` is a plain function call, with nothing set on its result."""
    return (
        call.how == "REDUCE"
        and type(call.func) is Global
        and call.items is call.elements is call.state is call.kwargs is None
    )


NODES: dict[type, Callable[..., Steps]] = {
    tuple: Writer.tuple_,
    list: Writer.list_,
    Dict: Writer.dict_,
    Set: Writer.set_,
    bytearray: Writer.bytearray_,
    PersId: Writer.persid,
    Call: Writer.call,
}
"""Nodes that hold other nodes, and the function that writes each."""

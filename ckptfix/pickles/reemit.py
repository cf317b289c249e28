"""A parsed pickle written again, without some of its nodes: what a splice could only do with a new memo.

Whatever `parse` gives can be written: calls of every kind, sets, bytes, shared nodes and cycles. The opcodes are those
of protocol 2 as far as they go, which is what ``torch.load(weights_only=True)`` knows, under the PROTO of the
original: names of globals are looked up by it (``pickle.Unpickler.find_class`` maps old names below 3 and takes dotted
ones from 4 on). Frames are left out; no unpickler needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptfix.errors import Unsupported
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.emit import NODES, Writer
from ckptfix.pickles.graph import Call, Dict, Node, PersId, Set
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.rows import rows_of


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
    writer = Writer(graph, items, gone, replaced)
    writer.run(graph.root)
    if writer.pairs_of_states:
        # Two states of one object are kept as a pair, like the state of a class with __slots__: BUILDs show which.
        builds = sum(opcode.code == op.BUILD for opcode in op.walk(graph.data, graph.start, graph.end))
        if builds > sum(type(node) is Call and node.state is not None for node in every_node(graph.root)):
            raise Unsupported("state that is set twice on one object, or on one that was thrown away")
    protocol = max(graph.protocol, 2)
    return Rewritten(b"".join((bytes((op.PROTO, protocol)), *writer.out, b".")), tuple(writer.persids))


def every_node(root: Node, *, folded: bool = True) -> Iterator[Node]:
    """Every node that holds others, once, in no certain order; whatever hangs on it, under whatever key.

    Args:
        folded: with folded calls, and what they are made of, which become nodes by it; without them, what they are is
            known: calls as torch writes them, of plain numbers and of a storage.
    """
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if type(node) not in NODES or id(node) in seen:
            continue
        if not folded:
            rows = rows_of(node)
            if rows is not None:
                seen.add(id(node))
                yield node
                stack += (part for pair in rows.others() for part in pair)
                if type(node) is Call:
                    stack += (node.func, node.args, node.kwargs, node.state, *(node.elements or ()))
                continue
            if type(node) is Call and node.folded is not None:
                bare = node.rows is None and not node.items and not node.elements
                if bare and node.state is None and node.kwargs is None:
                    continue
        seen.add(id(node))
        yield node
        stack += parts_of(node)


def parts_of(node: Node, gone: Collection[int] = ()) -> Iterable[Node]:
    """What hangs on a node that holds others, in no certain order; items of which the value is in `gone` do not."""
    if type(node) is Call or type(node) is Dict:
        rows = node.items or ()
        pairs = (part for row in rows if not gone or id(row[1]) not in gone for part in row)
        if type(node) is Dict:
            return list(pairs)
        return (node.func, node.args, node.kwargs, node.state, *(node.elements or ()), *pairs)
    if type(node) is Set:
        return list(node.elements)
    if type(node) is PersId:
        return (node.pid,)
    return node if type(node) is tuple or type(node) is list else ()

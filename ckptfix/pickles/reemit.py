"""Rewriting of a parsed pickle without some of its nodes, which a splice could do only with a new memo.

Every result of `parse` can be written: calls of every kind, sets, bytes, shared nodes and cycles. The opcodes are
those of protocol 2 where possible, which ``torch.load(weights_only=True)`` accepts. PROTO keeps the number of the
original, because the lookup of globals depends on it (``pickle.Unpickler.find_class`` maps old names below 3 and
accepts dotted ones from 4 on). Frames are left out; no unpickler needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.emit import NODES, Writer
from ckptfix.pickles.graph import Call, Dict, Node, PersId, Set
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.rows import rows_of


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A fresh stream, and the persistent ids in it, in order, one entry for each occurrence."""

    pickle: bytes
    persids: tuple[PersId, ...]


def reemit(
    graph: Graph,
    *,
    items: Mapping[int, Collection[int]] | None = None,
    gone: Collection[int] = (),
    replaced: Mapping[int, Node] | None = None,
) -> Rewritten:
    """Return the stream of `graph` without some of its nodes; nodes that are used elsewhere too are kept.

    Args:
        items: ``id`` of a Dict or Call -> positions in its ``items`` that are left out; or of a list -> of its
            elements.
        gone: ``id`` of nodes that are left out wherever they are the value of a mapping, and are None elsewhere.
        replaced: ``id`` of nodes -> the node that is written in their place, wherever they occur.

    Raises:
        Unsupported: something cannot be written with its meaning kept: a computed global, or state that was set twice
            on one object.
    """
    writer = Writer(graph, items, gone, replaced)
    writer.run(graph.root)
    if writer.pairs_of_states:
        refuse_two_states(graph)
    return Rewritten(writer.stream(max(graph.protocol, 2)), tuple(writer.persids))


def refuse_two_states(graph: Graph) -> None:
    """Refuse a stream that sets the state of an object twice.

    Two states of one object are kept as a pair, and so is the state of a class with ``__slots__``. The number of BUILDs
    tells them apart.

    Raises:
        Unsupported: it does.
    """
    builds = sum(opcode.code == op.BUILD for opcode in op.walk(graph.data, graph.start, graph.end))
    if builds > sum(type(node) is Call and node.state is not None for node in every_node(graph.root)):
        raise Unsupported("state is set twice on one object, or is set on an object that was discarded")


def every_node(root: Node, *, folded: bool = True) -> Iterator[Node]:
    """Yield every node that holds other nodes, once, in no particular order, whatever key it is under.

    Args:
        folded: include folded calls and their parts, which thereby become nodes. Without them nothing unknown is
            missed: they are calls as torch writes them, of plain numbers and a storage.
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
        stack += children_to_write(node)


def still_written(
    root: Node, gone: Collection[int], items: Mapping[int, Collection[int]] | None = None
) -> set[int]:
    """Return ``id`` of every node that `reemit` writes below `root`. Arguments as for `reemit`."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in gone or id(node) in seen:
            continue
        seen.add(id(node))
        without = (items or {}).get(id(node), ())
        if without and (type(node) is Dict or type(node) is Call):
            rows = [row for place, row in enumerate(node.items or ()) if place not in without]
            stack += [part for row in rows for part in row]
            if type(node) is Call:
                stack += [node.func, node.args, node.kwargs, node.state, *(node.elements or ())]
        else:
            stack += children_to_write(node, gone)
    return seen


def children_to_write(node: Node, gone: Collection[int] = ()) -> Iterable[Node]:
    """Return the parts of a node that holds nodes, in no particular order, except items whose value is in `gone`."""
    if type(node) is Call or type(node) is Dict:
        rows = [row for row in node.items or () if id(row[1]) not in gone] if gone else node.items or ()
        pairs = chain.from_iterable(rows)
        if type(node) is Dict:
            return pairs
        return (node.func, node.args, node.kwargs, node.state, *(node.elements or ()), *pairs)
    if type(node) is Set:
        return node.elements
    if type(node) is PersId:
        return (node.pid,)
    return node if type(node) is tuple or type(node) is list else ()

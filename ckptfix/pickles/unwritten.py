"""An object of nodes that no stream holds: a format built them from the files of a folder, or from parts of a file.

Such an object is read like a parsed pickle. Its opcodes are made when a file with a pickle is written from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

from ckptfix.errors import Unsupported
from ckptfix.pickles.emit import BYTE_STRINGS
from ckptfix.pickles.graph import Call, Dict, Global, Node, PersId, Set, Text, new_text, use_of
from ckptfix.pickles.machine import MAPPINGS, UNRESOLVABLE, parse
from ckptfix.pickles.new_tensors import NewTensorArguments, NewTensors
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.reemit import reemit, refuse_two_states

PROTOCOL = 2


def unwritten(root: Node, parsed: Graph | None = None, *, path: str | None = None, where: str = "pickle") -> Graph:
    """Return the graph of `root`; each string in it must be a `Text`, one for each use.

    Args:
        parsed: the pickle that most of its nodes come from. It keeps the protocol, and the kind of bytes.
        path, where: for errors.

    Raises:
        Unsupported: the object cannot be written: a global was computed, or state was set twice on one object.
        BadPickle: torch could not have saved such an object.
    """
    graph = UnwrittenGraph(root, parsed)
    if parsed is not None and graph.pairs_of_states:
        refuse_two_states(parsed)
    if not graph.common or (parsed is not None and (parsed.rare or parsed.misuses)):
        # Only writing it tells which opcodes it needs that weights_only=True may refuse; most objects need none.
        written = parse(reemit(graph).pickle, path=path, where=where)
        graph.rare, graph.misuses = written.rare, written.misuses
    return graph


def text_like(graph: Graph) -> Callable[[str], Text]:
    """Return a function that returns a string for an `UnwrittenGraph`, pushed as in `graph`: as unicode or as bytes."""
    if graph.rare.keys().isdisjoint(BYTE_STRINGS):
        return new_text

    def text(value: str) -> Text:
        if type(value) is not Text or value.start < 0:
            return new_text(value)
        code = graph.strings[(value.origin or value).start]
        if code not in BYTE_STRINGS:
            return new_text(value)
        place = 2 + BYTE_STRINGS.index(code)
        return use_of(str(value), place, place)

    return text


def stream_of(graph: Graph) -> tuple[bytes, int, int]:
    """Return the bytes of the stream of `graph`, its start and its end; one that does not exist is written."""
    if not isinstance(graph, UnwrittenGraph):
        return graph.data, graph.start, graph.end
    data = reemit(graph).pickle
    return data, 0, len(data)


@final
class UnwrittenGraph(Graph):
    """The graph of an object that no stream holds.

    Attributes:
        common: torch writes all opcodes that the object needs.
        pairs_of_states: the state of an object is a pair.
    """

    __slots__ = ("_order", "_strings", "common", "pairs_of_states")

    def __init__(self, root: Node, parsed: Graph | None) -> None:
        super().__init__(b"", 0)
        head = b"" if parsed is None else parsed.strings[parsed.start : parsed.start + 2]
        self._strings = head.ljust(2) + bytes(BYTE_STRINGS)
        self.protocol = PROTOCOL if parsed is None else max(parsed.protocol, PROTOCOL)
        self.root = root
        self.common = True
        self.pairs_of_states = False
        self._order: list[PersId | Call] = []
        tensors: list[NewTensorArguments] = []
        named: dict[tuple[str, str], Global] = {}
        for node in self._nodes():
            if type(node) is Global:
                _refuse_computed(node)
                named.setdefault((node.module, node.name), node)
            elif type(node) is PersId:
                self._order.append(node)
                self.common = self.common and type(node.pid) is tuple
            elif type(node) is Call:
                made = node.folded
                if type(made) is NewTensorArguments and _is_bare(node):
                    self._order.append(node)
                    tensors.append(made)
                    for name in (node.func, made.type, made.hooks):
                        assert type(name) is Global
                        named.setdefault((name.module, name.name), name)
                else:
                    self.common = self.common and _is_common(node)
                    self.pairs_of_states |= type(node.state) is tuple and len(node.state) == 2
            elif type(node) in _RARE or (type(node) is int and node.bit_length() > LONG):
                self.common = False
        self.globals = list(named.values())
        self.loose_persids = [one for one in self._order if type(one) is PersId]
        calls = [one for one in self._order if type(one) is Call]
        self.phrases = NewTensors(tensors, calls) if tensors else None

    @property
    def strings(self) -> bytes:
        """The head of the stream that most nodes come from, and the opcodes of `BYTE_STRINGS`, as `text_like` says."""
        return self._strings

    def _nodes(self) -> Iterator[Node]:
        """Yield every node in the order in which it would be written, those that hold others once."""
        seen: set[int] = set()
        begun: set[int] = set()
        stack: list[Node | _End] = [self.root]
        while stack:
            node = stack.pop()
            if type(node) is _End:
                begun.discard(node.node)
                continue
            if type(node) in _HOLDERS:
                if id(node) in seen:
                    # A value that is created from itself, such as a tuple in a list in that tuple, needs a POP.
                    self.common = self.common and id(node) not in begun
                    continue
                seen.add(id(node))
            yield node  # type: ignore[misc]
            if type(node) is Call:
                if type(node.folded) is NewTensorArguments and _is_bare(node):
                    continue
                if node.state is not None:
                    stack.append(node.state)
                stack += [part for row in reversed(node.items or ()) for part in (row[1], row[0])]
                stack += reversed(node.elements or ())
                begun.add(id(node))
                stack += (_End(id(node)), node.kwargs, node.args, node.func)
            elif type(node) is tuple:
                begun.add(id(node))
                stack.append(_End(id(node)))
                stack += reversed(node)
            elif type(node) is list:
                stack += reversed(node)
            elif type(node) is Dict:
                stack += [part for row in reversed(node.items) for part in (row[1], row[0])]
            elif type(node) is Set:
                stack += reversed(node.elements)
            elif type(node) is PersId:
                stack.append(node.pid)

    def references(self) -> Iterator[PersId]:
        for one in self._order:
            made = one.folded if type(one) is Call else None
            yield made.reference() if type(made) is NewTensorArguments else _reference(one)

    def unfold(self) -> None:
        if self.phrases is None:
            return
        self.phrases = None
        self.loose_persids = [_reference(one) for one in self._order]


class _End:
    """The place after all values that a node is created from.

    Attributes:
        node: ``id`` of the node.
    """

    __slots__ = ("node",)

    def __init__(self, node: int) -> None:
        self.node = node


def _reference(node: PersId | Call) -> PersId:
    made = node if type(node) is PersId else node.arguments[0]
    assert type(made) is PersId
    return made


def _refuse_computed(name: Global) -> None:
    if name.full.startswith(UNRESOLVABLE) or "\n" in name.module or "\n" in name.name:
        raise Unsupported("a global whose name is computed", offset=name.start)


def _is_bare(node: Call) -> bool:
    """Return whether nothing is set on the result of a call."""
    return node.items is node.elements is node.state is None


def _is_common(node: Call) -> bool:
    """Return whether torch writes the opcodes of a call, whatever its arguments are."""
    func = node.func
    if type(func) is not Global or node.how not in ("REDUCE", "NEWOBJ") or node.elements:
        return False
    return not node.items or (func.module == "collections" and func.name in MAPPINGS)


LONG = 2000
"""Most bits of an int that is certainly pushed by LONG1: of 255 bytes."""

_RARE = frozenset((Set, bytes, bytearray))
_HOLDERS = frozenset((tuple, list, Dict, Set, PersId, Call))

"""A parsed pickle: its nodes, and other facts about the stream."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.pickles.folded import Phrases
from ckptfix.pickles.graph import Call, Global, Node, PersId, Text
from ckptfix.pickles.new_tensors import NewTensors


class Graph:
    """A parsed pickle.

    Attributes:
        data: the stream that was read; spans index it.
        start, end: where in `data` the pickle began, and the byte after its STOP.
        root: the node that STOP leaves.
        protocol: the protocol that PROTO states; 0 without PROTO.
        loose_persids: every persistent id outside folded calls, in order.
        globals: every global, in order of first use of each opcode.
        loose_gets: every use of a string that was fetched from the memo outside folded calls.
        phrases: the folded calls, in order; None if nothing was folded, and after `unfold`.
        frames: (offset of the FRAME opcode, length) of each frame.
        rare: opcode -> offset of its first use, for opcodes that torch does not usually write.
        misuses: (offset, message) of each opcode whose operands the unpickler of weights_only=True refuses.
    """

    __slots__ = (
        *("data", "end", "frames", "globals", "loose_gets", "loose_persids", "misuses"),
        *("phrases", "protocol", "rare", "root", "start"),
    )

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.start = start
        self.end = start
        self.root: Node = None
        self.protocol = 0
        self.loose_persids: list[PersId] = []
        self.globals: list[Global] = []
        self.loose_gets: list[Text] = []
        self.frames: list[tuple[int, int]] = []
        self.rare: dict[int, int] = {}
        self.misuses: list[tuple[int, str]] = []
        self.phrases: Phrases | NewTensors | None = None

    @property
    def strings(self) -> bytes:
        """The stream that spans of strings index."""
        return self.data

    def around(self, root: Node) -> Graph:
        """Return a graph of `root`, new nodes around some of these, to be written; nothing else of it is known."""
        made = Graph(self.strings, self.start)
        made.root, made.protocol = root, self.protocol
        return made

    @property
    def calls(self) -> list[Call]:
        """The folded calls, in order."""
        return [] if self.phrases is None else self.phrases.calls()

    @property
    def persids(self) -> list[PersId]:
        """Every persistent id, in order."""
        self.unfold()
        return self.loose_persids

    def references(self) -> Iterator[PersId]:
        """Yield every persistent id; those in folded calls, which come last, are copies, so that no node is made."""
        yield from self.loose_persids
        if self.phrases is not None:
            yield from self.phrases.references()

    def storages(self) -> set[str]:
        """Return the keys of the storages that persistent ids refer to: the third field of each, if it is text."""
        keys = {part for persid in self.loose_persids for part in persid.fields[2:3] if isinstance(part, str)}
        return keys if self.phrases is None else keys.union(self.phrases.storages())

    @property
    def gets(self) -> list[Text]:
        """Every use of a string that was fetched from the memo."""
        self.unfold()
        return self.loose_gets

    def unfold(self) -> None:
        """Create nodes for all folded calls, for code that reads every use of a string or of a storage."""
        if self.phrases is None:
            return
        for call in self.phrases.calls():
            persid = call.arguments[0]
            assert type(persid) is PersId
            self.loose_persids.append(persid)
            self.loose_gets += (part for part in persid.fields if type(part) is Text and part.origin is not None)
        self.loose_persids.sort(key=lambda persid: persid.position)
        self.loose_gets.sort(key=lambda use: use.start)
        self.phrases = None

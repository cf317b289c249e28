"""Items of a mapping that are folded calls behind their keys: pairs of nodes when something asks for them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import final

from ckptfix.pickles.folded import Alone, Phrases
from ckptfix.pickles.graph import Call, Dict, Node, Text


@final
class Rows:
    """Pairs, and ranges of `phrases` that stand for pairs, in the order of the mapping."""

    __slots__ = ("_names", "chunks", "phrases")

    def __init__(self, phrases: Phrases, before: list[tuple[Node, Node]] | None) -> None:
        self.phrases = phrases
        self.chunks: list[range | list[tuple[Node, Node]]] = [before] if before else []
        self._names: tuple[str, ...] | None = None

    def take(self, first: int, last: int) -> None:
        """Add the phrases from `first` to the one before `last`."""
        self._names = None
        chunk = self.chunks[-1] if self.chunks else None
        if isinstance(chunk, range) and chunk.stop == first:
            self.chunks[-1] = range(chunk.start, last)
        else:
            self.chunks.append(range(first, last))

    def extend(self, items: Iterable[tuple[Node, Node]]) -> None:
        """Add pairs behind them."""
        added = list(items)
        self._names = None
        if added and self.chunks and isinstance(self.chunks[-1], list):
            self.chunks[-1] += added
        elif added:
            self.chunks.append(added)

    def pairs(self) -> list[tuple[Node, Node]]:
        """All of them as nodes, each always the same one."""
        return list(self)

    def __iter__(self) -> Iterator[tuple[Node, Node]]:
        phrases = self.phrases
        for chunk in self.chunks:
            if isinstance(chunk, range):
                yield from ((phrases.key(row), phrases.call(row)) for row in chunk)
            else:
                yield from chunk

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def ranges(self) -> list[range]:
        """The phrases alone."""
        return [chunk for chunk in self.chunks if isinstance(chunk, range)]

    def others(self) -> list[tuple[Node, Node]]:
        """The pairs alone."""
        return [pair for chunk in self.chunks if isinstance(chunk, list) for pair in chunk]

    def values(self) -> Iterator[Node]:
        """The values, in order."""
        for chunk in self.chunks:
            yield from map(self.phrases.call, chunk) if isinstance(chunk, range) else (value for _, value in chunk)

    def unmade(self) -> Iterator[Node | Alone]:
        """The same; those that are no nodes yet stay so."""
        for chunk in self.chunks:
            yield from self.phrases.unmade(chunk) if isinstance(chunk, range) else (value for _, value in chunk)

    def names(self) -> tuple[str, ...]:
        """The keys, in order, where all of them are text; always the same object, as every name site needs them."""
        if self._names is None:
            found: list[str] = []
            for chunk in self.chunks:
                found += self.phrases.names(chunk) if isinstance(chunk, range) else (str(key) for key, _ in chunk)
            self._names = tuple(found)
        return self._names

    def nodes(self) -> list[Text]:
        """The keys that are nodes already; no other one is fetched from the memo by anything."""
        found = [key for key, _ in self.others() if type(key) is Text]
        return found + [key for rows in self.ranges for key in self.phrases.known_keys(rows).values()]

    def starts(self) -> list[array[int]]:
        """Where each key of `ranges` is pushed."""
        return [self.phrases.key_at[rows.start : rows.stop] for rows in self.ranges]

    def spans(self) -> Iterator[tuple[int, int, str]]:
        """(start, end, key) of what pushes each key of `ranges`."""
        phrases, names = self.phrases, iter(self.names())
        for chunk in self.chunks:
            if isinstance(chunk, list):
                deque(islice(names, len(chunk)), 0)
                continue
            for start, name in zip(phrases.key_at[chunk.start : chunk.stop], names, strict=False):
                yield start, start + 5 + phrases.data[start + 1], name


def rows_of(node: Node) -> Rows | None:
    """The items of a mapping of which some are folded calls and no nodes yet; None for others."""
    if (type(node) is Dict or type(node) is Call) and type(node.rows) is Rows and node.rows.ranges:
        return node.rows
    return None

"""Items of a mapping whose values are folded calls: pairs of nodes are created when code asks for them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import final

from ckptfix.pickles.folded import Alone, Phrases
from ckptfix.pickles.graph import Call, Dict, Node, Text, children, labelled, parts_of_call


@final
class Rows:
    """Pairs, and ranges of `phrases` that represent pairs, in the order of the mapping."""

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
        """Append pairs."""
        added = list(items)
        self._names = None
        if added and self.chunks and isinstance(self.chunks[-1], list):
            self.chunks[-1] += added
        elif added:
            self.chunks.append(added)

    def pairs(self) -> list[tuple[Node, Node]]:
        """Return all pairs as nodes, always the same ones."""
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
        """The ranges of phrases."""
        return [chunk for chunk in self.chunks if isinstance(chunk, range)]

    def others(self) -> list[tuple[Node, Node]]:
        """Return the pairs that are not phrases."""
        return [pair for chunk in self.chunks if isinstance(chunk, list) for pair in chunk]

    def values(self) -> Iterator[Node]:
        """Yield the values, in order."""
        for chunk in self.chunks:
            yield from map(self.phrases.call, chunk) if isinstance(chunk, range) else (value for _, value in chunk)

    def unmade(self) -> Iterator[Node | Alone]:
        """Yield the values, in order, without creating nodes for folded calls."""
        for chunk in self.chunks:
            yield from self.phrases.unmade(chunk) if isinstance(chunk, range) else (value for _, value in chunk)

    def names(self) -> tuple[str, ...]:
        """Return the keys, in order, if all of them are text; always the same object, which all name sites share."""
        if self._names is None:
            found: list[str] = []
            for chunk in self.chunks:
                found += self.phrases.names(chunk) if isinstance(chunk, range) else (str(key) for key, _ in chunk)
            self._names = tuple(found)
        return self._names

    def nodes(self) -> list[Text]:
        """Return the keys that are already nodes; only these can be fetched from the memo."""
        found = [key for key, _ in self.others() if type(key) is Text]
        return found + [key for rows in self.ranges for key in self.phrases.known_keys(rows).values()]

    def starts(self) -> list[array[int]]:
        """Return the offsets at which the keys of `ranges` are pushed."""
        return [self.phrases.key_at[rows.start : rows.stop] for rows in self.ranges]

    def spans(self) -> Iterator[tuple[int, int, str]]:
        """Yield (start, end, key) of the opcode that pushes each key of `ranges`."""
        phrases, names = self.phrases, iter(self.names())
        for chunk in self.chunks:
            if isinstance(chunk, list):
                deque(islice(names, len(chunk)), 0)
                continue
            for start, name in zip(phrases.key_at[chunk.start : chunk.stop], names, strict=False):
                yield start, start + 5 + phrases.data[start + 1], name


def unfolded_children(node: Node) -> Iterable[tuple[str, Node]]:
    """Return the `children` of a node without those in `Rows` that are folded calls, which hold nothing."""
    rows = rows_of(node)
    if rows is None or not all(type(key) is Text for key, _ in rows.others()):
        return children(node)
    if len(set(names := rows.names())) < len(names):
        return children(node)
    return parts_of_call(node, rows.others()) if type(node) is Call else labelled(rows.others())


def rows_of(node: Node) -> Rows | None:
    """Return the items of a mapping if some of them are folded calls that are not nodes yet; None otherwise."""
    if (type(node) is Dict or type(node) is Call) and type(node.rows) is Rows and node.rows.ranges:
        return node.rows
    return None

"""Renames in a `.metadata` that torch wrote: new names replace the old ones, and every other opcode is unchanged.

A large checkpoint has hundreds of thousands of uses of names, and some ten million opcodes around them. The skimmer
finds these uses, and they are edited as in any pickle (`pickles.patch`), one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptfix.formats.dcp.metadata import Path, StorageInfo, fields_of
from ckptfix.formats.dcp.skim import GET, INT, OTHERWISE, Otherwise, Skimmed, Skimmer, StoredItem, opcodes_of
from ckptfix.pickles import Graph, Text
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.collector import gc_paused
from ckptfix.pickles.graph import Node, use_of
from ckptfix.pickles.opcodes import pushed_int
from ckptfix.pickles.patch import Patch, int_opcode, splice, string_opcode

Names = Mapping[str, tuple[str, Path]]
"""The name of a key -> its new name, and its new path."""


class Moves(NamedTuple):
    """The new locations of items: by the name of their key, or else by their old location."""

    named: Mapping[str, StorageInfo]
    placed: Mapping[StorageInfo, StorageInfo]

    def __bool__(self) -> bool:
        return bool(self.named or self.placed)


@gc_paused
def respelled(data: bytes, names: Names, moves: Moves) -> bytes | None:
    """Return the pickle of a `.metadata` with renamed keys; None if only its nodes can be edited.

    Args:
        names: the keys whose name or path changes.
    """
    unframed = opcodes_of(data)
    if unframed is None:
        return None
    reader = _Uses(*unframed)
    try:
        said = reader.run()
        wanted = _wanted(said, names, moves)
        numbers = list(_numbers(reader.data, said, moves))
    except OTHERWISE:
        return None
    patches = reader.patches(wanted)
    if patches is None:
        return None
    graph = Graph(reader.data, 0)
    graph.end = len(reader.data)
    return data[:2] + splice(graph, sorted(patches + numbers))


class _Uses(Skimmer):
    """A reader that records each string as a use, with the position where it is pushed."""

    def __init__(self, data: bytes, frames: list[int]) -> None:
        super().__init__(data, frames)
        self._written: dict[int, Text] = {}
        self._fetched: dict[int, Text] = {}
        self._numbers: set[int] = set()

    def text(self, pos: int) -> tuple[str, int]:
        value, end = super().text(pos)
        use = self._written[pos] = use_of(value, pos, end, None)
        return use, end

    def number(self, get: bytes) -> int:
        found = super().number(get)
        self._numbers.add(found)
        return found

    def name(self, pos: int) -> tuple[str | None, int]:
        end = pos + _GETS.get(self.data[pos], 0)
        use = self._fetch(pos, end) if end > pos else None
        return super().name(pos) if use is None else (use, end)

    def got(self, pos: int, end: int) -> Node:
        use = self._fetch(pos, end)
        return super().got(pos, end) if use is None else use

    def _fetch(self, pos: int, end: int) -> Text | None:
        """Return the use of a string that is fetched there; None for anything else."""
        index = int.from_bytes(self.data[pos + 1 : end], "little")
        origin = self.memo.get(index) if index < self.count else None
        if type(origin) is not Text:
            return None
        use = self._fetched[pos] = use_of(origin, pos, end, origin)
        return use

    def patches(self, wanted: Mapping[int, str]) -> list[Patch] | None:
        """Return patches that give each use its value; None if other opcodes fetch a string that would change."""
        data = self.data
        used = {op.SHORT_BINUNICODE}
        changed: set[int] = set()
        made: list[Patch] = []
        for use in self._written.values():
            value = wanted.get(use.start, use)
            if value != use:
                changed.add(id(use))
                made.append(Patch(use.start, use.end, string_opcode(value, 4, op.SHORT_BINUNICODE, used)))
        for use in self._fetched.values():
            origin = use.origin
            assert origin is not None
            value = wanted.get(use.start, use)
            if value != (wanted.get(origin.start, origin) if id(origin) in changed else origin):
                made.append(Patch(use.start, use.end, string_opcode(value, 4, data[origin.start], used)))
        fixed = (self.memo.get(number) for number in self._numbers)
        return None if any(id(node) in changed for node in fixed) else made


_GETS = {op.BINGET: 2, op.LONG_BINGET: 5}


def _wanted(said: Skimmed, names: Names, moves: Moves) -> dict[int, str]:
    """Return position of a name -> its new value.

    Raises:
        Otherwise: a use cannot be edited, or stands for several names.
    """
    wanted: dict[int, str] = {}
    for use, value in _names(said, names, moves):
        if type(use) is not Text:
            if use == value:
                continue
            raise Otherwise
        # The strings of an object that is used in several places are pushed once, as one use.
        if wanted.setdefault(use.start, value) != value:
            raise Otherwise
    return wanted


def _names(said: Skimmed, names: Names, moves: Moves) -> Iterator[tuple[Node, str]]:
    """Yield every use of a key or of a file name, with its new value."""
    for fqn, _ in said.keys:
        yield fqn, names[str(fqn)][0] if fqn in names else str(fqn)
    for fqn, path in said.paths or ():
        new = names.get(str(fqn))
        yield fqn, str(fqn) if new is None else new[0]
        parts = path if isinstance(path, tuple | list) else ()
        if new is not None and len(parts) != len(new[1]):
            raise Otherwise
        for one, key in zip(parts, parts if new is None else new[1], strict=True):
            if isinstance(one, str) or one != key:
                yield one, str(key)
    for row in said.items:
        name, file = names_of(row)
        place = _moved(row, moves)
        yield name, names[str(name)][0] if name in names else str(name)
        yield file, str(file) if place is None else place.name


def names_of(row: StoredItem | tuple[Node, Node]) -> tuple[Node, Node]:
    """Return the key of an item, and the name of its file."""
    if isinstance(row, StoredItem):
        return row.fqn, row.name
    return fields_of(row[0]).get("fqn"), fields_of(row[1]).get("relative_path")


_FIELDS = ["relative_path", "offset", "length"]


def _moved(row: StoredItem | tuple[Node, Node], moves: Moves) -> StorageInfo | None:
    """Return the new location of an item; None if it did not move."""
    if not moves:
        return None
    fqn, file = names_of(row)
    named = moves.named.get(str(fqn))
    if named is not None or not moves.placed:
        return named
    return moves.placed.get(StorageInfo(str(file), *_numbers_of(row)))


def _numbers_of(row: StoredItem | tuple[Node, Node]) -> tuple[int, int]:
    """Return the offset and the length of an item. Raises Otherwise unless they are the last fields, in this order."""
    if isinstance(row, StoredItem):
        return row.offset, row.length
    fields = fields_of(row[1])
    offset, length = fields.get("offset"), fields.get("length")
    if [*fields] != _FIELDS or type(offset) is not int or type(length) is not int:
        raise Otherwise
    return offset, length


_STRING = rb"(?:%b|\x8c\x06(?:offset|length)\x94|X\x06\0\0\0(?:offset|length)\x94)" % GET
_BEHIND = re.compile(rb"\x94?%b(%b)%b(%b)ub" % (_STRING, INT, _STRING, INT), re.DOTALL)
"""The opcodes after the name of a file: "offset" and "length", as they are pushed the first time and later."""


def _numbers(data: bytes, said: Skimmed, moves: Moves) -> Iterator[Patch]:
    """Yield patches of the numbers of items that moved.

    Raises:
        Otherwise: a number is not where it is expected.
    """
    for row in said.items if moves else ():
        place = _moved(row, moves)
        if place is None:
            continue
        _, file = names_of(row)
        found = _BEHIND.match(data, file.end) if type(file) is Text else None
        if found is None or tuple(map(pushed_int, found.groups())) != _numbers_of(row):
            raise Otherwise
        for group, number in ((1, place.offset), (2, place.length)):
            if pushed_int(found[group]) != number:
                yield Patch(found.start(group), found.end(group), int_opcode(number))

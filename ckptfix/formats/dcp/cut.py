"""Removal of entries from the text of a `.metadata` that torch wrote; the rest keeps its meaning.

An opcode that creates an object numbers it (MEMOIZE), in order, and others fetch it by that number. Objects behind a
dropped entry therefore get lower numbers, and an object that the entry created is created where it is fetched first.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.formats.dcp.respell import names_of
from ckptfix.formats.dcp.skim import GET, INT, ITEMS, KEYS, OTHERWISE, READ, TUPLES, Otherwise, Skimmer, opcodes_of
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.collector import gc_paused


@gc_paused
def without(data: bytes, gone: Collection[str]) -> bytes | None:
    """Return the pickle of a `.metadata` without the keys `gone`; None if only its nodes can be edited."""
    unframed = opcodes_of(data)
    if unframed is None:
        return None
    reader = _Entries(*unframed)
    try:
        reader.run()
        copy = _Copy(reader, gone)
        del reader
        return data[:2] + copy.run()
    except OTHERWISE:
        return None


class _Place(NamedTuple):
    """The opcodes of a key and its value, and the memo numbers that they assign."""

    start: int
    end: int
    first: int
    last: int


class _Entries(Skimmer):
    """A reader that notes the position of each entry read as a whole, and where the dicts are created."""

    def __init__(self, data: bytes, frames: list[int]) -> None:
        super().__init__(data, frames)
        self.noted = array("Q")

    def tensor(self, pos: int) -> int:
        return self._noted(pos, self.count, super().tensor(pos))

    def path(self, pos: int) -> int:
        return self._noted(pos, self.count, super().path(pos))

    def item(self, pos: int) -> int:
        return self._noted(pos, self.count, super().item(pos))

    def _noted(self, pos: int, first: int, end: int) -> int:
        if end != pos:
            self.noted.extend((pos, end, first, self.count))
        return end

    def stack(self) -> _Stack:
        """Return the stack of all opcodes, without the content of entries that were read as a whole."""
        stack = _Stack(self.data, 0, self.begins)
        noted, at = iter(self.noted), 0
        for place in map(_Place, noted, noted, noted, noted):
            stack.run(at, place.start)
            stack.entry(place)
            at = place.end
        stack.run(at, len(self.data))
        return stack

    def names(self, name: str) -> Iterator[str]:
        """Return the names of the entries of a dict, in order."""
        if name == ITEMS:
            return (str(names_of(row)[0]) for row in self.items)
        return (str(row[0]) for row in (self.keys if name == KEYS else self.paths))


@dataclass(slots=True, eq=False)
class _Value:
    """A value that some opcodes push.

    Attributes:
        first: the next number at its start.
        parts: the values that it consists of, in order.
        number: its own number; -1 without one.
        fetched: the number that it is fetched by; -1 if it is created here.
    """

    start: int
    end: int
    first: int
    parts: list[_Value] = field(default_factory=list)
    number: int = -1
    fetched: int = -1
    depth: int = 0

    def add(self, parts: list[_Value], end: int) -> None:
        if self.fetched >= 0:
            raise Otherwise
        self.parts += parts
        self.end = end
        self.depth = max((self.depth, *(part.depth + 1 for part in parts)))
        if self.depth > MAX_DEPTH:
            raise Otherwise


MAX_DEPTH = 100

_ATTACHED = {op.SETITEM: 2, op.APPEND: 1, op.BUILD: 1}
_JOINED = {**TUPLES, op.NEWOBJ: 2, op.REDUCE: 2, op.STACK_GLOBAL: 2}


class _Stack:
    """The values that opcodes push, with their positions.

    Args:
        first: the next number.
        dicts: position -> name of the dicts of entries.

    Attributes:
        sets: each group of entries that is set at once: the name of the dict, the whole group, and its entries.
    """

    def __init__(self, data: bytes, first: int, dicts: Mapping[int, str]) -> None:
        self._data = data
        self._count = first
        self._dicts = dicts
        self._marks: list[tuple[int, int]] = []
        self.values: list[_Value] = []
        self.sets: list[tuple[str, _Place, list[_Place]]] = []

    def entry(self, place: _Place) -> None:
        """Push a key and its value, which are known to be self-contained."""
        if place.first != self._count:
            raise Otherwise
        both = _Value(place.start, place.end, place.first)
        self.values += (both, both)
        self._count = place.last

    def run(self, start: int, stop: int) -> None:
        values = self.values
        for opcode in op.walk(self._data, start, stop):
            code, end = opcode.code, opcode.end
            if code == op.MEMOIZE:
                value = values[-1]
                if value.number >= 0 or value.fetched >= 0:
                    raise Otherwise
                value.number, value.end = self._count, end
                self._count += 1
            elif code == op.MARK:
                self._marks.append((len(values), opcode.start))
            elif code == op.TUPLE:
                self._join(*self._marks.pop(), end)
            elif _JOINED.get(code):
                height = len(values) - _JOINED[code]
                self._join(height, values[height].start, end)
            elif code in _ATTACHED:
                height = len(values) - _ATTACHED[code]
                self._attach(height, values[height].start, end)
            elif code == op.SETITEMS or code == op.APPENDS:
                self._attach(*self._marks.pop(), end)
            elif code in (op.BINGET, op.LONG_BINGET):
                number = int.from_bytes(self._data[opcode.arg : end], "little")
                values.append(_Value(opcode.start, end, self._count, fetched=number))
            elif code != op.STOP:
                values.append(_Value(opcode.start, end, self._count))

    def _join(self, height: int, begin: int, end: int) -> None:
        parts = self.values[height:]
        made = _Value(begin, end, parts[0].first if parts else self._count)
        made.add(parts, end)
        self.values[height:] = [made]

    def _attach(self, height: int, begin: int, end: int) -> None:
        target, parts = self.values[height - 1], self.values[height:]
        del self.values[height:]
        name = self._dicts.get(target.start)
        if name is None:
            target.add(parts, end)
        elif parts:
            places = list(self._places(parts))
            self.sets.append((name, _Place(begin, end, places[0].first, self._count), places))

    def _places(self, flat: list[_Value]) -> Iterator[_Place]:
        """Yield the positions of keys and values in a flat list."""
        lasts = [*(key.first for key in flat[2::2]), self._count]
        for key, value, last in zip(flat[::2], flat[1::2], lasts, strict=True):
            yield _Place(key.start, value.end, key.first, last)


_OTHER = rb"[\x94NR)\x81}bu(t\]ae\x93.\x85-\x89s]|%b" % INT
_FETCHES = re.compile(rb"((?:%b)*)(%b|\Z)" % (_OTHER, GET), re.DOTALL)
"""A number that is fetched, or the end, and the opcodes before it; without strings."""

_RUN = re.compile(rb"(?:%b|%b){1,4000}" % (_OTHER, GET), re.DOTALL)
_TOGETHER = 100
"""The number of entries that are copied at once."""

_SHORT, _LONG = struct.Struct("<BB").pack, struct.Struct("<BL").pack


def _got(number: int) -> bytes:
    """Return the opcode that fetches the object of a number, which is given plus 1."""
    return _SHORT(op.BINGET, number - 1) if number <= 256 else _LONG(op.LONG_BINGET, number - 1)


class _Copy:
    """A copy of the opcodes of a `.metadata` without those of some entries.

    Args:
        reader: a reader that has read it.
        gone: the keys of the entries.
    """

    def __init__(self, reader: _Entries, gone: Collection[str]) -> None:
        self.data = reader.data
        self.out: list[bytes] = []
        self.given = 0
        # The old number -> the new one plus 1; 0 where none is assigned yet.
        self.new = array("Q", bytes(8 * reader.count))
        self.gone: list[_Place] = []
        self.firsts: list[int] = []
        self._values: dict[int, _Value] = {}
        self._known: dict[bytes, bytes] = {}
        self._spans = list(self._spans_of(reader, gone))
        self.firsts = [place.first for place in self.gone]

    def _spans_of(self, reader: _Entries, gone: Collection[str]) -> Iterator[tuple[_Place, bool]]:
        """Yield the spans that are copied whole or dropped, in order."""
        names = {name: reader.names(name) for name in READ}
        for name, whole, places in reader.stack().sets:
            goes = [next(names[name]) in gone for _ in places]
            self.gone += (place for place, one in zip(places, goes, strict=True) if one)
            yield from [(whole, True)] if all(goes) else zip(places, goes, strict=True)
        if any(True for left in names.values() for _ in left):
            raise Otherwise

    def run(self) -> bytes:
        spans = iter(self._spans)
        first = next(place for place, goes in spans if goes)
        # Everything before the first dropped entry is unchanged.
        self.out.append(self.data[: first.start])
        self.new[: first.first] = array("Q", range(1, first.first + 1))
        self.given = first.first
        at, number = first.end, first.last
        kept: list[_Place] = []
        for place, goes in spans:
            if kept and (goes or at != place.start or len(kept) == _TOGETHER):
                self._copy(kept)
                kept = []
            if at != place.start:
                self._slowly(at, place.start, number)
            if not goes:
                kept.append(place)
            at, number = place.end, place.last
        self._copy(kept)
        self._slowly(at, len(self.data), number)
        return b"".join(self.out)

    def _copy(self, places: list[_Place]) -> None:
        """Copy adjacent entries."""
        if not places:
            return
        start, first = places[0].start, places[0].first
        end, last = places[-1].end, places[-1].last
        if self._quickly(start, end, first, last):
            return
        if len(places) == 1:
            self._slowly(start, end, first)
        else:
            for place in places:
                self._copy([place])

    def _quickly(self, start: int, end: int, first: int, last: int) -> bool:
        """Copy opcodes that fetch only objects with new numbers; otherwise, change nothing and return False.

        Args:
            first, last: the next number before and after.
        """
        data, new, known = self.data, self.new, self._known
        new[first:last] = array("Q", range(self.given + 1, self.given + 1 + last - first))
        made = []
        while start < end:
            run = _RUN.match(data, start, end)
            if run is None:
                text = next(op.walk(data, start, end))
                if text.code not in (op.SHORT_BINUNICODE, op.BINUNICODE):
                    raise Otherwise
                made.append(data[start : text.end])
                start = text.end
                continue
            for opcodes, get in _FETCHES.findall(data, start, run.end()):
                made.append(opcodes)
                if get:
                    got = known.get(get)
                    if got is None:
                        old = int.from_bytes(get[1:], "little")
                        number = new[old]
                        if not number:
                            new[first:last] = array("Q", bytes(8 * (last - first)))
                            return False
                        got = _got(number)
                        if old < first and len(get) == 2:
                            known[get] = got
                    made.append(got)
            start = run.end()
        self.given += last - first
        self.out.append(b"".join(made))
        return True

    def _slowly(self, start: int, end: int, number: int) -> None:
        """Copy opcodes one by one, and create fetched objects that do not exist yet. `number` is the next one."""
        for opcode in op.walk(self.data, start, end):
            if opcode.code == op.MEMOIZE:
                self._give(number)
                number += 1
            elif opcode.code in (op.BINGET, op.LONG_BINGET):
                self._fetch(int.from_bytes(self.data[opcode.arg : opcode.end], "little"))
            else:
                self.out.append(self.data[opcode.start : opcode.end])

    def _give(self, number: int) -> None:
        if self.new[number]:
            raise Otherwise
        self.given += 1
        self.new[number] = self.given
        self.out.append(b"\x94")

    def _fetch(self, number: int) -> None:
        new = self.new[number]
        if new:
            self.out.append(_got(new))
        else:
            self._make(self._value(number))

    def _make(self, value: _Value) -> None:
        if value.fetched >= 0 or (value.number >= 0 and self.new[value.number]):
            self._fetch(value.fetched if value.fetched >= 0 else value.number)
            return
        at = value.start
        for part in value.parts:
            self._slowly(at, part.start, value.number)
            self._make(part)
            at = part.end
        self._slowly(at, value.end, value.number)

    def _value(self, number: int) -> _Value:
        """Return the value with this number, which a dropped entry created."""
        found = self._values.get(number)
        if found is None:
            place = self.gone[bisect_right(self.firsts, number) - 1]
            stack = _Stack(self.data, place.first, {})
            stack.run(place.start, place.end)
            while stack.values:
                value = stack.values.pop()
                if value.number >= 0:
                    self._values[value.number] = value
                stack.values += value.parts
            found = self._values[number]
        return found

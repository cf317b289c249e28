"""Calls that rebuild plain tensors, each read in one piece: their arguments become nodes when code asks for them.

Most of a large checkpoint is one phrase of some thirty opcodes, repeated for each tensor. If a phrase is exactly what
torch writes, it is read as a whole, and its offset in the stream is kept instead of some twenty nodes.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, final

from ckptfix.pickles.graph import Call, Global, Node, PersId, Text, new_text, use_of
from ckptfix.pickles.molds import PHRASE, CallTemplate
from ckptfix.pickles.molds import numbers as numbers_of
from ckptfix.pickles.new_tensors import NewTensorArguments

AFTER_REDUCE = 6
"""Bytes from the REDUCE of a phrase to its end."""

NO_KEY = 0xFFFFFFFF

_MOST_NUMBERS = 0xFFFFFF00

_FEWEST = 16
"""Phrases that are read before their memo numbers are checked."""

_U32 = struct.Struct("<I").unpack_from
_P32 = struct.Struct("<I").pack


@final
class Phrases:
    """The phrases of a stream, in order: columns of numbers, and nodes for the phrases that were asked for.

    Attributes:
        starts: offset of each phrase, after its function.
        firsts: the first memo number that the phrase assigns, or that of the key before it.
        key_at: offset of the key before it, a BINUNICODE of less than 256 bytes, in a mapping; otherwise `NO_KEY`.
        molds: all molds; `of` is the index of each phrase's mold.
    """

    __slots__ = (
        *("_apart", "_calls", "_keys", "_known", "_location", "_molds", "_next", "_width"),
        *("data", "firsts", "key_at", "molds", "of", "starts"),
    )

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.starts = array("I")
        self.firsts = array("I")
        self.of = array("I")
        self.key_at = array("I")
        self.molds: list[CallTemplate] = []
        self._calls: list[Call | None] = []
        self._keys: dict[int, Text] = {}
        # Phrases whose key was read separately, so that its memo number does not precede theirs.
        self._apart: set[int] = set()
        # Molds by a few bytes of a phrase that are quick to read, and by everything that distinguishes one.
        self._molds: dict[tuple[int, bytes, bytes], CallTemplate] = {}
        self._known: dict[tuple[bytes | int | None, ...], CallTemplate] = {}
        self._next = 0
        self._width = 0
        self._location = 0

    def read(self, func: Global, at: int, memo: dict[int, Node]) -> int:
        """Read the call of `func` whose arguments begin at `at`.

        Returns:
            Its number; -1 if it is not written as torch writes it.
        """
        found = self._mold_at(func, at, memo)
        if found is None:
            return -1
        mold, first = found
        # Only calls with unused memo numbers are read, so no earlier owner of a number has to be kept.
        if first < self._next or not memo.keys().isdisjoint(range(first, first + mold.given)):
            return -1
        if not mold.fetches_its_own(memo):
            return -1
        self._take(at, mold, first, NO_KEY)
        self._next = first + mold.given
        return len(self.starts) - 1

    def end_of(self, row: int) -> int:
        """Return the offset after a phrase."""
        return self.starts[row] + self.molds[self.of[row]].length

    def run(self, func: Global, get: bytes, at: int, memo: dict[int, Node]) -> int:
        """Read the consecutive keys and calls of `func`, which `get` fetches, from `at` on.

        Returns:
            Where they end.
        """
        most = _FEWEST
        while True:
            begun = len(self.starts)
            at = self._run(func, get, at, memo, most)
            if len(self.starts) < begun + most:
                return at
            # Phrases that are given up may be read again: these are never many more than the phrases that were kept.
            most *= 2

    def _run(self, func: Global, get: bytes, at: int, memo: dict[int, Node], most: int) -> int:
        """Read up to `most` keys and calls, like `run`."""
        data, molds, numbered = self.data, self._molds, _P32
        sure: set[int] = set()
        width = len(get) + 5
        begun = len(self.starts)
        number = self._next
        size = len(data)
        starts, firsts, of, keys = self.starts, self.firsts, self.of, self.key_at
        for _ in range(most):
            if at + 1 >= size:
                break
            key_end = at + 5 + data[at + 1]
            start = key_end + width
            if (
                data[key_end:start] != b"r" + numbered(number) + get  # LONG_BINPUT
                or data[at] != 0x58  # BINUNICODE
                or data[at + 2 : at + 5] != b"\0\0\0"
                or start + self._width >= size
            ):
                break
            # The same check as in `_mold_at`, with the memo number that the phrase must have.
            count = data[start + self._width]
            end = start + self._width + 4 + count
            behind = end + self._location
            mold = molds.get((count, data[behind : behind + 3], data[behind + 11 : behind + 15]))
            if mold is None or not (
                int.from_bytes(data[start : start + mold.length], "little")
                == mold.constant
                + (number + 1) * mold.factor
                + (int.from_bytes(digits := data[start + mold.starts[4] : end], "little") << mold.shift)
                and digits.isdigit()
                and number < _MOST_NUMBERS
                and mold.func is func
            ):
                found = self._mold_at(func, start, memo)
                if found is None or found[1] != number + 1:
                    break
                mold = found[0]
            place = mold.place
            if place not in sure:
                if not mold.fetches_its_own(memo):
                    break
                sure.add(place)
            key = data[at + 5 : key_end]
            if not key.isascii() and not _is_text(key):
                break  # the machine reports this error
            starts.append(start)
            firsts.append(number)
            of.append(place)
            keys.append(at)
            number += 1 + mold.given
            at = start + mold.length
        if len(starts) > begun:
            at = self._cut(begun, number, at, memo)
            self._calls += [None] * (len(starts) - begun)
        return at

    def _cut(self, begun: int, number: int, at: int, memo: dict[int, Node]) -> int:
        """Drop all phrases after the first conflict with a memo number in `memo`; return the end of the rest."""
        given = range(self.firsts[begun], number)
        twice = given if len(given) < len(memo) else memo
        wrong = min((index for index in twice if index in memo and index in given), default=None)
        if wrong is None:
            self._next = number
            return at
        row = bisect_right(self.firsts, wrong) - 1
        self._next, at = self.firsts[row], self.key_at[row]
        for column in (self.starts, self.firsts, self.of, self.key_at):
            del column[row:]
        return at

    def _mold_at(self, func: Global, at: int, memo: dict[int, Node]) -> tuple[CallTemplate, int] | None:
        """Return the mold of the phrase at `at`, and its first memo number; None if there is no phrase."""
        data = self.data
        width = self._width
        try:
            count = data[at + width]
            key_end = at + width + 4 + count
            behind = key_end + self._location
            mold = self._molds.get((count, data[behind : behind + 3], data[behind + 11 : behind + 15]))
            if mold is None or mold.func is not func or not mold.fits(data, at, key_end):
                mold = self._new_mold(func, at, memo)
                if mold is None:
                    return None
                key_end = at + mold.ends[4]
            return mold, _U32(data, key_end + 1)[0]
        except (IndexError, struct.error):  # the stream ends here
            return None

    def _take(self, at: int, mold: CallTemplate, first: int, key_at: int) -> None:
        """Append a phrase to the columns."""
        self.starts.append(at)
        self.firsts.append(first)
        self.of.append(mold.place)
        self.key_at.append(key_at)
        self._calls.append(None)

    def take_key(self, row: int, key: Text, width: int) -> bool:
        """Keep `key`, which was read separately, as the key of phrase `row`.

        `width` is the length of the opcode between them, which fetches the function.

        Return False, and keep nothing, if the key is not pushed and numbered like the others.
        """
        data, at = self.data, key.start
        end = at + 5 + data[at + 1]
        sound = data[at] == 0x58 and data[at + 2 : at + 5] == b"\0\0\0" and key.end == end and key.origin is None
        if not sound or self.starts[row] - width - end not in (0, 2, 5):
            return False
        self.key_at[row] = at
        self._keys[row] = key
        self._apart.add(row)
        return True

    def _new_mold(self, func: Global, at: int, memo: dict[int, Node]) -> CallTemplate | None:
        """Return the mold of the phrase at `at`, a new one if needed; None if there is no phrase."""
        found = PHRASE.match(self.data, at)
        if found is None or found[3][0] != len(found[4]):
            return None
        nodes = tuple(memo.get(number) for number in numbers_of(found))
        storage, cls, location, hooks = nodes
        if type(storage) is not Text or storage != "storage" or type(location) is not Text or location == "storage":
            return None
        if type(cls) is not Global or type(hooks) is not Global or hooks.full != "collections.OrderedDict":
            return None
        all_of_it = (id(func), *map(id, nodes), *found.group(1, 2, 3, 6, 7, 9, 10, 12, 14, 15))
        mold = self._known.get(all_of_it)
        if mold is None:
            mold = CallTemplate(len(self.molds), func, found, (storage, cls, location, hooks))
        if not mold.fits(self.data, at, found.end(4)):
            return None
        if mold.place == len(self.molds):
            self.molds.append(mold)
            self._known[all_of_it] = mold
        self._width = mold.starts[3]
        self._location = mold.starts[7] - mold.ends[4]
        behind = found.start(7)
        seen = self.data[behind : behind + 3], self.data[behind + 11 : behind + 15]
        self._molds[len(found[4]), *seen] = mold
        return mold

    def call(self, row: int) -> Call:
        """Return the call of a phrase."""
        call = self._calls[row]
        if call is None:
            mold = self.molds[self.of[row]]
            position = self.starts[row] + mold.length - AFTER_REDUCE
            call = self._calls[row] = Call.folded_at(mold.func, position, self)
        return call

    def calls(self) -> list[Call]:
        """Return the calls of all phrases."""
        return list(map(self.call, range(len(self.starts))))

    def key(self, row: int) -> Text:
        """Return the key before a phrase, which must have one in `key_at`."""
        key = self._keys.get(row)
        if key is None:
            at = self.key_at[row]
            end = at + 5 + self.data[at + 1]
            key = self._keys[row] = use_of(str(self.data[at + 5 : end], "utf-8", "surrogatepass"), at, end, None)
        return key

    def known_keys(self, rows: range) -> dict[int, Text]:
        """Return the keys that are already nodes, which the memo may share, by the number of their phrase."""
        if len(rows) < len(self._keys):
            return {row: self._keys[row] for row in rows if row in self._keys}
        return {row: self._keys[row] for row in sorted(self._keys) if row in rows}

    def names(self, rows: range) -> list[str]:
        """Return the keys of phrases that have keys, as plain strings."""
        data = self.data
        return [
            data[at + 5 : at + 5 + data[at + 1]].decode("utf-8", "surrogatepass")
            for at in self.key_at[rows.start : rows.stop]
        ]

    def arguments(self, call: Call) -> tuple[Node, ...]:
        """Return the arguments of `call`, newly created."""
        row = bisect_right(self.starts, call.position) - 1
        at = self.starts[row]
        mold = self.molds[self.of[row]]
        starts, ends = mold.starts, mold.ends
        storage = use_of(mold.storage, at + starts[1], at + ends[1], mold.storage)
        key = use_of(self.data[at + starts[4] : at + ends[4]].decode("ascii"), at + starts[3] - 1, at + ends[4], None)
        location = use_of(mold.location, at + starts[6], at + ends[6], mold.location)
        pid = (storage, mold.type, key, location, mold.numel)
        persid = PersId(pid, at + ends[8] + 4, at + starts[8] - 1)
        hooks = Call(mold.hooks, (), "REDUCE", at + starts[16] - 1)
        # Each call gets its own tuples: a tuple that two calls share would be written as shared.
        return persid, mold.offset, (*mold.shape,), (*mold.stride,), mold.requires_grad, hooks

    def plain(self, call: Call) -> NewTensorArguments:
        """Return the arguments of `call` without their places in the stream."""
        row = bisect_right(self.starts, call.position) - 1
        at, mold = self.starts[row], self.molds[self.of[row]]
        key = self.data[at + mold.starts[4] : at + mold.ends[4]].decode("ascii")
        layout = mold.offset, (*mold.shape,), (*mold.stride,)
        return NewTensorArguments(mold.type, key, mold.location, mold.numel, layout, mold.requires_grad, mold.hooks)

    def references(self) -> Iterator[PersId]:
        """Yield a new reference to the storage of each phrase."""
        for key, place in zip(self.storages(), self.of, strict=True):
            mold = self.molds[place]
            yield PersId((mold.storage, mold.type, new_text(key), mold.location, mold.numel), 0, -1)

    def given(self, row: int) -> list[Node]:
        """Return the nodes that phrase `row` memoizes, in order; first the key before it, if that was read with it."""
        call = self.call(row)
        args = call.arguments
        persid = args[0]
        assert type(persid) is PersId
        sizes = args[2:4] if args[2] != () else ()
        keyed = self.key_at[row] != NO_KEY and row not in self._apart
        return [*((self.key(row),) if keyed else ()), persid.fields[2], persid.pid, *sizes, args[5], args, call]

    def locations(self) -> list[tuple[int, Text, int]]:
        """Return (offset of the first phrase, location that it fetches, number of phrases) for each mold."""
        found = []
        # In reverse order, so that the first row of each mold is the one that stays.
        rows = dict(zip(reversed(self.of), range(len(self.of) - 1, -1, -1), strict=True))
        for place, count in Counter(self.of).items():
            row, mold = rows[place], self.molds[place]
            found.append((self.starts[row] + mold.length - AFTER_REDUCE, mold.location, count))
        return found

    def fetched(self) -> set[int]:
        """Return the ids of the strings that the phrases fetch."""
        return {id(use) for place in set(self.of) for use in (self.molds[place].storage, self.molds[place].location)}

    def unmade(self, rows: range) -> Iterator[Call | Alone]:
        """Yield each phrase as `Alone`, or as its call if that is already a node, on which more may be set."""
        calls = self._calls
        for row in rows:
            call = calls[row]
            yield self._alone(row) if call is None else call

    def alone(self, call: Call) -> Alone:
        """Return the phrase of `call`, on which nothing is set."""
        return self._alone(bisect_right(self.starts, call.position) - 1)

    def _alone(self, row: int) -> Alone:
        mold, at = self.molds[self.of[row]], self.starts[row]
        return Alone(self, row, mold, self.data[at + mold.starts[4] : at + mold.ends[4]].decode("ascii"))

    def storages(self) -> list[str]:
        """Return the storage key of each phrase."""
        data = self.data
        spans = [(mold.starts[4], mold.ends[4]) for mold in self.molds]
        places = zip(self.starts, map(spans.__getitem__, self.of), strict=True)
        return [data[at + first : at + end].decode("ascii") for at, (first, end) in places]


class Alone(NamedTuple):
    """A phrase that is not a node, and on which nothing is set: its number, its mold and the key of its storage."""

    phrases: Phrases
    row: int
    mold: CallTemplate
    storage: str


class Memo(dict[int, Node]):
    """The memo; numbers that phrases assigned are looked up in the phrases."""

    def __init__(self, phrases: Phrases) -> None:
        super().__init__()
        self._phrases = phrases

    def __missing__(self, index: int) -> Node:
        row = bisect_right(self._phrases.firsts, index) - 1
        given = self._phrases.given(row) if row >= 0 else []
        place = index - self._phrases.firsts[row] if row >= 0 else 0
        if place >= len(given):
            raise KeyError(index)
        value = self[index] = given[place]
        return value

    def spread(self) -> None:
        """Copy every numbered node into the memo, which must be complete where it is counted (MEMOIZE)."""
        for row, first in enumerate(self._phrases.firsts):
            for index, value in enumerate(self._phrases.given(row), first):
                self.setdefault(index, value)


def _is_text(data: bytes) -> bool:
    """Return whether `data` is UTF-8, surrogates included."""
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True

"""Calls that rebuild plain tensors, read in one piece: their arguments become nodes when they are asked for.

Most of a large checkpoint is one phrase of some thirty opcodes, said once for each tensor. Where it is exactly what
torch writes it is taken whole, and a place in the stream is kept instead of some twenty nodes.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import final

from ckptfix.pickles.graph import Call, Global, Node, PersId, Text

_GET = rb"(h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_PUT = rb"(r)...."
_TUPLE = rb"(%b\x85|%b\x86|%b\x87|\(%b{4,64}t)" % (_INT, _INT * 2, _INT * 3, _INT)
_PHRASE = re.compile(
    rb"\(\(" + _GET + _GET + rb"X(.)\0\0\0(\d{1,20})" + _PUT + _GET + rb"(" + _INT + rb")t" + _PUT + rb"Q"
    rb"(" + _INT + rb")(?:\)\)|" + _TUPLE + _PUT + _TUPLE + _PUT + rb")"
    rb"([\x88\x89])" + _GET + rb"\)R" + _PUT + rb"t" + _PUT + rb"R" + _PUT,
    re.DOTALL,
)  # fmt: skip
"""What follows the function: ``((storage class key location numel) persistent id, offset, size, stride, requires_grad,
OrderedDict())``, each value with its number in the memo."""

_PUTS = (5, 8, 11, 13, 16, 17, 18)
_LONGEST = 1024
"""No phrase has more bytes."""

AFTER_REDUCE = 6
"""Bytes from the REDUCE of a phrase to its end."""

_U32 = struct.Struct("<I").unpack_from


@final
class Mold:
    """What phrases have in common that differ in the key of their storage and in their numbers of the memo alone.

    A phrase is taken for one number, that of its bytes: it is `constant`, the first of the memo numbers times `factor`
    and the key, shifted to its place, if and only if all else is the same and the memo numbers count on from the first.

    Attributes:
        numbers: what it fetches from the memo: `storage`, `type`, `location` and `hooks`.
        length: of the phrase, in bytes; `given`, how many numbers it gives.
        count: how many phrases there are, and `first`, where the first one calls.
    """

    __slots__ = (
        *("constant", "count", "ends", "factor", "first", "given", "hooks", "length", "location", "numbers"),
        *("numel", "offset", "place", "requires_grad", "shape", "shift", "starts", "storage", "stride", "type"),
    )

    def __init__(self, place: int, found: re.Match[bytes], nodes: tuple[Text, Global, Text, Global]) -> None:
        at = found.start()
        raw, key = found[0], found[4]
        self.place = place
        self.storage, self.type, self.location, self.hooks = nodes
        self.numbers = _numbers(found)
        self.length = len(raw)
        self.starts = tuple(found.start(group) - at for group in range(19))
        self.ends = tuple(found.end(group) - at for group in range(19))
        self.numel, self.offset = _int(found[7]), _int(found[9])
        self.shape, self.stride = _ints(found[10]), _ints(found[12])
        self.requires_grad = found[14] == b"\x88"
        puts = [found.end(group) - at for group in _PUTS if found[group]]
        self.given = len(puts)
        self.factor = sum(1 << 8 * put for put in puts)
        self.shift = 8 * self.starts[4]
        first = _U32(raw, puts[0])[0]
        numbers = sum(first + n << 8 * put for n, put in enumerate(puts))
        stated = sum(_U32(raw, put)[0] << 8 * put for put in puts)
        self.constant = int.from_bytes(raw, "little") - stated + numbers - first * self.factor
        self.constant -= int.from_bytes(key, "little") << self.shift
        self.count = self.first = 0

    def fits(self, data: bytes, at: int, key_end: int) -> bool:
        """Whether the phrase at `at` is one of these."""
        key = data[at + self.starts[4] : key_end]
        first = _U32(data, key_end + 1)[0]
        return (
            int.from_bytes(data[at : at + self.length], "little")
            == self.constant + first * self.factor + (int.from_bytes(key, "little") << self.shift)
            and key.isdigit()
            and first < 0xFFFFFF00
        )

    def fetches_its_own(self, memo: dict[int, Node]) -> bool:
        """Whether the numbers that a phrase fetches still mean what they meant to the first one."""
        a, b, c, d = self.numbers
        return (
            memo[a] is self.storage
            and memo[b] is self.type
            and memo[c] is self.location
            and memo[d] is self.hooks
        )  # fmt: skip


@final
class Phrases:
    """The phrases of a stream, in order.

    Attributes:
        starts: offset of each, behind its function.
        firsts: the first number that it gives in the memo.
        keys: the string before its function, where that has the number before; None where it is read by itself.
        molds: all that there are; `of` says for each phrase which.
    """

    __slots__ = (
        *("_known", "_location", "_molds", "_next", "_width"),
        *("data", "firsts", "keys", "molds", "of", "starts"),
    )

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.starts = array("Q")
        self.firsts = array("Q")
        self.of = array("L")
        self.keys: list[Text | None] = []
        self.molds: list[Mold] = []
        # By what can be seen of a phrase at once; and by all that distinguishes it.
        self._molds: dict[tuple[int, bytes, bytes], Mold] = {}
        self._known: dict[tuple[bytes | int | None, ...], Mold] = {}
        self._next = 0
        self._width = 0
        self._location = 0

    def read(self, func: Global, at: int, memo: dict[int, Node]) -> Call | None:
        """The call of `func` whose arguments begin at `at`; None where they are not written as torch writes them."""
        found = self._mold_at(at, memo)
        if found is None:
            return None
        mold, first = found
        # Each number is given once: what it was given before, or by what, need not be kept.
        if first < self._next or not memo.keys().isdisjoint(range(first, first + mold.given)):
            return None
        return self._take(func, at, mold, first, None) if mold.fetches_its_own(memo) else None

    def items(
        self, func: Global, get: bytes, at: int, memo: dict[int, Node], stack: list[Node], calls: list[Call]
    ) -> int:
        """Read the pairs of a key and a call of `func`, which `get` fetches, that follow each other from `at` on.

        Returns:
            Where they end; they are on the stack.
        """
        data = self.data
        last: Mold | None = None
        width = len(get) + 5
        while at + _LONGEST <= len(data):
            key_end = at + 5 + data[at + 1]
            start = key_end + width
            number = self._next
            if (
                data[at] != 0x58  # BINUNICODE
                or data[at + 2 : at + 5] != b"\0\0\0"
                or data[key_end : key_end + 1] != b"r"  # LONG_BINPUT
                or _U32(data, key_end + 1)[0] != number
                or data[key_end + 5 : start] != get
                or (found := self._mold_at(start, memo)) is None
            ):
                break
            mold, first = found
            if first != number + 1 or not memo.keys().isdisjoint(range(number, first + mold.given)):
                break
            if mold is not last and not mold.fetches_its_own(memo):
                break
            last = mold
            try:
                key = Text(data[at + 5 : key_end], "utf-8", "surrogatepass")
            except UnicodeDecodeError:
                break  # which is an error, and not ours to explain
            key.start, key.end, key.origin = at, key_end, None
            call = self._take(func, start, mold, number, key)
            stack += (key, call)
            calls.append(call)
            at = start + mold.length
        return at

    def _mold_at(self, at: int, memo: dict[int, Node]) -> tuple[Mold, int] | None:
        """The mold of the phrase at `at`, and its first number in the memo; None where there is no phrase."""
        data = self.data
        if at + _LONGEST > len(data):
            return None
        width = self._width
        count = data[at + width]
        key_end = at + width + 4 + count
        behind = key_end + self._location
        mold = self._molds.get((count, data[behind : behind + 3], data[behind + 11 : behind + 15]))
        if mold is None or not mold.fits(data, at, key_end):
            mold = self._new_mold(at, memo)
            if mold is None:
                return None
            key_end = at + mold.ends[4]
        return mold, _U32(data, key_end + 1)[0]

    def _take(self, func: Global, at: int, mold: Mold, first: int, key: Text | None) -> Call:
        position = at + mold.length - AFTER_REDUCE
        if not mold.count:
            mold.first = position
        mold.count += 1
        self._next = first + mold.given + (key is not None)
        self.starts.append(at)
        self.firsts.append(first)
        self.of.append(mold.place)
        self.keys.append(key)
        return Call.folded_at(func, position, self)

    def _new_mold(self, at: int, memo: dict[int, Node]) -> Mold | None:
        """The mold of the phrase at `at`; None where there is none."""
        found = _PHRASE.match(self.data, at)
        if found is None or found[3][0] != len(found[4]):
            return None
        nodes = tuple(memo.get(number) for number in _numbers(found))
        storage, cls, location, hooks = nodes
        if type(storage) is not Text or storage != "storage" or type(location) is not Text or location == "storage":
            return None
        if type(cls) is not Global or type(hooks) is not Global or hooks.full != "collections.OrderedDict":
            return None
        all_of_it = (*map(id, nodes), *found.group(1, 2, 3, 6, 7, 9, 10, 12, 14, 15))
        mold = self._known.get(all_of_it)
        if mold is None:
            mold = Mold(len(self.molds), found, (storage, cls, location, hooks))
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

    def arguments(self, call: Call) -> tuple[Node, ...]:
        """The arguments of `call`, made anew."""
        row = bisect_right(self.starts, call.position) - 1
        at = self.starts[row]
        mold = self.molds[self.of[row]]
        starts, ends = mold.starts, mold.ends
        storage = _use(mold.storage, at + starts[1], at + ends[1], mold.storage)
        key = _use(self.data[at + starts[4] : at + ends[4]].decode("ascii"), at + starts[3] - 1, at + ends[4], None)
        location = _use(mold.location, at + starts[6], at + ends[6], mold.location)
        pid = (storage, mold.type, key, location, mold.numel)
        persid = PersId(pid, at + ends[8] + 4, at + starts[8] - 1)
        hooks = Call(mold.hooks, (), "REDUCE", at + starts[16] - 1)
        # Tuples of their own: what shares one is written as sharing one.
        return persid, mold.offset, (*mold.shape,), (*mold.stride,), mold.requires_grad, hooks

    def given(self, row: int, call: Call) -> list[Node]:
        """What phrase `row`, whose call is `call`, numbers, in order; the key before it, if that was read with it."""
        args = call.arguments
        persid = args[0]
        assert type(persid) is PersId
        sizes = args[2:4] if args[2] != () else ()
        key = self.keys[row]
        return [*(() if key is None else (key,)), persid.fields[2], persid.pid, *sizes, args[5], args, call]

    def locations(self) -> list[tuple[int, Text, int]]:
        """(where the first one is, what all of these fetch, how many they are) of the locations of their storages."""
        return [(mold.first, mold.location, mold.count) for mold in self.molds if mold.count]

    def fetched(self) -> set[int]:
        """Identities of the strings that they fetch."""
        return {id(use) for mold in self.molds for use in (mold.storage, mold.location)}

    def references(self) -> Iterator[tuple[str, Global, Text, int]]:
        """(key, class, location, elements) of the storage of each."""
        data, molds = self.data, self.molds
        for at, place in zip(self.starts, self.of, strict=True):
            mold = molds[place]
            key = data[at + mold.starts[4] : at + mold.ends[4]].decode("ascii")
            yield key, mold.type, mold.location, mold.numel


class Memo(dict[int, Node]):
    """What has a number; what phrases gave theirs is looked up in them."""

    def __init__(self, phrases: Phrases, calls: list[Call]) -> None:
        super().__init__()
        self._phrases = phrases
        self._calls = calls

    def __missing__(self, index: int) -> Node:
        row = bisect_right(self._phrases.firsts, index) - 1
        given = self._phrases.given(row, self._calls[row]) if row >= 0 else []
        place = index - self._phrases.firsts[row] if row >= 0 else 0
        if place >= len(given):
            raise KeyError(index)
        value = self[index] = given[place]
        return value

    def spread(self) -> None:
        """Keep everything here, where numbers are counted (MEMOIZE)."""
        for row, call in enumerate(self._calls):
            for index, value in enumerate(self._phrases.given(row, call), self._phrases.firsts[row]):
                self.setdefault(index, value)


def _use(value: str, start: int, end: int, origin: Text | None) -> Text:
    use = Text(value)
    use.start, use.end, use.origin = start, end, origin
    return use


def _numbers(found: re.Match[bytes]) -> tuple[int, ...]:
    return tuple(int.from_bytes(get[1:], "little") for get in found.group(1, 2, 6, 15))


def _int(pushed: bytes) -> int:
    """The number that an opcode pushes; only that of four bytes has a sign."""
    return int.from_bytes(pushed[1:], "little", signed=len(pushed) == 5)


_INTS = re.compile(_INT, re.DOTALL)


def _ints(pushed: bytes | None) -> tuple[int, ...]:
    return tuple(map(_int, _INTS.findall(pushed))) if pushed else ()

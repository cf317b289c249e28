"""The phrase of opcodes that torch writes for a plain tensor, and the common parts of many phrases in a stream."""

from __future__ import annotations

import re
import struct
from typing import final

from ckptfix.pickles.graph import Global, Node, Text
from ckptfix.pickles.opcodes import pushed_int

_GET = rb"(h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_PUT = rb"(r)...."
_TUPLE = rb"(%b\x85|%b\x86|%b\x87|\(%b{4,64}t)" % (_INT, _INT * 2, _INT * 3, _INT)
PHRASE = re.compile(
    rb"\(\(" + _GET + _GET + rb"X(.)\0\0\0(\d{1,20})" + _PUT + _GET + rb"(" + _INT + rb")t" + _PUT + rb"Q"
    rb"(" + _INT + rb")(?:\)\)|" + _TUPLE + _PUT + _TUPLE + _PUT + rb")"
    rb"([\x88\x89])" + _GET + rb"\)R" + _PUT + rb"t" + _PUT + rb"R" + _PUT,
    re.DOTALL,
)  # fmt: skip
"""Opcodes after the function: ``((storage class key location numel) persistent id, offset, size, stride, requires_grad,
OrderedDict())``, each value with its number in the memo.
"""

_PUTS = (5, 8, 11, 13, 16, 17, 18)
_U32 = struct.Struct("<I").unpack_from


@final
class CallTemplate:
    """The common parts of phrases that differ only in the key of their storage and in their memo numbers.

    The bytes of a phrase are read as one integer. The phrase fits if and only if this integer is `constant`, plus the
    first memo number times `factor`, plus the key shifted to its place: then all other bytes are equal, and the memo
    numbers count up from the first.

    Attributes:
        numbers: the memo numbers that the phrase fetches: of `storage`, `type`, `location` and `hooks`.
        func: the function that the phrases call.
        length: length of the phrase in bytes; `given` is how many memo numbers it assigns.
    """

    __slots__ = (
        *("constant", "ends", "factor", "func", "given", "hooks", "length", "location", "numbers"),
        *("numel", "offset", "place", "requires_grad", "shape", "shift", "starts", "storage", "stride", "type"),
    )

    def __init__(
        self, place: int, func: Global, found: re.Match[bytes], nodes: tuple[Text, Global, Text, Global]
    ) -> None:
        at = found.start()
        raw, key = found[0], found[4]
        self.place = place
        self.func = func
        self.storage, self.type, self.location, self.hooks = nodes
        self.numbers = numbers(found)
        self.length = len(raw)
        self.starts = tuple(found.start(group) - at for group in range(19))
        self.ends = tuple(found.end(group) - at for group in range(19))
        self.numel, self.offset = pushed_int(found[7]), pushed_int(found[9])
        self.shape, self.stride = _ints(found[10]), _ints(found[12])
        self.requires_grad = found[14] == b"\x88"
        puts = [found.end(group) - at for group in _PUTS if found[group]]
        self.given = len(puts)
        self.factor = sum(1 << 8 * put for put in puts)
        self.shift = 8 * self.starts[4]
        first = _U32(raw, puts[0])[0]
        counted = sum(first + n << 8 * put for n, put in enumerate(puts))
        stated = sum(_U32(raw, put)[0] << 8 * put for put in puts)
        self.constant = int.from_bytes(raw, "little") - stated + counted - first * self.factor
        self.constant -= int.from_bytes(key, "little") << self.shift

    def fits(self, data: bytes, at: int, key_end: int) -> bool:
        """Return whether the phrase at `at` fits this mold."""
        key = data[at + self.starts[4] : key_end]
        first = _U32(data, key_end + 1)[0]
        return (
            int.from_bytes(data[at : at + self.length], "little")
            == self.constant + first * self.factor + (int.from_bytes(key, "little") << self.shift)
            and key.isdigit()
            and first < 0xFFFFFF00
        )

    def fetches_its_own(self, memo: dict[int, Node]) -> bool:
        """Return whether the memo numbers that a phrase fetches still refer to the nodes of the first phrase."""
        a, b, c, d = self.numbers
        return (
            memo[a] is self.storage
            and memo[b] is self.type
            and memo[c] is self.location
            and memo[d] is self.hooks
        )  # fmt: skip


def numbers(found: re.Match[bytes]) -> tuple[int, ...]:
    """Return the memo numbers that a phrase fetches: storage, type, location and hooks."""
    return tuple(int.from_bytes(get[1:], "little") for get in found.group(1, 2, 6, 15))


_INTS = re.compile(_INT, re.DOTALL)


def _ints(pushed: bytes | None) -> tuple[int, ...]:
    """Return the integers that the opcodes `pushed` push."""
    return tuple(map(pushed_int, _INTS.findall(pushed))) if pushed else ()

"""The phrase that torch writes for a plain tensor, and what many phrases of a stream have in common."""

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
"""What follows the function: ``((storage class key location numel) persistent id, offset, size, stride, requires_grad,
OrderedDict())``, each value with its number in the memo."""

_PUTS = (5, 8, 11, 13, 16, 17, 18)
_U32 = struct.Struct("<I").unpack_from


@final
class Mold:
    """What phrases have in common that differ in the key of their storage and in their numbers of the memo alone.

    A phrase is taken for one number, that of its bytes: it is `constant`, the first of the memo numbers times `factor`
    and the key, shifted to its place, if and only if all else is the same and the memo numbers count on from the first.

    Attributes:
        numbers: what it fetches from the memo: `storage`, `type`, `location` and `hooks`.
        func: what they call.
        length: of the phrase, in bytes; `given`, how many numbers it gives.
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


def numbers(found: re.Match[bytes]) -> tuple[int, ...]:
    """The numbers that a phrase fetches from the memo: storage, type, location and hooks."""
    return tuple(int.from_bytes(get[1:], "little") for get in found.group(1, 2, 6, 15))


_INTS = re.compile(_INT, re.DOTALL)


def _ints(pushed: bytes | None) -> tuple[int, ...]:
    return tuple(map(pushed_int, _INTS.findall(pushed))) if pushed else ()

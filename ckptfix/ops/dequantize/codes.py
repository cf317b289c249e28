"""Codes as numbers: tables of small formats, packed integers, and the one formula of almost every scheme.

An element of ``float4_e2m1fn_x2`` holds two numbers of four bits, as a ``uint8`` does in schemes that predate it. The
tables of E2M1 and E8M0 are those of the OCP Microscaling Formats specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckptfix.dataclass import dataclass
from ckptfix.elements import arrays

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

Kind = Literal["f4", "u2", "i8"]
"""float32 numbers, or integers that name places in an array."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each code of four bits: a sign, two bits of exponent, one of mantissa."""


@cache
def integers(bits: int, offset: int = 0) -> tuple[float, ...]:
    """Return the numbers of codes that are integers from `offset` on."""
    return tuple(float(code + offset) for code in range(1 << bits))


def eight_bits(dtype: str) -> Callable[[Array], Array]:
    """Return a function that returns the numbers of bytes of an 8-bit dtype, as float32."""
    return partial(arrays.eight_bits, name=dtype)


@cache
def _spread(packed: bytes, high_first: bool, kind: Kind) -> Array:
    """Return the numbers of the codes in each byte, one item for each byte.

    Args:
        packed: the number of each code, as float32: 16 for codes of four bits, 4 for codes of two, 2 for codes of one.
            As bytes, because tables that differ in the sign of a zero are equal.
    """
    import numpy

    table = numpy.frombuffer(packed, numpy.float32)
    bits = len(table).bit_length() - 1
    shifts = list(range(0, 8, bits))
    if high_first:
        shifts.reverse()
    every = numpy.arange(256)
    made = numpy.stack([(every >> shift) & (len(table) - 1) for shift in shifts], axis=1)
    return _items(table.astype(kind)[made])


def _items(numbers: Array) -> Array:
    """Return the rows of a matrix as items that ``take`` copies whole."""
    import numpy

    held = numpy.ascontiguousarray(numbers)
    size = held.shape[1] * held.itemsize
    return held.view({4: "u4", 8: "u8", 16: "c16"}.get(size, f"V{size}")).reshape(-1)


def in_bytes(data: Array, table: tuple[float, ...], *, high_first: bool = False, kind: Kind = "f4") -> Array:
    """Return the numbers of the codes in the rows of `data`, bytes of several codes each."""
    import numpy

    if len(table) == 16 and kind != "i8" and not high_first and table == integers(4, int(table[0])):
        found = _nibbles(data, "u2" if kind == "u2" else "u1").astype(kind, copy=False)
        if table[0]:
            found += numpy.dtype(kind).type(table[0])
    else:
        packed = numpy.array(table, numpy.float32).tobytes()
        found = _spread(packed, high_first, kind).take(data).view(kind)
    made: Array = found.reshape(len(data), -1)
    return made


def _nibbles(data: Array, kind: Literal["u1", "u2"]) -> Array:
    """Return the codes of four bits in bytes, the low one first; shifts take half the time of a table."""
    wide, shift, mask = ("<u2", 4, 0x0F0F) if kind == "u1" else ("<u4", 12, 0x000F000F)
    made = data.astype(wide)
    made |= made << made.dtype.type(shift)
    made &= made.dtype.type(mask)
    return made.view("u1" if kind == "u1" else "<u2")


def in_words(words: Array, table: tuple[float, ...], count: int, kind: Kind = "f4") -> Array:
    """Return the numbers of the first `count` codes of each row.

    Rows are streams of bits in 32-bit words: the first code is in the lowest bits of the first word, and a code may
    continue in the next one.

    Args:
        words: contiguous rows of ``uint32``.
        table: the number of each code, of 1 to 8 bits; for 8 bits, integers that follow each other.
    """
    import numpy

    bits = len(table).bit_length() - 1
    data = words.view(numpy.uint8)
    if bits in (1, 2, 4):
        found = in_bytes(data, table, kind=kind)
    elif bits == 8:
        found = data.astype(kind)
        if table[0]:
            found += numpy.dtype(kind).type(table[0])
    else:
        found = _in_chunks(data, table, kind)
    return numpy.ascontiguousarray(found[:, :count])


def _in_chunks(data: Array, table: tuple[float, ...], kind: Kind) -> Array:
    """Return the numbers of codes of 3, 5, 6 or 7 bits: a table has those of each chunk of two or four codes."""
    import numpy

    bits = len(table).bit_length() - 1
    codes = 4 if bits == 3 else 2
    chunk = codes * bits
    period = math.lcm(8, chunk) // 8
    rows, nbytes = data.shape
    groups = -(-nbytes // period)
    # A chunk touches at most three bytes, so the last one of a row needs up to two more.
    padded = numpy.zeros((rows, groups * period + 2), numpy.uint8)
    padded[:, :nbytes] = data
    per_period = 8 * period // chunk
    made = numpy.empty((rows, groups, per_period), numpy.uint32)
    for place in range(per_period):
        first, shift = divmod(place * chunk, 8)
        value = made[:, :, place]
        value[...] = padded[:, first : first + groups * period : period]
        for more in range(1, -(-(shift + chunk) // 8)):
            byte = padded[:, first + more : first + more + groups * period : period]
            value |= byte.astype(numpy.uint32) << numpy.uint32(8 * more)
        if shift:
            value >>= numpy.uint32(shift)
        value &= numpy.uint32((1 << chunk) - 1)
    return _chunks(table, codes, kind).take(made).view(kind).reshape(rows, -1)


@cache
def _chunks(table: tuple[float, ...], codes: int, kind: Kind) -> Array:
    """Return the numbers of `codes` codes for each integer that has so many."""
    import numpy

    bits = len(table).bit_length() - 1
    every = numpy.arange(1 << codes * bits)
    made = numpy.stack([(every >> bits * place) & (len(table) - 1) for place in range(codes)], axis=1)
    return _items(numpy.array(table, kind)[made])


def numbered(codes: Array, table: tuple[float, ...], kind: Kind) -> Array:
    """Return the numbers of codes that are a byte each; `table` has integers that follow each other, or any numbers."""
    import numpy

    found: Array
    if table == integers(len(table).bit_length() - 1):
        found = codes.astype(kind)
    else:
        found = numpy.array(table, kind).take(codes)
    return found


@dataclass(frozen=True, slots=True)
class Table:
    """Codes of a few bits with the formula of their weight: with few codes in a group, a table has all its numbers.

    Attributes:
        numbers: the number of each code.
        decode: (data, the number of each code, kind) -> the numbers of its codes, contiguous rows.
        formula: (round, numbers, *companions) -> the weight; all have the dimensions (row, group, element).
        index: the group of each column; None for groups of equal sizes that follow each other.
        rounds: the formula rounds more than once.
    """

    numbers: tuple[float, ...]
    decode: Callable[[Array, tuple[float, ...], Kind], Array]
    formula: Callable[..., Array]
    index: Array | None = None
    rounds: bool = False

    def compute(self, round_: Any, data: Array, *companions: Array) -> Array:
        """Return the weight: the formula for each element."""
        numbers = self.decode(data, self.numbers, "f4")
        if self.index is not None:
            spread = [one[:, self.index, None] for one in companions]
            return self.formula(round_, numbers[:, :, None], *spread).reshape(numbers.shape)
        view = numbers.reshape(*companions[0].shape, -1)
        return self.formula(round_, view, *(one[:, :, None] for one in companions)).reshape(numbers.shape)

    def pays(self, width: int, groups: int) -> bool:
        """Return whether groups are so long that the formula is computed for fewer numbers than there are elements."""
        return 2 * len(self.numbers) * groups <= width

    def values(self, round_: Any, *companions: Array) -> Array:
        """Return the weight of each code in each group: (code, row, group)."""
        import numpy

        codes = numpy.array(self.numbers, numpy.float32).reshape(-1, 1, 1)
        made: Array = self.formula(round_, codes, *companions)
        return made

    def look_up(self, values: Array, data: Array, into: Array) -> None:
        """Fill `into` with the value of each code; `values` are those of `values`, in any dtype."""
        import numpy

        levels, rows, groups = values.shape
        # Places of two bytes are computed in a quarter of the time of those that numpy indexes by.
        kind: Kind = "u2" if values.size <= 1 << 16 else "i8"
        places = self.decode(data, integers(levels.bit_length() - 1), kind)
        places *= rows * groups
        if self.index is None:
            view = places.reshape(rows * groups, -1)
            view += numpy.arange(rows * groups).astype(kind)[:, None]
        else:
            places += self.index.astype(kind)[None, :]
            places += numpy.arange(0, rows * groups, groups).astype(kind)[:, None]
        # Other modes copy the output through a buffer.
        numpy.take(values.reshape(-1), places, out=into, mode="clip")


def times(round_: Any, numbers: Array, scale: Array, zero: Array | None = None) -> Array:
    """Return ``(numbers - zero) * scale``."""
    if zero is None:
        return numbers * scale
    found: Array = numbers - zero
    found *= scale
    return found


def affine(numbers: Array, scale: Array, zero: Array | None = None, index: Array | None = None) -> Array:
    """Return ``(numbers - zero) * scale``, with a scale and zero for each group of a row; `numbers` is overwritten.

    Args:
        numbers: (rows, width), as float32.
        scale, zero: (rows, groups).
        index: the group of each column; by default, the groups have equal sizes and follow each other.
    """
    rows, width = numbers.shape
    groups = scale.shape[1]
    if index is not None:
        if zero is not None:
            numbers = numbers - zero[:, index]
        return numbers * scale[:, index]
    view = numbers.reshape(rows, groups, width // groups)
    if zero is not None:
        view -= zero[:, :, None]
    view *= scale[:, :, None]
    return view.reshape(rows, width)

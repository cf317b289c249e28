"""Codes as numbers: tables of small formats, packed integers, and the one formula of almost every scheme.

An element of ``float4_e2m1fn_x2`` holds two numbers of four bits, as a ``uint8`` does in schemes that predate it. The
tables of E2M1 and E8M0 are those of the OCP Microscaling Formats specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.elements.arrays import Encoding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each code of four bits: a sign, two bits of exponent, one of mantissa."""


@cache
def integers(bits: int, offset: int = 0) -> tuple[float, ...]:
    """Return the numbers of codes that are integers from `offset` on."""
    return tuple(float(code + offset) for code in range(1 << bits))


@cache
def eight_bits(dtype: str) -> Array:
    """Return the number of each byte of an 8-bit dtype, as float32."""
    import numpy

    return Encoding.of(dtype, "little").decoded(bytes(range(256))).astype(numpy.float32)


@cache
def _spread(table: tuple[float, ...], high_first: bool) -> Array:
    """Return the numbers of the codes in each byte, one item for each byte.

    Args:
        table: the number of each code: 16 for codes of four bits, 4 for codes of two.
    """
    import numpy

    bits = len(table).bit_length() - 1
    shifts = list(range(0, 8, bits))
    if high_first:
        shifts.reverse()
    every = numpy.arange(256)
    made = numpy.stack([(every >> shift) & (len(table) - 1) for shift in shifts], axis=1)
    found = numpy.array(table, numpy.float32)[made]
    return numpy.ascontiguousarray(found).view("u8" if len(shifts) == 2 else "c16").reshape(256)


def in_bytes(data: Array, table: tuple[float, ...], *, high_first: bool = False) -> Array:
    """Return the numbers of the codes in the rows of `data`, bytes of several codes each."""
    import numpy

    found: Array = _spread(table, high_first).take(data).view(numpy.float32).reshape(len(data), -1)
    return found


def in_words(words: Array, bits: int, count: int, offset: int = 0) -> Array:
    """Return the first `count` codes of each row as numbers.

    Rows are streams of bits in 32-bit words: the first code is in the lowest bits of the first word, and a code may
    continue in the next one.

    Args:
        words: contiguous rows of ``uint32``.
        bits: of a code, 1 to 8.
        offset: added to each code.
    """
    import numpy

    if bits in (2, 4):
        return in_bytes(words.view(numpy.uint8), integers(bits, offset))[:, :count]
    if bits == 8:
        every = numpy.arange(offset, 256 + offset, dtype=numpy.float32)
        return every.take(words.view(numpy.uint8))[:, :count]
    rows = len(words)
    short = -words.shape[1] % bits
    if short:
        words = numpy.concatenate([words, numpy.zeros((rows, short), numpy.uint32)], axis=1)
    groups = words.reshape(rows, -1, bits)
    made = numpy.empty((rows, groups.shape[1], 32), numpy.float32)
    mask = numpy.uint32((1 << bits) - 1)
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        code = groups[:, :, word] >> numpy.uint32(shift)
        if shift + bits > 32:
            code = code | (groups[:, :, word + 1] << numpy.uint32(32 - shift))
        made[:, :, place] = code & mask
    if offset:
        made += numpy.float32(offset)
    return made.reshape(rows, -1)[:, :count]


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

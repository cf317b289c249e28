"""Elements as arrays that numpy computes with, and arrays rounded to a dtype, bit for bit as torch does.

Every conversion of torch between floating-point dtypes goes through float32 if either side is narrower
(c10/util/Half.h, BFloat16.h, Float8_*.h; torch/headeronly since 2.9), so a float64 is rounded twice. `once` is for sums
that must be rounded only once. In torch 2.13, a number beyond the range of a dtype becomes:

======================================  ==========================
float16, bfloat16, float8_e5m2          infinity
float8_e4m3fn                           the largest number, 448; infinities too
float8_e4m3fnuz, float8_e5m2fnuz        NaN; infinities too
float8_e8m0fnu                          NaN; infinities too; a negative number loses its sign
======================================  ==========================

The 8-bit formats have at most three bits behind the point. So a table of the 65,536 numbers of 16 bits gives all of
them, provided that the bits cut off a float32 set the last bit of the 16 (rounding to odd).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint.dtypes import Dtype, by_name, numpy_dtype
from ckptfix.dataclass import dataclass

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Elements: TypeAlias = NDArray[Any]

MOST: dict[str, float] = {
    "float32": (2 - 2**-24) * 2.0**127,
    "bfloat16": (2 - 2**-8) * 2.0**127,
    "float16": 65520.0,
    "float8_e5m2": 61440.0,
    "float8_e4m3fn": 464.0,
    "float8_e4m3fnuz": 248.0,
    "float8_e5m2fnuz": 61440.0,
    "float8_e8m0fnu": 1.5 * 2.0**127,
}
"""Absolute values from which a number leaves the range of a dtype; for float8_e4m3fn, beyond which."""

TARGETS = ("float64", *MOST)
"""The dtypes that numbers can be rounded to."""


BLOCK = 1 << 16
"""Elements that are computed together: one array of their float64 values (512 kB) stays in a core's cache."""

SMALL_BLOCK = 1 << 15
"""Elements that are computed together where several arrays of them are needed."""

DOT = 1 << 13
"""Elements of one dot product: OpenBLAS starts its own threads above 10,000, which then compete with ours."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The form in which a file stores elements: their dtype, and the byte order of the file."""

    dtype: Dtype
    byteorder: str

    @classmethod
    def of(cls, dtype: str, byteorder: str) -> Encoding:
        """Return the encoding of a dtype by its name. Raises Unsupported if it is unknown."""
        return cls(by_name(dtype), byteorder)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def swap(self) -> bool:
        """True if the byte order of the elements differs from this machine's."""
        return self.byteorder != sys.byteorder and self.dtype.itemsize > 1

    def viewed(self, data: bytes | memoryview) -> Elements:
        """Return the elements in `data` in their own dtype, which numpy has."""
        import numpy

        if self.dtype.family == "bool":
            truth: Elements = (numpy.frombuffer(data, numpy.uint8) != 0).view(numpy.uint8)
            return truth
        bits = numpy.frombuffer(data, f"u{self.dtype.unit}")
        return (bits.byteswap() if self.swap else bits).view(_kind(self.dtype.name))

    def rows(self, data: bytes | memoryview) -> Elements:
        """Return the bytes of each element in `data`, for any dtype."""
        import numpy

        rows: Elements = numpy.frombuffer(data, numpy.uint8).reshape(-1, self.itemsize)
        return rows[:, ::-1] if self.swap else rows

    def decoded(self, data: bytes | memoryview) -> Elements:
        """Return the elements in `data`, exactly, with narrow floats as float32."""
        import numpy

        if self.dtype.family == "float" and self.dtype.itemsize == 1:
            return eight_bits(numpy.frombuffer(data, numpy.uint8), self.dtype.name)
        block = self.viewed(data)
        return block.astype(numpy.float32) if self.dtype.name in ("bfloat16", "float16") else block

    def parts(self, data: bytes | memoryview, count: int = BLOCK) -> Iterator[memoryview]:
        """Yield `data` in parts of `count` elements; the last one may be shorter."""
        view = memoryview(data)
        step = count * self.itemsize
        return (view[start : start + step] for start in range(0, len(view), step))

    def blocks(self, data: bytes | memoryview, count: int = BLOCK) -> Iterator[Elements]:
        """Yield the elements in `data`, decoded, in blocks of `count`; the last one may be shorter."""
        return map(self.decoded, self.parts(data, count))

    def little_endian(self, data: bytes | memoryview) -> bytes | memoryview:
        """Return the same elements in little-endian byte order."""
        if self.byteorder != "big" or self.dtype.unit == 1:
            return data
        import numpy

        return numpy.frombuffer(data, f"u{self.dtype.unit}").byteswap().tobytes()

    def stored(self, made: Elements) -> bytes:
        """Return the bytes of `made`, whose elements have this dtype, in the byte order of the file.

        `made` is overwritten.
        """
        if self.byteorder != sys.byteorder and self.dtype.unit > 1:
            made = made.view(f"u{self.dtype.unit}")
            made.byteswap(inplace=True)
        return made.tobytes()


_SHIFTED: dict[str, tuple[int, float, int]] = {
    "float8_e4m3fn": (20, 2.0**120, 0x7F),
    "float8_e5m2": (21, 2.0**112, 0x7C),
}
"""8-bit dtype -> the shift to the places of a float32's exponent and mantissa, the power of two that corrects the bias,
and the least code without a sign that is not finite."""


def eight_bits(codes: Elements, name: str) -> Elements:
    """Return float32 numbers for bytes of an 8-bit dtype.

    With the exponent and mantissa in the places of a float32's, only the bias is wrong: a product by a power of two,
    which is exact, corrects it. This takes half the time of a table.
    """
    import numpy

    shift, ratio, special = _SHIFTED.get(name, (0, 0.0, 0))
    # Libraries built with -ffast-math make the processor take subnormal numbers for zero in their threads.
    if not _subnormal() * numpy.float32(ratio):
        table: Elements = _eight_bits(name).take(codes)
        return table
    bits = codes.view(numpy.int8).astype(numpy.int32)
    bits <<= numpy.int32(shift)
    bits &= numpy.int32((0x7F << shift) - (1 << 31))
    made = bits.view(numpy.float32)
    made *= numpy.float32(ratio)
    unusual = (codes & numpy.uint8(0x7F)) >= numpy.uint8(special)
    if unusual.any():
        made[unusual] = _eight_bits(name)[codes[unusual]]
    return made


@cache
def _subnormal() -> numpy.float32:
    import numpy

    return numpy.float32(2.0**-130)


@cache
def _eight_bits(name: str) -> Elements:
    import numpy

    return numpy.arange(256, dtype=numpy.uint8).view(_kind(name)).astype(numpy.float32)


def _kind(name: str) -> numpy.dtype[numpy.generic]:
    kind = numpy_dtype(name)
    assert kind is not None
    return kind


def rounded(numbers: Elements, target: str, into: Elements) -> None:
    """Fill `into`, unsigned integers, with numbers in the dtype `target`, as ``tensor.to(target)`` converts them."""
    import numpy

    kind = _kind(target)
    near = numbers if target == "float64" else numbers.astype(numpy.float32, copy=False)
    if kind.itemsize == 1:
        into[...] = _in_eight_bits(near, target).reshape(near.shape)
    elif target == "float16" and into.flags.c_contiguous:
        halves(near, into)
    else:
        numpy.copyto(into.view(kind), near, casting="unsafe")


SUBNORMAL, INFINITE = 0x38800000, 0x477FF000
"""Bits of the float32 numbers below which float16 has fewer digits, and from which it has none."""


def halves(numbers: Elements, into: Elements) -> bool:
    """Fill `into` with float32 numbers rounded to float16, as numpy does in twice the time.

    Args:
        into: contiguous ``uint16`` of the same shape.

    Returns:
        Whether one of them is infinite.
    """
    import numpy

    bits = numpy.ascontiguousarray(numbers).view(numpy.uint32)
    size = bits & numpy.uint32(0x7FFFFFFF)
    # Rounding to the nearest adds half a unit of the last place, less one unless the last bit is set. The exponent
    # changes its bias, and a carry out of the mantissa goes on into it.
    made = size >> numpy.uint32(13)
    made &= numpy.uint32(1)
    made += size
    made += numpy.uint32(0xC8000FFF)
    made >>= numpy.uint32(13)
    numpy.copyto(into, made, casting="unsafe")
    nonzero = size != 0
    into *= nonzero
    numpy.right_shift(bits, numpy.uint32(16), out=made)
    made &= numpy.uint32(0x8000)
    into |= made.astype(numpy.uint16)
    # Subnormal numbers of float16, and numbers beyond its range.
    size -= numpy.uint32(SUBNORMAL)
    special = size >= numpy.uint32(INFINITE - SUBNORMAL)
    special &= nonzero
    if not special.any():
        return False
    places = numpy.flatnonzero(special)
    rest = numbers.reshape(-1)[places].astype(numpy.float16)
    into.reshape(-1)[places] = rest.view(numpy.uint16)
    return bool(numpy.isinf(rest).any())


def nearest(numbers: Elements, target: str) -> Elements:
    """Return float32 numbers rounded to `target`, float16 or bfloat16, as float32 numbers again.

    The bits that the target lacks are rounded away in place, which takes a fraction of the time of two conversions.
    """
    import numpy

    drop = 13 if target == "float16" else 16
    bits = numpy.ascontiguousarray(numbers).view(numpy.uint32)
    made = bits >> numpy.uint32(drop)
    made &= numpy.uint32(1)
    made += numpy.uint32((1 << (drop - 1)) - 1)
    made += bits
    made &= numpy.uint32(0xFFFFFFFF >> drop << drop)
    found: Elements = made.view(numpy.float32)
    size = bits & numpy.uint32(0x7FFFFFFF)
    if target == "bfloat16":
        special = size > numpy.uint32(0x7F800000)
    else:
        nonzero = size != 0
        size -= numpy.uint32(SUBNORMAL)
        special = size >= numpy.uint32(INFINITE - SUBNORMAL)
        special &= nonzero
    if special.any():
        places = numpy.flatnonzero(special)
        exact = numbers.reshape(-1)[places].astype(_kind(target))
        found.reshape(-1)[places] = exact.astype(numpy.float32)
    return found


def once(numbers: Elements, target: str) -> Elements:
    """Round float64 numbers to the dtype `target`, to the nearest once, with ties to even; 8-bit ones as bytes."""
    import numpy

    if target in ("float64", "float32", "float16"):
        return numbers.astype(target)
    near = numbers.astype(numpy.float32)
    bits = near.view(numpy.uint32)
    # Rounding twice differs from rounding once only if the first result is halfway between two numbers of the target.
    # Such numbers have 8 significant bits, or fewer, as subnormal ones do.
    halves = bits & numpy.uint32(0x7FFF) == 0
    if numpy.count_nonzero(halves) > numbers.size // 16:
        halves &= near != numbers
    middle = numpy.flatnonzero(halves)
    exact, back = numbers[middle], near[middle].astype(numpy.float64)
    # Of the two neighbors of an inexact number, the odd one records that there were further bits.
    wrong = (back != exact) & ~numpy.isnan(exact)
    outwards = numpy.abs(back) < numpy.abs(exact)
    bits[middle] += (wrong & outwards).astype(numpy.uint32)
    bits[middle] -= (wrong & ~outwards).astype(numpy.uint32)
    return near.astype(_kind(target)) if target == "bfloat16" else _in_eight_bits(near, target)


def _in_eight_bits(numbers: Elements, target: str) -> Elements:
    """Return the bytes of float32 numbers in an 8-bit dtype."""
    import numpy

    halves = numpy.ascontiguousarray(numbers).view(numpy.uint16).reshape(-1, 2)
    low, high = (0, 1) if numpy.little_endian else (1, 0)
    made: Elements = _narrow(target)[halves[:, high] | (halves[:, low] != 0)]
    return made


@cache
def _narrow(target: str) -> Elements:
    """Return the byte of an 8-bit dtype for each 16-bit number, the upper half of a float32."""
    import numpy

    upper = numpy.arange(1 << 16, dtype=numpy.uint32) << numpy.uint32(16)
    with numpy.errstate(all="ignore"):
        numbers = upper.view(numpy.float32)
        if target == "float8_e8m0fnu":
            return _exponents(upper)
        if target == "float8_e4m3fn":
            numbers = numpy.clip(numbers, -448, 448)
        narrow: Elements = numbers.astype(_kind(target)).view(numpy.uint8)
        return narrow


def _exponents(bits: Elements) -> Elements:
    """Return powers of two: the exponent rounded to the nearest, with ties up except for the smallest."""
    import numpy

    exponent = (bits >> numpy.uint32(23)) & numpy.uint32(0xFF)
    half = (bits & numpy.uint32(0x400000)) != 0
    more = (bits & numpy.uint32(0x3FFFFF)) != 0
    up = half & (more | (exponent > 0)) & (exponent < 0xFF)
    powers: Elements = (exponent + up).astype(numpy.uint8)
    return powers


UNUSUAL: dict[str, tuple[int, int]] = {
    "float32": (0x7FFFFFFF, 0x7F800000),
    "bfloat16": (0x7FFF, 0x7F80),
    "float16": (0x7FFF, 0x7C00),
    "float8_e5m2": (0x7F, 0x7C),
    "float8_e4m3fn": (0x7F, 0x7E),
    "float8_e4m3fnuz": (0x7F, 0x80),
    "float8_e5m2fnuz": (0x7F, 0x80),
    "float8_e8m0fnu": (0xFF, 0xFF),
}
"""Bits of an element without its sign, and the value of these from which on it is not a number, or is the largest one.

In the formats without a negative zero, that code is NaN; in float8_e8m0fnu the smallest value is not zero.
"""


def unusual(made: Elements, target: str) -> bool:
    """Return whether the output of `rounded` may hold a zero, an infinity, NaN or the largest number."""
    mask, limit = UNUSUAL[target]
    bits = made & made.dtype.type(mask)
    return bool(bits.min() == 0 or bits.max() >= limit)


def zeros(made: Elements, target: str) -> int:
    """Count the elements in the output of `rounded` that are zero."""
    import numpy

    if target == "float8_e8m0fnu":
        return 0
    bits = made if target.endswith("fnuz") else made & made.dtype.type(UNUSUAL[target][0])
    return int(numpy.count_nonzero(bits == 0))

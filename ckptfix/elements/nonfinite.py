"""Counts of NaN and infinities, from numbers or from their bits.

A NaN or an infinity of an IEEE type is a bit pattern at or above infinity's, with either sign. Two integer maxima over
some elements therefore show whether there is one; values are counted only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptfix.elements.arrays import Encoding

if TYPE_CHECKING:
    from ckptfix.elements.arrays import Elements

PATTERNS: Mapping[str, tuple[int, int]] = {
    "float64": (0x7FF0 << 48, 1 << 63),
    "float32": (0x7F80 << 16, 1 << 31),
    "float16": (0x7C00, 1 << 15),
    "bfloat16": (0x7F80, 1 << 15),
    "complex128": (0x7FF0 << 48, 1 << 63),
    "complex64": (0x7F80 << 16, 1 << 31),
    "complex32": (0x7C00, 1 << 15),
    "float8_e5m2": (0x7C, 1 << 7),
}
"""dtype -> (bits of infinity, sign bit) of its numbers."""


@dataclass(slots=True)
class NonFinite:
    """Counts of NaN and infinite elements. `add_bits` counts the two parts of a complex number."""

    nan: int = 0
    infinite: int = 0

    def add(self, block: Elements) -> None:
        """Include the elements of `block`."""
        import numpy

        self.nan += int(numpy.count_nonzero(numpy.isnan(block)))
        self.infinite += int(numpy.count_nonzero(numpy.isinf(block)))

    def add_bits(self, chunk: bytes | memoryview, encoding: Encoding) -> None:
        """Include the whole numbers in `chunk`, of a dtype in `PATTERNS`, without decoding them."""
        import numpy

        infinity, sign = PATTERNS[encoding.dtype.name]
        width = encoding.dtype.unit
        count = len(chunk) // width
        if not count:
            return
        order = ">" if encoding.byteorder == "big" else "<"
        bits = numpy.frombuffer(chunk, f"{order}u{width}", count)
        signed = bits.view(f"{order}i{width}")
        if int(signed.max()) < infinity and int(bits.max()) < infinity | sign:
            return
        magnitude = bits & ~numpy.array(sign, bits.dtype)
        self.infinite += int(numpy.count_nonzero(magnitude == infinity))
        self.nan += int(numpy.count_nonzero(magnitude > infinity))

    def join(self, other: NonFinite) -> None:
        """Include the elements that `other` includes."""
        self.nan += other.nan
        self.infinite += other.infinite

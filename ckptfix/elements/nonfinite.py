"""Counts of NaN and infinities, from numbers or from their bits.

A NaN or an infinity of an IEEE type is a bit pattern at or above infinity's, with either sign. Two integer maxima over
some elements therefore show whether there is one; values are counted only then.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from ckptfix.dataclass import dataclass
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


Code = Literal["b", "B", "h", "H", "i", "I", "q", "Q"]

_CODES: Mapping[int, tuple[Code, Code]] = {8: ("q", "Q"), 4: ("i", "I"), 2: ("h", "H"), 1: ("b", "B")}
"""Bytes of a number -> the codes of `memoryview.cast` for signed and for unsigned ones."""


def all_finite(chunk: bytes | memoryview, encoding: Encoding) -> bool:
    """Return whether no number of `chunk`, whose dtype is in `PATTERNS`, is NaN or infinite, without numpy.

    Only numbers in the byte order of this machine can be judged; others count as not finite. The bytes of an incomplete
    number at the end are left out.
    """
    infinity, sign = PATTERNS[encoding.dtype.name]
    signed, unsigned = _CODES[encoding.dtype.unit]
    view = memoryview(chunk)[: len(chunk) - len(chunk) % encoding.dtype.unit]
    if not view:
        return True
    return encoding.byteorder == sys.byteorder and (
        max(view.cast(signed)) < infinity and max(view.cast(unsigned)) < infinity | sign
    )


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

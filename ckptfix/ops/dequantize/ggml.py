"""The blocks of GGUF: each holds its own scales, and a tensor is a run of them.

Fields of a block are in the order of its struct in ggml/src/ggml-common.h, and numbers are computed as in
``dequantize_row_*`` of ggml/src/ggml-quants.c, in float32. A block is a row of `Bytes` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptfix.errors import Refused
from ckptfix.ops.dequantize.codes import E2M1
from ckptfix.ops.dequantize.layout import Layout, Parts, Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    Bytes: TypeAlias = NDArray[Any]
    Round: TypeAlias = Callable[[Array], Array]


def _half(block: Bytes, at: int) -> Array:
    """Return the half at a place of each block as float32, a column."""
    import numpy

    made: Array = numpy.ascontiguousarray(block[:, at : at + 2]).view("<f2").astype(numpy.float32)
    return made


def _halves(codes: Bytes) -> Array:
    """Return the low four bits of all bytes of each block, and then the high ones."""
    import numpy

    return numpy.concatenate([codes & 15, codes >> 4], axis=1)


def _fifth_bits(block: Bytes, at: int) -> Array:
    """Return the 32 bits at a place of each block, each as 16 or 0."""
    import numpy

    return numpy.unpackbits(block[:, at : at + 4], axis=1, bitorder="little") << 4


def q4_0(block: Bytes) -> Array:
    return (_halves(block[:, 2:18]).astype("f4") - 8) * _half(block, 0)


def q4_1(block: Bytes) -> Array:
    return _halves(block[:, 4:20]).astype("f4") * _half(block, 0) + _half(block, 2)


def q5_0(block: Bytes) -> Array:
    return ((_halves(block[:, 6:22]) | _fifth_bits(block, 2)).astype("f4") - 16) * _half(block, 0)


def q5_1(block: Bytes) -> Array:
    return (_halves(block[:, 8:24]) | _fifth_bits(block, 4)).astype("f4") * _half(block, 0) + _half(block, 2)


def q8_0(block: Bytes) -> Array:
    return block[:, 2:34].view("i1").astype("f4") * _half(block, 0)


def q8_k(block: Bytes) -> Array:
    import numpy

    scale: Array = numpy.ascontiguousarray(block[:, :4]).view("<f4")
    made: Array = block[:, 4:260].view("i1").astype("f4") * scale
    return made


def _two_bits(codes: Bytes) -> Array:
    """Return 256 codes from 64 bytes: of each half, the lowest two bits of its 32 bytes, then the next two."""
    parts = codes.reshape(-1, 2, 1, 32) >> _shifts(0, 2, 4, 6)
    made: Array = (parts & 3).reshape(-1, 256)
    return made


def _shifts(*amounts: int) -> Array:
    import numpy

    return numpy.array(amounts, numpy.uint8).reshape(1, 1, -1, 1)


def q2_k(block: Bytes) -> Array:
    scale = _half(block, 80) * (block[:, :16] & 15).astype("f4")
    least = _half(block, 82) * (block[:, :16] >> 4).astype("f4")
    codes = _two_bits(block[:, 16:80]).reshape(-1, 16, 16).astype("f4")
    made: Array = (scale[:, :, None] * codes - least[:, :, None]).reshape(-1, 256)
    return made


def q3_k(block: Bytes) -> Array:
    import numpy

    packed = block[:, 96:108]
    low = _halves(packed[:, :8])
    high = ((packed[:, None, 8:] >> _shifts(0, 2, 4, 6)[0]) & 3).reshape(-1, 16)
    scale = _half(block, 108) * ((low | high << 4).astype("f4") - 32)
    # A bit that is not set subtracts 4.
    unset = numpy.uint8(1) - ((block[:, None, :32] >> numpy.arange(8, dtype=numpy.uint8)[:, None]) & 1)
    codes = _two_bits(block[:, 32:96]).astype("f4") - (unset.reshape(-1, 256) << 2)
    made: Array = (scale[:, :, None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)
    return made


def _scales_and_least(packed: Bytes) -> tuple[Array, Array]:
    """Return the eight scales and the eight minimums of six bits in 12 bytes (``get_scale_min_k4``)."""
    import numpy

    one, two, both = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scale = numpy.concatenate([one & 63, (both & 15) | (one >> 6 << 4)], axis=1)
    least = numpy.concatenate([two & 63, (both >> 4) | (two >> 6 << 4)], axis=1)
    return scale.astype("f4"), least.astype("f4")


def _four_bits(codes: Bytes) -> Array:
    """Return 256 codes from 128 bytes: of each quarter, the low bits of its 32 bytes, and then the high ones."""
    made: Array = ((codes.reshape(-1, 4, 1, 32) >> _shifts(0, 4)) & 15).reshape(-1, 256)
    return made


def _with_least(block: Bytes, codes: Array) -> Array:
    scale, least = _scales_and_least(block[:, 4:16])
    scale, least = _half(block, 0) * scale, _half(block, 2) * least
    made: Array = (scale[:, :, None] * codes.reshape(-1, 8, 32).astype("f4") - least[:, :, None]).reshape(-1, 256)
    return made


def q4_k(block: Bytes) -> Array:
    return _with_least(block, _four_bits(block[:, 16:144]))


def q5_k(block: Bytes) -> Array:
    import numpy

    fifth = (block[:, None, 16:48] >> numpy.arange(8, dtype=numpy.uint8)[:, None]) & 1
    return _with_least(block, _four_bits(block[:, 48:176]) | (fifth << 4).reshape(-1, 256))


def q6_k(block: Bytes) -> Array:
    low = ((block[:, :128].reshape(-1, 2, 1, 64) >> _shifts(0, 4)) & 15).reshape(-1, 256)
    high = ((block[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(0, 2, 4, 6)) & 3).reshape(-1, 256)
    codes = (low | high << 4).astype("f4") - 32
    scale = _half(block, 208) * block[:, 192:208].view("i1").astype("f4")
    made: Array = (scale[:, :, None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)
    return made


_CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""``kvalues_iq4nl`` of ggml-common.h."""


def iq4_nl(block: Bytes) -> Array:
    import numpy

    return numpy.array(_CURVE, numpy.float32)[_halves(block[:, 2:18])] * _half(block, 0)


def iq4_xs(block: Bytes) -> Array:
    import numpy

    low = ((block[:, 4:8, None] >> _shifts(0, 4)[0, 0].T) & 15).reshape(-1, 8)
    high = (numpy.ascontiguousarray(block[:, 2:4]).view("<u2") >> numpy.arange(0, 16, 2, dtype=numpy.uint16)) & 3
    scale = _half(block, 0) * ((low | high << 4).astype("f4") - 32)
    codes = ((block[:, 8:136].reshape(-1, 8, 1, 16) >> _shifts(0, 4)) & 15).reshape(-1, 8, 32)
    made: Array = (scale[:, :, None] * numpy.array(_CURVE, numpy.float32)[codes]).reshape(-1, 256)
    return made


def mxfp4(block: Bytes) -> Array:
    import numpy

    scale = numpy.ldexp(numpy.float32(1), block[:, :1].astype(numpy.int32) - 127).astype(numpy.float32)
    table = numpy.array(E2M1, numpy.float32) + 0  # ggml's table holds integers, and so no negative zero
    return table[_halves(block[:, 1:17])] * scale


class BlockType(NamedTuple):
    """A type whose weights are computed.

    Attributes:
        weights, nbytes: of a block.
        bits: of a code.
        group: weights that share a scale.
        scales: places of the halves in a block; an infinite one is refused.
    """

    weights: int
    nbytes: int
    bits: int
    group: int
    scales: tuple[int, ...]
    compute: Callable[[Bytes], Array]


BLOCKS: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, 4, 32, (0,), q4_0),
    "Q4_1": BlockType(32, 20, 4, 32, (0, 2), q4_1),
    "Q5_0": BlockType(32, 22, 5, 32, (0,), q5_0),
    "Q5_1": BlockType(32, 24, 5, 32, (0, 2), q5_1),
    "Q8_0": BlockType(32, 34, 8, 32, (0,), q8_0),
    "Q2_K": BlockType(256, 84, 2, 16, (80, 82), q2_k),
    "Q3_K": BlockType(256, 110, 3, 16, (108,), q3_k),
    "Q4_K": BlockType(256, 144, 4, 32, (0, 2), q4_k),
    "Q5_K": BlockType(256, 176, 5, 32, (0, 2), q5_k),
    "Q6_K": BlockType(256, 210, 6, 16, (208,), q6_k),
    "Q8_K": BlockType(256, 292, 8, 256, (), q8_k),
    "IQ4_NL": BlockType(32, 18, 4, 32, (0,), iq4_nl),
    "IQ4_XS": BlockType(256, 136, 4, 32, (0,), iq4_xs),
    "MXFP4": BlockType(32, 17, 4, 32, (), mxfp4),
}
"""Name of a type in GGUF -> how its weights are computed."""


def blocks(parts: Parts) -> Layout:
    """Return the layout of a tensor of blocks.

    Raises:
        Refused: its type is known but not computed.
    """
    codes = parts.codes
    name = codes.detail.split()[-1]
    kind = BLOCKS.get(name)
    if kind is None:
        hint = "dequantize it with llama.cpp: llama-quantize --allow-requantize IN.gguf OUT.gguf F16"
        raise Refused(f"blocks of the type {name} are known but not dequantized", where=codes.name, hint=hint)
    nbytes = codes.shape[-1] if codes.shape else 0
    if nbytes % kind.nbytes:
        raise parts.wrong(f"a row of {nbytes} bytes is not a whole number of blocks of {kind.nbytes}")
    width = nbytes // kind.nbytes * kind.weights

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        return [tensors.rows(codes, first, last, nbytes)]

    def compute(round_: Round, data: Array) -> Array:
        import numpy

        block = data.reshape(-1, kind.nbytes)
        for at in kind.scales:
            if not numpy.isfinite(_half(block, at)).all():
                raise Refused("the scale has a number that is not finite", where=codes.name)
        return kind.compute(block).reshape(len(data), width)

    shape = (*codes.shape[:-1], width)
    group = (*(1 for _ in shape[1:]), kind.group)
    return Layout(codes.key, shape, "float32", kind.bits, group, math.prod(shape[:-1]), width, read, compute)

"""The blocks of GGUF: each holds its own scales, and a tensor is a run of them.

Fields of a block are in the order of its struct in ggml/src/ggml-common.h, and numbers are computed as in
``dequantize_row_*`` of ggml/src/ggml-quants.c, in float32. A block is a row of `Bytes` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptfix.errors import Refused
from ckptfix.ops.dequantize.codes import E2M1, eight_bits
from ckptfix.ops.dequantize.ggml_grids import eight_signs, grid, signs
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


def nvfp4(block: Bytes) -> Array:
    import numpy

    # The scale has no sign; ggml_ue4m3_to_fp32 takes its largest code for zero.
    codes = block[:, :4]
    scale = eight_bits("float8_e4m3fn")(codes & 0x7F)
    scale[(codes & 0x7F) == 0x7F] = 240 * 2
    scale[codes == 0x7F] = 0
    table = numpy.array(E2M1, numpy.float32) + 0
    pairs = block[:, 4:].reshape(-1, 4, 1, 8) >> _shifts(0, 4)
    made: Array = (table[pairs & 15].reshape(-1, 4, 16) * scale[:, :, None]).reshape(-1, 64)
    return made


def _threes(codes: Bytes, digits: int) -> Array:
    """Return the digits of numbers to the base of three, less one.

    A byte is a fraction of 256: each product by a power of three moves one more digit in front of the point. All bytes
    have their first digit, then all have their second.
    """
    import numpy

    powers = numpy.array([1, 3, 9, 27, 81][:digits], numpy.uint8)
    made = (codes[:, None, :] * powers[:, None]).astype(numpy.uint16) * numpy.uint16(3)
    found: Array = ((made >> 8).astype("f4") - 1).reshape(len(codes), -1)
    return found


def tq1_0(block: Bytes) -> Array:
    import numpy

    digits = [_threes(block[:, :32], 5), _threes(block[:, 32:48], 5), _threes(block[:, 48:52], 4)]
    return numpy.concatenate(digits, axis=1) * _half(block, 52)


def tq2_0(block: Bytes) -> Array:
    return (_two_bits(block[:, :64]).astype("f4") - 1) * _half(block, 64)


def _words(data: Bytes, kind: str) -> Array:
    import numpy

    return numpy.ascontiguousarray(data).view(kind)


def _steps(*amounts: int) -> Array:
    import numpy

    return numpy.array(amounts, numpy.uint16)


def _scaled(scale: Array, numbers: Array, signs: Array) -> Array:
    """Return 256 numbers of each block: ``scale * numbers * signs``, with scales for equal runs of them."""
    groups = scale.shape[1]
    made: Array = scale[:, :, None] * numbers.reshape(-1, groups, 256 // groups)
    made *= signs.reshape(made.shape)
    return made.reshape(-1, 256)


def _scales_of_halves(block: Bytes, codes: Bytes) -> Array:
    """Return ``scale * (0.5 + code) / 4`` for the low and then the high four bits of each byte of `codes`."""
    import numpy

    spread = ((codes[:, :, None] >> _steps(0, 4).astype("u1")) & 15).reshape(len(codes), -1)
    made: Array = _half(block, 0) * (numpy.float32(0.5) + spread) * numpy.float32(0.25)
    return made


def _seven_bit_signs(words: Array) -> Array:
    import numpy

    made: Array = signs()[(words[:, :, None] >> numpy.arange(0, 28, 7, dtype=numpy.uint32)) & 127]
    return made


def iq2_xxs(block: Bytes) -> Array:
    import numpy

    words = _words(block[:, 2:66], "<u4").reshape(-1, 8, 2)
    scale = _half(block, 0) * (numpy.float32(0.5) + (words[:, :, 1] >> 28).astype("f4")) * numpy.float32(0.25)
    codes = block[:, 2:66].reshape(-1, 8, 8)[:, :, :4]
    return _scaled(scale, grid("IQ2_XXS")[codes], _seven_bit_signs(words[:, :, 1]))


def iq2_xs(block: Bytes) -> Array:
    codes = _words(block[:, 2:66], "<u2")
    return _scaled(_scales_of_halves(block, block[:, 66:74]), grid("IQ2_XS")[codes & 511], signs()[codes >> 9])


def iq2_s(block: Bytes) -> Array:
    high = ((block[:, 66:74, None] >> _steps(0, 2, 4, 6).astype("u1")) & 3).reshape(-1, 32)
    codes = block[:, 2:34] | high.astype("u2") << 8
    return _scaled(_scales_of_halves(block, block[:, 74:82]), grid("IQ2_S")[codes], eight_signs()[block[:, 34:66]])


def iq3_xxs(block: Bytes) -> Array:
    import numpy

    words = _words(block[:, 66:98], "<u4")
    scale = _half(block, 0) * (numpy.float32(0.5) + (words >> 28).astype("f4")) * numpy.float32(0.5)
    return _scaled(scale, grid("IQ3_XXS")[block[:, 2:66]], _seven_bit_signs(words))


def iq3_s(block: Bytes) -> Array:
    high = ((block[:, 66:74, None] >> _steps(*range(8)).astype("u1")) & 1).reshape(-1, 64)
    codes = block[:, 2:66] | high.astype("u2") << 8
    spread = ((block[:, 106:110, None] >> _steps(0, 4).astype("u1")) & 15).reshape(-1, 8)
    scale = _half(block, 0) * (1 + 2 * spread)
    return _scaled(scale, grid("IQ3_S")[codes], eight_signs()[block[:, 74:106]])


def _ternary(scale: Array, codes: Array, minus: Array) -> Array:
    """Return ``scale * (numbers +- 1/8)`` of codes of IQ1_S, with a scale and a sign for equal runs of 256 numbers."""
    import numpy

    delta = numpy.where(minus != 0, numpy.float32(-0.125), numpy.float32(0.125))
    numbers = grid("IQ1_S")[codes].reshape(*minus.shape, -1) + delta[:, :, None]
    made: Array = (scale[:, :, None] * numbers.reshape(*scale.shape, -1)).reshape(-1, 256)
    return made


def iq1_s(block: Bytes) -> Array:
    high = _words(block[:, 34:50], "<u2")
    codes = block[:, 2:34] | (((high[:, :, None] >> _steps(0, 3, 6, 9)) & 7) << 8).reshape(-1, 32)
    scale = _half(block, 0) * (2 * ((high >> 12) & 7) + 1)
    return _ternary(scale, codes, high & 0x8000)


def _quarters(block: Bytes) -> Array:
    """Return the half that IQ1_M stores in the upper four bits of each of its four words of scales, a column."""
    words = _words(block[:, 48:56], "<u2") >> 12
    made: Array = (words << _steps(0, 4, 8, 12)).sum(axis=1, dtype="u2").view("f2").astype("f4")[:, None]
    return made


def iq1_m(block: Bytes) -> Array:
    high = ((block[:, 32:48, None] >> _steps(0, 4).astype("u1")) & 15).reshape(-1, 32)
    codes = block[:, :32] | (high & 7).astype("u2") << 8
    words = _words(block[:, 48:56], "<u2")
    scale = _quarters(block) * (2 * ((words[:, :, None] >> _steps(0, 3, 6, 9)) & 7).reshape(-1, 16) + 1)
    return _ternary(scale, codes, high & 8)


class BlockType(NamedTuple):
    """A type whose weights are computed.

    Attributes:
        weights, nbytes: of a block.
        bits: of a code.
        group: weights that share a scale.
        scales: places of the halves in a block; an infinite one is refused. Scales in another form are not listed, and
            numbers that are infinite are refused instead.
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
    "IQ1_S": BlockType(256, 50, 1, 32, (0,), iq1_s),
    "IQ1_M": BlockType(256, 56, 1, 16, (), iq1_m),
    "IQ2_XXS": BlockType(256, 66, 2, 32, (0,), iq2_xxs),
    "IQ2_XS": BlockType(256, 74, 2, 16, (0,), iq2_xs),
    "IQ2_S": BlockType(256, 82, 2, 16, (0,), iq2_s),
    "IQ3_XXS": BlockType(256, 98, 3, 32, (0,), iq3_xxs),
    "IQ3_S": BlockType(256, 110, 3, 32, (0,), iq3_s),
    "TQ1_0": BlockType(256, 54, 2, 256, (52,), tq1_0),
    "TQ2_0": BlockType(256, 66, 2, 256, (64,), tq2_0),
    "MXFP4": BlockType(32, 17, 4, 32, (), mxfp4),
    "NVFP4": BlockType(64, 36, 4, 16, (), nvfp4),
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
        finite = all(numpy.isfinite(_half(block, at)).all() for at in kind.scales)
        made = kind.compute(block)
        if not finite or (not kind.scales and not numpy.isfinite(made).all()):
            raise Refused("the scale has a number that is not finite", where=codes.name)
        return made.reshape(len(data), width)

    shape = (*codes.shape[:-1], width)
    group = (*(1 for _ in shape[1:]), kind.group)
    return Layout(codes.key, shape, "float32", kind.bits, group, math.prod(shape[:-1]), width, read, compute)

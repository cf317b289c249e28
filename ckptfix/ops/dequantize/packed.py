"""Schemes with several codes in a word of 32 bits: GPTQ, AWQ, compressed-tensors and MLX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import TensorEntry
from ckptfix.ops.dequantize.codes import Table, in_words, integers, numbered, times
from ckptfix.ops.dequantize.layout import Layout, Parts, Tensors, numbers
from ckptfix.ops.dequantize.scaled import MOST_FLOATS, weight_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    Round: TypeAlias = Callable[[Array], Array]

WORD = 32
"""Bits of a word."""

STEP = 16
"""Columns that are read together: words of a line of the processor's cache."""

GPTQ_BITS = (2, 3, 4, 8)

FORMATS = (None, "gptq", "gptq_v2")
"""``checkpoint_format`` of the layouts that GPTQModel's ``TorchQuantLinear`` reads; others are for one kernel each."""

ONES_OF_THREE = (0x24924924, 0x92492492, 0x49249249)
"""The numbers that GPTQModel adds to every third word of zeros with three bits, in files of version 1 that it wrote
(gptqmodel/utils/model.py ``convert_gptq_v1_to_v2_format_module``). The first and last are exchanged, so this adds
four to some zeros, and others than GPTQModel add one to each (auto_gptq/nn_modules/qlinear/qlinear_cuda.py)."""


def _words(data: Array) -> Array:
    """Return the transposed matrix of words, whose rows are contiguous."""
    import numpy

    words = numpy.ascontiguousarray(data).view("<u4")
    made = numpy.empty(words.shape[::-1], numpy.uint32)
    # The lines of the cache that some rows fill are written while they are in the cache, in a third of the time.
    for first in range(0, len(words), STEP):
        made[:, first : first + STEP] = words[first : first + STEP].T
    return made


def _turned(numbers: Array, first: int, last: int) -> Array:
    import numpy

    return numpy.ascontiguousarray(numbers[:, first:last].T)


def gptq(parts: Parts) -> Layout:
    """Return the layout of GPTQ: rows of words that pack the inputs, a column for each output.

    ``scales[g_idx] * (codes - zeros[g_idx])`` in the dtype of the scales (gptqmodel/nn_modules/qlinear/__init__.py
    ``PackableQuantLinear.dequantize_weight``). Files of version 1 hold the zeros less one; the one is added to whole
    words, as GPTQModel does.

    Raises:
        Refused: the shapes fit no number of bits, there are no zeros, or a group index is outside the groups.
    """
    codes, scale = parts.codes, parts.need("scales", "scale")
    zeros = parts.need("qzeros", "zero point")
    stated = parts.settings.text("checkpoint_format", "format")
    method = parts.settings.text("quant_method")
    if method in (None, "gptq") and stated not in FORMATS:
        raise parts.wrong(f"the checkpoint_format {stated} is the layout of a kernel")
    words, outputs = codes.shape
    groups = scale.shape[0]
    fits = [bits for bits in GPTQ_BITS if -(-outputs * bits // WORD) == zeros.shape[1] and words * WORD % bits == 0]
    said = parts.settings.number("bits")
    bits = said if len(fits) > 1 and said in fits else fits[0] if len(fits) == 1 else 0
    if not bits:
        shapes = f"{list(codes.shape)} and zeros of {list(zeros.shape)}"
        raise parts.wrong(f"codes of {shapes} fit none of {', '.join(map(str, GPTQ_BITS))} bits")
    inputs = words * WORD // bits
    if scale.shape != (groups, outputs) or zeros.shape[0] != groups:
        raise parts.wrong(f"zeros of shape {list(zeros.shape)} do not fit scales of {list(scale.shape)}")
    index = _group_index(parts, "g_idx", inputs, groups)
    version_2 = stated == "gptq_v2"
    each = bits == 3 and not parts.settings.is_written_by("gptqmodel")

    def read_zeros(tensors: Tensors) -> Array:
        import numpy

        packed = tensors.rows(zeros, 0, groups, zeros.shape[1] * 4).view("<u4").astype(numpy.uint32)
        if not version_2 and not each:
            packed = packed + _ones(bits, packed.shape[1])
        found = in_words(packed, integers(bits), outputs)
        return (found + 1) % 8 if each and not version_2 else found

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        data = tensors.columns(codes, words, first * 4, last * 4, outputs * 4)
        zero = tensors.once(f"zeros {zeros.name}", lambda: read_zeros(tensors))
        return [_words(data), _turned(tensors.finite(scale), first, last), _turned(zero, first, last)]

    table = Table(integers(bits), lambda data, numbers, kind: in_words(data, numbers, inputs, kind), times, index)
    dtype = scale.dtype if scale.dtype in MOST_FLOATS else "float16"
    group = -(-inputs // groups)
    return Layout(
        weight_key(parts), (outputs, inputs), dtype, bits, (1, group), outputs, inputs, read, table.compute,
        step=STEP, table=table,
    )  # fmt: skip


def _ones(bits: int, words: int) -> Array:
    """Return the words that add one to every zero of a row; a carry goes on inside the word."""
    import numpy

    if bits == 3:
        return numpy.resize(numpy.array(ONES_OF_THREE, numpy.uint32), words)
    one = sum(1 << shift for shift in range(0, WORD, bits))
    return numpy.full(words, one, numpy.uint32)


def _positive(size: int | None) -> int:
    return size if size is not None and size > 0 else 0


def _group_index(parts: Parts, suffix: str, inputs: int, groups: int, *, strict: bool = True) -> Array | None:
    """Return the group of each input; None if the groups have equal sizes and follow each other.

    Args:
        strict: the groups must be known; otherwise None also says that there is no index.

    Raises:
        Refused: the group index is missing and the sizes are unequal, or it names a group that does not exist.
    """
    import numpy

    entry = parts.find(suffix)
    size = parts.settings.number("group_size") or 0
    if entry is None:
        if not strict or (groups and inputs % groups == 0):
            return None
        if size > 0 and -(-inputs // size) == groups:
            return numpy.arange(inputs) // size
        raise parts.wrong(f"{inputs} inputs are not a whole number of {groups} groups, and there is no g_idx")
    if entry.shape != (inputs,):
        raise parts.wrong(f"g_idx has the shape {list(entry.shape)}, but there are {inputs} inputs", where=entry.name)
    if not parts.checks:
        return None
    index = numbers(entry).astype(numpy.int64)
    if not strict and (index == -1).all():
        return None  # compressed-tensors allocates it so, and fills it only for groups out of order.
    if len(index) and (index.min() < 0 or index.max() >= groups):
        raise parts.wrong(f"g_idx names groups outside 0 to {groups - 1}", where=entry.name)
    if groups and inputs % groups == 0 and (index == numpy.arange(inputs) // (inputs // groups)).all():
        return None
    return index


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs (awq/utils/packing_utils.py ``AWQ_REVERSE_ORDER``)."""


def awq(parts: Parts) -> Layout:
    """Return the layout of AWQ in the order of its gemm kernel: words that pack eight outputs, a row for each input.

    ``(codes - zeros) * scales`` in the dtype of the scales (awq/utils/packing_utils.py ``dequantize_gemm``).

    Raises:
        Refused: the shapes do not fit four bits.
    """
    codes, scale = parts.codes, parts.need("scales", "scale")
    zeros = parts.need("qzeros", "zero point")
    inputs, packed = codes.shape
    per_word = len(AWQ_ORDER)
    outputs = packed * per_word
    groups = scale.shape[0]
    version = (parts.settings.text("version") or "gemm").lower()
    said = parts.settings.number("bits") or parts.settings.number("w_bit")
    if version != "gemm" or groups == inputs:
        raise parts.wrong(f"the layout of AWQ's {'gemv' if version == 'gemm' else version} kernel is not known")
    if scale.shape != (groups, outputs) or said not in (None, 4):
        raise parts.wrong(f"codes of {list(codes.shape)} with scales of {list(scale.shape)} do not have four bits")
    if zeros.shape != (groups, packed) or inputs % groups:
        raise parts.wrong(f"zeros of shape {list(zeros.shape)} do not fit codes of {list(codes.shape)}")

    def columns(tensors: Tensors, entry: TensorEntry, rows: int, first: int, last: int) -> Array:
        """Return the codes of some outputs, a row for each output."""
        import numpy

        low, high = first // per_word, -(-last // per_word)
        words = _words(tensors.columns(entry, rows, low * 4, high * 4, packed * 4))
        made = numpy.empty((high - low, per_word, rows), numpy.uint8)
        for place, source in enumerate(AWQ_ORDER):
            made[:, place] = (words >> numpy.uint32(4 * source)) & numpy.uint32(15)
        return made.reshape(-1, rows)[first - low * per_word : last - low * per_word]

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        zero = columns(tensors, zeros, groups, first, last).astype(numpy.float32)
        return [columns(tensors, codes, inputs, first, last), _turned(tensors.finite(scale), first, last), zero]

    table = Table(integers(4), numbered, times)
    dtype = scale.dtype if scale.dtype in MOST_FLOATS else "float16"
    group = (1, inputs // groups)
    return Layout(
        weight_key(parts), (outputs, inputs), dtype, 4, group, outputs, inputs, read, table.compute, step=STEP,
        table=table,
    )  # fmt: skip


def pack_quantized(parts: Parts) -> Layout:
    """Return the layout of compressed-tensors' pack-quantized: rows of words, codes less half their range.

    compressed_tensors/compressors/pack_quantized. Zero points are packed along the rows, or are int8.

    Raises:
        Refused: the shape is missing, or the sizes fit no number of bits.
    """
    codes, scale = parts.codes, parts.need("_scale", "scale")
    stated = numbers(parts.need("_shape", "shape")).reshape(-1).tolist()
    if len(stated) != len(codes.shape) or any(size < 0 for size in stated) or tuple(stated[:-1]) != codes.shape[:-1]:
        raise parts.wrong(f"the shape {stated} does not fit codes of {list(codes.shape)}")
    shape = tuple(map(int, stated))
    width, words = shape[-1], codes.shape[-1]
    bits = _bits(parts, width, words)
    rows = math.prod(shape[:-1])
    groups = scale.shape[-1] if scale.shape else 1
    whole = math.prod(scale.shape) == 1
    size = width if whole or groups == 1 else _positive(parts.settings.of_weights("group_size")) or width // groups
    if not whole and (scale.shape[:-1] != shape[:-1] or size < 1 or -(-width // size) != groups):
        raise parts.wrong(f"a scale of shape {list(scale.shape)} does not fit a weight of {list(shape)}")
    index = _group_index(parts, "_g_idx", width, groups, strict=False)
    if index is None and width % size:
        import numpy

        index = numpy.arange(width) // size
    zero = parts.find("_zero_point")
    if zero is not None:
        packed_rows = (*shape[:-2], -(-math.prod(shape[-2:-1]) * bits // WORD), groups)
        plain = math.prod(zero.shape) == 1 if whole else zero.shape == scale.shape and zero.dtype != "int32"
        if not plain and (whole or zero.shape != packed_rows or zero.dtype != "int32"):
            raise parts.wrong(f"a zero point of shape {list(zero.shape)} does not fit a scale of {list(scale.shape)}")
    codes_of = integers(bits, -(1 << (bits - 1)))

    def read_zeros(tensors: Tensors, entry: TensorEntry) -> Array:
        import numpy

        found = tensors.numbers(entry)
        if entry.dtype != "int32" or whole:
            return found.astype(numpy.float32).reshape(-1, groups)
        made = [
            in_words(numpy.ascontiguousarray(one.T).view(numpy.uint32), codes_of, shape[-2]).T
            for one in found.reshape(-1, *found.shape[-2:])
        ]
        return numpy.concatenate(made)

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        data = tensors.rows(codes, first, last, words * 4).view("<u4").astype(numpy.uint32, copy=False)
        scales = tensors.finite(scale).reshape(-1, groups)
        arrays = [data, scales.repeat(last - first, axis=0) if whole else scales[first:last]]
        if zero is not None:
            made = tensors.once(f"zeros {zero.name}", lambda: read_zeros(tensors, zero))
            arrays.append(made.repeat(last - first, axis=0) if whole else made[first:last])
        return arrays

    table = Table(codes_of, lambda data, numbers, kind: in_words(data, numbers, width, kind), times, index)
    dtype = scale.dtype if scale.dtype in MOST_FLOATS else "bfloat16"
    group = () if whole else (1, size)
    return Layout(
        weight_key(parts), shape, dtype, bits, group, rows, width, read, table.compute, table=table
    )


def _bits(parts: Parts, width: int, words: int) -> int:
    """Return the bits of a code: those with which `width` codes need `words` words."""
    fits = [bits for bits in range(1, 9) if -(-width * bits // WORD) == words]
    said = parts.settings.of_weights("num_bits")
    if said is not None and said in fits:
        return said
    if len(fits) != 1 or said is not None:
        raise parts.wrong(f"rows of {words} words do not fit {width} codes of {said or '1 to 8'} bits")
    return fits[0]


MLX_BITS = (2, 3, 4, 5, 6, 8)


def mlx(parts: Parts) -> Layout:
    """Return the layout of MLX's affine quantization: rows of words, ``scale * codes + bias`` for each group.

    mlx/backend/cpu/quantized.cpp computes in the dtype of the scale, and rounds the product and the sum.

    Raises:
        Refused: nothing states the bits of a code, or the shapes do not fit them.
    """
    codes = parts.codes
    scale, bias = parts.need("scales", "scale"), parts.need("biases", "bias")
    module = codes.key.removesuffix(".weight")
    bits, size = parts.settings.number("bits", module), parts.settings.number("group_size", module)
    words, groups = codes.shape[-1], scale.shape[-1]
    if bits is None or size is None:
        hint = "put the model's config.json beside it, which states bits and group_size"
        raise parts.wrong("nothing states the number of bits", hint=hint)
    width = words * WORD // bits if bits in MLX_BITS else 0
    leading = codes.shape[:-1]
    if not width or words * WORD % bits or groups * size != width or scale.shape[:-1] != leading:
        shapes = f"codes of {list(codes.shape)} and scales of {list(scale.shape)}"
        raise parts.wrong(f"{shapes} do not fit {bits} bits in groups of {size}")
    if bias.shape != scale.shape:
        raise parts.wrong(f"biases of shape {list(bias.shape)} do not fit scales of {list(scale.shape)}")

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        data = tensors.rows(codes, first, last, words * 4).view("<u4").astype(numpy.uint32, copy=False)
        scales = tensors.finite(scale).reshape(-1, groups)[first:last]
        return [data, scales, tensors.finite(bias, role="bias").reshape(-1, groups)[first:last]]

    def formula(round_: Round, numbers: Array, scales: Array, biases: Array) -> Array:
        return round_(numbers * scales) + biases

    table = Table(
        integers(bits), lambda data, numbers, kind: in_words(data, numbers, width, kind), formula, rounds=True
    )
    dtype = scale.dtype if scale.dtype in MOST_FLOATS else "float16"
    rows = math.prod(leading)
    return Layout(
        weight_key(parts), (*leading, width), dtype, bits, (1, size), rows, width, read, table.compute, table=table
    )

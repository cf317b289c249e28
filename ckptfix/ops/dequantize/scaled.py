"""Schemes with one code in an element, or two of four bits: fp8, int8, NVFP4 and MX formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import TensorEntry
from ckptfix.errors import Refused
from ckptfix.ops.dequantize.codes import E2M1, affine, eight_bits, in_bytes, numbered
from ckptfix.ops.dequantize.layout import Layout, Parts, Shape, Tensors, numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    Round: TypeAlias = Callable[[Array], Array]

BLOCK = 128
"""Elements of a side of a block of DeepSeek, which is used where config.json states none."""

MOST_FLOATS = ("float32", "float16", "bfloat16")


def weight_key(parts: Parts) -> str:
    """Return the key of the plain weight: the name of the codes without the mark of the scheme."""
    suffix = parts.weight.scheme.suffix
    return parts.stem + ("weight" if suffix in ("weight", "qweight") else "")


def blocks(parts: Parts, shape: Shape, scale: TensorEntry, *, last: int | None = None) -> Shape:
    """Return the sizes of the block of elements that share a scale, a size for each dimension of the codes.

    Args:
        shape: of the plain weight.
        last: the size that the last dimension must have, for schemes that fix it.

    Raises:
        Refused: the shape of the scale does not fit.
    """
    own = scale.shape
    if math.prod(own) == 1:
        return shape
    if len(own) == 1 and own != shape[:1] and own == shape[-1:]:
        return (*shape[:-1], 1)
    if len(own) == len(shape) + 1 and own[-1] == 1:
        own = own[:-1]
    stated = parts.settings.numbers("weight_block_size")
    sizes: list[int] = []
    for place, (whole, count) in enumerate(zip(shape, own, strict=False)):
        from_end = len(shape) - place
        side = stated[-from_end] if from_end <= len(stated) else BLOCK
        if last is not None and from_end == 1:
            fits = [last] if count * last == whole else []
        else:
            tried = (1, whole, side, _equal(whole, count) if from_end > len(stated) else 0)
            fits = [size for size in tried if size and -(-whole // size) == count]
        if not fits:
            raise parts.wrong(f"a scale of shape {list(scale.shape)} does not fit codes of {list(shape)}")
        sizes.append(fits[0])
    if len(own) > len(shape):
        raise parts.wrong(f"a scale of shape {list(scale.shape)} does not fit codes of {list(shape)}")
    return (*sizes, *shape[len(own) :])


FUSED = 3
"""The most layers that are fused in a weight, with a scale for each."""

SIDES = 16
"""Sides of blocks are multiples of this number."""


def _equal(whole: int, count: int) -> int:
    """Return the size of `count` equal blocks, or 0 if no scheme has such blocks."""
    size, rest = divmod(whole, count) if count else (0, 0)
    return 0 if rest or not (count <= FUSED or size % SIDES == 0) else size


def scale_rows(scale: Array, shape: Shape, sizes: Shape, first: int, last: int) -> Array:
    """Return the scales of the rows `first` to `last` of a matrix, a column for each group of a row.

    Args:
        scale: the whole scale.
        shape: of the plain weight.
        sizes: of the block of elements that share a scale.
    """
    import numpy

    counts = tuple(-(-whole // size) for whole, size in zip(shape, sizes, strict=True))
    grid = scale.reshape(counts)
    leading = shape[:-1]
    if not leading:
        return grid.reshape(1, -1)
    index = numpy.unravel_index(numpy.arange(first, last), leading)
    found: Array = grid[tuple(one // size for one, size in zip(index, sizes[:-1], strict=True))]
    return found


def columns_of(width: int, size: int) -> Array | None:
    """Return the group of each column; None if all groups of a row have the same size."""
    import numpy

    return None if width % size == 0 else numpy.arange(width) // size


def one_scale(
    parts: Parts,
    decode: Callable[[Array], Array],
    dtype: str,
    *,
    bits: int = 8,
    scale: TensorEntry | None = None,
    whole: Callable[[Tensors, TensorEntry], Array] | None = None,
    last: int | None = None,
    codes_in_item: int = 1,
    zero: TensorEntry | None = None,
    after: Callable[[Array], Array] | None = None,
    rounds_scale: bool = False,
) -> Layout:
    """Return the layout of a weight whose codes have the dimensions of the weight: ``(codes - zero) * scale``.

    Args:
        decode: rows of bytes -> rows of float32 numbers.
        whole: reads the scales; as they are, by default.
        last: elements in a group of a row, for schemes that fix it.
        codes_in_item: codes in an element of the last dimension.
        zero: the zero points, in the shape of the scale.
        after: applied to the product.
        rounds_scale: the scale is rounded to the dtype of the weight before the product.
    """
    codes = parts.codes
    scale = scale or parts.first_scale
    shape = (*codes.shape[:-1], codes.shape[-1] * codes_in_item) if codes.shape else (1,)
    sizes = blocks(parts, shape, scale, last=last)
    width = shape[-1]
    nbytes = codes.shape[-1] * codes.itemsize if codes.shape else codes.itemsize
    index = columns_of(width, sizes[-1]) if width else None
    scale_of = whole or (lambda tensors, entry: tensors.finite(entry))
    if zero is not None and zero.shape != scale.shape:
        raise parts.wrong(f"a zero point of shape {list(zero.shape)} does not fit a scale of {list(scale.shape)}")

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        scales = scale_rows(scale_of(tensors, scale), shape, sizes, first, last)
        arrays = [tensors.rows(codes, first, last, nbytes), scales]
        if zero is not None:
            arrays.append(scale_rows(tensors.numbers(zero), shape, sizes, first, last))
        return [_expanded(array, last - first) for array in arrays]

    def compute(round_: Round, data: Array, scales: Array, zeros: Array | None = None) -> Array:
        import numpy

        if rounds_scale:
            scales = round_(scales)
        found = affine(decode(data), scales, None if zeros is None else zeros.astype(numpy.float32), index)
        return found if after is None else after(found)

    group = () if math.prod(sizes) == math.prod(shape) and math.prod(scale.shape) == 1 else sizes
    logical = shape if codes.shape else ()
    return Layout(weight_key(parts), logical, dtype, bits, group, math.prod(shape[:-1]), width, read, compute)


def _expanded(array: Array, rows: int) -> Array:
    return array if len(array) == rows else array.repeat(rows, axis=0)


def _dtype(parts: Parts, scale: TensorEntry) -> str:
    """Return the dtype that a scheme without one of its own computes: that of the scale if it is narrow.

    A float32 scale leaves it open. Then it is the model's, which config.json states, or bfloat16, the dtype of the
    models that are published so.
    """
    if scale.dtype in ("float16", "bfloat16"):
        return scale.dtype
    return parts.settings.dtype or "bfloat16"


def fp8(parts: Parts) -> Layout:
    """Return the layout of fp8 codes with a scale for each block, row, or tensor, as float32 or narrower.

    DeepSeek-V3 inference/kernel.py ``weight_dequant`` multiplies in float32 and stores bfloat16.
    """
    scale = parts.first_scale
    decode = eight_bits(parts.codes.dtype)
    method = parts.settings.text("quant_method")
    dtype = _dtype(parts, scale)
    if method == "compressed-tensors" and scale.dtype in MOST_FLOATS:
        dtype = scale.dtype  # compressed_tensors/quantization/lifecycle/forward.py dequantize
    powers = scale.dtype == "float8_e8m0fnu"
    # modelopt/torch/quantization/qtensor/fp8_tensor.py dequantize: `quantized_data.to(dtype) * scales.to(dtype)`
    narrow = method == "modelopt" or (method is None and parts.settings.text("quant_algo") is not None)
    return one_scale(
        parts, decode, dtype, scale=scale, whole=power_of_two if powers else None, rounds_scale=narrow and not powers
    )


def power_of_two(tensors: Tensors, entry: TensorEntry) -> Array:
    """Return the scales of E8M0 codes: 2 ** (code - 127); the code 255 is not a number."""

    def made() -> Array:
        import numpy

        codes = tensors.rows(entry, 0, 1, entry.nbytes).reshape(entry.shape)
        if (codes == 255).any():
            raise Refused("the scale has a number that is not finite", where=entry.name)
        powers: Array = numpy.ldexp(numpy.float32(1), codes.astype(numpy.int32) - 127).astype(numpy.float32)
        return powers

    return tensors.once(f"powers {entry.name}", made)


def mxfp8(parts: Parts) -> Layout:
    """Return the layout of fp8 codes with a power of two for each 32 (compressed_tensors/compressors/mxfp8)."""
    decode = eight_bits(parts.codes.dtype)
    return one_scale(parts, decode, "bfloat16", whole=power_of_two, last=32)


def mxfp4(parts: Parts) -> Layout:
    """Return the layout of E2M1 codes with a power of two for each 32 (compressed_tensors/compressors/mxfp4)."""
    return one_scale(
        parts, partial(in_bytes, table=E2M1), "bfloat16", bits=4, whole=power_of_two, last=32, codes_in_item=2
    )


E2M1_OF_MODELOPT = tuple(number + 0.0 for number in E2M1)
"""The numbers of E2M1 codes in ModelOpt: the table of its NVFP4QTensor has no negative zero."""


def nvfp4(parts: Parts, *, second: str, divided: bool) -> Layout:
    """Return the layout of E2M1 codes with an E4M3 scale for each 16.

    A second scale, as float32, belongs to the tensor or to each expert.

    Args:
        second: suffix of the second scale.
        divided: the scale is divided by the second one, as in compressed_tensors/compressors/nvfp4; ModelOpt
            (modelopt/torch/quantization/qtensor/nvfp4_tensor.py) multiplies.
    """
    other = parts.need(second, "second scale")
    scale = parts.first_scale
    own = other.shape
    while own and own[-1] == 1:
        own = own[:-1]
    if own != scale.shape[: len(own)]:
        raise parts.wrong(f"a second scale of shape {list(other.shape)} does not fit a scale of {list(scale.shape)}")

    def whole(tensors: Tensors, entry: TensorEntry) -> Array:
        def made() -> Array:
            import numpy

            most = tensors.finite(other, role="second scale").astype(numpy.float32)
            if divided and not most.all():
                raise parts.wrong("the second scale is zero, and the scale is divided by it", where=other.name)
            single = most.reshape(own + (1,) * (len(scale.shape) - len(own)))
            found = tensors.finite(entry)
            product: Array = found / single if divided else found * single
            return product.astype(numpy.float32)

        return tensors.once(f"both {entry.name}", made)

    dtype = "bfloat16" if divided else parts.settings.dtype or "bfloat16"
    decode = partial(in_bytes, table=E2M1 if divided else E2M1_OF_MODELOPT)
    return one_scale(
        parts, decode, dtype, bits=4, scale=scale, whole=whole, last=16, codes_in_item=2
    )


MX_BYTES = 16
"""Bytes of a block of 32 codes."""


def mx_blocks(parts: Parts) -> Layout:
    """Return the layout of E2M1 codes in blocks of 16 bytes, with a power of two for each block.

    The dimensions are (expert, output, block, 16). transformers (integrations/mxfp4.py) turns the two projections of an
    expert around, (expert, input, output), and gpt-oss itself (gpt_oss/torch/weights.py) does not.
    """
    codes, scale = parts.codes, parts.first_scale
    per_byte = 2
    if len(codes.shape) < 2 or scale.shape != codes.shape[:-1] or codes.shape[-1] != MX_BYTES:
        raise parts.wrong(f"a scale of shape {list(scale.shape)} does not fit codes of {list(codes.shape)}")
    *leading, groups, size = codes.shape
    width = groups * size * per_byte
    key = weight_key(parts)
    turned = key.rpartition(".")[2] in ("gate_up_proj", "down_proj") and len(leading) == 2
    nbytes = groups * size

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        powers = power_of_two(tensors, scale).reshape(-1, groups)
        return [tensors.rows(codes, first, last, nbytes), powers[first:last]]

    def compute(round_: Round, data: Array, powers: Array) -> Array:
        return affine(in_bytes(data, E2M1), powers)

    group = (1, size * per_byte)
    plain = Layout(key, (*leading, width), "bfloat16", 4, group, math.prod(leading), width, read, compute)
    if not turned:
        return plain
    experts, outputs = leading

    def read_turned(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        made = []
        for expert in range(first // width, -(-last // width)):
            start = max(first - expert * width, 0)
            stop = min(last - expert * width, width)
            whole = tensors.rows(codes, expert * outputs, (expert + 1) * outputs, nbytes)
            # Eight bytes at once are turned around in an eighth of the time.
            eights = numpy.ascontiguousarray(whole[:, start // per_byte : stop // per_byte]).view(numpy.uint64)
            packed = numpy.ascontiguousarray(eights.T).view(numpy.uint8).reshape(-1, outputs, 8).transpose(0, 2, 1)
            some = numpy.stack([packed & 15, packed >> 4], axis=2).reshape(-1, outputs)
            powers = power_of_two(tensors, scale).reshape(experts, outputs, groups)[expert]
            own = powers[:, start // (size * per_byte) : stop // (size * per_byte)].T
            made.append((some, own.repeat(size * per_byte, axis=0)))
        return [numpy.concatenate(arrays) for arrays in zip(*made, strict=True)]

    def compute_turned(round_: Round, some: Array, powers: Array) -> Array:
        found = numbered(some, E2M1, "f4")
        found *= powers
        return found

    return Layout(
        key,
        (experts, width, outputs),
        "bfloat16",
        4,
        (1, size * per_byte, 1),
        experts * width,
        outputs,
        read_turned,
        compute_turned,
        step=size * per_byte,
    )


def int8(parts: Parts) -> Layout:
    """Return the layout of int8 codes with a scale, and perhaps a zero point, for the tensor, a row, or a group of it.

    compressed_tensors computes in the dtype of the scale (quantization/lifecycle/forward.py ``dequantize``).
    """
    scale = parts.first_scale
    dtype = scale.dtype if scale.dtype in MOST_FLOATS else _dtype(parts, scale)
    zero = parts.find("_zero_point")
    return one_scale(parts, signed, dtype, scale=scale, zero=zero)


def signed(data: Array) -> Array:
    """Return rows of bytes as signed integers, in float32."""
    import numpy

    return data.view(numpy.int8).astype(numpy.float32)


INVERSE = 7.874015718698502e-3
"""1 / 127 as bitsandbytes states it (functional.int8_vectorwise_dequant)."""


def bitsandbytes_int8(parts: Parts) -> Layout:
    """Return the layout of int8 codes with the largest absolute value of each row: ``codes * SCB * (1 / 127)``.

    Both products are rounded to float32 (bitsandbytes/_ops.py ``int8_vectorwise_dequant``).
    """
    layout = parts.find("weight_format")

    def after(block: Array) -> Array:
        import numpy

        block *= numpy.float32(INVERSE)
        return block

    if layout is not None and parts.checks and numbers(layout).any():
        hint = "save the model again with a bitsandbytes that writes rows (weight_format 0)"
        raise parts.wrong("the codes are in the order of a kernel (weight_format)", where=layout.name, hint=hint)
    return one_scale(parts, signed, "float32", after=after)

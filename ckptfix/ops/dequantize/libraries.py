"""Schemes of libraries that store the settings of a weight beside it, or pack codes of different rows in an element."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import TensorEntry
from ckptfix.ops.dequantize.codes import E2M1, Table, affine, eight_bits, in_bytes, integers, numbered, times
from ckptfix.ops.dequantize.layout import Layout, Parts, Tensors, numbers
from ckptfix.ops.dequantize.scaled import MOST_FLOATS, one_scale, power_of_two, signed, weight_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    Round: TypeAlias = Callable[[Array], Array]

TORCHAO = frozenset({"Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"})
"""Classes of torchao with a code in an element (torchao/quantization/quantize_/workflows). They compute
``(qdata - zero_point) * scale`` and round the product to the dtype of the weight
(quant_primitives.py ``_dequantize_affine_no_dtype_check``, ``_dequantize_affine_float8``)."""


def subclass(parts: Parts) -> Layout:
    """Return the layout of a tensor of a class of torchao, as an object in a torch file.

    Raises:
        Refused: the class belongs to a different library, or orders codes for a kernel.
    """
    entry = parts.codes
    inside = {part.key.rpartition(".")[2]: part for part in entry.parts}
    return _torchao(parts, entry.detail.rpartition(".")[2], entry.key, entry.dtype, inside, top=entry.detail)


def flattened(parts: Parts) -> Layout:
    """Return the layout of a tensor of a class of torchao, whose parts are tensors of a safetensors file.

    The metadata of the file states the class and the dtype (torchao/prototype/safetensors/safetensors_support.py).

    Raises:
        Refused: the metadata is missing, or names a class that is not known.
    """
    module, _, leaf = parts.stem.rpartition(".")
    key = ".".join(part for part in (module, leaf.removeprefix("_")) if part)
    try:
        stated = json.loads(parts.settings.metadata.get(key, ""))
        name, dtype = stated["_type"], stated["_data"]["dtype"]["_data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise parts.wrong(f"the metadata of the file does not state the class and the dtype of {key}") from None
    mark = parts.weight.scheme.suffix.removesuffix("qdata")
    names = ("scale", "zero_point", "zero", "per_tensor_scale", "act_pre_scale")
    inside = {one: found for one in names if (found := parts.find(f"{mark}{one}")) is not None}
    return _torchao(parts, str(name), key, str(dtype), {"qdata": parts.codes, **inside}, top="torchao")


def _torchao(
    parts: Parts, name: str, key: str, dtype: str, inside: Mapping[str, TensorEntry], *, top: str
) -> Layout:
    qdata, scale = inside.get("qdata"), inside.get("scale")
    if name not in TORCHAO or not top.startswith("torchao") or dtype not in MOST_FLOATS:
        raise parts.wrong(f"the class {name} with the dtype {dtype} is known but not dequantized")
    if qdata is None or scale is None:
        raise parts.wrong("its codes or its scale are missing")
    if "act_pre_scale" in inside:
        raise parts.wrong("the weight is scaled for its inputs too (act_pre_scale)", where=inside["act_pre_scale"].name)
    own = copy.copy(parts)
    own.codes = qdata
    decode = signed if qdata.dtype == "int8" else eight_bits(qdata.dtype)
    if qdata.dtype != "int8" and not qdata.dtype.startswith("float8"):
        raise parts.wrong(f"codes of {qdata.dtype} are not known")
    zero = inside.get("zero_point")
    if zero is not None and math.prod(zero.shape) == 1 and math.prod(scale.shape) == 1:
        zero = replace(zero, shape=scale.shape, stride=(1,) * len(scale.shape))
    return replace(one_scale(own, decode, dtype, scale=scale, zero=zero), key=key)


def quanto(parts: Parts) -> Layout:
    """Return the layout of quanto with eight bits: ``scale * codes`` in the dtype of the scale.

    optimum/quanto/tensor/qbytes.py ``QBytesDequantizer``.

    Raises:
        Refused: there is a zero point, or the codes are not int8 or fp8.
    """
    codes, scale = parts.codes, parts.need("._scale", "scale")
    extra = parts.find("._shift") or parts.find("._zeropoint")
    if extra is not None:
        raise parts.wrong("codes of eight bits with a zero point are not known", where=extra.name)
    if codes.dtype == "uint8" or scale.dtype not in MOST_FLOATS:
        raise parts.wrong(f"codes of {codes.dtype} with a scale of {scale.dtype} are not known")
    if math.prod(scale.shape) not in (1, *codes.shape[:1]):
        raise parts.wrong(f"a scale of shape {list(scale.shape)} does not fit codes of {list(codes.shape)}")
    decode = signed if codes.dtype == "int8" else eight_bits(codes.dtype)
    return one_scale(parts, decode, scale.dtype, scale=scale)


def stacked(
    tensors: Tensors, codes: TensorEntry, bits: int, per_item: int, first: int, last: int, *, high_first: bool
) -> Array:
    """Return the codes of the rows `first` to `last` of a matrix that is packed along its first dimension.

    An element holds the codes of `per_item` rows, which are as far apart as the packed matrix has rows.
    """
    import numpy

    step, width = codes.shape[0], math.prod(codes.shape[1:])
    made = []
    while first < last:
        place, start = divmod(first, step)
        stop = min(start + last - first, step)
        data = tensors.rows(codes, start, stop, width * codes.itemsize).view(f"<u{codes.itemsize}")
        shift = bits * (per_item - 1 - place if high_first else place)
        made.append(((data >> shift) & ((1 << bits) - 1)).astype(numpy.uint8))
        first += stop - start
    return numpy.concatenate(made)


INPUTS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"})
OUTPUTS = frozenset({"o_proj", "down_proj"})
"""Linear layers of transformers' models whose inputs, or outputs, are as many as the ``hidden_size``."""


def _quanto_group(inputs: int) -> int:
    """Return the size of quanto's groups (optimum/quanto/nn/qmodule.py ``QModuleMixin``)."""
    fits = (size for size in (128, 96, 64, 32) if inputs > 128 and inputs % size == 0)
    return next(fits, inputs)


def quanto_packed(parts: Parts) -> Layout:
    """Return the layout of quanto with two or four bits: ``scale * codes - shift``, both rounded to the scale's dtype.

    A shift of integers is subtracted before the product. The codes are a matrix of groups, packed along its rows
    (optimum/quanto/tensor/qbits.py ``QBitsDequantizer``, packed.py, grouped.py). The file does not state the shape of
    the weight. If a group is less than a row, its outputs are those of the bias beside it, or config.json states one
    side.

    Raises:
        Refused: nothing states the shape, or the sizes do not fit.
    """
    codes, scale, shift = parts.codes, parts.need("._scale", "scale"), parts.need("._shift", "shift")
    rows, step, inner = math.prod(scale.shape), *codes.shape[:1], codes.shape[1:]
    if codes.dtype != "uint8" or scale.dtype not in MOST_FLOATS:
        raise parts.wrong(f"codes of {codes.dtype} with a scale of {scale.dtype} are not known")
    if not inner or scale.shape != (rows, *(1 for _ in inner)) or shift.shape != scale.shape:
        shapes = f"a scale of shape {list(scale.shape)} and a shift of {list(shift.shape)}"
        raise parts.wrong(f"{shapes} do not fit codes of {list(codes.shape)}")
    fits = [bits for bits in (2, 4) if -(-rows * bits // 8) == step]
    if len(fits) != 1:
        raise parts.wrong(f"codes of {list(codes.shape)} do not fit {rows} groups of 2 or 4 bits")
    bits, width = fits[0], math.prod(inner)
    shape = _quanto_shape(parts, rows, inner)
    floats = shift.dtype in MOST_FLOATS

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        data = stacked(tensors, codes, bits, 8 // bits, first, last, high_first=False)
        scales = tensors.finite(scale)
        shifts = tensors.finite(shift, role="shift") if floats else tensors.numbers(shift).astype("i1").astype("f4")
        return [data, scales.reshape(-1, 1)[first:last], shifts.reshape(-1, 1)[first:last]]

    def formula(round_: Round, numbers: Array, scales: Array, shifts: Array) -> Array:
        return round_(numbers * scales) - shifts

    group = (1, width) if len(shape) == 2 else (1, *shape[1:])
    table = Table(integers(bits), numbered, formula if floats else times, rounds=floats)
    return Layout(
        weight_key(parts), shape, scale.dtype, bits, group, rows, width, read, table.compute, table=table
    )


def _quanto_shape(parts: Parts, rows: int, inner: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a weight that is stored as `rows` groups."""
    width = math.prod(inner)
    if len(inner) > 1 or width not in (32, 64, 96, 128):
        return (rows, *inner)
    *names, _ = parts.stem.split(".")
    bias, hidden, last = parts.of_module("bias"), parts.settings.hidden_size or 0, names[-1] if names else ""
    outputs = 0
    if any("conv" in name for name in names):
        pass  # The groups of a convolution do not tell the size of its kernel.
    elif bias is not None and len(bias.shape) == 1:
        outputs = bias.numel
    elif hidden and last in OUTPUTS:
        outputs = hidden
    elif hidden and last in INPUTS:
        outputs = rows * width // hidden
    inputs = rows * width // outputs if outputs else 0
    if not outputs or outputs * inputs != rows * width or _quanto_group(inputs) != width:
        hint = "put the model's config.json beside it, or load it with optimum-quanto and save plain weights"
        raise parts.wrong("neither the file nor config.json states the shape of the weight", hint=hint)
    return outputs, inputs


HQQ = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "2bit_u8": (2, 4), "1bit_u8": (1, 8), "3bit_32": (3, 10)}
"""Packing of HQQ -> bits of a code, and codes in an element, the first in the highest bits (hqq/core/bitpack.py)."""


def hqq(parts: Parts) -> Layout:
    """Return the layout of HQQ: ``(codes - zero) * scale``, both steps in the dtype that the file states.

    The codes are a matrix of groups, a row (axis 1) or a column (axis 0) for each (hqq/core/quantize.py
    ``Quantizer.dequantize``).

    Raises:
        Refused: the file does not state the shape and the packing, as it does since hqq 0.2, or they do not fit.
    """
    codes, scale, zero = parts.codes, parts.need("scale", "scale"), parts.need("zero", "zero point")
    shape = tuple(int(size) for size in _numbers(parts, "shape"))
    axis = _number(parts, "axis")
    packing, dtype = _text(parts, "packing"), _text(parts, "compute_dtype").removeprefix("torch.")
    if any(_number(parts, name) for name in ("view_as_float", "quant_scale", "quant_zero")):
        raise parts.wrong("codes that are viewed as floats, and scales that are quantized too, are not known")
    if packing not in HQQ or dtype not in MOST_FLOATS or len(codes.shape) != 2:
        raise parts.wrong(f"the packing {packing} with the dtype {dtype} is not known")
    bits, per_item = HQQ[packing]
    step, width = codes.shape
    if codes.itemsize != (4 if bits == 3 else 1) or not shape or min(shape) < 0:
        raise parts.wrong(f"codes of {codes.dtype} do not fit the packing {packing}")
    numel = math.prod(shape)
    rows = numel // width if width else 0
    if rows * width != numel or -(-rows // per_item) != step:
        raise parts.wrong(f"codes of {list(codes.shape)} do not fit a weight of {list(shape)} with {bits} bits")
    wanted = (rows, 1) if axis == 1 else (1, width)
    for other, role in ((scale, "a scale"), (zero, "zeros")):
        if other.shape != wanted:
            raise parts.wrong(f"{role} of shape {list(other.shape)} do not fit groups of {list(wanted)}")

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        found = [stacked(tensors, codes, bits, per_item, first, last, high_first=True)]
        for role, entry in (("zero point", zero), ("scale", scale)):
            every = tensors.finite(entry, role=role)
            found.append(every[first:last] if axis == 1 else numpy.broadcast_to(every, (last - first, width)))
        return found

    def formula(round_: Round, numbers: Array, zeros: Array, scales: Array) -> Array:
        return round_(numbers - zeros) * scales

    size = width if axis == 1 else rows
    table = Table(integers(bits), numbered, formula, rounds=True)
    return Layout(
        f"{parts.stem}weight", shape, dtype, bits, (1, size), rows, width, read, table.compute, table=table
    )


def _numbers(parts: Parts, name: str) -> list[int]:
    entry = parts.find(name)
    if entry is None or entry.numel > 64 or not entry.numel:
        raise parts.wrong(f"the file does not state its {name} ({parts.stem}{name})")
    made: list[int] = numbers(entry).reshape(-1).tolist()
    return made


def _number(parts: Parts, name: str) -> int:
    found = _numbers(parts, name)
    if len(found) != 1:
        raise parts.wrong(f"its {name} is not one number", where=f"{parts.stem}{name}")
    return int(found[0])


def _text(parts: Parts, name: str) -> str:
    return bytes(code & 0xFF for code in _numbers(parts, name)).decode("ascii", "replace")


def int4_modelopt(parts: Parts) -> Layout:
    """Return the layout of ModelOpt's int4: ``codes * scale``, a signed code of an even row in the low bits of a byte.

    The next row is in the high bits. A ``pre_quant_scale`` multiplies the inputs, and so the columns
    (modelopt/torch/export/quant_utils.py ``pack_int4_in_uint8``).

    Raises:
        Refused: the shapes do not fit, or there is a second scale.
    """
    codes, scale = parts.codes, parts.need("weight_scale", "scale")
    second, before = parts.find("weight_scale_2"), parts.find("pre_quant_scale")
    half, width = codes.shape
    rows, groups = scale.shape
    if second is not None:
        raise parts.wrong("a second scale is not known", where=second.name)
    if rows != 2 * half or not groups or width % groups:
        raise parts.wrong(f"a scale of shape {list(scale.shape)} does not fit codes of {list(codes.shape)}")
    if before is not None and before.shape != (width,):
        raise parts.wrong(f"a pre_quant_scale of shape {list(before.shape)} does not fit {width} columns")
    table = Table(tuple(float(code - 16 if code > 7 else code) for code in range(16)), numbered, times)

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        low, high = first // 2, -(-last // 2)
        data = tensors.rows(codes, low, high, width)
        both = numpy.stack([data & 15, data >> 4], axis=1).reshape(-1, width)[first - 2 * low : last - 2 * low]
        found = [both, tensors.finite(scale)[first:last]]
        if before is not None:
            row = tensors.finite(before, role="pre_quant_scale").reshape(1, -1)
            found.append(numpy.broadcast_to(row, (last - first, width)))
        return found

    def compute(round_: Round, data: Array, scales: Array, columns: Array) -> Array:
        return table.compute(round_, data, scales) * columns

    dtype = scale.dtype if scale.dtype in ("float16", "bfloat16") else parts.settings.dtype or "bfloat16"
    plain = Layout(
        weight_key(parts), (rows, width), dtype, 4, (1, width // groups), rows, width, read, table.compute, table=table
    )
    return plain if before is None else replace(plain, compute=compute, table=None)


MULTIPLIED = {"bitlinear": False, "autobitlinear": True}
"""``linear_class`` of BitNet -> whether its outputs are multiplied by the scale, or divided."""


def bitnet(parts: Parts) -> Layout:
    """Return the layout of BitNet: codes of two bits less one, times or by a scale for the tensor.

    transformers integrations/bitnet.py: ``unpack_weights``; ``BitLinear`` divides by the scale, ``AutoBitLinear``
    multiplies, and config.json states which of them a model has.

    Raises:
        Refused: there is no config.json of BitNet, or it names a different class.
    """
    codes, scale = parts.codes, parts.need("weight_scale", "scale")
    stated = parts.settings.text("linear_class") or "bitlinear"
    if parts.settings.text("quant_method") != "bitnet" or stated not in MULTIPLIED:
        hint = "put the model's config.json beside it"
        raise parts.wrong("no config.json states whether the scale is multiplied or divided by", hint=hint)
    step, width = codes.shape
    rows = 4 * step

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        single = tensors.finite(scale).reshape(1, 1)
        if not MULTIPLIED[stated] and not single.all():
            raise parts.wrong("the scale is zero, and the codes are divided by it", where=scale.name)
        return [stacked(tensors, codes, 2, 4, first, last, high_first=False), single.repeat(last - first, axis=0)]

    def compute(round_: Round, data: Array, scales: Array) -> Array:
        import numpy

        found = data.astype(numpy.float32) - numpy.float32(1)
        return found * scales if MULTIPLIED[stated] else found / scales

    dtype = scale.dtype if scale.dtype in MOST_FLOATS else "bfloat16"
    return Layout(weight_key(parts), (rows, width), dtype, 2, (), rows, width, read, compute)


MLX_MODES = {4: (32, 4), 8: (32, 8), 2: (16, 4)}
"""Words of 32 bits in a group -> elements of a group and bits of a code, in the modes mxfp4, mxfp8 and nvfp4."""


def mlx_mx(parts: Parts) -> Layout:
    """Return the layout of MLX's mxfp4, mxfp8 and nvfp4: codes of E2M1 or E4M3, and a scale for each group.

    The scales are powers of two (E8M0), or E4M3 for nvfp4 (mlx/ops.cpp ``fp_dequantize``).

    Raises:
        Refused: the shapes fit none of them.
    """
    codes, scale = parts.codes, parts.need("scales", "scale")
    words, groups = codes.shape[-1], scale.shape[-1]
    if scale.shape[:-1] != codes.shape[:-1] or not groups or words % groups or words // groups not in MLX_MODES:
        raise parts.wrong(f"a scale of shape {list(scale.shape)} does not fit codes of {list(codes.shape)}")
    size, bits = MLX_MODES[words // groups]
    leading, width = codes.shape[:-1], groups * size
    rows = math.prod(leading)
    scales_of = eight_bits("float8_e4m3fn")

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        if size == 32:
            every = power_of_two(tensors, scale)
        else:
            every = scales_of(tensors.rows(scale, 0, 1, scale.nbytes)).reshape(scale.shape)
            if numpy.isnan(every).any():
                raise parts.wrong("the scale has a number that is not finite", where=scale.name)
        return [tensors.rows(codes, first, last, words * 4), every.reshape(-1, groups)[first:last]]

    def compute(round_: Round, data: Array, scales: Array) -> Array:
        found = in_bytes(data, E2M1) if bits == 4 else eight_bits("float8_e4m3fn")(data)
        return affine(found, scales)

    return Layout(weight_key(parts), (*leading, width), "bfloat16", bits, (1, size), rows, width, read, compute)

"""Torch's own quantized tensors: one object in a torch file, with a scale and zero point for it or each channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import TensorEntry
from ckptfix.checkpoint.quantization import Quantized, Scheme
from ckptfix.ops.dequantize.layout import Layout, Parts, Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    Round: TypeAlias = Callable[[Array], Array]

TORCH = Scheme(
    "torch-quantized", "torch's own quantized tensor", "", frozenset({"qint8", "quint8", "qint32"}), (),
    "(codes - zero point) * scale, as float32", "aten/src/ATen/native/quantized/AffineQuantizerBase.cpp dequantize_val",
    last=frozenset(),
)  # fmt: skip
"""A tensor of ``torch.quantize_per_tensor`` or ``torch.quantize_per_channel``."""

_KINDS = {"qint8": "i1", "quint8": "u1", "qint32": "<i4"}


def own_tensors(entries: Iterable[TensorEntry]) -> tuple[Quantized, ...]:
    """Return torch's own quantized tensors among `entries`."""
    rows = (entry for entry in entries if entry.kind == "quantized")
    return tuple(Quantized(TORCH, entry.name, (), TORCH.title) for entry in rows)


def own(parts: Parts) -> Layout:
    """Return the layout of a quantized tensor of torch: ``float(scale) * (code - zero point)``.

    Raises:
        Refused: its scheme is neither of the affine ones with integers.
    """
    codes = parts.codes
    name, *numbers = codes.detail.split(", ")
    kind = _KINDS.get(codes.dtype)
    channels = name == "per_channel_affine" and len(numbers) == 1 and len(codes.parts) == 2
    if kind is None or not (channels or (name == "per_tensor_affine" and len(numbers) == 2)):
        raise parts.wrong(f"a tensor of {codes.dtype} with {name} is not known")
    shape = codes.shape or (1,)
    width = shape[-1]
    try:
        stated = [int(numbers[0])] if channels else [float(numbers[0]), int(numbers[1])]
    except ValueError:
        raise parts.wrong(f"its numbers are not known ({codes.detail})") from None
    if not all(map(math.isfinite, stated)):
        raise parts.wrong("the scale is not finite")
    axis = int(stated[0]) % len(shape) if channels else 0
    if channels and any(one.shape != (shape[axis],) for one in codes.parts):
        raise parts.wrong(f"it has {shape[axis]} channels, but not as many scales and zero points")
    nbytes = width * codes.itemsize
    inner = math.prod(shape[axis + 1 : -1])

    def spread(found: Array, first: int, last: int) -> Array:
        import numpy

        if axis == len(shape) - 1:
            return found.reshape(1, -1).repeat(last - first, axis=0)
        return found[numpy.arange(first, last) // inner % shape[axis]].reshape(-1, 1)

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        data = tensors.rows(codes, first, last, nbytes)
        if channels:
            scale, zero = tensors.finite(codes.parts[0]), tensors.numbers(codes.parts[1])
            return [data, spread(scale.astype(numpy.float32), first, last), spread(zero, first, last)]
        one = numpy.ones((last - first, 1))
        return [data, (one * stated[0]).astype(numpy.float32), (one * stated[1]).astype(numpy.int64)]

    def compute(round_: Round, data: Array, scale: Array, zero: Array) -> Array:
        import numpy

        made: Array = (data.view(kind).astype(numpy.int64) - zero).astype(numpy.float32)
        made *= scale
        return made

    bits = 8 * codes.itemsize
    group = tuple(1 if place == axis else size for place, size in enumerate(shape)) if channels else ()
    rows = math.prod(shape[:-1])
    return Layout(codes.key, codes.shape, "float32", bits, group, rows, width, read, compute)

"""bitsandbytes with four bits: blocks of elements in row-major order, whatever the shape."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import TensorEntry
from ckptfix.ops.dequantize.codes import in_bytes
from ckptfix.ops.dequantize.layout import Layout, Parts, Tensors, numbers
from ckptfix.ops.dequantize.scaled import MOST_FLOATS, weight_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    Round: TypeAlias = Callable[[Array], Array]

KINDS = ("nf4", "fp4")

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes of a block (bitsandbytes/functional.py ``dequantize_4bit``)."""

MOST_STATE = 1 << 16
"""Bytes of the largest state that is read; a real one has some two hundred."""


def bitsandbytes_4bit(parts: Parts) -> Layout:
    """Return the layout of nf4 or fp4.

    ``quant_map[code] * absmax`` is computed in float32, and rounded once to the dtype that the file states.
    The state is JSON in a tensor of bytes. With double quantization, ``absmax`` is codes of eight bits itself:
    ``nested_quant_map[code] * nested_absmax + nested_offset``. bitsandbytes/functional.py ``QuantState``,
    ``dequantize_4bit``.

    Raises:
        Refused: the state is missing or contradicts the sizes.
    """
    codes, absmax = parts.codes, parts.need("weight.absmax", "scale")
    table = parts.need("weight.quant_map", "codebook")
    state = _state(parts)
    shape = state.get("shape")
    size, dtype = state.get("blocksize"), state.get("dtype")
    if not isinstance(shape, list) or not all(type(one) is int and one >= 0 for one in shape):
        raise parts.wrong("the state does not state a shape")
    if type(size) is not int or size not in SIZES or dtype not in MOST_FLOATS:
        raise parts.wrong(f"a block of {size} elements of {dtype} is not known")
    numel = math.prod(shape)
    blocks = -(-numel // size)
    if codes.nbytes < -(-numel // 2) or codes.nbytes > -(-numel // 2) + 3 or math.prod(absmax.shape) != blocks:
        message = f"{codes.nbytes} bytes of codes and {math.prod(absmax.shape)} scales do not fit the shape {shape}"
        raise parts.wrong(message)
    values = numbers(table).reshape(-1)
    if len(values) != 16:
        raise parts.wrong(f"the codebook has {len(values)} numbers, not 16", where=table.name)
    book = tuple(values.tolist())
    if not all(map(math.isfinite, book)):
        raise parts.wrong("the codebook has a number that is not finite", where=table.name)
    scales = _nested(parts, state, absmax, blocks) if absmax.dtype == "uint8" else None
    half = size // 2

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        start, stop = first * half, min(last * half, codes.nbytes)
        data = tensors.rows(codes, start, stop, 1).reshape(-1)
        short = (last - first) * half - len(data)
        if short:
            data = numpy.concatenate([data, numpy.zeros(short, numpy.uint8)])
        if scales is None:
            found = tensors.finite(absmax)
        else:
            found = tensors.once(f"scales {absmax.name}", lambda: scales(tensors))
        return [data.reshape(-1, half), found.reshape(-1, 1)[first:last]]

    def compute(round_: Round, data: Array, scale: Array) -> Array:
        found = in_bytes(data, book, high_first=True)
        found *= scale
        return found

    return Layout(weight_key(parts), tuple(shape), dtype, 4, (size,), blocks, size, read, compute)


def _state(parts: Parts) -> dict[str, Any]:
    """Return the state, from the JSON that a tensor holds.

    Raises:
        Refused: it is missing, or is not JSON.
    """
    found = [one for kind in KINDS if (one := parts.find(f"weight.quant_state.bitsandbytes__{kind}")) is not None]
    if len(found) != 1:
        raise parts.wrong("its state is missing (weight.quant_state.bitsandbytes__nf4 or __fp4)")
    entry = found[0]
    if entry.dtype != "uint8" or entry.nbytes > MOST_STATE:
        raise parts.wrong("its state is not a short text", where=entry.name)
    try:
        made = json.loads(numbers(entry).tobytes())
    except (ValueError, RecursionError):
        raise parts.wrong("its state is not JSON", where=entry.name) from None
    if not isinstance(made, dict):
        raise parts.wrong("its state is not a JSON object", where=entry.name)
    return made


def _nested(parts: Parts, state: dict[str, Any], absmax: TensorEntry, blocks: int) -> Callable[[Tensors], Array]:
    """Return the function that computes scales which are quantized themselves."""
    second = parts.need("weight.nested_absmax", "second scale")
    table = parts.need("weight.nested_quant_map", "codebook of the scales")
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise parts.wrong("its state does not describe the scales, which are quantized too")
    if math.prod(second.shape) != -(-blocks // size) or math.prod(table.shape) != 256:
        raise parts.wrong(f"a second scale of shape {list(second.shape)} does not fit {blocks} scales")

    def made(tensors: Tensors) -> Array:
        import numpy

        book = tensors.finite(table, role="codebook").reshape(-1)
        found = book[tensors.numbers(absmax).reshape(-1)]
        found = found * tensors.finite(second, role="second scale").reshape(-1).repeat(size)[:blocks]
        whole: Array = found + numpy.float32(offset)
        return whole

    return made

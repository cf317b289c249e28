"""The row of a kind of tensor: all that distinguishes it from a dense one.

The rows are `KINDS` in `formats.torch.tensors`. The calls that create tensors of a kind are rows of `calls.TABLE`. What
is the same for every kind that is not dense is in no row: its parts are dense tensors, which are listed, compared,
hashed and copied one by one, and a format that only holds dense tensors refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptfix.checkpoint import Storage, TensorEntry
from ckptfix.formats.torch.calls import RebuildCall
from ckptfix.pickles import PersId

StorageOf = Callable[[PersId], Storage]
Args = tuple[Any, ...]
Reader = Callable[[RebuildCall, Args, str, str, StorageOf], TensorEntry]
"""(row of the call, its arguments, key, address, storages) -> the tensor. Raises BadTensor, or what a bad argument
causes: IndexError, TypeError, ValueError, AttributeError, OverflowError.
"""


def builds(entry: TensorEntry) -> str:
    """Return no reason: torch builds every tensor of the kind whose call was read."""
    return ""


def fits(entry: TensorEntry, tensor: Any) -> str | None:
    """Return no reason: such a tensor can be copied into any tensor of the same shape."""
    return None


@dataclass(frozen=True, slots=True, eq=False)
class TensorKind:
    """A kind of tensor.

    Attributes:
        name: `TensorEntry.kind`.
        read: the reader of its rebuild calls.
        load: (`loaders.tensors.TensorMaker`, tensor) -> the tensor of torch; None if only its own library rebuilds it.
        misfit: (tensor, tensor of a model) -> why it cannot be copied there.
        refused: why torch cannot build a tensor with these arguments; empty if it can.
        from_tensors: its call takes tensors, which may have attributes of their own.
        computed: the description of a tensor whose call reads values, which a legacy file has only afterwards; empty
            for other kinds.
        codes: its elements represent other numbers, so that a mean of them has no meaning.
        whole: False if it may be one rank's part, or a wrapper whose parts are elsewhere.
    """

    name: str
    read: Reader
    load: Callable[[Any, TensorEntry], Any] | None = None
    misfit: Callable[[TensorEntry, Any], str | None] = fits
    refused: Callable[[TensorEntry], str] = builds
    from_tensors: bool = False
    computed: str = ""
    codes: bool = False
    whole: bool = True


def quantized_refused(entry: TensorEntry) -> str:
    """Return why torch cannot build a quantized tensor: its axis or its zero point."""
    values = entry.detail.split(", ")
    if values[0].startswith("per_channel"):
        if not values[-1].isdecimal() or int(values[-1]) >= len(entry.shape):
            return f"the tensor is quantized along axis {values[-1]}, but has {len(entry.shape)} axes"
    elif not -(1 << 63) <= int(values[-1]) < 1 << 63:
        return f"the zero point {values[-1]} is out of range"
    return ""


def quantized_misfit(entry: TensorEntry, tensor: Any) -> str | None:
    """Return why a quantized tensor cannot be copied into `tensor`: one that is not quantized."""
    if tensor.is_quantized:
        return None
    return f"quantized in the file ({entry.dtype}), {str(tensor.dtype).removeprefix('torch.')} in the model"


def sparse_refused(entry: TensorEntry) -> str:
    """Return why torch cannot build a sparse tensor: the shape of its indices."""
    if len(entry.parts) == 2:
        indices, held = (part.shape for part in entry.parts)
        if len(indices) != 2 or not held or indices[0] + len(held) - 1 != len(entry.shape):
            return f"a sparse tensor of {len(entry.shape)} dimensions cannot have indices of shape {list(indices)}"
    return ""


def sparse_misfit(entry: TensorEntry, tensor: Any) -> str | None:
    """Return why a sparse tensor cannot be copied into `tensor`: a dense one."""
    return f"{entry.detail} in the file, dense in the model" if str(tensor.layout) == "torch.strided" else None


def nested_refused(entry: TensorEntry) -> str:
    """Return why torch cannot build a nested tensor: the shape of its values."""
    return "the values of a nested tensor have several dimensions" if len(entry.parts[0].shape) != 1 else ""


def meta_misfit(entry: TensorEntry, tensor: Any) -> str:
    """Return why a tensor on the meta device cannot be copied into any tensor."""
    return "the file has no data for it (meta device)"

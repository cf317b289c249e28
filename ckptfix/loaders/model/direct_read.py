"""Reading tensor data straight into the memory of a parameter, if the bytes are the same in file and memory.

This is faster than a copy from a map of the file: no page of the file is mapped, and each byte is touched once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptfix.checkpoint import ByteRange, Storage, TensorEntry, dtypes
from ckptfix.checkpoint.byte_ranges import in_one_piece, pieces_of
from ckptfix.loaders.reading import Fill
from ckptfix.loaders.tensors import TensorMaker, bytes_of, unmoved

if TYPE_CHECKING:
    import torch


def planned(maker: TensorMaker, entry: TensorEntry, parameter: torch.Tensor) -> tuple[Storage, Fill] | None:
    """Return how to fill `parameter` with the data of `entry`, or None if that must be converted or moved.

    Raises:
        CkptfixError: the location of the data cannot be read.
    """
    data = _run_of(maker, entry, parameter)
    if data is None:
        return None
    assert entry.storage is not None
    start = int(parameter.storage_offset()) * parameter.element_size()
    view = bytes_of(parameter.untyped_storage(), start, data.length)
    return entry.storage, maker.planned(entry.storage, data, view, where=entry.name)


def _run_of(maker: TensorMaker, entry: TensorEntry, parameter: torch.Tensor) -> ByteRange | None:
    """Return the bytes that can fill `parameter` without conversion, or None if they need one."""
    import torch

    storage = entry.storage
    row = dtypes.by_name(entry.dtype)
    nbytes = row.nbytes(entry.numel)
    if (
        storage is None
        or not isinstance(storage.data, ByteRange)
        or entry.kind != "dense"
        or not nbytes
        or maker.restore is not unmoved
        or (maker.checkpoint.byteorder == "big" and row.itemsize > 1)
        or not entry.is_contiguous
        or entry.lazy
        or type(parameter) not in (torch.Tensor, torch.nn.Parameter)
        or not _lies_plainly(parameter)
        or parameter.dtype is not maker.dtype(entry)
        or tuple(parameter.shape) != entry.shape
    ):
        return None
    data = in_one_piece(storage.data.sub(row.nbytes(entry.offset), nbytes))
    whole = isinstance(data, ByteRange) and all(isinstance(piece, ByteRange) for piece in pieces_of(data))
    return data if whole and isinstance(data, ByteRange) else None


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Return whether the elements are in CPU memory, in row-major order, and stored unchanged."""
    import torch

    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )

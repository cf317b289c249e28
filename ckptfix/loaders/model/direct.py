"""The elements of a file read straight into the memory of a parameter, where they lie in both as they are.

Faster than a copy from a map of the file: no page of the file is mapped, and each byte is touched once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptfix.checkpoint import ByteRange, TensorEntry, dtypes
from ckptfix.checkpoint.places import pieces_of
from ckptfix.io.source import Source, open_source, refuse_changed, threads
from ckptfix.io.threads import WORKERS
from ckptfix.loaders.tensors import TensorMaker, unmoved

if TYPE_CHECKING:
    import torch

SMALL = 64 << 10
"""Bytes of a tensor from which on it is worth while."""

TWICE = 4 << 20
"""Bytes that two threads read; to start one takes as long as to copy some hundred kilobytes."""


def fill(maker: TensorMaker, entry: TensorEntry, parameter: torch.Tensor) -> bool:
    """Give `parameter` the elements of `entry`; False, with nothing done, where they have to be converted or moved.

    Raises:
        DamagedFile: the file is too short, has another checksum than it states, or was written to meanwhile.
    """
    import torch

    storage = entry.storage
    row = dtypes.by_name(entry.dtype)
    nbytes = row.nbytes(entry.numel)
    if (
        storage is None
        or not isinstance(storage.data, ByteRange)
        or entry.kind != "dense"
        or nbytes < SMALL
        or maker.restore is not unmoved
        or (maker.checkpoint.byteorder == "big" and row.itemsize > 1)
        or not entry.is_contiguous
        or entry.lazy
        or type(parameter) not in (torch.Tensor, torch.nn.Parameter)
        or not _lies_plainly(parameter)
        or parameter.dtype is not maker.dtype(entry)
        or tuple(parameter.shape) != entry.shape
    ):
        return False
    pieces = list(pieces_of(storage.data.sub(row.nbytes(entry.offset), nbytes)))
    ranges = [piece for piece in pieces if isinstance(piece, ByteRange)]
    if len(ranges) < len(pieces):
        return False
    if maker.verify:
        maker.check_storage(storage)
    start = parameter.storage_offset() * row.itemsize
    memory = torch.empty((0,), dtype=torch.uint8).set_(parameter.untyped_storage(), start, (nbytes,))  # type: ignore[call-overload]
    view = memoryview(memory.numpy())
    at = 0
    for piece in ranges:
        with open_source(piece.path) as source:
            refuse_changed(piece.path, source.mark, maker.stamps.get(piece.path, source.mark))
            _read_into(source, piece.offset, view[at : at + piece.length])
        at += piece.length
    torch.autograd.graph.increment_version(parameter)
    return True


def _read_into(source: Source, offset: int, view: memoryview) -> None:
    """`Source.read_into`; a large view by two threads: the first touch of fresh memory takes longer than the copy."""
    if len(view) < TWICE or WORKERS < 2:
        source.read_into(offset, view)
        return
    half = len(view) // 2
    with threads(1) as pool:
        other = pool.submit(source.read_into, offset + half, view[half:])
        source.read_into(offset, view[:half])
        other.result()


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Whether the elements are in the memory of this process, in row-major order, as they are."""
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

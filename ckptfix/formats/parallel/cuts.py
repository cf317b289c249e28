"""How the ranks of tensor parallelism cut a tensor, and the parts of it that each of them has.

A dimension of `size` elements is cut into as many equal parts as there are ranks. Where several matrices are stacked
along it, as the gate and the up projection of a gated MLP are, each matrix is cut by itself, and a rank stacks its
parts::

    whole       gate 0  gate 1 | up 0  up 1
    rank 0      gate 0 | up 0                      rank 1      gate 1 | up 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptfix.checkpoint import ByteRange, Data, TensorEntry, dtypes
from ckptfix.errors import DamagedFile
from ckptfix.io.chunks import Chunk, tiled
from ckptfix.io.elements import row_major
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankCut:
    """The cut of one tensor.

    Attributes:
        dim: the dimension; None if each rank has the whole tensor.
        stacked: the sizes of the matrices along it, in any unit; empty for one matrix.
    """

    dim: int | None
    stacked: tuple[int, ...] = ()

    def whole(self, local: Shape, ranks: int) -> Shape:
        """Return the shape of the tensor of which each rank has a part of the shape `local`."""
        if self.dim is None:
            return local
        return (*local[: self.dim], local[self.dim] * ranks, *local[self.dim + 1 :])

    def local(self, whole: Shape, ranks: int) -> Shape:
        """Return the shape of a rank's part.

        Raises:
            ValueError: the dimension, or a matrix in it, does not divide into equal parts.
        """
        if self.dim is None:
            return whole
        if any(size % ranks for size in self.sizes(whole[self.dim])):
            raise ValueError(f"{whole[self.dim]} does not divide into {ranks} equal parts")
        return (*whole[: self.dim], whole[self.dim] // ranks, *whole[self.dim + 1 :])

    def sizes(self, size: int) -> tuple[int, ...]:
        """Return the sizes of the matrices along a dimension of `size` elements.

        Raises:
            ValueError: they do not add up to it.
        """
        unit = sum(self.stacked)
        if not unit:
            return (size,)
        if any(part * size % unit for part in self.stacked):
            raise ValueError(f"{size} does not divide into {len(self.stacked)} matrices")
        return tuple(part * size // unit for part in self.stacked)

    def runs(self, local: Shape, rank: int, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first index in the whole, first index in the part, count) of the runs that `rank` has of `dim`."""
        assert self.dim is not None
        own = whole = 0
        for size in self.sizes(local[self.dim]):
            yield whole + rank * size, own, size
            own += size
            whole += ranks * size


def narrowed(entry: TensorEntry, dim: int, first: int, count: int) -> TensorEntry:
    """Return `count` indices from `first` on of the dimension `dim` of a dense tensor, as a view of its storage."""
    shape = (*entry.shape[:dim], count, *entry.shape[dim + 1 :])
    return replace(entry, shape=shape, offset=entry.offset + first * entry.stride[dim])


def joined(name: str, whole: Shape, cut: RankCut, parts: Mapping[int, TensorEntry], ranks: int) -> SplicedPiece:
    """Return the bytes of a tensor, assembled from the parts of all ranks.

    Raises:
        DamagedFile: they are not the parts of one tensor.
    """
    dim = cut.dim
    assert dim is not None
    chunks: list[Chunk] = []
    for rank, entry in parts.items():
        for first, own, count in cut.runs(entry.shape, rank, ranks):
            part = narrowed(entry, dim, own, count)
            at = tuple(first if axis == dim else 0 for axis in range(len(whole)))
            chunks.append(Chunk(at, part.shape, _range(part)))
    itemsize = next(iter(parts.values())).itemsize
    try:
        return SplicedPiece(tiled(whole, itemsize, chunks))
    except DamagedFile as error:
        error.where = error.where or name
        raise


def part_of_rank(entry: TensorEntry, cut: RankCut, rank: int, ranks: int) -> tuple[Shape, Data]:
    """Return the shape and the bytes of the part of a whole tensor that `rank` has.

    Raises:
        ValueError: the tensor does not divide into equal parts.
    """
    dim = cut.dim
    if dim is None or ranks == 1:
        return entry.shape, row_major(entry, "little")
    shape = cut.local(entry.shape, ranks)
    views = [narrowed(entry, dim, first, count) for first, _, count in cut.runs(shape, rank, ranks)]
    if len(views) == 1:
        return shape, row_major(views[0], "little")
    nbytes = dtypes.by_name(entry.dtype).nbytes(math.prod(shape))

    def make(_: int) -> SplicedPiece:
        chunks, at = [], 0
        for view in views:
            offsets = tuple(at if axis == dim else 0 for axis in range(len(shape)))
            chunks.append(Chunk(offsets, view.shape, _range(view)))
            at += view.shape[dim]
        return SplicedPiece(tiled(shape, entry.itemsize, chunks))

    return shape, SplicedFile(f"{entry.name} of rank {rank}", [nbytes], make).place(0)


def _range(entry: TensorEntry) -> ByteRange:
    """Return the elements of a view in row-major order, as one range."""
    data = row_major(entry, "little")
    if isinstance(data, ByteRange):
        return data
    return SplicedFile(entry.name, [data.length], lambda _: SplicedPiece((data,))).place(0)


def equal_parts(count: int) -> tuple[int, ...]:
    """Return the sizes of `count` equal matrices that are stacked; empty for one."""
    return (1,) * count if count > 1 else ()


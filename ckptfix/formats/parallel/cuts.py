"""Cuts of a tensor for the ranks of tensor parallelism, and the parts of it that each of them has.

A dimension of `size` elements is cut into as many equal parts as there are ranks. Where several matrices are stacked
along it, as the gate and the up projection of a gated MLP are, each matrix is cut by itself, and a rank stacks its
parts::

    whole       gate 0  gate 1 | up 0  up 1
    rank 0      gate 0 | up 0                      rank 1      gate 1 | up 1
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, Data, Derived, Segment, TensorEntry, contiguous_stride, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile
from ckptfix.io.chunks import Chunk, tiled
from ckptfix.io.elements import row_major
from ckptfix.io.read import read_chunks, read_from
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankCut:
    """The cut of one tensor.

    Attributes:
        dim: the dimension; None if each rank has the whole tensor.
        stacked: the sizes of the matrices along it, in any unit; empty for one matrix.
        matrices: the memory of a tensor ``[rows, columns]`` is that of so many matrices of all rows, one after the
            other; each of them is cut.
    """

    dim: int | None
    stacked: tuple[int, ...] = ()
    matrices: int = 1

    def in_memory(self, shape: Shape) -> Shape:
        """Return the shape in which a tensor is cut.

        Raises:
            ValueError: its columns do not divide into the matrices.
        """
        if self.matrices == 1:
            return shape
        if len(shape) != 2 or shape[1] % self.matrices:
            raise ValueError(f"{list(shape)} does not divide into {self.matrices} matrices")
        return shape[0] * self.matrices, shape[1] // self.matrices

    def viewed(self, entry: TensorEntry) -> TensorEntry:
        """Return a tensor in the shape in which it is cut."""
        if self.matrices == 1:
            return entry
        if not entry.is_contiguous:
            raise DamagedFile("it is not contiguous, and several matrices are in it", where=entry.name)
        shape = self.in_memory(entry.shape)
        return replace(entry, shape=shape, stride=contiguous_stride(shape))

    def whole(self, local: Shape, ranks: int) -> Shape:
        """Return the shape of the whole tensor, if each rank has a part of the shape `local`."""
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
        if any(size % ranks for size in self.sizes(self.in_memory(whole)[self.dim])):
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
        for size in self.sizes(self.in_memory(local)[self.dim]):
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
    whole = cut.in_memory(whole)
    for rank, entry in parts.items():
        for first, own, count in cut.runs(entry.shape, rank, ranks):
            part = narrowed(cut.viewed(entry), dim, own, count)
            at = tuple(first if axis == dim else 0 for axis in range(len(whole)))
            chunks.append(Chunk(at, part.shape, _range(part)))
    itemsize = next(iter(parts.values())).itemsize
    try:
        return SplicedPiece(tiled(whole, itemsize, chunks))
    except DamagedFile as error:
        error.where = error.where or name
        raise


class JoinedFile(SplicedFile):
    """The name of a virtual file that holds tensors joined from parts; a view of a tensor can be made of the parts.

    Attributes:
        parts: for each tensor, its cut, its parts by rank, and the number of ranks.
    """

    parts: Sequence[tuple[RankCut, Mapping[int, TensorEntry], int]]

    @classmethod
    def of(
        cls,
        name: str,
        lengths: Sequence[int],
        make: Callable[[int], SplicedPiece],
        parts: Sequence[tuple[RankCut, Mapping[int, TensorEntry], int]],
    ) -> JoinedFile:
        """Return the file of pieces of these `lengths`, each made by `make` of its `parts`."""
        made = cls(name, lengths, make)
        made.parts = parts
        return made


def _views(entry: TensorEntry, dim: int, first: int, count: int) -> list[TensorEntry]:
    """Return `count` indices from `first` on of a dimension, as views in order: one, or one of each part.

    The elements of a tensor that was joined along the same dimension are read from its parts. In the joined tensor they
    are in rows that would be assembled again for each view of them.
    """
    data = None if entry.storage is None else entry.storage.data
    if isinstance(data, ByteRange) and isinstance(data.path, JoinedFile) and entry.offset == 0:
        file = data.path
        number = bisect_right(file.starts, data.offset) - 1
        if number < len(file.parts) and file.place(number) == data and file.parts[number][0].dim == dim:
            cut, parts, ranks = file.parts[number]
            parts = {rank: cut.viewed(part) for rank, part in parts.items()}
            runs = sorted((at, own, size, rank) for rank, part in parts.items()
                          for at, own, size in replace(cut, matrices=1).runs(part.shape, rank, ranks))  # fmt: skip
            inside = [(max(at, first), min(at + size, first + count), at, own, rank) for at, own, size, rank in runs]
            found = [narrowed(parts[rank], dim, own + start - at, end - start)
                     for start, end, at, own, rank in inside if start < end]  # fmt: skip
            if sum(view.shape[dim] for view in found) == count:
                return found
    return [narrowed(entry, dim, first, count)]


def part_of_rank(entry: TensorEntry, cut: RankCut, rank: int, ranks: int) -> tuple[Shape, Data]:
    """Return the shape and the bytes of the part of a whole tensor that `rank` has.

    Raises:
        ValueError: the tensor does not divide into equal parts.
    """
    dim = cut.dim
    if dim is None or ranks == 1:
        return entry.shape, row_major(entry, "little")
    local = cut.local(entry.shape, ranks)
    entry, shape = cut.viewed(entry), cut.in_memory(local)
    views = [view for first, _, count in cut.runs(local, rank, ranks) for view in _views(entry, dim, first, count)]
    if len(views) == 1:
        data = row_major(views[0], "little")
        return local, data if isinstance(data, ByteRange) else _of_whole(entry, data.length, (data,))
    nbytes = dtypes.by_name(entry.dtype).nbytes(math.prod(shape))

    def make(_: int) -> SplicedPiece:
        chunks, at = [], 0
        for view in views:
            offsets = tuple(at if axis == dim else 0 for axis in range(len(shape)))
            chunks.append(Chunk(offsets, view.shape, _range(view)))
            at += view.shape[dim]
        segments = tiled(shape, entry.itemsize, chunks)
        if all(isinstance(segment, ByteRange) for segment in segments):
            return SplicedPiece(segments)
        return SplicedPiece((_of_whole(entry, nbytes, segments),))

    return local, SplicedFile(f"{entry.name} of rank {rank}", [nbytes], make).place(0)


def _of_whole(entry: TensorEntry, nbytes: int, segments: Sequence[Segment]) -> Derived:
    """Return segments with values of a tensor as one stream, whose source is the tensor and not the parts of it."""

    def chunks() -> Iterator[bytes]:
        for segment in segments:
            yield from (segment,) if isinstance(segment, bytes) else read_chunks(segment)

    assert entry.storage is not None and entry.storage.data is not None
    return Derived(nbytes, chunks, "a rank's part of a tensor", read_from(entry.storage.data))


def _range(entry: TensorEntry) -> ByteRange:
    """Return the elements of a view in row-major order, as one range."""
    data = row_major(entry, "little")
    if isinstance(data, ByteRange):
        return data
    return SplicedFile(entry.name, [data.length], lambda _: SplicedPiece((data,))).place(0)


def equal_parts(count: int) -> tuple[int, ...]:
    """Return the sizes of `count` equal matrices that are stacked; empty for one."""
    return (1,) * count if count > 1 else ()


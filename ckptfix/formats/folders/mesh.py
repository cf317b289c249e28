"""The part of a tensor that each rank of a mesh has, as DTensor cuts it.

Source: torch/distributed/tensor/_utils.py (``compute_local_shape_and_global_offset``), placement_types.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ckptfix.dataclass import dataclass

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor, in elements."""

MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class MeshCut:
    """A split of one tensor dimension over one dimension of the mesh."""

    axis: int
    dim: int


def in_order(
    plain: Sequence[MeshCut], strided: Mapping[MeshCut, object], mesh: Sequence[int]
) -> list[MeshCut]:
    """Return the splits in the order in which they apply.

    Several splits of one dimension apply in mesh order, with strided ones last: FSDP over tensor parallelism.

    Args:
        strided: the split of each strided placement -> its number of stripes, None if it is not stated.

    Raises:
        ValueError: a strided split is not over later dimensions of the mesh.
    """
    for cut, stripes in strided.items():
        # A strided split first cuts into stripes, and each rank gets a part of every stripe. The later mesh dimensions
        # determine the number of stripes.
        later = math.prod(mesh[one.axis] for one in (*plain, *strided) if one.axis > cut.axis and one.dim == cut.dim)
        if stripes not in (None, later):
            raise ValueError(f"it is split into {stripes!r} stripes, but the mesh of {list(mesh)} makes {later}")
    return [*plain, *reversed([*strided])]


def part_at(shape: Sequence[int], mesh: Sequence[int], cuts: Sequence[MeshCut], coordinate: Sequence[int]) -> Box:
    """Return the part at a coordinate of the mesh: each split is like that of ``torch.chunk``."""
    offsets, extent = [0] * len(shape), list(shape)
    for cut in cuts:
        whole = extent[cut.dim]
        share = -(-whole // mesh[cut.axis])
        first = min(share * coordinate[cut.axis], whole)
        offsets[cut.dim] += first
        extent[cut.dim] = min(share, whole - first)
    return tuple(offsets), tuple(extent)


def coordinate_of(index: int, mesh: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinate of the rank number `index` of a mesh, counted in row-major order."""
    out: list[int] = []
    for size in reversed(mesh):
        out.append(index % size)
        index //= size
    return tuple(reversed(out))

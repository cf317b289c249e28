"""One rank's description of a sharded tensor: the part in its file, and the parts of the other ranks.

::

    DTensor          FSDP2 and tensor parallelism: a mesh of ranks, this rank's coordinates, the split of each dimension
    ShardedTensor    FSDP1: the offsets and sizes of all shards, and the local shards

Source: torch/distributed/tensor/_utils.py (``compute_local_shape_and_global_offset``), placement_types.py,
torch/distributed/_shard/sharded_tensor/api.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from ckptfix.checkpoint import TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.formats.folders.mesh import MOST_RANKS, Box, MeshCut, coordinate_of, in_order, part_at
from ckptfix.formats.folders.nodes import class_name, listed, number
from ckptfix.formats.ranks.wrapped import is_dtensor, wrapped
from ckptfix.formats.torch.state import SHARDED, fields
from ckptfix.formats.torch.tensors import BadTensor, StorageOf, is_tensor, sizes, tensor_entry
from ckptfix.pickles import Call
from ckptfix.pickles.graph import Node


@dataclass(frozen=True, slots=True)
class RankTensor:
    """A tensor as one rank's file has it.

    Attributes:
        shape: the shape of the whole tensor.
        here: the parts that are in the file.
        world: the number of ranks of the tensor or the job; `rank` is the rank of this file, if it states one.
        cut: a value that is equal for two files that partition the tensor in the same way.
        parts: returns (rank, part) of all ranks. Several ranks may have the same part.
    """

    kind: str
    shape: tuple[int, ...]
    rank: int | None
    world: int | None
    here: tuple[tuple[Box, TensorEntry], ...]
    cut: object
    parts: Callable[[], Sequence[tuple[int, Box]]]


def held(node: Node, entry: TensorEntry, storage_of: StorageOf) -> RankTensor | None:
    """Return the description in `node` if it is a part of a tensor; None for a whole tensor.

    Raises:
        Unsupported: it is a term of a sum over the ranks.
        DamagedFile: the description contradicts itself.
    """
    cls, state = wrapped(node)
    if cls == SHARDED:
        return _sharded(entry, dict(state), storage_of)
    return _dtensor(entry, dict(state), storage_of) if is_dtensor(cls) else None


def _sharded(entry: TensorEntry, state: Mapping[str, Node], storage_of: StorageOf) -> RankTensor:
    group = fields(state.get("process_group"))
    here: list[tuple[Box, TensorEntry]] = []
    stated: list[tuple[int, Box]] = []
    for place, shard in enumerate(listed(state.get("local_shards"))):
        own = fields(shard)
        stated.append(_box(own.get("metadata"), entry))
        box = stated[-1][1]
        here.append((box, _local(own.get("tensor"), f"{entry.name}.{place}", box[1], storage_of)))
    about = fields(state.get("metadata"))
    _refuse_other_shape(about.get("size"), entry)
    parts = [_box(row, entry) for row in listed(about.get("shards_metadata"))]
    for rank, (offsets, extent) in set(stated).difference(parts):
        message = f"its list of all shards lacks the shard of {list(extent)} at {list(offsets)} of rank {rank}"
        raise DamagedFile(message, where=entry.name)
    if len({box for _, box in parts}) != len(parts):
        raise DamagedFile("two shards have the same position", where=entry.name)
    return RankTensor(
        "ShardedTensor",
        entry.shape,
        number(group.get("global_rank")),
        number(group.get("global_world_size")),
        tuple(here),
        tuple(parts),
        lambda: parts,
    )


def _refuse_other_shape(node: Node, entry: TensorEntry) -> None:
    """Refuse a tensor whose metadata states a different shape."""
    try:
        stated = entry.shape if node is None else sizes(node)
    except BadTensor:
        stated = None
    if stated != entry.shape:
        shown = "no shape" if stated is None else list(stated)
        raise DamagedFile(f"its shape is {list(entry.shape)}, but its metadata has {shown}", where=entry.name)


def _box(node: Node, entry: TensorEntry) -> tuple[int, Box]:
    """Return (rank, offsets and sizes) of a ShardMetadata."""
    own = fields(node)
    try:
        box = sizes(own.get("shard_offsets")), sizes(own.get("shard_sizes"))
    except BadTensor:
        raise DamagedFile("a shard has no valid offsets and sizes", where=entry.name) from None
    _refuse_outside(box, entry)
    rank = number(fields(own.get("placement")).get("_rank"))
    return -1 if rank is None else rank, box


def _refuse_outside(box: Box, entry: TensorEntry) -> None:
    offsets, extent = box
    if not len(offsets) == len(extent) == len(entry.shape) or any(
        first + size > whole for first, size, whole in zip(offsets, extent, entry.shape, strict=True)
    ):
        raise DamagedFile(
            f"a shard of {list(extent)} at {list(offsets)} does not fit in {list(entry.shape)}", where=entry.name
        )


def _local(node: Node, where: str, extent: Sequence[int], storage_of: StorageOf) -> TensorEntry:
    if not is_tensor(node):
        raise DamagedFile("a shard has no tensor", where=where)
    local = tensor_entry(node, where, "", storage_of)
    if local.kind != "dense" or local.shape != tuple(extent):
        raise DamagedFile(f"its part has the shape {list(local.shape)}, and should have {list(extent)}", where=where)
    return local


def _dtensor(entry: TensorEntry, state: Mapping[str, Node], storage_of: StorageOf) -> RankTensor:
    spec = fields(state.get("_spec"))
    _refuse_other_shape(_shape_of(spec.get("tensor_meta")), entry)
    mesh = fields(spec.get("mesh"))
    shape = _mesh_shape(mesh, entry, storage_of)
    cuts = _cuts(listed(spec.get("placements")), spec, shape, entry)
    ranks = next((listed(mesh[name]) for name in ("_flatten_rank_map", "_flatten_mesh_list") if name in mesh), [])
    numbers = [number for number in ranks if type(number) is int]
    if len(numbers) != math.prod(shape):
        numbers = list(range(math.prod(shape)))
    rank = number(mesh.get("_rank"))
    coordinate = tuple(number for number in listed(mesh.get("_coordinate_on_dim")) if type(number) is int)
    if len(coordinate) != len(shape):
        coordinate = coordinate_of(numbers.index(rank), shape) if rank in numbers else ()
    if not coordinate or any(not 0 <= place < size for place, size in zip(coordinate, shape, strict=True)):
        raise DamagedFile("the DTensor does not say which part is in this file", where=entry.name)
    box = part_at(entry.shape, shape, cuts, coordinate)
    local = _local(state.get("_local_tensor"), f"{entry.name}._local_tensor", box[1], storage_of)
    if rank is None:
        rank = numbers[_index(coordinate, shape)]

    def everywhere() -> list[tuple[int, Box]]:
        places = product(*map(range, shape))
        return [
            (number, part_at(entry.shape, shape, cuts, place)) for number, place in zip(numbers, places, strict=True)
        ]

    key = (shape, tuple(cuts))
    return RankTensor("DTensor", entry.shape, rank, max(numbers) + 1, ((box, local),), key, everywhere)


def _shape_of(meta: Node) -> Node:
    """Return the first field of a TensorMeta, a named tuple: the shape."""
    return meta.arguments[0] if type(meta) is Call and meta.arguments else None


def _mesh_shape(mesh: Mapping[str, Node], entry: TensorEntry, storage_of: StorageOf) -> tuple[int, ...]:
    """Return the sizes of the mesh: from its layout, or from the tensor of ranks that torch before 2.10 kept."""
    layout = fields(mesh.get("_layout"))
    axes = listed(layout.get("axes"))
    found: tuple[int, ...] = ()
    if axes:
        found = tuple(math.prod(_flat(fields(axis).get("shape"))) for axis in axes)
    elif "shape" in layout:
        whole = layout["shape"]
        found = tuple(math.prod(_flat(size)) for size in (whole if isinstance(whole, tuple) else (whole,)))
    elif is_tensor(mesh.get("mesh")):
        found = tensor_entry(mesh["mesh"], "mesh", "", storage_of).shape
    if not found or not 0 < math.prod(found) <= MOST_RANKS:
        raise DamagedFile("the DTensor is on a mesh of unknown size", where=entry.name)
    return found


def _flat(node: Node, depth: int = 0) -> Iterator[int]:
    if type(node) is int:
        yield node
    elif isinstance(node, (tuple, list)) and depth < 8:
        for part in node:
            yield from _flat(part, depth + 1)


def _cuts(
    placements: Sequence[Node], spec: Mapping[str, Node], shape: tuple[int, ...], entry: TensorEntry
) -> list[MeshCut]:
    """Return how the dimensions of the mesh split those of the tensor, in order.

    If several split the same dimension, they apply in mesh order, with strided ones last: FSDP over tensor parallelism.

    Raises:
        Unsupported: a strided split is not over later dimensions of the mesh, or a part is a term of a sum.
        DamagedFile: no tensor can be split in this way.
    """
    if len(placements) != len(shape):
        raise DamagedFile(f"it has {len(placements)} placements on a mesh of {list(shape)}", where=entry.name)
    first: list[MeshCut] = []
    last: dict[MeshCut, object] = {}
    for axis, placement in enumerate(placements):
        name = class_name(placement)
        if name in ("Shard", "_StridedShard"):
            dim = fields(placement).get("dim")
            if type(dim) is not int or not -len(entry.shape) <= dim < len(entry.shape):
                raise DamagedFile(f"it is split along dimension {dim!r} of {list(entry.shape)}", where=entry.name)
            if name == "Shard":
                first.append(MeshCut(axis, dim % len(entry.shape)))
            else:
                last[MeshCut(axis, dim % len(entry.shape))] = fields(placement).get("split_factor")
        elif name.endswith("Partial"):
            message = (
                f"it is a term of a sum over the ranks, of shape {list(entry.shape)}; ckptfix cannot add the terms"
            )
            raise Unsupported(message, where=entry.name, hint="call full_tensor() on all ranks before saving")
        elif name != "Replicate":
            raise Unsupported(f"unknown placement: {name or placement!r}", where=entry.name)
    try:
        made = in_order(first, last, shape)
    except ValueError as error:
        hint = "call full_tensor() on all ranks before saving"
        raise Unsupported(str(error), where=entry.name, hint=hint) from None
    order = [entry for entry in listed(spec.get("shard_order")) if type(entry) is Call]
    if order and not last:
        stated = [
            MeshCut(axis, dim)
            for row in order
            if len(row.arguments) == 2 and type(dim := row.arguments[0]) is int
            for axis in _flat(row.arguments[1])
        ]
        if sorted((cut.axis, cut.dim) for cut in stated) == sorted((cut.axis, cut.dim) for cut in first):
            return stated
    return made


def _index(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for place, size in zip(coordinate, shape, strict=True):
        index = index * size + place
    return index

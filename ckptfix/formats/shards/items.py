"""Safetensors files of the ranks of torch_checkpointing, whose slices only the metadata of the folder places.

::

    FOLDER/metadata.pkl               see `foreign.rank_items`; for each tensor of an item, by the path of its keys:
        '["layers","0","weight"]': [{"ranks": (0, 1), "sharding_metadata": {"type": "DTensorShardingMetadata", "data":
            {"global_shape": [8, 4], "dtype": "torch.float32", "placements": [{"type": "Shard", "dim": 0}],
             "mesh_spec": {"mesh_shape": (2,), "mesh_data": (0, 1), ...}, ...}}}]
    FOLDER/model_0.safetensors        of rank 0: "layers.0.weight", its slice

A tensor that every rank holds whole is listed like the others, and so is one that a group of ranks replicates: the
slices of the first group are joined. Source: torch_checkpointing e57668f, distributed_metadata.py, dtensor_metadata.py
and hf/consolidation.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from ckptfix.checkpoint import TensorEntry, contiguous_stride
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.copies import differing
from ckptfix.formats.folders.mesh import MOST_RANKS, Box, MeshCut, coordinate_of, in_order, part_at
from ckptfix.formats.foreign.rank_items import RankItem, rank_items, texts
from ckptfix.formats.members import RANKS_METADATA
from ckptfix.formats.shards.layout import ShardedLayout, open_ranks
from ckptfix.formats.shards.slices import SlicedTensor, entries_of
from ckptfix.io.chunks import Chunk
from ckptfix.io.read import read_chunks
from ckptfix.pickles.graph import Node
from ckptfix.urls import as_path
from ckptfix.words import some

NAME = "torch-checkpointing"

MOST_COMPARED = 1 << 16
"""The most bytes of a replica that are compared."""


@dataclass(frozen=True, slots=True)
class ItemTensor:
    """A tensor of an item: its shape and dtype, and the part that each rank has."""

    shape: tuple[int, ...]
    dtype: str
    boxes: Mapping[int, Box]


def item_in(folder: str) -> RankItem | None:
    """Return the item that a folder is read as: the model, if its files are safetensors and its slices are placed."""
    items = rank_items(folder)
    return items[0] if items and items[0].is_joined else None


def joined(folder: str) -> tuple[ShardedLayout, tuple[TensorEntry, ...]]:
    """Return the files of a folder, and every tensor joined from its slices.

    Raises:
        DamagedFile: the metadata lists no model that can be joined.
    """
    where = str(as_path(folder, RANKS_METADATA))
    item = item_in(folder)
    if item is None:
        raise DamagedFile("it lists no safetensors files of ranks", path=where)
    layout = open_ranks(folder, [item.files[rank] for rank in sorted(item.files)], where)
    findings: list[Finding] = []
    held = _held(layout, item)
    rows: list[SlicedTensor] = []
    unequal: list[str] = []
    stated = set()
    for name, groups in _stated(item.slices):
        stated.add(name)
        try:
            row, same = _tensor(name, groups, held)
        except ValueError as error:
            findings.append(found("missing-slices", str(error), where=name))
            continue
        rows.append(row)
        if not same:
            unequal.append(name)
    if findings and not rows:
        raise DamagedFile(findings[0].message, path=where, where=findings[0].where)
    unknown = sorted({name for own in held.values() for name in own} - stated)
    if unknown:
        more = f"; the same for {some(unknown[1:])}" if len(unknown) > 1 else ""
        message = f"{RANKS_METADATA} does not say where its slices belong{more}"
        findings.append(found("missing-slices", message, where=unknown[0]))
    others = [one.name for one in rank_items(folder) if one.name != item.name]
    if others:
        message = f"the folder is read as {item.name}; it has {some(others)} too"
        findings.append(found("left-behind", message, where=others[0]))
    entries, holes = entries_of(folder, rows)
    findings += [*holes, *differing(unequal)]
    known = [finding for finding in layout.findings if finding.id != "doubled-tensors"]
    return replace(layout, findings=(*known, *findings)), entries


def _held(layout: ShardedLayout, item: RankItem) -> dict[int, dict[str, TensorEntry]]:
    """Return rank -> name -> the tensor in its file, of the files that can be read."""
    read = {shard.name: {entry.key: entry for entry in shard.read.entries} for shard in layout.shards}
    return {rank: read[name] for rank, name in item.files.items() if name in read}


def _stated(node: Node) -> Iterator[tuple[str, list[Node]]]:
    """Yield the name of each tensor, and its groups of ranks."""
    for path, groups in texts(node).items():
        try:
            keys = json.loads(path)
        except (ValueError, RecursionError):
            keys = None
        if isinstance(keys, list) and isinstance(groups, list):
            yield ".".join(map(str, keys)), groups


def _tensor(
    name: str, groups: list[Node], held: Mapping[int, Mapping[str, TensorEntry]]
) -> tuple[SlicedTensor, bool]:
    """Return a tensor in slices, and whether replicas of them are equal, as far as their first bytes show.

    Raises:
        ValueError: the metadata cannot be read, or a file contradicts it.
    """
    ways = sorted(((ranks, _item_tensor(group, ranks)) for group in groups if (ranks := _ranks(group))),
                  key=lambda row: row[0])  # fmt: skip
    if not ways:
        raise ValueError(f"{RANKS_METADATA} lists no ranks that hold it")
    tensor = ways[0][1]
    if any((other.shape, other.dtype) != (tensor.shape, tensor.dtype) for _, other in ways):
        raise ValueError(f"{RANKS_METADATA} states several shapes or dtypes of it")
    chunks: dict[Box, Chunk] = {}
    first: TensorEntry | None = None
    same = True
    for rank, box in tensor.boxes.items():
        entry = held.get(rank, {}).get(name)
        if entry is None:
            continue
        if (entry.shape, entry.dtype) != (box[1], tensor.dtype):
            shown = f"{entry.dtype} {list(entry.shape)} in the file of rank {rank}"
            raise ValueError(f"it is {shown}, and {tensor.dtype} {list(box[1])} in {RANKS_METADATA}")
        first = entry if first is None else first
        if box in chunks:
            with suppress(CkptfixError):  # a file that is cut short has a finding of its own
                same = same and _first_bytes(entry) == _first_bytes(chunks[box])
        else:
            chunks[box] = Chunk(*box, entry.data)
    if first is None:
        raise ValueError("no file of a rank that can be read holds a slice of it")
    whole = replace(first, shape=tensor.shape, stride=contiguous_stride(tensor.shape))
    return SlicedTensor(whole, tuple(chunks.values())), same


def _first_bytes(part: TensorEntry | Chunk) -> bytes:
    data = part.data
    return b"".join(read_chunks(data.sub(0, min(data.length, MOST_COMPARED))))


def _numbers(node: Node) -> tuple[int, ...]:
    """Return a list or tuple of sizes or ranks.

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(node, list | tuple) or not all(type(one) is int and 0 <= one < 1 << 62 for one in node):
        raise ValueError(f"{RANKS_METADATA} describes it wrongly")
    return tuple(one for one in node if type(one) is int)


def _ranks(group: Node) -> tuple[int, ...]:
    return tuple(sorted(_numbers(texts(group).get("ranks"))))


def _item_tensor(group: Node, ranks: tuple[int, ...]) -> ItemTensor:
    """Return what a group of ranks has of a tensor.

    Raises:
        ValueError: the metadata contradicts itself, or describes something else than a DTensor.
    """
    about = texts(texts(group).get("sharding_metadata"))
    kind, data = about.get("type"), texts(about.get("data"))
    if str(kind) != "DTensorShardingMetadata":
        raise ValueError(f"its slices are described by {str(kind)[:80]!r}, which ckptfix does not know")
    shape, mesh = _numbers(data.get("global_shape")), texts(data.get("mesh_spec"))
    sizes, places = _numbers(mesh.get("mesh_shape")), _numbers(mesh.get("mesh_data"))
    if not 0 < math.prod(sizes) <= MOST_RANKS or len(places) != math.prod(sizes) or len(ranks) > MOST_RANKS:
        raise ValueError("its slices are on a mesh of unknown size")
    cuts = _cuts(data.get("placements"), shape, sizes)
    at = {rank: number for number, rank in enumerate(places)}
    if any(rank not in at for rank in ranks):
        raise ValueError("a rank that holds a slice of it is not in its mesh")
    boxes = {rank: part_at(shape, sizes, cuts, coordinate_of(at[rank], sizes)) for rank in ranks}
    return ItemTensor(shape, str(data.get("dtype")).removeprefix("torch."), boxes)


def _cuts(placements: Node, shape: tuple[int, ...], mesh: tuple[int, ...]) -> list[MeshCut]:
    if not isinstance(placements, list | tuple) or len(placements) != len(mesh):
        raise ValueError(f"it has no placement for each dimension of the mesh {list(mesh)}")
    plain: list[MeshCut] = []
    strided: dict[MeshCut, object] = {}
    for axis, placement in enumerate(placements):
        own = texts(placement)
        kind, dim = str(own.get("type")), own.get("dim")
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "StridedShard") or type(dim) is not int or not -len(shape) <= dim < len(shape):
            raise ValueError(f"unknown placement: {kind[:80]} along {str(dim)[:20]} of {list(shape)}")
        cut = MeshCut(axis, dim % len(shape))
        if kind == "Shard":
            plain.append(cut)
        else:
            strided[cut] = own.get("split_factor")
    return in_order(plain, strided, mesh)

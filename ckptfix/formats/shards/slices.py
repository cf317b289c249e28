"""Tensors whose slices are in the files of several ranks, as HuggingFaceStorageWriter writes them.

::

    FOLDER/shard-00001-model-00001-of-00002.safetensors     of the first rank; its __metadata__:
        "DCP_SHARDING_INFO": {"emb.weight": {"saved_offsets": [6, 0]}, ...}   as JSON: where its slice begins
        "DCP_VERSION": "1.0"

The shape of the whole tensor is not stated: it is the extent that the slices cover. Source:
torch/distributed/checkpoint/hf_storage.py and _hf_utils.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptfix.checkpoint import Storage, TensorEntry, contiguous_stride
from ckptfix.checkpoint.byte_ranges import pieces_of
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.safetensors import SHARDING_INFO
from ckptfix.formats.shards.layout import ShardedLayout, ShardFile
from ckptfix.io.chunks import Chunk, tiled
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece, is_spliced

VERSION = "DCP_VERSION"


def is_sliced(layout: ShardedLayout) -> bool:
    """Return whether files of the checkpoint state that they hold slices."""
    return layout.ranks or any(SHARDING_INFO in shard.read.metadata for shard in layout.shards)


@dataclass(frozen=True, slots=True)
class SlicedTensor:
    """A tensor in slices: the first slice with the shape of the whole tensor, and the positions of all slices."""

    entry: TensorEntry
    chunks: tuple[Chunk, ...]

    @property
    def segments(self) -> SplicedPiece:
        """The bytes of the whole tensor. Raises DamagedFile if the slices do not cover it."""
        try:
            return SplicedPiece(tiled(self.entry.shape, self.entry.itemsize, self.chunks))
        except DamagedFile as error:
            error.where = self.entry.key
            raise


def joined(layout: ShardedLayout) -> tuple[tuple[TensorEntry, ...], list[Finding]]:
    """Return every tensor joined from its slices, and findings for tensors whose slices are incomplete."""
    slices: dict[str, list[tuple[TensorEntry, tuple[int, ...]]]] = {}
    findings: list[Finding] = []
    for shard in layout.shards:
        try:
            offsets = _offsets(shard)
        except ValueError as error:
            message = f"{SHARDING_INFO} of {shard.name} cannot be read: {str(error)[:200]}"
            findings.append(found("missing-slices", message, where=shard.name))
            continue
        for entry in shard.read.entries:
            begin = offsets.get(entry.key, (0,) * len(entry.shape))
            slices.setdefault(entry.key, []).append((entry, begin))
    rows: list[SlicedTensor] = []
    for name, parts in slices.items():
        wrong = _contradiction(parts)
        if wrong is not None:
            findings.append(found("missing-slices", wrong, where=name))
        else:
            rows.append(_joined(parts))
    entries, more = entries_of(layout.folder, rows)
    return entries, [*findings, *more]


def entries_of(folder: str, rows: Sequence[SlicedTensor]) -> tuple[tuple[TensorEntry, ...], list[Finding]]:
    """Return the tensors of a folder that are in slices, and findings for those whose slices are incomplete."""
    made = SplicedFile(folder, [row.entry.nbytes for row in rows], lambda index: rows[index].segments)
    missing = {row.entry.key: list(holes(row)) for row in rows if not _is_full(row)}
    entries = tuple(
        _placed(row, made, index) if not missing.get(row.entry.key) else _nowhere(row.entry)
        for index, row in enumerate(rows)
    )
    return entries, [finding for several in missing.values() for finding in several]


def judged(layout: ShardedLayout) -> Iterator[Finding]:
    """Yield the same findings after a check of the position of each slice, not only of its size."""
    entries, findings = joined(layout)
    yield from findings
    known = {finding.where for finding in findings}
    for entry in entries:
        data = entry.storage.data if entry.storage is not None else None
        if entry.key not in known and is_spliced(data):
            try:
                tuple(pieces_of(data))
            except CkptfixError as error:
                yield found("missing-slices", error.message, where=entry.key)


def _offsets(shard: ShardFile) -> dict[str, tuple[int, ...]]:
    """Return name -> the start of its slice. Raises ValueError if the table is invalid."""
    try:
        said = json.loads(shard.read.metadata.get(SHARDING_INFO, "{}"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(said, dict):
        raise ValueError("it is not a JSON object")
    made: dict[str, tuple[int, ...]] = {}
    for name, row in said.items():
        offsets = row.get("saved_offsets") if isinstance(row, dict) else None
        if type(offsets) is not list or not all(type(one) is int and 0 <= one < 1 << 62 for one in offsets):
            raise ValueError(f"it has no saved_offsets of {name[:80]!r}")
        made[name] = tuple(offsets)
    return made


def _contradiction(parts: Sequence[tuple[TensorEntry, tuple[int, ...]]]) -> str | None:
    """Return the reason why the slices cannot belong to one tensor; None if they can."""
    first = parts[0][0]
    for entry, begin in parts:
        if entry.detail or entry.dtype != first.dtype:
            return f"its slices have different dtypes: {first.detail or first.dtype} and {entry.detail or entry.dtype}"
        if len(begin) != len(entry.shape) or len(entry.shape) != len(first.shape):
            return f"its slices contradict each other: {list(entry.shape)} at {list(begin)}, and {list(first.shape)}"
    return None


def _joined(parts: Sequence[tuple[TensorEntry, tuple[int, ...]]]) -> SlicedTensor:
    first = parts[0][0]
    shape = tuple(
        max(begin[axis] + entry.shape[axis] for entry, begin in parts) for axis in range(len(first.shape))
    )
    chunks = tuple(Chunk(begin, entry.shape, entry.data) for entry, begin in parts)
    return SlicedTensor(replace(first, shape=shape, stride=contiguous_stride(shape)), chunks)


def _is_full(row: SlicedTensor) -> bool:
    """Return whether the slices have as many elements as the tensor."""
    return sum(math.prod(chunk.sizes) for chunk in row.chunks) == row.entry.numel


def holes(row: SlicedTensor) -> Iterator[Finding]:
    """Yield a finding if the slices do not cover the tensor."""
    try:
        _ = row.segments
    except DamagedFile as error:
        yield found("missing-slices", f"its slices do not cover {list(row.entry.shape)}: {error.message}",
                    where=row.entry.key)  # fmt: skip


def _placed(row: SlicedTensor, made: SplicedFile, index: int) -> TensorEntry:
    """Return the tensor with its bytes: those of its only slice, or those of the joined file."""
    entry = row.entry
    alone = len(row.chunks) == 1 and row.chunks[0].sizes == entry.shape
    data = row.chunks[0].data if alone else made.place(index)
    return replace(entry, storage=Storage(entry.key, entry.dtype, data.length, "cpu", data))


def _nowhere(entry: TensorEntry) -> TensorEntry:
    """Return a tensor without data, since it is incomplete."""
    return replace(entry, storage=Storage(entry.key, entry.dtype, entry.nbytes, "cpu", None))


def without_slices(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file of slices without the pairs that describe the slices."""
    return {key: value for key, value in metadata.items() if key not in (SHARDING_INFO, VERSION)}

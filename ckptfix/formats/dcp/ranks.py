"""Folders in which each rank wrote its own metadata: ``save(..., use_collectives=False)``, since torch 2.10.

::

    FOLDER/__0.metadata       like `.metadata`, of rank 0 alone: its chunks of each tensor, and their locations
    FOLDER/__0_0.distcp
    FOLDER/__1.metadata       ...

Data that all ranks have is written by each of them. Torch loads such a folder on the same number of ranks, each with
its own part; no file states that number. Source: torch/distributed/checkpoint/filesystem.py (``_get_metadata_path``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace

from ckptfix.checkpoint import ByteRange, FileVersion, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.dcp.metadata import Metadata, SavedChunk, SavedKey, check_volume
from ckptfix.formats.dcp.skim import Sizes
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.io.chunks import Chunk, tiled
from ckptfix.urls import as_path
from ckptfix.words import some

_NAME = re.compile(r"__(\d+)\.metadata")

MOST_RANKS = 1 << 16

MOST_NAMED = 64
"""The limit of ranks without metadata that are reported one by one."""


def names(folder: str) -> dict[int, str]:
    """Return rank -> the name of its metadata, sorted by rank."""
    try:
        found = [(match, path.name) for path in as_path(folder).iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError:
        return {}
    return dict(sorted((int(match[1]), name) for match, name in found if len(match[1]) < 9))


@dataclass(slots=True)
class MergedMetadata:
    """The combined metadata of all ranks.

    Attributes:
        said: the metadata as a single file would state it.
        marks: the files that were read.
        doubles: keys with the part of the first rank and of another one, where both have the same chunk or a value.
        findings: ranks whose metadata is missing or damaged, with their tensors.
    """

    said: Metadata
    marks: list[FileVersion]
    doubles: list[tuple[SavedKey, SavedChunk, SavedChunk]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def together(folder: str, read: Callable[[str], tuple[Metadata, FileVersion]]) -> MergedMetadata:
    """Combine the metadata of all ranks.

    Args:
        read: name -> its content, and the file as it was read.

    Raises:
        DamagedFile: no metadata can be read, or there are more ranks than any job has.
    """
    there: dict[int, Metadata] = {}
    marks: list[FileVersion] = []
    lost: dict[int, str] = {}
    own = names(folder)
    if max(own) >= MOST_RANKS:
        raise DamagedFile(f"{own[max(own)]}: no job has that many ranks", path=folder)
    for rank, name in own.items():
        try:
            there[rank], mark = read(name)
            marks.append(mark)
        except DamagedFile as error:
            if len(own) == 1:
                raise
            lost[rank] = f"cannot be read ({error.message})"
    if not there:
        raise DamagedFile("none of the ranks' metadata can be read", path=folder)
    missing = [rank for rank in range(max(own)) if rank not in own]
    lost |= dict.fromkeys(missing[:MOST_NAMED], "is missing")
    if len(missing) > MOST_NAMED:
        lost[missing[MOST_NAMED]] = f"and {len(missing) - MOST_NAMED - 1:,} more are missing"
    first = there[min(there)]
    nested = all(one.nested for one in there.values())
    made = MergedMetadata(replace(first, saved=[], unused=[], wrong=[], nested=nested), marks)
    _merge(made, there)
    holes = list(_holes(made))
    for rank, why in sorted(lost.items()):
        what = f"; it may hold {some(holes)}" if holes else "; the other ranks have its content too"
        message = f"__{rank}.metadata {why}{what}"
        made.findings.append(found("missing-rank", message, where=str(as_path(folder, f"__{rank}.metadata"))))
    return made


def _merge(made: MergedMetadata, there: Mapping[int, Metadata]) -> None:
    """Combine the keys of all ranks: the chunks of each, in the copy of the first rank that has it."""
    said = made.said
    keys: dict[str, SavedKey] = {}
    chunks: dict[str, dict[tuple[Sizes, Sizes], SavedChunk]] = {}
    wrong: dict[str, str] = {}
    for rank, own in there.items():
        said.unused += own.unused
        wrong |= dict(own.wrong)
        for saved in own.saved:
            known = keys.setdefault(saved.fqn, saved)
            if (known.dtype, known.shape, known.path) != (saved.dtype, saved.shape, saved.path):
                message = f"rank {rank} has {_kind(saved)} under this name, and an earlier rank has {_kind(known)}"
                wrong[known.address] = message
                continue
            boxes = chunks.setdefault(saved.fqn, {})
            for part in saved.parts:
                first = boxes.setdefault((part.offsets, part.sizes), part)
                if first is not part:
                    made.doubles.append((saved, first, part))
    for fqn, saved in keys.items():
        if saved.address not in wrong:
            said.saved.append(replace(saved, parts=tuple(chunks[fqn].values())))
    said.wrong += wrong.items()


def _kind(saved: SavedKey) -> str:
    return "a value" if saved.dtype is None else f"{saved.dtype} {list(saved.shape)}"


def _holes(made: MergedMetadata) -> Iterator[str]:
    """Remove tensors that the ranks hold only in part, and yield each with its missing rows."""
    whole: list[SavedKey] = []
    for saved in made.said.saved:
        if saved.dtype is not None:
            row = dtypes.by_name(saved.dtype)
            try:
                check_volume(row, saved.shape, saved.parts)
            except BadTensor as error:
                what = _lacking(saved, row.itemsize) or error.message
                made.said.wrong.append((saved.address, f"its parts do not cover {list(saved.shape)}: {what}"))
                yield f"{saved.address} ({what})"
                continue
        whole.append(saved)
    made.said.saved = whole


def _lacking(saved: SavedKey, itemsize: int) -> str | None:
    """Return the fault in the chunks of a tensor, as reported by `tiled`; None if the chunks are right."""
    chunks = [
        Chunk(part.offsets, part.sizes, ByteRange("", 0, math.prod(part.sizes) * itemsize)) for part in saved.parts
    ]
    try:
        tiled(saved.shape, itemsize, chunks)
    except DamagedFile as error:
        return error.message
    return None

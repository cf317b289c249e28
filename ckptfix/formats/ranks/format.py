"""The format of one file for each rank, in a folder or a list: read-only; outputs are one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptfix.checkpoint import Checkpoint, Edit, Plan, TensorEntry
from ckptfix.commands import command
from ckptfix.errors import (
    CkptfixError,
    DamagedFile,
    NoFile,
    NoSuchFile,
    Refused,
    StrPath,
    UnknownFormat,
    Unsupported,
    file_name,
)
from ckptfix.formats.base import OF_OBJECTS, Format, plain_weights
from ckptfix.formats.folders.nodes import read_torch
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.ranks.file import RankFile, open_file
from ckptfix.formats.ranks.merge import NAME, assembled, together
from ckptfix.formats.ranks.names import meant, rank_of
from ckptfix.formats.ranks.wrapped import is_flat
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.common import all_findings, pickled_object
from ckptfix.io.source import found_as, is_file, is_folder, is_place, mark
from ckptfix.urls import as_path

MARKS = ("DTensor", "ShardedTensor")

MOST_RANKS = 1 << 17
"""More ranks than any real job: each missing rank becomes a finding, and the file states the number."""


def score(path: str, head: bytes, size: int) -> int:
    """Return 60 for a folder of files of several ranks if one of them contains parts of tensors."""
    if head or size or not is_place(path) or not is_folder(path):
        return 0
    family = meant(path)
    if family is None:
        return 0
    for _, name in sorted(family.files.items())[:2]:
        try:
            checkpoint = read_torch(file_inside(path, name, where=path))
        except CkptfixError:
            continue
        return 60 if _in_parts(checkpoint) else 0
    return 0


def _in_parts(checkpoint: Checkpoint) -> bool:
    parts = pickled_object(checkpoint)
    if any(name.name in MARKS for name in parts.graph.globals):
        return True
    return any(is_flat(key) for _, key, _ in parts.found.tensors)


def read(path: str) -> Checkpoint:
    """Read the files of all ranks in the folder `path`; a missing or damaged file is a finding.

    Raises:
        DamagedFile: no file can be read, or the files do not belong together.
    """
    family = meant(path)
    if family is None:
        raise DamagedFile("the folder contains no files of several ranks", path=path)
    files: dict[int, RankFile] = {}
    why: dict[int, str] = {}
    for rank, name in sorted(family.files.items()):
        place = file_inside(path, name, where=path)
        try:
            files[rank] = _open(place)
        except (DamagedFile, UnknownFormat) as error:
            why[rank] = f"cannot be read ({error.message})"
    if not files:
        raise DamagedFile(f"none of {family.pattern} can be read", path=path)
    return _checkpoint(path, files, family.world, why, str(as_path(path, family.pattern)))


def read_files(paths: Sequence[StrPath]) -> Checkpoint:
    """Read the files of all ranks, in any order, as one checkpoint.

    Raises:
        Refused: they are not files of ranks, or two belong to the same rank.
        CkptfixError: an error of `open_checkpoint`.
    """
    files: dict[int, RankFile] = {}
    for place, path in enumerate(paths):
        name = file_name(path)
        there = as_path(name)
        if not is_file(there):
            raise (
                NoSuchFile(name)
                if not found_as(name)
                else NoFile("one of the paths for the ranks is not a file", path=name)
            )
        file = _open(name)
        rank = _rank(file)
        if rank is None:
            rank = place
        if rank in files:
            message = f"it belongs to rank {rank}, as does {files[rank].path}"
            raise Refused(message, path=file.path, hint="name the file of each rank once")
        files[rank] = file
    if not any(_in_parts(file.checkpoint) for file in files.values()):
        first = files[min(files)]
        message = "there is nothing to join: it holds whole tensors, not parts from a job of several ranks"
        raise Refused(
            message, path=first.path, hint=f"to convert one file, run `{command('convert', first.path, 'OUT.pth')}`"
        )
    return _checkpoint(files[min(files)].path, files, None, {}, "")


def _open(path: str) -> RankFile:
    before = mark(path)
    return open_file(read_torch(path), before)


def _rank(file: RankFile) -> int | None:
    """Return the rank of a file, as its tensors state it or, without that, its name."""
    for address in file.nodes:
        try:
            own = file.held(address)
        except CkptfixError:
            continue
        if own is not None and own.rank is not None:
            return own.rank
    return rank_of(as_path(file.path).name)


def _checkpoint(
    path: str, files: dict[int, RankFile], world: int | None, why: dict[int, str], pattern: str
) -> Checkpoint:
    world = _world(files, world)
    for rank in range(world or 0):
        if rank not in files and rank not in why:
            why[rank] = "is missing"
    beyond = [rank for rank in files if world is not None and rank >= world]
    if beyond:
        message = f"it belongs to rank {beyond[0]}, but there were {world} ranks: it is from a different save"
        raise DamagedFile(message, path=files[beyond[0]].path)
    lost = {rank: pattern.replace("*", str(rank)) for rank in why} if pattern else {}
    made = together(path, files, lost, why)
    traits: dict[str, object] = {"ranks": world or len(files), "files": len(files)}
    return assembled(made, traits)


def _world(files: Mapping[int, RankFile], named: int | None) -> int | None:
    """Return the number of ranks: the number in the file names, or else the most that any tensor states.

    Raises:
        DamagedFile: the names and the contents of the files state different numbers, or more than any job has.
    """
    found = 0
    for file in files.values():
        for address in file.nodes:
            try:
                own = file.held(address)
            except CkptfixError:
                continue
            if own is not None and own.world is not None:
                found = max(found, own.world)
                if named is not None and own.world > named:
                    message = f"its tensors are on {own.world} ranks, but its name says {named}"
                    raise DamagedFile(message, path=file.path, where=address)
                if own.world > MOST_RANKS:
                    message = f"it says that its tensors are on {own.world} ranks, more than any job has"
                    raise DamagedFile(message, path=file.path, where=address)
    if named is not None and named > MOST_RANKS:
        first = files[min(files)]
        raise DamagedFile(f"its name says {named} ranks, more than any job has", path=first.path)
    return named if named is not None else found or None


_READ_ONLY = "ckptfix reads files of ranks, but does not write them"


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    raise _read_only(checkpoint.files[0].path if is_file(checkpoint.path) else checkpoint.path, dest)


def plan_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    raise Unsupported(_READ_ONLY, path=dest, hint="use --to zip, legacy or safetensors")


def _read_only(path: str, dest: str) -> CkptfixError:
    hint = f"`{command('convert', path, 'OUT.pth')}` joins them into one file; edit that file"
    return Unsupported(_READ_ONLY, path=dest, hint=hint)


FORMAT = Format(
    name=NAME,
    title="files of all ranks",
    suffixes=(),
    states=OF_OBJECTS,
    score=score,
    read=read,
    validate=all_findings,
    weights=plain_weights,
    refuses=torch_zip.refuses,
    plan_edit=plan_edit,
    plan_write=plan_write,
    folder=True,
    edits=False,
    writes=False,
    read_files=read_files,
)

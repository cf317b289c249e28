"""Choice of the repair for a damaged file or folder, by its kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, FileVersion
from ckptfix.commands import command
from ckptfix.errors import CkptfixError, DamagedFile, Refused, UnknownFormat
from ckptfix.findings.row import Finding
from ckptfix.formats import FORMATS, base, folder_format, format_of, open_checkpoint, refuse_part, states
from ckptfix.formats.repairs import Repair
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.signs import Beginning
from ckptfix.formats.torch import legacy as torch_legacy
from ckptfix.formats.torch import legacy_layout
from ckptfix.formats.torch.common import pickled_object
from ckptfix.formats.torch.object import reads_equal_once
from ckptfix.io.read import read_from
from ckptfix.io.source import found_as, mark, open_source
from ckptfix.ops import rank_shards
from ckptfix.ops.layers import Folder, unwrap
from ckptfix.ops.repair.arrays import is_repairable, repair_arrays
from ckptfix.ops.repair.fill import Fill
from ckptfix.ops.repair.folder import repair_folder
from ckptfix.ops.repair.lost_pickle import repair_raw
from ckptfix.ops.repair.remains import IntactStorage, Wreck, read_folder, read_legacy, read_zip
from ckptfix.ops.repair.safetensors import repair_safetensors
from ckptfix.ops.repair.torch import repair_torch
from ckptfix.ops.target.targets import ExpectedModel
from ckptfix.zips import scan as zip_scan
from ckptfix.zips.archive_sequence import WINDOW

HEAD = 4096
FAR = 1 << 20
"""Bytes from the start of a file in which the start of a legacy checkpoint is searched."""

_LEGACY = re.compile(rb"\x80.\x8a\x0a" + re.escape(legacy_layout.MAGIC_BYTES) + rb"\.", re.DOTALL)


@contextmanager
def looked_at_once() -> Iterator[dict[FileVersion, Repair]]:
    """Plan the repair of a file only once inside, and return the plans: a diagnosis counts what is left, and rehearses
    the command."""
    plans: dict[FileVersion, Repair] = {}
    token = _plans.set(plans)
    try:
        yield plans
    finally:
        _plans.reset(token)


_plans: ContextVar[dict[FileVersion, Repair] | None] = ContextVar("plans of repairs", default=None)


def repair(
    path: str,
    folder: Folder,
    *,
    fill: Fill | None = None,
    donor: Checkpoint | None = None,
    like: ExpectedModel | None = None,
) -> Repair:
    """Plan what can be saved of the file, unzipped folder or checkpoint of many files `path`; see `looked_at_once`.

    Arguments and errors as for `planned`.
    """
    known = _plans.get()
    if known is None or found_as(path) != "file" or fill is not None or donor is not None or like is not None:
        return planned(path, folder, fill=fill, donor=donor, like=like)
    version = mark(path)
    if version not in known:
        known[version] = planned(path, folder)
    return known[version]


@reads_equal_once()
def planned(
    path: str,
    folder: Folder,
    *,
    fill: Fill | None = None,
    donor: Checkpoint | None = None,
    like: ExpectedModel | None = None,
) -> Repair:
    """Plan what can be saved of the file, unzipped folder or checkpoint of many files `path`.

    Args:
        folder: returns the folder for unpacked files; the plan points there.
        fill, donor: replacements of lost tensors; see `repair.torch`.
        like: the model whose tensors are in the storages, for a file whose pickle is lost.

    Raises:
        UnknownFormat: it is not a checkpoint, damaged or not; the message identifies it.
        DistributedPart: it is a file of a distributed checkpoint; only one archive of many would be kept.
        DamagedFile: nothing in it can be saved.
        Refused: it has no tensors, and never had any.
    """
    many = folder_format(path)
    notes: tuple[Finding, ...] = ()
    name = path
    if many is None and found_as(path) != "folder":
        refuse_part(path)
        if not _is_program(path):
            path, notes = unwrap(path, folder)
    piece = _piece(path) if many is None else ()
    try:
        if many is not None:
            done = repair_folder(
                path, many, lambda file: planned(file, folder, fill=fill, donor=donor), fill=fill, donor=donor
            )
        else:
            done = _repair(path, fill, donor, like)
    except (DamagedFile, UnknownFormat) as error:
        error.path = name
        raise
    if not done.kept and not done.losses:
        raise _without_tensors(name, done)
    if not done.kept and not any(loss.filled for loss in done.losses):
        lost = ", ".join(loss.name for loss in done.losses[:4])
        raise DamagedFile(f"none of its {len(done.losses)} tensors can be kept: {lost}", path=name)
    return replace(done, notes=(*notes, *done.notes, *piece))


def _is_program(path: str) -> bool:
    """Return whether the file is a program: a checkpoint inside one is not the program's weights."""
    with open_source(path) as reader:
        head = reader.read(0, min(reader.size, HEAD))
        able = FORMATS.possible(Beginning(path, head, reader.size), folder=False)
        return any(format.program and format.score(path, head, reader.size) for format in able)


def _piece(path: str) -> tuple[Finding, ...]:
    """Return a note if `path` is one rank's file: repaired, it is still one of several."""
    if found_as(path) == "folder":
        return ()
    try:
        return tuple(rank_shards.remarks(open_checkpoint(path)))
    except CkptfixError:
        return ()


def _without_tensors(path: str, done: Repair) -> Refused:
    """Return the error for a file that has nothing to repair, with its format and the code that it would run."""
    title = FORMATS[done.format].title
    names = [row.name for row in done.left_out]
    does = f"; it names {', '.join(names[:4])}, which can run code" if names else ""
    hint = "a checkpoint has tensors: check where the file comes from" if names else None
    return Refused(f"{title} without tensors: there is nothing to repair{does}", path=path, hint=hint)


def _repair(path: str, fill: Fill | None, donor: Checkpoint | None, like: ExpectedModel | None) -> Repair:
    if found_as(path) == "folder":
        return _of_wreck(read_folder(path), fill, donor, like)
    with open_source(path) as reader:
        size = reader.size
        head = reader.read(0, min(size, HEAD))
        before = b"" if head.startswith(b"PK") else reader.read(0, min(size, FAR))
    if safetensors.score(path, head, size) >= 100:
        return repair_safetensors(path, fill=fill, donor=donor)
    able = FORMATS.possible(Beginning(path, head, size), folder=False)
    if any(format.score(path, head, size) for format in able if not format.edits):
        checkpoint = open_checkpoint(path)
        if not states(checkpoint, "objects") and is_repairable(checkpoint):
            return repair_arrays(checkpoint)
        return _of_wreck(_read_whole(path), fill, donor, like)
    if (start := _LEGACY.search(before)) is not None:
        return _of_wreck(read_legacy(path, start.start()), fill, donor, like)
    if torch_legacy.score(path, head, size):
        return _of_wreck(read_legacy(path), fill, donor, like)
    if not _has_records(path):
        if safetensors.score(path, head, size):
            return repair_safetensors(path, fill=fill, donor=donor)
        raise base.unknown(path, head, size)
    refuse_part(path, behind=WINDOW)
    return _of_wreck(read_zip(path), fill, donor, like)


def _read_whole(path: str) -> Wreck:
    """Read a file of a read-only format as the zip that it becomes.

    Raises:
        DamagedFile: one of its storages is damaged, so that its number of elements is unknown.
        Refused: it holds no object of torch.
    """
    checkpoint = open_checkpoint(path)
    if not states(checkpoint, "objects"):
        message = f"repair rebuilds torch's and safetensors files, and not a {format_of(checkpoint).title}"
        damaged = any(finding.severity == "error" for finding in checkpoint.findings)
        whole = f"nothing in it is damaged; `{command('convert', path, 'OUT')}` writes its tensors in another format"
        raise Refused(message, path=path, hint="use another copy of the file" if damaged else whole)
    for finding in checkpoint.findings:
        if finding.id == "bad-storage":
            raise DamagedFile(finding.message, path=path, where=finding.where, offset=finding.offset)
    parts = pickled_object(checkpoint)
    wreck = Wreck(path, found=parts.found, sums=False)
    for key, data in parts.container.data.items():
        if all(source.end <= checkpoint.size for source in read_from(data)):
            wreck.parts[key] = IntactStorage(data, parts.container.sums[key])
        else:
            wreck.faults[key] = "the file ends before the storage does"
    what = next(format_of(checkpoint).notes(checkpoint)).id
    wreck.note(what, f"the output is a zip; the input was: {format_of(checkpoint).title}")
    return wreck


def _has_records(path: str) -> bool:
    """Return whether the file has a record of a torch archive; header and directory entry contain its name."""
    tail = b""
    with open_source(path) as reader:
        for _, piece in zip_scan.pieces(reader):
            window = tail + (piece or b"")
            if b"PK" in window and (b"data.pkl" in window or (b"/data/" in window and b"PK\x03\x04" in window)):
                return True
            tail = window[-64:]
    return False


def _of_wreck(wreck: Wreck, fill: Fill | None, donor: Checkpoint | None, like: ExpectedModel | None) -> Repair:
    if wreck.found is None:
        return repair_raw(wreck, like)
    return repair_torch(wreck, fill=fill, donor=donor)

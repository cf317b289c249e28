"""In-place edits: the files that allow one, and the record of one; see `io.inplace`."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfix import formats, platform
from ckptfix.checkpoint import Checkpoint, OutputFile, Plan, TensorEntry
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.commands import quoted
from ckptfix.errors import CkptfixError, DamagedFile, NotPermitted, Refused, Unsupported
from ckptfix.formats.in_place import A_COPY
from ckptfix.formats.torch.zip import archive_of
from ckptfix.io.blocks import PAGE
from ckptfix.io.source import forget, is_local, refuse_changed, stamp
from ckptfix.io.unfinished_edits import UNDO, beside
from ckptfix.urls import READ_ONLY, is_url, scheme_of
from ckptfix.words import plural
from ckptfix.zips.append import earlier

if TYPE_CHECKING:
    from ckptfix.io.inplace.record import EditRecord, FileChange

_HASHED = re.compile(r"[0-9a-f]{32,}(\.\w+)?|(MD5|SHA)\w*-s\d+--\S+", re.IGNORECASE)
"""File names in stores that name files by their content: a hub's blobs, DVC, git-annex."""


def target_of(checkpoint: Checkpoint) -> str:
    """Return the real path of the file or folder that an in-place edit changes."""
    path = Path(os.path.realpath(checkpoint.path))
    return str(path.parent if formats.format_of(checkpoint).folder and not path.is_dir() else path)


def refuse_far(path: str) -> None:
    """Raise `Refused` unless `path` is on a disk of this machine.

    Raises:
        Refused: it is a URL.
    """
    if is_url(path):
        hint = f"give OUT: `... {quoted(path)} {quoted(path)} --force` replaces it in one step"
        if scheme_of(path) in READ_ONLY:
            hint = "write a copy: give OUT"
        raise Refused("in-place edits and undo need local files", path=path, hint=hint)


def refuse_shared(checkpoint: Checkpoint, *, force: bool) -> None:
    """Raise `Refused` for files whose change would also show under another name.

    Raises:
        Refused: a file has several names, or is in a store that names files by their content.
    """
    for mark in checkpoint.files if not force else ():
        real = Path(os.path.realpath(mark.path))
        if any(map(_HASHED.fullmatch, (real.name, "".join(real.parts[-2:])))):
            raise Refused(
                "it is in a store that names files by their content, and others rely on that",
                path=mark.path,
                where=str(real),
                hint="write a copy: give OUT; --force edits it anyway",
            )
        if real.is_file() and (links := real.stat().st_nlink) > 1:
            raise Refused(
                f"it has {links} names (hard links), and the edit would show under each",
                path=mark.path,
                hint="write a copy: give OUT; --force edits it anyway",
            )


def in_place(checkpoint: Checkpoint, plan: Plan) -> Plan:
    """Plan an edit whose output is the checkpoint itself, with the data kept at its offsets.

    Raises:
        Unsupported: the format or the file system cannot do that.
    """
    format = formats.format_of(checkpoint)
    if format.in_place is None:
        raise Unsupported(f"{format.title} files cannot be edited in place", path=checkpoint.path, hint=A_COPY)
    for mark in checkpoint.files if format.folder else ():
        place, real = Path(mark.path), Path(os.path.realpath(mark.path))
        if place.is_symlink() and real.parent != Path(os.path.realpath(place.parent)):
            message = "it is a link to another folder; an in-place edit changes only files of the folder itself"
            raise Unsupported(message, path=mark.path, where=str(real), hint=A_COPY)
    from ckptfix.io.inplace.disk import insertable

    target = Path(target_of(checkpoint))
    folder = str(target if target.is_dir() else target.parent)
    return format.in_place(checkpoint, plan, cache(lambda: insertable(folder)))


def write(
    checkpoint: Checkpoint, plan: Plan, what: str, inputs: Mapping[str, FileStat], *, dry_run: bool
) -> tuple[FileChange, ...]:
    """Carry out a plan of `in_place`, and return the changes, file by file.

    Args:
        what: what was done, in a sentence.
        inputs: the stamps of the files from before they were read.

    Raises:
        DamagedFile: a file changed since it was read.
        CkptfixError: as `io.inplace.edit.carry_out`.
    """
    target = target_of(checkpoint)
    for file in plan.files:
        if not Path(file.path).exists():
            message = "the edit needs one more file, and an in-place edit creates none"
            raise Unsupported(message, path=file.path, hint=A_COPY)
    block = platform.block_size(target, preferred=True) or PAGE
    found = (_looked_at(file, block) for file in plan.files)
    changes = tuple(change for change in found if change is not None)
    for path, before in inputs.items():
        refuse_changed(path, stamp(path), before)
        forget(path)
    if changes and not dry_run:
        import secrets
        from datetime import UTC, datetime

        from ckptfix.io.inplace import edit
        from ckptfix.io.inplace.record import EditRecord

        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        record = EditRecord(secrets.token_hex(8), what, when, changes)
        edit.carry_out(target, record, keep=not _grows(checkpoint, changes))
    return changes


def _looked_at(planned: OutputFile, block: int) -> FileChange | None:
    """Compute the change that turns the existing file into `planned`; nothing is opened for writing."""
    from ckptfix.io.inplace.disk import RealFile
    from ckptfix.io.inplace.plan import change_of

    real = os.path.realpath(planned.path)
    for name in (real, str(Path(real).parent)):  # the journal is beside it
        if not os.access(name, os.W_OK):
            raise NotPermitted("cannot be written to", path=name, number=errno.EACCES)
    with closing(RealFile(real, change=False)) as file:
        return change_of(file, planned, block)


def _grows(checkpoint: Checkpoint, changes: tuple[FileChange, ...]) -> bool:
    """Return whether the file itself preserves its old state, as an archive does that grows at its end."""
    return archive_of(checkpoint) is not None and all(not change.old and not change.shift for change in changes)


def line_of(changes: tuple[FileChange, ...], *, dry_run: bool) -> str:
    """Describe in a sentence how an in-place edit changed the disk."""
    written = sum(len(data) for change in changes for _, data in change.new)
    blocks = sum(change.shift for change in changes)
    files = f" of {plural(len(changes), 'file')}" if len(changes) > 1 else ""
    moved = f", {blocks:,} bytes of blocks inserted before the data" if blocks else ""
    return f"{'would be changed' if dry_run else 'changed'} in place: {written:,} bytes{files} written{moved}"


def edits_of(checkpoint: Checkpoint, *, described: bool = False) -> Iterator[EditRecord]:
    """Yield the in-place edits that can be undone, the latest first.

    Args:
        described: compare the checkpoint before and after each edit at the end of a zip, which has no description.
    """
    target = target_of(checkpoint) if is_local(checkpoint.path) else ""
    if target and os.path.lexists(beside(target, UNDO)):
        from ckptfix.io.inplace.edit import remembered

        yield from reversed(remembered(target))
    yield from _appended(checkpoint, described=described)


def count_edits(checkpoint: Checkpoint) -> int:
    """Count the in-place edits that can be undone; 0 where that is unknown."""
    with suppress(CkptfixError, MemoryError):
        return sum(1 for _ in edits_of(checkpoint))
    return 0


def grown(checkpoint: Checkpoint) -> bool:
    """Return whether the file still holds the bytes that in-place edits replaced."""
    archive = archive_of(checkpoint)
    return archive is not None and next(earlier(checkpoint.path, archive.directory), None) is not None


def _appended(checkpoint: Checkpoint, *, described: bool) -> Iterator[EditRecord]:
    archive = archive_of(checkpoint)
    if archive is None:
        return
    if archive.directory.trailing:
        message = f"{archive.directory.trailing:,} bytes after the archive are not from an in-place edit"
        raise DamagedFile(message, path=checkpoint.path, hint="cut them off first; the file is unchanged")
    size = checkpoint.size
    for name, _, _ in earlier(checkpoint.path, archive.directory):
        from ckptfix.io.inplace.record import EditRecord, FileChange

        change = FileChange(Path(target_of(checkpoint)).name, name.length, size, (), ())
        what = _APPENDED
        if described:
            with suppress(CkptfixError):
                before = formats.open_checkpoint(name)
                what = _difference(checkpoint, before) or what
                checkpoint = before
        yield EditRecord(f"{name.length:x}", what, "", (change,))
        size = name.length


_APPENDED = "a new data.pkl and directory at its end"


def _same_shape(one: TensorEntry, other: TensorEntry) -> bool:
    return one.shape == other.shape


def _difference(after: Checkpoint, before: Checkpoint) -> str:
    """Return what distinguishes two versions of a checkpoint: keys, devices, dtypes; empty if none of them does."""
    old, new = ({entry.name: entry for entry in one.entries} for one in (before, after))
    gone, come = [name for name in old if name not in new], [name for name in new if name not in old]
    parts = []
    if gone and len(gone) == len(come):
        parts.append(f"renamed {plural(len(gone), 'key')}, as in {gone[0]} -> {come[0]}")
    elif gone or come:
        rows = (("left out", gone), ("added", come))
        parts += [f"{verb} {plural(len(names), 'key')}, as in {names[0]}" for verb, names in rows if names]
    kept = [(old[name], new[name]) for name in old if name in new]
    if gone and len(old) == len(new) and all(map(_same_shape, old.values(), new.values())):
        kept = list(zip(old.values(), new.values(), strict=True))
    for verb, kind in (("moved", "location"), ("cast", "dtype")):
        places = [(getattr(was.storage, kind, None), getattr(now.storage, kind, None)) for was, now in kept]
        if changed := [(was, now) for was, now in places if was != now]:
            was, now = changed[0]
            parts.append(f"{verb} {plural(len(changed), 'tensor')}, as from {was} to {now}")
    return "; ".join(parts)

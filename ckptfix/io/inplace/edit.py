"""In-place edits: all or nothing, and undone later on request.

An edit has these steps, and each is on the disk before the next begins: a journal with the old and the new bytes;
blocks inserted before the data; the new bytes; the record of the edit for `undo`; the removal of the journal, which
makes the edit count. While the journal exists, the file is in an intermediate state, and no command reads it.
`take_back` restores the state before the edit from any state: it reverts an unfinished edit, and completes an
unfinished undo.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

from ckptfix.commands import quoted
from ckptfix.errors import CkptfixError, DamagedFile, Refused, Unsupported, WriteFailed
from ckptfix.io.durable import Undisturbed
from ckptfix.io.inplace.disk import DISK, Disk, EditedFile, OpenedFiles, RealFile
from ckptfix.io.inplace.record import MOST, EditRecord, FileChange, decoded
from ckptfix.io.inplace.shifted import close_gap
from ckptfix.io.system import named
from ckptfix.io.unfinished_edits import JOURNAL, UNDO, beside, refuse_long_name, unfinished

SECTOR = 512
"""Bytes that a disk writes completely or not at all."""


def carry_out(target: str, record: EditRecord, *, keep: bool = True, disk: Disk = DISK) -> None:
    """Make the changes of `record` to the file or folder `target`: all of them, or none.

    Args:
        target: its real path.
        keep: remember the edit, beside the file; unnecessary if the file itself shows its earlier state.

    Raises:
        Refused: an edit of it has not finished, or a different program has it open or edits it.
        DamagedFile: it does not match the record's old state.
        WriteFailed: the system failed; the file is unchanged, unless the error says that `undo` is needed.
    """
    refuse_long_name(target)
    if len(record.encoded()) > MOST:
        message = f"the edit would keep more than {MOST:,} bytes of what it replaces"
        raise Unsupported(message, path=target, hint="write a copy: give OUT")
    journal = beside(target, JOURNAL)
    with _opened(target, record, disk) as pairs:
        for file, change in pairs:
            _expect(file, change.before, change.old)
        _alone(pairs)
        # Read the records before anything is changed, because they may be unreadable. Only those that led to the
        # present file are kept.
        records = _leading(past(target, disk), {change.name: file for file, change in pairs})
        with Undisturbed():
            _begin(disk, journal, record, target)
            try:
                with named(target):
                    for file, change in pairs:
                        _apply(file, change)
                    if keep:
                        _remember(disk, target, (*records, record))
                    disk.delete(journal)
            except BaseException as error:
                _give_up(error, disk, target, record, pairs)
                raise


def take_back(target: str, record: EditRecord, *, disk: Disk = DISK) -> None:
    """Restore the file or folder `target` to its state before the completed edit `record`. All or nothing.

    Raises:
        DamagedFile: it does not match the result of the edit.
        CkptfixError: as in `carry_out`.
    """
    journal = beside(target, JOURNAL)
    with _opened(target, record, disk) as pairs:
        for file, change in pairs:
            _expect(file, change.after, change.new)
        _alone(pairs)
        with Undisturbed():
            _begin(disk, journal, record, target)
            with _stuck(target):
                _end(disk, target, record, pairs)


def finish(target: str, *, disk: Disk = DISK) -> EditRecord | None:
    """Restore `target`, whose journal exists, to its state before the unfinished edit.

    Returns:
        The record of the edit; None if it had not begun.

    Raises:
        DamagedFile: a different program has written to it since.
        WriteFailed: the system failed; a second attempt is possible.
    """
    journal = beside(target, JOURNAL)
    with _way_out(journal), OpenedFiles(disk) as opened:
        opened.hold(target)
        # Load the journal only now: before the target is held, a running edit may still write its journal, or finish.
        data = disk.load(journal)
        if data is None:
            hint = "run `ckptfix undo --list` on it to see its state"
            raise Refused("the edit of another program has just ended", path=target, hint=hint)
        record = next(decoded(data), None)
        if record is None or data != record.encoded():
            with named(target):
                disk.delete(journal)  # it was incomplete when the edit was interrupted, so nothing was changed
            return None
        pairs = _files(opened, target, record)
        _alone(pairs)
        with Undisturbed(), _stuck(target):
            if disk.load(aside := f"{beside(target, UNDO)}.new") is not None:
                disk.delete(aside)
            _end(disk, target, record, pairs)
    return record


@contextmanager
def _way_out(journal: str) -> Iterator[None]:
    """Extend the error about a journal that does not fit its file: the hint tells how to use the file unchanged."""
    try:
        yield
    except DamagedFile as error:
        keep = f"to keep it unchanged, remove the journal: `rm {quoted(journal)}`"
        error.hint = f"{error.hint}; {keep}" if error.hint else keep
        raise


def discard_foreign(target: str, *, disk: Disk = DISK) -> bool:
    """Remove the journal of `target` if it belongs to a different file: nothing of its edit is in this one.

    A file that was written anew since has neither the bytes that the edit replaced nor those that it wrote. If it has
    any of them, or if the journal is incomplete, `finish` must handle it.

    Returns:
        Whether the journal was removed; the file is unchanged.
    """
    journal = beside(target, JOURNAL)
    with _way_out(journal), OpenedFiles(disk) as opened:
        opened.hold(target)
        data = disk.load(journal)
        record = next(decoded(data), None) if data is not None else None
        if record is None or data != record.encoded() or not record.changes:
            return False
        folder = os.path.isdir(target)
        if not folder and [change.name for change in record.changes] != [os.path.basename(target)]:
            return False  # the name shows a different file, although the bytes may still fit
        for change in record.changes:
            if folder and not os.path.exists(os.path.join(target, change.name)):
                continue
            file = opened.add(_inside(target, change.name)) if folder else opened.files[0]
            if not _is_other(file, change):
                return False
        with named(target):
            disk.delete(journal)
    return True


def _is_other(file: EditedFile, change: FileChange) -> bool:
    """Return whether the file has nothing that the edit replaced, moved or wrote."""
    if change.shift and change.probes:
        places = [(probe, probe.offset + moved) for probe in change.probes for moved in (0, change.shift)]
        return not any(probe.fits(file.read(at, probe.length)) for probe, at in places)
    low, high = sorted((change.before, change.after))
    possible = low <= file.size <= high
    for offset, data in (*change.old, *change.new):
        now = file.read(offset, len(data))
        for start in range(0, len(data), SECTOR):
            was = data[start : start + SECTOR]
            here = now[start : start + SECTOR]
            # A single repeated byte, such as padding, can be in any file. Bytes that a disk lost are zeros.
            if (here == was and len({*was}) > 1) or (possible and not any(here)):
                return False
    return bool(change.old or change.new) or not possible


def past(target: str, disk: Disk = DISK) -> tuple[EditRecord, ...]:
    """Return the edits of `target` that are remembered beside it, the oldest first."""
    return tuple(decoded(disk.load(beside(target, UNDO)) or b""))


def remembered(target: str) -> tuple[EditRecord, ...]:
    """Return the edits remembered beside `target` that can have led to its present state, the oldest first.

    A record contains the result of its edit: a record that does not fit the file belongs to a different file, which had
    its name.
    """
    records = past(target)
    if not records:
        return ()
    files: dict[str, EditedFile] = {}
    folder = target if os.path.isdir(target) else os.path.dirname(target)
    with ExitStack() as stack:
        for name in {change.name for record in records for change in record.changes}:
            with suppress(CkptfixError, OSError):
                files[name] = stack.enter_context(closing(RealFile(_inside(folder, name), change=False)))
        if folder != target:
            records = tuple(record for record in records if _names(record) == [os.path.basename(target)])
        there = [record for record in records if all(name in files for name in _names(record))]
        return _leading(there, files)


def refuse_changed(target: str, record: EditRecord) -> None:
    """Refuse a file or folder that does not match the result of the edit `record`; it stays unchanged.

    Raises:
        DamagedFile: it does not match.
    """
    with _opened(target, record, DISK) as pairs:
        for file, change in pairs:
            _expect(file, change.after, change.new)


def _names(record: EditRecord) -> list[str]:
    return [change.name for change in record.changes]


def _leading(records: Sequence[EditRecord], files: Mapping[str, EditedFile]) -> tuple[EditRecord, ...]:
    """Return the `records` up to the latest that fits the files, and before it, as many as have consecutive sizes."""
    found: list[EditRecord] = []
    sizes: dict[str, int] = {}
    for record in reversed(records):
        if not found:
            if not all(_left(files[change.name], change) for change in record.changes if change.name in files):
                continue
        elif any(sizes.get(change.name, change.after) != change.after for change in record.changes):
            break
        found.append(record)
        sizes |= {change.name: change.before for change in record.changes}
    return tuple(reversed(found))


def _left(file: EditedFile, change: FileChange) -> bool:
    """Return whether the file is the result of the edit."""
    return file.size == change.after and all(file.read(offset, len(data)) == data for offset, data in change.new)


def _remember(disk: Disk, target: str, records: Sequence[EditRecord]) -> None:
    place = beside(target, UNDO)
    kept = [record.encoded() for record in records]
    while sum(map(len, kept)) > MOST:
        del kept[0]  # the oldest edit is forgotten
    if kept:
        disk.replace(place, b"".join(kept), target)
    elif disk.load(place) is not None:
        disk.delete(place)


@contextmanager
def _opened(target: str, record: EditRecord, disk: Disk) -> Iterator[list[tuple[EditedFile, FileChange]]]:
    with OpenedFiles(disk) as opened:
        opened.hold(target)
        yield _files(opened, target, record)


def _files(opened: OpenedFiles, target: str, record: EditRecord) -> list[tuple[EditedFile, FileChange]]:
    """Open the files of a record, whose target is already held."""
    if not os.path.isdir(target):
        names = [change.name for change in record.changes]
        if names != [os.path.basename(target)]:
            raise DamagedFile("its record of an edit is about a different file", path=target, where=", ".join(names))
        return [(opened.files[0], record.changes[0])]
    return [(opened.add(_inside(target, change.name)), change) for change in record.changes]


def _inside(folder: str, name: str) -> str:
    """Return the path of a file that a journal names. Refuses a file outside the folder of the journal."""
    path = os.path.join(folder, name)
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder) or os.path.basename(name) != name:
        raise DamagedFile("its record of an edit names a file outside its folder", path=folder, where=name)
    return path


def _expect(file: EditedFile, size: int, content: Sequence[tuple[int, bytes]]) -> None:
    for offset, data in ((0, b""), *content):
        if file.size != size or file.read(offset, len(data)) != data:
            raise DamagedFile(
                "it has changed: its bytes do not match the record of the edit", path=file.name, offset=offset,
                hint="it was left unchanged",
            )  # fmt: skip


def _alone(pairs: Sequence[tuple[EditedFile, FileChange]]) -> None:
    for file, change in pairs:
        if change.shift:
            file.alone()


def _begin(disk: Disk, journal: str, record: EditRecord, target: str) -> None:
    try:
        with named(journal):
            disk.create(journal, record.encoded(), target)
    except WriteFailed as error:
        if isinstance(error.__cause__, FileExistsError):
            raise unfinished(target) from error
        raise


def _apply(file: EditedFile, change: FileChange) -> None:
    if change.shift:
        file.insert(change.shift)
        file.sync()
    for offset, data in change.new:
        file.write(offset, data)
    if change.after < change.before:
        file.resize(change.after)
    file.sync()
    if file.size != change.after:
        raise DamagedFile("another program wrote to it while it was edited", path=file.name)


def _restore(file: EditedFile, change: FileChange) -> None:
    if change.shift:
        close_gap(file, change, len(change.old[0][1]))
    for offset, data in change.old:
        file.write(offset, data)
    if change.before != change.after and file.size != change.before:
        file.resize(change.before)
    file.sync()


def _refuse_other(file: EditedFile, change: FileChange) -> None:
    """Refuse a file that the edit cannot have left, because restoring it would lose data of a different program.

    If the edit moves nothing, each sector is in its old or its new state. A sector beyond the file's old end may not
    have reached the disk, and is zeros then.
    """
    low, high = sorted((change.before, change.after))
    if file.size < low or (low < high < file.size):
        raise _others(file, f"it has {file.size:,} bytes, not {low:,} to {high:,}")
    before, after = dict(change.old), dict(change.new)
    for offset in before.keys() | after.keys():
        one, other = before.get(offset, b""), after.get(offset, b"")
        # Until the size has changed, the shorter one covers only the beginning of the longer one.
        known = (one + other[len(one) :], other + one[len(other) :], one, other)
        now = file.read(offset, max(map(len, known)))
        start = 0
        while start < len(now) and now not in known:
            end = (offset + start) // SECTOR * SECTOR + SECTOR - offset
            new = offset + start + len(now[start:end]) > change.before and not any(now[start:end])
            if not new and not any(_may_be(now[start:end], data[start:end]) for data in known):
                raise _others(file, f"the bytes at {offset + start:#x} are neither the old nor the new ones")
            start = end


def _may_be(now: bytes, known: bytes) -> bool:
    """Return whether a sector matches this content, whose end may be beyond the file's old end."""
    return now == known.ljust(len(now), b"\0") or now == known[: len(now)]


def _others(file: EditedFile, what: str) -> DamagedFile:
    return DamagedFile(
        f"another program wrote to it while it was edited: {what}", path=file.name,
        hint="it was left unchanged; use a backup to restore it",
    )  # fmt: skip


def _end(disk: Disk, target: str, record: EditRecord, pairs: Sequence[tuple[EditedFile, FileChange]]) -> None:
    for file, change in pairs:
        if not change.shift:
            _refuse_other(file, change)
    for file, change in pairs:
        _restore(file, change)
    records = past(target, disk)
    kept = tuple(other for other in records if other.id != record.id)
    if kept != records:
        _remember(disk, target, kept)
    disk.delete(beside(target, JOURNAL))


def _give_up(
    error: BaseException, disk: Disk, target: str, record: EditRecord, pairs: Sequence[tuple[EditedFile, FileChange]]
) -> None:
    """Undo an edit after an error; if that fails too, extend the error with the way to recover."""
    try:
        _end(disk, target, record, pairs)
    except (CkptfixError, OSError) as second:
        if isinstance(error, CkptfixError):
            reason = second.message if isinstance(second, CkptfixError) else second.strerror
            error.message += f"; undoing the edit failed too: {reason}"
            error.hint = unfinished(target).hint


@contextmanager
def _stuck(target: str) -> Iterator[None]:
    """Add the hint to an error inside that the operation can be repeated."""
    try:
        with named(target):
            yield
    except WriteFailed as error:
        error.hint = unfinished(target).hint
        raise

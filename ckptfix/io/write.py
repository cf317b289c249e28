"""Outputs that appear complete and durable, or not at all.

A file is written beside its destination under a name that nothing reads, ``.NAME.RANDOM.ckptfix-tmp``, synced, given
the mode of the file that it replaces, and renamed to its destination; then the folder is synced. Whatever stops it on
the way, the destination is unchanged and the temporary file is gone; only SIGKILL and a power cut can leave a temporary
file.

A replaced file can be kept under a fresh name, ``NAME.~1~``: it gets that name before the new file takes its old one,
so that NAME always exists, and the old content is always under one of the two names.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ckptfix.checkpoint import Plan
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.commands import quoted
from ckptfix.errors import (
    CkptfixError,
    IsFolder,
    NoSuchFolder,
    NotAFolder,
    NotPermitted,
    Unsupported,
    WouldOverwrite,
    WriteFailed,
    file_name,
)
from ckptfix.io import ranks
from ckptfix.io.background_checks import Checking
from ckptfix.io.blocks import shareable
from ckptfix.io.durable import COMPLETE, TRIES, Kept, Undisturbed, persist, sync_folder
from ckptfix.io.output import OutputWriter, Syncing
from ckptfix.io.read import Progress
from ckptfix.io.source import is_local, shares_open_files
from ckptfix.io.sources import Sources
from ckptfix.io.system import free_space, kind_of, named, write_failed
from ckptfix.io.write_log import record
from ckptfix.urls import Virtual, is_url


def _check_space(outputs: Iterable[OutputWriter]) -> None:
    """Refuse outputs that their file systems have no room for; blocks that are shared with a source need no room."""
    needed: dict[int, int] = {}
    beside: dict[int, list[OutputWriter]] = {}
    for output in outputs:
        folder = os.path.dirname(output.dest)
        with named(folder):
            device = os.stat(folder).st_dev
        needed[device] = needed.get(device, 0) + output.file.nbytes
        beside.setdefault(device, []).append(output)
        free = free_space(folder)
        if free is not None and needed[device] > free:
            needed[device] -= sum(shareable(one.file, os.path.dirname(one.dest)) for one in beside.pop(device))
            if needed[device] > free:
                raise write_failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), output.file.path, needed[device])


def _sync_folders(outputs: Iterable[OutputWriter]) -> None:
    for folder in {os.path.dirname(output.dest) for output in outputs}:
        sync_folder(folder)


def _publish(outputs: list[OutputWriter], overwrite: bool, keep_old: Callable[[str], bool] | None) -> None:
    """Rename all outputs to their destinations, or none; the last (an index) after the others' names are on the disk.

    Replaced files are restored from a second hard link. On a file system without links only the files that are kept can
    be restored.
    """
    *others, last = outputs
    done = False
    quiet, put_back = Undisturbed(), partial(_restore, outputs)
    try:
        for output in others:
            _keep(output, keep_old, alone=False)
            with named(output.file.path):
                output.publish(overwrite)
        _keep(last, keep_old, alone=not others)
        if others:
            _sync_folders(others)
        with quiet:
            with named(last.file.path):
                last.publish(overwrite)
            done = True
            _settle(outputs)
    except BaseException as error:
        if not done:
            with quiet:
                persist(put_back)
                _tell_stuck(outputs, error)
        raise


def _keep(output: OutputWriter, keep_old: Callable[[str], bool] | None, *, alone: bool) -> None:
    """Make a second name for the file that `output` replaces: permanently, or, unless `alone`, until all is done."""
    with named(output.file.path, 0 if output.old is None else output.old.st_size):
        if output.old is not None and keep_old is not None and keep_old(output.dest):
            output.kept = Kept(output.file.path, output.dest, output.copy)
            output.kept.keep(output.old)
        elif not alone:
            output.keep_old()


def _settle(outputs: Iterable[OutputWriter]) -> None:
    """Flush the names of all outputs to the disk, and record them."""
    try:
        _sync_folders(outputs)
    except WriteFailed as error:
        kept = "".join(f"; {output.kept.line}" for output in outputs if output.kept)
        error.message = f"{COMPLETE}{error.message}{kept}"
        raise
    for output in outputs:
        kept = f"; {output.kept.line}" if output.kept else ""
        record(f"{output.file.path} is complete: it was written before that{kept}")


def _restore(outputs: Sequence[OutputWriter]) -> None:
    """Undo the renames."""
    for output in reversed(outputs):
        output.restore()


def _tell_stuck(outputs: Iterable[OutputWriter], error: BaseException) -> None:
    """Report outputs that could not be undone, and keep the names that hold their old content."""
    for line in filter(None, [output.stuck() for output in outputs]):
        if isinstance(error, CkptfixError):
            error.message += f"; {line}"
        else:
            record(line)


def _clean_up(checking: Checking, syncing: Syncing, sources: Sources, outputs: Iterable[OutputWriter]) -> None:
    checking.stop()
    syncing.close()
    sources.close()
    for output in outputs:
        output.discard()


def check_destination(
    dest: str | os.PathLike[str],
    sources: Iterable[str | os.PathLike[str]] = (),
    *,
    overwrite: bool,
    folder: bool = False,
) -> None:
    """Refuse a destination that `write_plan` cannot write, or must not overwrite.

    A symbolic link counts as the file that it points to. A `Virtual` name is never written, and no disk and no store is
    asked about it.

    Args:
        folder: the output is a folder of several files.

    Raises:
        WouldOverwrite: it is one of `sources` (by name, symlink or hard link), or a folder that contains one of them,
            or it exists without `overwrite`.
        Unsupported: it is of a different kind: a folder, a pipe, a device; or a file where a folder is needed.
        WriteFailed: its folder does not exist or cannot be written to.
    """
    path = file_name(dest, "the output")
    if isinstance(path, Virtual):
        return
    if is_url(path):
        from ckptfix.io.remote import write as remote

        remote.check_destination(path, sources, overwrite=overwrite, folder=folder)
        return
    status = _status(path)
    if status is None:
        if not os.path.basename(path) and not folder:
            raise Unsupported("names a folder, not a file", path=path)
        around = os.path.dirname(os.path.realpath(path))
        if not os.path.isdir(around):
            raise NoSuchFolder(
                "its folder does not exist", path=path, hint=f"mkdir -p {quoted(around)}", number=errno.ENOENT
            )
    elif not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        kind = IsFolder if is_folder else NotAFolder if folder and stat.S_ISREG(status.st_mode) else Unsupported
        raise kind(f"is {kind_of(status.st_mode)}, not {'a folder' if folder else 'a file'}", path=path)
    else:
        local = [*filter(is_local, map(file_name, sources))]
        for source in local:
            there = _status(source)
            if there is not None and os.path.samestat(status, there):
                raise WouldOverwrite("the output is the input", path=path, hint="choose a different output name")
        for source in local if folder else ():
            if os.path.realpath(source).startswith(os.path.join(os.path.realpath(path), "")):
                raise WouldOverwrite(f"the input is in it: {source}", path=path, hint="choose a different output name")
        if not overwrite:
            raise WouldOverwrite("exists", path=path, hint="choose a different name, or add --force to replace it")
        around = os.path.dirname(os.path.realpath(path))
    if not os.access(around, os.W_OK | os.X_OK):
        raise NotPermitted("its folder cannot be written to", path=path, number=errno.EACCES)


def _status(path: str) -> os.stat_result | None:
    """Return the status of the file behind `path`; None if there is no such file."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise write_failed(error, path) from error


@shares_open_files()
def write_plan(
    plan: Plan,
    *,
    overwrite: bool = False,
    keep_old: Callable[[str], bool] | None = None,
    inputs: Mapping[str, FileStat] | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Write the files of `plan`, in order: all complete and on the disk, or none.

    Every file is complete and synced before the first takes its name. A new file gets the mode and, where permitted,
    the owner of the file that it replaces; `sources.given_up` reports what is lost. `progress` counts the bytes of
    all files. A signal that comes when the last file takes its name waits until all is done, and `written` includes
    that file.

    Args:
        overwrite: replace files that exist.
        keep_old: keep those of them whose path it accepts: as ``PATH.~1~``, or with the next unused number, beside the
            file that a symbolic link points to. The old content always has one of the two names.

        inputs: files that the plan was made from, with their state before they were read. A new file can be read by
            those who can read all of them and its sources.

    Returns:
        path of the plan -> the name under which the old file is kept.

    Raises:
        WouldOverwrite, Unsupported: as in `check_destination`; also when a file appears meanwhile, or the plan has one
            file twice.
        Truncated, DamagedFile: a source lacks bytes that the plan expects, or does not match its checksum.
        WriteFailed: no space (checked before the first byte), an I/O error, or a source that changed meanwhile.
    """
    if not plan.files:
        return {}
    team = ranks.current()
    if team is not None and team.rank:
        raise ranks.Watching(0)
    if is_url(plan.files[0].path):
        from ckptfix.io.remote import write as remote

        return remote.write_plan(plan, overwrite=overwrite, keep_old=keep_old, inputs=inputs, progress=progress)
    sources = Sources(plan, inputs or {})
    for file in plan.files:
        check_destination(file.path, sources.stamps, overwrite=overwrite)
    outputs = [OutputWriter(file, _status(file.path), os.path.realpath(file.path)) for file in plan.files]
    for number, output in enumerate(outputs):
        if any(output.dest == other.dest for other in outputs[:number]):
            raise WouldOverwrite("the plan writes it twice", path=output.file.path)
    _check_space(outputs)
    total = plan.nbytes
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    checking, syncing = Checking(plan), Syncing()
    clean_up = partial(_clean_up, checking, syncing, sources, outputs)
    quiet, tries = Undisturbed(), iter(range(TRIES))
    try:
        for output in outputs:
            with named(output.file.path, output.file.nbytes):
                output.write(sources, advance, checking, syncing, wait=output is outputs[-1])
        syncing.wait()
        checking.finish()
        sources.check_unchanged()
        _publish(outputs, overwrite, keep_old)
    finally:
        stopped: BaseException | None = None
        for _ in tries:
            try:
                with quiet:
                    persist(clean_up)
            except (MemoryError, SystemError):  # even a call needs memory
                continue
            except BaseException as error:  # a signal, perhaps before anything was done
                stopped = error
                continue
            break
        if stopped is not None:
            raise stopped
    return {output.file.path: output.kept.spelled for output in outputs if output.kept is not None}

"""Folders of files that appear complete and durable, or not at all.

A folder is written beside its destination under a name that nothing reads, ``.NAME.RANDOM.ckptfix-tmp``, and renamed
once all of its files are on the disk. A folder that is replaced is swapped with it in one step where the system can do
that (``renameat2`` with RENAME_EXCHANGE: Linux 3.15 and most of its file systems). Elsewhere the old folder is moved
aside first, and moved back if the rename fails. The old folder is removed if it holds nothing but a checkpoint, and
kept otherwise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count

from ckptfix import platform
from ckptfix.checkpoint import ByteRange, OutputFile, Plan
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import CkptfixError, WouldOverwrite, WriteFailed
from ckptfix.io import background_checks, ranks
from ckptfix.io.durable import COMPLETE, Undisturbed, identity, kept_line, persist, sync_folder
from ckptfix.io.open_files import forget_inside
from ckptfix.io.output import TEMP_SUFFIX
from ckptfix.io.ranks.shares import digest, shares
from ckptfix.io.read import Progress
from ckptfix.io.source import forget
from ckptfix.io.system import named
from ckptfix.io.write import write_plan
from ckptfix.io.write_log import record, recorded
from ckptfix.urls import is_url

"""Error numbers of a system or a file system that does not support such a rename."""


def write_folder(
    plan: Plan,
    dest: str,
    *,
    overwrite: bool = False,
    keep_old: bool = False,
    own: Callable[[str], Collection[str]] = lambda folder: (),
    link: bool = False,
    inputs: Mapping[str, FileStat] | None = None,
    progress: Progress | None = None,
) -> str | None:
    """Write the files of `plan`, which are all below the folder `dest`, which ends up either complete or unchanged.

    Args:
        overwrite: replace a folder that exists; an empty one is always replaced.
        keep_old: keep the replaced folder as ``DEST.~1~``, or with the next unused number.
        own: the files of a folder, by path, that can be removed with it. If it holds other files, it is kept as well.
        link: give a file of the plan that is a whole file of the input a second name instead of a copy, where the file
            system supports it; an edit of one is then an edit of the other.
        inputs, progress: as in `write_plan`.

    Returns:
        The name under which the old folder is kept; None if there was no folder, or if it was removed.

    Raises:
        WouldOverwrite: `dest` exists, without `overwrite`.
        CkptfixError: as in `write_plan`.
    """
    team = ranks.current()
    if is_url(dest):
        from ckptfix.io.remote import write as remote

        remote.write_folder(
            plan, dest, overwrite=overwrite, keep_old=keep_old, own=own, inputs=inputs, progress=progress
        )
        return None
    with named(dest):
        if team is None:
            kept = _write(plan, dest, overwrite, keep_old, own, link, inputs, progress)
        else:
            kept = _write_with(team, plan, dest, overwrite, keep_old, own, link, inputs, progress)
    if team is None or team.rank == 0:
        try:
            sync_folder(os.path.dirname(os.path.realpath(dest)))
        except WriteFailed as error:
            error.message = f"{COMPLETE}{error.message}{_line(dest, kept)}"
            raise
    return kept


def _write(
    plan: Plan,
    dest: str,
    overwrite: bool,
    keep_old: bool,
    own: Callable[[str], Collection[str]],
    link: bool,
    inputs: Mapping[str, FileStat] | None,
    progress: Progress | None,
) -> str | None:
    real, there = _free(dest, overwrite)
    temp = _temp(real)
    quiet = Undisturbed()
    ours: tuple[int, int] | None = None
    try:
        os.mkdir(temp)
        ours = identity(temp)
        # Files that are written into it are not yet the output.
        with _spelled(temp, dest), recorded():
            write_plan(_placed(plan, dest, temp, link), inputs=inputs, progress=progress)
            for folder, _, _ in os.walk(temp):
                sync_folder(folder)
        stays = there and (keep_old or not _only(real, own))
        with quiet:
            kept = _named(temp, real, dest, there, stays)
    except BaseException:
        with quiet:
            persist(partial(_discard, temp, ours))
        raise
    return kept


def _write_with(
    team: ranks.Team,
    plan: Plan,
    dest: str,
    overwrite: bool,
    keep_old: bool,
    own: Callable[[str], Collection[str]],
    link: bool,
    inputs: Mapping[str, FileStat] | None,
    progress: Progress | None,
) -> str | None:
    """Write the folder like `_write`, with several ranks.

    Each rank writes its share, and rank 0 writes the last file when the others are on the disk.
    """
    word = team.folder()
    first = team.rank == 0
    there = False
    real = os.path.realpath(dest)
    temp = _temp(real)
    ours: tuple[int, int] | None = None
    quiet = Undisturbed()

    def made() -> str:
        nonlocal there, ours, real
        real, there = _free(dest, overwrite)
        team.say(f"{word}/making", temp)
        os.mkdir(temp)
        ours = identity(temp)
        return os.path.basename(temp)

    def found() -> None:
        """Find the folder that rank 0 may have made without reporting it."""
        nonlocal temp, ours
        with suppress(Exception):
            if ours is None and 0 in team.gone and team.said(f"{word}/naming") is None:
                made = team.said(f"{word}/making") or temp
                temp = os.path.join(os.path.dirname(real), os.path.basename(made))
                ours = identity(temp)

    try:
        team.agree(f"{word}/plan", digest(plan, dest, inputs or {}))
        temp = os.path.join(os.path.dirname(real), team.told(f"{word}/temp", made))
        ours = identity(temp)
        with _spelled(temp, dest), recorded(), ranks.joined(None):
            share = shares(plan, team.size)[team.rank]
            if not share.files:
                background_checks.run(share.checks)
            write_plan(_placed(share, dest, temp, link), inputs=inputs, progress=team.checked(progress))
            team.check()
            team.say(f"{word}/written/{team.rank}")
            if first:
                team.all_said(f"{word}/written")
                write_plan(_placed(replace(plan, files=plan.files[-1:], checks=()), dest, temp, link), inputs=inputs)
                for folder, _, _ in os.walk(temp):
                    sync_folder(folder)
        if not first:
            kept = team.wait(f"{word}/done")
            forget(dest)
            return kept or None
        stays = there and (keep_old or not _only(real, own))
        with quiet:
            team.say(f"{word}/naming")
            name = _named(temp, real, dest, there, stays)
            team.say(f"{word}/done", name or "")
        return name
    except BaseException as raised:
        with quiet:
            error = team.give_up(raised)
            found()
            if ours is not None and team.cleans():
                persist(partial(_discard, temp, ours))
            if ours is not None and isinstance(error, ranks.RankFailed) and _is(real, ours):
                error.hint = f"{dest} is complete: it was written before that"
        raise error from error.__cause__


def remove_abandoned(team: ranks.Team) -> None:
    """Remove what ranks that are gone wrote of the next folder, if this rank has not begun to write that folder.

    A rank may be stopped while it still plans: then neither `_write_together` nor its counterpart for buckets has run.
    """
    if not team.gone or not team.cleans():
        return
    word = f"folder{team.begun + 1}"
    with suppress(Exception):
        temp = team.said(f"{word}/making")
        if temp is not None and 0 in team.gone and team.said(f"{word}/naming") is None:
            persist(partial(_discard, temp, None))
        for rank in team.gone:
            if team.said(f"{word}/began/{rank}/0") is not None:
                from ckptfix.io.remote.rank_folder import take_away

                take_away(team, word, rank)


def _is(path: str, ours: tuple[int, int]) -> bool:
    with suppress(OSError):
        return identity(path) == ours
    return False


def _free(dest: str, overwrite: bool) -> tuple[str, bool]:
    """Return the real path of `dest`, and whether it is a folder that can be replaced."""
    real = os.path.realpath(dest)
    there = os.path.lexists(real)
    if there and not overwrite and os.listdir(real):
        raise WouldOverwrite("exists", path=dest, hint="choose a different name, or add --force to replace it")
    return real, there


def _temp(real: str) -> str:
    parent, name = os.path.split(real)
    return os.path.join(parent, f".{name[:40]}.{os.urandom(8).hex()}{TEMP_SUFFIX}")


def _named(temp: str, real: str, dest: str, there: bool, stays: bool) -> str | None:
    """Rename `temp` to its final name, and return the name under which the old folder is kept."""
    for folder in (temp, dest, real):
        forget_inside(folder)  # Windows renames no folder that holds an open file
    kept = _publish(temp, real, there, stays)
    kept = None if kept is None else os.path.join(os.path.dirname(dest), os.path.basename(kept))
    forget(dest)
    record(f"{dest} is complete: it was written before that{_line(dest, kept)}")
    return kept


def _discard(temp: str, ours: tuple[int, int] | None) -> None:
    """Remove `temp`, but never the folder that was swapped with it."""
    with suppress(OSError):
        if ours is None or identity(temp) == ours:
            forget_inside(temp)
            _remove(temp)


def _remove(folder: str) -> None:
    """Remove a folder as far as possible."""
    with suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)


def _line(dest: str, kept: str | None) -> str:
    return "" if kept is None else f"; {kept_line(dest, kept)}"


@contextmanager
def _spelled(temp: str, dest: str) -> Iterator[None]:
    """Rewrite the paths of errors about files in `temp` to those in `dest`."""
    try:
        yield
    except CkptfixError as error:
        error.message = error.message.removeprefix(COMPLETE)
        if error.path is not None and str(error.path).startswith(temp):
            error.path = dest + str(error.path)[len(temp) :]
        raise


def _placed(plan: Plan, dest: str, temp: str, link: bool) -> Plan:
    """Return the plan for the folder `temp`, without the files that have become links."""
    files = []
    for file in plan.files:
        path = os.path.join(temp, os.path.relpath(file.path, dest))
        _made(os.path.dirname(path), temp)
        if not (link and _linked(file, path)):
            files.append(replace(file, path=path))
    return replace(plan, files=tuple(files))


def _made(folder: str, temp: str) -> None:
    """Make a folder inside `temp`, but never `temp` itself, which others may have removed."""
    if folder != temp and not os.path.isdir(folder):
        _made(os.path.dirname(folder), temp)
        with suppress(FileExistsError):
            os.mkdir(folder)


def _linked(file: OutputFile, path: str) -> bool:
    """Try to make `path` a second name of `file`, if it is a whole existing file, and return whether that worked."""
    whole = file.segments[0] if len(file.segments) == 1 else None
    if not isinstance(whole, ByteRange) or whole.offset or is_url(whole.path):
        return False
    if os.stat(whole.path).st_size != whole.length:
        return False
    with suppress(OSError):
        os.link(os.path.realpath(whole.path), path)
        return True
    return False


def _only(folder: str, own: Callable[[str], Collection[str]]) -> bool:
    """Return whether `folder` holds only files that can be removed with it."""
    if not os.listdir(folder):
        return True
    may_go = {os.path.realpath(path) for path in own(folder)}
    for above, folders, files in os.walk(folder):
        if any(os.path.islink(os.path.join(above, name)) for name in folders):
            return False
        if any(os.path.realpath(os.path.join(above, name)) not in may_go for name in files):
            return False
    return True


def _publish(temp: str, dest: str, there: bool, stays: bool) -> str | None:
    """Rename `temp` to `dest`, and return the name under which the old folder is kept."""
    if not there:
        if not _renamed(temp, dest, platform.NO_REPLACE):
            if os.path.lexists(dest):
                raise WouldOverwrite("appeared while it was being written", path=dest)
            os.rename(temp, dest)
        return None
    if _renamed(temp, dest, platform.EXCHANGE):
        old = temp
    else:
        old = f"{temp}.old"
        os.rename(dest, old)
    try:
        if old != temp:
            os.rename(temp, dest)
        kept = _kept(old, dest) if stays else None
    except BaseException:
        if old == temp:
            _renamed(temp, dest, platform.EXCHANGE)
        else:
            if os.path.lexists(dest):
                os.rename(dest, temp)
            os.rename(old, dest)
        raise
    if kept is None:
        _remove(old)
    return kept


def _kept(old: str, dest: str) -> str:
    """Rename the folder `old` to an unused backup name beside `dest`, and return that name."""
    for number in count(1):
        kept = f"{dest}.~{number}~"
        if not os.path.lexists(kept):
            os.rename(old, kept)
            return kept
    raise AssertionError


def _renamed(old: str, new: str, flags: int) -> bool:
    """Call ``renameat2`` with these flags, and return whether it was done; False if this system does not support it.

    Raises:
        OSError: the system supports it, and it failed.
    """
    try:
        return platform.renamed(old, new, flags)
    except FileExistsError:
        raise WouldOverwrite("appeared while it was being written", path=new) from None

"""Locks against simultaneous runs of one plan, which are refused unless they do different shards of it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ckptfix import platform
from ckptfix.errors import Refused
from ckptfix.fleet.states import PlanShard
from ckptfix.io.system import named

_CANNOT = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""Error numbers of a file system without locks. Jobs can safely be done twice, so the run continues."""


@contextlib.contextmanager
def locked(folder: str, plan: str, shard: PlanShard | None) -> Iterator[bool]:
    """Keep other runs from doing the same jobs inside. Yields True if no other run does any job of the plan.

    Raises:
        Refused: a different run does the same jobs.
        WriteFailed: the folder cannot be written to.
    """
    with named(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:

        def take(name: str, *, shared: bool = False) -> bool:
            with named(folder):
                fd = os.open(f"{folder}/{name}", platform.TO_LOCK, 0o666)
            held.callback(os.close, fd)
            try:
                platform.lock(fd, shared=shared)
            except OSError as error:
                if error.errno in _CANNOT:
                    return True
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                return False
            return True

        if shard is None:
            if not take("run.lock"):
                raise _busy(plan, "another `ckptfix fleet run` of this plan, or of one of its shards, is running")
            yield True
            return
        if not take("run.lock", shared=True):
            raise _busy(plan, "another `ckptfix fleet run` of the whole plan is running")
        mine = f"of-{shard.count}.lock"
        for other in sorted(Path(folder).glob("of-*.lock")):
            if other.name != mine and not _free(other):
                parts = other.stem.removeprefix("of-")
                message = f"a run of one of {parts} shards of this plan is running, but this run has {shard.count}"
                raise _busy(plan, message)
        take(mine, shared=True)
        if not take(f"shard-{shard.index}-of-{shard.count}.lock"):
            raise _busy(plan, f"another run of shard {shard.index}/{shard.count} of this plan is running")
        yield False


def _free(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR)
    except OSError:
        return True
    try:
        platform.lock(fd)
    except OSError as error:
        return error.errno in _CANNOT
    finally:
        os.close(fd)
    return True


def _busy(plan: str, message: str) -> Refused:
    return Refused(message, path=plan, hint="wait until it has ended; `ckptfix fleet status` shows its progress")

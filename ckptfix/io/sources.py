"""The files that a plan reads and replaces.

Of those that it reads: what they were at its start, who may read them, and the one that is read now. Of those that it
replaces: what they lose, and whether more users may read them than the inputs. A replaced file keeps its owner and
mode. Its other hard links keep the old content, and its extended attributes are not carried over, for they may
describe the old content (a checksum, an origin): both are reported.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from ckptfix.checkpoint import ByteRange, Plan
from ckptfix.checkpoint.stamp import Stamp
from ckptfix.commands import quoted, verbatim
from ckptfix.errors import WriteFailed
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.io.read import read_from
from ckptfix.io.source import Source, is_local, now, open_source, stamp, truncated
from ckptfix.io.system import named


def ranges(plan: Plan) -> Iterator[ByteRange]:
    """Everything that `plan` reads."""
    for file in plan.files:
        for segment in file.segments:
            yield from read_from(segment)


def permissions(paths: Iterable[str]) -> int:
    """Mode bits that a file made of the files at `paths` may have: those that all of them have, and its owner's."""
    bits = 0o666
    for path in filter(is_local, paths):
        with named(path):
            bits &= os.stat(path).st_mode
    return bits | 0o600


class Sources:
    """The files that a plan reads, and others that it was made from: `inputs`, as they were before."""

    def __init__(self, plan: Plan, inputs: Mapping[str, Stamp]) -> None:
        self._open: Source | None = None
        self.stamps = dict(inputs)
        for where in ranges(plan):
            if where.path not in self.stamps:
                self.stamps[where.path] = stamp(where.path)
            size = self.stamps[where.path].size
            if where.offset < 0 or where.length < 0 or where.end > size:
                raise truncated(where, size)
        self.permissions = permissions(self.stamps)

    def __getitem__(self, path: str) -> Source:
        """The source `path`, open until another is asked for."""
        if self._open is None or self._open.name != path:
            self.close()
            self._open = open_source(path)
        return self._open

    def check_unchanged(self) -> None:
        for path, before in self.stamps.items():
            if not now(path).same(before):
                raise WriteFailed(
                    "changed while it was being read", path=path, hint="try again when nothing writes to it"
                )

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
NAMESPACES = ("user.", "system.posix_acl_access")
"""Extended attributes that a user set. Others, such as SELinux's, the system gives to each file by its place."""


def given_up(plan: Plan, inputs: Iterable[str]) -> tuple[Finding, ...]:
    """What the files that `plan` would replace lose, and which of them more may read than its inputs.

    Args:
        inputs: files that it was made from, beside those that it copies from.
    """
    allowed = permissions({*inputs, *(where.path for where in ranges(plan))})
    return tuple(finding for file in plan.files for finding in _of_file(file.path, allowed))


def _of_file(path: str, allowed: int) -> Iterator[Finding]:
    try:
        status = os.stat(path)
    except OSError:  # there is none; what else is wrong the writer finds out
        return
    mode = stat.S_IMODE(status.st_mode)
    if mode & OTHERS_READ & ~allowed:
        message = f"it keeps its mode {mode:04o}, and more may read it than the input, of mode {allowed:04o}"
        remedy = verbatim(f"chmod {mode & (allowed | ~OTHERS_READ):o} {quoted(path)}")
        yield found("more-open", message, where=path, fix=remedy)
    if status.st_nlink > 1:
        links = "1 other hard link" if status.st_nlink == 2 else f"{status.st_nlink - 1} other hard links"
        hold = "holds" if status.st_nlink == 2 else "hold"
        yield found("links-left", f"the old file had {links}, which still {hold} the old content", where=path)
    if names := _attributes(path):
        message = f"extended attributes of the old file were not kept: {', '.join(names)}"
        yield found("attributes-lost", message, where=path)


def _attributes(path: str) -> list[str]:
    if not hasattr(os, "listxattr"):
        return []
    with suppress(OSError):
        return sorted(name for name in os.listxattr(path) if name.startswith(NAMESPACES))
    return []

"""The files that a plan reads and replaces.

For the files that a plan reads, this module keeps their state at the start, their permissions, and the one source that
is open. For the files that a plan replaces, it reports the properties that they lose, and whether more users can read
them than the inputs. A replaced file keeps its owner and mode. Its other hard links keep the old content, and its
extended attributes are not copied, because they may describe the old content (a checksum, an origin): both are
reported.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from ckptfix.checkpoint import ByteRange, Plan
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.commands import quoted, verbatim
from ckptfix.errors import WriteFailed
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.io.read import read_from
from ckptfix.io.source import Source, is_local, now, open_source, stamp, truncated
from ckptfix.io.system import named


def ranges(plan: Plan) -> Iterator[ByteRange]:
    """Yield every range that `plan` reads."""
    for file in plan.files:
        for segment in file.segments:
            yield from read_from(segment)


def permissions(paths: Iterable[str]) -> int:
    """Return the mode bits for a file made from the files at `paths`: the bits that all have, and the owner's."""
    bits = 0o666
    for path in filter(is_local, paths):
        with named(path):
            bits &= os.stat(path).st_mode
    return bits | 0o600


class Sources:
    """The files that a plan reads, and the other files that it was made from: `inputs`, with their earlier states."""

    def __init__(self, plan: Plan, inputs: Mapping[str, FileStat]) -> None:
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
        """Return the source `path`, which stays open until a different one is requested."""
        if self._open is None or self._open.name != path:
            self.close()
            self._open = open_source(path)
        return self._open

    def check_unchanged(self) -> None:
        for path, before in self.stamps.items():
            if not now(path).same(before):
                raise WriteFailed(
                    "changed while it was being read", path=path, hint="try again when no program writes to it"
                )

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
NAMESPACES = ("user.", "system.posix_acl_access")
"""Prefixes of extended attributes that a user set. The system assigns others, such as SELinux's, according to the
file's place."""


def given_up(plan: Plan, inputs: Iterable[str]) -> tuple[Finding, ...]:
    """Return findings about properties that replaced files lose, and files that more users can read than the inputs.

    Args:
        inputs: files that it was made from, besides those that it copies from.
    """
    allowed = permissions({*inputs, *(where.path for where in ranges(plan))})
    return tuple(finding for file in plan.files for finding in _of_file(file.path, allowed))


def _of_file(path: str, allowed: int) -> Iterator[Finding]:
    try:
        status = os.stat(path)
    except OSError:  # there is no old file; the writer detects any other problem
        return
    mode = stat.S_IMODE(status.st_mode)
    if mode & OTHERS_READ & ~allowed:
        message = f"it keeps its mode {mode:04o}: more users can read it than the input, whose mode is {allowed:04o}"
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

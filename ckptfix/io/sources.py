"""The files that a plan reads: what they were at its start, who may read them, and the one that is read now."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from ckptfix.checkpoint import ByteRange, Plan
from ckptfix.checkpoint.stamp import Stamp
from ckptfix.errors import WriteFailed
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

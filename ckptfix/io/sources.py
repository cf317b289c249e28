"""The files that a plan reads: what they were at its start, who may read them, and the few of them that are open."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from ckptfix.checkpoint import ByteRange, Plan
from ckptfix.checkpoint.stamp import Stamp
from ckptfix.errors import WriteFailed
from ckptfix.io.read import Reader, read_from, stamp, truncated
from ckptfix.io.system import named

OPEN_SOURCES = 16
"""Source files that are kept open."""


def ranges(plan: Plan) -> Iterator[ByteRange]:
    """Everything that `plan` reads."""
    for file in plan.files:
        for segment in file.segments:
            yield from read_from(segment)


def permissions(paths: Iterable[str]) -> int:
    """Mode bits that a file made of the files at `paths` may have: those that all of them have, and its owner's."""
    bits = 0o666
    for path in paths:
        with named(path):
            bits &= os.stat(path).st_mode
    return bits | 0o600


class Sources:
    """The files that a plan reads, and others that it was made from: `inputs`, as they were before."""

    def __init__(self, plan: Plan, inputs: Mapping[str, Stamp]) -> None:
        self._open: dict[str, Reader] = {}
        self.stamps = dict(inputs)
        for where in ranges(plan):
            if where.path not in self.stamps:
                self.stamps[where.path] = stamp(where.path)
            size = self.stamps[where.path].size
            if where.offset < 0 or where.length < 0 or where.end > size:
                raise truncated(where, size)
        self.permissions = permissions(self.stamps)

    def __getitem__(self, path: str) -> Reader:
        reader = self._open.pop(path, None)
        if reader is None:
            if len(self._open) >= OPEN_SOURCES:
                self._open.pop(next(iter(self._open))).close()
            reader = Reader(path)
        self._open[path] = reader
        return reader

    def check_unchanged(self) -> None:
        for path, before in self.stamps.items():
            if not stamp(path).same(before):
                raise WriteFailed(
                    "changed while it was being read", path=path, hint="try again when nothing writes to it"
                )

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()

"""What will be written, and is not yet."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptfix.checkpoint.places import Data, Segment, joined, segment_length
from ckptfix.findings.row import Finding


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be written: `segments` in order, `nbytes` together.

    Attributes:
        along: a copy of what only lies in the folder of the checkpoint, and is no file of it.
    """

    path: str
    segments: tuple[Segment, ...] = field(repr=False)
    nbytes: int
    along: bool = False

    @classmethod
    def of(cls, path: str | os.PathLike[str], segments: Iterable[Segment], *, along: bool = False) -> OutputFile:
        """An OutputFile of these segments; empty ones are left out, adjacent ranges of a file joined."""
        kept = tuple(joined(segments))
        return cls(os.fspath(path), kept, sum(map(segment_length, kept)), along)


@dataclass(frozen=True, slots=True)
class Check:
    """Bytes of an input that have to have the checksum that the input states for them."""

    where: str
    data: Data
    crc32: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to be written, and nothing yet written. Files are written in order, an index last.

    `checks` come first: of bytes that go where their checksum cannot follow. `holds` is what its ranges need to exist.
    """

    files: tuple[OutputFile, ...]
    findings: tuple[Finding, ...] = ()
    checks: tuple[Check, ...] = ()
    holds: object = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

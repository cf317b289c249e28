"""The plan of an output: everything that is to be written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import field

from ckptfix.checkpoint.byte_ranges import Data, Segment, joined, segment_length, split
from ckptfix.dataclass import dataclass
from ckptfix.findings.row import Finding


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be written: the sequence of its `segments`, `nbytes` in total.

    Attributes:
        along: whether it is a copy of a file that is in the checkpoint's folder without being part of the checkpoint.
    """

    path: str
    segments: tuple[Segment, ...] = field(repr=False)
    nbytes: int
    along: bool = False

    @classmethod
    def of(
        cls, path: str | os.PathLike[str], segments: Iterable[Segment], *, along: bool = False, join: bool = True
    ) -> OutputFile:
        """Return an OutputFile of these segments, without empty ones, and with adjacent ranges of a file joined.

        Args:
            join: join adjacent segments; without it, literal bytes that occur many times stay one object.
        """
        kept = tuple(joined(segments) if join else split(segments))
        return cls(os.fspath(path), kept, sum(map(segment_length, kept)), along)

    @property
    def has_data(self) -> bool:
        """True if data of tensors is in it, and not only new text: an index has none."""
        return any(not isinstance(segment, bytes) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class RangeCheck:
    """Bytes of an input that must match the checksum that the input states for them."""

    where: str
    data: Data
    crc32: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete plan of an output: nothing of it is written yet. Files are written in order, an index last.

    `checks` come first: they verify bytes whose checksums the output does not keep. `holds` keeps objects alive that
    the ranges need.
    """

    files: tuple[OutputFile, ...]
    findings: tuple[Finding, ...] = ()
    checks: tuple[RangeCheck, ...] = ()
    holds: object = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

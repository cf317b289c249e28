"""A file that no format of ours claims, as the rows of `kinds` look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptfix.errors import CkptfixError
from ckptfix.io.source import open_source
from ckptfix.urls import as_path


class Answer(NamedTuple):
    """What a file is.

    Attributes:
        id: of the finding that doctor reports for it; a row of `ops.catalogue_containers`.
        what: it in one sentence, which may quote the file.
        hint: what to do about it; None where there is nothing.
    """

    id: str
    what: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class File:
    """A path, its first bytes and its size."""

    path: str
    head: bytes
    size: int

    @property
    def name(self) -> str:
        return as_path(self.path).name

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`; none where they cannot be read."""
        try:
            with open_source(self.path) as reader:
                return reader.read(offset, min(length, max(reader.size - offset, 0)))
        except CkptfixError:
            return b""

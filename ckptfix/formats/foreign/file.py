"""A file in no known format, as the probes in `kinds` see it."""

from __future__ import annotations

from typing import NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.io.source import open_source
from ckptfix.urls import as_path

INSTALL = "install the package that reads it: pip install 'ckptfix[{}]'"
"""The hint for a file of a format that ckptfix reads with the package of an extra."""


class Answer(NamedTuple):
    """The identification of a file.

    Attributes:
        id: the id of the finding that doctor reports for it; a row of `ops.catalogue_containers`.
        what: a description in one sentence, which may quote the file.
        hint: what to do about it; None where nothing helps.
    """

    id: str
    what: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class UnknownFile:
    """A path, the first bytes of its file, and the size."""

    path: str
    head: bytes
    size: int

    @property
    def name(self) -> str:
        return as_path(self.path).name

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes at `offset`; no bytes if they cannot be read."""
        try:
            with open_source(self.path) as reader:
                return reader.read(offset, min(length, max(reader.size - offset, 0)))
        except CkptfixError:
            return b""

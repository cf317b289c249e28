"""The contract of a format module, and what torch's two pickled formats share.

A format module has these names, and tests/contract runs the same suite over all of them:

- ``NAME``, ``TITLE``, ``SUFFIXES``: its name in commands, its name in text, its files' suffixes.
- ``score(path, head, size) -> int``: how surely the content is this format; 0 for not at all.
- ``read(path) -> Checkpoint``: forgiving; builds what it can and notes the rest as findings.
- ``check(path) -> Iterator[Finding]``: strict; judges, and names all that is wrong.
- ``plan_edit(checkpoint, edits, dest) -> Plan``: everything else byte for byte.
- ``plan_write(entries, dest, *, metadata=None) -> Plan``: a fresh file that holds one state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ckptfix.checkpoint import Checkpoint, Edit, Plan, TensorEntry
from ckptfix.errors import UnknownFormat
from ckptfix.findings.row import Finding


class Format(Protocol):
    """The type of a format module."""

    @property
    def NAME(self) -> str: ...  # noqa: N802

    @property
    def TITLE(self) -> str: ...  # noqa: N802

    @property
    def SUFFIXES(self) -> tuple[str, ...]: ...  # noqa: N802

    def score(self, path: str, head: bytes, size: int) -> int: ...

    def read(self, path: str) -> Checkpoint: ...

    def check(self, path: str) -> Iterator[Finding]: ...

    def plan_edit(self, checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan: ...

    def plan_write(
        self, entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None
    ) -> Plan: ...


def unknown(path: str, head: bytes, size: int) -> UnknownFormat:
    """The error for a file or folder that is none of our formats: what it is instead, and what to do."""
    from ckptfix.formats.foreign import kinds as foreign

    kind, what, hint = foreign.describe(path, head, size)
    return UnknownFormat(what, kind=kind, path=path, hint=hint)

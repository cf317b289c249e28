"""A finding about a file, and the row of the catalogue that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptfix.findings.load_errors import LoadError

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `check` or an operation noticed.

    `fix` is a command or an instruction in words.

    `table.found` makes them. `about` is the class, function or tensor that `message` is about, for texts about several
    findings at once.
    """

    id: str
    severity: Severity
    where: str
    message: str
    offset: int | None = None
    fix: str | None = None
    about: str = ""

    @property
    def line(self) -> str:
        """The finding as one line: ``warning: a/b: the record is damaged``."""
        return ": ".join(filter(None, self.cells))

    @property
    def cells(self) -> tuple[str, str, str]:
        """The severity, the place and the message."""
        return self.severity, self.where, self.message


@dataclass(frozen=True, slots=True)
class FindingKind:
    """A row of the catalogue of findings.

    Attributes:
        id: the identifier, which never changes.
        severity: ``"error"``: some bytes are lost or wrong, or no loader accepts the file. ``"warning"``: a load may
            fail or give wrong results because of it. ``"info"``: good to know.
        title: a summary in one line, shown where a finding has no message of its own.
        story: the cause, the symptoms that a user sees, and what helps; for ``doctor --explain``.
        errors: the load errors that it explains.
        fix: a command with fields in braces (see `table.remedy`), or an instruction; None where nothing helps.
    """

    id: str
    severity: Severity
    title: str
    story: str
    errors: tuple[LoadError, ...] = ()
    fix: str | None = None

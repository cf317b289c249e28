"""What can be said of a file: a finding, and the row of the table that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptfix.findings.load_errors import LoadError

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `check` or an operation noticed; `fix` is a command or an instruction.

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
        """``warning: a/b: it is damaged``."""
        return ": ".join(filter(None, self.cells))

    @property
    def cells(self) -> tuple[str, str, str]:
        """The severity, the place, and what is the matter."""
        return self.severity, self.where, self.message


@dataclass(frozen=True, slots=True)
class Entry:
    """A finding as such.

    Attributes:
        id: its name, which never changes.
        severity: ``"error"``: some bytes are lost or wrong, or no loader takes the file. ``"warning"``: a load may
            fail or go wrong because of it. ``"info"``: good to know.
        title: it in one sentence, where a finding says nothing more exact.
        story: where it comes from, what the user sees, and what helps; for ``doctor --explain``.
        errors: the load errors that it explains.
        fix: a command with fields in braces (see `table.remedy`), or an instruction; None where nothing helps.
    """

    id: str
    severity: Severity
    title: str
    story: str
    errors: tuple[LoadError, ...] = ()
    fix: str | None = None

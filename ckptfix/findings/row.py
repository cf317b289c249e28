"""A finding about a file, and the row of the catalogue that it belongs to."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ckptfix.dataclass import dataclass
from ckptfix.findings.load_errors import LoadError
from ckptfix.findings.steps import Fix, Invocation, Steps, shell_line

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `check` or an operation noticed.

    `steps` are the commands that fix it, and `fix` is what helps in one line: these commands for a shell, or an
    instruction in words. Where both are None, the remedy is that of the row.

    `table.found` makes them. `about` is the class, function or tensor that `message` is about, for texts about several
    findings at once. `runs` is the call, with its arguments, that loading the file would run.
    """

    id: str
    severity: Severity
    where: str
    message: str
    offset: int | None = None
    fix: str | None = None
    about: str = ""
    steps: Steps | None = None
    runs: str = ""

    def fixed_by(self, fix: Fix | None) -> Finding:
        """Return the same finding with a different remedy; None for that of its row, ``""`` for none at all."""
        text, steps = in_words(fix)
        return replace(self, fix=text, steps=steps)

    @property
    def line(self) -> str:
        """The finding as one line: ``warning: a/b: the record is damaged``."""
        return ": ".join(filter(None, self.cells))

    @property
    def cells(self) -> tuple[str, str, str]:
        """The severity, the place and the message."""
        return self.severity, self.where, self.message


def in_words(fix: Fix | None) -> tuple[str | None, Steps | None]:
    """Return the `fix` and the `steps` of a finding with this remedy; steps without files have no line for a shell."""
    if not isinstance(fix, tuple):
        return fix, None
    whole = all(step.source for step in fix)
    lines = [shell_line(Invocation(step, step.source, step.dest).argv()) for step in fix if whole]
    return " && ".join(lines) or None, fix


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
        fix: steps, or an instruction with fields in braces (see `table.remedy_of`); None where nothing helps.
    """

    id: str
    severity: Severity
    title: str
    story: str
    errors: tuple[LoadError, ...] = ()
    fix: Fix | None = None

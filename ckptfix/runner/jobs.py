"""What is done on many inputs: the outcome of each, and the summary of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOSSES, TROUBLE = 3, 2
"""Exit codes of a command that is done with losses, and of one that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a command on one input.

    Attributes:
        code: its exit code.
        done: what was done, in sentences.
        text: everything else for stdout.
        notes: lines for stderr.
        documents: the results for JSON, without the fields that every object has.
        row: as `Console.row`.
        usage: why the options fit no input at all.
        written: one sentence for each file written.
    """

    code: int
    done: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    row: tuple[str, ...] | None = None
    usage: str | None = None
    written: tuple[str, ...] = ()


def unfinished(input: str, message: str) -> Outcome:
    """Return the outcome for an input whose process ended before it could return one."""
    error = {
        "type": "ChildProcessError", "message": message, "path": input, "where": None, "offset": None, "hint": None
    }  # fmt: skip
    return Outcome(code=TROUBLE, notes=(message,), documents=({"path": input, "error": error},))


@dataclass(slots=True)
class Summary:
    """The summary of many outcomes.

    Attributes:
        codes: exit code -> the number of inputs with it.
    """

    codes: dict[int, int] = field(default_factory=dict)

    def count(self, code: int) -> None:
        """Count an input whose command ended with this exit code."""
        self.codes[code] = self.codes.get(code, 0) + 1

    @property
    def ended(self) -> int:
        return sum(self.codes.values())

    @property
    def failed(self) -> int:
        return self.codes.get(TROUBLE, 0)

    @property
    def done(self) -> int:
        """The inputs whose command did not fail, whatever it found or lost."""
        return self.ended - self.failed

    @property
    def losses(self) -> int:
        return self.codes.get(LOSSES, 0)

    @property
    def exit_code(self) -> int:
        """2 if an input failed, else 3 if one has losses, else 1 if one has findings, else 0."""
        return next((code for code in (TROUBLE, LOSSES) if self.codes.get(code)), max(self.codes, default=0))

"""Jobs: one command on one input, its outcome, and the summary of many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ckptfix.dataclass import dataclass

LOSSES, TROUBLE = 3, 2
"""Exit codes of a command that is done with losses, and of one that failed."""


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """The display settings for results, as in `Console`; `rows` means that lists are cut."""

    json: bool
    quiet: bool
    width: int
    rows: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command on one input.

    Attributes:
        command: its name in the table of commands.
        input: the file or folder that it works on; None if it names no input; a fleet refuses such a job.
        outputs: the files or folders that it writes; for an edit in place, the input.
        options: all parameters of the command's function, with the input and the output.
        words: the command line, for pages and records that name it.
        record: the outputs keep a record of `words`.
    """

    command: str
    input: str | None
    outputs: tuple[str, ...]
    options: Mapping[str, Any]
    words: tuple[str, ...]
    record: bool
    settings: ConsoleSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        code: the exit code of its command.
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


def unfinished(input: str | None, message: str) -> Outcome:
    """Return the outcome of a job whose process ended before it could return one."""
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

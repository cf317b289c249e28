"""A command for one input, run on many: one loop, one list, one exit code for all commands.

The output of the command for each input is recorded, and becomes its line in the list, or its object in JSON Lines.
An input that fails does not stop the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

import click

from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import describe, failure, said
from ckptfix.cli.shared.terminal_width import cut
from ckptfix.errors import printable
from ckptfix.io.write_log import recorded
from ckptfix.runner.jobs import TROUBLE, Outcome, Summary
from ckptfix.urls import as_path, is_url
from ckptfix.words import plural

if TYPE_CHECKING:
    from ckptfix.cli.shared.colors import Meaning
    from ckptfix.runner.inputs import Input

Step = Callable[[int, int], None]
"""Called with (bytes done, total bytes) of one input."""


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """The display settings for results, as in `Console`; `rows` means that lists are cut."""

    json: bool
    quiet: bool
    width: int
    rows: bool


class OutcomeReport(Protocol):
    """The display of the outcomes."""

    def add(self, name: str, outcome: Outcome) -> bool:
        """Show one outcome, in the order of the inputs. Return whether this also shows its notes."""

    def end(self, summary: Summary) -> None:
        """Show the summary for all inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCommand:
    """A command, and the inputs to run it on.

    Attributes:
        callback: the command as a function.
        argument: the parameter for the input.
        params: the other parameters, except the output.
        jobs: how many processes to use.
        out_dir: the folder for the outputs; None for a command without outputs.
    """

    callback: Callable[..., int]
    argument: str
    params: Mapping[str, Any]
    inputs: Sequence[Input]
    report: Callable[[Console, BatchCommand], OutcomeReport]
    jobs: int = 1
    out_dir: str | None = None

    def params_of(self, input: Input) -> dict[str, Any]:
        """Return all parameters of the command, for one input."""
        params = {**self.params, self.argument: input.path}
        return params if self.out_dir is None else {**params, "dest": input.dest}


class Recording(Console):
    """A console that records its output."""

    def __init__(self, settings: ConsoleSettings, step: Step | None) -> None:
        super().__init__()
        self.json, self.quiet = settings.json, settings.quiet
        self._settings, self._step = settings, step
        self.sentences: list[str] = []
        self.text: list[str] = []
        self.notes: list[str] = []
        self.documents: list[Mapping[str, object]] = []

    def done(self, lines: Sequence[str], details: Sequence[str] = ()) -> None:
        self.sentences += [line for line in lines if not line.startswith(" ")]

    def note(self, text: str, meaning: Meaning | None = None, label: int | None = None) -> None:
        self.notes.append(text)

    def emit(self, document: Mapping[str, object], exit_code: int, *, line: bool = False) -> None:
        self.documents.append(document)

    def _print(
        self, text: str, stream: IO[str], meaning: Meaning | None = None, label: int | None = None
    ) -> None:
        self.text.append(text)

    @property
    def width(self) -> int:
        return self._settings.width

    def rows(self, asked: int | None, default: int) -> int:
        return asked if asked is not None else default if self._settings.rows else 0

    @contextlib.contextmanager
    def progress(self, at_end: str = "") -> Iterator[Step | None]:
        yield self._step


def one(callback: Callable[..., int], argument: str, params: Mapping[str, Any], console: Recording) -> Outcome:
    """Run a command on one input: errors become its outcome, signals pass through.

    Files it wrote count as unreported until the caller calls `io.write_log.reported`.
    """
    written: list[str] = []
    try:
        with recorded(inside=True) as written, click.Context(click.Command("one"), obj=console) as ctx:
            if params.get("dest") and not is_url(params["dest"]):
                as_path(params["dest"]).parent.mkdir(parents=True, exist_ok=True)
            code = ctx.invoke(callback, **params)
    except click.ClickException as error:
        return Outcome(code=TROUBLE, usage=error.format_message())
    except Exception as error:
        document = describe(error)
        notes = [*console.notes, *said(error, document), *map(printable, written)]
        failed = {**document, "written": written} if written else document
        documents = (failure(failed, params[argument]),)
        return Outcome(code=TROUBLE, notes=tuple(notes), documents=documents, written=tuple(written))
    return Outcome(
        code=code,
        done=tuple(console.sentences),
        text=tuple(console.text),
        notes=tuple(console.notes),
        documents=tuple(console.documents),
        row=console.row,
        written=tuple(written),
    )


class LineReport:
    """The result lines, one for each input, and a summary."""

    def __init__(self, console: Console, job: BatchCommand) -> None:
        self._console = console
        self._job = job
        self._names = max((len(printable(input.path)) for input in job.inputs), default=0)

    def add(self, name: str, outcome: Outcome) -> bool:
        width = self._console.width
        if outcome.done:
            names = min(self._names, width // 2) if width else self._names
            what = printable("; ".join(outcome.done))
            room = width - names - 2 if width else len(what)
            what = what if len(what) <= room else f"{what[: room - 3]}..."
            self._console.say(f"{cut(name, names).ljust(names)}  {what}")
        for line in outcome.text:
            self._console.say(line)
        return False

    def end(self, summary: Summary) -> None:
        planned = self._job.params.get("dry_run") or self._job.params.get("check_only")
        what = "would be written" if planned else "written"
        parts = [f"{summary.done:,} {what} to {printable(self._job.out_dir or os.curdir)}"]
        parts += [f"{summary.losses:,} of them with losses"] if summary.losses else []
        parts += [f"{summary.failed:,} failed"] if summary.failed else []
        self._console.prose(f"{plural(summary.ended, 'file')}: {', '.join(parts)}.")


class FullText:
    """The full output for each input, one below the other, with a title if the output does not name the input."""

    def __init__(self, console: Console, job: BatchCommand) -> None:
        self._console = console
        self._titled = bool(job.params.get("tensors"))
        self._first = True

    def add(self, name: str, outcome: Outcome) -> bool:
        if outcome.text:
            if not self._first:
                self._console.say()
            self._first = False
            if self._titled:
                self._console.say(f"{name}:")
        for line in outcome.text:
            self._console.say(line)
        return False

    def end(self, summary: Summary) -> None:
        if summary.failed:
            self._console.note(f"{plural(summary.ended, 'file')}: {summary.failed:,} failed.")

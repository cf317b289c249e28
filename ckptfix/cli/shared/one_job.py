"""A job: its command runs in this process, and the output is its outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING

import click

from ckptfix.cli.shared.console import GROUP, Console
from ckptfix.cli.shared.exits import describe, failure, said
from ckptfix.errors import printable
from ckptfix.io.write_log import recorded
from ckptfix.runner.jobs import TROUBLE, ConsoleSettings, Job, Outcome
from ckptfix.urls import as_path, is_url

if TYPE_CHECKING:
    from ckptfix.cli.shared.colors import Meaning

Step = Callable[[int, int], None]
"""Called with (bytes done, total bytes) of one input."""


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
    def progress(self, at_end: str = "", phases: Sequence[str] = ()) -> Iterator[Step | None]:
        yield self._step


def perform(job: Job, step: Step | None = None) -> Outcome:
    """Run the command of a job: errors become its outcome, signals pass through.

    Files it wrote count as unreported until the caller calls `io.write_log.reported`.
    """
    console = Recording(job.settings, step)
    console.command, console.arguments = job.command, job.words
    written: list[str] = []
    try:
        with contextlib.ExitStack() as stack:
            written = stack.enter_context(recorded(inside=True))
            ctx = stack.enter_context(click.Context(click.Command("one"), obj=console))
            if job.record:
                from ckptfix.ops.record import recording

                stack.enter_context(recording("ckptfix", *job.words))
            for name in job.outputs:
                if name != job.input and not is_url(name):
                    as_path(name).parent.mkdir(parents=True, exist_ok=True)
            code = ctx.invoke(callback_of(job.command), **job.options)
    except click.ClickException as error:
        return Outcome(code=TROUBLE, usage=error.format_message())
    except Exception as error:
        document = describe(error)
        notes = [*console.notes, *said(error, document), *map(printable, written)]
        failed = {**document, "written": written} if written else document
        documents = (failure(failed, job.input),)
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


def callback_of(name: str) -> Callable[..., int]:
    """Return the function of the command `name`."""
    group = GROUP.get()
    command = group.get_command(click.Context(group), name)
    assert command is not None and command.callback is not None
    return command.callback

"""The jobs of one command line, done one after the other or several at a time, and shown as they finish.

The output of the command for each input is recorded, and becomes its line in the list, or its object in JSON Lines.
An input that fails does not stop the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.one_job import Step, perform
from ckptfix.cli.shared.terminal_width import cut
from ckptfix.dataclass import dataclass
from ckptfix.errors import printable
from ckptfix.io.durable import Undisturbed
from ckptfix.io.write_log import reported
from ckptfix.platform import Stopped
from ckptfix.runner.jobs import Job, Outcome, Summary, unfinished
from ckptfix.urls import as_path, is_url
from ckptfix.words import plural


class OutcomeReport(Protocol):
    """The display of the outcomes."""

    def add(self, name: str, outcome: Outcome) -> bool:
        """Show one outcome, in the order of the inputs. Return whether this also shows its notes."""

    def end(self, summary: Summary) -> None:
        """Show the summary for all inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The jobs of one command line.

    Attributes:
        options: the options that all jobs have.
        processes: how many jobs run at a time.
        out_dir: the folder for the outputs; None for a command without outputs.
    """

    jobs: Sequence[Job]
    options: Mapping[str, Any]
    report: Callable[[Console, Batch], OutcomeReport]
    processes: int = 1
    out_dir: str | None = None


def run(batch: Batch, console: Console) -> int:
    """Do the jobs, show their outcomes in the order of the inputs, and return the exit code of all."""
    report = batch.report(console, batch)
    summary = Summary()
    waiting: dict[int, Outcome] = {}  # finished, but an earlier input is not
    quiet = Undisturbed()
    try:
        with _folders(batch), console.progress(phases=()) as bar, contextlib.closing(_each(batch, bar)) as done:
            for number, outcome in done:
                if outcome.usage is not None:
                    raise click.UsageError(outcome.usage)
                with quiet:
                    waiting[number] = outcome
                    reported(outcome.written)
                    while (ready := waiting.pop(summary.ended, None)) is not None:
                        _show(console, report, batch.jobs[summary.ended], ready)
                        summary.count(ready.code)
    except Stopped:
        for number, outcome in sorted(waiting.items()):
            _show(console, report, batch.jobs[number], outcome)
        console.note(f"{summary.ended + len(waiting):,} of {plural(len(batch.jobs), 'input')} done")
        raise
    report.end(summary)
    return summary.exit_code


def _show(console: Console, report: OutcomeReport, job: Job, outcome: Outcome) -> None:
    name = printable(job.input)
    if not report.add(name, outcome):
        for note in outcome.notes:
            console.note(note if note.startswith((f"{name}: ", " ", "hint: ")) else f"{name}: {note}")
    if console.json:
        for document in outcome.documents:
            console.emit(document, outcome.code, line=True)


@contextlib.contextmanager
def _folders(batch: Batch) -> Iterator[None]:
    """Remove the new folders for outputs at the end, if they are empty."""
    new: set[Path] = set()
    outputs = [] if batch.out_dir is None else [name for job in batch.jobs for name in job.outputs if not is_url(name)]
    for folder in {as_path(name).parent for name in outputs}:
        while folder not in new and not folder.exists():
            new.add(folder)
            folder = folder.parent
    try:
        yield
    finally:
        for folder in sorted(new, reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _each(batch: Batch, bar: Step | None) -> Generator[tuple[int, Outcome]]:
    """Yield (number of the job, outcome) as the jobs finish."""
    from ckptfix.runner.engines import Here, Processes, ProcessLost, carry_out

    total = _Total(batch, bar) if bar is not None else None
    count = min(batch.processes, len(batch.jobs))
    step = None if total is None else total.step
    engine = Processes(count, step) if count > 1 else Here(step)
    numbers = {id(job): number for number, job in enumerate(batch.jobs)}
    left = iter(batch.jobs)
    with contextlib.closing(carry_out(lambda: next(left, None), perform, engine)) as ended:
        for job, pending in ended:
            try:
                outcome = pending.result()
            except ProcessLost as error:
                outcome = unfinished(job.input, f"the worker process {error}")
            if total is not None:
                total.step(job, 1, 1)
            yield numbers[id(job)], outcome


class _Total:
    """The progress of the whole batch, in bytes of the inputs."""

    def __init__(self, batch: Batch, bar: Step) -> None:
        self._sizes = {id(job): _size(job.input) for job in batch.jobs}
        self._parts: dict[int, int] = {}
        self._all, self._done = sum(self._sizes.values()), 0
        self._bar = bar

    def step(self, job: Job, done: int, total: int) -> None:
        size = self._sizes[id(job)]
        part = size * min(done, total) // total if total else size
        self._done += part - self._parts.get(id(job), 0)
        self._parts[id(job)] = part
        self._bar(self._done, self._all)


def _size(path: str | None) -> int:
    assert path is not None
    with contextlib.suppress(OSError):
        if not as_path(path).is_dir():
            return as_path(path).stat().st_size
        return sum(inner.stat().st_size for inner in as_path(path).rglob("*") if inner.is_file())
    return 0


class LineReport:
    """The result lines, one for each input, and a summary."""

    def __init__(self, console: Console, batch: Batch) -> None:
        self._console = console
        self._batch = batch
        self._names = max((len(printable(job.input)) for job in batch.jobs), default=0)

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
        planned = self._batch.options.get("dry_run") or self._batch.options.get("check_only")
        what = "would be written" if planned else "written"
        parts = [f"{summary.done:,} {what} to {printable(self._batch.out_dir or os.curdir)}"]
        parts += [f"{summary.losses:,} of them with losses"] if summary.losses else []
        parts += [f"{summary.failed:,} failed"] if summary.failed else []
        self._console.prose(f"{plural(summary.ended, 'file')}: {', '.join(parts)}.")


class FullText:
    """The full output for each input, one below the other, with a title if the output does not name the input."""

    def __init__(self, console: Console, batch: Batch) -> None:
        self._console = console
        self._titled = bool(batch.options.get("tensors"))
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

"""Running a job: its inputs one after the other or several at a time, shown as they finish."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import click

from ckptfix.cli.shared.batch import BatchCommand, ConsoleSettings, OutcomeReport, Recording, Step, one
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import Stopped
from ckptfix.errors import printable
from ckptfix.io.durable import Undisturbed
from ckptfix.io.write_log import reported
from ckptfix.runner.jobs import Outcome, Summary
from ckptfix.urls import as_path, is_url
from ckptfix.words import plural


def run(job: BatchCommand, console: Console) -> int:
    """Run a job, show it, and return the exit code: 2 if an input failed, else 3 if one has losses, else 1, else 0."""
    settings = ConsoleSettings(console.json, console.quiet, console.width, bool(console.rows(None, 1)))
    report = job.report(console, job)
    summary = Summary()
    waiting: dict[int, Outcome] = {}  # finished, but an earlier input is not
    quiet = Undisturbed()
    try:
        with _folders(job), console.progress() as bar, contextlib.closing(_each(job, settings, bar)) as done:
            for number, outcome in done:
                if outcome.usage is not None:
                    raise click.UsageError(outcome.usage)
                with quiet:
                    waiting[number] = outcome
                    reported(outcome.written)
                    while (ready := waiting.pop(summary.ended, None)) is not None:
                        _show(console, report, job.inputs[summary.ended].path, ready)
                        summary.count(ready.code)
    except Stopped:
        for number, outcome in sorted(waiting.items()):
            _show(console, report, job.inputs[number].path, outcome)
        console.note(f"{summary.ended + len(waiting):,} of {plural(len(job.inputs), 'input')} done")
        raise
    report.end(summary)
    return summary.exit_code


def _show(console: Console, report: OutcomeReport, path: str, outcome: Outcome) -> None:
    name = printable(path)
    if not report.add(name, outcome):
        for note in outcome.notes:
            console.note(note if note.startswith((f"{name}: ", " ", "hint: ")) else f"{name}: {note}")
    if console.json:
        for document in outcome.documents:
            console.emit(document, outcome.code, line=True)


@contextlib.contextmanager
def _folders(job: BatchCommand) -> Iterator[None]:
    """Remove the new folders for outputs at the end, if they are empty."""
    new: set[Path] = set()
    for folder in {as_path(input.dest).parent for input in job.inputs if input.dest and not is_url(input.dest)}:
        while folder not in new and not folder.exists():
            new.add(folder)
            folder = folder.parent
    try:
        yield
    finally:
        for folder in sorted(new, reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _each(job: BatchCommand, settings: ConsoleSettings, bar: Step | None) -> Generator[tuple[int, Outcome]]:
    """Yield (number of the input, outcome) as the inputs finish."""
    total = _Total(job, bar) if bar is not None else None
    count = min(job.jobs, len(job.inputs))
    if count > 1:
        from ckptfix.cli.shared.processes import by_processes

        yield from by_processes(job, settings, count, None if total is None else total.step)
        return
    for number, input in enumerate(job.inputs):
        step = None if total is None else partial(total.step, number)
        yield number, one(job.callback, job.argument, job.params_of(input), Recording(settings, step))
        if total is not None:
            total.step(number, 1, 1)


class _Total:
    """The progress of the whole job, in bytes of the inputs."""

    def __init__(self, job: BatchCommand, bar: Step) -> None:
        self._sizes = [_size(input.path) for input in job.inputs]
        self._parts: dict[int, int] = {}
        self._all, self._done = sum(self._sizes), 0
        self._bar = bar

    def step(self, number: int, done: int, total: int) -> None:
        part = self._sizes[number] * min(done, total) // total if total else self._sizes[number]
        self._done += part - self._parts.get(number, 0)
        self._parts[number] = part
        self._bar(self._done, self._all)


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        if not as_path(path).is_dir():
            return as_path(path).stat().st_size
        return sum(inner.stat().st_size for inner in as_path(path).rglob("*") if inner.is_file())
    return 0

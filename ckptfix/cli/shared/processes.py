"""The inputs of a job in several processes.

Reading a checkpoint is work for one core, so threads would wait for each other. Processes are spawned, not forked:
they inherit no state, whatever threads this process has. A signal reaches only this process, which then stops the
others and waits until they have cleaned up.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from ckptfix.cli.shared.exits import Stopped, signals_raise
from ckptfix.cli.shared.one_job import Step, perform
from ckptfix.io.durable import Undisturbed
from ckptfix.io.write_log import record, recorded, reported
from ckptfix.runner.jobs import Job, Outcome, unfinished
from ckptfix.urls import secrets, share

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

STEPS = 50
"""Number of progress reports that a process sends for one input."""

_BLOCKED = {signal.SIGINT, signal.SIGHUP}


class _Worker:
    """A process, and the input that it works on."""

    def __init__(self, watched: bool) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, perform, watched, secrets()), daemon=True
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.number = -1

    def give(self, number: int, job: Job) -> None:
        self.number = number
        with suppress(OSError):  # the process died; the next read from it shows that
            self.connection.send(job)


def by_processes(
    jobs: Sequence[Job], count: int, step: Callable[[int, int, int], None] | None
) -> Generator[tuple[int, Outcome]]:
    """Yield (number of the input, outcome) as the inputs finish; `count` of them run at a time.

    Args:
        step: called with the number of an input, the bytes done, and the total bytes.
    """
    left = iter(enumerate(jobs))
    workers: list[_Worker] = []

    def start() -> None:
        for number, job in left:
            worker = _Worker(step is not None)
            workers.append(worker)
            worker.give(number, job)
            return

    quiet = Undisturbed()
    try:
        for _ in range(count):
            start()
        while workers:
            ready = wait([worker.connection for worker in workers])
            with quiet:  # show what was received, even if a signal comes
                for worker in [worker for worker in workers if worker.connection in ready]:
                    try:
                        kind, *values = worker.connection.recv()
                    except (EOFError, OSError):
                        workers.remove(worker)
                        yield worker.number, _died(worker, jobs[worker.number])
                        start()
                        continue
                    if kind == "step":
                        if step is not None:
                            step(worker.number, *values)
                        continue
                    done = worker.number
                    following = next(left, None)
                    if following is None:
                        workers.remove(worker)
                        _end(worker)
                    else:
                        worker.give(*following)
                    if step is not None:
                        step(done, 1, 1)
                    yield done, values[0]
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            _end(worker)


def _end(worker: _Worker) -> None:
    """Wait for a process to end, and record the files that it wrote and did not report."""
    with suppress(EOFError, OSError):
        worker.connection.send(None)
    with suppress(EOFError, OSError):
        while True:
            kind, *values = worker.connection.recv()
            for line in values[0].written if kind == "outcome" else values if kind == "written" else ():
                record(line)
    worker.process.join()
    worker.connection.close()


def _died(worker: _Worker, job: Job) -> Outcome:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return unfinished(job.input, f"the worker process {how}")


def _serve(
    connection: Connection, perform: Callable[[Job, Step | None], Outcome], watched: bool, hidden: dict[str, str]
) -> None:
    """Run the worker loop: receive jobs and send outcomes, until None comes or the other side is gone."""
    share(hidden)
    quiet = Undisturbed()
    with suppress(Stopped, EOFError, OSError), signals_raise(), recorded() as written:
        try:
            while (job := connection.recv()) is not None:
                outcome = perform(job, _steps(connection) if watched else None)
                with quiet:
                    connection.send(("outcome", outcome))
                    reported(outcome.written)
        finally:
            if written:
                connection.send(("written", *written))


def _steps(connection: Connection) -> Step:
    said = 0

    def step(done: int, total: int) -> None:
        nonlocal said
        if total and done * STEPS // total > said:
            said = done * STEPS // total
            connection.send(("step", done, total))

    return step

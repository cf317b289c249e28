"""Background work: it runs in a thread that ends with the program, and that can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ckptfix.errors import CkptfixError
from ckptfix.io.read import Progress
from ckptfix.io.threads import Flag

Result = TypeVar("Result")

Post = Callable[[Callable[[], Any]], Any]
"""Calls a function in the thread of the screen."""


class Cancelled(Exception):
    """The job was stopped."""


class BackgroundJob:
    """A job that runs, or has run.

    Attributes:
        stopped: set when it should end.
        done, total: bytes read so far, and total bytes; 0 if unknown.
    """

    def __init__(self) -> None:
        self.stopped = Flag()
        self.done = 0
        self.total = 0

    def stop(self) -> None:
        """Stop the job; its result is no longer wanted."""
        self.stopped.set()

    def progress(self, done: int, total: int) -> None:
        """Record the progress.

        Raises:
            Cancelled: the job was stopped.
        """
        if self.stopped.is_set():
            raise Cancelled
        self.done, self.total = done, total


def start(
    call: Callable[[Progress], Result],
    done: Callable[[Result], None],
    failed: Callable[[Exception], None],
    post: Post,
) -> BackgroundJob:
    """Run `call` in a thread, and pass its result to `done` or `failed` in the thread of the screen.

    A job that was stopped calls neither. The thread does not keep the program alive.
    """
    job = BackgroundJob()

    def finish(then: Callable[[], None]) -> None:
        if not job.stopped.is_set():
            post(then)

    def run() -> None:
        try:
            result = call(job.progress)
        except Cancelled:
            return
        except Exception as error:
            caught = error
            finish(lambda: _unless_stopped(job, lambda: failed(caught)))
        else:
            finish(lambda: _unless_stopped(job, lambda: done(result)))

    threading.Thread(target=run, name="ckptfix browse", daemon=True).start()
    return job


def _unless_stopped(job: BackgroundJob, then: Callable[[], None]) -> None:
    if not job.stopped.is_set():
        then()


def described(error: Exception) -> tuple[str, str]:
    """Return what went wrong, and what to do about it."""
    if isinstance(error, CkptfixError):
        return str(error), error.shell_hint or ""
    if isinstance(error, MemoryError):
        return "not enough memory", ""
    if isinstance(error, RecursionError):
        return "nested too deeply", ""
    if isinstance(error, OSError):
        return error.strerror or str(error), ""
    return f"a bug in ckptfix: {type(error).__name__}: {error}", ""

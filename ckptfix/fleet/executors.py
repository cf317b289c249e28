"""Executors for jobs: processes of this machine, a Dask cluster, Slurm, or any object with ``submit``."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from ckptfix.errors import CkptfixError, MissingExtra
from ckptfix.fleet.report import JobSummary
from ckptfix.fleet.work import JobTask, do

_BLOCKED = {signal.SIGINT, signal.SIGHUP}
"""Signals of a terminal: only this process gets them, and then ends the others."""

WINDOW = 256
"""Jobs that an executor gets at a time if it does not report its number of workers."""


class SubmittedJob(Protocol):
    """The result of ``submit``: a future of concurrent.futures, or an object with these two methods."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...


class Executor(Protocol):
    """An object that runs a call elsewhere."""

    def submit(self, call: Callable[[JobTask], JobSummary], task: JobTask, /) -> Any: ...


class Engine:
    """An executor that the caller supplies and manages.

    Attributes:
        window: the number of jobs that it gets at a time.
    """

    def __init__(self, executor: Executor, window: int | None = None) -> None:
        self._executor = executor
        workers = getattr(executor, "_max_workers", None)
        self.window = window or (2 * workers if isinstance(workers, int) else WINDOW)

    def submit(self, task: JobTask) -> SubmittedJob:
        """Begin a job."""
        pending: SubmittedJob = self._executor.submit(do, task)
        return pending

    def renew(self) -> bool:
        """Replace an executor that has broken; False if only its owner can do that."""
        return False

    def end(self, *, stopped: bool) -> None:
        """End the engine: all jobs have ended, or are no longer wanted."""


class Processes(Engine):
    """Processes of this machine, spawned, so that they inherit nothing from this one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._others = {*active_children()}
        super().__init__(self._pool(), 2 * count)

    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._count, get_context("spawn"), _begin)

    def submit(self, task: JobTask) -> SubmittedJob:
        assert isinstance(self._executor, ProcessPoolExecutor)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            return self._executor.submit(_do_or_end, task)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def renew(self) -> bool:
        self.end(stopped=False)
        self._executor = self._pool()
        return True

    def end(self, *, stopped: bool) -> None:
        assert isinstance(self._executor, ProcessPoolExecutor)
        if stopped:
            self._executor.shutdown(wait=False, cancel_futures=True)
            for process in self._mine():
                process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _mine(self) -> list[BaseProcess]:
        return [process for process in active_children() if process not in self._others]


GRACE = 20
"""Seconds that a process has to clean up after SIGTERM."""

_working = False
"""True while this process does a job."""


class _Ended(SystemExit):
    """SIGTERM has arrived: unfinished output is cleaned up."""


def _begin() -> None:
    """Prepare a worker process."""

    def end(number: int, frame: object) -> None:
        if not _working:
            os._exit(128 + number)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The pool waits for this process: if the exception raised here is lost, the alarm ends the process.
        signal.alarm(GRACE)
        raise _Ended(128 + number)

    signal.signal(signal.SIGTERM, end)
    for number in _BLOCKED:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the parent to end, and then end this process, which would otherwise wait for work forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _do_or_end(task: JobTask) -> JobSummary:
    global _working
    try:
        _working = True
        summary = do(task)
        _working = False
        return summary
    except _Ended:
        # The pool would treat the exception as the result of this job, and wait for the next one.
        os._exit(128 + signal.SIGTERM)
    except BaseException:
        _working = False
        raise


def processors() -> int:
    """Return the number of processes that can work at a time on this machine."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


@contextlib.contextmanager
def dask(address: str, tries: int) -> Iterator[Engine]:
    """Use the workers of the Dask cluster whose scheduler is at ``HOST:PORT``.

    Raises:
        MissingExtra: distributed is not installed.
        CkptfixError: no scheduler answers, or it has no workers.
    """
    try:
        import distributed
    except ModuleNotFoundError as error:
        if error.name not in ("distributed", "dask"):
            raise
        raise MissingExtra(
            "--executor dask needs distributed, which is not installed",
            name="distributed",
            hint="pip install distributed",
        ) from None
    try:
        connect: Any = distributed.Client
        client = connect(address if "://" in address else f"tcp://{address}", timeout=20, set_as_default=False)
    except (OSError, ValueError) as error:
        message = f"no Dask scheduler answers at {address}: {error}"
        raise CkptfixError(message, hint="start one with `dask scheduler`, which prints its address") from None
    # The loggers stay silent until the client is closed: its pending work then fails, and they would print that.
    with _silent("distributed", "tornado.application"), client:
        slots = sum(client.nthreads().values())
        if not slots:
            hint = f"start one with `dask worker {address}`"
            raise CkptfixError(f"the Dask scheduler at {address} has no workers", hint=hint)
        yield Engine(client.get_executor(pure=False, retries=tries), 4 * slots)


@contextlib.contextmanager
def _silent(*names: str) -> Iterator[None]:
    """Suppress the messages of these loggers: lost workers are expected, and their effects are reported at the end."""
    import logging

    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def slurm(cluster: str | None, folder: str, settings: Mapping[str, object]) -> Any:
    """Return submitit's executor: Slurm's, or a local one if Slurm is not installed.

    Raises:
        MissingExtra: submitit is not installed.
        CkptfixError: it does not know the cluster or a setting.
    """
    try:
        import submitit
    except ModuleNotFoundError as error:
        if error.name != "submitit":
            raise
        raise MissingExtra(
            "--executor slurm needs submitit, which is not installed", name="submitit", hint="pip install submitit"
        ) from None
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster or None)
        executor.update_parameters(**settings)
    except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:
        hint = "pass submitit's parameters to --slurm: timeout_min=60, slurm_partition=NAME, mem_gb=8 ..."
        raise CkptfixError(f"submitit: {error}", hint=hint) from None
    return executor


def is_future(pending: object) -> bool:
    """Return whether concurrent.futures can wait for it."""
    return isinstance(pending, Future)

"""What does the jobs: processes of this machine, a Dask cluster, Slurm, or any object with ``submit``."""

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
from ckptfix.fleet.report import Summary
from ckptfix.fleet.work import Task, do

_BLOCKED = {signal.SIGINT, signal.SIGHUP}
"""Signals of a terminal: they come to this process alone, which then ends the others."""

WINDOW = 256
"""Jobs that an executor has at a time which does not say how many workers it has."""


class Pending(Protocol):
    """What ``submit`` returns: a future of concurrent.futures, or one that has these two of it."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...


class Executor(Protocol):
    """Anything that does a call elsewhere."""

    def submit(self, call: Callable[[Task], Summary], task: Task, /) -> Any: ...


class Engine:
    """An executor that was given: its workers are its own business.

    Attributes:
        window: how many jobs it is given at a time.
    """

    def __init__(self, executor: Executor, window: int | None = None) -> None:
        self._executor = executor
        workers = getattr(executor, "_max_workers", None)
        self.window = window or (2 * workers if isinstance(workers, int) else WINDOW)

    def submit(self, task: Task) -> Pending:
        """Begin a job."""
        pending: Pending = self._executor.submit(do, task)
        return pending

    def renew(self) -> bool:
        """Take the place of an executor that has broken; False where that is for its owner to do."""
        return False

    def end(self, *, stopped: bool) -> None:
        """All jobs have ended, or are no longer wanted."""


class Processes(Engine):
    """Processes of this machine, spawned: they begin with nothing of this one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._others = {*active_children()}
        super().__init__(self._pool(), 2 * count)

    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._count, get_context("spawn"), _begin)

    def submit(self, task: Task) -> Pending:
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
"""Whether this process does a job now."""


class _Ended(SystemExit):
    """SIGTERM has come: what is being written is cleaned up."""


def _begin() -> None:
    """What a worker process does first."""

    def end(number: int, frame: object) -> None:
        if not _working:
            os._exit(128 + number)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The pool waits for this process: wherever what is raised here is lost, the alarm ends it.
        signal.alarm(GRACE)
        raise _Ended(128 + number)

    signal.signal(signal.SIGTERM, end)
    for number in _BLOCKED:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for work without end."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _do_or_end(task: Task) -> Summary:
    global _working
    try:
        _working = True
        summary = do(task)
        _working = False
        return summary
    except _Ended:
        # The pool would take it for the result of this job, and wait for the next.
        os._exit(128 + signal.SIGTERM)
    except BaseException:
        _working = False
        raise


def processors() -> int:
    """How many processes can work at a time here."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


@contextlib.contextmanager
def dask(address: str, tries: int) -> Iterator[Engine]:
    """The workers of the Dask cluster whose scheduler is at ``HOST:PORT``.

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
        raise CkptfixError(message, hint="`dask scheduler` starts one, and prints its address") from None
    # Silent until the client is closed: what it waited for then fails, and its loggers print that.
    with _silent("distributed", "tornado.application"), client:
        slots = sum(client.nthreads().values())
        if not slots:
            hint = f"`dask worker {address}` starts one"
            raise CkptfixError(f"the Dask scheduler at {address} has no workers", hint=hint)
        yield Engine(client.get_executor(pure=False, retries=tries), 4 * slots)


@contextlib.contextmanager
def _silent(*names: str) -> Iterator[None]:
    """No word of these loggers: workers that are lost are no news, and what comes of it is said at the end."""
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
    """submitit's executor: Slurm's, or that of this machine where there is no Slurm.

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
        hint = "--slurm takes submitit's parameters: timeout_min=60, slurm_partition=NAME, mem_gb=8 ..."
        raise CkptfixError(f"submitit: {error}", hint=hint) from None
    return executor


def is_future(pending: object) -> bool:
    """Whether concurrent.futures can wait for it."""
    return isinstance(pending, Future)

"""The engines that do tasks: this process, processes of this machine, a Dask cluster, Slurm, or any executor.

Reading a checkpoint is work for one core, so threads would wait for each other. Processes are spawned, not forked:
they inherit no state, whatever threads this process has. A signal of the terminal reaches only this process, which then
stops the others and waits until they have cleaned up.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckptfix import platform
from ckptfix.errors import CkptfixError, MissingExtra
from ckptfix.io.durable import Undisturbed
from ckptfix.io.write_log import record, recorded, reported
from ckptfix.urls import secrets, share

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

T = TypeVar("T")

STEPS = 50
"""Number of progress reports that a process sends for one task."""

SOON, LATE = 0.02, 1.0
"""Seconds between two checks of futures that cannot be waited for."""

WINDOW = 256
"""Tasks that an executor gets at a time if it does not report its number of workers."""

TaskStep = Callable[[Any, int, int], None]
"""Called with (task, bytes done, total bytes)."""

_BLOCKED = {*platform.STOP_SIGNALS} - {signal.SIGTERM}
"""Signals of a terminal: only this process gets them, and then ends the others."""


class SubmittedTask(Protocol):
    """The result of ``submit``: a future of concurrent.futures, or an object with these two methods."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...


class Executor(Protocol):
    """An object that runs a call elsewhere."""

    def submit(self, call: Callable[[Any], Any], task: Any, /) -> Any: ...


def carry_out(
    take: Callable[[], T | None], call: Callable[..., Any], engine: Engine
) -> Generator[tuple[T, SubmittedTask]]:
    """Do tasks, and yield each with its result as it ends; the engine has ended when this has.

    Args:
        take: returns the next task; None if no task is left, unless one that has ended must be done again.
        call: called with a task.
    """
    running: dict[SubmittedTask, T] = {}
    stopped = True
    try:
        while True:
            while len(running) < engine.window and (task := take()) is not None:
                running[engine.submit(call, task)] = task
            if not running:
                break
            with contextlib.closing(engine.ended(running)) as ended:
                for pending in ended:
                    yield running.pop(pending), pending
        stopped = False
    finally:
        for pending in running:
            cancel = getattr(pending, "cancel", None)
            if cancel is not None:
                with contextlib.suppress(Exception):
                    cancel()
        engine.end(stopped=stopped)


class Engine:
    """An executor that the caller supplies and manages.

    Attributes:
        window: the number of tasks that it gets at a time.
    """

    def __init__(self, executor: Executor, window: int | None = None) -> None:
        self._executor = executor
        workers = getattr(executor, "_max_workers", None)
        self.window = window or (2 * workers if isinstance(workers, int) else WINDOW)

    def submit(self, call: Callable[..., Any], task: Any) -> SubmittedTask:
        """Begin a task."""
        pending: SubmittedTask = self._executor.submit(call, task)
        return pending

    def ended(self, running: Iterable[SubmittedTask]) -> Generator[SubmittedTask]:
        """Yield the tasks that have ended; wait for at least one, however long that takes."""
        futures: list[Any] = [*running]
        if all(isinstance(pending, Future) for pending in futures):
            # Signals are handled between two waits.
            while not (done := wait_for(futures, timeout=0.5, return_when=FIRST_COMPLETED).done):
                pass
            yield from done
            return
        pause = SOON
        while not (ended := [pending for pending in futures if pending.done()]):
            time.sleep(pause)
            pause = min(2 * pause, LATE)
        yield from ended

    def end(self, *, stopped: bool) -> None:
        """End the engine: all tasks have ended, or are no longer wanted."""


class ProcessLost(Exception):
    """The process that did a task ended before it could return a result."""


class _Pending:
    """A task of `Here` or `Processes`."""

    def __init__(self, call: Callable[..., Any], task: Any) -> None:
        self.call, self.task = call, task
        self._result: Any = None
        self._error: Exception | None = None
        self._done = False

    def end(self, result: Any, error: Exception | None = None) -> None:
        self._result, self._error, self._done = result, error, True

    def done(self) -> bool:
        return self._done

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class Here(Engine):
    """This process, which does one task after the other.

    Args:
        step: gets the progress of each task; the call then gets a function for it as ``step``.
    """

    def __init__(self, step: TaskStep | None = None) -> None:
        self._step = step
        self.window = 1

    def submit(self, call: Callable[..., Any], task: Any) -> SubmittedTask:
        pending = _Pending(call, task)
        pending.end(call(task) if self._step is None else call(task, step=partial(self._step, task)))
        return pending

    def ended(self, running: Iterable[SubmittedTask]) -> Generator[SubmittedTask]:
        yield from [*running]


class _Worker:
    """A process, and the task that it works on."""

    def __init__(self, watched: bool) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, watched, secrets()), daemon=True)
        resource_tracker.ensure_running()  # it would unblock the signals for the first process
        before = platform.block_signals(_BLOCKED)
        try:
            self.process.start()
        finally:
            platform.restore_signals(before)
            theirs.close()
        self.pending: _Pending | None = None

    def give(self, pending: _Pending) -> None:
        self.pending = pending
        with contextlib.suppress(OSError):  # the process died; the next read from it shows that
            self.connection.send((pending.call, pending.task))

    def lost(self) -> ProcessLost:
        self.process.join()
        self.connection.close()
        code = self.process.exitcode or 0
        return ProcessLost(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")

    def end(self) -> None:
        """Wait for the process to end, and record the files that it wrote and did not report."""
        with contextlib.suppress(EOFError, OSError):
            self.connection.send(None)
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, *values = self.connection.recv()
                for line in _written(values[0]) if kind == "done" else values if kind == "written" else ():
                    record(line)
        self.process.join()
        self.connection.close()


class Processes(Engine):
    """Processes of this machine. One that dies is replaced, and its task ends with `ProcessLost`.

    Args:
        count: the number of tasks that are done at a time.
        step: as in `Here`.
    """

    def __init__(self, count: int, step: TaskStep | None = None) -> None:
        self._count, self._step = count, step
        self.window = 2 * count
        self._workers: list[_Worker] = []
        self._queue: deque[_Pending] = deque()
        self._quiet = Undisturbed()

    def submit(self, call: Callable[..., Any], task: Any) -> SubmittedTask:
        pending = _Pending(call, task)
        self._queue.append(pending)
        self._deal()
        return pending

    def _deal(self) -> None:
        """Send each idle process a task, and start more processes while there are tasks left and room for them."""
        for worker in self._workers:
            if worker.pending is None and self._queue:
                worker.give(self._queue.popleft())
        while self._queue and len(self._workers) < self._count:
            worker = _Worker(self._step is not None)
            self._workers.append(worker)
            worker.give(self._queue.popleft())

    def ended(self, running: Iterable[SubmittedTask]) -> Generator[SubmittedTask]:
        waiting = True
        while waiting:
            ready = wait([worker.connection for worker in self._workers])
            with self._quiet:  # handle what was received, even if a signal comes
                for worker in [worker for worker in self._workers if worker.connection in ready]:
                    pending = self._received(worker)
                    if pending is not None:
                        waiting = False
                        yield pending

    def _received(self, worker: _Worker) -> _Pending | None:
        """Receive what a process sends. Return its task if it has ended."""
        pending = worker.pending
        assert pending is not None
        try:
            kind, *values = worker.connection.recv()
        except (EOFError, OSError):
            self._workers.remove(worker)
            pending.end(None, worker.lost())
        else:
            if kind == "step":
                if self._step is not None:
                    self._step(pending.task, *values)
                return None
            pending.end(*values)
            worker.pending = None
        self._deal()
        return pending

    def end(self, *, stopped: bool) -> None:
        if stopped:
            for worker in self._workers:
                worker.process.terminate()
        for worker in self._workers:
            worker.end()
        self._workers = []


def _written(result: object) -> Iterable[str]:
    """Return the sentences about written files in a result, if it has any."""
    found: Iterable[str] = getattr(result, "written", ())
    return found


def _serve(connection: Connection, watched: bool, hidden: dict[str, str]) -> None:
    """Run the loop of a process: receive tasks and send results, until None comes or the other side is gone."""
    stopped = False

    def end(number: int, frame: object) -> None:
        nonlocal stopped
        if not stopped:  # a second signal must not interrupt the cleanup
            stopped = True
            raise platform.Stopped(number)

    def forget() -> None:
        nonlocal stopped
        stopped = False

    signal.signal(signal.SIGTERM, end)
    for number in _BLOCKED:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share(hidden)
    quiet = Undisturbed()
    with (
        contextlib.suppress(platform.Stopped, EOFError, OSError),
        platform.repeated_signals(forget),
        recorded() as written,
    ):
        try:
            while (work := connection.recv()) is not None:
                call, task = work
                answer = _answer(call, task, _steps(connection) if watched else None)
                with quiet:
                    connection.send(answer)
                    reported(_written(answer[1]))
        finally:
            if written:
                connection.send(("written", *written))


def _end_with_parent() -> None:
    """Wait for the parent to end, and then stop the task of this process, whose result nobody would receive."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _answer(call: Callable[..., Any], task: Any, step: Callable[[int, int], None] | None) -> tuple[object, ...]:
    try:
        return "done", call(task) if step is None else call(task, step=step)
    except Exception as error:
        return "failed", None, _portable(error)


def _portable(error: Exception) -> Exception:
    """Return an error that the parent can receive."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _steps(connection: Connection) -> Callable[[int, int], None]:
    said = 0

    def step(done: int, total: int) -> None:
        nonlocal said
        if total and done * STEPS // total > said:
            said = done * STEPS // total
            connection.send(("step", done, total))

    return step


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

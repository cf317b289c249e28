"""A plan carried out: what is done already is left alone, what fails does not stop the others."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, wait
from typing import Any

from ckptfix.errors import CkptfixError, NoSuchFile, Refused
from ckptfix.fleet.bounds import Bounds, bounds_of
from ckptfix.fleet.executors import Engine, Executor, Pending, Processes, is_future, processors
from ckptfix.fleet.jobs import line_at
from ckptfix.fleet.locks import locked
from ckptfix.fleet.records import Records
from ckptfix.fleet.report import Report, Summary
from ckptfix.fleet.states import Line, Shard, survey
from ckptfix.fleet.work import Task, give_up
from ckptfix.io.source import found_as, open_source

TRIES = 3
"""How often a job may kill the process that does it, before it is given up."""

SOON, LATE = 0.02, 1.0
"""Seconds between two questions to futures that nobody can wait for."""

Each = Callable[[Summary, Report], None]
"""Called with a job that has ended, and what has become of all so far."""



def folder_of(plan: str) -> str:
    """Where the records of a plan lie.

    Raises:
        NoSuchFile: there is no such plan.
    """
    kind = found_as(plan)
    if not kind:
        raise NoSuchFile(plan, hint="`ckptfix fleet plan LIST -- VERB ARGS > plan.jsonl` writes a plan")
    if kind == "folder":
        raise Refused("is a folder, not a plan", path=plan)
    return f"{plan}.d"


def status(
    plan: str,
    *,
    shard: Shard | None = None,
    each: Callable[[Line], None] | None = None,
    bounds: Bounds | None = None,
) -> Report:
    """What has become of the jobs of a plan; nothing is done.

    Args:
        bounds: what is left has to be within them; None where it does not matter.

    Raises:
        CkptfixError: the plan cannot be read, or is none.
    """
    folder = folder_of(plan)
    with open_source(plan) as source:
        return survey(source, Records(folder), shard, each, bounds=bounds).report


def run(
    plan: str,
    *,
    executor: Executor | Engine | None = None,
    jobs: int | None = None,
    shard: Shard | None = None,
    begin: Callable[[Report], None] | None = None,
    each: Each | None = None,
    roots: Sequence[str] = (),
    allow_import: bool = False,
) -> Report:
    """Do what is not done of a plan, or of a shard of it.

    Args:
        roots: folders and URLs in which outputs may be, beside the folder of the plan.
        allow_import: import the module of ``module:factory`` and call the factory, which runs their code; a plan cannot
            ask for that itself.
        executor: what does the jobs: an Executor of concurrent.futures, or any object whose ``submit(call, argument)``
            returns something with ``done()`` and ``result()``. By default, processes of this machine.
        jobs: how many of these; by default, as many as it has processors.
        begin: called when the plan has been read.
        each: called with each job that has ended.

    Raises:
        Refused: another run of it is at work, or the plan is none, or a job is not what it says or writes elsewhere.
        CkptfixError: the plan or the records cannot be read or written, or the executor cannot go on.
    """
    folder = folder_of(plan)
    bounds = bounds_of(plan, roots, allow_import=allow_import)
    bounds.check_records(folder)
    with locked(folder, plan, shard) as alone, open_source(plan) as source:
        todo, report = survey(source, Records(folder), shard, bounds=bounds)
        report.begin()
        if begin is not None:
            begin(report)
        if todo:
            make = tasks(folder, time.time() if alone else 0.0, bounds)
            engine = _engine(executor, jobs, len(todo))
            _carry_out((make(line_at(source, offset)) for offset in todo), engine, report, each)
    return report


def _engine(executor: Executor | Engine | None, jobs: int | None, count: int) -> Engine:
    if executor is None:
        return Processes(max(1, min(jobs or processors(), count)))
    return executor if isinstance(executor, Engine) else Engine(executor)


def tasks(folder: str, since: float, bounds: Bounds | None = None) -> Callable[[bytes], Task]:
    """What makes the task of a line of a plan, in one run of it; without `bounds`, they are those of its folder."""
    within = bounds or bounds_of(folder.removesuffix(".d"))
    cwd = os.getcwd()  # noqa: PTH109
    here = os.path.abspath(folder)  # noqa: PTH100
    name = f"{os.getpid()}-{os.urandom(4).hex()}"
    return lambda line: Task(line=line, folder=here, cwd=cwd, run=name, tries=TRIES, since=since, bounds=within)


def _carry_out(tasks: Iterable[Task], engine: Engine, report: Report, each: Each | None) -> None:
    waiting = iter(tasks)
    again: deque[Task] = deque()
    running: dict[Pending, Task] = {}
    lost: dict[bytes, int] = {}
    broken = 0
    stopped = True
    try:
        while True:
            while len(running) < engine.window and (task := again.popleft() if again else next(waiting, None)):
                try:
                    running[engine.submit(task)] = task
                except BrokenExecutor as error:
                    again.append(task)
                    if not running:
                        broken = _renewed(engine, broken, error)
                    else:
                        break
            if not running:
                break
            failure: BrokenExecutor | None = None
            for pending in _ended(running):
                task = running.pop(pending)
                try:
                    summary = pending.result()
                except BrokenExecutor as error:
                    failure = error
                    again.append(task)
                    continue
                except CkptfixError:
                    raise
                except Exception as error:
                    lost[task.line] = lost.get(task.line, 0) + 1
                    if lost[task.line] < TRIES:
                        again.append(task)
                        continue
                    summary = give_up(task, f"its worker was lost {TRIES} times: {type(error).__name__}: {error}")
                broken = 0
                lost.pop(task.line, None)
                report.add(summary)
                if each is not None:
                    each(summary, report)
            if failure is not None:
                again.extend(running.values())
                for pending in running:
                    _forget(pending)
                running.clear()
                broken = _renewed(engine, broken, failure)
        stopped = False
    finally:
        for pending in running:
            _forget(pending)
        engine.end(stopped=stopped)


def _renewed(engine: Engine, broken: int, error: BrokenExecutor) -> int:
    """How often the engine has been renewed since a job ended. A job is given up before that is often."""
    if broken > 2 * TRIES:
        hint = "the machine may be out of memory: try --jobs 1"
        raise CkptfixError("worker processes end before they have done anything", hint=hint) from error
    if not engine.renew():
        message = f"the executor has broken: {error}"
        raise CkptfixError(message, hint="what is done is kept; with a new executor the same call goes on") from error
    return broken + 1


def _forget(pending: Pending) -> None:
    cancel = getattr(pending, "cancel", None)
    if cancel is not None:
        with contextlib.suppress(Exception):
            cancel()


def _ended(running: Iterable[Pending]) -> Iterator[Pending]:
    """Those that have ended; at least one, however long that takes."""
    futures: list[Any] = [*running]
    if all(map(is_future, futures)):
        # A signal is seen between two waits.
        while not (done := wait(futures, timeout=0.5, return_when=FIRST_COMPLETED).done):
            pass
        yield from done
        return
    pause = SOON
    while not (ended := [pending for pending in running if pending.done()]):
        time.sleep(pause)
        pause = min(2 * pause, LATE)
    yield from ended

"""A run of a plan: finished jobs are skipped, and a failure does not stop the other jobs."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor

from ckptfix.errors import CkptfixError, NoSuchFile, Refused
from ckptfix.fleet.bounds import Bounds, bounds_of
from ckptfix.fleet.locks import locked
from ckptfix.fleet.plan_lines import line_at
from ckptfix.fleet.records import PlanRecords
from ckptfix.fleet.report import FleetReport, JobSummary
from ckptfix.fleet.states import PlanLine, PlanShard, survey
from ckptfix.fleet.work import JobTask, do, give_up
from ckptfix.io.source import found_as, open_source
from ckptfix.platform import processors
from ckptfix.runner.engines import Engine, Executor, Processes, ProcessLost, carry_out

TRIES = 3
"""The number of processes that a job can kill before it is given up."""

LOST = 2 * TRIES
"""The number of processes of one job that can end without a record of it: those that are killed have begun the job."""

Each = Callable[[JobSummary, FleetReport], None]
"""Called with a job that has ended, and the state of all jobs so far."""


def folder_of(plan: str) -> str:
    """Return the folder of a plan's records.

    Raises:
        NoSuchFile: the plan does not exist.
    """
    kind = found_as(plan)
    if not kind:
        raise NoSuchFile(plan, hint="write a plan with `ckptfix fleet plan LIST -- VERB ARGS > plan.jsonl`")
    if kind == "folder":
        raise Refused("is a folder, not a plan", path=plan)
    return f"{plan}.d"


def status(
    plan: str,
    *,
    shard: PlanShard | None = None,
    each: Callable[[PlanLine], None] | None = None,
    bounds: Bounds | None = None,
) -> FleetReport:
    """Return the state of the jobs of a plan, without doing any of them.

    Args:
        bounds: the limits of the remaining jobs; None if they do not matter.

    Raises:
        CkptfixError: the plan cannot be read, or is not a plan.
    """
    folder = folder_of(plan)
    with open_source(plan) as source:
        return survey(source, PlanRecords(folder), shard, each, bounds=bounds).report


def run(
    plan: str,
    *,
    executor: Executor | Engine | None = None,
    jobs: int | None = None,
    shard: PlanShard | None = None,
    begin: Callable[[FleetReport], None] | None = None,
    each: Each | None = None,
    roots: Sequence[str] = (),
    allow_import: bool = False,
) -> FleetReport:
    """Do the unfinished jobs of a plan, or of a shard of it.

    Args:
        roots: folders and URLs that can contain outputs, in addition to the folder of the plan.
        allow_import: import the module of ``module:factory`` and call the factory, which runs their code; a plan cannot
            request that itself.
        executor: the executor of the jobs: an Executor of concurrent.futures, or any object whose ``submit(call,
            argument)`` returns an object with ``done()`` and ``result()``. The default is processes of this machine.
        jobs: the number of these processes; the default is the number of processors.
        begin: called when the plan has been read.
        each: called with each job that has ended.

    Raises:
        Refused: a different run of the plan is running, the plan is not valid, or a job exceeds what it declares or
            writes elsewhere.
        CkptfixError: the plan or the records cannot be read or written, or the executor cannot continue.
    """
    folder = folder_of(plan)
    bounds = bounds_of(plan, roots, allow_import=allow_import)
    bounds.check_records(folder)
    with locked(folder, plan, shard) as alone, open_source(plan) as source:
        todo, report = survey(source, PlanRecords(folder), shard, bounds=bounds)
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


def tasks(folder: str, since: float, bounds: Bounds | None = None) -> Callable[[bytes], JobTask]:
    """Return a function that makes the task of a plan's line for one run.

    The default of `bounds` is the folder of the plan.
    """
    within = bounds or bounds_of(folder.removesuffix(".d"))
    cwd = os.getcwd()  # noqa: PTH109
    here = os.path.abspath(folder)  # noqa: PTH100
    name = f"{os.getpid()}-{os.urandom(4).hex()}"
    return lambda line: JobTask(line=line, folder=here, cwd=cwd, run=name, tries=TRIES, since=since, bounds=within)


def _carry_out(tasks: Iterable[JobTask], engine: Engine, report: FleetReport, each: Each | None) -> None:
    waiting = iter(tasks)
    again: deque[JobTask] = deque()
    lost: dict[bytes, int] = {}

    def take() -> JobTask | None:
        return again.popleft() if again else next(waiting, None)

    try:
        with contextlib.closing(carry_out(take, do, engine)) as ended:
            for task, pending in ended:
                try:
                    summary = pending.result()
                except (CkptfixError, BrokenExecutor):
                    raise
                except Exception as error:
                    lost[task.line] = lost.get(task.line, 0) + 1
                    if lost[task.line] < (LOST if isinstance(error, ProcessLost) else TRIES):
                        again.append(task)
                        continue
                    if isinstance(error, ProcessLost):
                        hint = "the machine may be out of memory: try --jobs 1"
                        raise CkptfixError("worker processes end before they have begun a job", hint=hint) from error
                    summary = give_up(task, f"its worker was lost {TRIES} times: {type(error).__name__}: {error}")
                lost.pop(task.line, None)
                report.add(summary)
                if each is not None:
                    each(summary, report)
    except BrokenExecutor as error:
        message = f"the executor has broken: {error}"
        raise CkptfixError(message, hint="finished jobs are kept; repeat the call with a new executor") from error

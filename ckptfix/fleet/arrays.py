"""Slurm job arrays through submitit: each task of the array is a shard of the plan."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.fleet.bounds import bounds_of
from ckptfix.fleet.locks import locked
from ckptfix.fleet.records import PlanRecords
from ckptfix.fleet.report import FleetReport, summary_of
from ckptfix.fleet.run import TRIES, Each, folder_of, tasks
from ckptfix.fleet.states import PlanLine, PlanShard, lines, survey
from ckptfix.fleet.work import JobTask, do
from ckptfix.io.source import open_source
from ckptfix.platform import Stopped, processors
from ckptfix.runner.engines import LATE, slurm

PARTS = 16
"""The default number of tasks in an array."""

LOOK = 5.0
"""Seconds between two checks of the progress, if a check takes less than a twentieth of that."""


@dataclass(frozen=True, slots=True)
class Share:
    """A shard of a plan on its way to the machine that does it; `like` has the fields that all of its tasks share."""

    plan: str
    shard: PlanShard
    like: JobTask


def do_share(share: Share) -> int:
    """Do the unfinished jobs of a shard, one after the other, and return their number."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)  # submitit ignores this signal, and is killed half a minute later
    os.chdir(share.like.cwd)
    count = 0
    with open_source(share.plan) as source:
        for line in lines(source, PlanRecords(share.like.folder), share.shard, share.like.bounds):
            # A job that failed in this run is not tried again.
            if line.state != "done" and not (line.record is not None and line.record.get("run") == share.like.run):
                do(_task(line, share.like))
                count += 1
    return count


def _end(number: int, frame: object) -> None:
    """Terminate a cancelled task at once, after it has cleaned up."""
    signal.signal(number, signal.SIG_IGN)
    raise Stopped(number)


def _task(line: PlanLine, like: JobTask) -> JobTask:
    import json

    text = json.dumps(line.job.as_dict()).encode()
    return replace(like, line=text)


def run_array(
    plan: str,
    *,
    cluster: str | None = None,
    jobs: int | None = None,
    settings: dict[str, object] | None = None,
    begin: Callable[[FleetReport], None] | None = None,
    each: Each | None = None,
    note: Callable[[str], None] | None = None,
    roots: Sequence[str] = (),
    allow_import: bool = False,
) -> FleetReport:
    """Run a plan like `run`, in an array of `jobs` tasks. A lost task is submitted again.

    Args:
        cluster: submitit's name of it, such as slurm, local and debug; None for Slurm if it is installed, else local.
        settings: submitit's parameters.
        begin: called with the state of all jobs: before the run begins, now and then, and when it is stopped.
        note: called with information for the user before the run begins.
        roots, allow_import: as in `run`.

    Raises:
        CkptfixError: as in `run`; also when tasks are lost repeatedly.
    """
    folder = folder_of(plan)
    executor = slurm(cluster, f"{folder}/slurm", settings or {})
    bounds = bounds_of(plan, roots, allow_import=allow_import)
    bounds.check_records(folder)
    with locked(folder, plan, None), open_source(plan) as source:
        records = PlanRecords(folder)
        todo, report = survey(source, records, bounds=bounds)
        report.begin()
        if begin is not None:
            begin(report)
        if not todo:
            return report
        if note is not None and executor.cluster != "slurm" and cluster is None:
            note(f"Slurm is not installed (srun was not found): submitit's {executor.cluster} executor does the jobs")
        most = PARTS if executor.cluster == "slurm" else processors()
        count = max(1, min(jobs or most, len(todo)))
        like = tasks(folder, time.time(), bounds)(b"")
        where = os.path.abspath(plan)  # noqa: PTH100

        def stands() -> FleetReport:
            report = survey(source, records, run=like.run).report
            if begin is not None:
                begin(report)
            return report

        _through(executor, [Share(where, PlanShard(index, count), like) for index in range(count)], stands)

        def ended(line: PlanLine) -> None:
            if line.record is not None and line.record.get("run") == like.run and each is not None:
                each(summary_of(line.record), report)

        report = stands()
        survey(source, records, None, ended)
    if report.left:
        raise CkptfixError(
            f"{report.left:,} jobs are left: their tasks were lost {TRIES} times",
            path=plan,
            hint=f"the logs are in {folder}/slurm; run the same command again to do the remaining jobs",
        )
    return report


def _through(executor: Any, shares: list[Share], look: Callable[[], object]) -> None:
    """Submit all shares, and resubmit those whose task is lost.

    `look` is called now and then, and when this is stopped.
    """
    looked, pause = time.monotonic(), LOOK
    for _ in range(TRIES + 1):
        pending = dict(zip(executor.map_array(do_share, shares), shares, strict=True))
        shares = []
        try:
            while pending:
                for job in [job for job in pending if job.done()]:
                    share = pending.pop(job)
                    try:
                        job.result()
                    except CkptfixError:
                        raise
                    except Exception:  # submitit's error about a task that was killed or timed out
                        shares.append(share)
                if pending:
                    time.sleep(LATE)
                if pending and (begun := time.monotonic()) >= looked + pause:
                    look()
                    looked = time.monotonic()
                    pause = max(LOOK, 20 * (looked - begun))
        except BaseException:
            for job in pending:
                with contextlib.suppress(Exception):
                    job.cancel()
            look()
            raise
        if not shares:
            return

"""The jobs of a plan or of a shard of it, and their states: done, failed, left, or changed since."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.fleet.bounds import Bounds
from ckptfix.fleet.plan_lines import PlannedJob, identity, lines_of, parsed
from ckptfix.fleet.records import PlanRecords
from ckptfix.fleet.report import FleetReport, JobSummary, summary_of
from ckptfix.io.source import Source
from ckptfix.numbers import whole_number
from ckptfix.runner.jobs import TROUBLE

State = Literal["done", "failed", "left", "changed"]
"""`changed`: it was done, but its input, its arguments or its output have changed since."""


@dataclass(frozen=True, slots=True)
class PlanShard:
    """One of `count` parts of a plan; `index` counts from 0."""

    index: int
    count: int


def shard_of(environment: Mapping[str, str] | None = None) -> PlanShard | None:
    """Return the shard that a scheduler assigned: the task of a Slurm array, or else the rank of torchrun or the like.

    None if neither is set.
    """
    values = os.environ if environment is None else environment

    def number(name: str) -> int | None:
        return whole_number(values.get(name))

    task, tasks = number("SLURM_ARRAY_TASK_ID"), number("SLURM_ARRAY_TASK_COUNT")
    if task is not None and tasks:
        first, step = number("SLURM_ARRAY_TASK_MIN") or 0, number("SLURM_ARRAY_TASK_STEP") or 1
        index = (task - first) // step
        return PlanShard(index, tasks) if 0 <= index < tasks else None
    rank, size = number("RANK"), number("WORLD_SIZE")
    return PlanShard(rank, size) if rank is not None and size and rank < size else None


def state_of(job: PlannedJob, record: dict[str, Any] | None) -> State:
    """Return the state of `job`, which has this record."""
    if record is None:
        return "left"
    if record["argv"] != list(job.argv) or record["input"] != job.input:
        return "changed"
    if record["exit_code"] == TROUBLE:
        return "failed"
    if job.output is not None and identity(job.output) != record["output_identity"]:
        return "changed"
    return "done" if job.in_place or identity(job.input) == record["identity"] else "changed"


class PlanLine(NamedTuple):
    """A job of a plan, the offset of its line, and its state."""

    offset: int
    job: PlannedJob
    state: State
    record: dict[str, Any] | None


def lines(
    plan: Source, records: PlanRecords, shard: PlanShard | None = None, bounds: Bounds | None = None
) -> Iterator[PlanLine]:
    """Yield the jobs of the shard, in the order of the plan; one line is in memory at a time, and 8 bytes a job.

    The next job goes to the shard with the fewest bytes so far: every shard computes the same result from the same
    plan.

    Args:
        bounds: the limits of the jobs to do; None if no job will be done.

    Raises:
        Refused: two jobs have one output, or are the same; or a line is not a job, or out of bounds.
    """
    bytes_of = [0] * (shard.count if shard is not None else 1)
    taken: set[int] = set()
    for number, (offset, text) in enumerate(lines_of(plan), 1):
        job = parsed(text, plan.name, number)
        key = int(job.key[:16], 16)
        if key in taken:
            what = f"the output {job.output} is planned twice" if job.output else f"{job.input} is planned twice"
            raise Refused(what, path=plan.name, where=f"line {number:,}", hint="keep only one job for each output")
        taken.add(key)
        if shard is not None:
            mine = min(range(shard.count), key=bytes_of.__getitem__)
            # An input without bytes counts as one byte, so that a list of missing files is divided as well.
            bytes_of[mine] += max(job.bytes, 1)
            if mine != shard.index:
                continue
        record = records.read(job.key)
        state = state_of(job, record)
        if bounds is not None and state != "done":
            bounds.check(job, f"line {number:,}")
        yield PlanLine(offset, job, state, record)
    if not taken:
        raise Refused("has no jobs: it is empty", path=plan.name, hint="see the output of `ckptfix fleet plan`")


class PlanSurvey(NamedTuple):
    """The remaining jobs, as the offsets of their lines, and the report on the finished ones."""

    todo: array[int]
    report: FleetReport


def survey(
    plan: Source,
    records: PlanRecords,
    shard: PlanShard | None = None,
    each: Callable[[PlanLine], None] | None = None,
    run: str | None = None,
    bounds: Bounds | None = None,
) -> PlanSurvey:
    """Read a plan once, and collect the states of its jobs. Raises like `lines`.

    Args:
        each: called with every line.
        run: the present run. Jobs done by other runs count as done before, and jobs that only other runs tried as left.
        bounds: as in `lines`.
    """
    todo = array("Q")
    report = FleetReport()
    for line in lines(plan, records, shard, bounds):
        report.plan(line.job.bytes)
        if each is not None:
            each(line)
        if line.state == "done":
            assert line.record is not None
            before = run is None or line.record.get("run") != run
            report.left += not before
            report.add(summary_of(line.record, before=before))
            continue
        mine = line.record is not None and line.record.get("run") == run
        report.leave(line.state if run is None or mine else "left", line.job.bytes, _before(line))
        todo.append(line.offset)
    return PlanSurvey(todo, report)


def _before(line: PlanLine) -> JobSummary | None:
    return summary_of(line.record, before=True) if line.record is not None and line.state == "failed" else None

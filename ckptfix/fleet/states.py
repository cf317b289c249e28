"""What has become of the jobs of a plan: done, failed, left, or changed since."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ckptfix.errors import Refused
from ckptfix.fleet.bounds import Bounds
from ckptfix.fleet.jobs import Job, identity, lines_of, parsed
from ckptfix.fleet.records import Records
from ckptfix.fleet.report import Report, Summary, summary_of
from ckptfix.io.source import Source

State = Literal["done", "failed", "left", "changed"]
"""`changed`: it was done, and its input, its words, or its output are others by now."""

TROUBLE = 2


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of a plan; `index` counts from 0."""

    index: int
    count: int


def state_of(job: Job, record: dict[str, Any] | None) -> State:
    """What has become of `job`, which has this record."""
    if record is None:
        return "left"
    if record["argv"] != list(job.argv) or record["input"] != job.input:
        return "changed"
    if record["exit_code"] == TROUBLE:
        return "failed"
    if job.output is not None and identity(job.output) != record["output_identity"]:
        return "changed"
    return "done" if job.in_place or identity(job.input) == record["identity"] else "changed"


class Line(NamedTuple):
    """A job of a plan, where its line begins, and what has become of it."""

    offset: int
    job: Job
    state: State
    record: dict[str, Any] | None


def lines(
    plan: Source, records: Records, shard: Shard | None = None, bounds: Bounds | None = None
) -> Iterator[Line]:
    """The jobs of the shard, in the order of the plan; one line is held at a time, and 8 bytes a job.

    The next job goes to the shard that has the fewest bytes by then: every shard finds the same in the same plan.

    Args:
        bounds: of what is to be done; None where nothing is.

    Raises:
        Refused: two jobs have one output, or are the same; or a line is none of a plan, or out of bounds.
    """
    bytes_of = [0] * (shard.count if shard is not None else 1)
    taken: set[int] = set()
    for number, (offset, text) in enumerate(lines_of(plan), 1):
        job = parsed(text, plan.name, number)
        key = int(job.key[:16], 16)
        if key in taken:
            what = f"the output {job.output} is planned twice" if job.output else f"{job.input} is planned twice"
            raise Refused(what, path=plan.name, where=f"line {number:,}", hint="one output is written by one job")
        taken.add(key)
        if shard is not None:
            mine = min(range(shard.count), key=bytes_of.__getitem__)
            # What has no bytes counts too: a list of missing files is shared out as well.
            bytes_of[mine] += max(job.bytes, 1)
            if mine != shard.index:
                continue
        record = records.read(job.key)
        state = state_of(job, record)
        if bounds is not None and state != "done":
            bounds.check(job, f"line {number:,}")
        yield Line(offset, job, state, record)
    if not taken:
        raise Refused("has no jobs: it is empty", path=plan.name, hint="`ckptfix fleet plan` may have said why")


class Survey(NamedTuple):
    """What is to be done: where the lines begin, and the bytes of their inputs; and the report on what is done."""

    todo: array[int]
    report: Report


def survey(
    plan: Source,
    records: Records,
    shard: Shard | None = None,
    each: Callable[[Line], None] | None = None,
    run: str | None = None,
    bounds: Bounds | None = None,
) -> Survey:
    """Go through a plan once. Raises as `lines`.

    Args:
        each: gets every line.
        run: the run that is on now; what others did was done before.
        bounds: as `lines`.
    """
    todo = array("Q")
    report = Report()
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
        report.leave(line.state, line.job.bytes, None if line.record is None else _before(line))
        todo.append(line.offset)
    return Survey(todo, report)


def _before(line: Line) -> Summary | None:
    return summary_of(line.record, before=True) if line.record is not None and line.state == "failed" else None

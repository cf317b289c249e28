"""The result of a fleet: counts, bytes, and the failures by cause."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ckptfix.dataclass import dataclass
from ckptfix.runner.jobs import LOSSES, TROUBLE, Summary


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The result of one job that has ended.

    Attributes:
        exit_code: of the verb on it.
        cause: id of a finding or type of an error; None if there is no problem.
        message, fix: the problem, and the command that fixes it.
        before: it was done by an earlier run.
    """

    input: str
    output: str | None
    exit_code: int
    bytes: int
    seconds: float
    digest: str | None = None
    cause: str | None = None
    message: str | None = None
    fix: str | None = None
    argv: tuple[str, ...] = ()
    before: bool = False

    @property
    def failed(self) -> bool:
        return self.exit_code == TROUBLE

    def as_dict(self) -> dict[str, Any]:
        return {
            "input": self.input,
            "output": self.output,
            "argv": list(self.argv),
            "state": "failed" if self.failed else "done",
            "digest": self.digest,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "cause": self.cause,
            "message": self.message,
            "fix": self.fix,
        }


def summary_of(record: dict[str, Any], *, before: bool = False) -> JobSummary:
    """Return the summary of a job that has this record."""
    return JobSummary(
        input=record["input"],
        output=record["output"],
        exit_code=record["exit_code"],
        bytes=record["bytes"],
        seconds=record["seconds"],
        digest=record["digest"],
        cause=record["cause"],
        message=record["message"],
        fix=record["fix"],
        argv=tuple(record["argv"]),
        before=before,
    )


@dataclass(slots=True)
class Cause:
    """All jobs with the same problem, and the first of them as an example."""

    cause: str
    exit_code: int
    count: int
    example: str
    message: str | None
    fix: str | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "exit_code": self.exit_code,
            "count": self.count,
            "example": self.example,
            "message": self.message,
            "fix": self.fix,
        }


@dataclass(slots=True)
class FleetReport(Summary):
    """The state of the jobs of a plan, or of a shard of it.

    Attributes:
        jobs, bytes: the number of all planned jobs, and the size of their inputs.
        codes: also of the jobs that failed in an earlier run, until this one begins.
        before: jobs that an earlier run did.
        left: jobs without any result yet.
        changed: jobs that were done, but whose input, arguments or output have changed since.
        done_bytes: size of the inputs of the jobs that have ended.
    """

    jobs: int = 0
    bytes: int = 0
    before: int = 0
    left: int = 0
    changed: int = 0
    done_bytes: int = 0
    causes: dict[tuple[int, str], Cause] = field(default_factory=dict)

    def plan(self, size: int) -> None:
        """Count a planned job whose input has this size."""
        self.jobs += 1
        self.bytes += size

    def leave(self, state: str, size: int, failure: JobSummary | None = None) -> None:
        """Count a job that is not done; `failure` is its failure."""
        if state == "failed" and failure is not None:
            self._count(failure)
        elif state == "changed":
            self.changed += 1
        else:
            self.left += 1

    def begin(self) -> None:
        """Count all unfinished jobs as left: earlier failures no longer apply."""
        self.left += self.failed + self.changed
        self.changed = 0
        self.codes.pop(TROUBLE, None)
        self.causes = {key: cause for key, cause in self.causes.items() if key[0] != TROUBLE}

    def add(self, summary: JobSummary) -> None:
        """Count a job that has ended."""
        if not summary.before:
            self.left -= 1
        self.before += summary.before and not summary.failed
        self.done_bytes += summary.bytes
        self._count(summary)

    def _count(self, summary: JobSummary) -> None:
        self.count(summary.exit_code)
        if summary.cause is None:
            return
        key = summary.exit_code, summary.cause
        found = self.causes.get(key)
        if found is None:
            self.causes[key] = Cause(
                summary.cause, summary.exit_code, 1, summary.input, summary.message, summary.fix
            )
        else:
            found.count += 1

    @property
    def by_cause(self) -> list[Cause]:
        """The causes: failures first, and the most frequent ones first among them."""
        rank = {TROUBLE: 0, LOSSES: 1, 1: 2}
        return sorted(self.causes.values(), key=lambda one: (rank.get(one.exit_code, 3), -one.count, one.cause))

    def as_dict(self) -> dict[str, Any]:
        return {
            "jobs": self.jobs,
            "done": self.done,
            "before": self.before,
            "failed": self.failed,
            "left": self.left,
            "changed": self.changed,
            "bytes": self.bytes,
            "done_bytes": self.done_bytes,
            "causes": [cause.as_dict() for cause in self.by_cause],
        }

"""A job in the process that does it, on any machine: done, recorded, and safe to repeat."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.fleet.bounds import Bounds
from ckptfix.fleet.plan_lines import Identity, PlannedJob, digest, identity, parsed, size_of
from ckptfix.fleet.records import Begun, PlanRecords
from ckptfix.fleet.report import JobSummary, summary_of
from ckptfix.fleet.states import state_of
from ckptfix.hooks import Hook
from ckptfix.io.unfinished_edits import JOURNAL, beside
from ckptfix.runner.jobs import TROUBLE, Job, Outcome, unfinished
from ckptfix.urls import is_url

Replace = Literal["no", "yes", "keep"]
"""The treatment of an existing output: replace it if an earlier attempt wrote it, keep it if it was changed since."""

_STEM = 40
"""Characters of an output's name that its temporary file's name includes."""


@dataclass(frozen=True, slots=True)
class JobTask:
    """A job on its way to the process that does it.

    Attributes:
        line: of the plan.
        folder: of the records.
        cwd: the folder that names are relative to.
        run: distinguishes this run of the fleet from others.
        tries: the number of processes that this job can kill before it is given up.
        since: the start of the run, in seconds since the epoch; 0 if other runs write at the same time.
        bounds: limits of the job.
    """

    line: bytes
    folder: str
    cwd: str
    run: str
    tries: int
    since: float
    bounds: Bounds


DONE: Hook[Callable[[Job, Replace, bool], Outcome]] = Hook("fleet.done")
"""The function that does a job: (job, treatment of an existing output, allow imports)."""


def do(task: JobTask) -> JobSummary:
    """Do the job, unless it is done, and record its result. A failure is a result too.

    Raises:
        CkptfixError: the record cannot be written, or the job is out of bounds.
    """
    if not _is_here(task.cwd):
        os.chdir(task.cwd)
    records = PlanRecords(task.folder)
    job = parsed(task.line, task.folder, 0)
    record = records.read(job.key)
    if record is not None and record["exit_code"] != TROUBLE and state_of(job, record) == "done":
        records.end(job.key)
        return summary_of(record)
    todo = task.bounds.check(job, job.input)  # a folder may have become a link since the plan was read
    begun = records.begun(job.key)
    if begun is not None and record is not None and record["run"] == begun.run:
        begun = None  # it ended, but its process was killed before it could record that
    tries = begun.tries if begun is not None and begun.run == task.run else 0
    if tries >= task.tries:
        return give_up(task, f"the process that worked on it was killed {tries} times")
    started = time.time()
    if begun is not None:
        _clean_up(job, records, task.since)
    replace, mine = _claim(job, record, begun)
    if mine:
        records.begin(job.key, Begun(task.run, tries + 1))
    try:
        before = identity(job.input)
        ended = DONE.get()(dataclasses.replace(todo, input=job.input), replace, task.bounds.allow_import)
    except BaseException:
        if mine:  # it was stopped properly, so this attempt does not count
            records.begin(job.key, Begun(task.run, tries))
        raise
    document = _record(job, record, before, ended)
    document |= {"run": task.run, "seconds": round(time.time() - started, 6), "ended": round(time.time(), 3)}
    records.write(job.key, document)
    records.end(job.key)
    return summary_of(document)


def give_up(task: JobTask, message: str) -> JobSummary:
    """Record the failure of a job that no process could finish."""
    records = PlanRecords(task.folder)
    job = parsed(task.line, task.folder, 0)
    record = records.read(job.key)
    document = _record(job, record, identity(job.input), unfinished(job.input, message))
    document |= {"run": task.run, "seconds": 0.0, "ended": round(time.time(), 3)}
    records.write(job.key, document)
    return summary_of(document)


def _is_here(folder: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(folder, os.curdir)  # noqa: PTH121
    return False


def _claim(job: PlannedJob, record: dict[str, Any] | None, begun: Begun | None) -> tuple[Replace, bool]:
    """Return how to treat an existing output, and whether the new output will be the job's own."""
    if job.output is None or job.in_place:
        return "no", True
    now = identity(job.output)
    if now is None:
        return "no", True
    if begun is not None:
        return "yes", True
    ours = record["output_identity"] if record is not None else None
    if ours is None:
        return "no", not {"--force", "-f", "--backup", "-b"}.isdisjoint(job.argv)
    return "yes" if now == ours else "keep", True


def _record(job: PlannedJob, record: dict[str, Any] | None, before: Identity | None, ended: Outcome) -> dict[str, Any]:
    """Return the record of a job that has ended."""
    failed = ended.code == TROUBLE
    cause, message, fix = _why(job, ended)
    written = None
    if job.output is not None:
        # If this run has failed, the output of an earlier run is still the job's own.
        written = (record or {}).get("output_identity") if failed else identity(job.output)
    return {
        "input": job.input,
        "identity": before,
        "argv": list(job.argv),
        "output": job.output,
        "output_identity": written,
        "digest": None if failed else _digest(job, ended),
        "exit_code": ended.code,
        "bytes": size_of(before),
        "cause": cause,
        "message": message,
        "fix": fix,
        "notes": list(ended.notes),
        "result": list(ended.documents),
    }


def _digest(job: PlannedJob, ended: Outcome) -> str | None:
    """Return the digest of the output, or of the verb's documents if it has no output."""
    if job.output is not None:
        return digest(job.output) if identity(job.output) is not None else None
    import hashlib
    import json

    said = json.dumps([ended.code, ended.documents], sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(said.encode()).hexdigest()}"


def _why(job: PlannedJob, ended: Outcome) -> tuple[str | None, str | None, str | None]:
    """Return the cause, a sentence about it, and the command that fixes it."""
    if ended.usage is not None:
        return "UsageError", ended.usage, f"{command(job.argv[0])} --help"
    for document in ended.documents:
        error = document.get("error")
        if ended.code == TROUBLE and isinstance(error, dict):
            at_output = job.output is not None and not job.in_place and error.get("path") == job.output
            message = f"{job.output}: {error['message']}" if at_output else str(error["message"])
            return str(error["type"]), message, _command(error.get("hint"))
    if ended.row is not None:
        severity, id, sentence, remedy = ended.row
        return (id, sentence, _command(remedy.partition(": ")[2])) if severity != "info" else (None, None, None)
    if ended.code == 0:
        return None, None, None
    for document in ended.documents:
        for finding in document.get("findings", ()):
            if finding["severity"] == "error":
                return str(finding["id"]), str(finding["message"]), _command(finding.get("fix"))
    what = "differences" if ended.code == 1 else "losses" if ended.code == 3 else "trouble"
    return what, next(iter((*ended.notes, *ended.done)), None), None


def _command(hint: str | None) -> str | None:
    """Return the command that a hint contains; the hint itself if it contains no command."""
    named = re.search(r"`(ckptfix [^`]+)`", hint or "")
    return named[1] if named else hint or None


def _clean_up(job: PlannedJob, records: PlanRecords, since: float) -> None:
    """Remove leftovers of a process that was killed during the job: temporary files, or an unfinished in-place edit."""
    if job.output is None or is_url(job.output):
        return
    if job.in_place:
        if os.path.lexists(beside(os.path.realpath(job.output), JOURNAL)):
            from ckptfix.ops.undo import undo

            with contextlib.suppress(CkptfixError):  # the verb then reports why it cannot begin
                undo(job.output)
        return
    place = Path(os.path.realpath(job.output))
    # A longer name may share its beginning with other outputs, whose temporary files may be in use.
    own = len(place.name) < _STEM
    temp = re.compile(rf"\.{re.escape(place.name[:_STEM])}\.[0-9a-f]{{16}}\.ckptfix-tmp")
    with contextlib.suppress(OSError):
        for entry in os.scandir(place.parent):
            if temp.fullmatch(entry.name) and (own or entry.stat(follow_symlinks=False).st_mtime < since):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)  # noqa: PTH108

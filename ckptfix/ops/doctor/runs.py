"""Examination of a run folder: whether each checkpoint of a training run is complete, and which to resume from.

Only directories and headers are read: the structure of each file. The tensors of the checkpoint to resume from are read
too, unless they are large, because a run that diverged saves NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptfix.commands import quoted
from ckptfix.errors import CkptfixError, printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import RANK, found, remedy_of
from ckptfix.formats import is_folder_checkpoint, located
from ckptfix.formats.foreign import kinds
from ckptfix.formats.runs import RunFolder, RunPointer, find_run, natural_key
from ckptfix.io.source import found_as, is_local
from ckptfix.ops.doctor.report import Diagnosis
from ckptfix.ops.doctor.run_checkpoint import ExaminedCheckpoint, set_pointer
from ckptfix.ops.doctor.run_report import JudgedCheckpoint, RunReport
from ckptfix.urls import as_path
from ckptfix.words import plural, some

MOST_DATA = 1 << 30
"""Bytes of the largest checkpoint whose tensors are read: half a second or so."""

MOST_READ = 3
"""Number of checkpoints whose tensors are read, from the newest, until one has no NaN."""


def diagnosis_of(path: str, *, fast: bool = False) -> Diagnosis | None:
    """Examine the run folder at `path`; None if it is a model, a single checkpoint, or no run.

    Args:
        fast: read no tensor data.
    """
    run = run_of(path)
    return None if run is None else _diagnosed(path, run, fast=fast)


def run_of(path: str) -> RunFolder | None:
    """Return the run in the folder `path`, judged by names; None if it is a model, a single checkpoint, or no run."""
    if found_as(path) != "folder":
        return None
    run = find_run(path)
    return run if run is not None and _is_several(path, run) else None


def _is_several(path: str, run: RunFolder) -> bool:
    """Return whether the folder means its run: it has several checkpoints, and no model of its own.

    A folder with one checkpoint is a run if nothing else would be examined, or if its pointer is wrong.
    """
    if not run.checkpoints:
        return False
    try:
        several = len(run.checkpoints) > 1
        wrong = any(row.place == path and _is_lost(row) for row in run.pointers)
        if run.path == path and run.layout.pointed and (several or wrong):
            return True
        own = located(path)
        inside = {one.path for one in run.checkpoints}
        if is_folder_checkpoint(path) or (own != path and own not in inside):
            return False
        return several or kinds.describe(path, b"", 0).id == "no-checkpoint"
    except (CkptfixError, OSError):
        return True


def _diagnosed(path: str, run: RunFolder, *, fast: bool) -> Diagnosis | None:
    """Return the diagnosis of a run; None if its files have the names, and not the content, of its layout."""
    looked = [ExaminedCheckpoint(run, one) for one in run.checkpoints]
    for one in looked:
        one.peers = [other for other in looked if other is not one]
    if run.layout.files and not any(one.is_of_layout() for one in looked):
        return None
    judged = [one.judged() for one in looked]
    judged.sort(key=_age)
    judged, read = (judged, []) if fast else _read(looked, judged)
    resume = _resume(judged)
    judged = _excused(judged, resume)
    latest = [*_latest(run, judged, resume)]
    findings = [row.finding for one in reversed(judged) for row in one.troubles] + latest
    if resume is None:
        findings.append(found("run-lost"))
    findings.sort(key=lambda row: RANK[row.severity])
    remedies = [remedy_of(row, path) for row in findings]
    told = tuple(replace(row, fix=fix.text, steps=fix.steps) for row, fix in zip(findings, remedies, strict=True))
    how = None if resume is None else _how(run, resume)
    texts = tuple((row.path, row.text) for row in run.pointers)
    report = RunReport(run.layout.name, run.layout.title, run.path, tuple(judged), resume, how, texts)
    title = f"a run of {run.layout.title} with {plural(len(judged), 'checkpoint')}"
    headers = f"the names, directories and headers of {plural(len(judged), 'checkpoint')}"
    looks = (headers, f"the tensor data of {some(read)}" if read else "and no tensor data (-r reads it)")
    return Diagnosis(path, None, title, 0, told, looks, None, tuple(remedies), run=report)


def _read(
    looked: Sequence[ExaminedCheckpoint], judged: list[JudgedCheckpoint]
) -> tuple[list[JudgedCheckpoint], list[str]]:
    """Return `judged` with the tensors read too, and the names of the checkpoints whose tensors were read.

    They are those of the checkpoint to resume from, and of the one before it if those are damaged or NaN.
    """
    by_path = {one.one.path: one for one in looked}
    read: list[str] = []
    while len(read) < MOST_READ:
        resume = _resume(judged)
        if resume is None or resume.name in read or resume.size > MOST_DATA or not is_local(resume.path):
            break
        one = by_path[resume.path]
        again = ExaminedCheckpoint(one.run, one.one, one.peers, fast=False).judged()
        read.append(resume.name)
        judged = [again if row is resume else row for row in judged]
    return judged, read


def _age(one: JudgedCheckpoint) -> tuple[float, float, list[tuple[int, str]]]:
    """Return the sort key of a checkpoint: its step, its epoch or the number in its name, and its name."""
    named = re.search(r"\d{1,18}", one.name)
    number = one.epoch if one.epoch is not None or named is None else int(named[0])
    step, epoch = (-1 if value is None else value for value in (one.step, number))
    return step, epoch, natural_key(one.name)


def _resume(judged: Sequence[JudgedCheckpoint]) -> JudgedCheckpoint | None:
    for states in (("whole", "usable"), ("weights",)):
        for one in reversed(judged):
            if one.state in states:
                return one
    return None


def _excused(judged: list[JudgedCheckpoint], resume: JudgedCheckpoint | None) -> list[JudgedCheckpoint]:
    """Lower to a warning that a checkpoint older than `resume` lacks a part: it may have been deleted to save space."""
    if resume is None:
        return judged
    rows = []
    for place, one in enumerate(judged):
        if place < judged.index(resume):
            troubles = tuple(
                replace(row, finding=replace(row.finding, severity="warning"))
                if row.finding.id == "run-incomplete" else row
                for row in one.troubles
            )  # fmt: skip
            one = replace(one, troubles=troubles)
        rows.append(one)
    return rows


def _how(run: RunFolder, one: JudgedCheckpoint) -> str:
    resume = run.layout.resume
    in_python = "(" in resume
    path, place = (text if in_python else quoted(text) for text in (one.path, run.path))
    return resume.format(path=path, run=place, name=one.name, step="STEP" if one.step is None else one.step)


def _latest(run: RunFolder, judged: Sequence[JudgedCheckpoint], resume: JudgedCheckpoint | None) -> Iterator[Finding]:
    """Yield what is wrong with the files of the run that name its newest checkpoint."""
    states = {one.name: one for one in judged}
    if run.layout.pointed and resume is not None and not any(row.place == run.path for row in run.pointers):
        name = run.layout.pointers[0]
        pointer = RunPointer(str(as_path(run.path, name)), run.path, None, "")
        message = f"{name} is missing: without it, {run.layout.title} finds no checkpoint unless it is named"
        yield found("run-latest", message, where=name, severity="warning", fix=_pointed(run, pointer, resume))
    for row in run.pointers:
        if row.place != run.path:
            continue  # each checkpoint reports its own
        name = as_path(row.path).name
        fix = _pointed(run, row, resume)
        if row.link:
            yield found("run-latest", f"{name} links to {row.text or 'a file'}, which is missing", where=name, fix=fix)
        elif row.tag is None:
            text = repr(printable(row.text[:40]))
            yield found("run-latest", f"{name} names no checkpoint: its text is {text}", where=name, fix=fix)
        elif row.tag not in states:
            if _is_lost(row):
                yield found("run-latest", f"{name} names {row.tag}, which is missing", where=name, fix=fix)
        elif states[row.tag].state in ("broken", "unfinished"):
            yield found("run-latest", f"{name} names {row.tag}, which {states[row.tag].brief}", where=name, fix=fix)
        elif resume is not None and judged.index(resume) > judged.index(states[row.tag]):
            message = f"{name} names {row.tag}, which is older than {resume.name}"
            yield found("run-latest", message, where=name, severity="warning", fix=fix)


def _is_lost(row: RunPointer) -> bool:
    """Return whether a pointer names no folder that exists."""
    return row.tag is None or found_as(str(as_path(row.place, row.tag))) != "folder"


def _pointed(run: RunFolder, row: RunPointer, resume: JudgedCheckpoint | None) -> str:
    """Return the shell command that lets a pointer name the checkpoint to resume from; empty without one."""
    if resume is None:
        return ""
    if row.link:
        return f"ln -sfn {quoted(resume.name)} {quoted(row.path)}"
    number = re.search(r"\d+", resume.name)
    return set_pointer(row.path, str(int(number[0])) if run.layout.tag and number else resume.name)

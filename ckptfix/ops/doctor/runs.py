"""Examination of a run folder: whether each checkpoint of a training run is complete, and which to resume from.

Only directories and headers are read: the structure of each file, never its tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import PurePosixPath
from typing import Any

from ckptfix.checkpoint import Checkpoint
from ckptfix.commands import command, quoted
from ckptfix.errors import CkptfixError, NoFile, NoSuchFile, Unsupported, printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import RANK, Remedy, found, remedy_of
from ckptfix.formats import is_folder_checkpoint, located, open_checkpoint
from ckptfix.formats.runs import RunCheckpoint, RunFolder, RunPart, RunPointer, SavedStep, find_run, natural_key, ranks_of
from ckptfix.io.source import found_as, open_source
from ckptfix.ops.doctor import examine
from ckptfix.ops.doctor.report import Diagnosis
from ckptfix.ops.doctor.run_report import JudgedCheckpoint, PartState, RunReport, RunState, RunTrouble
from ckptfix.urls import as_path, is_url
from ckptfix.words import plural, some

MOST_JSON = 1 << 26
"""Greatest size of a trainer's state that is read, in bytes; it has a row for each logged step."""

MOST_RANKS = 1 << 20
"""Greatest number of ranks that names may state; more is not a job."""

SLACK = 20, 100
"""Steps that mixed precision may have skipped: a number, or one step in so many."""


def diagnosis_of(path: str) -> Diagnosis | None:
    """Examine the run folder at `path`; None if it is a model, a single checkpoint, or no run."""
    if found_as(path) != "folder":
        return None
    run = find_run(path)
    if run is None or not _is_several(path, run):
        return None
    return _diagnosed(path, run)


def _is_several(path: str, run: RunFolder) -> bool:
    """Return whether the folder means its run: it has several checkpoints, and no model of its own.

    A folder with one checkpoint is a run if nothing else would be examined, or if its pointer is wrong.
    """
    if not run.checkpoints:
        return False
    try:
        whole = is_folder_checkpoint(path)
        own = path if whole else located(path)
    except (CkptfixError, OSError):
        whole, own = False, path
    if run.path == path and run.layout.pointers and whole:
        names = {one.name for one in run.checkpoints}
        lost = any(row.place == path and row.tag not in names for row in run.pointers)
        return len(run.checkpoints) > 1 or lost
    if whole:
        return False
    inside = {one.path for one in run.checkpoints}
    if own != path and not any(own == one or own.startswith(f"{one}/") for one in inside):
        return False
    return len(run.checkpoints) > 1 or own == path


def _diagnosed(path: str, run: RunFolder) -> Diagnosis:
    looked = [_Look(run, one) for one in run.checkpoints]
    for one in looked:
        one.peers = [other for other in looked if other is not one]
    judged = [one.judged() for one in looked]
    judged.sort(key=lambda one: (-1 if one.step is None else one.step, natural_key(one.name)))
    resume = _resume(judged)
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
    looks = (f"the names, directories and headers of {plural(len(judged), 'checkpoint')}", "and no tensor data")
    return Diagnosis(path, None, title, 0, told, looks, None, tuple(remedies), run=report)


def _resume(judged: Sequence[JudgedCheckpoint]) -> JudgedCheckpoint | None:
    for states in (("whole", "usable"), ("weights",)):
        for one in reversed(judged):
            if one.state in states:
                return one
    return None


def _how(run: RunFolder, one: JudgedCheckpoint) -> str:
    resume = run.layout.resume
    in_python = "(" in resume
    path, place = (text if in_python else quoted(text) for text in (one.path, run.path))
    return resume.format(path=path, run=place, name=one.name, step="STEP" if one.step is None else one.step)


def _latest(run: RunFolder, judged: Sequence[JudgedCheckpoint], resume: JudgedCheckpoint | None) -> Iterator[Finding]:
    """Yield what is wrong with the files of the run that name its newest checkpoint."""
    states = {one.name: one for one in judged}
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
            if found_as(str(as_path(row.place, row.tag))) != "folder":
                yield found("run-latest", f"{name} names {row.tag}, which is missing", where=name, fix=fix)
        elif states[row.tag].state in ("broken", "unfinished"):
            yield found("run-latest", f"{name} names {row.tag}, which {states[row.tag].brief}", where=name, fix=fix)
        elif resume is not None and judged.index(resume) > judged.index(states[row.tag]):
            message = f"{name} names {row.tag}, which is older than {resume.name}"
            yield found("run-latest", message, where=name, severity="warning", fix=fix)


def _pointed(run: RunFolder, row: RunPointer, resume: JudgedCheckpoint | None) -> str:
    """Return the shell command that lets a pointer name the checkpoint to resume from; empty without one."""
    if resume is None:
        return ""
    if row.link:
        return f"ln -sfn {quoted(resume.name)} {quoted(row.path)}"
    number = re.search(r"\d+", resume.name)
    return _written(row.path, str(int(number[0])) if run.layout.tag and number else resume.name)


def _written(path: str, text: str) -> str:
    if is_url(path):
        return f"write {text} into {path}"
    return f"printf %s {quoted(text)} > {quoted(path)}"


@dataclass(slots=True)
class _Unit:
    """A file or folder of a checkpoint that is judged at once.

    Attributes:
        path: its path.
        within: its path in the checkpoint; empty for the checkpoint itself.
        part: the part that it belongs to.
    """

    path: str
    within: str
    part: RunPart


class _Look:
    """The examination of one checkpoint of a run; `peers` are those of the other checkpoints."""

    def __init__(self, run: RunFolder, one: RunCheckpoint) -> None:
        self.run = run
        self.one = one
        self.peers: list[_Look] = []
        self.troubles: list[RunTrouble] = []
        self.damaged: dict[str, str] = {}
        """Name of a part -> ``"damaged"`` or ``"missing"``."""

    def add(
        self, id: str, brief: str, message: str, within: str = "", *, warning: bool = False, fix: str | None = None
    ) -> None:
        where = "/".join(filter(None, (self.one.name, within if self.one.folder else "")))
        severity = "warning" if warning else None
        self.troubles.append(RunTrouble(found(id, message, where=where, severity=severity, fix=fix), brief))

    @cached_property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Name of a part -> the paths in the checkpoint that belong to it."""
        if not self.one.folder:
            return {part.what: () for part in self.run.layout.parts}
        return {
            part.what: tuple(path for path in sorted(self.one.members) if part.names and re.fullmatch(part.names, path))
            for part in self.run.layout.parts
        }

    @cached_property
    def content(self) -> Checkpoint | None:
        """The checkpoint itself, if it is one file, or a folder whose keys show its parts; None if it is damaged."""
        keyed = any(part.keys and (not self.one.folder or not part.names) for part in self.run.layout.parts)
        if not keyed:
            return None
        try:
            return open_checkpoint(self.one.path)
        except (CkptfixError, OSError):
            return None

    @cached_property
    def keys(self) -> frozenset[str]:
        """The keys at the top level of `content`."""
        content = self.content
        if content is None:
            return frozenset()
        try:
            names = [entry.name for entry in content.entries] + [address for address, _ in content.values()]
        except CkptfixError:
            return frozenset()
        tops = {name.partition("/")[0] for name in names} | {state.at.partition("/")[0] for state in content.state_dicts}
        tops |= {site.at.partition("/")[0] for site in content.sites}
        return frozenset(tops | {top.partition(".")[0] for top in tops})

    def has(self, part: RunPart) -> bool:
        """Return whether the checkpoint has a part, whole or not."""
        if self.files[part.what]:
            return True
        if part.inside and any(re.fullmatch(part.inside, path) for path in self.one.members):
            return True
        by_keys = part.keys and (not self.one.folder or not part.names)
        # What cannot be read is reported as damage, and not as missing.
        return bool(by_keys and (self.content is None or any(re.fullmatch(part.keys, key) for key in self.keys)))

    def judged(self) -> JudgedCheckpoint:
        one = self.one
        self._finish()
        if not self.troubles:
            self._parts()
        for unit in self._units():
            self._judge(unit)
        numbers = self._steps()
        self._pointers()
        self.troubles.sort(key=lambda row: RANK[row.finding.severity])
        step, epoch, loss = self._progress(numbers)
        parts = tuple(
            PartState(part.what, self.files[part.what], self.damaged.get(part.what, "whole"))  # type: ignore[arg-type]
            for part in self.run.layout.parts
            if self.has(part) or part.what in self.damaged
        )
        size = sum(one.members.values())
        return JudgedCheckpoint(one.name, one.path, step, epoch, loss, size, self._state(), parts, tuple(self.troubles))

    def _state(self) -> RunState:
        ids = {row.finding.id for row in self.troubles if row.finding.severity == "error"}
        if ids:
            return "unfinished" if "run-unfinished" in ids else "broken"
        if any(row.finding.id == "run-incomplete" and self.damaged.get("optimizer") for row in self.troubles):
            return "weights"
        return "usable" if self.troubles else "whole"

    def _finish(self) -> None:
        """Report a checkpoint whose save was not finished."""
        one = self.one
        brief = "was not saved completely"
        if one.unfinished:
            self.add("run-unfinished", brief, f"its save was not finished: {one.unfinished}")
        elif one.folder and not one.members:
            self.add("run-unfinished", brief, "its save was not finished: the folder has no files")
        elif one.folder:
            above = {path.rpartition("/")[0] for path in one.members if path.endswith(".distcp")}
            for folder in sorted(above):
                index = f"{folder}/.metadata".lstrip("/")
                if index not in one.members:
                    message = f"its save was not finished: {index} is missing, which is written last"
                    self.add("run-unfinished", brief, message, index)

    def _parts(self) -> None:
        """Report parts that are missing, and ranks without a file."""
        for part in self.run.layout.parts:
            if self.has(part):
                self._ranks(part)
                continue
            others = any(other.has(part) for other in self.peers)
            if part.need != "always" and not others:
                continue
            named = next((path for other in self.peers for path in other.files[part.what]), "")
            self.damaged[part.what] = "missing"
            its = f"lacks its {part.what}"
            message = f"{its}: {PurePosixPath(named).name} is missing" if named and others else its
            only = not others and part.what != "model" and bool(self.peers or self.one.folder)
            brief = "has only weights" if only and part.what == "optimizer" else its
            self.add("run-incomplete", brief, message, named if named and "/" not in named else "",
                     warning=only or part.need == "exact")  # fmt: skip

    def _ranks(self, part: RunPart) -> None:
        paths = self.files[part.what]
        if any(_is_of_deepspeed(path) for path in paths):
            return  # the files themselves state how many ranks there are
        own = ranks_of(part, paths)
        if not own:
            return
        beside = max((ranks_of(part, other.files[part.what]) for other in self._neighbors()), key=len, default={})
        missing = sorted(_expected([*own, *beside]) - own.keys())
        if not missing:
            return
        if part.need != "exact":
            self.damaged[part.what] = "damaged"
        shown = some(["_".join(map(str, rank)) for rank in missing], 4)
        word = "rank" if len(missing) == 1 else "ranks"
        last = len(missing) == len(beside) - len(own) and len(own) == len(_expected(own))
        less = "; or the job had fewer processes" if last else ""
        brief = f"lacks the {part.what} of {word} {shown}"
        self.add("run-rank", brief, f"{brief} of {len(own) + len(missing)}{less}", warning=part.need == "exact")

    def _neighbors(self) -> list[_Look]:
        """Return the examinations of the checkpoints before and after this one."""
        order = [one.path for one in self.run.checkpoints]
        place = order.index(self.one.path)
        near = order[max(place - 1, 0) : place + 2]
        return [other for other in self.peers if other.one.path in near]

    def _units(self) -> Iterator[_Unit]:
        """Yield the files and folders to judge, each once."""
        one = self.one
        if not one.folder:
            yield _Unit(one.path, "", self.run.layout.parts[0])
            return
        seen: set[str] = set()
        of_parts = [(path, part) for part in self.run.layout.parts for path in self._paths(part)]
        indexed = {path.rpartition("/")[0] for path, _ in of_parts if path.endswith(".index.json")}
        for path, part in of_parts:
            folder, _, name = path.rpartition("/")
            if name == ".metadata" or _is_of_deepspeed(path):
                within = folder
            elif folder in indexed and re.search(r"-\d{5}-of-\d{5}\.", name):
                continue  # the index names it
            else:
                within = path
            if within not in seen:
                seen.add(within)
                yield _Unit(str(as_path(one.path, within)) if within else one.path, within, part)

    def _paths(self, part: RunPart) -> list[str]:
        found = list(self.files[part.what])
        return found + [path for path in self.one.members if part.inside and re.fullmatch(part.inside, path)]

    def _judge(self, unit: _Unit) -> None:
        """Report the damage of a file or folder."""
        if unit.within.endswith(".json") and not unit.within.endswith(".index.json"):
            if _json(unit.path) is None:
                self._report(unit, unit.within, "damaged", "is not a JSON object")
            return
        if unit.within and self.one.members.get(unit.within) == 0:
            self._report(unit, unit.within, "empty-file", "is empty")
            return
        try:
            damage = examine.damage_of(unit.path)
        except NoFile:
            return
        except CkptfixError as error:
            self._report(unit, unit.within, "damaged", f"cannot be read: {error.message}")
            return
        if damage:
            first = damage[0]
            more = f"; {plural(len(damage) - 1, 'more finding')}" if len(damage) > 1 else ""
            self._report(unit, self._named(unit, first), first.id, f"{first.message}{more}")

    def _named(self, unit: _Unit, finding: Finding) -> str:
        """Return the path in the checkpoint of the file that a finding about `unit` names."""
        name = PurePosixPath(finding.where.partition(": ")[0]).name if finding.where else ""
        if not self.one.folder or unit.within in self.one.members or not re.search(r"\.[a-z]+$", name):
            return unit.within
        return f"{unit.within}/{name}" if unit.within else name

    def _report(self, unit: _Unit, within: str, id: str, message: str) -> None:
        part = next((row for row in self.run.layout.parts if row.names and re.fullmatch(row.names, within)), unit.part)
        name = PurePosixPath(within).name or self.one.name
        its = f"its {part.what}" if self.one.folder else "parts"
        lost = self.one.folder and within not in self.one.members and "." in name and id != "dcp-no-metadata"
        exact = part.need == "exact"
        if lost:
            self.damaged[part.what] = "damaged"
            self.add("run-rank", f"lacks {name}", f"{name} is missing: {message}", within)
            return
        if not exact:
            self.damaged[part.what] = "damaged"
        cut = self._cut(within)
        if cut is not None:
            percent, own, whole, peer = cut
            brief = f"lacks {its} (cut at {percent} %)" if self.one.folder else f"is cut at {percent} %"
            text = f"{name} is cut at {percent} % ({own:,} of {whole:,} bytes, as in {peer}): {message}"
        else:
            brief = f"has damage in {its}" if self.one.folder else "is damaged"
            brief = f"lacks {its} (cut)" if id == "truncated" and self.one.folder else brief
            text = f"{name} {message}" if message.startswith(("is ", "cannot ")) else f"{name}: {message}"
        self.add("run-damaged", brief, text, within, warning=exact)

    def _cut(self, within: str) -> tuple[int, int, int, str] | None:
        """Return where a damaged file ends, in percent of the same file of the nearest checkpoint, if that is larger."""
        key = _same(within) if self.one.folder else ""
        own = self.one.members.get(within if self.one.folder else self.one.name)
        if own is None:
            return None
        order = [one.path for one in self.run.checkpoints]
        place = order.index(self.one.path)
        near = sorted(self.peers, key=lambda other: abs(order.index(other.one.path) - place))
        for other in near:
            if not self.one.folder and not other.one.folder:
                whole = next(iter(other.one.members.values()))
            else:
                whole = next((size for path, size in other.one.members.items() if _same(path) == key), 0)
            if whole > own:
                return own * 100 // whole, own, whole, other.one.name
        return None

    def _steps(self) -> list[tuple[SavedStep, str, int]]:
        """Report files that have another step, and return all steps: (place, path in the checkpoint, step)."""
        rows: list[tuple[SavedStep, str, int]] = []
        for saved in self.run.layout.steps:
            if not self.one.folder:
                values = self._content_values()
                number = values.get(saved.key)
                rows += [(saved, "", number)] if type(number) is int else []
                continue
            for path in sorted(self.one.members):
                if saved.names and re.fullmatch(saved.names, path):
                    number = self._values(path).get(saved.key)
                    rows += [(saved, path, number)] if type(number) is int else []
        named = self.one.step
        for saved in self.run.layout.steps:
            own = [(path, number) for row, path, number in rows if row is saved]
            differ = len({number for _, number in own}) > 1
            off = [(path, number) for path, number in own if saved.named and named is not None and number != named]
            if not saved.sure and self.one.folder:
                off = [row for row in off if _is_far(row[1], named or 0)]
            if not differ and not off:
                continue
            path, number = off[0] if off else own[-1]
            beside = f"the name of the checkpoint has {named:,}" if off else f"{own[0][0]} has {own[0][1]:,}"
            text = f"{path or self.one.name} has {saved.key} {number:,}, and {beside}"
            mixed = f"{number:,} and {named if off else own[0][1]:,}"
            self.add("run-steps", f"mixes steps {mixed}", text, path, warning=not saved.sure)
        return rows

    def _content_values(self) -> dict[str, Any]:
        return {} if self.content is None else _scalars(self.content)

    def _values(self, path: str) -> Mapping[str, Any]:
        """Return the numbers at the top level of a file of the checkpoint; nothing if it is damaged."""
        place = str(as_path(self.one.path, path))
        if path.endswith(".json"):
            return _json(place) or {}
        try:
            return _scalars(open_checkpoint(place))
        except (CkptfixError, OSError):
            return {}

    def _pointers(self) -> None:
        """Report a pointer inside the checkpoint that names nothing in it."""
        folders = {path.partition("/")[0] for path in self.one.members if _is_of_deepspeed(path)}
        for row in self.run.pointers:
            if row.place != self.one.path or row.tag in folders:
                continue
            name = as_path(row.path).name
            fix = _written(row.path, sorted(folders, key=natural_key)[-1]) if folders else ""
            text = f"{name} names {row.tag or repr(printable(row.text[:40]))}, which is missing"
            self.add("run-latest", f"has a wrong file {name}", text, name, fix=fix)

    def _progress(self, rows: Sequence[tuple[SavedStep, str, int]]) -> tuple[int | None, float | None, float | None]:
        """Return step, epoch and loss, where the checkpoint records them."""
        inside = next((number for saved, _, number in rows if saved.named), None)
        step = inside if self.one.step is None or not self.one.folder and inside is not None else self.one.step
        values: Mapping[str, Any] = {}
        if not self.one.folder:
            values = self._content_values()
        else:
            state = next((path for path in self.one.members if path.endswith("trainer_state.json")), None)
            values = {} if state is None else _json(str(as_path(self.one.path, state))) or {}
        return step, _real(values.get("epoch")), _loss(values)


def _is_far(number: int, named: int) -> bool:
    """Return whether a scheduler's count differs by more than the steps that mixed precision skips."""
    return not 0 <= named - number <= max(SLACK[0], named // SLACK[1])


def _is_of_deepspeed(path: str) -> bool:
    return path.endswith(("_model_states.pt", "_optim_states.pt")) and "layer_" not in path


def _same(path: str) -> str:
    """Return a path without the step in the names of its folders, to find the same file in another checkpoint."""
    folder, slash, name = path.rpartition("/")
    return re.sub(r"\d+", "#", folder) + slash + name


def _expected(ranks: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return all ranks of a job that has at least `ranks`: each group of processes is a whole grid."""
    rows = [rank for rank in ranks]
    width = max(map(len, rows), default=0)
    rows = [rank for rank in rows if len(rank) == width]
    sizes = [max(column) + 1 for column in zip(*rows, strict=True)]
    count = 1
    for size in sizes:
        count *= size
    return set(rows) if count > MOST_RANKS else set(product(*(range(size) for size in sizes)))


def _scalars(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the numbers at the top level of a checkpoint, and of dicts one level below."""
    try:
        rows = checkpoint.values()
        return {address: value for address, value in rows if type(value) in (int, float) and address.count("/") < 2}
    except CkptfixError:
        return {}


def _json(path: str) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if it cannot be read, is too large, or is not an object."""
    try:
        with open_source(path) as source:
            if source.size > MOST_JSON:
                return None
            value = json.loads(source.read(0, source.size))
    except (CkptfixError, OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _real(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18 else None


def _loss(values: Mapping[str, Any]) -> float | None:
    """Return the last loss that a trainer logged."""
    history = values.get("log_history")
    for row in reversed(history if isinstance(history, list) else []):
        if isinstance(row, dict) and (loss := _real(row.get("loss"))) is not None:
            return loss
    return next((loss for key in ("loss", "train_loss", "val_loss") if (loss := _real(values.get(key))) is not None), None)

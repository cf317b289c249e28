"""Examination of one checkpoint of a run: its parts, the ranks of each, its damage, and the steps that it states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint import Checkpoint
from ckptfix.commands import quoted
from ckptfix.dataclass import cached_property, dataclass
from ckptfix.errors import CkptfixError, NoFile, printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import RANK, found
from ckptfix.formats import open_checkpoint
from ckptfix.formats.members import CHECKPOINTS
from ckptfix.formats.runs import (
    MODEL,
    OPTIMIZER,
    RunCheckpoint,
    RunFolder,
    RunPart,
    SavedStep,
    is_index_of_shards,
    is_shard,
    means_its_folder,
    natural_key,
    not_written_yet,
    ranks_of,
    states_ranks,
)
from ckptfix.ops.doctor import examine
from ckptfix.ops.doctor.run_report import JudgedCheckpoint, PartState, RunState, RunTrouble
from ckptfix.ops.inspect.training import Progress, json_object, progress_of
from ckptfix.urls import as_path, is_url
from ckptfix.words import plural, some

MOST_RANKS = 1 << 20
"""Greatest number of ranks that names may state; more is not a job."""

_ANYWAY = "resume anyway: the process of that rank starts with other random numbers"
_EARLIER = "resume from an earlier checkpoint, with a lower learning rate or other data: the values cannot be recovered"
_WEIGHTS = "start from its weights with a new optimizer, or resume from a checkpoint that has one"

SLACK = 20, 100
"""Steps that mixed precision may have skipped: a number, or one step in so many."""


def set_pointer(path: str, text: str) -> str:
    """Return the shell command that writes `text` into the pointer at `path`; words for a URL."""
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


class _Content(NamedTuple):
    """The content of a checkpoint, as far as it shows parts and progress; empty if it cannot be read.

    Attributes:
        keys: the keys at the top level.
        numbers: the numbers at the top level, and of dicts one level below, by address.
    """

    keys: frozenset[str] = frozenset()
    numbers: Mapping[str, Any] = {}


class ExaminedCheckpoint:
    """The examination of one checkpoint of a run; `peers` are those of the other checkpoints."""

    def __init__(
        self, run: RunFolder, one: RunCheckpoint, peers: Sequence[ExaminedCheckpoint] = (), *, fast: bool = True
    ) -> None:
        self.run = run
        self.one = one
        self.peers = list(peers)
        self.fast = fast
        self.troubles: list[RunTrouble] = []
        self.damaged: dict[str, str] = {}
        """Name of a part -> ``"damaged"`` or ``"missing"``."""

    def add(
        self, id: str, brief: str, message: str, within: str = "", *, warning: bool = False, fix: str | None = None
    ) -> None:
        where = "/".join(filter(None, (self.one.name, within if self.one.folder else "")))
        row = found(id, message, where=where, severity="warning" if warning else None, fix=fix)
        self.troubles.append(RunTrouble(row, brief))

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
    def content(self) -> _Content:
        """The keys and numbers of a checkpoint that is one file, or a folder whose keys show its parts.

        The checkpoint itself is not kept: a run may have hundreds.
        """
        if not any(part.keys and (not self.one.folder or not part.names) for part in self.run.layout.parts):
            return _Content()
        try:
            checkpoint = open_checkpoint(self.one.path)
            names = [entry.name for entry in checkpoint.entries] + [address for address, _ in checkpoint.values()]
        except (CkptfixError, OSError):
            return _Content()
        names += [row.at for row in checkpoint.state_dicts] + [site.at for site in checkpoint.sites]
        tops = {name.partition("/")[0] for name in names}
        grouped = any(re.search(r"(^|/)param_groups/", name) for name in names)
        if grouped or any(row.optimizer for row in checkpoint.state_dicts):
            tops.add(OPTIMIZER)
        if any(row.weights and not row.optimizer for row in checkpoint.state_dicts):
            tops.add(MODEL)
        return _Content(frozenset(tops | {top.partition(".")[0] for top in tops}), _scalars(checkpoint))

    def is_of_layout(self) -> bool:
        """Return whether the checkpoint is a folder, or a file with the key of its layout."""
        return self.one.folder or self.run.layout.files in self.content.keys

    def has(self, part: RunPart) -> bool:
        """Return whether the checkpoint has a part, whole or not."""
        if self.files[part.what]:
            return True
        if part.inside and any(re.fullmatch(part.inside, path) for path in self.one.members):
            return True
        by_keys = part.keys and (not self.one.folder or not part.names)
        return bool(by_keys and any(re.fullmatch(part.keys, key) for key in self.content.keys))

    def judged(self) -> JudgedCheckpoint:
        one = self.one
        self._finish()
        if not self.troubles:
            for unit in self._units():
                self._judge(unit)
            self._parts()
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
        if any(row.finding.id == examine.NAN for row in self.troubles):
            return "broken"
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
            for last in not_written_yet(one.members):
                message = f"its save was not finished: {last} is missing, which is written last"
                self.add("run-unfinished", brief, message, last)

    def _parts(self) -> None:
        """Report parts that are missing, and ranks without a file."""
        damaged = any(row.finding.severity == "error" for row in self.troubles)
        for part in self.run.layout.parts:
            if self.has(part):
                self._ranks(part)
                continue
            if damaged and (not part.names or not self.one.folder):
                continue  # keys that cannot be read are a part of the damage
            others = any(other.has(part) for other in self.peers)
            if part.need != "always" and not others:
                continue
            named = next((path for other in self.peers for path in other.files[part.what]), "")
            self.damaged[part.what] = "missing"
            its = f"lacks its {part.what}"
            message = f"{its}: {PurePosixPath(named).name} is missing" if named and others else its
            # A file without the key was saved so; a folder may have lost the file.
            only = part.what != "model" and (not others or not self.one.folder)
            brief = "has only weights" if only and part.what == "optimizer" else its
            fix = _WEIGHTS if only else _ANYWAY if part.need == "exact" else None
            within = named if "/" not in named else ""
            self.add("run-incomplete", brief, message, within, warning=only or part.need == "exact", fix=fix)

    def _ranks(self, part: RunPart) -> None:
        paths = self.files[part.what]
        if any(map(states_ranks, paths)):
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
        exact = part.need == "exact"
        message = f"{brief} of {len(own) + len(missing)}{less}"
        self.add("run-rank", brief, message, warning=exact, fix=_ANYWAY if exact else None)

    def _neighbors(self) -> list[ExaminedCheckpoint]:
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
        indexed = {path.rpartition("/")[0] for path, _ in of_parts if is_index_of_shards(path)}
        for path, part in of_parts:
            folder, _, name = path.rpartition("/")
            if means_its_folder(path):
                within = folder
            elif folder in indexed and is_shard(name):
                continue  # the index names it
            elif not name.endswith((*CHECKPOINTS, ".pkl", ".json")):
                continue
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
        if unit.within.endswith(".json") and not is_index_of_shards(unit.within):
            if json_object(unit.path) is None:
                self._report(unit, unit.within, "damaged", "is not a JSON object")
            return
        if unit.within and self.one.members.get(unit.within) == 0:
            self._report(unit, unit.within, "empty-file", "is empty")
            return
        try:
            found_here = examine.damage_of(unit.path, fast=self.fast)
        except NoFile:
            return
        except CkptfixError as error:
            self._report(unit, unit.within, "damaged", f"cannot be read: {error.message}")
            return
        damage = [row for row in found_here if row.id != examine.NAN]
        for row in found_here:
            if row.id == examine.NAN and unit.part.what == self.run.layout.parts[0].what:
                message = f"{PurePosixPath(unit.within).name or self.one.name} has {row.message}"
                self.add(row.id, "has NaN in its weights", message, unit.within, warning=True, fix=_EARLIER)
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
        self.add("run-damaged", brief, text, within, warning=exact, fix=_ANYWAY if exact else None)

    def _cut(self, within: str) -> tuple[int, int, int, str] | None:
        """Return how much of a file is left, compared with the same file of the nearest checkpoint that has more of it.

        Returns: percent, bytes, bytes of the other file, name of the other checkpoint; None if no other is larger.
        """
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
                return round(own * 100 / whole), own, whole, other.one.name
        return None

    def _steps(self) -> list[tuple[SavedStep, str, int]]:
        """Report files that have another step, and return all steps: (place, path in the checkpoint, step)."""
        rows: list[tuple[SavedStep, str, int]] = []
        for saved in self.run.layout.steps:
            if not self.one.folder:
                number = self.content.numbers.get(saved.key)
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

    def _values(self, path: str) -> Mapping[str, Any]:
        """Return the numbers at the top level of a file of the checkpoint; nothing if it is damaged."""
        place = str(as_path(self.one.path, path))
        if path.endswith(".json"):
            return json_object(place) or {}
        try:
            return _scalars(open_checkpoint(place))
        except (CkptfixError, OSError):
            return {}

    def _pointers(self) -> None:
        """Report a pointer inside the checkpoint that names nothing in it."""
        folders = {path.partition("/")[0] for path in self.one.members if states_ranks(path)}
        for row in self.run.pointers:
            if row.place != self.one.path or row.tag in folders:
                continue
            name = as_path(row.path).name
            fix = set_pointer(row.path, sorted(folders, key=natural_key)[-1]) if folders else ""
            text = f"{name} names {row.tag or repr(printable(row.text[:40]))}, which is missing"
            self.add("run-latest", f"has a wrong file {name}", text, name, fix=fix)

    def _progress(self, rows: Sequence[tuple[SavedStep, str, int]]) -> Progress:
        """Return step, epoch and loss, where the checkpoint records them."""
        inside = next((number for saved, _, number in rows if saved.named), None)
        step = inside if self.one.step is None or (not self.one.folder and inside is not None) else self.one.step
        values: Mapping[str, Any] = {}
        if not self.one.folder:
            values = self.content.numbers
        else:
            state = next((path for path in self.one.members if path.endswith("trainer_state.json")), None)
            values = {} if state is None else json_object(str(as_path(self.one.path, state))) or {}
        known = progress_of(values)
        return known if step is None else known._replace(step=step)


def _is_far(number: int, named: int) -> bool:
    """Return whether a scheduler's count differs by more than the steps that mixed precision skips."""
    return not 0 <= named - number <= max(SLACK[0], named // SLACK[1])


def _same(path: str) -> str:
    """Return a path without the step in the names of its folders, to find the same file in another checkpoint."""
    folder, slash, name = path.rpartition("/")
    return re.sub(r"\d+", "#", folder) + slash + name


def _expected(ranks: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return all ranks of a job that has at least `ranks`: each group of processes is a whole grid."""
    rows = list(ranks)
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

"""``ckptfix ls``: a row for each checkpoint, with its format, its size, and the worst finding from its headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, UnknownFormat
from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.table import ENTRIES, as_rows
from ckptfix.formats import is_folder_checkpoint, located, may_be_checkpoint, open_checkpoint
from ckptfix.formats.members import members
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.ops import choose
from ckptfix.ops.dequantize.summary import QuantizedWeights
from ckptfix.ops.doctor import examine
from ckptfix.ops.inspect import describe
from ckptfix.ops.inspect.training import progress_of, state_beside
from ckptfix.pickles.collector import gc_paused
from ckptfix.urls import as_path


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint: a file, or a folder of files.

    Attributes:
        path: of the file or folder.
        format: its name; None for a path that is not a checkpoint, or cannot be read.
        size: bytes of all its files.
        tensors, parameters, dtypes, devices: as `inspect` counts them.
        wrappers: components that wrappers put into the keys.
        step, epoch, loss: the progress of the training; None where nothing records it.
        state: ``"whole"``, or what is wrong with the checkpoint; None unless it was checked.
        finding: id of the worst finding that is more than a note; None without one.
        severity: of that finding.
        plain_parameters: parameters of the model without its quantization; None if it has none, or if it is unknown.
        quantized: the quantized weights, by scheme, bits and group.
        error: why it cannot be read, in a few words; None if it can.
        notes: whether the choice of the model is in doubt (`choose.remarks`).
    """

    path: str
    format: str | None = None
    size: int = 0
    tensors: int = 0
    parameters: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    step: int | None = None
    epoch: float | None = None
    loss: float | None = None
    state: str | None = None
    finding: str | None = None
    severity: Severity | None = None
    error: str | None = None
    notes: tuple[Finding, ...] = ()
    plain_parameters: int | None = None
    quantized: tuple[QuantizedWeights, ...] = ()

    @property
    def quantization(self) -> str | None:
        """The schemes of the quantized weights, each with its bits; None without any."""
        found = dict.fromkeys(row.brief for row in self.quantized)
        return ", ".join(found) or None

    @property
    def all_parameters(self) -> int:
        """Parameters of the model as it was before it was quantized, if they are known."""
        return self.parameters if self.plain_parameters is None else self.plain_parameters

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return {
            "path": self.path,
            "format": self.format,
            "size": self.size,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "dtypes": dict(self.dtypes),
            "devices": dict(self.devices),
            "wrappers": list(self.wrappers),
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "state": self.state,
            "finding": self.finding,
            "severity": self.severity,
            "reason": self.error,
            "plain_parameters": self.plain_parameters,
            "quantized": [row.as_dict() for row in self.quantized],
            "findings": as_rows(self.notes, self.path),
        }


def checkpoints(path: str) -> Iterator[str]:
    """Yield the file or checkpoint folder `path`; for any other folder, the checkpoints in it.

    A folder inside counts as one checkpoint if it is a checkpoint of many files, or holds one model. A file counts if
    it has the suffix of a checkpoint, or the content of one. Several saves of DeepSpeed are several checkpoints.
    """
    try:
        if found_as(path) != "folder":
            yield path
            return
        if is_folder_checkpoint(path):
            from ckptfix.ops.doctor import runs

            run = runs.run_of(path)
            yield from [path] if run is None else [one.path for one in run.checkpoints]
            return
        found = members(path)
    except OSError:
        yield path
        return
    for member in found:
        inner = str(as_path(path, member.name))
        if member.folder:
            if is_folder_checkpoint(inner) or located(inner) != inner:
                yield inner
        elif member.may_be_checkpoint or (member.size and member.role != "beside" and _is_content(inner)):
            yield inner


def _is_content(path: str) -> bool:
    """Return whether a file without a checkpoint's suffix has tensors, or is a damaged checkpoint."""
    if not may_be_checkpoint(path):
        return False
    try:
        return bool(open_checkpoint(path).entries)
    except UnknownFormat:
        return False
    except CkptfixError:
        return True


def rows(path: str, *, check: bool = False) -> list[ListedCheckpoint]:
    """Return a row for each of the `checkpoints` at `path`.

    Args:
        check: state whether each is whole. In a run folder, a checkpoint that lacks a part that resuming needs is not,
            and unfinished checkpoints have rows too.
    """
    done = None
    if check and found_as(path) == "folder":
        from ckptfix.ops.doctor import runs

        done = runs.diagnosis_of(path, fast=True)
    judged = {} if done is None or done.run is None else {one.path: one for one in done.run.checkpoints}
    found = list(checkpoints(path))
    found += [inner for inner in judged if inner not in found]
    made = []
    for inner in found:
        one = judged.get(inner)
        row = listed(inner, check=check)
        if one is not None:
            state = row.state if one.state == "whole" else f"{one.state}: {one.brief}"
            row = replace(row, step=one.step if row.step is None else row.step, state=state)
        made.append(row)
    return made


def _step_of(path: str) -> int | None:
    """Return the step that the name of a checkpoint states."""
    name = as_path(path).name
    if not any(character.isdigit() for character in name):
        return None
    from ckptfix.formats.runs import step_in_name

    return step_in_name(name)


@gc_paused
@shares_open_files()
def listed(path: str, *, check: bool = False) -> ListedCheckpoint:
    """Return the row of a file or folder; only headers are read. An unreadable file gets a row too.

    Args:
        check: read the data too, and state whether the checkpoint and the files beside it are whole.
    """
    try:
        checkpoint = open_checkpoint(path)
    except CkptfixError as error:
        row = _unread(path, error)
        return replace(row, state=row.finding or "unreadable") if check else row
    seen = describe.inspect(checkpoint)
    folder = found_as(path) == "folder"
    progress = progress_of({**(state_beside(path) if folder else {}), **seen.training})
    worst = examine.examine(checkpoint.path, fast=True, checkpoint=checkpoint).cause
    return ListedCheckpoint(
        path=path,
        format=seen.format,
        size=seen.size,
        tensors=seen.tensors,
        parameters=seen.parameters,
        dtypes=seen.dtypes,
        devices=seen.devices,
        wrappers=tuple(seen.wrappers),
        step=_step_of(path) if progress.step is None else progress.step,
        epoch=progress.epoch,
        loss=progress.loss,
        state=_state(path) if check else None,
        finding=None if worst is None else worst.id,
        severity=None if worst is None else worst.severity,
        notes=tuple(choose.remarks(checkpoint)),
        plain_parameters=seen.plain_parameters,
        quantized=seen.quantized,
    )


def _state(path: str) -> str:
    """Return ``"whole"``, or the id and the place of the first damage of a checkpoint and of the files beside it."""
    try:
        damage = next(filter(examine.is_damage, examine.examine(path).findings), None)
    except CkptfixError as error:
        return error.message
    if damage is None:
        return "whole"
    return f"{damage.id}: {damage.where}" if damage.where else damage.id


def _unread(path: str, error: CkptfixError) -> ListedCheckpoint:
    """Return the row of a path that is not a checkpoint, is damaged beyond its directory, or cannot be opened."""
    try:
        size = as_path(path).stat().st_size if found_as(path) == "file" else 0
        cause = examine.examine(path, fast=True).cause
    except (CkptfixError, OSError):
        return ListedCheckpoint(path=path, severity="error", error=error.message)
    if cause is None:
        return ListedCheckpoint(path=path, size=size, severity="error", error=error.message)
    return ListedCheckpoint(
        path=path, size=size, finding=cause.id, severity=cause.severity, error=ENTRIES[cause.id].title
    )

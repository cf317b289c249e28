"""``ckptfix ls``: a row for each checkpoint, with its format, its size, and the worst finding from its headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.table import ENTRIES, as_rows
from ckptfix.formats import is_folder_checkpoint, located, open_checkpoint
from ckptfix.formats.members import members
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.ops import choose
from ckptfix.ops.doctor import examine
from ckptfix.ops.inspect import describe
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
        finding: id of the worst finding that is more than a note; None without one.
        severity: of that finding.
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
    finding: str | None = None
    severity: Severity | None = None
    error: str | None = None
    notes: tuple[Finding, ...] = ()

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
            "finding": self.finding,
            "severity": self.severity,
            "reason": self.error,
            "findings": as_rows(self.notes, self.path),
        }


def checkpoints(path: str) -> Iterator[str]:
    """Yield the file or checkpoint folder `path`; for any other folder, the checkpoints in it.

    A folder inside counts as one checkpoint if it is a checkpoint of many files, or holds one model.
    """
    try:
        if found_as(path) != "folder" or is_folder_checkpoint(path):
            yield path
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
        elif member.may_be_checkpoint:
            yield inner


@gc_paused
@shares_open_files()
def listed(path: str) -> ListedCheckpoint:
    """Return the row of a file or folder; only headers are read. An unreadable file gets a row too."""
    try:
        checkpoint = open_checkpoint(path)
    except CkptfixError as error:
        return _unread(path, error)
    seen = describe.inspect(checkpoint)
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
        finding=None if worst is None else worst.id,
        severity=None if worst is None else worst.severity,
        notes=tuple(choose.remarks(checkpoint)),
    )


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

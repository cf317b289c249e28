"""``ckptfix.undo``: the reversal of in-place edits."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptfix import formats
from ckptfix.arguments import checks_types
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, StrPath, file_name, printable
from ckptfix.io.inplace import edit
from ckptfix.io.inplace.record import EditRecord
from ckptfix.io.source import is_file, shares_open_files
from ckptfix.io.unfinished_edits import JOURNAL, UNDO, beside
from ckptfix.ops.inplace import edits_of, refuse_far
from ckptfix.ops.writing import existing
from ckptfix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UndoResult:
    """The result of `undo`, or of its dry run.

    Attributes:
        path: the file or folder.
        edit: the edit that was undone; None if there was nothing to undo, or the edit had not begun.
        unfinished: whether the edit, or its undo, had not finished.
        left: the remaining edits, the latest first.
        undone: False after a dry run, and if there was nothing to undo.
        lines: a summary of one or two sentences.
    """

    path: str
    edit: EditRecord | None
    unfinished: bool
    left: tuple[EditRecord, ...]
    undone: bool
    lines: tuple[str, ...]
    exit_code: int = 0

    def __str__(self) -> str:
        return "\n".join(map(printable, self.lines))

    def __repr__(self) -> str:
        return f"<UndoResult: {self.path!r}, {'undone' if self.undone else 'not undone'}>"

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "path": self.path,
            "undone": self.undone,
            "unfinished": self.unfinished,
            "edit": None if self.edit is None else row(self.edit),
            "left": [row(record) for record in self.left],
            "summary": list(self.lines),
        }


def row(record: EditRecord) -> dict[str, Any]:
    """Return an edit for JSON."""
    files = [
        {"name": change.name, "size": change.after, "former_size": change.before} for change in record.changes
    ]
    return {"what": record.what, "when": record.when or None, "files": files}


@checks_types
@shares_open_files()
def undo(source: StrPath, *, dry_run: bool = False) -> UndoResult:
    """Undo the last in-place edit of a file or folder, byte for byte; repeat the call to undo earlier ones.

    An edit that did not finish, because its process or the machine was stopped, is undone; an undo that did not finish
    is completed.

    Raises:
        DamagedFile: another program wrote to it since; it is left unchanged.
        Refused: another program has it open, and its data would move.
        NoSuchFile, UnknownFormat, WriteFailed.
    """
    path = _meant(source)
    target = os.path.realpath(path)
    if os.path.lexists(beside(target, JOURNAL)):
        return _finish(path, target, dry_run=dry_run)
    records = _remembered(path) or edits(path)  # an open file cannot be moved, so it is read only if necessary
    if not records:
        if stale := edit.past(_target(path, target)):
            edit.refuse_changed(_target(path, target), stale[-1])
        return listed(path)
    last, *others = records
    if not dry_run:
        edit.take_back(_target(path, target), last)
    line = f"{'would undo' if dry_run else 'undid'}: {last.what}" + (f" ({last.when})" if last.when else "")
    line += "" if dry_run else f"; {Path(path).name} is byte for byte as before"
    lines = [line, *([f"{plural(len(others), 'earlier edit')} left"] if others else [])]
    return UndoResult(
        path=path, edit=last, unfinished=False, left=tuple(others), undone=not dry_run, lines=tuple(lines)
    )


def listed(source: StrPath) -> UndoResult:
    """List the in-place edits that `undo` can undo, without undoing any. Raises as `undo`."""
    records = edits(source)
    path = file_name(source)
    place = beside(_target(path, os.path.realpath(path)), UNDO)
    kept = Path(place).name
    why = f" ({kept} belongs to a different file)" if os.path.lexists(place) else ""
    none = f"nothing to undo: {path} has no in-place edits{why}"
    return UndoResult(
        path=path, edit=None, unfinished=False, left=records, undone=False, lines=tuple(map(_line, records)) or (none,)
    )


def _line(record: EditRecord) -> str:
    sizes = sum(change.before for change in record.changes)
    when = f"{record.when}  " if record.when else ""
    return f"{when}{record.what} (before: {sizes:,} bytes)"


def _finish(path: str, target: str, *, dry_run: bool) -> UndoResult:
    if dry_run:
        line = "would undo an edit that did not finish"
        return UndoResult(path=path, edit=None, unfinished=True, left=(), undone=False, lines=(line,))
    left: tuple[EditRecord, ...] = ()
    if edit.discard_foreign(target):
        line = "removed the journal of a different file, which was here before; this file is unchanged"
        return UndoResult(path=path, edit=None, unfinished=True, left=(), undone=False, lines=(line,))
    record = edit.finish(target)
    what = "it had not begun" if record is None else record.what
    line = f"undid an edit that did not finish: {what}"
    with suppress(CkptfixError):  # the restored file may not be a checkpoint
        left = edits(path)
    return UndoResult(path=path, edit=record, unfinished=True, left=left, undone=True, lines=(line,))


@shares_open_files()
def edits(source: StrPath) -> tuple[EditRecord, ...]:
    """Return the in-place edits of a file or folder that `undo` can undo, the latest first. Raises as `undo`."""
    path = _meant(source)
    if not (known := _remembered(path)):
        return tuple(edits_of(formats.open_checkpoint(path), described=True))
    with suppress(CkptfixError):  # these edits can be undone without reading the file
        return tuple(edits_of(formats.open_checkpoint(path), described=True))
    return known


def _remembered(path: str) -> tuple[EditRecord, ...]:
    """Return the edits in the undo file, the latest first."""
    return tuple(reversed(edit.remembered(_target(path, os.path.realpath(path)))))


def _meant(source: StrPath) -> str:
    """Return `source`, or the only model among the files of that folder."""
    refuse_far(file_name(source))
    path = existing(source)
    return path if os.path.lexists(beside(os.path.realpath(path), JOURNAL)) else formats.located(path)


def _target(path: str, target: str) -> str:
    """Return the file to undo; for the index of a folder, the folder."""
    place = Path(target)
    return str(place.parent) if path.endswith(".json") and is_file(place) and formats.detect(path).folder else target

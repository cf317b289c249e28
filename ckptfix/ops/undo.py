"""``ckptfix.undo``: an edit in place taken back."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfix import formats
from ckptfix.arguments import typed
from ckptfix.errors import CkptfixError, StrPath, file_name, printable
from ckptfix.io.inplace import edit
from ckptfix.io.inplace.record import Record
from ckptfix.io.source import opened_once
from ckptfix.io.unfinished import JOURNAL, UNDO, beside
from ckptfix.ops.inplace import edits_of, refuse_far
from ckptfix.ops.writing import existing
from ckptfix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UndoResult:
    """What `undo` did, or would do.

    Attributes:
        path: the file or folder.
        edit: what was taken back; None where there was nothing, or an edit that had not begun.
        unfinished: the edit had not finished, or its undo.
        left: the edits that are left, the latest first.
        undone: False after a dry run, and where there was nothing.
        lines: a sentence or two.
    """

    path: str
    edit: Record | None
    unfinished: bool
    left: tuple[Record, ...]
    undone: bool
    lines: tuple[str, ...]
    exit_code: int = 0

    def __str__(self) -> str:
        return "\n".join(map(printable, self.lines))

    def __repr__(self) -> str:
        return f"<UndoResult: {self.path!r}, {'undone' if self.undone else 'not undone'}>"

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "path": self.path,
            "undone": self.undone,
            "unfinished": self.unfinished,
            "edit": None if self.edit is None else row(self.edit),
            "left": [row(record) for record in self.left],
            "summary": list(self.lines),
        }


def row(record: Record) -> dict[str, Any]:
    """An edit for JSON."""
    files = [
        {"name": change.name, "size": change.after, "former_size": change.before} for change in record.changes
    ]
    return {"what": record.what, "when": record.when or None, "files": files}


@typed
@opened_once()
def undo(source: StrPath, *, dry_run: bool = False) -> UndoResult:
    """Take back the last edit in place of a file or folder, byte for byte; several go one by one.

    An edit that did not finish, because its process or the machine was stopped, is taken back; so is the rest of an
    undo that did not finish.

    Raises:
        DamagedFile: another program wrote to it since; nothing is done to it.
        Refused: another program has it open, and its data would move.
        NoSuchFile, UnknownFormat, WriteFailed.
    """
    path = _meant(source)
    target = os.path.realpath(path)
    if os.path.lexists(beside(target, JOURNAL)):
        return _finish(path, target, dry_run=dry_run)
    records = edits(path)
    if not records:
        if stale := edit.past(_target(path, target)):
            edit.refuse_changed(_target(path, target), stale[-1])
        return listed(path)
    last, *others = records
    if not dry_run:
        edit.take_back(_target(path, target), last)
    line = f"{'would take back' if dry_run else 'took back'}: {last.what}" + (f" ({last.when})" if last.when else "")
    lines = [line, *([f"{plural(len(others), 'earlier edit')} left"] if others else [])]
    return UndoResult(
        path=path, edit=last, unfinished=False, left=tuple(others), undone=not dry_run, lines=tuple(lines)
    )


def listed(source: StrPath) -> UndoResult:
    """The edits in place that `undo` can take back, and nothing done. Raises as `undo`."""
    records = edits(source)
    path = file_name(source)
    place = beside(_target(path, os.path.realpath(path)), UNDO)
    kept = Path(place).name
    why = f"what {kept} remembers is about another file" if os.path.lexists(place) else f"there is no {kept}"
    none = f"nothing to undo: no edit in place of {path} is known, and {why}"
    return UndoResult(
        path=path, edit=None, unfinished=False, left=records, undone=False, lines=tuple(map(_line, records)) or (none,)
    )


def _line(record: Record) -> str:
    sizes = sum(change.before for change in record.changes)
    when = f"{record.when}  " if record.when else ""
    return f"{when}{record.what} (before: {sizes:,} bytes)"


def _finish(path: str, target: str, *, dry_run: bool) -> UndoResult:
    if dry_run:
        line = "would take back an edit that did not finish"
        return UndoResult(path=path, edit=None, unfinished=True, left=(), undone=False, lines=(line,))
    left: tuple[Record, ...] = ()
    if edit.discard_foreign(target):
        line = "removed a journal that is about another file, written here before; nothing was done to this one"
        return UndoResult(path=path, edit=None, unfinished=True, left=(), undone=False, lines=(line,))
    record = edit.finish(target)
    what = "it had not begun" if record is None else record.what
    line = f"took back an edit that did not finish: {what}"
    with suppress(CkptfixError):  # it is what it was, which may be no checkpoint
        left = edits(path)
    return UndoResult(path=path, edit=record, unfinished=True, left=left, undone=True, lines=(line,))


@opened_once()
def edits(source: StrPath) -> tuple[Record, ...]:
    """The edits in place of a file or folder that `undo` can take back, the latest first. Raises as `undo`."""
    path = _meant(source)
    known = edit.remembered(_target(path, os.path.realpath(path)))
    return tuple(reversed(known)) or tuple(edits_of(formats.open_checkpoint(path)))


def _meant(source: StrPath) -> str:
    """`source`, or the one model among the files of that folder."""
    refuse_far(file_name(source))
    path = existing(source)
    return path if os.path.lexists(beside(os.path.realpath(path), JOURNAL)) else formats.located(path)


def _target(path: str, target: str) -> str:
    """The index of a folder stands for the folder."""
    place = Path(target)
    return str(place.parent) if path.endswith(".json") and place.is_file() and formats.detect(path).folder else target

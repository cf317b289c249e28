"""Which file of a folder was taken for the model, and what else there is one by its name."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.commands import command, verbatim
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import is_folder_checkpoint, located, open_checkpoint
from ckptfix.formats.members import UNKNOWN, kind_of, members, rivals_of
from ckptfix.urls import as_path


def not_taken(folder: str, taken: str) -> Iterator[Finding]:
    """A finding for each file in `folder` that is a model as `taken` is, and what its header says of the two.

    A hub has the same weights in two containers; a folder that was saved to twice, two models.
    """
    for name in rivals_of(folder, taken):
        path = str(as_path(folder, name))
        own, other = _shapes(taken), _shapes(path)
        if own is not None and own == other:
            ask = f"`{command('diff', taken, path)}` compares the values"
            message = f"{name} has the same names and shapes, and is not taken ({ask})"
            yield found("other-model", message, where=name, severity="info")
        else:
            what = "cannot be read" if other is None else "has other tensors"
            yield found("other-model", f"{name} {what}, and is not taken", where=name)


def not_looked_at(folder: str, taken: str) -> Iterator[Finding]:
    """A note for each folder in `folder` that has a checkpoint; a warning where no name says what the model is."""
    known = kind_of(as_path(taken).name) is not UNKNOWN
    try:
        inner = [row.name for row in members(folder) if row.folder and row.role in ("model", "other")]
    except OSError:
        return
    for name in inner:
        path = str(as_path(folder, name))
        if path == taken or not _has_checkpoint(path):
            continue
        fix = verbatim(f"`{command('doctor', folder)} -r` looks at all of them")
        message = f"{name} is a folder that has a checkpoint too, which was not looked at"
        yield found("other-model", message, where=name, severity="info" if known else "warning", fix=fix)


def _has_checkpoint(path: str) -> bool:
    try:
        return is_folder_checkpoint(path) or located(path) != path
    except CkptfixError:
        return False


def _shapes(path: str) -> dict[str, tuple[tuple[int, ...], str]] | None:
    try:
        return {entry.name: (entry.shape, entry.dtype) for entry in open_checkpoint(path).entries}
    except CkptfixError:
        return None

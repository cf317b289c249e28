"""Findings about a folder: which file was read as the model, and which others look like models by their names."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.commands import command, verbatim
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import is_folder_checkpoint, located, open_checkpoint
from ckptfix.formats.members import UNKNOWN, kind_of, members, rivals_of
from ckptfix.urls import as_path


def other_models(folder: str, taken: str) -> Iterator[Finding]:
    """Yield a finding for each file in `folder` that could be a model like `taken`, with how their headers compare.

    A hub has the same weights in two containers; a folder that was saved to twice has two models.
    """
    for name in rivals_of(folder, taken):
        path = str(as_path(folder, name))
        own, other = _shapes(taken), _shapes(path)
        if own is not None and own == other:
            ask = f"compare the values with `{command('diff', taken, path)}`"
            message = f"{name} has the same keys and shapes, and was not used ({ask})"
            yield found("other-model", message, where=name, severity="info")
        else:
            what = "cannot be read" if other is None else "has different tensors"
            yield found("other-model", f"{name} {what}, and was not used", where=name)


def unexamined_files(folder: str, taken: str) -> Iterator[Finding]:
    """Yield a note for each folder in `folder` with a checkpoint, or a warning if no name marks the model."""
    known = kind_of(as_path(taken).name) is not UNKNOWN
    try:
        inner = [row.name for row in members(folder) if row.folder and row.role in ("model", "other")]
    except OSError:
        return
    for name in inner:
        path = str(as_path(folder, name))
        if path == taken or not _has_checkpoint(path):
            continue
        fix = verbatim(f"check all of them with `{command('doctor', folder)} -r`")
        message = f"{name} is a folder with a checkpoint that was not checked"
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

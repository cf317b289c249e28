"""A check for an unfinished in-place edit of a file, made whenever a file is opened."""

from __future__ import annotations

import os

from ckptfix.commands import command
from ckptfix.errors import Refused

JOURNAL, UNDO = "ckptfix-journal", "ckptfix-undo"
"""Suffixes of the files that an in-place edit keeps beside its file."""


_NAME_MAX = 255
"""The longest name, in bytes, on every file system that supports in-place edits well."""


def beside(path: str, kind: str) -> str:
    """Return the path of the journal (`JOURNAL`) or the undo file (`UNDO`) of a file or folder.

    Args:
        path: its real path.
    """
    if os.path.isdir(path):
        return os.path.join(path, f".{kind}")
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{kind}")


def refuse_long_name(path: str) -> None:
    """Refuse a file whose name is too long for the names of the files that an edit keeps beside it.

    Raises:
        Refused: the name is too long.
    """
    if os.path.isdir(path):
        return
    longest = len(os.fsencode(os.path.basename(beside(path, f"{UNDO}.new"))))
    more = longest - len(os.fsencode(os.path.basename(path)))
    if longest > _NAME_MAX:
        message = f"its name is too long for an in-place edit: the files beside it have names {more} bytes longer"
        raise Refused(message, path=path, hint="write a copy to OUT, or rename it to a shorter name")


def unfinished(path: str) -> Refused:
    """Return the error about a file or folder whose journal exists."""
    hint = f"run `{command('undo', path)}` to restore its earlier state"
    return Refused("an in-place edit of it did not finish", path=path, hint=hint)


def busy(path: str) -> Refused:
    """Return the error about a file that a different process is editing."""
    return Refused("another program is editing it in place", path=path, hint="wait until that program has ended")


def refuse_unfinished(path: str) -> None:
    """Refuse a file that has an unfinished in-place edit, or whose folder has one.

    Raises:
        Refused: a journal exists.
    """
    real = os.path.realpath(path)
    if os.path.lexists(beside(real, JOURNAL)):
        raise unfinished(path)
    folder = os.path.dirname(real)
    if os.path.lexists(os.path.join(folder, f".{JOURNAL}")):
        raise unfinished(folder)

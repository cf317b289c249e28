"""Whether an edit in place of a file has not finished; asked whenever a file is opened."""

from __future__ import annotations

import os

from ckptfix.commands import command
from ckptfix.errors import Refused

JOURNAL, UNDO = "ckptfix-journal", "ckptfix-undo"
"""How the names end of what an edit in place keeps beside its file."""


_NAME_MAX = 255
"""Bytes of a name, on every file system where edits in place are at home."""


def beside(path: str, kind: str) -> str:
    """The journal (`JOURNAL`) or the file of former headers (`UNDO`) of the file or folder at the real path `path`."""
    if os.path.isdir(path):
        return os.path.join(path, f".{kind}")
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{kind}")


def refuse_long_name(path: str) -> None:
    """Refuse a file whose name leaves no room for the names of what an edit keeps beside it.

    Raises:
        Refused: it is so.
    """
    if os.path.isdir(path):
        return
    longest = len(os.fsencode(os.path.basename(beside(path, f"{UNDO}.new"))))
    more = longest - len(os.fsencode(os.path.basename(path)))
    if longest > _NAME_MAX:
        message = f"its name is too long for an edit in place: files are kept beside it, with names {more} bytes longer"
        raise Refused(message, path=path, hint="write a copy: give OUT; or give it a shorter name")


def unfinished(path: str) -> Refused:
    """What is said of a file or folder whose journal is there."""
    hint = f"`{command('undo', path)}` makes it what it was before"
    return Refused("an edit in place of it did not finish", path=path, hint=hint)


def busy(path: str) -> Refused:
    """What is said of a file that another process edits now."""
    return Refused("another program edits it in place", path=path, hint="wait until that has ended")


def refuse_unfinished(path: str) -> None:
    """Refuse a file that an edit in place has not finished with, or the folder that it is in.

    Raises:
        Refused: its journal is there.
    """
    real = os.path.realpath(path)
    if os.path.lexists(beside(real, JOURNAL)):
        raise unfinished(path)
    folder = os.path.dirname(real)
    if os.path.lexists(os.path.join(folder, f".{JOURNAL}")):
        raise unfinished(folder)

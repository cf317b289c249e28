"""Safe paths: files of a folder by the names in its index or metadata, never a file outside the folder."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from ckptfix.errors import DamagedFile, NoSuchFile
from ckptfix.urls import as_path, real_path


def file_inside(folder: str, name: str, *, where: str) -> str:
    """Return the path of the file `name` in `folder`; `where` is the index or metadata that contains the name.

    Raises:
        DamagedFile: the name leads out of the folder: it is absolute, climbs with ``..``, or is a symbolic link that
            points out of it, except into the blobs that a download cache keeps beside its snapshots. The file was not
            opened.
        NoSuchFile: the file is missing.
    """
    if (
        not name
        or "\0" in name
        or "\\" in name
        or PurePosixPath(name).is_absolute()
        or ".." in PurePosixPath(name).parts
    ):
        raise DamagedFile(
            f"it names {name!r}, which leads out of its folder", path=where, hint="that file was not opened"
        )
    path = as_path(folder, name)
    try:
        real = real_path(path)
        home = real_path(folder)
        there = path.is_file()
    except (OSError, ValueError):  # a name that is too long, a folder that is closed, a lone surrogate
        raise NoSuchFile(str(path)) from None
    if not _is_below(real, home) and not _is_blob(real, home):
        message = f"it names {name!r}, a symbolic link that leads out of its folder"
        raise DamagedFile(message, path=where, hint="if the file is yours, replace the link by a copy of it")
    if not there:
        raise NoSuchFile(str(path))
    return str(path)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def _is_blob(path: str, folder: str) -> bool:
    """Return whether `path` is in a hub's cache: ``REPO/snapshots/REVISION/NAME`` links to ``REPO/blobs/HASH``."""
    home = as_path(folder)
    for above in home.parents:
        if above.name == "snapshots":
            return _is_below(path, str(above.parent / "blobs"))
    return False

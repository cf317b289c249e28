"""git-lfs: a pointer in git represents a file that is stored elsewhere, under its SHA-256.

https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ckptfix.errors import CkptfixError
from ckptfix.git.repository import git
from ckptfix.io.source import found_as, open_source

MOST = 1024
"""Maximum bytes of a pointer."""

_POINTER = re.compile(
    rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\n"
    rb"(?:.*\n)*?size (\d{1,18})(?:\n|$)"
)


class Pointer(NamedTuple):
    """The contents of a pointer: the SHA-256 and size of its file."""

    oid: str
    size: int


def pointer(path: str) -> Pointer | None:
    """Parse the file as a pointer; return None if it is not a pointer."""
    if found_as(path) == "folder":
        return None
    with open_source(path) as source:
        found = _POINTER.match(source.read(0, source.size)) if source.size <= MOST else None
    return None if found is None else Pointer(found[1].decode(), int(found[2]))


def stored(found: Pointer) -> str | None:
    """Return the file of a pointer, if this clone has it."""
    try:
        folder = git("rev-parse", "--git-common-dir", fails=False)
        if folder is None:
            return None
        named = git("config", "--type=path", "--get", "lfs.storage", fails=False)
    except CkptfixError:
        return None
    storage = Path(folder, named or "lfs")
    path = str(storage / "objects" / found.oid[:2] / found.oid[2:4] / found.oid)
    if found_as(path) != "file":
        return None
    with open_source(path) as source:
        return path if source.size == found.size else None

"""The inputs that a command line names: files, folders that are searched, and patterns."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptfix import formats
from ckptfix.errors import CkptfixError, UnknownFormat, WouldOverwrite
from ckptfix.formats.members import role_of
from ckptfix.io.source import found_as, is_local
from ckptfix.urls import as_path, is_url, normal, real_path, scan_folder, walk_folder

SUFFIXES = (".pth", ".pt", ".ckpt", ".safetensors", ".pth.tar")
"""What is called so counts as a checkpoint whatever it holds: that it is none is what one wants to know."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input.

    Attributes:
        path: of the file or folder.
        within: the folder that it is in, below the folder that was searched or the fixed part of a pattern.
        dest: the output; None for a command that writes none.
    """

    path: str
    within: str = ""
    dest: str | None = None


def is_pattern(name: str) -> bool:
    """Whether `name` stands for all files that match it; not where there is one of that very name."""
    if is_url(name):
        return "*" in name or "[" in name  # a question mark begins a query
    return is_local(name) and glob.has_magic(name) and not os.path.lexists(name)


def expanded(names: Iterable[str], *, recursive: bool, leave_out: str | None = None) -> list[Input]:
    """The inputs that `names` stand for, in their order; below one name they are sorted.

    What matches nothing is an input as well: that it is not there is said of it as of any other.

    Args:
        recursive: folders are searched. A checkpoint of many files is one input; what is no checkpoint is passed over.
        leave_out: a folder that is not searched.
    """
    found: list[Input] = []
    for name in names:
        places = [name]
        below: Path | None = None
        if is_pattern(name):
            below = _fixed(name)
            found_there = _matching(name, below) if is_url(name) else glob.glob(name, recursive=True)  # noqa: PTH207
            places = sorted(found_there) or places
        for place in places:
            if recursive and found_as(place) == "folder" and not _is_one(place):
                inner = [*_checkpoints(place, leave_out)] or [place]
                found += [_found(path, below or as_path(place)) for path in inner]
            else:
                found.append(_found(place, below))
    return found


def _matching(pattern: str, folder: Path) -> list[str]:
    """The files and folders of a store that match."""
    wanted = re.compile(_expression(pattern[len(str(folder)) :].strip("/")))
    found = []
    for above, folders, files in walk_folder(folder):
        for name in (*folders, *files):
            path = as_path(above, name)
            if wanted.fullmatch(str(path.relative_to(folder))):
                found.append(str(path))
    return found


def _expression(pattern: str) -> str:
    """A pattern as a regular expression: ``**`` stands for folders, however many."""
    parts = pattern.split("/")
    made = ["(?:[^/]+/)*" if part == "**" else f"{fnmatch.translate(part)[4:-3]}/" for part in parts]
    return "".join(made).replace(".*", "[^/]*").removesuffix("/")


def _fixed(pattern: str) -> Path:
    """The folder in which a pattern begins."""
    folder = as_path(pattern)
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return folder


def _found(path: str, below: Path | None) -> Input:
    around = as_path(path).parent
    return Input(path, os.path.relpath(around, below) if below is not None and below != as_path(path) else "")


def _checkpoints(folder: str, leave_out: str | None) -> Iterator[str]:
    """The checkpoints below `folder`, without what trainers save beside a model, such as states of random generators.

    Hidden files are left out, and links to folders are not followed.
    """
    try:
        entries = sorted(scan_folder(folder), key=lambda entry: entry.name)
    except PermissionError:
        yield folder
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if leave_out is not None and real_path(entry.path) == real_path(leave_out):
                continue
            if _is_one(entry.path):
                yield entry.path
            else:
                yield from _checkpoints(entry.path, leave_out)
        elif entry.is_file() and _counts(entry):
            yield entry.path


def _is_one(folder: str) -> bool:
    """Whether a folder is a checkpoint of many files."""
    try:
        return formats.is_folder_checkpoint(folder)
    except (OSError, CkptfixError):
        return False  # what cannot be read is said where it is searched


def _counts(entry: os.DirEntry[str]) -> bool:
    """Whether a file is a checkpoint: called like one, or a damaged one, or one with tensors in it."""
    if role_of(entry.name) == "beside":
        return False
    if entry.name.lower().endswith(SUFFIXES):
        return True
    if not formats.is_checkpoint(entry.path):
        return False
    try:
        return bool(formats.open_checkpoint(entry.path).entries)
    except UnknownFormat:
        return False
    except CkptfixError:
        return True


def with_outputs(inputs: Sequence[Input], out_dir: str, names: Sequence[str]) -> list[Input]:
    """The inputs with their outputs in `out_dir`, which are called as `names` says.

    Raises:
        WouldOverwrite: two outputs have one name, one lies in another, or one is an input.
    """
    rows = [
        replace(input, dest=normal(str(as_path(out_dir, input.within, name))))
        for input, name in zip(inputs, names, strict=True)
    ]
    refuse_collisions(
        rows, "-r FOLDER keeps the folders below FOLDER, and so does a pattern in quotes; or do them one by one"
    )
    return rows


def refuse_collisions(rows: Sequence[Input], hint: str) -> None:
    """Refuse outputs of which two have one name, or one lies in another, or is an input of another.

    Args:
        hint: what gives them different names.

    Raises:
        WouldOverwrite: it is so.
    """
    sources = {real_path(row.path): row for row in rows}
    taken: dict[str, Input] = {}
    for row in rows:
        if row.dest is None:
            continue
        other = taken.setdefault(row.dest, row)
        if other is not row:
            raise WouldOverwrite(f"{other.path} and {row.path} would both be written to it", path=row.dest, hint=hint)
        of = sources.get(real_path(row.dest))
        if of is not None and of is not row:
            raise WouldOverwrite(f"it would be the output of {row.path}, and is an input", path=row.dest)
    for dest, row in taken.items():
        around = next((taken[str(above)] for above in as_path(dest).parents if str(above) in taken), None)
        if around is not None:
            raise WouldOverwrite(f"the output of {row.path} would lie in the output of {around.path}", path=dest)

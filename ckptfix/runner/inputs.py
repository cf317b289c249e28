"""The inputs of a command line: files, folders to search, and patterns."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from ckptfix import formats
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, UnknownFormat, WouldOverwrite
from ckptfix.io.source import found_as, is_local
from ckptfix.urls import as_path, is_url, real_path, scan_folder, walk_folder

SUFFIXES = (".pth", ".pt", ".ckpt", ".safetensors", ".pth.tar")
"""Suffixes that always count as a checkpoint: if such a file is something else, the user wants to know."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input.

    Attributes:
        path: the file or folder.
        within: its folder, relative to the searched folder or the fixed part of a pattern.
    """

    path: str
    within: str = ""


def is_pattern(name: str) -> bool:
    """Return whether `name` is a pattern that matches files, unless a file has exactly that name."""
    if is_url(name):
        return "*" in name or "[" in name  # a question mark begins a query
    return is_local(name) and glob.has_magic(name) and not os.path.lexists(name)


def expanded(names: Iterable[str], *, recursive: bool, leave_out: str | None = None) -> list[Input]:
    """Return the inputs that `names` expand to, in their order; the matches of one name are sorted.

    A name that matches nothing is also an input: the command then reports the missing file as usual.

    Args:
        recursive: search folders. A checkpoint of many files is one input; other files are skipped.
        leave_out: a folder to skip.
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
    """Return the files and folders of a store that match."""
    wanted = re.compile(_expression(pattern[len(str(folder)) :].strip("/")))
    found = []
    for above, folders, files in walk_folder(folder):
        for name in (*folders, *files):
            path = as_path(above, name)
            if wanted.fullmatch(str(path.relative_to(folder))):
                found.append(str(path))
    return found


def _expression(pattern: str) -> str:
    """Convert a pattern to a regular expression: ``**`` matches any number of folders."""
    parts = pattern.split("/")
    made = ["(?:[^/]+/)*" if part == "**" else f"{fnmatch.translate(part)[4:-3]}/" for part in parts]
    return "".join(made).replace(".*", "[^/]*").removesuffix("/")


def _fixed(pattern: str) -> Path:
    """Return the folder in which a pattern begins."""
    folder = as_path(pattern)
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return folder


def _found(path: str, below: Path | None) -> Input:
    around = as_path(path).parent
    return Input(path, os.path.relpath(around, below) if below is not None and below != as_path(path) else "")


def _checkpoints(folder: str, leave_out: str | None) -> Iterator[str]:
    """Yield the checkpoints below `folder`, without files that trainers save beside a model, such as random states.

    Hidden files are skipped, and links to folders are not followed.
    """
    try:
        entries = sorted(scan_folder(folder), key=lambda entry: entry.name)
    except PermissionError:
        yield folder
        return
    names = {entry.name for entry in entries}
    for entry in entries:
        if entry.name.startswith(".") or _is_read_with_another(entry.name, names):
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


def _is_read_with_another(name: str, names: Collection[str]) -> bool:
    """Return whether a file is a further part of a model whose first part is among `names`, and is read with it."""
    from ckptfix.formats.members import read_with

    return read_with(name) != name and read_with(name) in names


def _is_one(folder: str) -> bool:
    """Return whether a folder is a checkpoint of many files."""
    try:
        return formats.is_folder_checkpoint(folder)
    except (OSError, CkptfixError):
        return False  # the search itself reports what it cannot read


def _counts(entry: os.DirEntry[str]) -> bool:
    """Return whether a file counts as a checkpoint: by its suffix, because it is damaged, or because it has tensors."""
    from ckptfix.formats.members import role_of

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


def refuse_collisions(inputs: Sequence[str], outputs: Sequence[str | None], hint: str) -> None:
    """Refuse outputs that have the same name, that are inside one another, or that are another one's input.

    Args:
        outputs: that of each input; None for an input without output.
        hint: the way to give them different names.

    Raises:
        WouldOverwrite: there is such a collision.
    """
    sources = {real_path(path): path for path in inputs}
    taken: dict[str, str] = {}
    for path, output in zip(inputs, outputs, strict=True):
        if output is None:
            continue
        if output in taken:
            raise WouldOverwrite(f"{taken[output]} and {path} would both write it", path=output, hint=hint)
        taken[output] = path
        if sources.get(real_path(output), path) != path:
            raise WouldOverwrite(f"it would be the output of {path}, but is an input", path=output)
    for output, path in taken.items():
        around = next((taken[str(above)] for above in as_path(output).parents if str(above) in taken), None)
        if around is not None:
            raise WouldOverwrite(f"the output of {path} would be inside the output of {around}", path=output)

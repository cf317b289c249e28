"""A folder of a known layout that no format reads, or a file of one: its finding, its pickle, and what helps."""

from __future__ import annotations

from collections.abc import Collection

from ckptfix.commands import command, verbatim
from ckptfix.errors import UnknownFormat
from ckptfix.io.source import found_as, is_file, is_local
from ckptfix.urls import as_path

_METADATA = ".metadata"
_FOLDER = "dcp-folder"


def described(path: str, error: UnknownFormat) -> tuple[str, str]:
    """Return the id and the message of the finding about `path`, which no format reads."""
    what = error.message
    if error.kind == _FOLDER and found_as(path) == "folder" and not found_as(str(as_path(path, _METADATA))):
        return "dcp-no-metadata", what if what.endswith(("end", "no pickle")) else f"{what} without its .metadata"
    return error.kind, what


def pickle_of(path: str, ids: Collection[str]) -> tuple[str, str]:
    """Return the file to search for code, and its name in the folder `path`; `path` and "" for a file.

    Args:
        ids: those of the findings about `path`.
    """
    if _FOLDER in ids and found_as(path) == "folder":
        return str(as_path(path, _METADATA)), _METADATA
    return path, ""


def part_advice(path: str) -> str | None:
    """Return the advice for one file of a checkpoint of many; None if its folder is not the checkpoint."""
    beside = is_local(path) and is_file(as_path(path).with_name(_METADATA))
    return _with_its_folder(path) if beside else None


def advice(path: str, error: UnknownFormat) -> str | None:
    """Return what helps with a folder that is not read, or with its metadata alone; None if nothing is known."""
    if error.kind != _FOLDER:
        return None
    if found_as(path) != "folder":
        return _with_its_folder(path)
    if " .metadata " in error.message:
        return "put back the .metadata of that save, or make it readable"
    return None


def _with_its_folder(path: str) -> str:
    return f"convert its folder: {verbatim(command('convert', as_path(path).parent, 'OUT'))}"

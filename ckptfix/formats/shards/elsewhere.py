"""Shards beside a file: those that its index lists, and files with the tensors of missing shards.

A program that splits a model again can leave an index of files that are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptfix.commands import word
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.shards.files import find, open_file
from ckptfix.formats.shards.index import read_index
from ckptfix.io.source import found_as, is_local
from ckptfix.urls import as_path, folder_beside, scan_folder

MOST_FILES = 256
"""Files of a folder that are read."""

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of files that may be shards."""


def settled(path: str, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield `findings`, with the command that merges the files which have the tensors of the missing shards.

    Args:
        path: the folder, or its index.
    """
    merged = _merged(path) if any(row.id == "missing-shard" for row in findings) else ""
    for row in findings:
        yield row.fixed_by(merged) if merged and row.id == "missing-shard" else row


def _merged(path: str) -> str:
    """Return what to do with the files that have all keys of the index, each once; empty if they do not."""
    if not is_local(path):
        return ""
    folder = path if found_as(path) == "folder" else str(folder_beside(path))
    try:
        (name,) = find(folder).indexes
        wanted = read_index(str(as_path(folder, name))).weight_map
        with scan_folder(folder) as rows:
            names = sorted(row.name for row in rows)
    except (CkptfixError, ValueError, OSError):
        return ""
    listed = set(wanted.values())
    there: dict[str, str] = {}
    try:
        others = [
            file_inside(folder, name, where=folder)
            for name in names
            if name.endswith(SUFFIXES) and name not in listed
        ]
        for name in others[:MOST_FILES]:
            for entry in open_file(name).entries:
                if entry.at or entry.key in there:
                    return ""
                there[entry.key] = name
    except CkptfixError:
        return ""
    if len(others) > MOST_FILES or there.keys() != wanted.keys():
        return ""
    dest = word(str(as_path(folder, "model.safetensors")))
    return (
        f"{len(others)} files that the index does not list have exactly its tensors: "
        f"ckptfix merge {' '.join(map(word, others))} -o {dest}; then remove the index"
    )


def listed_beside(path: str) -> dict[str, str]:
    """Return key -> shard, for the tensors that an index beside the shard `path` lists in other shards.

    An index that cannot be read lists nothing, because it is not a part of the file.
    """
    place = as_path(path)
    folder = str(place.parent)
    shard_of: dict[str, str] = {}
    try:
        indexes = find(folder).indexes
    except CkptfixError:
        return {}
    for name in indexes:
        try:
            rows = read_index(str(place.parent / name)).weight_map
        except CkptfixError:
            continue
        if place.name in rows.values():
            shard_of |= {key: shard for key, shard in rows.items() if shard != place.name}
    return shard_of

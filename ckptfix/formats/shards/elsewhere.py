"""Shards beside a file: those that its index lists, those of its series, and files with the tensors of missing shards.

A program that splits a model again can leave an index of files that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ckptfix.commands import command, verbatim, word
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.table import found
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.shards.files import NUMBERED, find, missing_numbers, open_file
from ckptfix.formats.shards.index import read_index
from ckptfix.io.source import found_as, is_local
from ckptfix.urls import as_path, folder_beside, scan_folder
from ckptfix.words import plural, some

MOST_FILES = 256
"""Files of a folder that are read."""

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of files that may be shards."""


@dataclass(frozen=True, slots=True)
class LoneShard:
    """A file that is one of the numbered shards of a model, when it is used alone.

    Attributes:
        path: the file.
        number, count: which shard of how many.
        shard_of: key -> file, for the tensors that the index lists in other shards; empty without an index.
        missing: the other shards that are not in its folder.
    """

    path: str
    number: int
    count: int
    shard_of: dict[str, str]
    missing: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The folder of the shards."""
        return str(as_path(self.path).parent)

    def finding(self, severity: Severity = "info", about: str = "", keys: Sequence[str] = ()) -> Finding:
        """Return the finding that the file is a part of a model; `keys` are those that the user asked for."""
        place = as_path(self.path)
        message = f"the file is shard {self.number:,} of {self.count:,} of a model"
        if keys:
            message += f"; the others hold {some(keys)}"
        elif self.shard_of:
            message += f"; the others hold {plural(len(self.shard_of), 'more tensor')}"
        if self.missing:
            fix = f"put {some(self.missing)} into the same folder"
        else:
            out = f"{place.parent.name or 'whole'}{place.suffix}"
            fix = f"`{command('convert', self.folder, out)}` joins the shards; ckptfix and from_pretrained also load "
            fix += "the folder as it is"
        return found("one-shard", message, severity=severity, about=about, fix=verbatim(fix))


def lone_shard(path: str) -> LoneShard | None:
    """Return what a local file is a shard of, judged by its name and folder; None if it is not one of several."""
    place = as_path(path)
    name = NUMBERED.fullmatch(place.name)
    if name is None or int(name[3]) < 2 or not is_local(path) or found_as(path) != "file":
        return None
    suffix = f"{name[4] or ''}.{name[5]}"
    number, count = int(name[2]), int(name[3])
    try:
        files = find(str(place.parent))
    except CkptfixError:
        return None
    missing = missing_numbers(count, files.groups.get((name[1], suffix, count), {}), name[1], suffix)
    return LoneShard(path, number, count, _listed(place, files.indexes), tuple(missing))


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
    try:
        return _listed(place, find(str(place.parent)).indexes)
    except CkptfixError:
        return {}


def _listed(place: Path, indexes: Iterable[str]) -> dict[str, str]:
    """Return key -> shard, for the tensors that these indexes beside the shard at `place` list in other shards."""
    shard_of: dict[str, str] = {}
    for name in indexes:
        try:
            rows = read_index(str(place.parent / name)).weight_map
        except CkptfixError:
            continue
        if place.name in rows.values():
            shard_of |= {key: shard for key, shard in rows.items() if shard != place.name}
    return shard_of

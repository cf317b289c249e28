"""The remains of a torch checkpoint: its object, and the storages that are provably intact.

A zip is rebuilt from its records, a folder is an unzipped archive, and a legacy file is read up to its first fault.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Literal

from ckptfix.checkpoint import ByteRange, Data
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadPickle, DamagedFile, Refused, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.torch import legacy_layout, zip_layout
from ckptfix.formats.torch.damaged import read as torn
from ckptfix.formats.torch.damaged.object import IntactStorage as IntactStorage
from ckptfix.formats.torch.object import TorchObject, object_of_pickle
from ckptfix.formats.torch.zip_layout import MAX_PICKLE
from ckptfix.io.layers import MAX_RATIO
from ckptfix.io.read import read_chunks
from ckptfix.io.source import is_file, open_source
from ckptfix.ops.layers import is_noise
from ckptfix.urls import as_path, walk_folder
from ckptfix.zips.rebuild import Damaged, Rebuilt, RebuiltArchive, Salvaged

STANDARD = re.compile(r"data\.pkl|data/[^/]+|byteorder|version|\.format_version|\.storage_alignment|\.data/.*")
"""Records below the root that torch writes itself."""


@dataclass(slots=True)
class Wreck:
    """The remains of a torch checkpoint.

    Attributes:
        path: the file that ranges point into.
        legacy: it was a legacy file, and will be again; otherwise a zip.
        found: the object; None when its pickle is lost, and `pickle_fault` names the reason.
        parts: key -> storage, of the intact ones.
        faults: key -> why the storage is not intact, where that is known.
        extras: name below the root -> data and CRC-32, of records that torch does not write itself.
        notes: what was found out about the file.
        sums: whether the storages match their checksums; legacy files and unzipped folders have no checksums.
    """

    path: str
    legacy: bool = False
    found: TorchObject | None = None
    pickle_fault: str = ""
    parts: dict[str, IntactStorage] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    byteorder: Literal["little", "big"] = "little"
    extras: dict[str, tuple[Data, int | None]] = field(default_factory=dict)
    notes: list[Finding] = field(default_factory=list)
    sums: bool = True

    @property
    def format(self) -> str:
        """The name of the format."""
        return legacy_layout.NAME if self.legacy else zip_layout.NAME

    def note(self, name: str, message: str, *, warns: bool = False, offset: int | None = None) -> None:
        self.notes.append(found(name, message, offset=offset, severity="warning" if warns else "info"))




def read_zip(path: str) -> Wreck:
    """Read the remains of a zip, or of any bytes with zip records among them."""
    wreck = Wreck(path)
    with open_source(path) as reader:
        archive = RebuiltArchive(reader)
        rebuilt = archive.rebuild()
        pickles = _pickles((record.name for record in rebuilt.records), path)
        prefix = pickles[0] if pickles else _likely_prefix(rebuilt)
        record = next((row for row in rebuilt.records if _plain(row.name) == f"{prefix}data.pkl"), None)
        if record is not None:
            _parse(wreck, record.data, record.size, record.name)
        else:
            lost = next((row for row in rebuilt.damaged if _plain(row.name) == f"{prefix}data.pkl"), None)
            wreck.pickle_fault = lost.reason if lost else "it is missing from the file"
        if wreck.found is not None:
            sizes = torn.storage_sizes(wreck.found)
            rebuilt = archive.rebuild(lambda name: sizes.get(_plain(name).removeprefix(f"{prefix}data/")))
        size = reader.size
    wreck.sums = archive.checksums
    _sort_records(wreck, rebuilt, prefix)
    _describe(wreck, rebuilt, prefix, size)
    return wreck


def _plain(name: str) -> str:
    """Return a record's name with forward slashes, as zip prescribes; some Windows programs write backslashes."""
    return name.replace("\\", "/")


def _pickles(names: Iterable[str], path: str) -> list[str]:
    """List the prefix of the archive's data.pkl: at most one.

    Raises:
        Refused: there are several.
    """
    found = [plain[: -len("data.pkl")] for plain in map(_plain, names) if not is_noise(plain) and _is_pickle(plain)]
    if len(found) > 1:
        message = f"it holds {len(found)} checkpoints: {', '.join(sorted(found)[:4])}"
        raise Refused(message, path=path, hint="unzip it, and repair one of the folders")
    return found


def _is_pickle(name: str) -> bool:
    return name == "data.pkl" or name.endswith("/data.pkl")


def _likely_prefix(rebuilt: Rebuilt) -> str:
    """Return the folder of the storages; without storages, the folder of a damaged data.pkl."""
    names = [_plain(record.name) for record in rebuilt.records]
    votes = Counter(name.rpartition("data/")[0] for name in names if re.fullmatch(r"(.*/)?data/[^/]+", name))
    votes.update(_plain(row.name)[: -len("data.pkl")] for row in rebuilt.damaged if _is_pickle(_plain(row.name)))
    return votes.most_common(1)[0][0] if votes else ""


def _parse(wreck: Wreck, data: Data, size: int, where: str) -> None:
    """Read the object; one that no unpickler accepts counts as lost."""
    stored = sum(source.length for source in data.sources) if not isinstance(data, ByteRange) else data.length
    if size > MAX_PICKLE or size > max(MAX_RATIO * stored, 1 << 20):
        raise Unsupported(f"a pickle of {size} bytes is too large", path=wreck.path, where=where)
    try:
        wreck.found = object_of_pickle(b"".join(read_chunks(data)), wreck.path, where)
    except BadPickle as error:
        wreck.pickle_fault = error.message


def _sort_records(wreck: Wreck, rebuilt: Rebuilt, prefix: str) -> None:
    for record in rebuilt.records:
        name = _plain(record.name)
        below = name.removeprefix(prefix)
        if is_noise(name) or name.endswith("/") or not name.startswith(prefix):
            continue
        if re.fullmatch(r"data/[^/]+", below):
            wreck.parts[below[len("data/") :]] = IntactStorage(record.data, record.crc32)
        elif below == "byteorder":
            _note_byteorder(wreck, b"".join(read_chunks(record.data)) if record.size <= 64 else b"")
        elif not STANDARD.fullmatch(below):
            wreck.extras[below] = (record.data, record.crc32)
    for row in rebuilt.damaged:
        below = _plain(row.name).removeprefix(prefix)
        if below.startswith("data/"):
            wreck.faults[below[len("data/") :]] = row.reason
        elif below == "byteorder":
            wreck.note("byteorder-lost", "its byte order is lost; little-endian is assumed", warns=True)


def _note_byteorder(wreck: Wreck, text: bytes) -> None:
    if text not in (b"little", b"big"):
        wreck.note("byteorder-lost", f"its byte order is {text[:20]!r}; little-endian is assumed", warns=True)
    wreck.byteorder = "big" if text == b"big" else "little"


def _describe(wreck: Wreck, rebuilt: Rebuilt, prefix: str, size: int) -> None:
    """Note what happened to the archive, judging by what was found in it."""
    damaged = [row for row in rebuilt.damaged if not is_noise(_plain(row.name))]
    kinds = Counter(row.kind for row in damaged)
    if not rebuilt.directory:
        wreck.note("no-directory", f"its directory is lost: the file was cut short, at {size:,} bytes", offset=size)
    if rebuilt.first:
        wreck.note("leading-bytes", f"{rebuilt.first:,} bytes precede the archive", offset=0)
    if any(not isinstance(record.data, ByteRange) for record in rebuilt.records):
        wreck.note("deflated", "its records are compressed, so torch cannot map them")
    if prefix.count("/") != 1:
        where = f"under {prefix!r}" if prefix else "under no folder"
        wreck.note("wrong-root", f"its records are {where}; torch expects them in one folder")
    if rebuilt.misread:
        first, *others = rebuilt.misread
        names = f"{first} and {len(others):,} more" if others else first
        message = f"the directory has wrong offsets for {names}, so torch loads other bytes; the saved ones are kept"
        wreck.note("misread", message, warns=True)
    for offset, length in rebuilt.unread:
        wreck.note("unreadable", f"{length:,} bytes cannot be read", warns=True, offset=offset)
    if kinds["twice"] or kinds["checksum"]:
        wreck.notes.append(_torn(damaged, rebuilt.records))
    if not wreck.sums:
        message = "it has no checksums: records are checked by size alone, and their bytes cannot be verified"
        wreck.note("unverifiable", message, warns=True)


def _torn(damaged: list[Damaged], records: tuple[Salvaged, ...]) -> Finding:
    """Return the finding for records whose checksums do not match."""
    wrong = [row for row in damaged if row.kind in ("twice", "checksum")]
    later = any(record.header > wrong[0].header for record in records)
    between = " between intact ones" if later else ""
    several = [row for row in wrong if row.kind == "twice"]
    if several:
        message = f"{len(several)} records occur twice with different bytes: two processes wrote to one file"
        return found("torn-write", message, where=several[0].name, offset=several[0].header)
    message = f"{len(wrong)} records do not match their checksums{between}: bytes changed on disk or in transfer"
    if len(wrong) > 1 and later:
        message += ", or two processes wrote to one file"
    return found("torn-write", message, where=wrong[0].name, offset=wrong[0].header)


def read_folder(path: str) -> Wreck:
    """Read an unzipped archive: the folder with its data.pkl, or a folder above it."""
    files: dict[str, Path] = {}
    for folder, _, names in walk_folder(path):
        for name in names:
            place = as_path(folder, name)
            relative = place.relative_to(path).as_posix()
            if not is_noise(relative) and is_file(place):
                files[relative] = place
    prefixes = _pickles(files, path)
    wreck = Wreck(path, sums=False)
    if not prefixes:
        hint = "name the folder that the archive was unpacked to"
        raise DamagedFile("there is no data.pkl in this folder or below it", path=path, hint=hint)
    (prefix,) = prefixes
    message = "it is an unzipped archive: only sizes are checked, as its checksums stayed in the zip"
    wreck.note("unzipped", message)
    for name in sorted(files):
        below = name.removeprefix(prefix)
        if not name.startswith(prefix):
            continue
        data = ByteRange(os.fspath(files[name]), 0, files[name].stat().st_size)
        if below == "data.pkl":
            _parse(wreck, data, data.length, name)
        elif re.fullmatch(r"data/[^/]+", below):
            wreck.parts[below[len("data/") :]] = IntactStorage(data)
        elif below == "byteorder":
            _note_byteorder(wreck, b"".join(read_chunks(data)) if data.length <= 64 else b"")
        elif not STANDARD.fullmatch(below):
            wreck.extras[below] = (data, None)
    return wreck


def read_legacy(path: str, start: int = 0) -> Wreck:
    """Read a legacy file up to its first fault; its first pickle begins at `start`.

    Raises:
        TruncatedPickle, BadPickle: its object is damaged; without it, the bytes that follow have no meaning.
    """
    wreck = Wreck(path, legacy=True, sums=False)
    if start:
        wreck.note("leading-bytes", f"{start:,} bytes precede the checkpoint", offset=0)
    with open_source(path) as reader:
        remains = torn.read_legacy(reader, start)
        if remains is None:
            raise DamagedFile(
                "the file ends inside the pickle of its object, before any tensor's bytes",
                path=path,
                offset=reader.size,
                hint="nothing can be saved: use an older checkpoint, or copy the file again",
            )
        wreck.found = remains.found
        position = remains.end
        for key, place, count, itemsize in remains.storages(reader):
            if count < 0 or not itemsize or place + 8 + count * itemsize > reader.size:
                break
            wreck.parts[key] = IntactStorage(ByteRange(path, place + 8, count * itemsize), None, count)
            position = place + 8 + count * itemsize
        absent = len(remains.keys) - len(wreck.parts)
        if absent or not remains.listed:
            message = f"the file was cut short at {reader.size:,} bytes: {absent or 'all'} storages are not intact"
            wreck.note("truncated", message, offset=reader.size)
            cut = f"the file ends at {reader.size:#x}"
            wreck.faults.update((key, cut) for key in remains.keys if key not in wreck.parts)
        elif position < reader.size:
            message = f"{reader.size - position:,} bytes follow the last storage"
            wreck.note("trailing-bytes", message, offset=position)
    return wreck

"""torch.save since 1.6: a zip archive of stored records under one root folder.

::

    ROOT/data.pkl               the object; storages are persistent ids ('storage', class, key, location, numel)
    ROOT/.format_version        since 2.7; with .storage_alignment
    ROOT/byteorder              'little' or 'big'; absent before 2.1, and then little
    ROOT/data/KEY               the bytes of a storage
    ROOT/version                of the archive format, '3'
    ROOT/.data/serialization_id

The root need not match the file's name. Source: torch/serialization.py (``_save``, ``_load``) and
caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Drop, Edit, Finding, OutputFile, Plan, Segment, TensorEntry
from ckptfix.commands import quoted
from ckptfix.containers.zip_local import record_data
from ckptfix.containers.zip_read import Directory, Record, read_directory
from ckptfix.containers.zip_write import NewRecord, fresh_archive, replace_record
from ckptfix.errors import BadDirectory, Bomb, DamagedFile, Unsupported
from ckptfix.fileio import Reader, read_chunks
from ckptfix.formats import torch_common, torch_emit
from ckptfix.formats.base import unknown
from ckptfix.formats.torch_edit import patches
from ckptfix.pickles import Graph, parse, splice

NAME = "zip"
TITLE = "PyTorch zip"
SUFFIXES = torch_common.SUFFIXES
MAX_PICKLE = 1 << 30
MAX_VERSION = 10
MAX_RATIO = 100
"""Deflate shrinks the pickle of a large model some 10 to 20 times; a bomb, a thousand times."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The container of a zip checkpoint: its directory, its root folder, its pickle record.

    `ambiguous` are names that several records have, if only in another case: torch looks names up without
    regard to case, others do not, and which of two equal ones counts depends on the reader.
    """

    directory: Directory
    root: str
    pickle: Record
    pickle_ok: bool
    ambiguous: frozenset[str]


def score(path: str, head: bytes, size: int) -> int:
    """90 for a zip whose first record is a data.pkl; 40 for any other zip."""
    if not head.startswith(b"PK\x03\x04"):
        return 0
    name_length = int.from_bytes(head[26:28], "little")
    return 90 if head[30 : 30 + name_length].endswith(b"/data.pkl") else 40


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`."""
    with Reader(path) as reader:
        directory = read_directory(reader, path)
        findings: list[Finding] = []
        archive, pickle = _open(reader, path, directory, findings)
        traits: dict[str, object] = {"zip root": archive.root, "records": len(directory.records)}
        byteorder = _small_record(reader, directory, f"{archive.root}/byteorder")
        if byteorder not in ("", "little", "big"):
            raise DamagedFile(f"byte order {byteorder[:20]!r}", path=path, where=f"{archive.root}/byteorder")
        version = _small_record(reader, directory, f"{archive.root}/version")
        if version.isdigit() and int(version) > MAX_VERSION:
            raise Unsupported(f"archive version {version}, newer than {MAX_VERSION}", path=path)
        traits["version"] = version or "none"
        size = reader.size
    if byteorder:
        traits["byteorder"] = byteorder
    sums = [record.crc32 for record in directory.records if record.size]
    if sums and not any(sums):
        traits["checksums"] = "none"
    if directory.trailing:
        findings.append(
            Finding("trailing-bytes", "warning", "", f"{directory.trailing} bytes follow the archive", size)
        )
    graph = parse(pickle, path=path, where=archive.pickle.name)
    return torch_common.build(
        path,
        format=NAME,
        size=size,
        graph=graph,
        container=archive,
        storages=torch_common.Storages(Places(path, archive)),
        traits=traits,
        byteorder="big" if byteorder == "big" else "little",
        findings=findings,
    )


def read_object(path: str) -> tuple[Archive, Graph]:
    """The container and the parsed pickle of a file, and nothing made of them. Raises as `read`."""
    with Reader(path) as reader:
        archive, pickle = _open(reader, path, read_directory(reader, path), [])
    return archive, parse(pickle, path=path, where=archive.pickle.name)


def _open(reader: Reader, path: str, directory: Directory, findings: list[Finding]) -> tuple[Archive, bytes]:
    """The archive and the bytes of its pickle."""
    pickles = [record for record in directory.records if record.name.endswith("/data.pkl")]
    roots = {record.name.partition("/")[0] for record in pickles if record.name.count("/") == 1}
    scripted = any(record.name.endswith(("/constants.pkl", "/archive_format")) for record in directory.records)
    if len(roots) != 1 or scripted:
        raise unknown(path, reader.read(0, min(4096, reader.size)), reader.size)
    (root,) = roots
    record = next(record for record in pickles if record.name == f"{root}/data.pkl")
    if record.size > MAX_PICKLE:
        raise Unsupported(f"a pickle of {record.size} bytes", path=path, where=record.name)
    if record.size > max(MAX_RATIO * record.stored, 1 << 20):
        message = f"{record.stored} bytes that are said to unfold to {record.size}, more than any checkpoint's pickle"
        raise Bomb(message, path=path, where=record.name, offset=record.header)
    data = b"".join(read_chunks(record_data(reader, path, record)))
    intact = record.crc32 in (0, zlib.crc32(data))
    if not intact:
        message = "the bytes do not match their CRC-32: the file is damaged"
        findings.append(Finding("bad-crc", "error", record.name, message, record.header))
    ambiguous = ambiguous_names(directory)
    if record.name in ambiguous:
        raise BadDirectory("several records have the name of the pickle", path=path, where=record.name)
    for name in sorted(ambiguous):
        findings.append(Finding("duplicate-record", "error", name, "several records have this name"))
    return Archive(directory, root, record, intact, ambiguous), data


def ambiguous_names(directory: Directory) -> frozenset[str]:
    """Names that several records have, without regard to case."""
    names = [record.name for record in directory.records]
    if len({name.lower() for name in names}) == len(names):
        return frozenset()
    counts = Counter(name.lower() for name in names)
    return frozenset(name for name in names if counts[name.lower()] > 1)


def _small_record(reader: Reader, directory: Directory, name: str) -> str:
    """The text of a short record, empty when there is none."""
    record = next((record for record in directory.records if record.name == name), None)
    if record is None or record.size > 64:
        return ""
    return b"".join(read_chunks(record_data(reader, directory.path, record))).decode("ascii", "replace").strip()


class Places:
    """Where the storages in `folder` are; local headers are read when the first one is asked for, in one pass."""

    def __init__(self, path: str, archive: Archive, folder: str = "data") -> None:
        self._path = path
        self._prefix = f"{archive.root}/{folder}/"
        self._records: dict[str, Record] = {}
        for record in archive.directory.records:
            if record.name.startswith(self._prefix):
                self._records.setdefault(record.name[len(self._prefix) :], record)
        self._headers = sorted((*(record.header for record in archive.directory.records), archive.directory.offset))
        self._data: dict[str, Data] | None = None
        self._wrong = {
            name[len(self._prefix) :]: "several records have this name, and readers disagree which one counts"
            for name in archive.ambiguous
        }

    def __call__(self, key: str) -> tuple[Data | None, int, int | None]:
        if self._data is None:
            self._data = self._read_headers()
        record = self._records.get(key)
        if record is None:
            return None, -1, None
        if key in self._wrong:
            raise BadDirectory(self._wrong[key], path=self._path, where=record.name, offset=record.header)
        return self._data[key], record.size, record.crc32 or None

    def _read_headers(self) -> dict[str, Data]:
        found: dict[str, Data] = {}
        with Reader(self._path) as reader:
            for key, record in self._records.items():
                try:
                    data = record_data(reader, self._path, record)
                except (DamagedFile, Unsupported) as error:
                    self._wrong[key] = error.message
                    continue
                following = self._headers[bisect_right(self._headers, record.header)]
                if isinstance(data, ByteRange) and data.end > following:
                    self._wrong[key] = f"its data, from {data.offset:#x} on, runs into what begins at {following:#x}"
                found[key] = data
        return found


def check(path: str) -> Iterator[Finding]:
    """What is wrong with the file as it stands; tensor bytes are not read."""
    yield from torch_common.all_findings(read(path))


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """The checkpoint with `edits` applied to its pickle; every other byte is copied; with a Drop the layout is new.

    Raises:
        DamagedFile: the pickle does not match its checksum, and an edit would hide that; or torch reads other bytes
            of a record than the file means (see `refuse_disputed`).
    """
    refuse_disputed(checkpoint)
    if any(isinstance(edit, Drop) for edit in edits):
        from ckptfix.formats import torch_rewrite

        return torch_rewrite.plan_drops(checkpoint, edits, dest)
    parts = torch_common.parts_of(checkpoint)
    archive: Archive = parts.container
    changes = patches(parts.found, edits)
    path = checkpoint.path
    segments: list[Segment] = [ByteRange(path, 0, checkpoint.size)]
    if changes:
        if not archive.pickle_ok:
            message = "the pickle does not match its CRC-32, and an edit would hide that"
            raise DamagedFile(message, path=path, where=archive.pickle.name, hint="copy or download the file again")
        with Reader(path) as reader:
            segments = replace_record(reader, archive.directory, archive.pickle, splice(parts.graph, changes))
    return Plan((OutputFile.of(dest, segments),))


def refuse_disputed(checkpoint: Checkpoint) -> None:
    """A record whose bytes torch would not read as the file means them must not be copied silently.

    Raises:
        BadDirectory: there is one (see `Record.dispute`).
    """
    archive: Archive = torch_common.parts_of(checkpoint).container
    for record in archive.directory.records:
        dispute = record.dispute
        if dispute is not None and record.name.startswith(f"{archive.root}/"):
            hint = f"ckptfix repair {quoted(checkpoint.path)} OUT"
            raise BadDirectory(dispute, path=checkpoint.path, where=record.name, offset=record.header, hint=hint)


def plan_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """A fresh file that holds the state dict of `entries` as an OrderedDict."""
    pickle, storages = torch_emit.state_dict_pickle(entries)
    return Plan((OutputFile.of(dest, fresh(pickle, storages)),))


def fresh(
    pickle: bytes, storages: Sequence[tuple[str, Data, int | None]], byteorder: Literal["little", "big"] = "little"
) -> list[Segment]:
    """The segments of an archive as torch 2.13 lays it out.

    Args:
        pickle: the object.
        storages: (key, data, CRC-32 if known) in the order of the records.
        byteorder: of the data.
    """
    root = "archive"
    head = [("data.pkl", pickle), (".format_version", b"1"), (".storage_alignment", b"64")]
    records = [NewRecord(f"{root}/{name}", data) for name, data in head]
    records.append(NewRecord(f"{root}/byteorder", byteorder.encode()))
    records += [NewRecord(f"{root}/data/{key}", data, crc32) for key, data, crc32 in storages]
    records.append(NewRecord(f"{root}/version", b"3\n"))
    return fresh_archive(records)

"""Location of the records in a torch archive, and layout of a fresh archive; independent of checkpoints."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Literal

from ckptfix.checkpoint import ByteRange, Data, Segment
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadDirectory, DamagedFile, Unsupported
from ckptfix.io.source import open_source
from ckptfix.zips.local import plain_start, record_data, starts
from ckptfix.zips.read import Directory, DirectoryRecord
from ckptfix.zips.write import NewRecord, fresh_archive

NAME = "zip"

MAX_PICKLE = 1 << 30


@dataclass(frozen=True, slots=True)
class ZipCheckpoint:
    """The container of a zip checkpoint: its directory, its root folder, its pickle record.

    `ambiguous` are names that several records share, with or without the same case. torch looks names up without regard
    to case, other readers do not, and the choice between two equal names depends on the reader.
    """

    directory: Directory
    root: str
    pickle: DirectoryRecord
    pickle_ok: bool
    ambiguous: frozenset[str]


def refuse_damaged_pickle(archive: ZipCheckpoint, path: str) -> None:
    """Raise `DamagedFile` if the pickle is damaged: a new file would have a correct checksum, and hide the damage.

    Raises:
        DamagedFile: the pickle of the file `path` does not match its checksum.
    """
    if not archive.pickle_ok:
        raise DamagedFile(
            "the pickle does not match its CRC-32, and a new file would hide that",
            path=path,
            where=archive.pickle.name,
            offset=archive.pickle.header,
            hint="copy or download the file again",
        )


def ambiguous_names(directory: Directory) -> frozenset[str]:
    """Return the names that several records share, without regard to case."""
    names = directory.records.names()
    if len({name.lower() for name in names}) == len(names):
        return frozenset()
    counts = Counter(name.lower() for name in names)
    return frozenset(name for name in names if counts[name.lower()] > 1)


class ZipStorages:
    """Locations of the storages in `folder`. All local headers are read in one pass, on first use."""

    def __init__(self, path: str, archive: ZipCheckpoint, folder: str = "data") -> None:
        self._path = path
        self._prefix = f"{archive.root}/{folder}/"
        self._directory = archive.directory
        self._made: dict[str, int] | None = None
        self._data: list[Data | None] | None = None
        self._wrong = {
            name[len(self._prefix) :]: "several records have this name, and readers disagree on which one counts"
            for name in archive.ambiguous
        }

    @property
    def _records(self) -> dict[str, int]:
        """Key -> index of the directory record with its bytes: the first record of that name."""
        if self._made is None:
            names, prefix = self._directory.records.names(), self._prefix
            first = len(prefix)
            # In reverse order, so that the first record of a name is the one that stays.
            rows = zip(reversed(names), range(len(names) - 1, -1, -1), strict=True)
            self._made = {name[first:]: index for name, index in rows if name.startswith(prefix)}
        return self._made

    def __call__(self, key: str) -> tuple[Data | None, int, int | None]:
        """Return the data, the length in bytes and the CRC-32 of a storage; a negative length if it is missing.

        Raises:
            BadDirectory: its record is ambiguous or unusable.
        """
        if self._data is None:
            self._data = self._read_headers()
        index = self._records.get(key)
        if index is None:
            return None, -1, None
        records = self._directory.records
        if key in self._wrong:
            record = records[index]
            raise BadDirectory(self._wrong[key], path=self._path, where=record.name, offset=record.header)
        return self._data[index], records.sizes[index], records.sums[index] or None

    def forget(self) -> None:
        """Free the locations; they are read again on the next use."""
        self._made = self._data = None

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Return the length in bytes of each storage as the directory states it; -1 for a key that the file lacks."""
        stated, wrong = self._directory.records.sizes, self._wrong
        rows = map(self._records.get, keys)
        return [-1 if row is None or key in wrong else stated[row] for key, row in zip(keys, rows, strict=True)]

    def _read_headers(self) -> list[Data | None]:
        """Return the data of each record of the directory; None for a record without a usable storage."""
        records, directory = self._directory.records, self._directory.offset
        found: list[Data | None] = [None] * len(records)
        headers = [*records.headers, directory]
        headers.sort()
        disputed = {record.position for record in records.disputed()}
        with open_source(self._path) as reader:
            known = starts(self._directory) if reader.far else {}
            for key, index in sorted(self._records.items(), key=itemgetter(1)):
                header = records.headers[index]
                start = known.get(header)
                if start is None and records.positions[index] not in disputed:
                    start = plain_start(reader, records, index)
                try:
                    data: Data = (
                        record_data(reader, records[index])
                        if start is None
                        else ByteRange(reader.name, start, records.sizes[index])
                    )
                except (DamagedFile, Unsupported) as error:
                    self._wrong[key] = error.message
                    continue
                following = headers[bisect_right(headers, header)]
                if isinstance(data, ByteRange) and data.end > following:
                    self._wrong[key] = f"its data, from {data.offset:#x} on, overlaps the bytes at {following:#x}"
                found[index] = data
        return found


def fresh(
    pickle: bytes,
    storages: Sequence[tuple[str, Data, int | None]],
    byteorder: Literal["little", "big"] = "little",
    others: Mapping[str, tuple[Data, int | None]] | None = None,
) -> list[Segment]:
    """Return the segments of an archive in the layout of torch 2.13; arguments as for `fresh_records`."""
    return fresh_archive(fresh_records(pickle, storages, byteorder, others))


AROUND = (".format_version", ".storage_alignment", "byteorder", "version", ".data/serialization_id")
"""Records that torch.save writes besides the pickle and the storages; the set depends on its version."""


def fresh_like(
    archive: ZipCheckpoint, path: str, pickle: bytes, storages: Sequence[tuple[str, Data, int | None]]
) -> list[Segment]:
    """Return the segments of an archive with the root, and the records of `AROUND`, of `archive` in the file `path`.

    Raises:
        BadDirectory, Unsupported: a record cannot be copied.
    """
    root = archive.root
    records: list[NewRecord] = []
    data = [NewRecord(f"{root}/data/{key}", held, crc32) for key, held, crc32 in storages]
    with open_source(path) as reader:
        for record in archive.directory.records:
            name = record.name.removeprefix(f"{root}/")
            if record == archive.pickle:
                records.append(NewRecord(record.name, pickle))
            elif name.startswith("data/"):
                records += data
                data = []
            elif name in AROUND:
                records.append(NewRecord(record.name, record_data(reader, record), record.crc32))
    return fresh_archive([*records, *data])


def fresh_records(
    pickle: bytes,
    storages: Sequence[tuple[str, Data, int | None]],
    byteorder: Literal["little", "big"] = "little",
    others: Mapping[str, tuple[Data, int | None]] | None = None,
) -> list[NewRecord]:
    """Return the records of an archive in the layout of torch 2.13.

    Args:
        pickle: the object.
        storages: (key, data, CRC-32 if known) in the order of the records.
        byteorder: byte order of the data.
        others: name -> (data, CRC-32 if known) of records that torch does not write.
    """
    root = "archive"
    head = [("data.pkl", pickle), (".format_version", b"1"), (".storage_alignment", b"64")]
    records = [NewRecord(f"{root}/{name}", data) for name, data in head]
    records.append(NewRecord(f"{root}/byteorder", byteorder.encode()))
    records += [NewRecord(f"{root}/data/{key}", data, crc32) for key, data, crc32 in storages]
    records.append(NewRecord(f"{root}/version", b"3\n"))
    records += [NewRecord(f"{root}/{name}", data, crc32) for name, (data, crc32) in (others or {}).items()]
    return records

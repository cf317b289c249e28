"""Where the records of a torch archive are, and a fresh archive; nothing above them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptfix.checkpoint import ByteRange, Data, Segment
from ckptfix.errors import BadDirectory, DamagedFile, Unsupported
from ckptfix.io.source import open_source
from ckptfix.zips.local import record_data, starts
from ckptfix.zips.read import Directory, Record
from ckptfix.zips.write import NewRecord, fresh_archive

NAME = "zip"

MAX_PICKLE = 1 << 30


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


def refuse_damaged_pickle(archive: Archive, path: str) -> None:
    """What is made of a pickle that is not as it was written has a checksum that agrees, and hides the damage.

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
    """Names that several records have, without regard to case."""
    names = [record.name for record in directory.records]
    if len({name.lower() for name in names}) == len(names):
        return frozenset()
    counts = Counter(name.lower() for name in names)
    return frozenset(name for name in names if counts[name.lower()] > 1)


class Places:
    """Where the storages in `folder` are; local headers are read when the first one is asked for, in one pass."""

    def __init__(self, path: str, archive: Archive, folder: str = "data") -> None:
        self._path = path
        self._prefix = f"{archive.root}/{folder}/"
        self._directory = archive.directory
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

    def size(self, key: str) -> int:
        """The bytes of a storage as the directory states them; a negative number for a key that the file lacks."""
        record = self._records.get(key)
        return -1 if record is None or key in self._wrong else record.size

    def _read_headers(self) -> dict[str, Data]:
        found: dict[str, Data] = {}
        with open_source(self._path) as reader:
            known = starts(self._directory) if reader.far else {}
            for key, record in self._records.items():
                try:
                    data = record_data(reader, record, known.get(record.header))
                except (DamagedFile, Unsupported) as error:
                    self._wrong[key] = error.message
                    continue
                following = self._headers[bisect_right(self._headers, record.header)]
                if isinstance(data, ByteRange) and data.end > following:
                    self._wrong[key] = f"its data, from {data.offset:#x} on, runs into what begins at {following:#x}"
                found[key] = data
        return found


def fresh(
    pickle: bytes,
    storages: Sequence[tuple[str, Data, int | None]],
    byteorder: Literal["little", "big"] = "little",
    others: Mapping[str, tuple[Data, int | None]] | None = None,
) -> list[Segment]:
    """The segments of an archive as torch 2.13 lays it out; `fresh_records` has the arguments."""
    return fresh_archive(fresh_records(pickle, storages, byteorder, others))


def fresh_records(
    pickle: bytes,
    storages: Sequence[tuple[str, Data, int | None]],
    byteorder: Literal["little", "big"] = "little",
    others: Mapping[str, tuple[Data, int | None]] | None = None,
) -> list[NewRecord]:
    """The records of such an archive.

    Args:
        pickle: the object.
        storages: (key, data, CRC-32 if known) in the order of the records.
        byteorder: of the data.
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

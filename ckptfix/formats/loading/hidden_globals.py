"""Hidden globals of a file: those in members of archives, packed data, arrays, and pickles inside pickles.

doctor searches files that ckptfix has no reader for, before it proposes anything; repair searches what it would copy
along. Nothing is imported or run. Nothing is unpacked further than a pickle in it reaches, and never beyond `LIMIT`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import field
from typing import NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.formats.foreign.archives import tar_members
from ckptfix.formats.torch import weights_only
from ckptfix.formats.torch.dangerous_globals import is_dangerous
from ckptfix.io.layers import (
    BZIP2,
    MAX_RATIO,
    Memory,
    Packing,
    Unpacked,
    WindowSource,
    any_packing_of,
    faults,
    lzma_of_zip,
)
from ckptfix.io.source import BATCH, Source, found_as, open_source
from ckptfix.pickles import Global
from ckptfix.pickles.names import MAGIC, MOST_OPCODES, OLD_MAGIC, Seen, survey
from ckptfix.urls import as_path, walk_folder
from ckptfix.zips import scan as zip_scan
from ckptfix.zips.read import DEFLATED, STORED, DirectoryRecord, read_directory

LIMIT = 64 << 20
"""Bytes of one packed record or file that are unpacked: a checkpoint has its pickle before its tensors."""

MOST = 256 << 20
"""Bytes of one file that are unpacked in all."""

SMALL = 1 << 20
"""Bytes to which any data may unpack; beyond them, a pickle may unpack to `MAX_RATIO` times its packed bytes."""

DEEPEST = 6
FEW_OPCODES = 1 << 19
"""Opcodes that are read of a file of any size; of a larger one, eight a byte, packed ones too."""

MOST_MEMBERS = 20_000
SEARCHED = 64 << 20
"""Bytes of a zip, from its start, that are searched for records that the directory does not list."""

SHORTEST = 5
"""Least number of bytes of a pickle that names a global."""

TEXT = "a string at"
"""Beginning of the part of `Hidden.place` that names a string of a pickle with a pickle inside."""

_HEAD = 512
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_STORAGE = re.compile(r"(.*/)?(data|constants|storages)/[^/]+", re.DOTALL)
_BZIP2, _LZMA = 12, 14


class Hidden(NamedTuple):
    """A global that `weights_only=True` refuses.

    Attributes:
        place: the record, and what is around it, outermost first; "" for the file itself.
        name: ``module.name``.
        offset: in the file, or in the unpacked data of the record.
        called: offset of its first call; None if it is not called.
    """

    place: str
    name: str
    offset: int
    called: int | None


@dataclass(slots=True)
class HiddenContents:
    """Pickles and hidden globals that were found in a file.

    Attributes:
        pickles: how many pickles were read, at least in part.
        tensors: whether one of them rebuilds a tensor.
        cut: whether a part was too large to be searched to its end.
    """

    hidden: list[Hidden] = field(default_factory=list)
    pickles: int = 0
    tensors: bool = False
    cut: bool = False

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(row.name for row in self.hidden))


def look(path: str, place: str = "", *, data: Collection[str] = ()) -> HiddenContents:
    """Search the file or folder `path`; `place` is its name in the results.

    Args:
        data: records that are known to be only the data of a tensor, and are skipped.
    """
    looker = _Looker(data)
    if found_as(path) != "folder":
        with suppress(CkptfixError), open_source(path) as reader:
            looker.opcodes = min(MOST_OPCODES, max(FEW_OPCODES, 8 * reader.size))
            looker.file(reader, place, 0)
        return looker.found
    for folder, _, names in walk_folder(path):
        for name in sorted(names)[:MOST_MEMBERS]:
            inner = as_path(folder, name)
            with suppress(CkptfixError), open_source(inner) as reader:
                looker.member(reader, inner.relative_to(path).as_posix(), "", 0)
    return looker.found


def look_planned(name: str) -> HiddenContents:
    """Search a planned file: the records that its directory lists, except the data of tensors."""
    looker = _Looker(planned=True)
    with open_source(name) as reader:
        looker.opcodes = min(MOST_OPCODES, max(FEW_OPCODES, 8 * reader.size))
        looker.file(reader, "", 0)
    return looker.found


def dangerous_in(part: object) -> str:
    """Return the dangerous function named by a string of bytes that is or contains a pickle; "" for anything else."""
    if not isinstance(part, (bytes, bytearray, str)) or len(part) < SHORTEST:
        return ""
    # Protocols before 3 write bytes as text, decoded as Latin-1.
    data = part.encode("latin-1", "replace") if isinstance(part, str) else bytes(part)
    if not _begins_pickle(data, old=not isinstance(part, str)):
        return ""
    return next(filter(is_dangerous, look_into(Memory(data, ""), "").names), "")


def _begins_pickle(data: bytes, *, old: bool) -> bool:
    """Return whether `data` begins like a pickle; with `old`, also like one of a protocol without a version."""
    return bool(MAGIC.match(data) or (old and OLD_MAGIC.match(data)))


def look_into(reader: Source, place: str, *, storage: bool = False) -> HiddenContents:
    """Search a record; skip the data of a storage unless it begins like a pickle."""
    looker = _Looker()
    with suppress(CkptfixError):
        looker.member(reader, place, "", 0, storage=storage)
    return looker.found


def names_in_record(reader: Source, record: DirectoryRecord) -> tuple[int, list[str]]:
    """Return (offset of the data of a zip record, the refused globals that it names if it is or holds a pickle)."""
    local = zip_scan.local_at(reader, record.header)
    if local is None:
        return record.header, []
    looker = _Looker()
    with suppress(CkptfixError):
        looker.record(WindowSource(reader, local.data, record.stored), record.name, record.method, "", 0)
    return local.data, looker.found.names


class _Looker:
    """A search of one file, with the bytes and opcodes that it may still use."""

    def __init__(self, data: Collection[str] = (), *, planned: bool = False) -> None:
        self.data = frozenset(data)
        self.planned = planned
        self.found = HiddenContents()
        self.left = MOST
        self.opcodes = MOST_OPCODES

    def file(self, reader: Source, place: str, depth: int) -> None:
        """Search the data of `reader`, in the format that its first bytes show."""
        if depth > DEEPEST:
            self.found.cut = True
            return
        head = reader.read(0, min(_HEAD, reader.size))
        packing = any_packing_of(head)
        if packing is not None and (data := self.unpacked(packing, reader)):
            self.file(Memory(data, reader.name), _joined(place, packing.name), depth + 1)
        elif head.startswith(b"\x93NUMPY"):
            self.array(reader, head, place, depth)
        elif (members := list(tar_members(reader, MOST_MEMBERS))) and head[:2] != b"PK":
            for name, offset, length in members:
                self.member(WindowSource(reader, offset, length), name, place, depth + 1)
        elif head.startswith(b"PK\x03\x04"):
            self.archive(reader, place, depth)
        else:
            self.stream(reader, head, place, depth)
            if b"PK\x05\x06" in reader.read(max(0, reader.size - (1 << 16)), min(1 << 16, reader.size)):
                self.archive(reader, place, depth)

    def member(self, reader: Source, name: str, place: str, depth: int, *, storage: bool | None = None) -> None:
        head = reader.read(0, min(_HEAD, reader.size))
        storage = _STORAGE.fullmatch(name) is not None if storage is None else storage
        if name in self.data or (storage and self.planned):
            return
        if head and (not storage or MAGIC.match(head)):
            self.file(reader, _joined(place, name), depth)

    def archive(self, reader: Source, place: str, depth: int) -> None:
        """Search the members of a zip: those in its directory, and those that only have a local header."""
        listed = {}
        with suppress(CkptfixError):
            listed = {row.header: row for row in read_directory(reader).records[:MOST_MEMBERS]}
        places = sorted({*listed, *self.headers(reader)})[:MOST_MEMBERS]
        covered = 0
        for index, header in enumerate(places):
            local = zip_scan.local_at(reader, header)
            if local is None or (header < covered and header not in listed):
                continue
            row = listed.get(header)
            after = next((other for other in places[index + 1 : index + 2]), reader.size)
            stored = row.stored if row is not None else local.stored
            if row is not None:
                covered = max(covered, local.data + row.stored)
            length = stored if stored else max(after - local.data, 0)
            self.record(WindowSource(reader, local.data, length), local.name, local.method, place, depth + 1)
            if row is not None and row.method != local.method:
                self.record(WindowSource(reader, local.data, length), local.name, row.method, place, depth + 1)

    def headers(self, reader: Source) -> Iterable[int]:
        if self.planned:
            return ()
        try:
            return zip_scan.signatures(WindowSource(reader, 0, SEARCHED)).locals
        except CkptfixError:
            self.found.cut = True
            return ()

    def record(self, reader: Source, name: str, method: int, place: str, depth: int) -> None:
        if method == STORED:
            self.member(reader, name, place, depth)
            return
        head = reader.read(0, min(9, reader.size))
        if method == DEFLATED:
            packing = Packing("deflate", b"", lambda: zlib.decompressobj(-zlib.MAX_WBITS))
        elif method == _BZIP2:
            packing = BZIP2
        elif method == _LZMA and len(head) == 9:
            packing = Packing("lzma", b"", lambda: lzma_of_zip(head))
            reader = WindowSource(reader, 9, reader.size - 9)
        else:
            return
        # A storage may be large; its first bytes show whether it is worth unpacking.
        storage = _STORAGE.fullmatch(name) is not None
        if storage and not MAGIC.match(self.beginning(packing, reader)):
            return
        data = self.unpacked(packing, reader)
        self.member(Memory(data, reader.name), name, place, depth)

    def beginning(self, packing: Packing, reader: Source) -> bytes:
        """Return the first bytes of packed data; empty if they are damaged."""
        with suppress(CkptfixError, *faults()):
            for piece in Unpacked(packing, reader.chunks(0, reader.size, BATCH >> 4)):
                return bytes(piece[:_HEAD])
        return b""

    def unpacked(self, packing: Packing, reader: Source) -> bytes:
        """Unpack the first bytes of packed data, up to the limits; the limit of a zip bomb is that of a small file."""
        pieces: list[bytes] = []
        made = 0
        limit = min(LIMIT, self.left, max(SMALL, MAX_RATIO * reader.size))
        with suppress(CkptfixError, *faults()):
            for piece in Unpacked(packing, reader.chunks(0, reader.size, BATCH >> 2)):
                pieces.append(piece)
                made += len(piece)
                if made >= limit:
                    self.found.cut = True
                    break
        self.left = max(0, self.left - made)
        return b"".join(pieces)

    def array(self, reader: Source, head: bytes, place: str, depth: int) -> None:
        """Search a .npy file: an array of objects is a pickle after the header."""
        width = 2 if head[6:7] == b"\x01" else 4
        start = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
        if start < reader.size:
            header = reader.read(8 + width, min(start - 8 - width, 1 << 16))
            if b"O" in header.partition(b"descr")[2].partition(b"fortran")[0]:
                rest = WindowSource(reader, start, reader.size - start)
                self.stream(rest, rest.read(0, min(_HEAD, rest.size)), place, depth)

    def stream(self, reader: Source, head: bytes, place: str, depth: int) -> None:
        """Search pickles, one after another; data that is not a pickle ends the search at once."""
        seen = survey(reader.read, 0, reader.size, self.opcodes)
        self.opcodes -= seen.steps
        sure = _PICKLE.match(head) is not None
        self.found.pickles += sure or bool(seen.pickles and seen.seen)
        self.found.cut |= seen.cut
        base = reader.base
        # Numbers may begin like a pickle: 66565.0 in float32 is PROTO, then a global that no unpickler would reach.
        ends = bool(seen.pickles)
        rows = [row for row in seen.seen if _is_name(row) or (sure and (ends or row.called is not None))]
        for row in rows:
            full = weights_only.canonical(Global(row.module, row.name, row.at))
            if weights_only.accepted(full):
                self.found.tensors |= full.startswith(_REBUILD)
            elif sure or seen.pickles or is_dangerous(full):
                called = None if row.called is None else base + row.called
                self.found.hidden.append(Hidden(place, full, base + row.at, called))
        self.found.tensors |= seen.persids and bool(rows)
        for inner in seen.inner:
            window: Source = WindowSource(reader, inner.at, inner.length)
            if inner.text:
                if inner.length > LIMIT:
                    self.found.cut = True
                    continue
                text = window.read(0, window.size).decode("utf-8", "replace")
                window = Memory(text.encode("latin-1", "replace"), reader.name)
            with suppress(CkptfixError):
                self.file(window, _joined(place, f"{TEXT} {base + inner.at:#x}"), depth + 1)


_REBUILD = ("torch._utils._rebuild", "torch._tensor._rebuild")


def _is_name(row: Seen) -> bool:
    """Return whether a global, read from what may be any text, has a name that could be imported."""
    return all(part.isidentifier() for part in (*row.module.split("."), *row.name.split(".")))


def _joined(place: str, name: str) -> str:
    return f"{place} > {name}" if place else name

"""Layers around a checkpoint: gzip, a second zip, line ends of a different system. Each is removed.

The inner file is written to a folder that the caller gives, and deletes.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from tempfile import mkdtemp
from typing import NamedTuple, cast
from weakref import finalize

from ckptfix.checkpoint import ByteRange
from ckptfix.errors import Bomb, CkptfixError, DamagedFile, Unsupported, WriteFailed, about
from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.table import found
from ckptfix.formats import FORMATS
from ckptfix.formats.foreign.archives import tar_members
from ckptfix.formats.members import CHECKPOINTS
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.signs import Beginning, is_tar_header
from ckptfix.formats.torch import legacy as torch_legacy
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.io.layers import MAX_RATIO, Packing, Unpacked, any_packing_of, packing_of
from ckptfix.io.output import SCRATCH
from ckptfix.io.read import read_chunks
from ckptfix.io.source import BATCH, Source, open_source
from ckptfix.io.system import named
from ckptfix.urls import as_path
from ckptfix.zips.read import DEFLATED, read_directory
from ckptfix.zips.rebuild import RebuiltArchive
from ckptfix.zips.scan import ScannedHeader, local_at

MAX_LAYERS = 4
MAX_UNPACKED = 1 << 30
"""Bytes to which any file may unpack; a larger result may be at most `MAX_RATIO` times the packed size."""

HEAD = 4096
MAX_MEMBERS = 10_000
"""Members of a tar that are looked at."""

_NOISE = re.compile(r"(.*/)?(__MACOSX/.*|\._[^/]*|\.DS_Store|Thumbs\.db|desktop\.ini)")
"""Files that operating systems add to archives and folders by themselves."""


def is_noise(name: str) -> bool:
    """Return whether a record or file is never part of a checkpoint: ``__MACOSX``, ``.DS_Store``."""
    return _NOISE.fullmatch(name) is not None


class Unwrapped(NamedTuple):
    """The innermost file, and the layers that were removed, outermost first."""

    path: str
    notes: tuple[Finding, ...]


Folder = Callable[[], str]
"""Function that returns the folder for new files; called only when there is one to write."""


class ScratchFolder:
    """A folder for unpacked files, beside the output, where there is enough space.

    It is removed with `stack`; once `stack` has released it, it is removed when nothing refers to it any more.
    """

    def __init__(self, near: str, stack: ExitStack) -> None:
        try:
            self.path = mkdtemp(prefix=SCRATCH, dir=near)
        except OSError as error:
            raise WriteFailed(error.strerror or str(error), path=near) from None
        stack.callback(finalize(self, shutil.rmtree, self.path, ignore_errors=True))


def unwrap(path: str, folder: Folder) -> Unwrapped:
    """Remove every layer around the checkpoint in `path`; new files are written to `folder()`.

    Raises:
        Unsupported: there are more than `MAX_LAYERS` layers, or one expands without limit.
        DamagedFile: line ends were changed, and nothing proves how to undo it.
    """
    notes: list[Finding] = []
    for depth in range(MAX_LAYERS + 1):
        for layer in (_packed, _line_ends, _zip_in_zip, _tar):
            found = layer(path, lambda depth=depth: os.fspath(as_path(folder(), f"layer{depth}")))  # type: ignore[misc]
            if found is not None:
                path, note = found
                notes.append(note)
                break
        else:
            return Unwrapped(path, tuple(notes))
    raise Unsupported(f"it is packed in more than {MAX_LAYERS} layers", path=path)


Layer = tuple[str, Finding]
"""The file with the unpacked contents, and the layer that was removed."""


def _write(dest: str, chunks: Iterator[bytes], packed: int) -> str:
    """Write `chunks`, unpacked from `packed` bytes, to `dest`, and return `dest`."""
    made = 0
    with named(dest), open(dest, "wb") as file:
        for chunk in chunks:
            made += len(chunk)
            if made > max(MAX_UNPACKED, MAX_RATIO * packed):
                raise Bomb(f"{packed} bytes unpack to more than {made}", path=dest)
            file.write(chunk)
    return dest


def _packed(path: str, place: Folder) -> Layer | None:
    """Unpack gzip, bzip2, xz, or zlib as joblib writes it around the whole file, up to any damage."""
    with about(path), open_source(path) as reader:
        packing = packing_of(reader.read(0, min(reader.size, 8))) or _zlib_of_pickle(reader)
        if packing is None:
            return None
        unpacked = Unpacked(packing, reader.chunks(0, reader.size))
        dest = _write(place(), iter(unpacked), reader.size)
        if not unpacked.whole and not os.path.getsize(dest):  # noqa: PTH202 (it is text here)
            message = f"it is packed with {packing.name}, and damaged so early that none of it can be unpacked"
            raise DamagedFile(message, hint="download or copy it again")
    state = "" if unpacked.whole else ", which is damaged: the data after the damage is lost"
    severity: Severity = "info" if unpacked.whole else "warning"
    message = f"it is packed with {packing.name}{state}"
    if packing.name == "gzip":
        return dest, found("gzip", message, severity=severity)
    return dest, found("compressed", message, severity=severity)


def _zlib_of_pickle(reader: Source) -> Packing | None:
    """Return zlib if a pickle is inside, as its two magic bytes alone prove too little."""
    head = reader.read(0, min(reader.size, HEAD))
    packing = any_packing_of(head)
    opened = b"" if packing is None else next(iter(Unpacked(packing, [head])), b"")
    return packing if opened.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")) else None


def _line_ends(path: str, place: Folder) -> Layer | None:
    """Remove the carriage return before every line feed, if a torch zip's checksums prove that each was added."""
    with open_source(path) as reader:
        head = reader.read(0, min(HEAD, reader.size))
        try:
            if not _looks_like_checkpoint(path, head, reader.size) or not _only_crlf(reader):
                return None
        except WriteFailed:
            return None
        message = "it was transferred as text: a carriage return precedes every line feed"
        if not head.startswith(b"PK"):
            hint = "copy it again, in binary mode"
            raise DamagedFile(f"{message}; nothing in it proves which ones were added", path=path, hint=hint)
        dest = _write(place(), _without_returns(reader), reader.size)
    with open_source(dest) as undone:
        records = RebuiltArchive(undone).rebuild().records
    with open_source(path) as reader:
        before = {record.name for record in RebuiltArchive(reader).rebuild().records if record.verified and record.size}
    if not {record.name for record in records if record.verified and record.size} - before:
        os.unlink(dest)  # noqa: PTH108 (it is text here)
        return None
    proven = f"{message}; undone, and verified by the checksums of the kept records"
    return dest, found("text-mode", proven, severity="warning")


def _looks_like_checkpoint(path: str, head: bytes, size: int) -> bool:
    plain = head.replace(b"\r\n", b"\n")
    return any(module.score(path, plain, size) >= 40 for module in (torch_zip, torch_legacy, safetensors))


def _only_crlf(reader: Source) -> bool:
    """Return whether every line feed follows a carriage return, which tensor bytes soon disprove if it is not so."""
    last, feeds = b"", 0
    for chunk in reader.chunks(0, reader.size):
        feeds += chunk.count(b"\n")
        if chunk.count(b"\r\n") + (last == b"\r" and chunk[:1] == b"\n") != chunk.count(b"\n"):
            return False
        last = chunk[-1:]
    return feeds > 1


def _without_returns(reader: Source) -> Iterator[bytes]:
    held = b""
    for chunk in reader.chunks(0, reader.size):
        chunk = held + chunk
        held = b"\r" if chunk.endswith(b"\r") else b""
        yield chunk[: len(chunk) - len(held)].replace(b"\r\n", b"\n")
    yield held


def _zip_in_zip(path: str, place: Folder) -> Layer | None:
    """Extract one checkpoint from the zip around it, which may be truncated itself."""
    with open_source(path) as reader:
        if reader.size < 30 or reader.read(0, 4) != b"PK\x03\x04":
            return None
        local = _sole_checkpoint(reader)
        if local is None:
            return None
        end = local.data + local.stored if local.stored else reader.size
        where = ByteRange(path, local.data, min(end, reader.size) - local.data)
        whole = next((row for row in RebuiltArchive(reader).rebuild().records if row.header == local.header), None)
        chunks = read_chunks(whole.data) if whole is not None else _as_far_as_it_goes(where, local)
        dest = _write(place(), chunks, reader.size)
    state = "" if whole is not None else ", which is damaged"
    severity: Severity = "info" if whole else "warning"
    return dest, found("zip-in-zip", f"it is inside a second zip{state}", where=local.name, severity=severity)


def _tar(path: str, place: Folder) -> Layer | None:
    """Extract the only checkpoint of a tar that is not a checkpoint itself."""
    with open_source(path) as reader:
        head = reader.read(0, min(HEAD, reader.size))
        if len(head) < 512 or not is_tar_header(head[:512]):
            return None
        able = FORMATS.possible(Beginning(path, head, reader.size), folder=False)
        if any(format.score(path, head, reader.size) for format in able):
            return None
        rows = [row for row in tar_members(reader, MAX_MEMBERS) if row[2] > 0 and not is_noise(row[0])]
        likely = [row for row in rows if row[0].lower().endswith(CHECKPOINTS)]
        if len(likely) != 1:
            return None
        name, offset, length = likely[0]
        dest = _write(place(), read_chunks(ByteRange(path, offset, min(length, reader.size - offset))), reader.size)
        whole = offset + length <= reader.size
    state, severity = ("", "info") if whole else (", which is damaged", "warning")
    return dest, found("other-archive", f"it is inside a tar{state}", where=name, severity=cast("Severity", severity))


def _sole_checkpoint(reader: Source) -> ScannedHeader | None:
    """Return the first member, or the only listed one, that begins like a checkpoint; None for an unpacked one."""
    position, local = 0, local_at(reader, 0)
    while local is not None and (is_noise(local.name) or local.name.endswith("/")):
        position = local.data + (local.stored or 0)
        local = local_at(reader, position)
    if local is None or local.name.endswith("data.pkl"):
        return None
    if _begins_like_one(reader, local):
        return local
    try:
        records = read_directory(reader).records
    except CkptfixError:
        return None
    if any(record.name.endswith("data.pkl") for record in records):
        return None
    likely = [record for record in records if record.name.lower().endswith(CHECKPOINTS) and not is_noise(record.name)]
    rows = [row for record in likely[:2] if (row := local_at(reader, record.header)) is not None]
    return rows[0] if len(rows) == 1 and _begins_like_one(reader, rows[0]) else None


def _begins_like_one(reader: Source, local: ScannedHeader) -> bool:
    end = local.data + local.stored if local.stored else reader.size
    where = ByteRange(reader.name, local.data, max(min(end, reader.size) - local.data, 0))
    head = b"".join(_begin(where, local))
    return _looks_like_checkpoint(local.name, head, 1 << 62) or packing_of(head) is not None


def _begin(where: ByteRange, local: ScannedHeader) -> Iterator[bytes]:
    made = 0
    for chunk in _as_far_as_it_goes(ByteRange(where.path, where.offset, min(where.length, HEAD)), local):
        if made < HEAD:
            yield chunk[: HEAD - made]
        made += len(chunk)


def _as_far_as_it_goes(where: ByteRange, local: ScannedHeader) -> Iterator[bytes]:
    """Yield the data of a record up to its damage."""
    if local.method != DEFLATED:
        yield from read_chunks(where)
        return
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for packed in read_chunks(where):
            while packed and not stream.eof:
                chunk = stream.decompress(packed, BATCH)
                if chunk:
                    yield chunk
                packed = stream.unconsumed_tail
        yield stream.flush()
    except (zlib.error, CkptfixError):
        return

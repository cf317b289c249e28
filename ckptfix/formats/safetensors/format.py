"""safetensors files: reading and judging; the byte layout is drawn in `header`.

The format states names, dtypes and shapes, but no devices, ties, strides or requires_grad; what it cannot
state about ties and views stands in metadata pairs (`ties`). It has no checksums: a flipped data bit is
not to be found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    NameSite,
    StateDict,
    Storage,
    TensorEntry,
    contiguous_stride,
    dtypes,
)
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import Format
from ckptfix.formats.safetensors.edit import plan_edit
from ckptfix.formats.safetensors.header import ALIGNMENT, MAX_HEADER, Header, Row, header_of, read_header
from ckptfix.formats.safetensors.packed import plan_packed
from ckptfix.formats.safetensors.ties import VIEWS_KEY, restore_ties, share_plan, ties
from ckptfix.formats.safetensors.write import in_place, plan_write
from ckptfix.io.elements import why_unresolved

NAME = "safetensors"
SUFFIXES = (".safetensors",)

_MANY = 1 << 63
"""More elements than torch can count."""


def score(path: str, head: bytes, size: int) -> int:
    """100 for a plausible header length before an opening brace; 30 for an implausible one."""
    opening = head[8:].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] if size > 8 else b""
    if opening != b"{":
        return 0
    length = int.from_bytes(head[:8], "little")
    if 2 <= length <= min(size - 8, MAX_HEADER):
        return 100
    # A damaged length: text files that have a brace at their ninth byte are not meant.
    return 30 if path.lower().endswith(SUFFIXES) or (length <= MAX_HEADER and head[9:10] == b'"') else 0


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`.

    Names that are only tied to a tensor are among the names of the site, though no tensor of the file has them.
    """
    header = read_header(path)
    rows = {row.key: row for row in header.rows}
    metadata = {pair.key: pair.value for pair in header.pairs}
    tied = ties(metadata, rows.keys())
    return Checkpoint(
        path=path,
        format=NAME,
        size=header.size,
        traits={"header bytes": header.length, "data at": header.data_start},
        load_entries=lambda: tuple(_entry(header, row) for row in rows.values()),
        load_values=lambda: iter(()),
        metadata=metadata,
        sites=(NameSite("", "state_dict", (*rows, *tied)),),
        state_dicts=(StateDict("", len(rows), 0),) if rows else (),
        inside=header,
        findings=(*header.findings, *_unreadable(header)),
    )


def judge(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Everything that is wrong with the file; see the contract in `base`."""
    header = header_of(checkpoint)
    yield from header.findings
    if header.data_start % ALIGNMENT:
        message = f"the tensor data does not begin at a multiple of {ALIGNMENT} bytes"
        yield found("misaligned-data", message, offset=header.data_start)
    yield from _unreadable(header)
    yield from _layout(header)


def _entry(header: Header, row: Row) -> TensorEntry:
    """The tensor of a row; raw bytes where the format's code says nothing to torch."""
    length = max(row.stop - row.begin, 0)
    stated = _stated(row)
    name, shape, detail = stated if stated else ("uint8", (length,), f"{row.code} {list(row.shape)}")
    data = ByteRange(header.path, header.data_start + row.begin, length)
    storage = Storage(row.key, name, length, "cpu", data)
    return TensorEntry(row.key, "", storage, name, shape, contiguous_stride(shape), detail=detail)


def _stated(row: Row) -> tuple[str, tuple[int, ...], str] | None:
    """(torch dtype, shape, "") of a row; None if torch has no such dtype, or could not count the elements."""
    dtype = dtypes.by_safetensors(row.code)
    if dtype is None:
        return None
    count = 1
    for size in row.shape:
        count *= size or 1
        if count >= _MANY:
            return None
    if dtype.packed == 1:
        return dtype.name, row.shape, ""
    if not row.shape or row.shape[-1] % dtype.packed:
        return None
    return dtype.name, (*row.shape[:-1], row.shape[-1] // dtype.packed), ""


def _unreadable(header: Header) -> Iterator[Finding]:
    """What keeps single tensors from being read as they are stated."""
    available = header.data_size
    for row in header.rows:
        offset = header.data_start + row.begin
        length = row.stop - row.begin
        if length < 0:
            yield found("bad-tensor", f"its data ends {-length} bytes before it begins", where=row.key, offset=offset)
            continue
        if length and row.stop > available:
            left = max(available - row.begin, 0)
            yield found("truncated", f"{length} bytes promised, {min(left, length)} left", where=row.key, offset=offset)
        dtype = dtypes.by_safetensors(row.code)
        if dtype is None:
            message = f"unknown dtype {row.code!r}; taken as {length} raw bytes"
            yield found("unknown-dtype", message, where=row.key, offset=offset)
            continue
        stated = _stated(row)
        needed = math.prod(stated[1]) * dtype.itemsize if stated else None
        if needed != length:
            message = f"{row.code} {_short(row.shape)} does not take the {length} bytes that it has"
            yield found("bad-tensor", message, where=row.key, offset=offset)


def _short(shape: tuple[int, ...]) -> str:
    """A shape as text, which a hostile file does not make pages long."""
    shown = ", ".join(map(str, shape[:8]))
    return f"[{shown}, ...]" if len(shape) > 8 else f"[{shown}]"


def _layout(header: Header) -> Iterator[Finding]:
    """Holes, overlaps and bytes behind the last tensor."""
    end, owner = 0, ""
    for row in sorted(header.rows, key=lambda row: (row.begin, row.stop)):
        offset = header.data_start + row.begin
        if row.begin > end:
            message = f"{row.begin - end} bytes before it belong to no tensor"
            yield found("hole", message, where=row.key, offset=header.data_start + end)
        elif row.begin < end:
            message = f"begins {end - row.begin} bytes before {owner!r} ends"
            yield found("overlap", message, where=row.key, offset=offset)
        if row.stop >= end:
            end, owner = row.stop, row.key
    if header.data_size > end:
        message = f"{header.data_size - end} bytes follow the last tensor"
        # Every reader of safetensors refuses such a file; torch's readers pass over a few bytes.
        yield found("trailing-bytes", message, offset=header.data_start + end, severity="error")


def weights(checkpoint: Checkpoint, at: str | None = None, *, views: bool = True) -> tuple[TensorEntry, ...]:
    """The tensors as they were before `share_plan`; see the contract in `base`."""
    if at:
        return ()
    # Recorded views are compared with their bases byte by byte.
    pairs = {key: value for key, value in checkpoint.metadata.items() if views or key != VIEWS_KEY}
    return restore_ties(checkpoint.entries, pairs)


def tied_names(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Names that the metadata ties to a tensor -> that tensor."""
    return ties(checkpoint.metadata, {entry.key for entry in checkpoint.entries}) if checkpoint.metadata else {}


def remarks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What is known of every safetensors file."""
    if checkpoint.entries and checkpoint.metadata.get("format") is None:
        yield found("no-format-metadata")
    yield found("no-checksums", "safetensors states no checksums: a flipped bit of the data could not be seen")


def refuses(entry: TensorEntry) -> str | None:
    """What about a tensor the format cannot hold; None if it can hold it as it is."""
    if entry.kind != "dense":
        return f"{entry.kind} {entry.dtype}"
    if dtypes.by_name(entry.dtype).safetensors is None:
        return f"{entry.detail} {entry.dtype}".strip()
    return why_unresolved(entry)


FORMAT = Format(
    name=NAME,
    title="safetensors",
    suffixes=SUFFIXES,
    states=frozenset({"metadata"}),
    score=score,
    read=read,
    judge=judge,
    weights=weights,
    refuses=refuses,
    plan_edit=plan_edit,
    in_place=in_place,
    plan_write=plan_write,
    share=share_plan,
    ties=tied_names,
    remarks=remarks,
    plan_packed=plan_packed,
)

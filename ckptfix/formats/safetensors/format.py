"""safetensors files: reading and judging; `header` documents the byte layout.

The format states names, dtypes and shapes, but no devices, ties, strides or requires_grad. Ties and views are recorded
in metadata pairs instead (`ties`). It has no checksums: a flipped data bit cannot be detected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    NameList,
    OutputFile,
    Plan,
    Segment,
    StateDict,
    Storage,
    TensorEntry,
    contiguous_stride,
    dtypes,
    short_shape,
)
from ckptfix.errors import Truncated
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import SAFETENSORS_SUFFIXES, Format
from ckptfix.formats.safetensors.edit import merged, plan_edit
from ckptfix.formats.safetensors.header import (
    ALIGNMENT,
    MAX_HEADER,
    METADATA,
    Header,
    HeaderEntry,
    header_of,
    read_header,
)
from ckptfix.formats.safetensors.ties import VIEWS_KEY, restore_ties, share_plan, ties
from ckptfix.formats.safetensors.write import framed, in_place, metadata_text, plan_like, plan_write, quoted
from ckptfix.formats.signs import Beginning, braced
from ckptfix.io.elements import why_unresolved
from ckptfix.io.source import truncated_hint

if TYPE_CHECKING:
    from ckptfix.checkpoint.tree import ValueTree


def plan_packed(checkpoint: Checkpoint, dest: str) -> tuple[Plan, int]:
    """Plan the file with its tensors packed in the order of their bytes, and return it with the number of bytes saved.

    Tensors that overlap still overlap in the same way. Names, order, metadata and values are unchanged.

    Raises:
        Truncated: a tensor's bytes extend beyond the end of the file.
    """
    header = header_of(checkpoint)
    spans = sorted({(row.begin, row.stop) for row in header.rows if row.stop > row.begin})
    beyond = next((stop - header.data_size for _, stop in spans if stop > header.data_size), 0)
    if beyond:
        message = f"a tensor ends {beyond} bytes beyond the end of the file"
        raise Truncated(message, path=checkpoint.path, offset=header.size, hint=truncated_hint(checkpoint.path))
    runs = merged(spans)
    unused = header.data_size - sum(stop - begin for begin, stop in runs)
    if not unused:
        return Plan((OutputFile.of(dest, (ByteRange(header.path, 0, header.size),)),)), 0
    moved: dict[int, int] = {}
    segments: list[Segment] = []
    end = 0
    for begin, stop in runs:
        moved[begin] = end
        segments.append(ByteRange(header.path, header.data_start + begin, stop - begin))
        end += stop - begin
    items = []
    if header.metadata is not None:
        items.append(f"{quoted(METADATA)}:{metadata_text((pair.key, pair.value) for pair in header.pairs)}")
    starts = sorted(moved)
    for row in header.rows:
        begin = _moved(row.begin, starts, moved) if row.stop > row.begin else 0
        sizes = ",".join(map(str, row.shape))
        offsets = f"[{begin},{begin + row.stop - row.begin}]"
        items.append(f'{quoted(row.key)}:{{"dtype":{quoted(row.code)},"shape":[{sizes}],"data_offsets":{offsets}}}')
    whole = framed("{" + ",".join(items) + "}", segments, dest)
    return Plan((OutputFile.of(dest, whole),)), unused


def _moved(place: int, starts: list[int], moved: dict[int, int]) -> int:
    from bisect import bisect_right

    start = starts[bisect_right(starts, place) - 1]
    return moved[start] + place - start


NAME = "safetensors"

_MANY = 1 << 63
"""An element count that torch cannot represent."""


def score(path: str, head: bytes, size: int) -> int:
    """Return 100 for a plausible header length before an opening brace, and 30 for an implausible one."""
    if not braced(Beginning(path, head, size)):
        return 0
    length = int.from_bytes(head[:8], "little")
    if 2 <= length <= min(size - 8, MAX_HEADER):
        return 100
    # A damaged length. Text files that happen to have a brace as their ninth byte must not match.
    return 30 if path.lower().endswith(SAFETENSORS_SUFFIXES) or (length <= MAX_HEADER and head[9:10] == b'"') else 0


def read(path: str) -> Checkpoint:
    """Read names, shapes and offsets; see the contract in `base`.

    Names that are only tied to a tensor are listed in the site's names, although the file has no tensor of that name.
    """
    return of_header(read_header(path))


def of_header(header: Header) -> Checkpoint:
    """Return the checkpoint that a header describes; as `read`."""
    path = header.path
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
        sites=(NameList("", "state_dict", (*rows, *tied)),),
        state_dicts=(StateDict("", len(rows), 0),) if rows else (),
        load_tree=_tree,
        inside=header,
        findings=(*header.findings, *_unreadable(header)),
    )


def validate(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield all faults of the file; see the contract in `base`."""
    header = header_of(checkpoint)
    yield from header.findings
    if header.data_start % ALIGNMENT:
        message = f"the tensor data does not begin at a multiple of {ALIGNMENT} bytes"
        yield found("misaligned-data", message, offset=header.data_start)
    yield from _unreadable(header)
    yield from _layout(header)


def _entry(header: Header, row: HeaderEntry) -> TensorEntry:
    """Return the tensor of a row; as raw bytes if torch has no equivalent of the format's dtype."""
    length = max(row.stop - row.begin, 0)
    stated = _stated(row)
    name, shape, detail = stated if stated else ("uint8", (length,), f"{row.code} {list(row.shape)}")
    data = ByteRange(header.path, header.data_start + row.begin, length)
    storage = Storage(row.key, name, length, "cpu", data)
    return TensorEntry(row.key, "", storage, name, shape, contiguous_stride(shape), detail=detail)


def _stated(row: HeaderEntry) -> tuple[str, tuple[int, ...], str] | None:
    """Return (torch dtype, shape, "") of a row; None if torch has no such dtype, or could not count the elements."""
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
    """Yield the faults that prevent single tensors from being read as described."""
    available = header.data_size
    for row in header.rows:
        offset = header.data_start + row.begin
        length = row.stop - row.begin
        if length < 0:
            yield found(
                "bad-tensor", f"its data ends {-length} bytes before its beginning", where=row.key, offset=offset
            )
            continue
        if length and row.stop > available:
            left = max(available - row.begin, 0)
            yield found(
                "truncated",
                f"the header promises {length} bytes, and the file has {min(left, length)}",
                where=row.key,
                offset=offset,
            )
        dtype = dtypes.by_safetensors(row.code)
        if dtype is None:
            message = f"unknown dtype {row.code!r}; read as {length} raw bytes"
            yield found("unknown-dtype", message, where=row.key, offset=offset)
            continue
        stated = _stated(row)
        needed = math.prod(stated[1]) * dtype.itemsize if stated else None
        if needed != length:
            message = f"{row.code} {short_shape(row.shape)} does not fit its {length} bytes"
            yield found("bad-tensor", message, where=row.key, offset=offset)


def _layout(header: Header) -> Iterator[Finding]:
    """Yield holes, overlaps and bytes behind the last tensor."""
    end, owner = 0, ""
    for row in sorted(header.rows, key=lambda row: (row.begin, row.stop)):
        offset = header.data_start + row.begin
        if row.begin > end:
            message = f"{row.begin - end} bytes before it belong to no tensor"
            yield found("hole", message, where=row.key, offset=header.data_start + end)
        elif row.begin < end:
            message = f"it begins {end - row.begin} bytes before {owner!r} ends"
            yield found("overlap", message, where=row.key, offset=offset)
        if row.stop >= end:
            end, owner = row.stop, row.key
    if header.data_size > end:
        message = f"{header.data_size - end} bytes follow the last tensor"
        # Every reader of safetensors refuses such a file, while torch's readers tolerate a few bytes.
        yield found("trailing-bytes", message, offset=header.data_start + end, severity="error")


def _tree(checkpoint: Checkpoint) -> ValueTree:
    """Return the tree of all tensors, ties and views too."""
    from ckptfix.checkpoint.tree import EntryTree

    return EntryTree(weights(checkpoint), metadata=checkpoint.metadata)


def weights(checkpoint: Checkpoint, at: str | None = None, *, views: bool = True) -> tuple[TensorEntry, ...]:
    """Return the tensors as they were before `share_plan`; see the contract in `base`."""
    if at:
        return ()
    # Recorded views are compared with their bases byte by byte.
    pairs = {key: value for key, value in checkpoint.metadata.items() if views or key != VIEWS_KEY}
    return restore_ties(checkpoint.entries, pairs)


def tied_names(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the names that the metadata ties to a tensor -> that tensor."""
    return ties(checkpoint.metadata, {entry.key for entry in checkpoint.entries}) if checkpoint.metadata else {}


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings that apply to every safetensors file."""
    if checkpoint.entries and checkpoint.metadata.get("format") is None:
        yield found("no-format-metadata")
    yield found("no-checksums", "safetensors has no checksums: a flipped bit in the data cannot be detected")


def refuses(entry: TensorEntry) -> str | None:
    """Return the reason why the format cannot hold a tensor; None if it can hold it unchanged."""
    if entry.kind != "dense":
        return f"{entry.kind} {entry.dtype}"
    if dtypes.by_name(entry.dtype).safetensors is None:
        return f"{entry.detail} {entry.dtype}".strip()
    return why_unresolved(entry)


FORMAT = Format(
    name=NAME,
    title="safetensors",
    suffixes=SAFETENSORS_SUFFIXES,
    states=frozenset({"metadata"}),
    score=score,
    read=read,
    validate=validate,
    weights=weights,
    refuses=refuses,
    plan_edit=plan_edit,
    in_place=in_place,
    plan_write=plan_write,
    plan_like=plan_like,
    split_ties=share_plan,
    ties=tied_names,
    notes=notes,
    plan_packed=plan_packed,
)

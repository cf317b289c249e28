"""Writing of a new safetensors file from the tensors of a state dict.

The data is laid out as by the safetensors library, which keeps every tensor aligned without gaps. The header lists the
tensors in the order of the state dict; the library does not keep that order, but every reader accepts it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptfix.checkpoint import (
    Checkpoint,
    OutputFile,
    Plan,
    Segment,
    TensorEntry,
    dtypes,
    joined,
)
from ckptfix.errors import KeyConflict, Unsupported, WouldLoseData
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.in_place import head_of, room_for, unchanged
from ckptfix.formats.safetensors.header import ALIGNMENT, MAX_HEADER, METADATA, header_of
from ckptfix.io.blocks import best_start, shift_for
from ckptfix.io.elements import row_major, why_unresolved

# The variants of ``Dtype`` in safetensors/src/tensor.rs from last to first, as version 0.8 sorts them.
_LAYOUT_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)
TOO_MANY = 1 << 63
"""The number of elements, or bytes, that no reader can count."""

_RANK = {code: rank for rank, code in enumerate(_LAYOUT_ORDER)}


def plan_write(
    entries: Sequence[TensorEntry],
    dest: str,
    *,
    metadata: Mapping[str, str] | None = None,
    with_format: bool = True,
    ordered: bool = False,
) -> Plan:
    """Plan a file at `dest` that holds `entries` under their keys; see the contract in `base`.

    `metadata` is written to ``__metadata__``, with ``format: pt`` unless it has another ``format``. Views become
    contiguous.

    Args:
        with_format: add ``format: pt``.
        ordered: list the tensors in the header in the order of their data, as the safetensors library does.

    Raises:
        WouldLoseData: the format cannot hold some tensors; the message names all of them.
        KeyConflict: two entries have the same key, or one is called ``__metadata__``.
        Unsupported: a tensor is a strided view of a compressed record, or the header is longer than readers accept.
        DamagedFile: a tensor extends outside its storage.
    """
    described: dict[str, tuple[TensorEntry, str, tuple[int, ...]]] = {}
    odd: list[str] = []
    for entry in entries:
        if entry.key in described or entry.key == METADATA:
            raise KeyConflict(
                f"{METADATA} cannot be the key of a tensor" if entry.key == METADATA else "two tensors have this key",
                where=entry.key,
                pairs=((entry.key, (entry.name,)),),
            )
        stated = stated_of(entry)
        if stated is None:
            odd.append(entry.key)
        else:
            described[entry.key] = (entry, *stated)
    if odd:
        raise WouldLoseData(f"safetensors cannot hold {len(odd)} of {len(entries)} tensors: {', '.join(odd)}")
    segments: list[Segment] = []
    places: dict[str, tuple[int, int]] = {}
    end = 0
    laid_out = sorted(described.items(), key=lambda item: (_RANK[item[1][1]], item[0]))
    for name, (entry, _, _) in laid_out:
        begin, end = end, end + entry.nbytes
        places[name] = begin, end
        if end > begin:
            segments.append(row_major(entry, "little"))
    pairs = {**({"format": "pt"} if with_format else {}), **(metadata or {})}
    items = [f"{quoted(METADATA)}:{metadata_text(pairs.items())}"] if pairs else []
    for name, (_, code, shape) in laid_out if ordered else described.items():
        begin, end = places[name]
        sizes = ",".join(map(str, shape))
        items.append(f'{quoted(name)}:{{"dtype":"{code}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}')
    whole = framed("{" + ",".join(items) + "}", segments, dest)
    return Plan((OutputFile.of(dest, whole),), tuple(_unreadable(described)))


def plan_like(
    checkpoint: Checkpoint, entries: Sequence[TensorEntry], dest: str, metadata: Mapping[str, str]
) -> Plan:
    """Plan like `plan_write`, with the header order and the metadata of `checkpoint`, a safetensors file."""
    begins = [row.begin for row in header_of(checkpoint).rows]
    return plan_write(entries, dest, metadata=metadata, with_format=False, ordered=begins == sorted(begins))


def stated_of(entry: TensorEntry) -> tuple[str, tuple[int, ...]] | None:
    """Return the code and the shape that a header states for `entry`; None if the format cannot hold it."""
    row = dtypes.find(entry.dtype)
    storage = entry.storage
    if row is None or row.safetensors is None or entry.kind != "dense" or storage is None or storage.data is None:
        return None
    if why_unresolved(entry) is not None:
        return None
    if math.prod(size or 1 for size in entry.shape) * row.itemsize >= TOO_MANY:
        return None
    if row.packed == 1:
        return row.safetensors, entry.shape
    # A 0-d tensor of a packed dtype has no shape in elements.
    return (row.safetensors, (*entry.shape[:-1], entry.shape[-1] * row.packed)) if entry.shape else None


def _unreadable(names: Iterable[str]) -> Iterator[Finding]:
    for name in names:
        if not _encodes(name):
            message = "its name contains a lone surrogate; the safetensors library will not open the file"
            yield found("surrogate-name", message, where=name)


def framed(text: str, data: Iterable[Segment] = (), dest: str = "") -> list[Segment]:
    """Return a header of this JSON, with its length before it and `data` behind it, aligned by padding.

    The padding is chosen so that as much of the data as possible has the same alignment in the blocks of the new file
    `dest` as in its source files.

    Raises:
        Unsupported: the header is longer than readers accept.
    """
    raw = text.encode()
    behind = tuple(joined(data))
    unit = shift_for(dest) if behind else ALIGNMENT
    start = best_start(behind, unit, ALIGNMENT)
    length = len(raw) + ((start - 8 - len(raw)) % unit if start is not None else 0)
    if start is None or length > MAX_HEADER:
        length = len(raw) + -len(raw) % ALIGNMENT
    if length > MAX_HEADER:
        raise Unsupported(f"the safetensors header would have {length:,} bytes; readers accept at most {MAX_HEADER:,}")
    return [b"".join((length.to_bytes(8, "little"), raw, b" " * (length - len(raw)))), *behind]


def in_place(checkpoint: Checkpoint, plan: Plan, block: Callable[[], int]) -> Plan:
    """Pad the header up to the data's current offset, or as little further as blocks allow; see `Format.in_place`."""
    (file,) = plan.files
    if unchanged(file):
        return plan
    head, data = head_of(file, checkpoint.size, header_of(checkpoint).data_start)
    room = room_for(8 + len(head[8:].rstrip(b" ")), data.offset, block, file.path)
    text = head[8:].rstrip(b" ").ljust(room - 8)
    if len(text) > MAX_HEADER:
        raise Unsupported(
            f"the safetensors header would have {len(text):,} bytes; readers accept at most {MAX_HEADER:,}"
        )
    return replace(plan, files=(OutputFile.of(file.path, (len(text).to_bytes(8, "little") + text, data)),))


def metadata_text(pairs: Iterable[tuple[str, str]]) -> str:
    """Return ``__metadata__`` as JSON."""
    return "{" + ",".join(f"{quoted(key)}:{quoted(value)}" for key, value in pairs) + "}"


def quoted(name: str) -> str:
    """Return `name` as JSON: plain UTF-8, except that lone surrogates are escaped."""
    return json.dumps(name, ensure_ascii=not _encodes(name))


def _encodes(name: str) -> bool:
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

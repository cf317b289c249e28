"""The parts of a legacy file: five pickles, then the storages; and a fresh file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Segment, TensorEntry, dtypes, joined
from ckptfix.errors import Truncated, TruncatedPickle, Unsupported, WouldLoseData
from ckptfix.findings import table
from ckptfix.findings.row import Finding
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch.tensors import DEVICE_TENSOR, BadTensor
from ckptfix.io.blocks import best_start, shift_for
from ckptfix.io.source import Source, open_source, truncated_hint
from ckptfix.pickles import Dict, Graph, parse
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.emit import emit
from ckptfix.pickles.graph import Node
from ckptfix.pickles.patch import int_opcode, string_opcode

NAME = "legacy"

MAGIC = 0x1950A86A20F9469CFC6C

PROTOCOL = 1001


MAGIC_BYTES = MAGIC.to_bytes(10, "little")

FIRST_WINDOW, FIRST_FAR = 4 << 20, 896 << 10
"""Bytes that are read first; of a file far away fewer."""


MAX_PICKLE = 1 << 30


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a legacy file are.

    Attributes:
        object_start: offset of the object's pickle; it ends where the graph does, counted from there.
        storages: key -> (range of the elements, number of elements), in file order.
        stated: the numbers are those that the pickle states, and the file was not asked.
    """

    object_start: int
    object_end: int
    storages: Mapping[str, tuple[ByteRange, int]]
    stated: bool = False


def read_pickles(
    reader: Source, *, start: int = 0, partial: bool = False, window: int | None = None
) -> list[Graph]:
    """The five pickles; their spans are offsets in the file.

    The size of the object's pickle is stated nowhere: a window from the start of the file is parsed, and
    a larger one if the pickle runs out of it.

    Args:
        start: where the first one begins.
        partial: give those before the one in which the file ends.
        window: bytes that are read first.
    """
    window = window or (FIRST_FAR if reader.far else FIRST_WINDOW)
    while True:
        data = reader.read(0, min(start + window, reader.size))
        if not reader.far and len(data) < min(reader.size, MOST_SEARCHED) and not _KEYS.search(data, start):
            window *= 4
            continue
        graphs: list[Graph] = []
        position = start
        try:
            for _ in range(5):
                graphs.append(parse(data, start=position, path=reader.name, where=PARTS[len(graphs)]))
                position = graphs[-1].end
            return graphs
        except TruncatedPickle:
            if len(data) == reader.size and partial:
                return graphs
            if len(data) == reader.size:
                raise
            if window >= MAX_PICKLE:
                raise Unsupported(f"a pickle of over {MAX_PICKLE} bytes", path=reader.name) from None
            window *= 4


_KEYS = re.compile(rb"\.\x80[\2-\5](?:\x95.{8})?\]", re.DOTALL)
"""The end of a pickle, and the beginning of one of a list: the keys of the storages stand behind the object."""

MOST_SEARCHED = 64 << 20
"""Bytes in which that is looked for: it takes less time than to parse in vain a pickle that is not whole."""


PARTS = ("magic number", "protocol", "sys_info", "object", "storage keys")


def storage_counts(
    reader: Source, graph: Graph, keys: Sequence[str], position: int
) -> Iterator[tuple[str, int, int, int]]:
    """(key, offset of its count, count, bytes of an element) of each storage behind the pickles, in file order.

    It ends where the file ends before a count, and after a count below zero. The bytes of an element are 0 for a key
    that the object does not refer to.
    """
    itemsizes: dict[str, int] = {}
    for persid in graph.persids:
        try:
            key, kind, _, _ = torch_common.fields(persid)
        except BadTensor:
            continue
        itemsizes.setdefault(key, dtypes.by_name(kind).itemsize)
    for key in keys:
        if position + 8 > reader.size:
            return
        count = int.from_bytes(reader.read(position, 8), "little", signed=True)
        yield key, position, count, itemsizes.get(key, 0)
        if count < 0:
            return
        position += 8 + count * itemsizes.get(key, 1)


def storages_of(
    reader: Source, graph: Graph, keys: list[str], position: int, findings: list[Finding]
) -> tuple[dict[str, tuple[ByteRange, int]], bool]:
    """The storages as `read_storages` gives them, and whether their counts are those that the pickle states."""
    stated = _stated_storages(reader, graph, keys, position)
    if stated is not None:
        return stated, True
    return read_storages(reader, graph, keys, position, findings), False


def _stated_storages(
    reader: Source, graph: Graph, keys: Sequence[str], position: int
) -> dict[str, tuple[ByteRange, int]] | None:
    """The same by what the pickle states, of a file far away: each count there would be a request.

    None where the file has not exactly the size that comes of it.
    """
    if not reader.far:
        return None
    counts: dict[str, tuple[int, int]] = {}
    for persid in graph.persids:
        try:
            key, kind, _, count = torch_common.fields(persid)
        except BadTensor:
            return None
        if counts.setdefault(key, (count, dtypes.by_name(kind).itemsize)) != (count, dtypes.by_name(kind).itemsize):
            return None
    if counts.keys() != {*keys} or len(counts) != len(keys):
        return None
    found = {}
    for key in keys:
        count, itemsize = counts[key]
        found[key] = ByteRange(reader.name, position + 8, count * itemsize), count
        position += 8 + count * itemsize
    return found if position == reader.size else None


def compared(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Counts in the file that are not what the pickle states; of a file far away that was read by these."""
    layout = torch_common.parts_of(checkpoint).container
    if not layout.stated:
        return
    with open_source(checkpoint.path) as reader:
        for key, (data, count) in layout.storages.items():
            there = int.from_bytes(reader.read(data.offset - 8, 8), "little", signed=True)
            if there != count:
                message = f"a storage of {there} elements, and the pickle says {count}"
                yield table.found("bad-storage", message, where=key, offset=data.offset - 8)


def read_storages(
    reader: Source, graph: Graph, keys: list[str], position: int, findings: list[Finding]
) -> dict[str, tuple[ByteRange, int]]:
    """The place of each storage; those beyond the end of the file keep their promised place."""
    found: dict[str, tuple[ByteRange, int]] = {}
    for key, place, count, itemsize in storage_counts(reader, graph, keys, position):
        if count < 0:
            findings.append(table.found("bad-storage", f"a storage of {count} elements", where=key, offset=place))
            position = place
            break
        data = ByteRange(reader.name, place + 8, count * (itemsize or 1))
        found[key] = (data, count)
        position = data.end
    missing = [key for key in keys if key not in found]
    if position > reader.size or missing:
        message = f"the file ends at {reader.size}, {max(position - reader.size, 0)} bytes early"
        if missing:
            message += f"; {len(missing)} of {len(keys)} storages are absent"
        findings.append(table.found("truncated", message, offset=reader.size))
    elif position < reader.size:
        message = f"{reader.size - position} bytes follow the last storage"
        findings.append(table.found("trailing-bytes", message, offset=position))
    return found


class Places:
    def __init__(self, layout: Layout) -> None:
        self.read_storages = layout.storages

    def __call__(self, key: str) -> tuple[Data | None, int, int | None]:
        found = self.read_storages.get(key)
        return (None, -1, None) if found is None else (found[0], found[0].length, None)


def refuse_truncated(checkpoint: Checkpoint) -> None:
    """Raise Truncated for a checkpoint of any format that ends before its last tensor does."""
    for finding in checkpoint.findings:
        if finding.id == "truncated":
            hint = truncated_hint(checkpoint.path)
            raise Truncated(finding.message, path=checkpoint.path, offset=finding.offset, hint=hint)


CANNOT_LOAD = "from a legacy file torch cannot load"


def refuse_unloadable(entries: Sequence[TensorEntry], path: str) -> None:
    """Refuse tensors that torch saves to a legacy file and does not load from it.

    - Storages of UntypedStorage (up to 2.13): ``_legacy_load`` asks the storage class for a dtype, and it has none.
    - Those whose rebuild call reads values, such as the sizes of a nested tensor's parts: a legacy file has its bytes
      behind the pickle, so while the calls run every storage holds whatever was in memory.
    """
    untyped = [entry for entry in entries if _is_untyped(entry)]
    if untyped:
        kinds = ", ".join(sorted({entry.dtype for entry in untyped}))
        raise untyped_refusal(path, f"{kinds} ({len(untyped)} tensors)", untyped[0].name)
    for entry in reversed(entries):
        if (computed := _computed(entry)) is not None:
            part, what = computed
            raise WouldLoseData(f"{CANNOT_LOAD} {what}", path=path, where=part.name, hint="keep the zip format")


def refuses(entry: TensorEntry) -> str | None:
    """Why torch would not load a tensor from a legacy file; None if it would. See `refuse_unloadable`."""
    if _is_untyped(entry):
        return entry.dtype
    computed = _computed(entry)
    return None if computed is None else computed[1]


def _is_untyped(entry: TensorEntry) -> bool:
    return entry.storage is not None and dtypes.by_name(entry.dtype).storage_class is None


def _computed(entry: TensorEntry) -> tuple[TensorEntry, str] | None:
    """The tensor among `entry` and its parts whose rebuild call reads values, and what it is."""
    stack = [entry]
    while stack:
        part = stack.pop()
        if part.kind == "nested" or (part.detail.startswith(DEVICE_TENSOR) and part.parts):
            return part, "a nested tensor" if part.kind == "nested" else f"a {part.detail}"
        stack += part.parts
    return None


def untyped_refusal(path: str, what: str, where: str | None = None) -> WouldLoseData:
    hint = "keep the zip format, or convert to safetensors"
    return WouldLoseData(f"{CANNOT_LOAD} {what}", path=path, where=where, hint=hint)


def fresh(pickle: bytes, storages: Sequence[tuple[str, Data, int]], dest: str) -> list[Segment]:
    """The segments of a legacy file as torch 2.13 lays it out.

    Args:
        pickle: the object, with legacy persistent ids.
        storages: (key, data, bytes of an element) in any order; they are written sorted by key, as torch does.
        dest: the file. Where most of the data can lie in its blocks as it does where it comes from, it does.
    """
    sizes = Dict()
    sizes.items += [("short", 2), ("int", 4), ("long", 4)]
    info = Dict()
    info.items += [("protocol_version", PROTOCOL), ("little_endian", True), ("type_sizes", sizes)]
    ordered = sorted(storages, key=lambda storage: storage[0])
    rest: list[Segment] = [emit([key for key, _, _ in ordered])]
    for _, data, itemsize in ordered:
        rest += ((data.length // itemsize).to_bytes(8, "little"), data)
    head = emit(MAGIC) + emit(PROTOCOL) + emit(info)
    unit = shift_for(dest)
    start = best_start(joined(rest), unit, share=0.5)
    if start is not None:
        head = aligned(head, start - len(pickle), unit)
    return [head, pickle, *rest]


_PADDING = "padding"
"""A key of sys_info, a dict that torch reads and of which it looks at no key but two."""

_WIDEST = 64
"""Bytes that a number may take more than it needs; a string takes more than 20 by itself."""


def padded(head: bytes, size: int | None, path: str) -> bytes:
    """`head`, which begins with the first three pickles, with the third one padded so that there are `size` bytes.

    Args:
        size: None for none; otherwise at least what that gives.

    Raises:
        Unsupported: the third pickle is not as torch writes it.
    """
    position = 0
    for part in PARTS[:3]:
        graph = parse(head, start=position, path=path, where=part)
        start, position = position, graph.end
    info = graph.root
    if type(info) is not Dict:
        raise Unsupported("its third pickle is not a dict", path=path, where=PARTS[2], offset=start)
    bare = Dict()
    bare.items += [(key, value) for key, value in info.items if key != _PADDING]
    plain = _terse(bare, path)
    missing = 0 if size is None else size - (len(head) - (position - start) + len(plain) + 3)
    if missing > _WIDEST:
        bare.items.append((_PADDING, " " * (missing - len(_terse(_PADDING, path)) - len(_terse("", path)))))
        plain = _terse(bare, path)
    elif missing:
        plain = _widened(plain, missing, path)
    return b"".join((head[:start], bytes((op.PROTO, 2)), plain, bytes((op.STOP,)), head[position:]))


def aligned(head: bytes, end: int, unit: int) -> bytes:
    """The first three pickles, padded to end at `end` modulo `unit`; as they are where torch did not write them so."""
    try:
        bare = len(padded(head, None, ""))
        return padded(head, bare + (end - bare) % unit, "")
    except Unsupported:
        return head


def _terse(value: Node, path: str) -> bytes:
    """The opcodes of a plain value in as few bytes as there are: without a memo."""
    if type(value) is Dict:
        return b"".join((b"}(", *(_terse(part, path) for pair in value.items for part in pair), b"u"))
    if isinstance(value, str):
        return string_opcode(str(value), 2)
    if isinstance(value, bool):
        return bytes((op.NEWTRUE if value else op.NEWFALSE,))
    if isinstance(value, int):
        return int_opcode(value)
    raise Unsupported("its third pickle is not as torch writes it", path=path, where=PARTS[2])


def _widened(info: bytes, missing: int, path: str) -> bytes:
    """The pickle with its first small number written with zeros before it."""
    at = info.find(b"K", info.find(b"short") + 5)
    if b"short" not in info or at < 0:
        raise Unsupported("its third pickle is not as torch writes it", path=path, where=PARTS[2])
    return info[:at] + bytes((op.LONG1, missing, info[at + 1])) + bytes(missing - 1) + info[at + 2 :]

"""Layout of a legacy file: five pickles, then the storages; and layout of a fresh file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Segment, TensorEntry, dtypes, joined, with_parts
from ckptfix.dataclass import dataclass
from ckptfix.errors import TruncatedPickle, Unsupported, WouldLoseData
from ckptfix.findings import table
from ckptfix.findings.row import Finding
from ckptfix.formats.signs import MAGIC as MAGIC
from ckptfix.formats.signs import MAGIC_BYTES as MAGIC_BYTES
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch.tensors import DEVICE_TENSOR, KINDS, BadTensor
from ckptfix.io.blocks import best_start, shift_for
from ckptfix.io.source import Source, open_source
from ckptfix.pickles import Dict, Graph, parse
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.emit import emit
from ckptfix.pickles.graph import Node
from ckptfix.pickles.patch import int_opcode, string_opcode

NAME = "legacy"

PROTOCOL = 1001

FIRST_WINDOW, FIRST_FAR = 4 << 20, 896 << 10
"""Bytes that are read first, locally and from a remote file."""


MAX_PICKLE = 1 << 30


@dataclass(frozen=True, slots=True)
class LegacyLayout:
    """The locations of the parts of a legacy file.

    Attributes:
        object_start: offset of the object's pickle, which ends at `object_end`.
        storages: key -> (range of the elements, number of elements), in file order.
        stated: the counts are those that the pickle states; the counts in the file were not read.
    """

    object_start: int
    object_end: int
    storages: Mapping[str, tuple[ByteRange, int]]
    stated: bool = False


def read_pickles(
    reader: Source, *, start: int = 0, partial: bool = False, window: int | None = None
) -> list[Graph]:
    """Read the five pickles; their spans are offsets in the file.

    The size of the object's pickle is stated nowhere: a window from the start of the file is parsed, and
    a larger one if the pickle runs out of it.

    Args:
        start: offset of the first pickle.
        partial: if the file ends inside a pickle, return those before it.
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
                raise Unsupported(f"the pickle has over {MAX_PICKLE} bytes", path=reader.name) from None
            window *= 4


_KEYS = re.compile(rb"\.\x80[\2-\5](?:\x95.{8})?\]", re.DOTALL)
"""The end of a pickle, and the beginning of a pickled list: the storage keys follow the object."""

MOST_SEARCHED = 64 << 20
"""Most bytes that are searched for it: a search is faster than a failed attempt to parse an incomplete pickle."""


PARTS = ("magic number", "protocol", "sys_info", "object", "storage keys")


def storage_counts(
    reader: Source, graph: Graph, keys: Sequence[str], position: int
) -> Iterator[tuple[str, int, int, int]]:
    """Yield (key, offset of its count, count, bytes of an element) for each storage after the pickles, in file order.

    The iteration ends if the file ends before a count, and after a negative count. The bytes of an element are 0 for a
    key that the object does not refer to.
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
    """Return the storages as `read_storages` does, and whether their counts are those that the pickle states."""
    stated = _stated_storages(reader, graph, keys, position)
    if stated is not None:
        return stated, True
    return read_storages(reader, graph, keys, position, findings), False


def _stated_storages(
    reader: Source, graph: Graph, keys: Sequence[str], position: int
) -> dict[str, tuple[ByteRange, int]] | None:
    """Return the storages of a remote file by the counts in the pickle, because each count in the file needs a request.

    Return None for a local file, and unless the file has exactly the resulting size.
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
    """Yield a finding for each count that differs from the pickle, if the pickle's counts located the storages."""
    layout = torch_common.pickled_object(checkpoint).container
    if not layout.stated:
        return
    with open_source(checkpoint.path) as reader:
        for key, (data, count) in layout.storages.items():
            there = int.from_bytes(reader.read(data.offset - 8, 8), "little", signed=True)
            if there != count:
                message = f"the storage has {there} elements, but the pickle states {count}"
                yield table.found("bad-storage", message, where=key, offset=data.offset - 8)


def read_storages(
    reader: Source, graph: Graph, keys: list[str], position: int, findings: list[Finding]
) -> dict[str, tuple[ByteRange, int]]:
    """Return the location of each storage; a storage beyond the end of the file keeps its expected location."""
    found: dict[str, tuple[ByteRange, int]] = {}
    for key, place, count, itemsize in storage_counts(reader, graph, keys, position):
        if count < 0:
            findings.append(table.found("bad-storage", f"the storage has {count} elements", where=key, offset=place))
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


class LegacyStorages:
    """Locations of the storages in a legacy file."""

    def __init__(self, layout: LegacyLayout) -> None:
        self.read_storages = layout.storages

    def __call__(self, key: str) -> tuple[Data | None, int, int | None]:
        """Return the data and the length of a storage; -1 for a missing one. There are no checksums."""
        found = self.read_storages.get(key)
        return (None, -1, None) if found is None else (found[0], found[0].length, None)


CANNOT_LOAD = "torch cannot load this from a legacy file:"


def refuse_unloadable(entries: Sequence[TensorEntry], path: str) -> None:
    """Refuse tensors that torch saves to a legacy file but cannot load from it.

    - Storages of UntypedStorage (up to 2.13): ``_legacy_load`` asks the storage class for a dtype, which it lacks.
    - Tensors whose rebuild call reads values, such as the sizes of a nested tensor's parts: a legacy file stores
    its bytes
      after the pickle, so while the calls run every storage holds uninitialized memory.
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
    """Return why torch would not load a tensor from a legacy file; None if it would. See `refuse_unloadable`."""
    if _is_untyped(entry):
        return entry.dtype
    computed = _computed(entry)
    return None if computed is None else computed[1]


def _is_untyped(entry: TensorEntry) -> bool:
    """Return whether the dtype of a tensor has no storage class of its own."""
    return entry.storage is not None and dtypes.by_name(entry.dtype).storage_class is None


def _computed(entry: TensorEntry) -> tuple[TensorEntry, str] | None:
    """Return the tensor among `entry` and its parts whose rebuild call reads values, and its description."""
    for part in with_parts([entry]):
        computed = KINDS[part.kind].computed
        if computed or (part.detail.startswith(DEVICE_TENSOR) and part.parts):
            return part, computed or f"a {part.detail}"
    return None


def untyped_refusal(path: str, what: str, where: str | None = None) -> WouldLoseData:
    """Return the error for a tensor or storage without a storage class."""
    hint = "keep the zip format, or convert to safetensors"
    return WouldLoseData(f"{CANNOT_LOAD} {what}", path=path, where=where, hint=hint)


def fresh(pickle: bytes, storages: Sequence[tuple[str, Data, int]], dest: str) -> list[Segment]:
    """Return the segments of a legacy file in the layout of torch 2.13.

    Args:
        pickle: the object, with legacy persistent ids.
        storages: (key, data, bytes of an element) in any order; they are written sorted by key, as torch does.
        dest: the file. If possible, most of the data keeps its alignment to filesystem blocks, so that it can be
            shared.
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
"""A key of sys_info, a dict from which torch reads only two keys."""

_WIDEST = 64
"""Most bytes that a number can take beyond its need; a padding string needs more than 20 by itself."""


def padded(head: bytes, size: int | None, path: str) -> bytes:
    """Return `head`, which begins with the first three pickles, with the third one padded so that it has `size` bytes.

    Args:
        size: None for no padding; otherwise at least the length without padding.

    Raises:
        Unsupported: the third pickle has an unexpected layout.
    """
    position = 0
    for part in PARTS[:3]:
        graph = parse(head, start=position, path=path, where=part)
        start, position = position, graph.end
    info = graph.root
    if type(info) is not Dict:
        raise Unsupported("the third pickle is not a dict", path=path, where=PARTS[2], offset=start)
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
    """Pad the first three pickles so that they end at `end` modulo `unit`.

    They stay unchanged if torch did not write them.
    """
    try:
        bare = len(padded(head, None, ""))
        return padded(head, bare + (end - bare) % unit, "")
    except Unsupported:
        return head


def _terse(value: Node, path: str) -> bytes:
    """Return the opcodes of a plain value in as few bytes as possible, without a memo."""
    if type(value) is Dict:
        return b"".join((b"}(", *(_terse(part, path) for pair in value.items for part in pair), b"u"))
    if isinstance(value, str):
        return string_opcode(str(value), 2)
    if isinstance(value, bool):
        return bytes((op.NEWTRUE if value else op.NEWFALSE,))
    if isinstance(value, int):
        return int_opcode(value)
    raise Unsupported("the third pickle has an unexpected layout", path=path, where=PARTS[2])


def _widened(info: bytes, missing: int, path: str) -> bytes:
    """Return the pickle with leading zeros added to its first small number."""
    at = info.find(b"K", info.find(b"short") + 5)
    if b"short" not in info or at < 0:
        raise Unsupported("the third pickle has an unexpected layout", path=path, where=PARTS[2])
    return info[:at] + bytes((op.LONG1, missing, info[at + 1])) + bytes(missing - 1) + info[at + 2 :]

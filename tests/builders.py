"""Checkpoint files made byte by byte, without ckptfix and without torch, so that a test can also make them lie.

A pickle is assembled from opcodes::

    assemble(("PROTO", 2), "EMPTY_DICT", ("BINUNICODE", "a"), ("BININT1", 1), "SETITEM", "STOP")

A torch zip is a list of `Record` (made by `torch_records`), every field of which may be replaced before
`build_zip` writes it. `legacy` and `safetensors` take the parts of their formats the same way.
"""

from __future__ import annotations

import json
import pickletools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = [
    "Op", "Record", "Tensor", "assemble", "build_zip", "cuts", "flip", "framed", "legacy", "push", "replace",
    "safetensors", "state_dict_ops", "tensor_ops", "torch_records", "torch_zip",
]  # fmt: skip

Op = bytes | str | tuple[Any, ...]

_CODES = {info.name: info for info in pickletools.opcodes}


def _line(text: str) -> bytes:
    return text.encode("raw_unicode_escape", "surrogatepass") + b"\n"


def _sized(form: str, data: bytes) -> bytes:
    return struct.pack(form, len(data)) + data


def _utf8(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")


def _long(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True) if value else b""


_ARGUMENTS: dict[str, Callable[..., bytes]] = {
    "uint1": lambda v: struct.pack("<B", v),
    "uint2": lambda v: struct.pack("<H", v),
    "int4": lambda v: struct.pack("<i", v),
    "uint4": lambda v: struct.pack("<I", v),
    "uint8": lambda v: struct.pack("<Q", v),
    "float8": lambda v: struct.pack(">d", v),
    "stringnl": lambda v: _line(repr(v)),
    "stringnl_noescape": _line,
    "stringnl_noescape_pair": lambda module, name: _line(module) + _line(name),
    "unicodestringnl": _line,
    "decimalnl_short": lambda v: _line(str(v)),
    "decimalnl_long": lambda v: _line(f"{v}L"),
    "floatnl": lambda v: _line(repr(v)),
    "string1": lambda v: _sized("<B", _utf8(v)),
    "string4": lambda v: _sized("<i", _utf8(v)),
    "bytes1": lambda v: _sized("<B", v),
    "bytes4": lambda v: _sized("<I", v),
    "bytes8": lambda v: _sized("<Q", v),
    "bytearray8": lambda v: _sized("<Q", v),
    "unicodestring1": lambda v: _sized("<B", _utf8(v)),
    "unicodestring4": lambda v: _sized("<I", _utf8(v)),
    "unicodestring8": lambda v: _sized("<Q", _utf8(v)),
    "long1": lambda v: _sized("<B", _long(v)),
    "long4": lambda v: _sized("<i", _long(v)),
}


def assemble(*ops: Op) -> bytes:
    """The stream of `ops`: a name, a (name, argument...) tuple as in pickletools, or raw bytes as they are."""
    out = bytearray()
    for op in ops:
        if isinstance(op, bytes):
            out += op
            continue
        name, *arguments = (op,) if isinstance(op, str) else op
        info = _CODES[name]
        out += info.code.encode("latin-1")
        if info.arg is not None:
            out += _ARGUMENTS[info.arg.name](*arguments)
    return bytes(out)


def push(value: Any) -> list[Op]:
    """Opcodes that push a plain value, memo-free."""
    match value:
        case None:
            return ["NONE"]
        case bool():
            return ["NEWTRUE" if value else "NEWFALSE"]
        case int() if 0 <= value < 256:
            return [("BININT1", value)]
        case int() if -(2**31) <= value < 2**31:
            return [("BININT", value)]
        case int():
            return [("LONG1", value)]
        case float():
            return [("BINFLOAT", value)]
        case str():
            return [("BINUNICODE", value)]
        case bytes():
            return [("BINBYTES", value)]
        case tuple():
            return ["MARK", *(op for item in value for op in push(item)), "TUPLE"]
        case list():
            return ["EMPTY_LIST", "MARK", *(op for item in value for op in push(item)), "APPENDS"]
        case dict():
            items = (op for pair in value.items() for item in pair for op in push(item))
            return ["EMPTY_DICT", "MARK", *items, "SETITEMS"]
    raise TypeError(f"not a plain value: {value!r}")


def framed(*ops: Op, protocol: int = 4) -> bytes:
    """A protocol 4 or 5 stream whose ops stand in one frame; PROTO and STOP are added."""
    body = assemble(*ops, "STOP")
    return assemble(("PROTO", protocol), ("FRAME", len(body)), body)


@dataclass(frozen=True)
class Tensor:
    """A dense tensor to put in a pickle; any field may be a lie. `location` may be ops, to share a string."""

    key: str
    shape: tuple[int, ...]
    numel: int
    storage_class: str = "FloatStorage"
    location: str | Sequence[Op] = "cpu"
    stride: tuple[int, ...] | None = None
    offset: int = 0
    requires_grad: bool = False
    view: tuple[str, int, int] | None = None
    legacy: bool = False


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def tensor_ops(tensor: Tensor) -> list[Op]:
    """Opcodes that push `tensor` by ``_rebuild_tensor_v2``."""
    location = push(tensor.location) if isinstance(tensor.location, str) else list(tensor.location)
    stride = _row_major(tensor.shape) if tensor.stride is None else tensor.stride
    return [
        ("GLOBAL", "torch._utils", "_rebuild_tensor_v2"), "MARK",
        "MARK", *push("storage"), ("GLOBAL", "torch", tensor.storage_class), *push(tensor.key), *location,
        *push(tensor.numel), *(push(tensor.view) if tensor.legacy else []), "TUPLE", "BINPERSID",
        *push(tensor.offset), *push(tensor.shape), *push(stride), *push(tensor.requires_grad),
        ("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE", "TUPLE", "REDUCE",
    ]  # fmt: skip


def state_dict_ops(items: Mapping[str, Tensor | Sequence[Op] | Any]) -> list[Op]:
    """Opcodes that push a dict of tensors, of ready opcodes (lists), and of plain values."""
    ops: list[Op] = ["EMPTY_DICT", "MARK"]
    for key, value in items.items():
        ops += push(key)
        if isinstance(value, Tensor):
            ops += tensor_ops(value)
        else:
            ops += value if isinstance(value, list) else push(value)
    return [*ops, "SETITEMS"]


@dataclass(frozen=True)
class Record:
    """One zip record. None means what torch writes; ``local_*`` make the local header differ from the directory.

    Attributes:
        data: the bytes, before compression.
        descriptor: bytes after the data; None for a true one (of zip64 size when `zip64`).
        extra: of the local header; None pads with ``FB`` so that the data starts at a multiple of `align`.
        offset: of the local header, as the directory has it.
        gap: bytes put in front of the local header.
    """

    name: str
    data: bytes
    method: int = 0
    flags: int = 0x808
    crc: int | None = None
    size: int | None = None
    compressed_size: int | None = None
    offset: int | None = None
    central_extra: bytes | None = None
    comment: bytes = b""
    disk: int = 0
    local_name: str | None = None
    local_method: int | None = None
    local_flags: int | None = None
    local_crc: int = 0
    local_size: int = 0
    local_compressed_size: int = 0
    local_signature: bytes = b"PK\x03\x04"
    extra: bytes | None = None
    descriptor: bytes | None = None
    descriptor_crc: int | None = None
    zip64: bool = False
    align: int = 64
    gap: bytes = b""

    @cached_property
    def stored(self) -> bytes:
        if self.method != 8:
            return self.data
        packer = zlib.compressobj(wbits=-15)
        return packer.compress(self.data) + packer.flush()


def _local(record: Record, start: int) -> bytes:
    name = (record.name if record.local_name is None else record.local_name).encode("utf-8", "surrogateescape")
    extra = record.extra
    if extra is None:
        before = start + 30 + len(name) + 4
        padding = -before % record.align
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return (
        record.local_signature
        + struct.pack(
            "<HHHHHIIIHH",
            0,
            record.flags if record.local_flags is None else record.local_flags,
            record.method if record.local_method is None else record.local_method,
            0,
            0,
            record.local_crc,
            record.local_compressed_size,
            record.local_size,
            len(name),
            len(extra),
        )
        + name
        + extra
    )


def _descriptor(record: Record, stored: bytes) -> bytes:
    if record.descriptor is not None:
        return record.descriptor
    if not record.flags & 8:
        return b""
    crc = record.crc if record.crc is not None else zlib.crc32(record.data)
    if record.descriptor_crc is not None:
        crc = record.descriptor_crc
    return b"PK\x07\x08" + struct.pack("<IQQ" if record.zip64 else "<III", crc, len(stored), len(record.data))


def _central(record: Record, start: int, stored: bytes) -> bytes:
    name = record.name.encode("utf-8", "surrogateescape")
    crc = zlib.crc32(record.data) if record.crc is None else record.crc
    size = len(record.data) if record.size is None else record.size
    compressed = len(stored) if record.compressed_size is None else record.compressed_size
    offset = start if record.offset is None else record.offset
    extra = record.central_extra
    if record.zip64:
        if extra is None:
            extra = struct.pack("<HHQQQ", 1, 24, size, compressed, offset)
        size = compressed = offset = 0xFFFFFFFF
    extra = extra or b""
    return (
        struct.pack(
            "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 0, 0, record.flags, record.method, 0, 0,
            crc, compressed & 0xFFFFFFFF, size & 0xFFFFFFFF, len(name), len(extra), len(record.comment),
            record.disk, 0, 0, offset & 0xFFFFFFFF,
        )
        + name
        + extra
        + record.comment
    )  # fmt: skip


def build_zip(
    records: Sequence[Record],
    *,
    prepend: bytes = b"",
    append: bytes = b"",
    comment: bytes = b"",
    order: Sequence[int] | None = None,
    zip64: bool | None = None,
    based_on_prepended: bool = False,
    count: int | None = None,
    directory_size: int | None = None,
    directory_offset: int | None = None,
    end: bytes | None = None,
) -> bytes:
    """A zip archive of `records`, written in order; the directory lists them by `order` (indices).

    Args:
        zip64: False writes no zip64 end record; None does as torch does (one is there, and the old end record
            has the numbers too); True makes it the only place with the numbers.
        based_on_prepended: offsets count from the end of `prepend`, as if it had been added later.
        count, directory_size, directory_offset: lies for the end record.
        end: replaces everything after the central directory.
    """
    out = bytearray(prepend)
    base = len(prepend) if based_on_prepended else 0
    starts: list[int] = []
    for record in records:
        out += record.gap
        starts.append(len(out) - base)
        out += _local(record, starts[-1])
        stored = record.stored
        out += stored + _descriptor(record, stored)
    start = len(out) - base
    for index in range(len(records)) if order is None else order:
        out += _central(records[index], starts[index], records[index].stored)
    size = len(out) - base - start
    number = len(records) if order is None else len(order)
    number = number if count is None else count
    size = size if directory_size is None else directory_size
    start = start if directory_offset is None else directory_offset
    if end is not None:
        return bytes(out) + end + append
    if zip64 is not False:
        at = len(out) - base
        out += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0x31E, 45, 0, 0, number, number, size, start)
        out += struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
    if zip64:
        number, size, start = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF
    out += struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, number & 0xFFFF, number & 0xFFFF, size & 0xFFFFFFFF,
        start & 0xFFFFFFFF, len(comment),
    )  # fmt: skip
    return bytes(out) + comment + append


def torch_records(
    pickle: bytes,
    storages: Mapping[str, bytes] | Sequence[bytes] = (),
    *,
    root: str = "archive",
    byteorder: str | None = "little",
    version: str | None = "3\n",
    serialization_id: str | None = "0" * 40,
    modern: bool = True,
) -> list[Record]:
    """The records of a torch zip in torch's order; `modern` adds the two format records of torch 2.7 and later."""
    named = storages if isinstance(storages, Mapping) else {str(i): data for i, data in enumerate(storages)}
    parts: list[tuple[str, bytes]] = [("data.pkl", pickle)]
    if modern:
        parts += [(".format_version", b"1"), (".storage_alignment", b"64")]
    if byteorder is not None:
        parts.append(("byteorder", byteorder.encode()))
    parts += [(f"data/{key}", data) for key, data in named.items()]
    if version is not None:
        parts.append(("version", version.encode()))
    if serialization_id is not None:
        parts.append((".data/serialization_id", serialization_id.encode()))
    return [Record(f"{root}/{name}" if root else name, data) for name, data in parts]


def torch_zip(pickle: bytes, storages: Mapping[str, bytes] | Sequence[bytes] = (), **layout: Any) -> bytes:
    """A whole torch zip; `layout` as for `torch_records`."""
    return build_zip(torch_records(pickle, storages, **layout))


MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
SYS_INFO = {
    "protocol_version": PROTOCOL,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


def legacy(
    pickle: bytes,
    storages: Sequence[tuple[str, int, bytes]] = (),
    *,
    magic: bytes | None = None,
    protocol: bytes | None = None,
    sys_info: bytes | Mapping[str, Any] = SYS_INFO,
    keys: bytes | None = None,
) -> bytes:
    """A legacy file: five pickles, then for each (key, element count, bytes) the count and the bytes."""

    def whole(value: Any) -> bytes:
        return assemble(("PROTO", 2), *push(value), "STOP")

    return b"".join([
        whole(MAGIC) if magic is None else magic,
        whole(PROTOCOL) if protocol is None else protocol,
        sys_info if isinstance(sys_info, bytes) else whole(dict(sys_info)),
        pickle,
        whole([key for key, _, _ in storages]) if keys is None else keys,
        *(struct.pack("<q", count) + data for _, count, data in storages),
    ])  # fmt: skip


def safetensors(
    tensors: Iterable[tuple[str, str, Sequence[int], bytes]] = (),
    *,
    metadata: Mapping[str, Any] | None = None,
    header: Mapping[str, Any] | bytes | None = None,
    length: int | None = None,
    align: int = 8,
    tail: bytes = b"",
) -> bytes:
    """A safetensors file of (name, dtype code, shape, bytes).

    Args:
        header: replaces the JSON (a mapping, or the raw bytes).
        length: replaces the stated length of the header.
        align: the header is padded with spaces to a multiple of this.
        tail: bytes after the data.
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = bytearray()
    for name, dtype, shape, raw in tensors:
        offsets = [len(data), len(data) + len(raw)]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += raw
    if header is None or isinstance(header, Mapping):
        text = json.dumps(entries if header is None else header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % align)
    else:
        text = header
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data) + tail


def flip(data: bytes, bit: int) -> bytes:
    """`data` with one bit inverted; `bit` counts from the lowest bit of the first byte."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def cuts(data: bytes, step: int = 1) -> Iterator[tuple[int, bytes]]:
    """Every (length, data cut to that length), the whole one left out."""
    for length in range(0, len(data), step):
        yield length, data[:length]


def written(path: Path, data: bytes) -> Path:
    """`path`, after writing `data` to it."""
    path.write_bytes(data)
    return path

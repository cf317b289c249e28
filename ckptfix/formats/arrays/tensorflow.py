"""TensorFlow's checkpoints: an index, and the data of all variables in shards beside it.

::

    PREFIX.index                  a table of LevelDB: the key "" has a BundleHeaderProto, each name a BundleEntryProto
    PREFIX.data-00000-of-00002    raw bytes

    BundleHeaderProto  1 num_shards, 2 endianness (1 for big)
    BundleEntryProto   1 dtype, 2 shape, 3 shard_id, 4 offset, 5 size, 6 crc32c, 7 slices (of a partitioned variable)

    table    blocks, and a footer of 48 bytes: the places of two indexes as varints, zeros, a magic number
    block    rows (varints: shared bytes, own bytes, bytes of the value; own bytes; value), restart points (u32 each),
             their number (u32); behind it one byte for the compression and a checksum (u32)

The checkpoint is the file ``PREFIX.index``. Names are kept: slashes, and the ``/.ATTRIBUTES/VARIABLE_VALUE`` of TF 2.
Sources: tensorflow/core/protobuf/tensor_bundle.proto, tensorflow/core/lib/io/format.cc and table_builder.cc.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptfix.checkpoint import ByteRange, Checkpoint, FileVersion
from ckptfix.errors import CkptfixError, DamagedFile, Truncated, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.arrays.common import Array, checkpoint_of, read_only
from ckptfix.formats.arrays.cursor import Cursor
from ckptfix.formats.arrays.protobuf import fields, signed, varint
from ckptfix.formats.signs import Beginning, tensor_bundle
from ckptfix.io.source import Source, open_source

NAME = "tensorflow"

MAGIC = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
FOOTER = 48

MOST_BLOCK = 1 << 26
"""The limit in bytes of a block of the index; TensorFlow writes 256 KiB."""

MOST_SHARDS = 10_000

DTYPES: Mapping[int, str] = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64",
    10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64",
    24: "float8_e5m2", 25: "float8_e4m3fn",
}
"""Number of a type (tensorflow/core/framework/types.proto) -> torch's name."""

_TEXT = 7

OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""The name under which TF 2 stores the graph of the objects that the variables belong to, as text."""


def score(path: str, head: bytes, size: int) -> int:
    """Return 90 for a table of LevelDB whose first key is that of a bundle's header."""
    if not tensor_bundle(Beginning(path, head, size)) or size <= FOOTER:
        return 0
    try:
        with open_source(path) as source:
            return 90 if source.read(size - 8, 8) == MAGIC else 0
    except CkptfixError:
        return 0


def _rows(source: Source, place: ByteRange) -> Iterator[tuple[bytes, ByteRange]]:
    """Yield the key and the place of the value of each row of a block.

    Raises:
        DamagedFile: the block is not as the table's writer makes it.
    """
    if place.length < 4 or place.length > MOST_BLOCK or place.end + 5 > source.size:
        raise DamagedFile("a block of the index is outside the file", path=source.name, offset=place.offset)
    if source.read(place.end, 1) != b"\0":
        raise Unsupported("a block of the index is compressed", path=source.name, offset=place.offset)
    restarts = int.from_bytes(source.read(place.end - 4, 4), "little")
    end = place.end - 4 - 4 * restarts
    if end < place.offset:
        raise DamagedFile("a block of the index has no rows", path=source.name, offset=place.offset)
    cursor = Cursor(source, place.offset, end)
    key = b""
    while cursor.at < end:
        at = cursor.at
        shared, own, length = varint(cursor), varint(cursor), varint(cursor)
        if shared > len(key) or own > MOST_BLOCK:
            raise DamagedFile("a row of the index shares more than the last key", path=source.name, offset=at)
        key = key[:shared] + cursor.take(own)
        yield key, cursor.skip(length)


def _handle(cursor: Cursor) -> ByteRange:
    return ByteRange(cursor.source.name, varint(cursor), varint(cursor))


def _table(source: Source) -> Iterator[tuple[bytes, ByteRange]]:
    """Yield the rows of all blocks of a table."""
    footer = Cursor(source, source.size - FOOTER)
    _handle(footer)
    for _, value in _rows(source, _handle(footer)):
        yield from _rows(source, _handle(Cursor(source, value.offset, value.end)))


def _shards(path: str, count: int) -> list[FileVersion | None]:
    """Return the data files; None for each that is missing."""
    prefix = path.removesuffix(".index")
    made: list[FileVersion | None] = []
    for shard in range(count):
        try:
            with open_source(f"{prefix}.data-{shard:05d}-of-{count:05d}") as source:
                made.append(FileVersion(source.name, source.mark))
        except CkptfixError:
            made.append(None)
    return made


def _header(source: Source, place: ByteRange) -> tuple[int, bool]:
    """Return the number of shards, and whether the data is big-endian."""
    stated = {number: signed(value) for number, value, _ in fields(source, place) if isinstance(value, int)}
    count = stated.get(1, 1)
    if not 0 < count <= MOST_SHARDS:
        raise DamagedFile(f"the index states {count} data files", path=source.name, offset=place.offset)
    return count, stated.get(2, 0) == 1


def _shape(source: Source, place: ByteRange) -> tuple[int, ...]:
    """Return the sizes of a TensorShapeProto; those of a dimension without a field are 0, the default of proto3."""
    sizes: list[int] = []
    for number, value, _ in fields(source, place):
        if number == 2 and isinstance(value, ByteRange):
            sizes.append(next((signed(row.value) for row in fields(source, value) if row.number == 1), 0))
    return tuple(sizes)


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`.

    Raises:
        DamagedFile: the index is not a table of variables.
        Truncated: a data file is missing.
    """
    findings: list[Finding] = []
    arrays: list[Array] = []
    shards: list[FileVersion | None] = []
    big = False
    with open_source(path) as source:
        size = source.size
        for key, place in _table(source):
            if not key:
                count, big = _header(source, place)
                shards = _shards(path, count)
                continue
            made = _array(source, key.decode("utf-8", "backslashreplace"), place, shards, big)
            if isinstance(made, Finding):
                findings.append(made)
            elif made is not None:
                arrays.append(made)
    missing = [shard for shard, version in enumerate(shards) if version is None]
    if missing:
        hint = "the data is in files named like the index: copy them to the same folder"
        name = f"data-{missing[0]:05d}-of-{len(shards):05d}"
        raise Truncated(f"the data file .{name} is missing ({len(missing)} of {len(shards)})", path=path, hint=hint)
    others = tuple(version for version in shards if version is not None)
    return checkpoint_of(
        path, NAME, size, arrays, traits={"data files": len(shards)}, findings=findings, others=others
    )


def _array(
    source: Source, name: str, place: ByteRange, shards: list[FileVersion | None], big: bool
) -> Array | Finding | None:
    """Return the variable that a row of the index describes; None if its data file is missing."""
    dtype = shard = offset = size = 0
    shape: tuple[int, ...] = ()
    sliced = False
    for number, value, _ in fields(source, place):
        if number == 2 and isinstance(value, ByteRange):
            shape = _shape(source, value)
        elif number == 7:
            sliced = True
        elif number == 1:
            dtype = signed(value)
        elif number == 3:
            shard = signed(value)
        elif number == 4:
            offset = signed(value)
        elif number == 5:
            size = signed(value)
    if sliced:
        message = "it is a partitioned variable, stored in slices, which are not read"
        return found("bad-tensor", message, where=name, offset=place.offset)
    if dtype == _TEXT or name == OBJECTS:
        return None if name == OBJECTS else found("not-taken", "it holds text, and is not a tensor", where=name)
    if not 0 <= shard < len(shards) or min(offset, size) < 0:
        return found("bad-tensor", f"its data is in file {shard} of {len(shards)}", where=name, offset=place.offset)
    version = shards[shard]
    if version is None:
        return None
    data = ByteRange(version.path, offset, size)
    if dtype not in DTYPES:
        return Array(name, None, (size,), data, kind=f"TensorFlow's type {dtype}")
    return Array(name, DTYPES[dtype], shape, data, big=big)


FORMAT = read_only(NAME, "TensorFlow checkpoint", score, read)

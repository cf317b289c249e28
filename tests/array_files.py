"""Small writers of other frameworks' files, from the descriptions of their formats."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def npz(arrays: Arrays, path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def packed_npz(arrays: Arrays, path: Path) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def msgpack(value: Any) -> bytes:
    """Return a value as MessagePack, arrays as flax writes them; each length is in its longest form."""
    if isinstance(value, dict):
        items = b"".join(msgpack(part) for pair in value.items() for part in pair)
        return (bytes([0x80 | len(value)]) if 0 < len(value) < 16 else struct.pack(">BI", 0xDF, len(value))) + items
    if isinstance(value, str):
        text = value.encode()
        return (bytes([0xA0 | len(text)]) if len(text) < 32 else struct.pack(">BI", 0xDB, len(text))) + text
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xC6, len(value)) + value
    if isinstance(value, tuple):
        return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(msgpack, value))
    if isinstance(value, bool) or value is None:
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return struct.pack(">Bq", 0xD3, value)
    inner = msgpack((value.shape, value.dtype.name, value.tobytes()))
    return struct.pack(">BIB", 0xC9, len(inner), 1) + inner


def flax(arrays: Arrays, path: Path) -> None:
    """Write arrays as nested mappings, one level for each dot."""
    root: dict[str, Any] = {}
    for key, value in arrays.items():
        *levels, last = key.split(".")
        inner = root
        for level in levels:
            inner = inner.setdefault(level, {})
        inner[last] = value
    path.write_bytes(msgpack(root))


def pickled(arrays: Arrays, path: Path) -> None:
    path.write_bytes(pickle.dumps(dict(arrays)))


_GGML = {"float32": 0, "float16": 1, "int8": 24, "int16": 25, "int32": 26, "int64": 27, "float64": 28, "bfloat16": 30}


def gguf(
    arrays: Arrays,
    path: Path,
    *,
    blocks: Mapping[str, tuple[int, int]] | None = None,
    order: str = "<",
    architecture: str = "llama",
    numbers: Mapping[str, int] | None = None,
) -> None:
    """Write GGUF version 3.

    Args:
        blocks: key of an array of bytes -> number of its type, and weights in a row.
        numbers: further pairs of the metadata.
    """

    def text(value: str) -> bytes:
        return struct.pack(f"{order}Q", len(value.encode())) + value.encode()

    pairs = text("general.architecture") + struct.pack(f"{order}I", 8) + text(architecture)
    pairs += text("tokens") + struct.pack(f"{order}IIQ", 9, 8, 2) + text("a") + text("bb")
    for key, number in (numbers or {}).items():
        pairs += text(key) + struct.pack(f"{order}II", 4, number)
    table, data = b"", b""
    for key, value in arrays.items():
        kind, width = (blocks or {}).get(key, (None, 0))
        shape = value.shape if kind is None else (*value.shape[:-1], width)
        table += text(key) + struct.pack(f"{order}I{len(shape)}Q", len(shape), *reversed(shape))
        table += struct.pack(f"{order}IQ", _GGML[value.dtype.name] if kind is None else kind, len(data))
        raw = value.tobytes() if order == "<" else value.astype(value.dtype.newbyteorder(order)).tobytes()
        data += raw + bytes(-len(raw) % 32)
    head = b"GGUF" + struct.pack(f"{order}IQQ", 3, len(arrays), 2 + len(numbers or {})) + pairs + table
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def proto(*fields: tuple[int, int | bytes]) -> bytes:
    """Return a message of Protocol Buffers."""
    made = b""
    for number, value in fields:
        if isinstance(value, int):
            made += varint(number << 3) + varint(value)
        else:
            made += varint(number << 3 | 2) + varint(len(value)) + value
    return made


_ONNX = {
    "float32": 1, "uint8": 2, "int8": 3, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "float64": 11, "bfloat16": 16,
}


def onnx_tensor(key: str, value: np.ndarray[Any, Any], *data: tuple[int, int | bytes]) -> bytes:
    """Return a TensorProto; `data` takes the place of raw_data."""
    dims = [(1, size) for size in value.shape]
    fields = data or ((9, value.tobytes()),)
    return proto(*dims, (2, _ONNX[value.dtype.name]), (8, key.encode()), *fields)


def onnx_model(*tensors: bytes) -> bytes:
    return proto((1, 8), (2, b"tests"), (7, proto((2, b"g"), *((5, tensor) for tensor in tensors))))


def onnx(arrays: Arrays, path: Path) -> None:
    path.write_bytes(onnx_model(*(onnx_tensor(key, value) for key, value in arrays.items())))


_TENSORFLOW = {
    "float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "int64": 9, "bool": 10,
    "bfloat16": 14, "float16": 19,
}


def block(rows: Mapping[bytes, bytes]) -> bytes:
    """Return a block of a table, each key whole, with the byte of no compression and a checksum of zeros."""
    made = b"".join(varint(0) + varint(len(key)) + varint(len(value)) + key + value for key, value in rows.items())
    return made + struct.pack("<II", 0, 1) + bytes(5)


def tensorflow(arrays: Arrays, path: Path, *, shards: int = 1) -> None:
    """Write the index at `path`, and the data beside it."""
    data = [b""] * shards
    rows = {b"": proto((1, shards), (3, proto((1, 1))))}
    for place, (key, value) in enumerate(sorted(arrays.items())):
        shape = proto(*((2, proto((1, size))) for size in value.shape))
        shard = place % shards
        first = ((1, _TENSORFLOW[value.dtype.name]), (2, shape), (3, shard))
        rows[key.encode()] = proto(*first, (4, len(data[shard])), (5, value.nbytes))
        data[shard] += value.tobytes()
    table = block(rows)
    index = block({b"~": varint(0) + varint(len(table) - 5)})
    empty = block({})
    places = varint(len(table) + len(index)) + varint(len(empty) - 5) + varint(len(table)) + varint(len(index) - 5)
    magic = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
    path.write_bytes(table + index + empty + places.ljust(40, b"\0") + magic)
    for shard, raw in enumerate(data):
        Path(f"{str(path).removesuffix('.index')}.data-{shard:05d}-of-{shards:05d}").write_bytes(raw)


def hdf5(arrays: Arrays, path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for key, value in arrays.items():
            file[key.replace(".", "/")] = value


def keras(arrays: Arrays, path: Path) -> None:
    inner = path.with_name("model.weights.h5")
    hdf5(arrays, inner)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.write(inner, inner.name)
    inner.unlink()


def orbax(arrays: Arrays, path: Path, *, ocdbt: bool = True, zarr3: bool = False) -> None:
    """Write an item as orbax does: the tree, and each array in zarr format, in one store or in a folder of its own."""
    import tensorstore

    path.mkdir()
    tree: dict[str, Any] = {}
    for key, value in arrays.items():
        keys = [{"key": part, "key_type": 2} for part in key.split(".")]
        tree[str(tuple(key.split(".")))] = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}
        base = {"driver": "file", "path": f"{path}/"}
        store: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": f"{key}/"}
        if not ocdbt:
            store = {"driver": "file", "path": f"{path}/{key}/"}
        chunks = [max(size // 2, 1) for size in value.shape]  # several chunks, the last ones shorter
        layout = {"read_chunk": {"shape": chunks}, "write_chunk": {"shape": chunks}}
        schema = {"dtype": value.dtype.name, "domain": {"shape": list(value.shape)}, "chunk_layout": layout}
        spec = {"driver": "zarr3" if zarr3 else "zarr", "kvstore": store, "schema": schema}
        made = tensorstore.open(spec, create=True).result()
        made.write(value).result()
    text = json.dumps({"tree_metadata": tree, "use_ocdbt": ocdbt, "use_zarr3": zarr3})
    (path / "_METADATA").write_text(text)


class ArrayFormat(NamedTuple):
    """A writer of a format.

    Attributes:
        dtypes: names of NumPy's types that its files can hold.
        order: whether the arrays are in the order of the file.
    """

    save: Callable[[Arrays, Path], None]
    suffix: str
    dtypes: frozenset[str]
    order: bool = True


_ALL = frozenset(_ONNX)
WRITERS: Mapping[str, ArrayFormat] = {
    "arrays": ArrayFormat(pickled, ".pkl", _ALL - {"bfloat16"}),
    "npz": ArrayFormat(npz, ".npz", _ALL - {"bfloat16"}),
    "flax": ArrayFormat(flax, ".msgpack", _ALL),
    "gguf": ArrayFormat(gguf, ".gguf", frozenset(_GGML)),
    "onnx": ArrayFormat(onnx, ".onnx", _ALL),
    "tensorflow": ArrayFormat(tensorflow, ".index", _ALL, order=False),
    "hdf5": ArrayFormat(hdf5, ".h5", _ALL - {"bfloat16"}, order=False),
    "orbax": ArrayFormat(orbax, "", _ALL),
    "keras": ArrayFormat(keras, ".keras", _ALL - {"bfloat16"}, order=False),
}
"""Name of a format of arrays -> a writer of it."""

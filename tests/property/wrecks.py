"""What must survive a cut, computed from the intact file's layout without ckptfix."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

ITEMSIZES = {
    "FloatStorage": 4, "DoubleStorage": 8, "HalfStorage": 2, "BFloat16Storage": 2, "LongStorage": 8, "IntStorage": 4,
    "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1, "UntypedStorage": 1,
    "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16,
}  # fmt: skip


class Stub:
    """Stands for every class; remembers nothing but what it was made of."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("items", {})[key] = value

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Reader(pickle.Unpickler):
    """Reads a torch pickle with stubs; `storages` are (key, class) of every storage."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.storages: dict[str, str] = {}

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Stub,), {"full": name})

    def persistent_load(self, pid: Any) -> Any:
        self.storages[pid[2]] = pid[1].full
        return ("storage", pid[2])


def names_on(value: Any, at: str = "") -> dict[str, str]:
    """Address of each tensor below `value` -> key of its storage; dicts and lists only."""
    if isinstance(value, Stub) and getattr(type(value), "full", "").startswith("_rebuild"):
        inner = value.arguments[0]
        return names_on(inner, at) if isinstance(inner, Stub) else {at: inner[1]}
    rows: Any = ()
    if isinstance(value, Stub):
        rows = value.__dict__.get("items", {}).items()
    elif isinstance(value, dict):
        rows = value.items()
    elif isinstance(value, list | tuple):
        rows = enumerate(value)
    found: dict[str, str] = {}
    for key, one in rows:
        found.update(names_on(one, f"{at}/{key}" if at else str(key)))
    return found


def survivors(data: bytes) -> tuple[int, dict[str, int]]:
    """(bytes from which on the object is whole, name of a tensor -> bytes from which on it is whole)."""
    if data.startswith(b"PK"):
        return _of_zip(data)
    if data[8:9] == b"{":
        return _of_safetensors(data)
    return _of_legacy(data)


def _of_zip(data: bytes) -> tuple[int, dict[str, int]]:
    ends: dict[str, int] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
            end = info.header_offset + 30 + name + extra + info.compress_size
            if info.flag_bits & 8:
                assert data[end : end + 4] == b"PK\x07\x08"
                end += 16
            ends[info.filename.partition("/")[2]] = end
            if info.filename.endswith("/data.pkl"):
                reader = Reader(archive.read(info))
        names = names_on(reader.load())
    return ends["data.pkl"], {name: ends[f"data/{key}"] for name, key in names.items()}


def _of_legacy(data: bytes) -> tuple[int, dict[str, int]]:
    ends = [0]
    stream = io.BytesIO(data)
    for _ in range(5):
        for _ in pickletools.genops(stream):
            pass
        ends.append(stream.tell())
    reader = Reader(data[ends[3] : ends[4]])
    names = names_on(reader.load())
    position = ends[5]
    whole: dict[str, int] = {}
    for key in pickle.loads(data[ends[4] : ends[5]]):
        (count,) = struct.unpack_from("<q", data, position)
        position += 8 + count * ITEMSIZES[reader.storages[key]]
        whole[key] = position
    return ends[4], {name: whole[key] for name, key in names.items()}


def _of_safetensors(data: bytes) -> tuple[int, dict[str, int]]:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    rows = {name: row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"}
    return 8 + length, {name: 8 + length + stop for name, stop in rows.items()}


def fixture(name: str) -> bytes:
    return (Path(__file__).parents[2] / "fixtures" / name).read_bytes()

"""Pickles that name a function which runs code, hidden in the ways that are known, and what may be put around them.

Every payload is harmless if it were ever run: ``posix.system("true")``, ``builtins.eval("1")``. None is.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from builders import Op, Record, Tensor, assemble, build_zip, push, state_dict_ops, torch_records

DATA = struct.pack("<2f", 1, 2)
WEIGHT = Tensor("0", (2,), 2)

SYSTEM: list[Op] = [("GLOBAL", "posix", "system"), *push("true"), "TUPLE1", "REDUCE"]
EVAL: list[Op] = [("GLOBAL", "builtins", "eval"), *push("1"), "TUPLE1", "REDUCE"]
MEMO: list[Op] = [
    ("BINUNICODE", "posix"), ("BINPUT", 200), "POP", ("BINUNICODE", "system"), ("BINPUT", 201), "POP",
    ("BINUNICODE", "a"), "POP", ("BINUNICODE", "b"), "POP",
    ("BINGET", 200), ("BINGET", 201), "STACK_GLOBAL", *push("true"), "TUPLE1", "REDUCE",
]  # fmt: skip
NAMESPACE: list[Op] = [("GLOBAL", "argparse", "Namespace"), "EMPTY_TUPLE", "NEWOBJ"]
IN_STATE: list[Op] = [*NAMESPACE, "EMPTY_DICT", *push("lr"), *SYSTEM, "SETITEM", "BUILD"]
IN_ORDERED: list[Op] = [
    ("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE", "MARK", *push("k"), *SYSTEM, "SETITEMS",
]  # fmt: skip
INST: list[Op] = ["MARK", *push("true"), ("INST", "posix", "system")]
OBJ: list[Op] = ["MARK", ("GLOBAL", "posix", "system"), *push("true"), "OBJ"]
AS_KEY: list[Op] = ["EMPTY_DICT", *SYSTEM, *push(1), "SETITEM"]
IN_LIST: list[Op] = ["EMPTY_LIST", *SYSTEM, "APPEND"]
IN_TUPLE: list[Op] = [*push(1), *SYSTEM, "TUPLE2"]
VALUE: list[Op] = [("GLOBAL", "posix", "system")]
GETATTR: list[Op] = [
    ("GLOBAL", "builtins", "getattr"), ("GLOBAL", "posix", "error"), *push("system"), "TUPLE2", "REDUCE",
    *push("true"), "TUPLE1", "REDUCE",
]  # fmt: skip

PAYLOADS: Mapping[str, tuple[str, Sequence[Op]]] = {
    "system": ("posix.system", SYSTEM),
    "eval": ("builtins.eval", EVAL),
    "memoised": ("posix.system", MEMO),
    "in-state": ("posix.system", IN_STATE),
    "in-ordered": ("posix.system", IN_ORDERED),
    "inst": ("posix.system", INST),
    "obj": ("posix.system", OBJ),
    "as-key": ("posix.system", AS_KEY),
    "in-list": ("posix.system", IN_LIST),
    "in-tuple": ("posix.system", IN_TUPLE),
    "value": ("posix.system", VALUE),
    "getattr": ("builtins.getattr", GETATTR),
    "nested": ("posix.system", [("BINBYTES", assemble(("PROTO", 2), *SYSTEM, "STOP"))]),
}
"""How it is hidden -> the global that must be named, and the opcodes that push it as a value."""

SIBLING = "sibling"
"""A payload that is a record of its own, other.pkl."""


def pickle_of(items: Mapping[str, Any], *after: Op, protocol: int = 2) -> bytes:
    return assemble(("PROTO", protocol), *state_dict_ops(items), "STOP", *after)


def members(how: str, *, tensor: bool = True, root: str = "archive") -> dict[str, bytes]:
    """The records of a torch checkpoint that hides a payload beside (or without) a tensor."""
    items: dict[str, Any] = {"w": WEIGHT} if tensor else {"epoch": 3}
    rows = {}
    if how in PAYLOADS:
        items["x"] = list(PAYLOADS[how][1])
    elif how == SIBLING:
        rows[f"{root}/other.pkl"] = assemble(("PROTO", 2), *SYSTEM, "STOP")
    records = torch_records(pickle_of(items), [DATA] if tensor else [], root=root)
    return {record.name: record.data for record in records} | rows


def zipped(rows: Mapping[str, bytes], *, method: int = zipfile.ZIP_STORED, prefix: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in rows.items():
            archive.writestr(name, data)
    return prefix + buffer.getvalue()


def tarred(rows: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in rows.items():
            row = tarfile.TarInfo(name)
            row.size = len(data)
            archive.addfile(row, io.BytesIO(data))
    return buffer.getvalue()


def torch_file(rows: Mapping[str, bytes]) -> bytes:
    """The checkpoint as torch writes it."""


    return build_zip([Record(name, data) for name, data in rows.items()])


def _flat(rows: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name.partition("/")[2]: data for name, data in rows.items()}


LAYERS: Mapping[str, Callable[[Mapping[str, bytes]], bytes]] = {
    "flat-zip": lambda rows: zipped(_flat(rows)),
    "deflated-zip": lambda rows: zipped(_flat(rows), method=zipfile.ZIP_DEFLATED),
    "deep-zip": lambda rows: zipped({f"outer/{name}": data for name, data in rows.items()}),
    "finder-zip": lambda rows: zipped({f"a/{k}": v for k, v in rows.items()} | {"__MACOSX/._archive": b"\0\5\x16\7"}),
    "junk-before": lambda rows: b"HTTP/1.1 200 OK\r\n\r\n" + torch_file(rows),
    "zip-in-zip": lambda rows: zipped({"model.pth": torch_file(rows)}, method=zipfile.ZIP_DEFLATED),
    "stored-in-zip": lambda rows: zipped({"readme.txt": b"a model", "model.pth": torch_file(rows)}),
    "gzip": lambda rows: gzip.compress(torch_file(rows)),
    "bzip2": lambda rows: bz2.compress(torch_file(rows)),
    "xz": lambda rows: lzma.compress(torch_file(rows)),
    "tar": lambda rows: tarred({"model.pth": torch_file(rows)}),
    "tar-gz": lambda rows: gzip.compress(tarred({"model.pth": torch_file(rows)})),
    "gzip-of-zip": lambda rows: gzip.compress(zipped({"model.pth": torch_file(rows)})),
    "cut": lambda rows: torch_file(rows)[:-40],
}
"""What is put around a checkpoint, or done to it, so that torch does not take it."""


def wrapped(folder: Path, layer: str, how: str, *, tensor: bool = True) -> Path:
    """A file (or, for "folder", a folder) that hides the payload `how` in `layer`."""
    rows = members(how, tensor=tensor)
    if layer == "folder":
        for name, data in rows.items():
            place = folder / "unzipped" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        return folder / "unzipped"
    path = folder / "model.pth"
    path.write_bytes(LAYERS[layer](rows))
    return path

"""What a file is, when it is no checkpoint that we read: one sentence and, where there is one, the way on.

Somebody who asked for a model got a pointer, a web page or an archive; torch then speaks of an unsupported operand
and advises ``weights_only=False``, which never helps. Each kind is a row of a table here; the first that fits speaks.
Nothing is unpickled, unpacked or read whole.
"""

from __future__ import annotations

import bz2
import codecs
import json
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptfix.commands import quoted
from ckptfix.errors import printable
from ckptfix.formats.foreign_archives import folder, tar_archive, zip_archive
from ckptfix.formats.foreign_file import Answer, File

_MANY_ZEROS = 16
"""Places where a file that begins with zeros is looked at."""

# (offset, bytes there, what it is, what to do)
_MAGIC: tuple[tuple[int, bytes, str, str | None], ...] = (
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first: 7z x {file}"),
    (0, b"Rar!\x1a\x07", "a RAR archive", "unpack it first: unrar x {file}"),
    (0, b"\x28\xb5\x2f\xfd", "zstandard-compressed data", "unpack it first: zstd -d {file}"),
    (0, b"\x04\x22\x4d\x18", "LZ4-compressed data", "unpack it first: lz4 -d {file}"),
    (0, b"GGML", "a GGML model", "convert it with the llama.cpp tools"),
    (0, b"lmgg", "a GGML model (unversioned)", "convert it with the llama.cpp tools"),
    (0, b"fmgg", "a GGML model (ggmf)", "convert it with the llama.cpp tools"),
    (0, b"tjgg", "a GGML model (ggjt)", "convert it with the llama.cpp tools"),
    (0, b"algg", "a GGML adapter (ggla)", "convert it with the llama.cpp tools"),
    (4, b"TFL3", "a TensorFlow Lite model", None),
    (0, b"SQLite format 3\0", "a SQLite database", None),
    (0, b"PAR1", "a Parquet file", None),
    (0, b"ARROW1", "an Arrow file", None),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", None),
    (0, b"\xff\xd8\xff", "a JPEG image", None),
    (0, b"GIF8", "a GIF image", None),
    (0, b"%PDF-", "a PDF document", None),
    (0, b"\x7fELF", "an ELF program or library", None),
    (0, b"MZ", "a Windows program or library", None),
    (0, b"\xcf\xfa\xed\xfe", "a macOS program or library", None),
)

_TENSORFLOW_INDEX = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
"""The last eight bytes of a LevelDB table (table/format.h, ``kTableMagicNumber``), little-endian."""


def describe(path: str, head: bytes, size: int) -> tuple[str, str | None]:
    """What the file or folder at `path` is, and what to do about it.

    Args:
        head: its first bytes; 4 KiB are enough for every row.
        size: its size in bytes.

    Returns:
        A sentence without the file's name, and a hint: a command to paste or an instruction, or None.
    """
    if not head and Path(path).is_dir():
        return folder(path)
    file = File(path, head, size)
    for probe in _PROBES:
        answer = probe(file)
        if answer is not None:
            return answer
    begin = " ".join(f"{byte:02x}" for byte in head[:8])
    return f"no format that ckptfix knows; it begins with the bytes {begin}", None


def _empty(file: File) -> Answer | None:
    if file.size:
        return None
    return "an empty file", "the save or the download did not get to write anything: make it again"


def _zeros(file: File) -> Answer | None:
    if file.head.strip(b"\0"):
        return None
    step = max(1, file.size // _MANY_ZEROS)
    if any(file.read(at, 4096).strip(b"\0") for at in range(0, file.size, step)):
        return "a file whose beginning is overwritten with zeros", "its first bytes are lost: copy it again"
    return f"{file.size} zero bytes", "the space was reserved and nothing arrived: copy or download it again"


def _lfs_pointer(file: File) -> Answer | None:
    if not re.match(rb"version https://(git-lfs\.github\.com|hawser\.github\.com)/spec/v1", file.head):
        return None
    oid = re.search(rb"oid sha256:([0-9a-f]{64})", file.head)
    length = re.search(rb"size ([0-9]{1,20})", file.head)
    what = "a git-lfs pointer, not the file itself"
    if oid and length:
        what += f" ({int(length[1]):,} bytes, sha256 {oid[1].decode()})"
    return what, f"git lfs pull --include={quoted(file.name)}"


def _magic(file: File) -> Answer | None:
    for at, magic, what, hint in _MAGIC:
        if file.head.startswith(magic, at):
            return what, hint.format(file=quoted(file.path)) if hint else None
    return None


def _compressed(file: File) -> Answer | None:
    """gzip, zlib, bzip2 and xz, with what is inside if its first bytes are there."""
    head = file.head
    if head.startswith(b"\x1f\x8b"):
        name, command, opened = "gzip-compressed data", "gunzip -c", _first_bytes(zlib.decompressobj(31), head)
    elif head.startswith(b"BZh") and head[4:10] == b"\x31\x41\x59\x26\x53\x59":
        # A block is up to 900 kB, and nothing of it comes out before its end.
        name, command = "bzip2-compressed data", "bunzip2 -c"
        opened = _first_bytes(bz2.BZ2Decompressor(), file.read(0, min(file.size, 1 << 20)))
    elif head.startswith(b"\xfd7zXZ\0"):
        name, command = "xz-compressed data", "unxz -c"
        opened = _first_bytes(lzma.LZMADecompressor(memlimit=1 << 28), head)
    elif head[:2] in (b"\x78\x9c", b"\x78\x01", b"\x78\xda") and _first_bytes(zlib.decompressobj(), head):
        return "zlib-compressed data, as old joblib versions write it", None
    else:
        return None
    hint = f"unpack it first: {command} {quoted(file.path)} > OUT"
    if not opened:
        return name, hint
    inside = _inside(opened)
    if inside == "a tar archive":
        hint = f"unpack it first: tar -xf {quoted(file.path)}"
    return f"{name}; inside is {inside}", hint


def _first_bytes(decompressor: Any, packed: bytes) -> bytes:
    try:
        opened: bytes = decompressor.decompress(packed, 4096)
    except (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError):
        return b""
    return opened


def _inside(head: bytes) -> str:
    """What begins with `head`, in two words; there is no file to look further."""
    if head.startswith(b"PK\x03\x04"):
        return "a torch checkpoint" if b"/data.pkl" in head[:300] else "a zip archive"
    if head[257:262] == b"ustar":
        return "a tar archive"
    # The magic number 0x1950a86a20f9469cfc6c of torch/serialization.py, as a pickled long.
    if b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" in head[:24]:
        return "a torch checkpoint (legacy)"
    answer = _pickle(File("", head, len(head)))
    return answer[0] if answer else "something that ckptfix does not know"


def _numpy(file: File) -> Answer | None:
    if not file.head.startswith(b"\x93NUMPY"):
        return None
    dtype = re.search(rb"'descr': *'([^']{1,20})'", file.head)
    shape = re.search(rb"'shape': *(\([0-9, ]{0,200}\))", file.head)
    what = "a NumPy array (.npy)"
    if dtype and shape:
        what += f" of {printable(dtype[1].decode('latin-1'))} {shape[1].decode()}"
    return what, f"torch.from_numpy(numpy.load({file.name!r})) reads it"


def _gguf(file: File) -> Answer | None:
    if not file.head.startswith(b"GGUF"):
        return None
    version = int.from_bytes(file.head[4:8], "little")
    tensors = int.from_bytes(file.head[8:16], "little")
    return f"a GGUF model (version {version}, {tensors:,} tensors)", "the Python package gguf reads it"


def _hdf5(file: File) -> Answer | None:
    # The signature stands at 0, or behind a user block of 512 bytes, 1024, and so on.
    if not any(file.head.startswith(b"\x89HDF\r\n\x1a\n", at) for at in (0, 512, 1024, 2048)):
        return None
    keras = any(word in file.head for word in (b"keras_version", b"model_weights", b"layer_names", b"_layer"))
    return "a Keras model (HDF5)" if keras else "an HDF5 file, as Keras writes", "the Python package h5py reads it"


def _tensorflow(file: File) -> Answer | None:
    if file.size > 48 and file.read(file.size - 8, 8) == _TENSORFLOW_INDEX:
        return "the index of a TensorFlow checkpoint", "transformers reads it with from_tf=True"
    if re.search(r"\.data-\d{5}-of-\d{5}$", file.name):
        return "the data of a TensorFlow checkpoint", "transformers reads it with from_tf=True"
    if file.name == "saved_model.pb":
        return "a TensorFlow SavedModel", None
    return None


def _onnx(file: File) -> Answer | None:
    # onnx.proto, ModelProto: field 1 ir_version (a small varint), then field 2 producer_name or 7 graph or 8 opset.
    head = file.head
    if len(head) < 6 or head[0] != 0x08 or not 1 <= head[1] <= 0x20 or head[2] not in (0x12, 0x3A, 0x42):
        return None
    if head[2] == 0x12:
        producer = head[4 : 4 + head[3]]
        if not producer.isascii() or not producer.decode().isprintable():
            return None
    return f"an ONNX model (IR version {head[1]})", "the Python package onnx reads its initializers"


def _pickle(file: File) -> Answer | None:
    head = file.head
    if head[:1] == b"\x80" and head[1:2] and head[1] <= 5 and len(head) > 2:
        protocol = str(head[1])
    elif re.match(rb"(\(dp?|\(lp?|c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n|\(i[\w.]+\n|ccopy_reg\n)", head):
        protocol = "0 or 1"
    else:
        return None
    hint = "a plain pickle can run code: load it only if you trust it, and write it again with torch.save"
    if b"torch.distributed.checkpoint.metadata" in head:
        hint = "name its folder: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER OUT"
        return "the .metadata of a distributed checkpoint (DCP)", hint
    if re.search(rb"torch\._utils\n?.{0,4}_rebuild_", head, re.DOTALL):
        hint = "zip its folder again, from the folder above: zip -0 -r FIXED.pth FOLDER"
        return f"a pickle (protocol {protocol}) of tensors without their data: the data.pkl of a checkpoint", hint
    if b"joblib" in head:
        return f"a joblib pickle (protocol {protocol})", hint
    what = " of NumPy arrays" if b"numpy" in head else ""
    return f"a plain pickle (protocol {protocol}){what}, not written by torch.save", hint


def _markup(file: File) -> Answer | None:
    start = file.head.lstrip(b"\xef\xbb\xbf \t\r\n")[:200].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<script")):
        title = re.search(rb"<title[^>]*>([^<]{1,200})", file.head, re.IGNORECASE)
        named = f' ("{_line(title[1])}")' if title else ""
        return f"a web page (HTML){named}", "the download gave a page about the file: use its direct (raw) link"
    if start.startswith((b"<?xml", b"<error")):
        code = re.search(rb"<Code>([^<]{1,60})", file.head)
        named = f" that says {_line(code[1])}" if code else ""
        return f"an XML document{named}", "the server answered with a message instead of the file" if code else None
    return None


def _json(file: File) -> Answer | None:
    start = file.head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not re.match(rb'(\{\s*("|\}|$)|\[\s*["{\[\d\]-])', start):
        return None
    if b'"weight_map"' in file.head or file.name.endswith(".index.json"):
        return "the index of a sharded checkpoint (JSON)", "name its shards, the files that the index lists"
    try:
        value = json.loads(file.head) if file.size <= len(file.head) else None
    except (ValueError, RecursionError):
        value = None
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and isinstance(value.get(key), str):
            said = printable(value[key][:80])
            return f'a JSON message: "{said}"', "the server answered with a message instead of the file"
    return "a JSON file", None


def _text(file: File) -> Answer | None:
    try:
        # The last character of the head may be cut.
        text = codecs.getincrementaldecoder("utf-8")().decode(file.head, final=file.size <= len(file.head))
    except UnicodeDecodeError:
        return None
    if any(not char.isprintable() and char not in "\r\n\t\f" for char in text):
        return None
    line = _line(text.strip().partition("\n")[0].encode())
    hint = "the server answered with a message instead of the file" if file.size < 200 else None
    return f'a text file that begins "{line}"', hint


def _line(text: bytes) -> str:
    shown = " ".join(text.decode("utf-8", "replace").split())
    return printable(shown if len(shown) <= 60 else shown[:57] + "...")


_PROBES: tuple[Callable[[File], Answer | None], ...] = (
    _empty,
    _zeros,
    _lfs_pointer,
    _magic,
    _compressed,
    _numpy,
    _gguf,
    _hdf5,
    zip_archive,
    tar_archive,
    _pickle,
    _tensorflow,
    _onnx,
    _markup,
    _json,
    _text,
)

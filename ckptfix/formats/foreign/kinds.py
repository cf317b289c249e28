"""Identification of files that are not checkpoints that ckptfix reads: one sentence and, if there is one, the way on.

Instead of a model, the user got a pointer, a web page or an archive. torch then reports an unsupported operand and
advises ``weights_only=False``, which never helps. Each kind is a row of a table here, and the first that fits answers.
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
from typing import Any

from ckptfix.commands import command, quoted
from ckptfix.errors import printable
from ckptfix.formats.foreign.archives import folder, tar_archive, zip_archive
from ckptfix.formats.foreign.file import INSTALL, Answer, UnknownFile
from ckptfix.formats.signs import Beginning, hdf5
from ckptfix.io.layers import faults, packing_of
from ckptfix.io.source import found_as
from ckptfix.pickles.names import survey
from ckptfix.urls import as_path

_MANY_ZEROS = 16
"""The number of places at which a file that begins with zeros is sampled."""

# (offset, bytes there, id of the finding, what the file is, what to do)
_MAGIC: tuple[tuple[int, bytes, str, str, str | None], ...] = (
    (0, b"7z\xbc\xaf\x27\x1c", "other-archive", "a 7z archive", "unpack it first: 7z x {file}"),
    (0, b"Rar!\x1a\x07", "other-archive", "a RAR archive", "unpack it first: unrar x {file}"),
    (0, b"GGML", "gguf-file", "a GGML model", "convert it with the llama.cpp tools"),
    (0, b"lmgg", "gguf-file", "a GGML model (unversioned)", "convert it with the llama.cpp tools"),
    (0, b"fmgg", "gguf-file", "a GGML model (ggmf)", "convert it with the llama.cpp tools"),
    (0, b"tjgg", "gguf-file", "a GGML model (ggjt)", "convert it with the llama.cpp tools"),
    (0, b"algg", "gguf-file", "a GGML adapter (ggla)", "convert it with the llama.cpp tools"),
    (4, b"TFL3", "other-framework", "a TensorFlow Lite model", None),
    (0, b"\x12\x01\0\0\0\0\0\0", "other-framework", "MXNet parameters", "mxnet.nd.load reads it; save it with NumPy"),
    (0, b"SQLite format 3\0", "unknown-format", "a SQLite database", None),
    (0, b"PAR1", "unknown-format", "a Parquet file", None),
    (0, b"ARROW1", "unknown-format", "an Arrow file", None),
    (0, b"\x89PNG\r\n\x1a\n", "unknown-format", "a PNG image", None),
    (0, b"\xff\xd8\xff", "unknown-format", "a JPEG image", None),
    (0, b"GIF8", "unknown-format", "a GIF image", None),
    (0, b"%PDF-", "unknown-format", "a PDF document", None),
    (0, b"\x7fELF", "unknown-format", "an ELF program or library", None),
    (0, b"MZ", "unknown-format", "a Windows program or library", None),
    (0, b"\xcf\xfa\xed\xfe", "unknown-format", "a macOS program or library", None),
)

_TENSORFLOW_INDEX = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
"""The last eight bytes of a LevelDB table (table/format.h, ``kTableMagicNumber``), little-endian."""


def describe(path: str, head: bytes, size: int) -> Answer:
    """Identify the file or folder at `path`, and say what to do about it.

    Args:
        head: its first bytes; 4 KiB are enough for every row.
        size: its size in bytes.

    Returns:
        The id of its finding, a sentence without the file's name, and a hint: a command to paste or an instruction.
    """
    if not head and found_as(path) == "folder":
        return folder(path)
    file = UnknownFile(path, head, size)
    for probe in _PROBES:
        answer = probe(file)
        if answer is not None:
            return answer
    begin = " ".join(f"{byte:02x}" for byte in head[:8])
    return Answer("unknown-format", f"not a format that ckptfix knows; it begins with the bytes {begin}")


def _empty(file: UnknownFile) -> Answer | None:
    if file.size:
        return None
    return Answer(
        "empty-file", "an empty file", "the save or the download wrote nothing: repeat it"
    )


def _zeros(file: UnknownFile) -> Answer | None:
    if file.head.strip(b"\0"):
        return None
    step = max(1, file.size // _MANY_ZEROS)
    if any(file.read(at, 4096).strip(b"\0") for at in range(0, file.size, step)):
        return Answer(
            "zero-filled",
            "a file whose beginning was overwritten with zeros",
            "its first bytes are lost: copy it again",
        )
    hint = "the space was reserved, but no data arrived: copy or download it again"
    return Answer("zero-filled", f"{file.size} zero bytes", hint)


def _lfs_pointer(file: UnknownFile) -> Answer | None:
    if not re.match(rb"version https://(git-lfs\.github\.com|hawser\.github\.com)/spec/v1", file.head):
        return None
    oid = re.search(rb"oid sha256:([0-9a-f]{64})", file.head)
    length = re.search(rb"size ([0-9]{1,20})", file.head)
    what = "a git-lfs pointer, not the file itself"
    if oid and length:
        what += f" ({int(length[1]):,} bytes, sha256 {oid[1].decode()})"
    return Answer("lfs-pointer", what, f"git lfs pull --include={quoted(file.name)}")


def _magic(file: UnknownFile) -> Answer | None:
    for at, magic, id, what, hint in _MAGIC:
        if file.head.startswith(magic, at):
            return Answer(id, what, hint.format(file=quoted(file.path)) if hint else None)
    return None


def _compressed(file: UnknownFile) -> Answer | None:
    """Identify compressed data, and its content if the first bytes can be decompressed."""
    head = file.head
    if head.startswith(b"\x1f\x8b"):
        name, command, opened = "gzip-compressed data", "gunzip -c", _first_bytes(zlib.decompressobj(31), head)
    elif head.startswith(b"BZh") and head[4:10] == b"\x31\x41\x59\x26\x53\x59":
        # A block is up to 900 kB, and the decompressor gives no output before the end of a block.
        name, command = "bzip2-compressed data", "bunzip2 -c"
        opened = _first_bytes(bz2.BZ2Decompressor(), file.read(0, min(file.size, 1 << 20)))
    elif head.startswith(b"\xfd7zXZ\0"):
        name, command = "xz-compressed data", "unxz -c"
        opened = _first_bytes(lzma.LZMADecompressor(memlimit=1 << 28), head)
    elif head[:2] in (b"\x78\x9c", b"\x78\x01", b"\x78\xda") and _first_bytes(zlib.decompressobj(), head):
        return Answer("compressed", "zlib-compressed data, as joblib writes it")
    elif (packing := packing_of(head)) is not None:
        # These two decompress block by block. The largest blocks have 4 MiB, and a little more if they do not shrink.
        name, command = f"{packing.name}-compressed data", f"{packing.name.lower()} -dc"
        if (missing := packing.missing()) is not None:
            hint = f"{missing.hint}, or unpack it first: {command} {quoted(file.path)} > OUT"
            return Answer("compressed", name, hint)
        opened = _first_bytes(packing.start(), file.read(0, min(file.size, 5 << 20)))
    else:
        return None
    hint = f"unpack it first: {command} {quoted(file.path)} > OUT"
    if not opened:
        return Answer("compressed", name, hint)
    inside = _inside(opened)
    if inside == "a tar archive":
        hint = f"unpack it first: tar -xf {quoted(file.path)}"
    return Answer("compressed", f"{name}; inside is {inside}", hint)


def _first_bytes(decompressor: Any, packed: bytes) -> bytes:
    try:
        opened: bytes = decompressor.decompress(packed, 4096)
    except faults():
        return b""
    return opened


def _inside(head: bytes) -> str:
    """Identify content that begins with `head`, in a few words, without a file for further checks."""
    if head.startswith(b"PK\x03\x04"):
        return "a torch checkpoint" if b"/data.pkl" in head[:300] else "a zip archive"
    if head[257:262] == b"ustar":
        return "a tar archive"
    # The magic number 0x1950a86a20f9469cfc6c of torch/serialization.py, as a pickled long.
    if b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" in head[:24]:
        return "a torch checkpoint (legacy)"
    answer = _pickle(UnknownFile("", head, len(head)))
    return answer.what if answer else "something that ckptfix does not know"


def _hdf5(file: UnknownFile) -> Answer | None:
    if not hdf5(Beginning(file.path, file.head, file.size)):
        return None
    keras = any(word in file.head for word in (b"keras_version", b"model_weights", b"layer_names", b"_layer"))
    what = "a Keras model (HDF5)" if keras else "an HDF5 file, as Keras writes"
    return Answer("other-framework", what, INSTALL.format("hdf5"))


def _tensorflow(file: UnknownFile) -> Answer | None:
    if file.size > 48 and file.read(file.size - 8, 8) == _TENSORFLOW_INDEX:
        return Answer(
            "other-framework", "the index of a TensorFlow checkpoint", "it is damaged: copy it again"
        )
    if re.search(r"\.data-\d{5}-of-\d{5}$", file.name):
        return Answer(
            "other-framework", "the data of a TensorFlow checkpoint", "pass the file .index beside it"
        )
    if file.name == "saved_model.pb":
        hint = "its weights are in the folder variables beside it: pass variables/variables.index"
        return Answer("other-framework", "a TensorFlow SavedModel", hint)
    return None


def _onnx(file: UnknownFile) -> Answer | None:
    # onnx.proto, ModelProto: field 1 ir_version (a small varint), then field 2 producer_name or 7 graph or 8 opset.
    head = file.head
    if len(head) < 6 or head[0] != 0x08 or not 1 <= head[1] <= 0x20 or head[2] not in (0x12, 0x3A, 0x42):
        return None
    if head[2] == 0x12:
        producer = head[4 : 4 + head[3]]
        if not producer.isascii() or not producer.decode().isprintable():
            return None
    return Answer(
        "other-framework", f"an ONNX model (IR version {head[1]})", "the Python package onnx reads its initializers"
    )


def _pickle(file: UnknownFile) -> Answer | None:
    head = file.head
    if head[:1] == b"\x80" and head[1:2] and head[1] <= 5 and len(head) > 2:
        protocol = str(head[1])
    elif re.match(rb"(\(dp?|\(lp?|c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n|\(i[\w.]+\n|ccopy_reg\n)", head):
        protocol = "0 or 1"
    elif _is_old_pickle(file):
        protocol = "0"
    else:
        return None
    hint = "a plain pickle can run code: load it only if you trust it, and save it again with torch.save"
    if b"torch.distributed.checkpoint.metadata" in head:
        way = command("convert", as_path(file.path).parent, "OUT")
        hint = f"its folder is the checkpoint: run {way} to get one file"
        return Answer("dcp-folder", "the .metadata of a distributed checkpoint (DCP)", hint)
    if re.search(rb"torch\._utils\n?.{0,4}_rebuild_", head, re.DOTALL):
        hint = "zip its folder again, from the folder above: zip -0 -r FIXED.pth FOLDER"
        what = f"a pickle (protocol {protocol}) of tensors without their data: the data.pkl of a checkpoint"
        return Answer("bare-data-pkl", what, hint)
    if b"joblib" in head:
        return Answer("plain-pickle", f"a joblib pickle (protocol {protocol})", hint)
    what = " of NumPy arrays" if b"numpy" in head else ""
    return Answer("plain-pickle", f"a plain pickle (protocol {protocol}){what}, not written by torch.save", hint)


_OLD = re.compile(rb"\(*[SVILFNU\]})ctld0-9]")


def _is_old_pickle(file: UnknownFile) -> bool:
    """Return whether a text is a pickle of protocol 0 that begins with a plain value and names a global."""
    if not _OLD.match(file.head):
        return False
    seen = survey(file.read, 0, file.size, _MOST_OPCODES)
    names = [part for row in seen.seen for part in (*row.module.split("."), *row.name.split("."))]
    return bool(names) and seen.pickles > 0 and all(part.isidentifier() for part in names)


_MOST_OPCODES = 100_000
"""The limit of opcodes to scan: in ordinary text, the first line that is not an opcode ends the scan."""


def _markup(file: UnknownFile) -> Answer | None:
    start = file.head.lstrip(b"\xef\xbb\xbf \t\r\n")[:200].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<script")):
        title = re.search(rb"<title[^>]*>([^<]{1,200})", file.head, re.IGNORECASE)
        named = f' ("{_line(title[1])}")' if title else ""
        hint = "the download saved a web page about the file: use the direct (raw) link"
        return Answer("web-page", f"a web page (HTML){named}", hint)
    if start.startswith((b"<?xml", b"<net")) and re.search(rb"<net\s[^>]*version=", file.head):
        hint = "its weights are in the .bin beside it, which openvino.Core().read_model reads"
        return Answer("other-framework", "an OpenVINO model", hint)
    if start.startswith((b"<?xml", b"<error")):
        code = re.search(rb"<Code>([^<]{1,60})", file.head)
        named = f" that says {_line(code[1])}" if code else ""
        answered = "the server answered with a message instead of the file" if code else None
        return Answer("web-page", f"an XML document{named}", answered)
    return None


def _openvino(file: UnknownFile) -> Answer | None:
    """Identify the weights of an OpenVINO model by the program beside them: the file itself has no structure."""
    if not file.name.endswith(".bin"):
        return None
    beside = UnknownFile(file.path.removesuffix(".bin") + ".xml", b"", 0)
    begin = beside.read(0, 1 << 12)
    if not re.search(rb"<net\s[^>]*version=", begin):
        return None
    return Answer("other-framework", "the weights of an OpenVINO model", "openvino.Core().read_model reads the .xml")


def _json(file: UnknownFile) -> Answer | None:
    start = file.head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not re.match(rb'(\{\s*("|\}|$)|\[\s*["{\[\d\]-])', start):
        return None
    if b'"weight_map"' in file.head or file.name.endswith(".index.json"):
        what = "the index of a sharded checkpoint of another framework (JSON)"
        return Answer("other-framework", what, "convert it to safetensors with its own library")
    try:
        value = json.loads(file.head) if file.size <= len(file.head) else None
    except (ValueError, RecursionError):
        value = None
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and isinstance(value.get(key), str):
            said = printable(value[key][:80])
            return Answer(
                "json-file", f'a JSON message: "{said}"', "the server answered with a message instead of the file"
            )
    return Answer("json-file", "a JSON file")


def _text(file: UnknownFile) -> Answer | None:
    try:
        # The last character of the head may be incomplete.
        text = codecs.getincrementaldecoder("utf-8")().decode(file.head, final=file.size <= len(file.head))
    except UnicodeDecodeError:
        return None
    if any(not char.isprintable() and char not in "\r\n\t\f" for char in text):
        return None
    line = _line(text.strip().partition("\n")[0].encode())
    hint = "the server answered with a message instead of the file" if file.size < 200 else None
    return Answer("text-file", f'a text file that begins "{line}"', hint)


def _line(text: bytes) -> str:
    shown = " ".join(text.decode("utf-8", "replace").split())
    return printable(shown if len(shown) <= 60 else shown[:57] + "...")


_PROBES: tuple[Callable[[UnknownFile], Answer | None], ...] = (
    _empty,
    _zeros,
    _lfs_pointer,
    _magic,
    _compressed,
    _hdf5,
    zip_archive,
    tar_archive,
    _pickle,
    _tensorflow,
    _onnx,
    _markup,
    _openvino,
    _json,
    _text,
)

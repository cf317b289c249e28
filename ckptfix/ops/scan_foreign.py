"""Findings for what could not be opened: a file of another kind, a folder, or one that is too damaged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ckptfix.checkpoint import Finding
from ckptfix.commands import command, quoted, verbatim
from ckptfix.containers.zip_read import END, Directory, read_directory
from ckptfix.errors import BadDirectory, BadIndex, BadPickle, CkptfixError, Truncated, UnknownFormat, Unsupported
from ckptfix.fileio import Reader
from ckptfix.formats import safetensors, torch_legacy
from ckptfix.ops import scan_pickle
from ckptfix.ops.catalogue import found

_KINDS: tuple[tuple[str, str], ...] = (
    (r"an empty file", "empty-file"),
    (r"zero bytes|overwritten with zeros", "zero-filled"),
    (r"git-lfs pointer", "lfs-pointer"),
    (r"web page|XML document", "web-page"),
    (r"unpacked and zipped again", "repacked-zip"),
    (r"other bytes before it", "junk-before"),
    (r"a damaged zip archive", "bad-directory"),
    (r"TorchScript program", "torchscript"),
    (r"exported program", "exported-program"),
    (r"NumPy arrays? \(", "numpy-file"),
    (r"(gzip|bzip2|xz|zlib|LZ4|zstandard)-compressed", "compressed"),
    (r"GGUF|GGML", "gguf-file"),
    (r"Keras|HDF5|TensorFlow|ONNX|TorchServe", "other-framework"),
    (r"a folder: a torch checkpoint that was unzipped", "unzipped-folder"),
    (r"without their data: the data\.pkl", "bare-data-pkl"),
    (r"plain pickle|joblib pickle", "plain-pickle"),
    (r"distributed checkpoint \(DCP\)", "dcp-folder"),
    (r"before torch 0\.1\.10", "torch-tar"),
    (r"a tar archive", "tar-archive"),
    (r"a zip archive of .*\.(pth|pt|ckpt|bin|th|safetensors|tar)\b", "zip-in-zip"),
    (r"a zip archive|7z archive|RAR archive", "other-archive"),
    (r"JSON", "json-file"),
    (r"a text file", "text-file"),
    (r"folder", "no-checkpoint"),
)
"""What `formats.foreign` says of a file -> the id of it; the first that is found in the sentence."""

_KEPT_HINTS = ("lfs-pointer", "tar-archive", "other-archive", "numpy-file", "other-framework", "gguf-file")
"""Kinds for which the hint of `formats.foreign` is more exact than the row's remedy."""

_ERRORS: tuple[tuple[type[CkptfixError], str], ...] = (
    (Truncated, "truncated"),
    (BadDirectory, "bad-directory"),
    (BadPickle, "bad-pickle"),
    (BadIndex, "bad-index"),
    (Unsupported, "unsupported"),
)

_DEFINITE = 1 << 20
"""Bytes of a file that are looked at for a transfer as text."""


_TAIL = 1 << 26
"""Bytes at the end of a zip that are searched for the end of its directory."""


def scan(path: str, error: CkptfixError) -> Iterator[Finding]:
    """What `error`, raised when the file was opened, says of it; and what else can be told."""
    if isinstance(error, UnknownFormat):
        yield from _unknown(path, error)
        return
    id = next((id for kind, id in _ERRORS if isinstance(error, kind)), "damaged")
    folder = Path(path)
    if isinstance(error, Unsupported) and "unfold" in error.message:
        id = "deflate-bomb"
    if id == "truncated" and "no zip directory" in error.message:
        yield _no_directory(path, error.message)
    else:
        yield found(id, error.message, where=error.where or "", offset=error.offset)
    if folder.is_file():
        yield from _text_mode(path)
        if isinstance(error, BadPickle) or id in ("truncated", "damaged", "bad-directory"):
            yield from _broken(path)


def _unknown(path: str, error: UnknownFormat) -> Iterator[Finding]:
    what = error.message
    id = next((id for pattern, id in _KINDS if re.search(pattern, what)), "unknown-format")
    if id == "bad-directory":
        yield _no_directory(path, what) if "no zip directory" in what else found(id, what)
        yield from _text_mode(path)
        return
    if id == "plain-pickle":
        yield from _plain(path, what)
        return
    if id == "dcp-folder" and Path(path).is_dir() and not Path(path, ".metadata").exists():
        yield found("dcp-no-metadata", f"{what} without its .metadata")
        return
    fix = verbatim(error.hint) if id in _KEPT_HINTS and error.hint else None
    if id == "compressed" and re.search(r"LZ4|zstandard|zlib", what):
        fix = verbatim(error.hint) if error.hint else None
    if id == "bare-data-pkl":
        parent = Path(path).resolve().parent
        fix = verbatim(command("doctor", parent)) if (parent / "data").is_dir() else None
    if id == "dcp-folder" and not Path(path).is_dir():
        # torch's merger takes the folder, and of a file in it says that it found no checkpoint.
        folder = Path(path).parent
        fix = verbatim(f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {quoted(folder)} OUT")
    yield found(id, what, fix=fix)
    if id == "repacked-zip" or id == "junk-before":
        return
    if id == "unknown-format":
        yield from _text_mode(path)


def _no_directory(path: str, message: str) -> Finding:
    """A zip without a directory where readers look for it: cut short, or with a long tail behind its end."""
    with Reader(path) as reader:
        end = reader.size
        while end > max(0, reader.size - _TAIL):
            start = max(0, end - _DEFINITE)
            block = reader.read(start, min(end + END.size, reader.size) - start)
            place = len(block)
            while (place := block.rfind(b"PK\x05\x06", 0, place)) >= 0:
                at = start + place
                size, offset = END.unpack(reader.read(at, END.size))[5:7] if at + END.size <= reader.size else (0, 0)
                if 46 <= size <= at - offset and reader.read(offset, 4) == b"PK\x01\x02":
                    left = reader.size - at - END.size
                    said = f"{left:,} bytes follow the end of the archive, too many for a reader to find it"
                    return found("trailing-bytes", said, offset=at + END.size, severity="error")
            end = start
        return found("truncated", message, offset=reader.size)


def _plain(path: str, what: str) -> Iterator[Finding]:
    yield found("plain-pickle", what)
    yield from _globals(path, 0)


def _broken(path: str) -> Iterator[Finding]:
    """What the pickle of a file that can not be read names, as far as it goes."""
    with Reader(path) as reader:
        head = reader.read(0, min(reader.size, 64))
    if torch_legacy.score(path, head, 64):
        yield from _globals(path, 0)
    elif head.startswith(b"PK\x03\x04"):
        start = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        yield from _globals(path, start)
    elif safetensors.score(path, head, 64):
        return


def _globals(path: str, start: int) -> Iterator[Finding]:
    with Reader(path) as reader:
        data = reader.read(start, min(reader.size - start, _DEFINITE)) if start < reader.size else b""
    yield from scan_pickle.before_break(data, "pickle", start)


def _text_mode(path: str) -> Iterator[Finding]:
    """Whether every line feed has a carriage return before it, which no binary file of any size has."""
    with Reader(path) as reader:
        data = reader.read(0, min(reader.size, _DEFINITE))
    feeds = data.count(b"\n")
    if feeds >= 8 and feeds == data.count(b"\r\n"):
        yield found("text-mode", f"each of {feeds} line feeds has a carriage return before it: transferred as text")


def directory_of(path: str) -> Directory | None:
    """The zip directory of a file, if it has one that can be read."""
    try:
        with Reader(path) as reader:
            return read_directory(reader, path)
    except CkptfixError:
        return None

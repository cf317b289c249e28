"""Findings about paths that could not be opened: other kinds of files, folders, and badly damaged checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptfix.checkpoint import Checkpoint
from ckptfix.commands import verbatim
from ckptfix.errors import (
    BadDirectory,
    BadIndex,
    BadPickle,
    Bomb,
    CkptfixError,
    DistributedPart,
    Truncated,
    UnknownFormat,
    Unsupported,
)
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Fix, Step, step
from ckptfix.findings.table import fix_of, found
from ckptfix.formats import FORMATS, HEAD, detect, open_as, open_checkpoint
from ckptfix.formats.base import unknown
from ckptfix.formats.loading import hidden_globals as scan_inside
from ckptfix.formats.loading.hidden_globals import HiddenContents
from ckptfix.formats.torch.dangerous_globals import is_dangerous
from ckptfix.io.layers import any_packing_of
from ckptfix.io.source import found_as, is_folder, is_local, open_source
from ckptfix.ops.doctor import pickle as doctor_pickle
from ckptfix.urls import as_path
from ckptfix.zips.read import END, Directory, read_directory

_KEPT_HINTS = (
    *("lfs-pointer", "tar-archive", "deepspeed-folder", "other-archive"),
    *("numpy-file", "other-framework", "gguf-file", "no-checkpoint"),
)
"""Kinds for which the hint of `formats.foreign` is more exact than the row's remedy."""

_IDS: tuple[tuple[type[CkptfixError], str], ...] = (
    (Truncated, "truncated"),
    (BadDirectory, "bad-directory"),
    (BadPickle, "bad-pickle"),
    (BadIndex, "bad-index"),
    (Bomb, "deflate-bomb"),
    (Unsupported, "unsupported"),
)

_REPAIR = step("repair")

_TRUSTED = ("plain-pickle", "numpy-file")
"""Kinds whose remedy is to load the file, if the user trusts it."""

_UNSEEN = ("empty-file", "zero-filled", "lfs-pointer", "gguf-file", "dcp-no-metadata")
"""Kinds in which no pickle can hide."""

_DEFINITE = 1 << 20
"""Bytes of a file that are searched for signs of a transfer as text."""

_TAIL = 1 << 26
"""Bytes at the end of a zip in which the end of its directory is searched."""


def scan(path: str, error: CkptfixError) -> Iterator[Finding]:
    """Yield the finding for `error`, raised when the file was opened; and what else can be found out."""
    from ckptfix.formats.foreign import unread

    if isinstance(error, DistributedPart):
        yield _part(path, error)
        return
    kinds = list(_unknown(path, error) if isinstance(error, UnknownFormat) else _damaged(path, error))
    if any(finding.id in _UNSEEN for finding in kinds) or _is_safetensors(path):
        yield from kinds
        return
    inside = scan_inside.look(*unread.pickle_of(path, {finding.id for finding in kinds}))
    yield from (_with_names(finding, inside) for finding in kinds)
    yield from _hidden(kinds, inside)


def _part(path: str, error: DistributedPart) -> Finding:
    from ckptfix.formats.foreign import unread

    return found("distributed-shard", error.message, fix=unread.part_advice(path))


def _damaged(path: str, error: CkptfixError) -> Iterator[Finding]:
    id = id_of(error)
    if id == "truncated" and _zip_without_directory(path):
        yield _no_directory(path, error.message)
    else:
        yield found(id, error.message, where=_place(path, error), offset=error.offset)
    if found_as(path) == "file":
        yield from _text_mode(path)


def _place(path: str, error: CkptfixError) -> str:
    """Return where the damage is; for a folder, with the name of the file."""
    where = error.where or ""
    if error.path is None or found_as(path) != "folder" or as_path(error.path).parent != as_path(path):
        return where
    name = as_path(error.path).name
    return f"{name}: {where}" if where else name


def id_of(error: CkptfixError) -> str:
    """Return the finding id for an error about a damaged file."""
    return next((id for kind, id in _IDS if isinstance(error, kind)), "damaged")


def _unknown(path: str, error: UnknownFormat) -> Iterator[Finding]:
    from ckptfix.formats.foreign import unread

    id, what = unread.described(path, error)
    if id == "truncated":
        yield _no_directory(path, what)
    elif id != error.kind:
        yield found(id, what)
    else:
        yield found(id, what, fix=_fix(path, error))
    if id in ("truncated", "bad-directory", "unknown-format"):
        yield from _text_mode(path)


def _fix(path: str, error: UnknownFormat) -> Fix | None:
    """Return the remedy, where it differs from that of the row of its kind."""
    from ckptfix.formats.foreign import unread

    id, hint = error.kind, verbatim(error.hint or "")
    if id in _KEPT_HINTS and hint:
        return hint
    if id == "compressed" and ((packing := any_packing_of(_head(path))) is None or packing.missing() is not None):
        return hint
    if id == "bare-data-pkl" and is_local(path):
        parent = as_path(path).resolve().parent
        return (Step("doctor", source=str(parent)),) if is_folder(parent / "data") else None
    if is_program(id):
        return _of_program(path)
    return unread.advice(path, error)


def is_program(id: str) -> bool:
    """Return whether a kind of file, or the finding of this id, is a program: its format has the same name."""
    return id in FORMATS and FORMATS[id].program


def open_file(path: str) -> Checkpoint:
    """Read a checkpoint, but no program: a diagnosis is about the file, not about the weights that can be read from it.

    Raises:
        UnknownFormat: it is a program.
        CkptfixError: raised by `open_checkpoint`.
    """
    if found_as(path) != "file":
        return open_checkpoint(path)
    format = detect(path)
    if not format.program:
        return open_as(path, format)
    with open_source(path) as reader:
        raise unknown(path, reader.read(0, min(HEAD, reader.size)), reader.size)


def _of_program(path: str) -> Fix | None:
    """Return the remedy for a program whose parameters and buffers are not what `extract` can take."""
    from ckptfix.formats.programs.torchscript import CONSTANTS
    from ckptfix.ops.extract import read_program

    try:
        weights = read_program(path)
        if weights is None or weights.entries:
            return None
        constants = read_program(path, CONSTANTS) if CONSTANTS in weights.left else None
    except CkptfixError:
        return None
    if constants is not None and constants.entries:
        return step("extract", at=CONSTANTS)
    return "it has no parameters, buffers or constants that are tensors: there is nothing to extract"


def _repairs(finding: Finding) -> bool:
    """Return whether the remedy of a finding is to repair the file."""
    return fix_of(finding) == _REPAIR


def _with_names(finding: Finding, inside: HiddenContents) -> Finding:
    """Add to a finding the functions in the file that run code; drop repair as remedy where no tensor was found."""
    if finding.severity == "info":
        return finding
    dangerous = [name for name in inside.names if is_dangerous(name)]
    message = finding.message
    if dangerous:
        message += f"; it names {doctor_pickle.listed(dangerous)}, which can run code"
    if inside.cut:
        message += "; it was not searched to its end"
    useless = _repairs(finding) and inside.pickles and not inside.tensors
    finding = replace(finding, message=message)
    return finding.fixed_by("") if useless or (dangerous and finding.id in _TRUSTED) else finding


def _hidden(kinds: Sequence[Finding], inside: HiddenContents) -> Iterator[Finding]:
    """Yield findings about globals of an unreadable file; repair drops those that run code, and keeps the others."""
    ids = {finding.id for finding in kinds}
    fix = _REPAIR if inside.tensors and any(map(_repairs, kinds)) else ""
    rows = inside.hidden
    if "dcp-folder" in ids or any(map(is_program, ids)):
        # These formats always contain some globals, so only dangerous ones are reported.
        rows = [row for row in rows if is_dangerous(row.name)]
    yield from doctor_pickle.hidden(rows, fix=fix)


def _head(path: str) -> bytes:
    if found_as(path) == "folder":
        return b""
    with open_source(path) as reader:
        return reader.read(0, min(reader.size, 64))


def _is_safetensors(path: str) -> bool:
    head = _head(path)
    return bool(head) and not head.startswith(b"PK") and FORMATS["safetensors"].score(path, head, 64) > 0


def _zip_without_directory(path: str) -> bool:
    return _head(path).startswith(b"PK\x03\x04") and directory_of(path) is None


def _no_directory(path: str, message: str) -> Finding:
    """Return the finding for a zip without a directory in the usual place: truncated, or followed by many bytes."""
    with open_source(path) as reader:
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


def _text_mode(path: str) -> Iterator[Finding]:
    """Yield a finding if every line feed has a carriage return before it, as in no binary file of any size."""
    with open_source(path) as reader:
        data = reader.read(0, min(reader.size, _DEFINITE))
    feeds = data.count(b"\n")
    if feeds >= 8 and feeds == data.count(b"\r\n"):
        yield found("text-mode", f"a carriage return precedes each of {feeds} line feeds: transferred as text")


def directory_of(path: str) -> Directory | None:
    """Return the zip directory of a file, if it has a readable one."""
    try:
        with open_source(path) as reader:
            return read_directory(reader)
    except CkptfixError:
        return None

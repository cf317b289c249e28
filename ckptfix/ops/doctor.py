"""Why a checkpoint does not load: everything that can be seen of it, judged, with the command that mends it.

The file is read as text and numbers; nothing of it is imported or run. Nothing is called safe: a diagnosis says what
was looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckptfix.checkpoint import ByteRange, Checkpoint, Finding
from ckptfix.containers.zip_local import record_data
from ckptfix.containers.zip_read import Record
from ckptfix.errors import (
    CkptfixError,
    DamagedFile,
    DistributedPart,
    NoFile,
    NoSuchFile,
    NoSuchTensor,
    UnknownFormat,
    Unsupported,
    file_name,
    printable,
)
from ckptfix.fileio import Reader
from ckptfix.formats import FORMATS, demands, open_checkpoint, torch_zip
from ckptfix.formats.torch_common import Parts, all_findings
from ckptfix.ops import (
    error_texts,
    scan_contents,
    scan_foreign,
    scan_inside,
    scan_pickle,
    scan_program,
    scan_records,
    scan_shards,
    scan_target,
    scan_zip,
)
from ckptfix.ops.catalogue import RANK, errors_of, found, place_of, remedy
from ckptfix.ops.pieces import piece_of
from ckptfix.ops.targets import Side
from ckptfix.words import plural

MOST = 200
"""Findings of one id that are kept; a file could be made to have millions."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a pasted error message is.

    Attributes:
        rows: numbers of the load errors that it may be, most likely first; empty if it is not known.
        meanings: what each usually means.
        explained: ids of the findings that explain it, in the order of the findings.
    """

    rows: tuple[int, ...]
    meanings: tuple[str, ...]
    explained: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """What was found out about a file.

    Attributes:
        path: the file or folder.
        format: NAME of the format that reads it; None where none does.
        title: what it is, for people.
        size: bytes of the file; 0 for a folder.
        findings: the most serious first, those that explain the message before others of their kind; `fix` is a
            command line for a shell, or words, or None where nothing helps.
        looked_at: what was looked at, in words.
        message: what the pasted message is; None without one.
    """

    path: str
    format: str | None
    title: str
    size: int
    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]
    message: Message | None = None

    def __str__(self) -> str:
        """What is wrong, and a line for each finding with what helps."""
        lines = [f"{self.path}: {self.title}", self.sentence]
        for finding in self.findings:
            place = f"{finding.where}: " if finding.where and finding.where not in finding.message else ""
            lines.append(f"{finding.severity}: {finding.id}: {place}{finding.message}")
            lines += [f"  {finding.fix}"] if finding.fix else []
        return "\n".join(map(printable, lines))

    def __repr__(self) -> str:
        return f"<Diagnosis of {self.path!r}: {plural(len(self.findings), 'finding')}>"

    @property
    def sentence(self) -> str:
        """What is wrong, in one sentence."""
        first = self.cause
        if first is not None:
            place = f"{first.where}: " if first.where and first.where not in first.message else ""
            return f"{place}{first.message}"
        if self.message is not None and self.message.meanings:
            return f"the file shows no cause of this message, which usually means that {self.message.meanings[0]}"
        return f"nothing wrong was found in {', '.join(self.looked_at)}"

    @property
    def cause(self) -> Finding | None:
        """The finding that counts: one that explains the message, else the most serious that is no mere note."""
        explained = self.message.explained if self.message is not None else ()
        for finding in self.findings:
            if finding.id in explained and finding.severity == "error":
                return finding
        for finding in self.findings:
            if finding.id in explained:
                return finding
        if self.message is not None and self.message.rows and not any(f.severity == "error" for f in self.findings):
            return None
        return next((finding for finding in self.findings if finding.severity != "info"), None)

    @property
    def exit_code(self) -> int:
        """1 with a finding that is no mere note, or one that explains the message; else 0."""
        explained = bool(self.message is not None and self.message.explained)
        return 1 if explained or any(finding.severity != "info" for finding in self.findings) else 0

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "path": self.path,
            "format": self.format,
            "title": self.title,
            "size": self.size,
            "sentence": self.sentence,
            "fix": self.cause.fix if self.cause is not None else None,
            "findings": [asdict(finding) for finding in self.findings],
            "looked_at": list(self.looked_at),
            "error": None if self.message is None else asdict(self.message),
        }


def examine(
    path: str | os.PathLike[str],
    *,
    like: Side | None = None,
    error: str | None = None,
    fast: bool = False,
    at: str | None = None,
) -> Diagnosis:
    """Look at the file or folder at `path`, and say what keeps it from loading.

    Args:
        like: the model that it is meant for, as `targets.read` gives it.
        error: a message that somebody got, to say which findings explain it.
        fast: read no tensor bytes: no checksums, no search for NaN and zeros.
        at: address of the state dict to compare with `like`.

    Raises:
        CkptfixError: there is no such file, or it can not be read.
    """
    name = file_name(path)
    if not Path(name).exists():
        raise NoSuchFile(name)
    rows = error_texts.rows(error) if error is not None else ()
    looked = ["its first bytes"]
    checkpoint: Checkpoint | None = None
    findings: list[Finding]
    index = scan_shards.index_of(name)
    if index is not None:
        looked = ["the index", "the headers of its shards"]
        findings = list(scan_shards.scan(index))
        title = "a sharded checkpoint"
    else:
        try:
            checkpoint = open_checkpoint(name)
        except NoFile:
            raise
        except (DamagedFile, UnknownFormat, Unsupported) as trouble:
            program = isinstance(trouble, UnknownFormat) and trouble.kind in scan_foreign.PROGRAMS
            looked += ["its records"] if program else []
            if isinstance(trouble, DistributedPart):
                inside = []
            else:
                inside = list(scan_program.scan(name, fast=fast) if program else _container(name))
            # An archive whose records can be listed is no unknown file.
            said = scan_foreign.scan(name, trouble)
            told = [finding for finding in said if finding.id != "unknown-format" or not inside]
            findings = [*told, *inside]
            title = trouble.message
        else:
            title = FORMATS[checkpoint.format].TITLE
            findings = list(_judge(checkpoint, like, rows, fast=fast, at=at, looked=looked))
    size = Path(name).stat().st_size if Path(name).is_file() else 0
    ordered = _ordered(findings, rows)
    values = {} if like is None else {"like": like.label}
    flag = " --allow-import" if like is not None and not Path(like.label).exists() else ""
    fixes = [remedy(finding, name, **values) for finding in ordered]
    fixes = [fix + flag if fix and " --like " in fix else fix for fix in fixes]
    if any(finding.id == "one-rank" for finding in ordered):
        # Plain values of a piece would load, and be no model: the whole is made by who knows all ranks.
        fixes = [None if fix and fix.startswith("ckptfix sanitize ") else fix for fix in fixes]
    done = tuple(replace(finding, fix=fix) for finding, fix in zip(ordered, fixes, strict=True))
    form = checkpoint.format if checkpoint is not None else None
    return Diagnosis(name, form, title, size, done, tuple(looked), _message(error, rows, done))


def _judge(
    checkpoint: Checkpoint, like: Side | None, rows: Sequence[int], *, fast: bool, at: str | None, looked: list[str]
) -> Iterator[Finding]:
    """Everything about a file that can be opened."""
    looked[:] = ["its container", "its names and devices"]
    path = checkpoint.path
    pickled = isinstance(checkpoint.graph, Parts)
    # A second reading would find no more: what reads a pickled format notes everything that its check tells.
    judged = all_findings(checkpoint) if pickled else FORMATS[checkpoint.format].check(path)
    # Globals are told with their calls below.
    yield from (finding for finding in judged if finding.id != "foreign-global")
    yield from _container(path, checkpoint)
    piece = piece_of(checkpoint)
    if piece is not None:
        fix = piece.way_out.replace("{", "{{").replace("}", "}}")
        yield found("one-rank", piece.message, where=piece.where, fix=fix)
    yield from _pickles(checkpoint, looked)
    contents = list(scan_contents.scan(checkpoint))
    yield from scan_contents.needs_torch(checkpoint)
    yield from scan_contents.asked(checkpoint, rows)
    if like is not None:
        looked.append("names and shapes against the model")
        try:
            fit = [*contents, *scan_target.scan(checkpoint, like, at=at, fast=fast)]
            contents = scan_target.settled(fit, checkpoint, like, at=at)
        except NoSuchTensor as error:
            yield found("missing-keys", error.message)
    yield from contents
    if not fast:
        looked.append("every byte of its tensors")
        yield from scan_records.scan(_pieces(checkpoint), checkpoint.byteorder)


def _container(path: str, checkpoint: Checkpoint | None = None) -> Iterator[Finding]:
    """Findings about a zip directory, whether or not the checkpoint in it can be read."""
    if Path(path).is_dir() or (checkpoint is not None and checkpoint.format != torch_zip.NAME):
        return
    directory = scan_foreign.directory_of(path)
    if directory is None:
        return
    pickles = [record.name for record in directory.records if record.name.endswith("/data.pkl")]
    if not pickles:
        return
    with Reader(path) as reader:
        yield from scan_zip.scan(reader, directory, pickles[0].rpartition("/")[0])


def _pickles(checkpoint: Checkpoint, looked: list[str]) -> Iterator[Finding]:
    """Findings about the pickle, and about other pickles in the records."""
    parts = checkpoint.graph
    if not isinstance(parts, Parts):
        return
    looked.append("its pickle, read as text")
    graph = parts.graph
    zipped = checkpoint.format == torch_zip.NAME
    where, base = (parts.container.pickle.name, 0) if zipped else ("pickle", 0)
    if zipped:
        with Reader(checkpoint.path) as reader:
            data = record_data(reader, checkpoint.path, parts.container.pickle)
        base = data.offset if isinstance(data, ByteRange) else 0
        yield from scan_pickle.after_stop(graph.data, graph.end, where, base)
        yield from _hidden(checkpoint, parts.container.directory.records, parts.container.root)
    for finding in demands.findings(graph):
        yield replace(finding, where=where, offset=base + (finding.offset or 0))
    module = scan_pickle.modules(graph)
    for finding in scan_pickle.scan(graph, where, base):
        # Without its classes nothing of a module is left for sanitize to write; extract takes the weights out.
        taken = module is not None and finding.id in ("foreign-global", "dangerous-global")
        yield replace(finding, fix="ckptfix extract {source} {weights}") if taken else finding
    if module is not None:
        message = f"a whole pickled module of class {module[0]}, not a state dict"
        yield found("whole-module", message, where=where, offset=base + module[1])


def _hidden(checkpoint: Checkpoint, records: Sequence[Record], root: str) -> Iterator[Finding]:
    """Records that no tensor uses, and those that are pickles."""
    used = {persid.pid[2] for persid in checkpoint.graph.graph.persids if _has_key(persid.pid)}
    prefix = f"{root}/data/"
    idle: list[Record] = []
    with Reader(checkpoint.path) as reader:
        for record in records:
            key = record.name.removeprefix(prefix)
            if record.name.startswith(prefix) and key not in used and record.size:
                idle.append(record)
            if record.name == f"{root}/data.pkl" or record.size <= 2:
                continue
            offset, names = scan_inside.names_in_record(reader, record)
            if names:
                message = f"a pickle that names {scan_pickle.listed(names)}"
                yield found("hidden-pickle", message, where=record.name, offset=offset)
    if idle:
        total = sum(record.size for record in idle)
        message = f"{total:,} bytes in {len(idle)} records belong to no tensor"
        yield found("unused-record", message, where=idle[0].name, offset=idle[0].header)


def _has_key(pid: Any) -> bool:
    return type(pid) is tuple and len(pid) > 2 and isinstance(pid[2], str)


def _pieces(checkpoint: Checkpoint) -> list[scan_records.Piece]:
    """All bytes of the file that hold tensors, and every other record of a zip."""
    pieces: dict[object, scan_records.Piece] = {}
    stack = list(reversed(checkpoint.entries))
    while stack:
        entry = stack.pop()
        stack += reversed(entry.parts)
        storage = entry.storage
        if storage is None or storage.data is None:
            continue
        piece = pieces.get(storage.key)
        if piece is None:
            piece = pieces[storage.key] = scan_records.Piece(
                storage.key, storage.data, storage.crc32, entry.dtype
            )
        piece.entries.append(entry)
    if checkpoint.format != torch_zip.NAME:
        return [piece for piece in pieces.values() if _inside(piece, checkpoint.size)]
    archive: torch_zip.Archive = checkpoint.graph.container
    prefix = f"{archive.root}/data/"
    for piece in pieces.values():
        piece.where = f"{prefix}{piece.where}"
    known = {piece.where for piece in pieces.values()}
    others: list[scan_records.Piece] = []
    with Reader(checkpoint.path) as reader:
        for record in archive.directory.records:
            # The pickle's checksum was compared when it was read.
            if record.name in known or record is archive.pickle or record.name in archive.ambiguous or not record.size:
                continue
            try:
                data = record_data(reader, checkpoint.path, record)
            except CkptfixError:
                continue
            others.append(scan_records.Piece(record.name, data, record.crc32 or None))
    return [*pieces.values(), *others]


def _inside(piece: scan_records.Piece, size: int) -> bool:
    """Whether the file has the bytes; where it has not, the cut has been told."""
    return not isinstance(piece.data, ByteRange) or (piece.data.length >= 0 and piece.data.end <= size)


def _ordered(findings: Iterable[Finding], rows: Sequence[int]) -> list[Finding]:
    """The findings once each, the most serious first; of equals, those first that explain the message."""
    wanted = {row: place for place, row in enumerate(rows)}
    kept: dict[tuple[object, ...], Finding] = {}
    counts: dict[str, int] = {}
    for finding in findings:
        # A format's own finding about a place stands for the scan's, which only knows more of it.
        key = (finding.id, finding.where, finding.offset if finding.id not in _SAME else None)
        counts[finding.id] = counts.get(finding.id, 0) + (key not in kept)
        if key in kept or counts[finding.id] <= MOST:
            kept[key] = finding
    return sorted(
        kept.values(),
        key=lambda finding: (
            RANK[finding.severity],
            min((wanted[row] for row in errors_of(finding) if row in wanted), default=len(wanted)),
            place_of(finding),
        ),
    )


_SAME = ("duplicate-record", "bad-crc", "trailing-bytes", "no-lightning-version", "fixed-device")
"""Ids that two scans may give to one place, with other offsets."""


def _message(error: str | None, rows: tuple[int, ...], findings: Sequence[Finding]) -> Message | None:
    if error is None:
        return None
    explained = [finding.id for finding in findings if set(errors_of(finding)) & set(rows)]
    meanings = tuple(error_texts.meaning(row) for row in rows)
    return Message(rows, meanings, tuple(dict.fromkeys(explained)))



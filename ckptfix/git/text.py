"""A checkpoint as lines of text, which depend only on its content, and not on its name or path.

There is one line per tensor, sorted by name, so a changed line is a changed tensor::

    format: PyTorch zip
    tensors: 2, 32 B, 8 parameters
    epoch = 3
    fc.bias  float32 [2]  mean 7.5 std 0.7071 min 7 max 8  sha256:9f1b...

git caches the text by the blob id and the command that made it. `FORM` is part of that command, and increases when
the text changes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.elements.moments import ElementMoments
from ckptfix.elements.reader import content, read_each, reduce
from ckptfix.errors import CkptfixError, NoSuchFile, printable
from ckptfix.formats import open_checkpoint
from ckptfix.git import lfs
from ckptfix.io.source import Readers, found_as, open_source, shares_open_files
from ckptfix.ops.digest.files import digests
from ckptfix.ops.digest.tensors import digest_of
from ckptfix.ops.inspect.describe import inspect
from ckptfix.ops.quantized import no_numbers
from ckptfix.words import natural, plural, shape, size

FORM = 2

DIGITS = 16
"""Hexadecimal digits of a digest: enough to distinguish tensors."""

LONGEST = 200
"""Maximum characters of a value."""


def text(path: str) -> str:
    """Return the text of a file; read errors become lines, because git shows nothing at all if this fails.

    Raises:
        NoSuchFile: the file does not exist.
    """
    if not found_as(path):
        raise NoSuchFile(path)
    lines: list[str] = []
    try:
        with shares_open_files():
            lines.extend(_lines(path))
    except CkptfixError as error:
        lines.append(f"not readable: {_said(error)}")
    except Exception as error:
        lines.append(f"not readable: {type(error).__name__}, an error of ckptfix or of this machine")
    return "".join(f"{line}\n" for line in lines)


def _lines(path: str) -> Iterator[str]:
    """Yield the lines for a file; for a git-lfs pointer, those for the file that it represents."""
    found = lfs.pointer(path)
    if found is None:
        yield from _of_file(path)
    elif (place := lfs.stored(found)) is not None:
        yield from _of_file(place)
    else:
        yield f"git-lfs pointer: sha256 {found.oid}, {found.size:,} bytes; `git lfs pull` gets the file"


def _of_file(path: str) -> Iterator[str]:
    """Yield the lines for a file. A link hides its name and folder, as the text must not depend on them."""
    with tempfile.TemporaryDirectory(prefix="ckptfix-git-") as folder:
        link = Path(folder, "checkpoint")
        link.symlink_to(Path(path).absolute())
        try:
            checkpoint = open_checkpoint(link)
        except CkptfixError as error:
            yield f"not readable as a checkpoint: {_said(error)}"
            with open_source(path) as source:
                yield f"file: {source.size:,} bytes, sha256 {digests([path])[0].digest}"
            return
        yield from _of_checkpoint(checkpoint)


def _said(error: CkptfixError) -> str:
    """Return an error's message, without the path of the file."""
    place = " ".join(
        part for part in (error.where or "", "" if error.offset is None else f"@ {error.offset:#x}") if part
    )
    return printable(f"{place}: {error.message}" if place else error.message)


def _of_checkpoint(checkpoint: Checkpoint) -> Iterator[str]:
    seen = inspect(checkpoint)
    yield f"format: {seen.title}"
    yield f"tensors: {seen.tensors:,}, {size(seen.nbytes)}, {plural(seen.parameters, 'parameter')}"
    for finding in seen.findings:
        if finding.severity == "error":
            yield printable(f"{finding.id}: {finding.where}: {finding.message}" if finding.where else finding.message)
    for name in sorted(name for name, accepted in seen.globals if not accepted):
        yield printable(f"weights_only=True refuses {name}")
    for name, value in sorted(seen.metadata.items()):
        yield f"__metadata__/{printable(name)} = {_value(value)}"
    try:
        values = [(name, _value(value)) for name, value in checkpoint.values()]
    except CkptfixError as error:
        yield f"values: {_said(error)}"
    else:
        for name, shown in sorted(values, key=lambda row: (natural(row[0]), row)):
            yield f"{printable(name)} = {shown}"
    entries = sorted(seen.named_entries, key=lambda entry: (natural(entry.name), entry.name))
    yield from read_each(entries, partial(_line, checkpoint), attrgetter("nbytes"))


def _value(value: object) -> str:
    shown = printable(repr(value))
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}... ({len(shown):,} characters)"


def _line(checkpoint: Checkpoint, entry: TensorEntry, readers: Readers) -> str:
    byteorder = checkpoint.byteorder
    parts = [entry.name, f"{entry.dtype} {shape(entry.shape)}", *_properties(entry)]
    try:
        if entry.storage is not None and entry.storage.data is not None and no_numbers(checkpoint, entry) is None:
            found = reduce(content(entry, byteorder), ElementMoments, readers)
            parts += [" ".join(_statistics(found))] if found.elements else []
        digest = digest_of(entry, readers, byteorder=byteorder)
        parts.append(f"sha256:{digest[:DIGITS]}")
    except CkptfixError as error:
        parts.append(f"not readable: {error.message}")
    return printable("  ".join(parts))


def _properties(entry: TensorEntry) -> Iterator[str]:
    if entry.kind != "dense" or entry.detail:
        yield f"{entry.kind} {entry.detail}".strip()
    if entry.location != "cpu":
        yield entry.location
    if entry.requires_grad:
        yield "requires_grad"


def _statistics(found: ElementMoments) -> Iterator[str]:
    values = (
        ("mean", found.mean_value),
        ("std", found.deviation),
        ("min", found.low),
        ("max", found.high),
    )
    for name, value in values:
        if value is not None:
            yield f"{name} {value:.4g}" if not isinstance(value, int) else f"{name} {value}"
    for name, count in (("nan", found.nan), ("inf", found.infinite)):
        if count:
            yield f"{name} {count}"

"""The strict check of a folder: it looks at every item, but reads no tensor bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from ckptfix.checkpoint import Checkpoint
from ckptfix.checkpoint.address import shown
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.dcp.images import Images
from ckptfix.formats.dcp.metadata import StorageInfo
from ckptfix.formats.dcp.part import SUFFIX
from ckptfix.formats.dcp.read import Folder, folder_of
from ckptfix.formats.folders.steps import element
from ckptfix.formats.torch.common import all_findings
from ckptfix.urls import as_path
from ckptfix.words import plural

MOST = 200
"""The limit of tensors that are reported one by one."""


def validate(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings of reading, and each tensor whose chunks and items do not match."""
    yield from _judge(checkpoint, items=True)


def validate_headers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings that need only the metadata and the sizes of the files."""
    yield from _judge(checkpoint, items=False)


def _judge(checkpoint: Checkpoint, *, items: bool) -> Iterator[Finding]:
    folder = folder_of(checkpoint)
    yield from all_findings(checkpoint)
    if items:
        yield from _bad_tensors(folder)
        yield from _overlaps(folder)
        yield from _other_steps(folder)
    if folder.metadata.unused:
        names = ", ".join(dict.fromkeys(shown(name) for name, _ in folder.metadata.unused[:3]))
        yield found("dcp-unused", f"{plural(len(folder.metadata.unused), 'item')} that no chunk uses, of {names}")
    yield from _left_over(folder)
    if folder.metadata.saved_at is not None:
        yield found("dcp-saved-at", f"it was saved to {folder.metadata.saved_at}")


def _bad_tensors(folder: Folder) -> Iterator[Finding]:
    count = 0
    for index, saved in enumerate(folder.tensors):
        if any(part.is_lost or (part.place is not None and not folder.files.has(part.place)) for part in saved.parts):
            continue  # the missing or truncated file, or the chunk without a file, is reported already
        try:
            folder.spliced.piece(index)
        except CkptfixError as error:
            count += 1
            if count > MOST:
                return
            yield found("bad-tensor", error.message, where=saved.address, offset=error.offset)


def _overlaps(folder: Folder) -> Iterator[Finding]:
    """Yield a finding for items that overlap without being the same."""
    places = sorted({part.place for _, part in folder.metadata.places() if part.place is not None})
    for one, other in pairwise(places):
        if one.name == other.name and one.length and other.length and other.offset < one.offset + one.length:
            if _in_image(folder, one) and _in_image(folder, other):
                continue
            message = f"an item of {one.length} bytes at {one.offset:#x} overlaps the item at {other.offset:#x}"
            yield found("dcp-overlap", message, where=one.name, offset=other.offset)
            return


def _other_steps(folder: Folder) -> Iterator[Finding]:
    """Yield files in which no parameter has the usual step count: no other field tells which save they are from."""
    held: dict[str, Counter[float]] = {}
    for index, saved in enumerate(folder.tensors):
        place = saved.parts[0].place if len(saved.parts) == 1 and saved.nbytes and not saved.shape else None
        if place is None or saved.fqn.rpartition(".")[2] != "step" or not folder.files.has(place):
            continue
        try:
            count = element(saved.dtype or "", folder.spliced.place(index))
        except CkptfixError:
            continue  # reported as damaged
        if count is not None:
            held.setdefault(place.name, Counter())[count] += 1
    if len(held) < 2:
        return
    usual = sum(held.values(), Counter[float]()).most_common(1)[0][0]
    for name, counts in held.items():
        if usual not in counts:
            own = counts.most_common(1)[0][0]
            message = (
                f"its optimizer states are at step {own:g}, and most of those in the other files at step {usual:g}"
            )
            yield found("steps-differ", message, where=name)


def _in_image(folder: Folder, place: StorageInfo) -> bool:
    """Return whether a safetensors file begins there; all of its tensors then state the same place."""
    try:
        return folder.files.images.at(folder.files.paths[place.name], place.offset) is not None
    except (CkptfixError, KeyError):
        return False


def _is_empty(path: Path) -> bool:
    """Return whether it is the file of a rank that had nothing to write."""
    try:
        image = Images().at(str(path), 0)
        return not path.stat().st_size or (image is not None and not image.tensors)
    except (CkptfixError, OSError):
        return False


def _left_over(folder: Folder) -> Iterator[Finding]:
    names = sorted(path.name for path in as_path(folder.files.folder).iterdir())
    for name in names:
        own = name.endswith(SUFFIX) and name not in folder.files.paths
        if (own and not _is_empty(as_path(folder.files.folder, name))) or name.endswith(".metadata.tmp"):
            yield found("dcp-leftover", where=name)

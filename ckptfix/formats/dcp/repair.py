"""Repair of a distributed checkpoint: the intact parts of a folder with damaged or missing files, as one torch file.

The keys, shapes and offsets are in `.metadata`; without it, nothing identifies the items in the other files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ckptfix.checkpoint import dtypes
from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.formats.dcp.items import value_item
from ckptfix.formats.dcp.metadata import SavedChunk, SavedKey
from ckptfix.formats.dcp.read import ItemFiles, assembled, chunk_item, place_of, read_folder, tensor_piece
from ckptfix.formats.repairs import LostTensor, Repair, RepairTools
from ckptfix.io import background_checks


def repair(path: str, tools: RepairTools) -> Repair:
    """Plan one torch file of the intact keys of the folder `path`; the others are reported with their rows.

    Raises:
        DamagedFile: its metadata cannot be read.
    """
    said, files, _ = read_folder(path)
    losses = [LostTensor(where, None, "", what) for where, what in said.wrong]
    kept: list[SavedKey] = []
    lost: dict[str, str] = {}
    for saved in said.saved:
        wrong = list(_wrong(saved, files))
        if not wrong:
            kept.append(_with_elements(saved))
        elif saved.dtype is None:
            losses.append(LostTensor(saved.address, None, "", "; ".join(wrong)))
        else:
            lost[saved.address] = "; ".join(wrong)
            kept.append(saved)
    checkpoint = assembled(path, replace(said, saved=kept, wrong=[]), files)
    return tools.without(checkpoint, lost, losses)


def _with_elements(saved: SavedKey) -> SavedKey:
    """Drop the chunks of a key that have no elements, as nothing needs their items."""
    if saved.dtype is None:
        return saved
    return replace(saved, parts=tuple(part for part in saved.parts if math.prod(part.sizes)))


def _wrong(saved: SavedKey, files: ItemFiles) -> Iterator[str]:
    """Yield a message for each damaged item of a key; every byte is read and checked."""
    sound = True
    for part in saved.parts:
        try:
            _look(saved, part, files)
        except CkptfixError as error:
            sound = False
            place = f"in {part.place.name}: " if part.place is not None else ""
            yield f"{_rows(saved, part)}{place}{error.message}"
    if sound and saved.dtype is not None:
        try:
            tensor_piece(saved, files)
        except CkptfixError as error:
            yield error.message


def _look(saved: SavedKey, part: SavedChunk, files: ItemFiles) -> None:
    """Read an item.

    Raises:
        CkptfixError: it is damaged, or missing.
    """
    nothing = saved.dtype is not None and not dtypes.by_name(saved.dtype).nbytes(math.prod(part.sizes))
    if nothing:
        return
    place = place_of(part)
    if place.name not in files.sizes:
        raise DamagedFile(files.refused.get(place.name, "the file is missing"))
    if not files.has(place):
        raise DamagedFile("the file ends before this item")
    if saved.dtype is None:
        value_item(files.range(place), saved.address)
        return
    item = chunk_item(saved, part, files)
    if item.check is not None:
        background_checks.run([item.check])


def _rows(saved: SavedKey, part: SavedChunk) -> str:
    """Return which part of a tensor a chunk is; "" if it is all of it."""
    if saved.dtype is None or part.sizes == saved.shape:
        return ""
    ranges = (f"{first}:{first + size}" for first, size in zip(part.offsets, part.sizes, strict=True))
    return f"[{', '.join(ranges)}] "

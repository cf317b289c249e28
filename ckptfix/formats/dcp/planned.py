"""A planned folder read as it will be, so that the weight audit can run before a byte is written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, Checkpoint, FileVersion, Plan, Storage, TensorEntry, contiguous_stride
from ckptfix.checkpoint.address import of_keys
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.formats.dcp import metadata as dcp_metadata
from ckptfix.formats.dcp.metadata import Metadata, SavedKey
from ckptfix.formats.dcp.read import ItemFiles, Nesting, assembled, chunk_item, pieces_of_tensors
from ckptfix.formats.dcp.skim import Sizes
from ckptfix.io.source import open_source
from ckptfix.io.virtual_files import PlannedFile


def planned_metadata(plan: Plan) -> Metadata | None:
    """Return the content of the planned `.metadata`; None without one.

    Raises:
        DamagedFile: readers would not accept it.
    """
    file = next((file for file in plan.files if os.path.basename(file.path) == dcp_metadata.NAME), None)  # noqa: PTH119
    if file is None:
        return None
    with open_source(PlannedFile(file)) as source:
        return dcp_metadata.understood(source.read(0, source.size), file.path)


def read_planned(plan: Plan) -> Checkpoint:
    """Return the checkpoint of a planned folder.

    The object holds only the values. Tensors are entries without nodes: nobody edits a planned folder, and a large
    checkpoint consists of tensors.

    Raises:
        DamagedFile: the plan has no `.metadata`, or one that readers would not accept; or an item is not that of its
            tensor.
    """
    said = planned_metadata(plan)
    if said is None:
        raise DamagedFile("the plan has no .metadata")
    last = plan.files[-1]
    folder = os.path.dirname(last.path)  # noqa: PTH120 (a name, not a place)
    paths: dict[str, str] = {os.path.relpath(file.path, folder): PlannedFile(file) for file in plan.files}
    sizes = {name: planned.size for name, planned in paths.items() if isinstance(planned, PlannedFile)}
    mark = FileVersion(PlannedFile(last), FileStat(last.nbytes))
    files = ItemFiles(folder, sizes, paths, (mark,))
    if not all(map(_is_plain, said.saved)):
        return assembled(folder, said, files)
    nesting = Nesting()
    for saved in said.saved:
        nesting.put(saved.path, True)
    tensors = [saved for saved in said.saved if saved.dtype is not None]
    values = assembled(folder, replace(said, saved=[saved for saved in said.saved if saved.dtype is None]), files)
    entries = (*_entries(folder, tensors, files), *values.entries)
    return replace(values, load_entries=lambda: entries)


def _is_plain(saved: SavedKey) -> bool:
    """Return whether the address of a key has the same text as that of no other key."""
    return all(not isinstance(part, str) or (part and "/" not in part) for part in saved.path)


def _entries(folder: str, tensors: Sequence[SavedKey], files: ItemFiles) -> Iterator[TensorEntry]:
    """Yield the tensors, each with the bytes of its items."""
    spliced = pieces_of_tensors(folder, tensors, files)
    strides: dict[Sizes, Sizes] = {}
    for number, saved in enumerate(tensors):
        assert saved.dtype is not None
        data = spliced.place(number)
        with suppress(CkptfixError):  # it is raised where the bytes of the tensor are traced
            data = _in_one_item(saved, files) or data
        *above, key = map(str, saved.path)
        storage = Storage(str(number), saved.dtype, data.length, "cpu", data)
        if saved.shape not in strides:
            strides[saved.shape] = contiguous_stride(saved.shape)
        stride = strides[saved.shape]
        yield TensorEntry(key, of_keys(tuple(above)), storage, saved.dtype, saved.shape, stride)


def _in_one_item(saved: SavedKey, files: ItemFiles) -> ByteRange | None:
    """Return the bytes of a tensor that is one chunk; None for one in pieces, or without bytes."""
    part = saved.parts[0] if len(saved.parts) == 1 else None
    if part is None or part.place is None or part.sizes != saved.shape or any(part.offsets) or 0 in part.sizes:
        return None
    assert saved.dtype is not None
    known = files.molds.find(files.range(part.place), saved.dtype, part.sizes)
    data = chunk_item(saved, part, files).data if known is None else known[0]
    return data if isinstance(data, ByteRange) else None

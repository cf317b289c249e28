"""The files of the ranks of a model, by the names that their writers give them, and each file as it was read.

::

    FOLDER/consolidated.00.pth  consolidated.01.pth  params.json         Meta
    FOLDER/checkpoint_last-model_part-0.pt  ...-model_part-1.pt          fairseq
    FOLDER/latest_checkpointed_iteration.txt                             Megatron-LM
    FOLDER/iter_0000500/mp_rank_00/model_optim_rng.pt                      one pipeline stage
    FOLDER/iter_0000500/mp_rank_00_000/model_optim_rng.pt                  several stages, or several groups of experts
    FOLDER/release/mp_rank_00_000_000/model_optim_rng.pt                   both

Source: megatron/training/checkpointing.py get_checkpoint_name, fairseq/distributed/utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from itertools import islice
from pathlib import PurePath

from ckptfix.checkpoint import FileVersion, TensorEntry
from ckptfix.checkpoint.address import join, keys_of
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile
from ckptfix.formats.folders.nodes import read_torch
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.json_files import json_object
from ckptfix.formats.members import MEGATRON_FOLDER, STEP_FOLDER
from ckptfix.formats.torch.common import PickledObject, pickled_object
from ckptfix.formats.torch.state import fields
from ckptfix.formats.torch.tensors import BadTensor, tensor_entry
from ckptfix.io.layers import WindowName
from ckptfix.io.read import read_chunks
from ckptfix.io.source import is_folder, is_place, mark
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.pickles import Text
from ckptfix.pickles.graph import Node
from ckptfix.urls import as_path

META_FILE = re.compile(r"consolidated\.(\d{2,4})\.pth")
PART_FILE = re.compile(r"(.+)-model_part-(\d{1,4})\.pt")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
OPTIMIZER_FILES = ("distrib_optim.pt", "optim.pt")
TRACKER = "latest_checkpointed_iteration.txt"
PARAMETERS = "params.json"
MOST_FILES = 100_000
MOST_TEXT = 1 << 22


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files of a model.

    Attributes:
        folder: the folder of the files.
        paths: numbers of the rank, as the names state them -> file.
        beside: files of the ranks that hold no part of the model.
    """

    folder: str
    paths: Mapping[tuple[int, ...], str]
    beside: tuple[str, ...] = ()


def meta_files(path: str) -> FoundFiles | None:
    """Return the ``consolidated.NN.pth`` files in a folder; None if there are fewer than two."""
    return _numbered(path, META_FILE)


def part_files(path: str) -> FoundFiles | None:
    """Return fairseq's files of all model parts in a folder; None if there is not exactly one series of them."""
    return _numbered(path, PART_FILE)


def _numbered(path: str, pattern: re.Pattern[str]) -> FoundFiles | None:
    series: dict[tuple[str, ...], dict[tuple[int, ...], str]] = {}
    for name in names_in(path):
        found = pattern.fullmatch(name)
        if found is not None:
            *stem, number = found.groups()
            series.setdefault(tuple(stem), {})[int(number),] = name
    several = [files for files in series.values() if len(files) > 1]
    if len(several) != 1:
        return None
    return FoundFiles(path, {rank: file_inside(path, name, where=path) for rank, name in sorted(several[0].items())})


def megatron_files(path: str) -> FoundFiles | None:
    """Return the files of the save of Megatron-LM in the folder `path`, or in the only folder of a step in it."""
    own = _save(path)
    if own is not None:
        return own
    # Which checkpoint of a run is meant is a question of the run: see `formats.runs`.
    steps = [name for name in names_in(path) if STEP_FOLDER.fullmatch(name)]
    return _save(str(as_path(path, steps[0]))) if len(steps) == 1 else None


def _save(path: str) -> FoundFiles | None:
    paths: dict[tuple[int, ...], str] = {}
    beside: list[str] = []
    for name in names_in(path):
        found = MEGATRON_FOLDER.fullmatch(name)
        if found is None:
            continue
        inside = set(names_in(str(as_path(path, name))))
        own = next((file for file in MODEL_FILES if file in inside), None)
        if own is not None:
            numbers = tuple(int(number) for number in found.groups() if number is not None)
            paths[numbers] = file_inside(path, f"{name}/{own}", where=path)
            beside += [str(as_path(path, name, file)) for file in OPTIMIZER_FILES if file in inside]
    return FoundFiles(path, paths, tuple(beside)) if paths else None


def names_in(path: str) -> list[str]:
    """Return the names in a folder in order; none if it is not a folder, or cannot be listed."""
    if not is_place(path) or not is_folder(path):
        return []
    try:
        return sorted(entry.name for entry in islice(as_path(path).iterdir(), MOST_FILES))
    except OSError:
        return []


def planned_files(files: Iterable[PlannedFile], pattern: re.Pattern[str], folder: str) -> FoundFiles:
    """Return the files of a planned folder whose names match `pattern`: those of a rank's folder, or of a rank."""
    paths: dict[tuple[int, ...], str] = {}
    for file in files:
        for part in PurePath(file).parts[-2:]:
            found = pattern.fullmatch(part)
            if found is not None:
                paths[tuple(int(number) for number in found.groups() if number is not None)] = file
    return FoundFiles(folder, paths)


@dataclass(frozen=True, slots=True)
class RankPart:
    """The file of a rank: its object, and the tensors in it by address."""

    path: str
    mark: FileVersion
    parts: PickledObject
    top: Mapping[str, Node]
    nodes: Mapping[str, tuple[str, str, Node]] = field(repr=False)

    @property
    def saved_as(self) -> str:
        """The name that torch.save gave the records: that of the file at that time; ``""`` where it is not recorded."""
        return str(getattr(self.parts.container, "root", ""))

    def named(self, holder: str) -> dict[str, str]:
        """Return name -> address of the tensors below the key `holder`, or of those at the top level for ``""``.

        Nested dicts, as of Megatron-LM before its core models, are flattened to dotted names.
        """
        made: dict[str, str] = {}
        for address, (at, key, _) in self.nodes.items():
            keys = (*keys_of(at), key)
            if not holder and len(keys) == 1:
                made[key] = address
            elif holder and keys[0] == holder and len(keys) > 1:
                made.setdefault(".".join(keys[1:]), address)
        return made

    def entry(self, address: str) -> TensorEntry:
        """Return the tensor at an address.

        Raises:
            DamagedFile: it is described wrongly, or it is not a plain tensor.
        """
        at, key, node = self.nodes[address]
        try:
            made = tensor_entry(node, key, at, self.parts.storages)
        except BadTensor as error:
            raise DamagedFile(str(error), path=self.path, where=address) from None
        if made.kind != "dense" or made.storage is None:
            raise DamagedFile(f"it is a {made.kind} tensor, and only a dense one can be joined", path=self.path,
                              where=address)  # fmt: skip
        return made


def open_part(path: str) -> RankPart:
    """Read the file of a rank. Raises the same errors as `read_torch`."""
    if isinstance(path, PlannedFile):
        own = FileVersion(path, FileStat(path.size))
    else:
        own = mark(path.whole if isinstance(path, WindowName) else path)
    parts = pickled_object(read_torch(path))
    nodes = {join(at, key): (at, key, node) for at, key, node in parts.found.tensors}
    return RankPart(path, own, parts, fields(parts.graph.root), nodes)


def plain(node: Node, depth: int = 4) -> object:
    """Return a value of plain types, such as a setting; None for anything else, which is never called or imported."""
    if type(node) is Text:
        return str(node)
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list | tuple) and depth and len(node) < 4096:
        return [plain(item, depth - 1) for item in node]
    return None


def settings_of(node: Node) -> dict[str, object]:
    """Return the settings in a dict or an argparse.Namespace that are plain values."""
    return {name: made for name, value in fields(node).items() if (made := plain(value)) is not None or value is None}


def json_settings(folder: str, name: str = PARAMETERS) -> dict[str, object]:
    """Return the settings in a JSON file of a folder; none if it is missing or cannot be read."""
    return json_object(str(as_path(folder, name)), MOST_TEXT) if is_place(folder) else {}


WHOLE = 1 << 20
ENDS = 1 << 16


def same_values(own: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two ranks have the same tensor.

    Checksums decide where the files state them for exactly these bytes. Otherwise up to 1 MiB is read, and of more the
    first and the last 64 KiB.
    """
    if (own.dtype, own.shape) != (other.dtype, other.shape):
        return False
    sums = [_sum(entry) for entry in (own, other)]
    if None not in sums:
        return sums[0] == sums[1]
    if not (own.is_contiguous and other.is_contiguous and own.has_data and other.has_data):
        return True
    one, two = own.data, other.data
    ends = [(0, own.nbytes)] if own.nbytes <= WHOLE else [(0, ENDS), (own.nbytes - ENDS, ENDS)]
    return all(
        b"".join(read_chunks(one.sub(first, size))) == b"".join(read_chunks(two.sub(first, size)))
        for first, size in ends
    )


def _sum(entry: TensorEntry) -> int | None:
    storage = entry.storage
    return storage.crc32 if storage is not None and storage.nbytes == entry.nbytes else None

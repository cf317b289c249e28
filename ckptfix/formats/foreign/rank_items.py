"""The items of a checkpoint of torch_checkpointing: the files of all ranks, as its metadata.pkl lists them.

::

    metadata.pkl      {"metadata": {ITEM: {"nested_path_to_metadata": {...}, "rank_to_layout_info": {RANK: LAYOUT}}},
                       "world_size": 2, "version": "2.0"}
    LAYOUT            None, or {"file_path": "model_0.safetensors", "serialization_format": {"type": ...}}
    ITEM_RANK.pt      the file of a rank where its layout is None

Only an item that can be loaded on other ranks is listed, and without such an item there is no metadata.pkl. Version 1.0
has the layouts in ``rank_to_layout_info_mappings``, by rank and item. Nothing in the pickle is called or imported.

Source: torch_checkpointing e57668f, distributed_metadata.py and checkpoint_layout.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import PurePosixPath

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, printable
from ckptfix.formats.members import RANKS_METADATA
from ckptfix.io.source import is_file, open_source
from ckptfix.pickles import parse
from ckptfix.pickles.graph import Node, pairs
from ckptfix.urls import as_path

TENSORS = {"TorchSerialization": "torch", "SafetensorsSerialization": "safetensors"}
"""The serializations of items that hold tensors."""

_MOST = 1 << 26
_MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class RankItem:
    """An item of a checkpoint of torch_checkpointing: its model, or the state of its optimizer.

    Attributes:
        files: rank -> the file, relative to the folder.
        format: ``"torch"`` or ``"safetensors"``.
        slices: what the metadata states of its tensors; None in version 1.0.
    """

    name: str
    files: Mapping[int, str]
    format: str
    slices: Node = field(default=None, repr=False, compare=False)

    @property
    def is_joined(self) -> bool:
        """True if the folder is read as one checkpoint: the metadata says where each slice belongs."""
        return self.format == "safetensors" and self.slices is not None

    def rank_of(self, file: str) -> int | None:
        """Return the rank whose file this is; None if it is of none."""
        return next((rank for rank, name in self.files.items() if name == file), None)


def rank_items(folder: str) -> list[RankItem]:
    """Return the items with tensors on several ranks, the model first; none if there is no metadata of them."""
    path = str(as_path(folder, RANKS_METADATA))
    try:
        if not is_file(path):
            return []
        with open_source(path) as source:
            if source.size > _MOST:
                return []
            graph = parse(source.read(0, source.size), path=path, frames=False, uses=False)
    except (CkptfixError, OSError):
        return []
    made = []
    about = texts(texts(graph.root).get("metadata"))
    for name, layouts in _layouts(graph.root).items():
        item = _item(name, layouts, texts(about.get(name)).get("nested_path_to_metadata"))
        if item is not None:
            made.append(item)
    return sorted(made, key=lambda item: (item.name != "model", item.name))


def consolidates(folder: str, item: RankItem) -> str:
    """Return the advice that joins the safetensors files of an item: their metadata says where each slice belongs."""
    call = f"consolidate_hf_safetensors_checkpoint({printable(folder)!r}, output_dir=OUT"
    call += ")" if item.name == "model" else f", item_key={printable(item.name)!r})"
    return f"torch_checkpointing joins them: {call} of torch_checkpointing.hf.consolidation"


def item_of(path: str) -> tuple[str, RankItem, int] | None:
    """Return (folder, item, rank) of the file of a rank; None if no metadata beside it, or one folder up, lists it."""
    place = as_path(path)
    for folder in (place.parent, place.parent.parent):
        name = place.relative_to(folder).as_posix()
        for item in rank_items(str(folder)):
            rank = item.rank_of(name)
            if rank is not None:
                return str(folder), item, rank
    return None


def _layouts(root: Node) -> dict[str, dict[int, Node]]:
    """Return item -> rank -> layout."""
    top = texts(root)
    found: dict[str, dict[int, Node]] = {}
    for name, about in texts(top.get("metadata")).items():
        if "rank_to_layout_info" in texts(about):
            found[name] = _numbers(texts(about)["rank_to_layout_info"])
    for rank, items in _numbers(top.get("rank_to_layout_info_mappings")).items():
        for name, layout in texts(items).items():
            found.setdefault(name, {})[rank] = layout
    return found


def _item(name: str, layouts: Mapping[int, Node], slices: Node) -> RankItem | None:
    files: dict[int, str] = {}
    formats: set[str | None] = set()
    for rank, layout in sorted(layouts.items()):
        if layout is None:
            files[rank] = f"{name}_{rank}.pt"
            formats.add("torch")
            continue
        own = texts(layout)
        file, kind = own.get("file_path"), texts(own.get("serialization_format")).get("type")
        if not isinstance(file, str) or not _is_inside(str(file)):
            return None
        files[rank] = str(file)
        formats.add(TENSORS.get(str(kind)))
    form = formats.pop() if len(formats) == 1 else None
    return RankItem(name, files, form, slices) if form is not None and len(files) > 1 else None


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return bool(file) and not path.is_absolute() and ".." not in path.parts and "\0" not in file and "\\" not in file


def texts(node: Node) -> dict[str, Node]:
    """Return the values of a dict under keys that are text; none for anything else."""
    return {str(key): value for key, value in pairs(node) or () if isinstance(key, str)}


def _numbers(node: Node) -> dict[int, Node]:
    """Return the values under ranks, which version 1.0 may have as text."""
    rows = {}
    for key, value in pairs(node) or ():
        text = str(key) if isinstance(key, int | str) and not isinstance(key, bool) else ""
        if text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < _MOST_RANKS:
            rows[int(text)] = value
    return rows

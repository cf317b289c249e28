"""The index of a sharded checkpoint: the file that holds each tensor.

::

    {"metadata": {"total_size": 123}, "weight_map": {"fc.weight": "model-00001-of-00002.safetensors", ...}}

Source: ``save_pretrained`` of transformers, which writes ``model.safetensors.index.json`` or
``pytorch_model.bin.index.json`` beside the shards; a variant is ``model.safetensors.index.fp16.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint import ByteRange, Segment
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadIndex
from ckptfix.io.source import open_source

MAX_INDEX = 1 << 26
"""The limit of bytes of an index: a name and its file take about 100."""

MAX_NAMES = 500_000
"""The limit of names in an index; the largest models have some 150,000 tensors."""

MAX_SHARDS = 10_000
"""The limit of files that an index names."""

MAX_PATH = 4096
"""The limit of characters in a path (``PATH_MAX`` of Linux)."""

INDEX = re.compile(r"\.index(\.[\w-]+)?\.json$")
OTHERS = re.compile(r"\.(h5|msgpack)\.index")
"""Indexes of TensorFlow and Flax weights."""

_ODD = re.compile(r"^\./|//|/\.(?:/|$)")
"""Parts of a path that have no meaning."""

_INDENT = re.compile(r"\{\r?\n([ \t]+)")


@dataclass(frozen=True, slots=True)
class Index:
    """An index as it was read.

    Attributes:
        path, size: the file and its size in bytes.
        text: its text.
        document: its parsed JSON.
        weight_map: name -> file, in order; ``./`` in front of a file is removed.
    """

    path: str
    size: int
    text: str
    document: Mapping[str, object]
    weight_map: Mapping[str, str]

    @property
    def total_size(self) -> object:
        """The size that it states for all tensors; None if it states no size."""
        about = self.document.get("metadata")
        return about.get("total_size") if isinstance(about, dict) else None

    def edited(self, names: Mapping[str, str | None], total: int | None = None) -> Segment:
        """Return the index with new names (None: dropped) and, if it states a total size, with the new total.

        It is byte for byte the same if nothing changes; otherwise it keeps its indentation.
        """
        weight_map: dict[str, str] = {}
        for name, shard in self.weight_map.items():
            new = names.get(name, name)
            if new is not None:
                weight_map[new] = shard
        return self.with_map(weight_map, total)

    def with_map(self, weight_map: Mapping[str, str], total: int | None = None) -> Segment:
        """Return the index with the given `weight_map`."""
        document = {**self.document, "weight_map": weight_map}
        about = self.document.get("metadata")
        if total is not None and isinstance(about, dict) and "total_size" in about:
            document["metadata"] = {**about, "total_size": total}
        about = document.get("metadata") == self.document.get("metadata")
        if about and list(weight_map.items()) == list(self.weight_map.items()):
            return ByteRange(self.path, 0, self.size)
        indent = _INDENT.match(self.text.lstrip("\ufeff"))
        end = self.text[len(self.text.rstrip()) :]
        return written(document, indent=indent[1] if indent else None, ascii=self.text.isascii()) + end.encode()


def written(document: Mapping[str, object], *, indent: str | int | None = 2, ascii: bool = True) -> bytes:
    """Return an index as JSON."""
    text = json.dumps(document, indent=indent, ensure_ascii=ascii)
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can hold
        return json.dumps(document, indent=indent).encode()


def read_index(path: str) -> Index:
    """Read the index `path`.

    Raises:
        BadIndex: it is not an index, or exceeds a limit.
    """
    with open_source(path) as reader:
        if reader.size > MAX_INDEX:
            raise BadIndex(f"not an index: it has {reader.size:,} bytes; the limit is {MAX_INDEX:,}", path=path)
        raw = reader.read(0, reader.size)
    try:
        text = raw.decode()
        document = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_unique)
    except RecursionError:
        raise BadIndex("not an index: its JSON is nested too deeply", path=path) from None
    except ValueError as error:
        raise BadIndex(f"not an index: {str(error).partition(';')[0][:200]}", path=path) from None
    rows = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(rows, dict) or not all(isinstance(shard, str) for shard in rows.values()):
        raise BadIndex("not an index: it has no weight_map from keys to files", path=path)
    if not rows:
        raise BadIndex("the index names no tensor", path=path)
    if len(rows) > MAX_NAMES:
        raise BadIndex(f"the index has {len(rows):,} keys; the limit is {MAX_NAMES:,}", path=path)
    longest = max(map(len, rows.values()), default=0)
    if longest > MAX_PATH:
        raise BadIndex(f"it names a file whose name has {longest:,} characters", path=path)
    count = len(set(rows.values()))
    if count > MAX_SHARDS:
        raise BadIndex(f"the index names {count:,} files; the limit is {MAX_SHARDS:,}", path=path)
    return Index(path, len(raw), text, document, {name: _plain(shard) for name, shard in rows.items()})


def _plain(shard: str) -> str:
    """Return a file's path normalized within its folder (``./a`` is ``a``), without resolving ``..`` or links."""
    return str(PurePosixPath(shard)) if shard and _ODD.search(shard) else shard


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key appears twice")
    return made


def looks_like_index(name: str, head: bytes) -> bool:
    """Return whether the name `name` and the first bytes `head` are those of an index of tensors."""
    if OTHERS.search(name) or not name.lower().endswith(".json"):
        return False
    return INDEX.search(name) is not None or b'"weight_map"' in head

"""The index of a sharded checkpoint: which file holds which tensor.

::

    {"metadata": {"total_size": 123}, "weight_map": {"fc.weight": "model-00001-of-00002.safetensors", ...}}

Source: ``save_pretrained`` of transformers, which writes ``model.safetensors.index.json`` or
``pytorch_model.bin.index.json`` beside the shards; a variant is ``model.safetensors.index.fp16.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ckptfix.checkpoint import ByteRange, Segment
from ckptfix.errors import BadIndex
from ckptfix.io.source import open_source

MAX_INDEX = 1 << 26
"""Bytes of an index that are read: a name and a file take some 100."""

MAX_NAMES = 500_000
"""Names in an index; the largest models have some 150,000 tensors."""

MAX_SHARDS = 10_000
"""Files that an index names."""

MAX_PATH = 4096
"""Characters of a path (``PATH_MAX`` of Linux)."""

INDEX = re.compile(r"\.index(\.[\w-]+)?\.json$")
OTHERS = re.compile(r"\.(h5|msgpack)\.index")
"""Indexes of TensorFlow's and Flax' weights."""

_ODD = re.compile(r"^\./|//|/\.(?:/|$)")
"""What may stand in a path without a meaning."""

_INDENT = re.compile(r"\{\r?\n([ \t]+)")


@dataclass(frozen=True, slots=True)
class Index:
    """An index as read.

    Attributes:
        path, size: the file and its bytes.
        text: what it says.
        document: the same as an object.
        weight_map: name -> file, in order; ``./`` in front of a file is left out.
    """

    path: str
    size: int
    text: str
    document: Mapping[str, object]
    weight_map: Mapping[str, str]

    @property
    def total_size(self) -> object:
        """What it says that the tensors take; None where it does not."""
        about = self.document.get("metadata")
        return about.get("total_size") if isinstance(about, dict) else None

    def edited(self, names: Mapping[str, str | None], total: int | None = None) -> Segment:
        """The index with other names (None: left out), and another total size where it states one.

        It is byte for byte the same where nothing changes; otherwise it is laid out as it was.
        """
        weight_map: dict[str, str] = {}
        for name, shard in self.weight_map.items():
            new = names.get(name, name)
            if new is not None:
                weight_map[new] = shard
        return self.with_map(weight_map, total)

    def with_map(self, weight_map: Mapping[str, str], total: int | None = None) -> Segment:
        """The same with another `weight_map`."""
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
    """An index as JSON."""
    text = json.dumps(document, indent=indent, ensure_ascii=ascii)
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can hold
        return json.dumps(document, indent=indent).encode()


def read_index(path: str) -> Index:
    """Read the index `path`.

    Raises:
        BadIndex: it is not an index, or one beyond measure.
    """
    with open_source(path) as reader:
        if reader.size > MAX_INDEX:
            raise BadIndex(f"not an index: {reader.size:,} bytes of JSON; at most {MAX_INDEX:,} are read", path=path)
        raw = reader.read(0, reader.size)
    try:
        text = raw.decode()
        document = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_unique)
    except RecursionError:
        raise BadIndex("not an index: JSON nested too deeply", path=path) from None
    except ValueError as error:
        raise BadIndex(f"not an index: {str(error).partition(';')[0][:200]}", path=path) from None
    rows = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(rows, dict) or not all(isinstance(shard, str) for shard in rows.values()):
        raise BadIndex("not an index: no weight_map from names to files", path=path)
    if not rows:
        raise BadIndex("an index that names no tensor", path=path)
    if len(rows) > MAX_NAMES:
        raise BadIndex(f"an index of {len(rows):,} names; at most {MAX_NAMES:,} are read", path=path)
    longest = max(map(len, rows.values()), default=0)
    if longest > MAX_PATH:
        raise BadIndex(f"it names a file of {longest:,} characters", path=path)
    count = len(set(rows.values()))
    if count > MAX_SHARDS:
        raise BadIndex(f"an index of {count:,} files; at most {MAX_SHARDS:,} are read", path=path)
    return Index(path, len(raw), text, document, {name: _plain(shard) for name, shard in rows.items()})


def _plain(shard: str) -> str:
    """The path of a file as its folder has it: ``./a`` is ``a``. One that leads elsewhere, or nowhere, stays so."""
    return str(PurePosixPath(shard)) if shard and _ODD.search(shard) else shard


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands in it twice")
    return made


def looks_like_index(name: str, head: bytes) -> bool:
    """Whether a file called `name` that begins with `head` is meant as an index of tensors."""
    if OTHERS.search(name) or not name.lower().endswith(".json"):
        return False
    return INDEX.search(name) is not None or b'"weight_map"' in head

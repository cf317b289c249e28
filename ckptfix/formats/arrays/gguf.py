"""GGUF, the files of llama.cpp: metadata, a table of tensors, and their data.

::

    "GGUF", version (u32), number of tensors (u64), number of pairs (u64); version 1 has u32 instead of u64
    pairs    key (length, UTF-8), type (u32), value; an array is the type of its items, their number, and they
    tensors  name, number of dimensions (u32), sizes (u64, the fastest first), type (u32), offset in the data (u64)
    data     at the next multiple of general.alignment, which is 32 if it is not stated

Every number is big-endian if the version is. Most types are blocks: 32 or 256 weights in 18 to 292 bytes. A tensor of
such a type is read as its bytes, one row of blocks after the other, with the type as its detail; `convert
--dequantize` computes its weights. Source: ggml/docs/gguf.md and ggml.c (``type_traits``).

A model may be split into several files, ``NAME-00001-of-00003.gguf`` and so on, which state their number in
``split.no``. The first one has the metadata of the model, and is read with the tensors of all
(llama.cpp src/llama-model-loader.cpp, tools/gguf-split).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ckptfix.checkpoint import ByteRange, Checkpoint, FileVersion
from ckptfix.checkpoint.quantization_signs import BLOCKS
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import step
from ckptfix.findings.table import found
from ckptfix.formats.arrays.common import Array, checkpoint_of, read_only
from ckptfix.formats.arrays.cursor import Cursor
from ckptfix.formats.members import GGUF_PART
from ckptfix.io.source import open_source
from ckptfix.urls import as_path

NAME = "gguf"
MAGIC = b"GGUF"

MOST_ROWS = 1 << 20
"""The limit of pairs, and of tensors, in a file."""

MOST_TEXT = 1 << 24
"""The limit in bytes of a text; a chat template has some thousands."""

MOST_ITEMS = 1 << 26
"""The limit of items in an array; vocabularies have up to 300,000."""

SHOWN = 200
"""Texts of up to this many characters become metadata; longer ones, and arrays, are named by their size."""

ALIGNMENT = "general.alignment"

NUMBER, COUNT = "split.no", "split.count"
"""The keys of the number of a file from 0 on, and of the number of files that a model is split into."""

MOST_FILES = 10_000


class GgmlType(NamedTuple):
    """A type of tensors.

    Attributes:
        name: its name in llama.cpp.
        weights, nbytes: of one block.
        dtype: torch's name; None for blocks that torch has no type for.
    """

    name: str
    weights: int
    nbytes: int
    dtype: str | None = None


TYPES: Mapping[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, "float32"),
    1: GgmlType("F16", 1, 2, "float16"),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1, "int8"),
    25: GgmlType("I16", 1, 2, "int16"),
    26: GgmlType("I32", 1, 4, "int32"),
    27: GgmlType("I64", 1, 8, "int64"),
    28: GgmlType("F64", 1, 8, "float64"),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2, "bfloat16"),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
}
"""Number of a type -> the type. Q8_1 has two half scales since 2024; no file holds it."""

# Type of a value -> its code for struct; 8 is text and 9 an array.
_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9


class _Row(NamedTuple):
    """A row of the table of tensors, its sizes in torch's order."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class _Header(Cursor):
    """Reader of the header."""

    order = "<"
    wide = "Q"

    def counts(self) -> tuple[int, int, int]:
        """Read the version, the number of tensors and that of pairs.

        Raises:
            Unsupported: the version is unknown, or the numbers are absurd.
        """
        self.take(len(MAGIC))
        version = self.number("<I")
        if version & 0xFFFF == 0:
            self.order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (1, 2, 3):
            raise Unsupported(f"GGUF version {version} is unknown", path=self.source.name, offset=4)
        if version == 1:
            self.wide = "I"
        tensors, pairs = self.size(), self.size()
        if max(tensors, pairs) > MOST_ROWS:
            message = f"{tensors:,} tensors and {pairs:,} pairs are more than a model has"
            raise Unsupported(message, path=self.source.name, offset=8)
        return version, tensors, pairs

    def size(self) -> int:
        made: int = self.number(self.order + self.wide)
        return made

    def text(self) -> str:
        at = self.at
        length = self.size()
        if length > MOST_TEXT:
            raise Unsupported(f"a text of {length:,} bytes is too long", path=self.source.name, offset=at)
        return self.take(length).decode("utf-8", "backslashreplace")

    def value(self, kind: int, level: int = 0) -> str:
        """Read a value, and return it as text; of an array, only the number of its items."""
        at = self.at
        if kind == _TEXT:
            text = self.text()
            return text if len(text) <= SHOWN else f"{len(text):,} characters"
        if kind in _VALUES:
            return str(self.number(self.order + _VALUES[kind]))
        if kind != _ARRAY or level > 3:
            raise DamagedFile(f"the type {kind} of a value is unknown", path=self.source.name, offset=at)
        inner, count = self.number(f"{self.order}I"), self.size()
        if count > MOST_ITEMS:
            raise Unsupported(f"an array of {count:,} items is too long", path=self.source.name, offset=at)
        if inner in _SIZES:
            self.skip(count * _SIZES[inner])
        else:
            for _ in range(count):
                if inner == _TEXT:
                    self.skip(self.size())
                else:
                    self.value(inner, level + 1)
        return f"{count:,} items"

    def row(self) -> _Row:
        """Read a row of the table of tensors."""
        at = self.at
        name = self.text()
        dimensions = self.number(f"{self.order}I")
        if dimensions > 8:
            raise DamagedFile(f"{name!r:.60} has {dimensions} dimensions", path=self.source.name, offset=at)
        sizes = [self.size() for _ in range(dimensions)]
        return _Row(name, tuple(reversed(sizes)), self.number(f"{self.order}I"), self.number(f"{self.order}Q"))


def score(path: str, head: bytes, size: int) -> int:
    """Return 100 for a file that begins like a GGUF file."""
    return 100 if head.startswith(MAGIC) else 0


class _File(NamedTuple):
    """A file as its header describes it.

    Attributes:
        start: the offset of the data.
        big: whether its numbers are big-endian.
    """

    seen: FileVersion
    version: int
    metadata: dict[str, str]
    rows: list[_Row]
    start: int
    big: bool

    def number(self, key: str, otherwise: int) -> int:
        """Return a number of the metadata."""
        text = self.metadata.get(key, "")
        return int(text) if text.isdecimal() else otherwise

    def arrays(self, findings: list[Finding]) -> Iterator[Array]:
        """Yield its tensors; one of an unknown type becomes a finding."""
        for row in self.rows:
            kind = TYPES.get(row.type)
            if kind is None:
                message = f"its type {row.type} is unknown, so nothing states how many bytes it has"
                findings.append(found("bad-tensor", message, where=row.name, offset=self.start + row.offset))
                continue
            yield _array(self.seen.path, row, kind, self.start, big=self.big)


def _opened(path: str) -> _File:
    with open_source(path) as source:
        header = _Header(source)
        version, tensors, pairs = header.counts()
        metadata: dict[str, str] = {}
        for _ in range(pairs):
            key = header.text()
            metadata[key] = header.value(header.number(f"{header.order}I"))
        rows = [header.row() for _ in range(tensors)]
        seen = FileVersion(source.name, source.mark)
    made = _File(seen, version, metadata, rows, 0, header.order == ">")
    alignment = made.number(ALIGNMENT, 32)
    if alignment < 1 or alignment & (alignment - 1):
        raise DamagedFile(f"the alignment {alignment} is not a power of two", path=path)
    return made._replace(start=-(-header.at // alignment) * alignment)


def read(path: str) -> Checkpoint:
    """Read metadata, names, shapes and places; see the contract in `base`.

    Raises:
        Truncated: the file ends inside the header.
        DamagedFile: the header contradicts itself.
        Unsupported: the version is unknown, or the header is too large.
    """
    first = _opened(path)
    findings: list[Finding] = []
    others = list(_others(first, findings))
    arrays = [array for file in (first, *others) for array in file.arrays(findings)]
    metadata = {key: value for key, value in first.metadata.items() if not (others and key.startswith("split."))}
    traits = {"version": first.version, "data at": first.start, **({"files": len(others) + 1} if others else {})}
    return checkpoint_of(
        path, NAME, first.seen.stamp.size, arrays, traits=traits, findings=findings, metadata=metadata,
        others=[file.seen for file in others],
    )  # fmt: skip


def _others(first: _File, findings: list[Finding]) -> Iterator[_File]:
    """Yield the other files of a split model; one that is missing becomes a finding."""
    number, count = first.number(NUMBER, 0), first.number(COUNT, 1)
    if count < 2:
        return
    path = as_path(first.seen.path)
    parts = GGUF_PART.fullmatch(path.name)
    if count > MOST_FILES or number >= count or parts is None or (int(parts[2]), int(parts[3])) != (number + 1, count):
        message = f"it is part {number + 1} of {count} of a model, and its name does not say where the others are"
        hint = f"name the files as llama.cpp does, such as model-{number + 1:05d}-of-{count:05d}.gguf"
        findings.append(found("missing-shard", message, where=path.name, fix=hint))
        return
    names = [f"{parts[1]}{part + 1:05d}-of-{count:05d}.gguf" for part in range(count)]
    if number:
        message = f"it is part {number + 1} of {count} of a model, which is read from {names[0]}"
        findings.append(found("missing-shard", message, where=path.name, fix=f"pass {names[0]}"))
        return
    for part, name in enumerate(names[1:], 1):
        try:
            file = _opened(str(as_path(path.parent, name)))
        except CkptfixError as error:
            message = f"part {part + 1} of {count} cannot be read: {error.message}"
            findings.append(found("missing-shard", message, where=name))
            continue
        if (file.number(NUMBER, 0), file.number(COUNT, 1)) != (part, count):
            message = f"its header states part {file.number(NUMBER, 0) + 1} of {file.number(COUNT, 1)}"
            findings.append(found("missing-shard", message, where=name))
            continue
        yield file


def _array(path: str, row: _Row, kind: GgmlType, start: int, *, big: bool) -> Array:
    """Return the array of a row: plain numbers, or the bytes of the blocks, one row of weights after the other."""
    shape = row.shape
    if kind.dtype is None:
        inner = shape[-1] if shape else 1
        shape = (*shape[:-1], inner // kind.weights * kind.nbytes)
    count = 1
    for size in shape:
        count *= size
    itemsize = kind.nbytes if kind.dtype is not None else 1
    data = ByteRange(path, start + row.offset, min(count * itemsize, 1 << 62))
    detail = "" if kind.dtype else f"{BLOCKS}{kind.name}"
    return Array(row.name, kind.dtype or "uint8", shape, data, big=big, detail=detail)


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings of every GGUF file; its blocks are dequantized when it is converted."""
    plain, *others = _READER.notes(checkpoint)
    blocks = any(entry.detail.startswith(BLOCKS) for entry in checkpoint.entries)
    yield plain.fixed_by(step("convert", to="safetensors", dequantize=True)) if blocks else plain
    yield from others


_READER = read_only(NAME, "GGUF model", score, read, finding="gguf-file")

FORMAT = replace(_READER, notes=notes)

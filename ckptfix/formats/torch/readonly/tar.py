"""torch.save before 0.1.10: a tar archive of four files.

::

    sys_info    pickle  {'protocol_version': 1000, 'little_endian', 'type_sizes'}
    pickle      pickle  the object; persistent ids are numbers of tensors and storages, as text, or
                        (class, its file, its source)
    tensors     pickle  their number; then for each a pickle (number, number of its storage, class), and
                        dimensions (4 bytes), 4 unused bytes, the sizes, the strides and the offset in the
                        storage (8 bytes each, all little-endian)
    storages    pickle  their number; then for each a pickle (number, location, class), the number of elements (8
                        bytes, little-endian), and the elements;
                pickle  views of storages: [(number, number of the underlying storage, first element, elements)]

Source: torch/serialization.py (``_legacy_load``, ``legacy_load``), which still reads them with weights_only=False.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ckptfix.checkpoint import ByteRange, Checkpoint
from ckptfix.errors import BadDirectory, BadPickle, DamagedFile, Truncated, TruncatedPickle, about
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import OF_OBJECTS, Format, plain_weights
from ckptfix.formats.foreign.archives import tar_members
from ckptfix.formats.signs import is_tar_header
from ckptfix.formats.torch import calls, weights_only
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch.readonly import common
from ckptfix.formats.torch.tensors import BadTensor, storage_dtype
from ckptfix.io.source import Source, open_source
from ckptfix.pickles import Call, Global, Graph, PersId, parse
from ckptfix.pickles.graph import Node
from ckptfix.pickles.paged import parse_paged

NAME = "tar"
MEMBERS = ("sys_info", "pickle", "tensors", "storages")

MOST_MEMBERS = 64
"""Most members that are examined: torch wrote only the four."""

ROW = 1 << 9
"""Bytes that are read first for a pickle of three values, which takes some 100."""

MOST_DIMENSIONS = 64


def score(path: str, head: bytes, size: int) -> int:
    """Return 90 for a tar archive with the four files, else 0."""
    if len(head) < 512 or not is_tar_header(head[:512]):
        return 0
    with open_source(path) as reader:
        return 90 if _members(reader).keys() >= set(MEMBERS) else 0


def _members(reader: Source) -> dict[str, tuple[int, int]]:
    """Return name -> (offset, offset after the end) of the files in the archive; the last one of a name counts."""
    rows = tar_members(reader, MOST_MEMBERS)
    return {name.removeprefix("./"): (offset, offset + length) for name, offset, length in rows}


class _Stored(NamedTuple):
    """A storage, or a view of one: `elements` elements from `first` on."""

    kind: Node
    dtype: str
    key: str
    location: str
    numel: int
    first: int
    elements: int


class _Files:
    """The four files, and the nodes that replace their contents in a zip.

    Attributes:
        found: the storages.
        findings: the findings so far.
    """

    def __init__(self, reader: Source) -> None:
        self.reader = reader
        self.members = _members(reader)
        self.found = common.FoundStorages()
        self.findings: list[Finding] = []
        self.globals: list[Global] = []
        self._storages: dict[int, _Stored] = {}
        self._tensors: dict[int, Call] = {}
        self._references: dict[int, PersId] = {}

    def span(self, name: str) -> tuple[int, int]:
        """Return the start and end of a file, limited to the end of the archive.

        Raises:
            BadDirectory: its size is negative.
        """
        start, end = self.members[name]
        if end < start:
            raise BadDirectory("the size of the member is negative", where=name, offset=start - 512)
        return start, min(end, self.reader.size)

    def row(self, at: int, end: int, where: str) -> Graph:
        """Parse the small pickle at `at`.

        Raises:
            BadPickle: it is not a pickle, or does not end before `end`.
        """
        for window in (ROW, end - at):
            data = self.reader.read(at, max(min(window, end - at), 0))
            try:
                graph = parse(data, where=where, base=at)
            except TruncatedPickle:
                if len(data) == end - at:
                    raise
                continue
            for node in graph.globals:
                node.start += at
            self.globals += graph.globals
            return graph
        raise BadPickle("the pickle has no end", where=where, offset=at)

    def count(self, name: str) -> tuple[int, int, int]:
        """Return (number of rows in a file, offset of the first, end of the file)."""
        at, end = self.span(name)
        graph = self.row(at, end, name)
        if type(graph.root) is not int or graph.root < 0:
            raise BadPickle("the row count is not a number", where=name, offset=at)
        return graph.root, at + graph.end, end

    def read_storages(self) -> None:
        """Read the storages; if the file ends before them, the rest is missing."""
        where = "storages"
        count, at, end = self.count(where)
        for done in range(count):
            try:
                graph = self.row(at, end, where)
                number, location, kind = _three(graph, at, where)
                at += graph.end
                numel = int.from_bytes(self.reader.read(at, 8), "little", signed=True)
            except Truncated:
                self._cut(f"{count - done} of {count} storages are absent")
                return
            if not isinstance(location, str) or numel < 0:
                raise BadPickle("a storage has no size or no location", where=where, offset=at)
            dtype = _dtype(kind, at)
            data = ByteRange(self.reader.name, at + 8, torch_common.expected_bytes(dtype, numel))
            at = data.end
            if at > end:
                self._cut(f"{at - end} bytes of storage {number} are absent")
                if done + 1 < count:
                    return
            key = self.found.add(data)
            self._storages[number] = _Stored(kind, dtype, key, str(location), numel, 0, numel)
        if at < end:
            self._read_views(at, end)

    def _cut(self, message: str) -> None:
        self.findings.append(found("truncated", f"the archive ends too early: {message}", offset=self.reader.size))

    def _read_views(self, at: int, end: int) -> None:
        rows = self.row(at, end, "storages").root
        for row in rows if isinstance(rows, list) else ():
            if type(row) is not tuple or len(row) != 4:
                raise BadPickle("a view of a storage is not a tuple of four values", where="storages", offset=at)
            number, root, first, count = (_number(value, at, "storages") for value in row)
            below = self._storages.get(root)
            if below is None or not 0 <= first <= first + count <= below.numel:
                raise BadPickle(f"a view of storage {root!r} is not inside it", where="storages", offset=at)
            self._storages[number] = below._replace(first=first, elements=count)

    def read_tensors(self) -> None:
        """Read the tensors."""
        where = "tensors"
        count, at, end = self.count(where)
        data = self.reader.read(at, end - at)
        place = 0
        for _ in range(count):
            graph = parse(data, start=place, where=where, base=at)
            for node in graph.globals:
                node.start += at
            self.globals += graph.globals
            number, storage, _ = _three(graph, at + place, where)
            place = graph.end
            try:
                (dimensions,) = struct.unpack_from("<i", data, place)
                if not 0 <= dimensions <= MOST_DIMENSIONS:
                    raise BadPickle(f"a tensor cannot have {dimensions} dimensions", where=where, offset=at + place)
                values = struct.unpack_from(f"<{2 * dimensions + 1}q", data, place + 8)
            except struct.error:
                raise Truncated("the file ends inside a tensor", where=where, offset=at + place) from None
            place += 8 + 8 * len(values)
            owner = self._storages.get(_number(storage, at + place, where))
            if owner is None:
                self._missing(f"tensor {number} is on storage {storage!r}, which the file lacks", at + place)
                continue
            shape, stride, offset = values[:dimensions], values[dimensions:-1], values[-1]
            hooks = Call(Global("collections", "OrderedDict", 0), (), "REDUCE", at + place)
            reference = common.reference(owner.kind, owner.key, owner.location, owner.numel)
            arguments = (reference, offset + owner.first, shape, stride, False, hooks)
            self._tensors[number] = calls.TENSOR_V2.call(*arguments, position=at + place)

    def _missing(self, message: str, offset: int) -> None:
        self.findings.append(found("bad-tensor", message, where="tensors", offset=offset))

    def stands_for(self, persid: PersId) -> Node:
        """Return the tensor, storage or class that a persistent id refers to; None if it refers to nothing."""
        pid = persid.pid
        if type(pid) is tuple and pid:
            return pid[0]
        try:
            number = _number(pid, persid.position, "pickle")
        except BadPickle:
            number = -1
        if number in self._tensors:
            return self._tensors[number]
        if number in self._references:
            return self._references[number]
        stored = self._storages.get(number)
        if stored is None:
            message = f"the object refers to number {number}, which is neither a tensor nor a storage"
            self.findings.append(found("bad-tensor", message, where="pickle", offset=persid.position))
            return None
        key = stored.key
        if stored.elements != stored.numel:
            whole = self.found.data[key]
            assert isinstance(whole, ByteRange)
            size = torch_common.expected_bytes(stored.dtype, 1)
            key = self.found.add(whole.sub(stored.first * size, stored.elements * size))
        self._references[number] = made = common.reference(stored.kind, key, stored.location, stored.elements)
        return made


def _number(value: Node, offset: int, where: str) -> int:
    """Return a number, which may be written as text.

    Raises:
        BadPickle: it is not a number.
    """
    if type(value) is int:
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20:
        return int(value)
    raise BadPickle("the value is not a number", where=where, offset=offset)


def _three(graph: Graph, offset: int, where: str) -> tuple[int, Node, Node]:
    row = graph.root
    if not isinstance(row, (tuple, list)) or len(row) != 3:
        raise BadPickle("a row does not have three values", where=where, offset=offset)
    return _number(row[0], offset, where), row[1], row[2]


def _dtype(kind: Node, offset: int) -> str:
    try:
        return storage_dtype(kind)
    except BadTensor as error:
        raise DamagedFile(error.message, where="storages", offset=offset) from None


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`."""
    with about(path), open_source(path) as reader:
        size = reader.size
        files = _Files(reader)
        files.read_storages()
        files.read_tensors()
        start, end = files.span("pickle")
        graph = parse_paged(reader.read, end, start=start, stays=lambda head: False, path=path, where="pickle")
        graph.globals += files.globals
        replaced = {id(persid): files.stands_for(persid) for persid in graph.persids}
        fresh = common.in_terms_of_zip(graph, replaced, path)
    traits = {"storages": len(files.found.data)}
    return common.checkpoint(path, NAME, size, fresh, files.found, traits, files.findings)


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings that every such file has."""
    plain = weights_only.refusal(torch_common.pickled_object(checkpoint).graph) is None
    yield found("torch-tar", fix=None if plain else "")
    yield found("no-mmap")
    yield found("no-checksums", "a tar has no checksums of its files: a flipped bit of the data would go unnoticed")


FORMAT = Format(
    name=NAME,
    title="PyTorch tar",
    suffixes=(),
    states=OF_OBJECTS - {"requires_grad", "parameter"},
    score=score,
    read=read,
    validate=torch_common.all_findings,
    weights=plain_weights,
    refuses=lambda entry: None,
    plan_edit=common.refuse_edit,
    plan_write=common.refuse_write,
    edits=False,
    writes=False,
    notes=notes,
)

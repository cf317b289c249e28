"""The storages of a plain pickle: each is a whole stream of torch.save, in the bytes of ``_load_from_bytes``.

``torch.storage._StorageBase.__reduce__`` writes them (torch/storage.py), in the legacy layout with a storage as the
object. The bytes stay in the file; only the pickles that describe them are read.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, Data, Derived, Storage
from ckptfix.errors import BadPickle, CkptfixError, DamagedFile, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found as finding
from ckptfix.formats.torch import legacy_layout
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.common import expected_bytes, fields
from ckptfix.formats.torch.readonly.common import FoundStorages
from ckptfix.formats.torch.tensors import BadTensor, viewed
from ckptfix.formats.torch.zip_layout import ZipStorages
from ckptfix.io.layers import WindowName
from ckptfix.io.read import cut, read_chunks
from ckptfix.io.source import Source, open_source
from ckptfix.pickles import Call, Graph, Text
from ckptfix.pickles.graph import Node
from ckptfix.pickles.paged import HEAD, UnreadBytes
from ckptfix.pickles.reemit import children_to_write, every_node
from ckptfix.zips.local import record_data

_HEADS = {0x58: 5, 0x8C: 2, 0x8D: 9}
"""Opcode that pushes text -> number of bytes before the text."""


def encoded_text(node: object) -> Text | None:
    """Return the text of bytes that are written as text; None for any other node."""
    if type(node) is Call and node.is_call_of("_codecs", "encode") and len(node.arguments) == 2:
        text, encoding = node.arguments
        if type(text) is Text and encoding in ("latin1", "latin-1"):
            return text
    return None


class EncodedPart(WindowName):
    """The name of a virtual file whose bytes are the characters of a text in another file.

    Python 3 pickles bytes this way with protocols 0 to 2; bytes from 128 on take two bytes of the text's UTF-8::

        _codecs.encode(TEXT, 'latin1')

    Every read decodes the text from its beginning, so the bytes of a tensor are a stream instead of a range.
    """

    raw: ByteRange

    @classmethod
    def of(cls, path: str, text: Text, opcode: int) -> EncodedPart:
        """Return the part for the bytes of `text`, which `opcode` pushes.

        Raises:
            BadPickle: a different opcode pushes it, such as those of protocol 0.
        """
        written = text.origin or text
        if opcode not in _HEADS:
            raise BadPickle("the pickle stores bytes as text of protocol 0", path=path, offset=written.start)
        start = written.start + _HEADS[opcode]
        part = cls(f"{path} @ {start:#x}", path, start, len(text))
        part.raw = ByteRange(path, start, written.end - start)
        return part

    def opened(self) -> Source:
        return _Characters(self)

    def in_whole(self, data: Data) -> Data:
        if not isinstance(data, ByteRange):
            return replace(data, sources=(self.raw,), blank=b"")
        first, count = data.offset, data.length
        return Derived(count, lambda: cut(_decoded(self.raw), first, count), "bytes of a text", (self.raw,))


class _Characters(Source):
    """The text as a file of its characters."""

    def __init__(self, part: EncodedPart) -> None:
        super().__init__(part, part.length, base=part.offset)
        self.raw = part.raw

    def _read(self, offset: int, length: int) -> bytes:
        end = min(2 * (offset + length), self.raw.length)
        return b"".join(cut(_decoded(self.raw.sub(0, end)), offset, length))


def _decoded(raw: ByteRange) -> Iterator[bytes]:
    """Yield the bytes that the text in `raw` encodes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in read_chunks(raw):
            yield decoder.decode(chunk).encode("latin-1")
    except UnicodeError as error:
        raise DamagedFile(f"a text does not encode bytes: {error}", path=raw.path, offset=raw.offset) from None


WINDOW = 1 << 10
"""Bytes of a stream that are read first: the five pickles around one storage take some 400."""

ZIP = b"PK\x03\x04"

Lookup = Callable[[str], tuple[Data | None, int | None]]
"""Function from a key to (location of a storage's bytes in the stream, their CRC-32 if stated); None for a missing
key.
"""


def begins_stream(head: bytes) -> bool:
    """Return whether bytes that begin with `head` are a stream of torch.save."""
    return legacy_layout.MAGIC_BYTES in head[:24] or head.startswith(ZIP)


class Streams:
    """The streams in one file: `node` returns the replacement of a stream, and `found` has the bytes of their storages.

    Attributes:
        graph: the graph of the file, to which the globals of the streams are added.
        findings: the findings so far.
        texts: ``id`` of a text in a stream -> the text as a plain str, because its offset is not one in the file.
    """

    def __init__(self, path: str, graph: Graph, found: FoundStorages, findings: list[Finding]) -> None:
        self.path = path
        self.graph = graph
        self.found = found
        self.findings = findings
        self.texts: dict[int, Node] = {}
        self._kept: list[Text] = []  # keeps the objects alive, so that their ids stay valid

    def node(self, stream: object, where: str = "_load_from_bytes") -> Node | None:
        """Return the object of the `stream`, in terms of the enclosing file; None for a damaged stream.

        Args:
            where: the place for the finding.
        """
        offset = 0
        try:
            part = self._part(stream)
            if part is None:
                raise BadPickle("the bytes of a storage are not a stream of torch.save")
            offset = part.offset
            with open_source(part) as reader:
                zipped = reader.read(0, min(len(ZIP), reader.size)) == ZIP
                graphs, lookup, start = self._zipped(part) if zipped else self._legacy(reader)
            self._refer(graphs[-1], part, lookup)
        except CkptfixError as error:
            offset += error.offset or 0
            self.findings.append(finding("bad-storage", error.message, where=where, offset=offset))
            return None
        for graph in graphs:
            self._move(graph, offset + start)
        return graphs[-1].root

    def _part(self, stream: object) -> WindowName | None:
        if type(stream) is UnreadBytes:
            return WindowName(f"{self.path} @ {stream.offset:#x}", self.path, stream.offset, stream.length)
        text = encoded_text(stream)
        if text is None or not begins_stream(text[:HEAD].encode("latin-1", "ignore")):
            return None
        return EncodedPart.of(self.path, text, self.graph.data[(text.origin or text).start])

    def _legacy(self, reader: Source) -> tuple[list[Graph], Lookup, int]:
        noted: list[Finding] = []
        *sides, graph, key_graph = legacy_layout.read_pickles(reader, window=WINDOW)
        if sides[0].root != legacy_layout.MAGIC or sides[1].root != legacy_layout.PROTOCOL:
            raise BadPickle("the magic number or protocol is computed, not written")
        keys = [str(key) for key in key_graph.root] if type(key_graph.root) is list else []
        storages = legacy_layout.read_storages(reader, graph, keys, key_graph.end, noted)
        if noted:
            raise DamagedFile(noted[0].message, offset=noted[0].offset)
        return [*sides, key_graph, graph], lambda key: (storages[key][0] if key in storages else None, None), 0

    def _zipped(self, part: WindowName) -> tuple[list[Graph], Lookup, int]:
        archive, graph = torch_zip.read_object(part)
        if not archive.pickle_ok:
            raise DamagedFile("the pickle of the archive does not match its CRC-32", offset=archive.pickle.header)
        with open_source(part) as reader:
            if torch_zip.small_record(reader, archive.directory, f"{archive.root}/byteorder") == "big":
                raise Unsupported("the pickle contains a big-endian archive")
            data = record_data(reader, archive.pickle)
        places = ZipStorages(part, archive)
        return [graph], lambda key: places(key)[::2], data.offset if isinstance(data, ByteRange) else 0

    def _move(self, graph: Graph, offset: int) -> None:
        """Add `graph` to the enclosing graph: shift the offsets of its calls and globals to those in the file."""
        for name in graph.globals:
            name.start += offset
        self.graph.globals += graph.globals
        self._plain((graph.root,))
        for node in every_node(graph.root):
            if type(node) is Call:
                node.position += offset
            self._plain(children_to_write(node))

    def _plain(self, parts: Iterable[Node]) -> None:
        """Add the texts among `parts` to `texts`."""
        for part in parts:
            if type(part) is Text:
                self.texts[id(part)] = str(part)
                self._kept.append(part)

    def _refer(self, graph: Graph, part: WindowName, lookup: Lookup) -> None:
        """Rename the storages of a stream, because different streams use the same keys."""
        keys: dict[object, str] = {}
        for persid in graph.persids:
            try:
                key, kind, location, numel = fields(persid)
                first, count = 0, numel
                if persid.fields[5:] not in ((), (None,)):
                    first, count = viewed(persid, Storage(key, kind, expected_bytes(kind, numel), location, None))
            except BadTensor:
                continue
            name = key, first, count
            if name not in keys and location != "meta":
                data, crc32 = lookup(key)
                if data is None:
                    continue
                if isinstance(data, ByteRange) and count != numel:
                    data, crc32 = data.sub(expected_bytes(kind, first), expected_bytes(kind, count)), None
                keys[name] = self.found.add(part.in_whole(data), crc32)
            persid.pid = ("storage", persid.fields[1], keys.get(name, key), location, count)

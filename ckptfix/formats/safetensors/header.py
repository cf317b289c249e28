"""The header of a safetensors file, read with the position of every key.

Layout (https://github.com/huggingface/safetensors, "Format")::

    8 bytes   N, little-endian
    N bytes   JSON in UTF-8, padded with spaces: {"__metadata__": {"format": "pt"},
              "fc.weight": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}, ...}
    the rest  tensor data, row-major and little-endian; offsets count from its start

``json.loads`` keeps the last of two equal keys and discards all positions. This module walks the two levels that edits
touch, member by member, and leaves only the values below them to the json module. Positions in the text are counted in
characters, since the text is spliced as text; a finding or error has the offset in the file instead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import field
from json import JSONDecodeError, JSONDecoder
from typing import NamedTuple, NoReturn, TypeGuard

from ckptfix.checkpoint import Checkpoint, FormatState
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadDirectory, Truncated
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.io.source import open_source

MAX_HEADER = 100_000_000
"""The longest header in bytes that readers accept (safetensors/src/tensor.rs, ``MAX_HEADER_SIZE``)."""

METADATA = "__metadata__"
ALIGNMENT = 8
_FIELDS = ("dtype", "shape", "data_offsets")

_OPEN = re.compile(r"\{[ \t\n\r]*")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_NEXT = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")
_BEFORE = re.compile(r"\ufeff?[ \t\n\r]*")
_AFTER = re.compile(r"[ \t\n\r]*")


class JsonMember(NamedTuple):
    """A member of a JSON object: its key, and the positions of key and value."""

    key: str
    start: int
    key_end: int
    value_start: int
    end: int


class HeaderEntry(NamedTuple):
    """A tensor as the header describes it.

    `shape` counts elements of `code`; `begin` and `stop` are byte offsets in the data.
    """

    key: str
    start: int
    key_end: int
    end: int
    code: str
    shape: tuple[int, ...]
    begin: int
    stop: int


class MetadataPair(NamedTuple):
    """A pair of ``__metadata__`` and its position."""

    key: str
    value: str
    start: int
    end: int


@dataclass(slots=True)
class Header(FormatState):
    """A header as it was read.

    Attributes:
        path, size: the file and its size in bytes.
        length: the size of the header in bytes, N.
        text: the decoded header, including padding.
        start, end: the span of its JSON object in `text`.
        rows: the tensors in the order of the header; both of two with the same name.
        metadata: the position of ``__metadata__``; None without it.
        pairs: the pairs in it.
        findings: faults in the text of the header.
    """

    path: str
    size: int
    length: int
    text: str
    start: int = 0
    end: int = 0
    rows: list[HeaderEntry] = field(default_factory=list)
    metadata: JsonMember | None = None
    pairs: list[MetadataPair] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def data_start(self) -> int:
        return 8 + self.length

    @property
    def data_size(self) -> int:
        """The number of bytes that follow the header, whatever it promises."""
        return self.size - self.data_start


def header_of(checkpoint: Checkpoint) -> Header:
    """Return the header that a safetensors checkpoint was read from."""
    header = checkpoint.inside
    assert isinstance(header, Header)
    return header


def read_header(path: str) -> Header:
    """Read the header of `path`, without any tensor bytes.

    Raises:
        Truncated: the file ends before its header does.
        BadDirectory: there is no header, or it describes no tensors.
        WriteFailed: the file cannot be read.
    """
    raw, size = bytes_of(path)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BadDirectory("the header is not UTF-8", path=path, where="header", offset=8 + error.start) from None
    header = Header(path, size, len(raw), text)
    del raw
    try:
        _Scan(header).run()
    except JSONDecodeError as error:
        _refuse(header, f"readers cannot parse its JSON: {error.msg}", error.pos)
    except RecursionError:
        _refuse(header, "its JSON is nested too deeply", 0)
    except ValueError as error:
        # Integers with more digits than Python converts, and values that the hooks below refuse.
        _refuse(header, str(error).partition(";")[0], 0)
    return header


def bytes_of(path: str) -> tuple[bytes, int]:
    """Return the bytes of the header, and the size of the file. Raises as `read_header` does."""
    with open_source(path) as reader:
        if reader.size < 8:
            raise Truncated(f"the header length takes 8 bytes, and the file has {reader.size}", path=path, offset=0)
        length = int.from_bytes(reader.read(0, 8), "little")
        if length > MAX_HEADER:
            raise BadDirectory(f"the header has {length:,} bytes; the limit is {MAX_HEADER:,}", path=path, offset=0)
        if length > reader.size - 8:
            raise Truncated(
                f"the header should have {length} bytes, and {reader.size - 8} are left",
                path=path,
                offset=8,
                hint="the file was cut short: copy or download it again",
            )
        return reader.read(8, length), reader.size


def _refuse(header: Header, message: str, position: int, where: str = "header") -> NoReturn:
    offset = byte_offsets(header.text, [position])[position]
    raise BadDirectory(message, path=header.path, where=where, offset=offset)


def byte_offsets(text: str, positions: Iterable[int]) -> dict[int, int]:
    """Return the file offsets of the characters at `positions` of a header's `text`, in one pass over the text."""
    places: dict[int, int] = {}
    last, offset = 0, 8
    for position in sorted(set(positions)):
        offset += len(text[last:position].encode())
        places[position] = offset
        last = position
    return places


def scan_object(text: str, at: int, member: Callable[[str, int, int, int], int]) -> int:
    """Walk the JSON object at `at`, and return the position behind it.

    Calls ``member(key, start, key_end, value_start)`` for each member, which returns the end of the value.

    Raises:
        ValueError: it is not a JSON object.
    """
    decode = DECODER.raw_decode
    opened = _OPEN.match(text, at)
    if opened is None:
        raise JSONDecodeError("an object was expected", text, at)
    at = opened.end()
    if text.startswith("}", at):
        return at + 1
    while True:
        if not text.startswith('"', at):
            raise JSONDecodeError("a quoted name was expected", text, at)
        key, key_end = decode(text, at)
        colon = _COLON.match(text, key_end)
        if colon is None:
            raise JSONDecodeError("a colon was expected", text, key_end)
        end = member(key, at, key_end, colon.end())
        after = _NEXT.match(text, end)
        if after is None:
            raise JSONDecodeError("a comma or a closing brace was expected", text, end)
        if after[1] == "}":
            return after.end(1)
        at = after.end()


def members(text: str, at: int) -> list[JsonMember]:
    """Return the members of the JSON object at `at`. Raises ValueError if it is not an object."""
    found: list[JsonMember] = []

    def note(key: str, start: int, key_end: int, value_start: int) -> int:
        end = DECODER.raw_decode(text, value_start)[1]
        found.append(JsonMember(key, start, key_end, value_start, end))
        return end

    scan_object(text, at, note)
    return found


def _fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field occurs twice in the description of one tensor")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = JSONDecoder(object_pairs_hook=_fields, parse_constant=_no_constant)


class _Note(NamedTuple):
    """A pending finding, with positions in the text; ``{first}`` in its message becomes the offset of `first`."""

    id: str
    where: str
    message: str
    position: int
    first: int


class _Scan:
    """One walk over the text of a header, which fills in a `Header`."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.seen: dict[str, int] = {}
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.pair_starts: dict[str, int] = {}
        self.notes: list[_Note] = []

    def run(self) -> None:
        header, text = self.header, self.header.text
        before = _BEFORE.match(text)
        header.start = before.end() if before else 0
        if header.start:
            what = "a byte order mark" if text[0] == "\ufeff" else "white space"
            self._note("leading-bytes", "", f"{what} before the header's opening brace", 0)
        header.end = scan_object(text, header.start, self._member)
        after = _AFTER.match(text, header.end)
        rest = after.end() if after else header.end
        if rest < len(text):
            if text.strip("\0") and text[rest:].strip("\0"):
                raise JSONDecodeError("more text after the closing brace", text, rest)
            self._note("nul-padding", "", "the header is padded with NUL bytes instead of spaces", rest)
        offsets = byte_offsets(text, (place for note in self.notes for place in (note.position, note.first)))
        for note in self.notes:
            message = note.message.format(first=hex(offsets[note.first]))
            header.findings.append(found(note.id, message, where=note.where, offset=offsets[note.position]))

    def _note(self, name: str, where: str, message: str, position: int, first: int = 0) -> None:
        self.notes.append(_Note(name, where, message, position, first))

    def _twice(self, first: int, again: int, where: str) -> None:
        message = "duplicate key, first at {first}: libraries disagree on which copy to load"
        self._note("duplicate-key", where, message, again, first)

    def _member(self, key: str, start: int, key_end: int, value_start: int) -> int:
        header = self.header
        first = self.seen.setdefault(key, start)
        if first != start:
            self._twice(first, start, key)
        if key == METADATA:
            return self._metadata(start, key_end, value_start)
        value, end = DECODER.raw_decode(header.text, value_start)
        if type(value) is not dict:
            _refuse(header, "the value is not the description of a tensor", start, key)
        code, shape, offsets = map(value.get, _FIELDS)
        if type(code) is not str:
            _refuse(header, "the tensor has no dtype", start, key)
        if not _is_sizes(shape):
            _refuse(header, "the shape is not a list of sizes", start, key)
        if not _is_sizes(offsets) or len(offsets) != 2:
            _refuse(header, "data_offsets is not a pair of positions", start, key)
        if len(value) > len(_FIELDS):
            self._note("unknown-field", key, "it has a field that no reader knows", start)
        sizes = tuple(shape)
        # Models repeat few dtypes and shapes; sharing them halves the memory of a long header.
        sizes = self.shapes.setdefault(sizes, sizes)
        header.rows.append(HeaderEntry(key, start, key_end, end, sys.intern(code), sizes, offsets[0], offsets[1]))
        return end

    def _metadata(self, start: int, key_end: int, value_start: int) -> int:
        header = self.header
        header.pairs.clear()
        if header.text.startswith("null", value_start):
            end = value_start + 4
        else:
            self.pair_starts.clear()
            end = scan_object(header.text, value_start, self._pair)
        header.metadata = JsonMember(METADATA, start, key_end, value_start, end)
        return end

    def _pair(self, key: str, start: int, key_end: int, value_start: int) -> int:
        where = f"{METADATA}/{key}"
        first = self.pair_starts.setdefault(key, start)
        if first != start:
            self._twice(first, start, where)
        value, end = DECODER.raw_decode(self.header.text, value_start)
        if type(value) is not str:
            _refuse(self.header, "the metadata value is not a string", start, where)
        self.header.pairs.append(MetadataPair(key, value, start, end))
        return end


def described(value: object) -> tuple[str, list[int], list[int]] | None:
    """Return dtype, shape and offsets of the description of a tensor; None if `value` is not one."""
    if type(value) is not dict:
        return None
    code, shape, offsets = map(value.get, _FIELDS)
    if type(code) is not str or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        return None
    return code, shape, offsets


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    """Return whether `value` is a list of integers that fit in unsigned 64-bit numbers."""
    if type(value) is not list:
        return False
    # A plain loop, not a generator expression: this runs twice for each tensor.
    for size in value:  # noqa: SIM110
        if type(size) is not int or not 0 <= size < 1 << 64:
            return False
    return True

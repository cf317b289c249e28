"""The fast reader of a `.metadata` as torch writes it.

For a checkpoint of 100,000 tensors, it has ten million opcodes that repeat the same pattern for each tensor: only
names and numbers differ. Entries are read whole, by the patterns below; opcodes between them, and entries in another
form, are read one by one. Anything else is left to the general pickle reader, which also reports faults: `skim` then
returns None.

The patterns are those of protocols 4 and 5, without their frames. Objects that were pickled before are fetched from the
memo, and new objects get the next number there (MEMOIZE).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.formats.torch.tensors import BadTensor, dtype_name
from ckptfix.pickles import Call, Dict, Global
from ckptfix.pickles.collector import gc_paused
from ckptfix.pickles.graph import Node
from ckptfix.pickles.opcodes import pushed_int, walk

GET = rb"(?:h.|j....)"
INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})"
INTS = rb"(?:\)|%b\x85\x94|%b\x86\x94|%b\x87\x94|\(%b{4,7}t\x94)" % (INT, INT * 2, INT * 3, INT)

_OBJECT = rb"(%b)\)\x81\x94\}\x94\(" % GET
"""The class, an object of it, and the dict of its attributes: two numbers."""

_SIZE = rb"(%b)(?:(%b)\x85\x94R\x94)?" % (GET, INTS)
"""``torch.Size`` and the tuple in it; or a size that was created before."""

_PROPERTIES = rb"(?:(%b)\)\x81\x94\((%b)(%b)[\x88\x89](%b)[\x88\x89]t\x94b|(%b))" % (GET, GET, GET, GET, GET)
"""Class, dtype, layout, requires_grad, memory format, pin_memory; or properties that were created before."""

TENSOR = re.compile(_OBJECT + rb"(%b)" % GET + _PROPERTIES + rb"(%b)" % GET + _SIZE + rb"(%b)\]\x94" % GET, re.DOTALL)
"""The opcodes after a tensor's name, up to its list of chunks: class, "properties", these, "size", that, "chunks"."""

CHUNK = re.compile(_OBJECT + rb"(%b)" % GET + _SIZE + rb"(%b)" % GET + _SIZE + rb"ub", re.DOTALL)
"""Class, "offsets", a size, "sizes", a size."""

VALUE = re.compile(rb"(%b)\)\x81\x94" % GET, re.DOTALL)
"""The opcodes after the name of a value: its class."""

INDEX = re.compile(_OBJECT + rb"(%b)" % GET, re.DOTALL)
"""Class and "fqn"; the name follows."""

BOX = re.compile(
    rb"(%b)(?:%b|N)(?:(%b)(?:N|%b))?ub" % (GET, INT, GET, _SIZE) + _OBJECT + rb"(%b)" % GET, re.DOTALL
)
"""The opcodes after the name in an index: "index", a number, "offset", a size; class of its place, "relative_path"."""

PLACE = re.compile(rb"(%b)(%b)(%b)(%b)ub" % (GET, INT, GET, INT), re.DOTALL)
"""The opcodes after the name of a file: "offset", a number, "length", a number."""

_ONE = re.compile(INT, re.DOTALL)


def numbers(pushed: bytes) -> tuple[int, ...]:
    """Return the numbers of a tuple."""
    return tuple(pushed_int(one) for one in _ONE.findall(pushed.removeprefix(b"("))) if pushed != b")" else ()


Sizes = tuple[int, ...]

MAX_SIZE = 1 << 63
MAX_PARTS = 100
"""The limit of sizes of a tensor, and of keys in a path; real programs stay below it."""


class Boxes(NamedTuple):
    """The metadata of a tensor: its dtype and shape, and the (offsets, sizes) of its chunks."""

    dtype: str
    shape: Sizes
    boxes: tuple[tuple[Sizes, Sizes], ...]


class StoredItem(NamedTuple):
    """The location of an item: its key, its offsets in the tensor, and `length` bytes at `offset` of a file."""

    fqn: str
    box: Sizes | None
    name: str
    offset: int
    length: int


class Otherwise(Exception):
    """Signal that the general pickle reader must take over."""


Row = tuple[Node, "Node | Boxes"]
WIDTHS = {0x4B: 2, 0x4D: 3, 0x4A: 5, 0x8A: 2}
"""The lengths in bytes of the opcodes that push a number; more bytes follow the last one."""

TUPLES = {0x29: 0, 0x85: 1, 0x86: 2, 0x87: 3}


class EntryReader:
    """A reader of entries and the memo numbers that they assign.

    A method that reads an entry takes the offset at which it begins, and returns its end. If the entry is written
    differently, it returns the same offset and changes nothing.

    Attributes:
        data: the opcodes, without frames.
        count: the number of memo entries so far.
        memo: the memo: strings of entries, and all objects that were read opcode by opcode.
        sizes: memo number -> sizes.
        kinds: memo number -> the dtype of the properties of a tensor.
        made: the entries that were read.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.count = 0
        self.memo: dict[int, Node] = {}
        self.sizes: dict[int, Sizes] = {}
        self.kinds: dict[int, str] = {}
        self.made: list[StoredItem | Row] = []
        # Keyed by opcodes: since a number is assigned only once, the same opcodes mean the same everywhere.
        self._dtypes: dict[bytes, str] = {}
        self._known: dict[bytes, Sizes] = {}
        self._size_gets: set[bytes] = set()
        self._same: set[tuple[bytes | None, ...]] = set()

    def text(self, pos: int) -> tuple[str, int]:
        """Return the string that is pushed at `pos`, and the end of its opcode."""
        data = self.data
        start = pos + 2 if data[pos] == 0x8C else pos + 5
        end = start + int.from_bytes(data[pos + 1 : start], "little")
        if end > len(data):
            raise Otherwise
        return str(data[start:end], "utf-8", "surrogatepass"), end

    def number(self, get: bytes) -> int:
        """Return the number that is fetched. Raises Otherwise if it is not assigned yet."""
        found = int.from_bytes(get[1:], "little")
        if found >= self.count:
            raise Otherwise
        return found

    def name(self, pos: int) -> tuple[str | None, int]:
        """Return the string that is pushed at `pos`, numbered or fetched, and its end; (None, `pos`) otherwise."""
        data = self.data
        code = data[pos]
        if code == 0x8C or code == 0x58:
            text, end = self.text(pos)
            if data[end] != 0x94:
                return None, pos
            self.memo[self.count] = text
            self.count += 1
            return text, end + 1
        if code != 0x68 and code != 0x6A:
            return None, pos
        end = pos + (2 if code == 0x68 else 5)
        value = self.memo.get(self.number(data[pos:end]))
        return (value, end) if isinstance(value, str) else (None, pos)

    def _size(self, get: bytes, pushed: bytes | None) -> Sizes:
        """Return a ``torch.Size``, from the numbers that are `pushed` or from the memo."""
        if pushed is None:
            index = self.number(get)
            found = self.sizes.get(index)
            if found is None:
                node = self.memo[index]
                made = node.args[0] if type(node) is Call and type(node.args) is tuple and node.args else None
                if type(made) is not tuple:
                    raise Otherwise
                found = self.sizes[index] = _checked(tuple(one if type(one) is int else -1 for one in made))
            return found
        if get not in self._size_gets:
            if not self._are(get, None):
                raise Otherwise
            self._size_gets.add(get)
        found = self._known.get(pushed)
        if found is None:
            found = self._known[pushed] = _checked(numbers(pushed))
        self.count += 2 if pushed == b")" else 3
        self.sizes[self.count - 1] = found
        return found

    def _dtype(self, get: bytes) -> str:
        """Return the dtype of the global that is fetched."""
        found = self._dtypes.get(get)
        if found is None:
            found = self._dtypes[get] = dtype_name(self.memo[self.number(get)])
        return found

    def _are(self, *rows: bytes | str | None) -> bool:
        """Return whether each opcode fetches the string that follows it, or a class if that is None."""
        for get, name in zip(rows[::2], rows[1::2], strict=True):
            assert isinstance(get, bytes)
            value = self.memo.get(self.number(get))
            if type(value) is not Global if name is None else value != name:
                return False
        return True

    def tensor(self, pos: int) -> int:
        """Read the entry of ``state_dict_metadata`` at `pos`, of a tensor or a value, and return its end."""
        data, before = self.data, self.count
        fqn, at = self.name(pos)
        found = None if fqn is None else TENSOR.match(data, at)
        if found is None:
            value = None if fqn is None else VALUE.match(data, at)
            if value is None or data[value.end()] not in _NEXT or not self._are(value[1], None):
                self.count = before
                return pos
            self.count += 1
            self.made.append((fqn, _VALUE))
            return value.end()
        cls, properties, own, dtype, layout, memory, shared, size, size_get, pushed, chunks = found.groups()
        names = cls, properties, own, layout, memory, size, chunks
        if names not in self._same:
            right = self._are(cls, None, properties, "properties", size, "size", chunks, "chunks")
            if own is not None:
                others = {self.number(layout), self.number(memory)}
                right = right and self._are(own, None) and others <= self.memo.keys()
            if not right:
                self.count = before
                return pos
            self._same.add(names)
        self.count += 2
        if own is not None:
            name = self._dtype(dtype)
            self.kinds[self.count] = name
            self.count += 2
        else:
            name = self._kind(shared)
        shape = self._size(size_get, pushed)
        if pushed is not None:
            # A tuple of its own: a shared tuple would be written as shared.
            shape = self.sizes[self.count - 1] = (*shape,)
        self.count += 1
        boxes, at = self._boxes(found.end())
        if data[at : at + 2] != b"ub":
            raise Otherwise
        self.made.append((fqn, Boxes(name, shape, boxes)))
        return at + 2

    def _kind(self, get: bytes) -> str:
        """Return the dtype of a TensorProperties that is fetched."""
        index = self.number(get)
        found = self.kinds.get(index)
        if found is None:
            node = self.memo[index]
            state = node.state if type(node) is Call else None
            if type(state) is not tuple or not state:
                raise Otherwise
            found = self.kinds[index] = dtype_name(state[0])
        return found

    def _boxes(self, pos: int) -> tuple[tuple[tuple[Sizes, Sizes], ...], int]:
        """Return the chunks that are appended to a list, and their end."""
        data = self.data
        boxes: list[tuple[Sizes, Sizes]] = []
        while data[pos] != 0x75:
            several = data[pos] == 0x28
            pos += several
            while (found := CHUNK.match(data, pos)) is not None:
                cls, offsets, offsets_get, begin, sizes, sizes_get, extent = found.groups()
                names = cls, offsets, sizes
                if names not in self._same:
                    if not self._are(cls, None, offsets, "offsets", sizes, "sizes"):
                        raise Otherwise
                    self._same.add(names)
                self.count += 2
                box = self._size(offsets_get, begin)
                boxes.append((box, self._size(sizes_get, extent)))
                pos = found.end()
                if not several:
                    break
            if data[pos] != (0x65 if several else 0x61) or (found is None and not several):
                raise Otherwise
            pos += 1
        return tuple(boxes), pos

    def path(self, pos: int) -> int:
        """Read the entry of ``planner_data`` at `pos`, and return its end."""
        data, before = self.data, self.count
        fqn, at = self.name(pos)
        path: list[Node] = []
        several = fqn is not None and data[at] == 0x28
        at += several
        while fqn is not None and len(path) <= MAX_PARTS:
            code = data[at]
            if code in TUPLES or code == 0x74:
                if (code == 0x74) is not several or (not several and len(path) != TUPLES[code]) or data[at + 1] != 0x94:
                    break
                self.count += 1
                self.made.append((fqn, tuple(path)))
                return at + 2
            if code in WIDTHS and code != 0x8A:
                path.append(pushed_int(data[at : at + WIDTHS[code]]))
                at += WIDTHS[code]
                continue
            part, end = self.name(at)
            if part is None:
                break
            path.append(part)
            at = end
        self.count = before
        return pos

    def item(self, pos: int) -> int:
        """Read the entry of ``storage_data`` at `pos`, and return its end."""
        data, before = self.data, self.count
        head = INDEX.match(data, pos)
        if head is None:
            return pos
        self.count += 2
        fqn, at = self.name(head.end())
        found = None if fqn is None else BOX.match(data, at)
        if found is None:
            self.count = before
            return pos
        index, box_name, size_get, pushed, cls, path = found.groups()
        box = None if size_get is None else self._size(size_get, pushed)
        self.count += 2
        name, at = self.name(found.end())
        place = None if name is None else PLACE.match(data, at)
        if fqn is None or name is None or place is None:
            self.count = before
            return pos
        offset, begin, length, size = place.groups()
        names = (*head.groups(), index, box_name, cls, path, offset, length)
        if names not in self._same:
            right = self._are(head[1], None, head[2], "fqn", index, "index", cls, None, path, "relative_path")
            right = right and self._are(offset, "offset", length, "length")
            if not right or (box_name is not None and not self._are(box_name, "offset")):
                self.count = before
                return pos
            self._same.add(names)
        self.made.append(StoredItem(fqn, box, name, pushed_int(begin), pushed_int(size)))
        return place.end()


SIZE = Global("torch", "Size", 0)
_VALUE = Call(Global("torch.distributed.checkpoint.metadata", "BytesStorageMetadata", 0), (), "NEWOBJ", 0)
_NEXT = frozenset((0x8C, 0x58, 0x68, 0x6A, 0x75))
"""The opcodes that may follow a value without a state: the next name, or the end of the entries."""


def _checked(sizes: Sizes) -> Sizes:
    if len(sizes) > MAX_PARTS or any(not 0 <= size < MAX_SIZE for size in sizes):
        raise Otherwise
    return sizes


@dataclass(slots=True)
class Skimmed:
    """The fields of a Metadata.

    Attributes:
        keys: name -> the metadata of a tensor, or its node; each name once.
        paths: the rows of ``planner_data``, each name once; None without it.
        items: the rows of ``storage_data``, in order.
        rest: its other fields.
    """

    keys: list[tuple[Node, Node | Boxes]] = field(default_factory=list)
    paths: list[tuple[Node, Node]] | None = None
    items: list[StoredItem | tuple[Node, Node]] = field(default_factory=list)
    rest: Mapping[str, Node] = field(default_factory=dict)


OTHERWISE = (IndexError, KeyError, ValueError, BadTensor, Otherwise)
"""The errors that end the reading of a pickle that torch would write differently, or that is incomplete."""


@gc_paused
def skim(data: bytes) -> Skimmed | None:
    """Return the content of the pickle `data`; None if torch would write it differently, or if it is incomplete."""
    unframed = opcodes_of(data)
    if unframed is None:
        return None
    try:
        return Skimmer(*unframed).run()
    except OTHERWISE:
        return None


def opcodes_of(data: bytes) -> tuple[bytes, list[int]] | None:
    """Return the opcodes without their frames, and the positions among them at which a frame begins.

    None if the frames do not follow each other to the end.
    """
    if data[:2] not in (b"\x80\x04", b"\x80\x05"):
        return None
    parts, begins, at, size = [], [], 2, 0
    while data[at : at + 1] == b"\x95":
        length = int.from_bytes(data[at + 1 : at + 9], "little")
        parts.append(data[at + 9 : at + 9 + length])
        begins.append(size)
        size += length
        at += 9 + length
    if parts and at != len(data):
        return None
    return (b"".join(parts), begins) if parts else (data[2:], [])


MAX_MARKS = 100

KEYS, PATHS, ITEMS = "state_dict_metadata", "planner_data", "storage_data"
READ = {KEYS: "tensor", PATHS: "path", ITEMS: "item"}
"""Dict of entries -> name of the method that reads an entry; bound methods would keep the machine in memory."""

_CONSTANTS: dict[int, Node] = {0x4E: None, 0x88: True, 0x89: False}


class Skimmer(EntryReader):
    """The machine that runs the opcodes of a `.metadata`."""

    def __init__(self, data: bytes, frames: list[int]) -> None:
        super().__init__(data)
        self.frames = frames[::-1]
        self.frame = self.frames[-1] if frames else len(data)
        self.bulk: dict[str, Dict] = {}
        self.begins: dict[int, str] = {}
        self.keys: list[Row] = []
        self.paths: list[Row] = []
        self.items: list[StoredItem | Row] = []

    def run(self) -> Skimmed:
        root = self._root()
        state = root.state if type(root) is Call else None
        if type(root) is not Call or type(state) is not Dict or root.args != () or root.how != "NEWOBJ":
            raise Otherwise
        fields = {name: value for name, value in state.items if isinstance(name, str)}
        if len(fields) != len(state.items) or KEYS not in self.bulk:
            raise Otherwise
        if any(fields.get(name) is not value for name, value in self.bulk.items()):
            raise Otherwise
        if any(fields.get(name) is not None and name not in self.bulk for name in READ):
            raise Otherwise
        paths = [(name, path) for name, path in self.paths if not isinstance(path, Boxes)]
        rest = {name: value for name, value in fields.items() if name not in READ}
        for rows in (self.keys, paths):
            if not all(isinstance(name, str) for name, _ in rows) or len({name for name, _ in rows}) != len(rows):
                raise Otherwise
        items = [row if type(row) is StoredItem else (row[0], row[1]) for row in self.items]
        return Skimmed(self.keys, paths if PATHS in self.bulk else None, items, rest)

    def _root(self) -> Node:
        """Run to the STOP, and return the object that it leaves."""
        data, memo = self.data, self.memo
        stack: list[Node] = []
        marks: list[list[Node]] = []
        entries: str | None = None
        pos = 0
        while True:
            if entries is not None and len(marks) == 2 and not len(stack) % 2:
                pos = self._entries(entries, stack, pos)
            if pos >= self.frame:
                self._begin_frames(pos, pos + 1)
            code = data[pos]
            if code == 0x94:  # MEMOIZE
                memo[self.count] = stack[-1]
                self.sizes.pop(self.count, None)
                self.kinds.pop(self.count, None)
                self.count += 1
                pos += 1
            elif code == 0x68 or code == 0x6A:  # BINGET, LONG_BINGET
                end = pos + (2 if code == 0x68 else 5)
                stack.append(self.got(pos, end))
                pos = end
            elif code == 0x8C or code == 0x58:  # SHORT_BINUNICODE, BINUNICODE
                text, pos = self.text(pos)
                stack.append(text)
            elif code in WIDTHS:
                end = pos + WIDTHS[code] + (data[pos + 1] if code == 0x8A else 0)
                if end > len(data):
                    raise Otherwise
                stack.append(pushed_int(data[pos:end]))
                pos = end
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
                pos += 1
            elif code == 0x28:  # MARK
                if len(marks) > MAX_MARKS:
                    raise Otherwise
                if len(marks) == 1 and stack:
                    entries = next((name for name, node in self.bulk.items() if node is stack[-1]), None)
                marks.append(stack)
                stack = []
                pos += 1
            elif code in TUPLES or code == 0x74:  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE
                count = TUPLES.get(code, len(stack))
                parts = stack[len(stack) - count :] if len(stack) >= count else None
                if parts is None or (code == 0x74 and entries is not None and len(marks) == 2):
                    raise Otherwise
                if code == 0x74:
                    stack = marks.pop()
                else:
                    del stack[len(stack) - count :]
                stack.append(tuple(parts))
                pos += 1
            elif code == 0x81 or code == 0x52:  # NEWOBJ, REDUCE
                args, func = stack.pop(), stack.pop()
                if type(func) is not Global:
                    raise Otherwise
                stack.append(Call(func, args, "NEWOBJ" if code == 0x81 else "REDUCE", pos))
                pos += 1
            elif code == 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                if not isinstance(name, str) or not isinstance(module, str):
                    raise Otherwise
                stack.append(Global(module, name, pos))
                pos += 1
            elif code == 0x7D:  # EMPTY_DICT
                fresh = Dict()
                key = stack[-1] if len(marks) == 1 and stack else None
                if isinstance(key, str) and key in READ:
                    if self.bulk.setdefault(key, fresh) is not fresh:
                        raise Otherwise
                    self.begins[pos] = key
                stack.append(fresh)
                pos += 1
            elif code == 0x75 or code == 0x73:  # SETITEMS, SETITEM
                if code == 0x75:
                    if len(marks) == 2:
                        entries = None
                    rows = stack
                    stack = marks.pop()
                else:
                    rows = stack[-2:]
                    del stack[-2:]
                self._set(stack[-1], rows)
                pos += 1
            elif code == 0x62:  # BUILD
                value, target = stack.pop(), stack[-1]
                if type(target) is not Call or target.state is not None:
                    raise Otherwise
                target.state = value
                pos += 1
            elif code == 0x5D:  # EMPTY_LIST
                stack.append([])
                pos += 1
            elif code == 0x65 or code == 0x61:  # APPENDS, APPEND
                if code == 0x61:
                    values = [stack.pop()]
                elif entries is not None and len(marks) == 2:
                    raise Otherwise
                else:
                    values = stack
                    stack = marks.pop()
                into = stack[-1]
                if type(into) is not list:
                    raise Otherwise
                into += values
                pos += 1
            elif code == 0x2E and len(stack) == 1 and not marks:  # STOP
                return stack[0]
            else:
                raise Otherwise

    def _set(self, target: Node, flat: list[Node]) -> None:
        """Set the keys and values of a flat list."""
        if type(target) is not Dict or len(flat) % 2:
            raise Otherwise
        rows = list(zip(flat[::2], flat[1::2], strict=True))
        name = next((name for name, node in self.bulk.items() if node is target), None)
        if name is None:
            target.items += rows
        else:
            self._add(name, rows)

    def _add(self, name: str, rows: Iterable[StoredItem | Row]) -> None:
        """Add entries of the dict `name`."""
        if name == ITEMS:
            self.items += rows
        else:
            into = self.keys if name == KEYS else self.paths
            into += (row for row in rows if not isinstance(row, StoredItem))

    def _entries(self, name: str, stack: list[Node], pos: int) -> int:
        """Read the entries of the dict `name` from `pos` on, and return their end."""
        read: Callable[[int], int] = getattr(self, READ[name])
        self.made = []
        while (end := read(pos)) != pos:
            if end > self.frame:
                self._begin_frames(pos, end)
            pos = end
        if self.made:
            self._set(self.bulk[name], stack)
            stack.clear()
            self._add(name, self.made)
        return pos

    def _begin_frames(self, start: int, end: int) -> None:
        """Note the frames that begin in ``data[start:end]``. Raises Otherwise if one begins inside an opcode."""
        opcodes = {opcode.start for opcode in walk(self.data, start, end)} if end > start + 1 else {start}
        while self.frame < end:
            if self.frame not in opcodes:
                raise Otherwise
            self.frames.pop()
            self.frame = self.frames[-1] if self.frames else len(self.data)

    def got(self, pos: int, end: int) -> Node:
        """Return the object that is fetched from `pos` to `end`; a size that an entry created, as its call."""
        index = self.number(self.data[pos:end])
        if index in self.sizes:
            return Call(SIZE, (self.sizes[index],), "REDUCE", 0)
        return self.memo[index]

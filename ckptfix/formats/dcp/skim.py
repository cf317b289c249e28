"""The fast reader of a `.metadata` as torch writes it.

For a checkpoint of 100,000 tensors, it has ten million opcodes that repeat the same pattern for each tensor: see
`phrases`. Entries are read whole; opcodes between them, and entries in another form, are read one by one. Anything else
is left to the general pickle reader, which also reports faults: `skim` then returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckptfix.formats.dcp.entries import SIZE, TUPLES, WIDTHS, Boxes, EntryReader, Otherwise, Row, StoredItem
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.pickles import Call, Dict, Global
from ckptfix.pickles.collector import gc_paused
from ckptfix.pickles.graph import Node
from ckptfix.pickles.opcodes import pushed_int, walk


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

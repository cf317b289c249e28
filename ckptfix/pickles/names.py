"""Survey of the globals in a stream of pickles, however long or broken it is, and of strings that may be pickles.

`machine.parse` returns a whole pickle, or an error. Here nothing is built: the stack and the memo hold only names.
Strings are skipped, and so is everything that no unpickler accepts, so that names after a break are found too. A
different unpickler, or a different version, may accept what this one would not. Memory does not grow with the stream,
which is read in windows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field

from ckptfix.dataclass import dataclass
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.collector import collector_paused
from ckptfix.pickles.machine import UNRESOLVABLE

Read = Callable[[int, int], bytes]
"""Function from (offset, length) to the bytes there."""

WINDOW = 1 << 20
AHEAD = 1 << 12
"""Bytes before the end of a window at which the next one is read: room for an opcode and its argument."""

LONGEST = 1024
"""Longest string, in bytes, that can be a name; no module name is longer."""

MAX_MARKS = 100_000
MOST_KEPT = 1 << 20
"""Most values on the stack or in the memo; beyond it nothing more is kept, and names that are joined from strings may
be missed.
"""

MOST_OPCODES = 20_000_000
"""Most opcodes that are examined: some ten seconds."""

MOST_NAMES = 10_000

MOST_INNER = 1 << 16


@dataclass(slots=True)
class Seen:
    """A global that the stream names, with the offsets of its first mention and of its first call."""

    module: str
    name: str
    at: int
    called: int | None = None


Kept = Seen | str | None
"""A value on the stack, if it can be a name or a part of one."""


@dataclass(frozen=True, slots=True)
class Inner:
    """A string that may be a pickle or a file: `length` bytes from `at` on; `text` if they are UTF-8 for Latin-1."""

    at: int
    length: int
    text: bool


@dataclass(slots=True)
class NameSurvey:
    """The names in a stream.

    Attributes:
        seen: each global once, in order.
        inner: strings that begin like a pickle, an archive or packed data.
        pickles: number of pickles that reached their STOP.
        end: the byte after the last opcode that was understood.
        whole: whether the last opcode that was understood is a STOP.
        cut: whether the stream was too long to be examined to its end.
        steps: number of opcodes that were examined.
        persids: whether a persistent id refers to a storage.
    """

    seen: list[Seen] = field(default_factory=list)
    inner: list[Inner] = field(default_factory=list)
    pickles: int = 0
    end: int = 0
    whole: bool = False
    cut: bool = False
    steps: int = 0
    persids: bool = False


MAGIC = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04|\x1f\x8b\x08|BZh|\xfd7zXZ\0|\x93NUMPY")
"""First bytes of a pickle of protocol 2 or later, and of files that may hold a pickle."""

OLD_MAGIC = re.compile(rb"\(*[ci][A-Za-z_][\w.]*\n|\([dl]p|\([SV]|[SV].*\n")
"""First bytes that a pickle of protocol 0 may have. Text may have them too, so only byte strings are matched."""

# opcode -> (values that it takes, values that it leaves); `_MARKED` lists those that take all values above a mark.
_EFFECT: dict[int, tuple[int, int]] = {
    **dict.fromkeys((op.APPEND, op.POP, op.BUILD), (1, 0)),
    **dict.fromkeys((op.SETITEM,), (2, 0)),
    **dict.fromkeys((op.NEWOBJ, op.REDUCE, op.TUPLE2), (2, 1)),
    **dict.fromkeys((op.NEWOBJ_EX, op.TUPLE3), (3, 1)),
    **dict.fromkeys((op.BINPERSID, op.TUPLE1, op.READONLY_BUFFER), (1, 1)),
    **dict.fromkeys((op.PROTO, op.FRAME), (0, 0)),
}
_MARKED: dict[int, int] = {
    **dict.fromkeys((op.TUPLE, op.LIST, op.DICT, op.FROZENSET, op.OBJ, op.INST), 1),
    **dict.fromkeys((op.POP_MARK, op.APPENDS, op.SETITEMS, op.ADDITEMS), 0),
}
_TEXTS = frozenset((op.BINUNICODE, op.SHORT_BINUNICODE, op.BINUNICODE8))
_STRINGS = frozenset((
    *_TEXTS, op.SHORT_BINSTRING, op.BINSTRING, op.BINBYTES, op.SHORT_BINBYTES, op.BINBYTES8, op.BYTEARRAY8,
))  # fmt: skip
_CALLS = frozenset((op.REDUCE, op.NEWOBJ, op.NEWOBJ_EX))
_PUTS = frozenset((op.BINPUT, op.LONG_BINPUT))
_GETS = frozenset((op.BINGET, op.LONG_BINGET))

_PLAIN: dict[int, tuple[int, int, int]] = {
    code: (op.FIXED.get(code, 0), *_EFFECT.get(code, (0, 1)))
    for code in op.CODES
    - {*op.COUNTED, *op.LINES, *op.GETS, *op.PUTS, *_MARKED, *_CALLS, op.MARK, op.STOP, op.POP, op.DUP, op.BINPERSID}
    - {op.STACK_GLOBAL, op.EXT1, op.EXT2, op.EXT4}
}
"""Opcodes that only take and leave values: (bytes of the argument, values taken, values left)."""


def survey(read: Read, start: int, stop: int, most: int = MOST_OPCODES) -> NameSurvey:
    """Collect the names in consecutive pickles from `start` to `stop`, up to the first byte that is not an opcode."""
    machine = _Names(read, start, stop)
    with collector_paused():
        machine.run(most)
    return machine.found


class _Names:
    """Interpreter that keeps only names: a value is a `Seen`, a string's text, or None.

    `stack` is the part above the last mark.
    """

    def __init__(self, read: Read, start: int, stop: int) -> None:
        self.read = read
        self.start = start
        self.stop = stop
        self.found = NameSurvey(end=start)
        self.names: dict[tuple[str, str], Seen] = {}
        self.memo: dict[int, Kept] = {}
        self.fresh()

    def fresh(self) -> None:
        """Prepare for the next pickle. An unpickler that reads several pickles keeps the memo of the earlier ones."""
        self.stack: list[Kept] = []
        self.marks: list[list[Kept]] = []
        self.older, self.memo = self.memo, {}

    def run(self, most: int) -> None:
        """Examine up to `most` opcodes."""
        found, plain, stop = self.found, _PLAIN, self.stop
        base = self.start
        data = self.read(base, min(WINDOW, stop - base)) if base < stop else b""
        ahead = base + len(data) - AHEAD
        at = base
        for step in range(most):
            found.steps = step
            if at > ahead and base + len(data) < stop:
                base, data = at, self.read(at, min(WINDOW, stop - at))
                ahead = base + len(data) - AHEAD
            here = at - base
            if here >= len(data):
                return
            code = data[here]
            arg = here + 1
            if code in plain:
                width, takes, leaves = plain[code]
                stack = self.stack
                if takes:
                    del stack[-takes:]
                if leaves and len(stack) < MOST_KEPT:
                    stack.append(None)
                end = at + 1 + width
                if end > stop:
                    return
            elif code in op.COUNTED:
                width = op.COUNTED[code]
                length = int.from_bytes(data[arg : arg + width], "little")
                arg += width
                end = base + arg + length
                if arg > len(data) or end > stop:
                    found.end = at
                    return
                if code in _STRINGS:
                    self.push(self.string(data, arg, length, base, code in _TEXTS))
                else:
                    self.push(None)
            elif code in op.LINES:
                lines = op.LINES[code]
                if (ends := _after_lines(data, arg, lines)) < 0 and at > base and base + len(data) < stop:
                    base, data = at, self.read(at, min(WINDOW, stop - at))
                    ahead = base + len(data) - AHEAD
                    continue
                if ends >= 0:
                    end = base + ends
                    self.line(code, data[arg : ends - 1], at)
                elif lines == 1 and (end := self.behind_line(at + 1)):
                    self.push(None)
                else:
                    return
            elif code in op.NAMES:
                ends = arg + op.FIXED.get(code, 0)
                if ends > len(data):
                    return
                end = base + ends
                self.everyday(code, data[arg:ends], at)
            else:
                return
            found.end = end
            found.whole = code == op.STOP
            at = end
        found.cut = True

    def behind_line(self, at: int) -> int:
        """Return the offset after the next line feed, however far away; 0 without a line feed."""
        while at < self.stop:
            data = self.read(at, min(WINDOW, self.stop - at))
            if (place := data.find(b"\n")) >= 0:
                return at + place + 1
            at += len(data)
        return 0

    def push(self, value: Kept) -> None:
        if len(self.stack) < MOST_KEPT:
            self.stack.append(value)

    def pop(self) -> Kept:
        return self.stack.pop() if self.stack else None

    def string(self, data: bytes, arg: int, length: int, base: int, text: bool) -> str | None:
        """Return a string as a possible name; one that may be a pickle or a file is recorded."""
        head = data[arg : arg + min(length, 64)]
        if text:
            # Protocol 2 writes bytes as text, decoded as Latin-1; the unpickler encodes them again.
            head = head.decode("utf-8", "ignore").encode("latin-1", "ignore")
        if length > 4 and (MAGIC.match(head) or (not text and OLD_MAGIC.match(head))):
            if len(self.found.inner) < MOST_INNER:
                self.found.inner.append(Inner(base + arg, length, text))
            else:
                self.found.cut = True
        return data[arg : arg + length].decode("utf-8", "replace") if length <= LONGEST else None

    def line(self, code: int, raw: bytes, at: int) -> None:
        """Execute an opcode whose argument is one or two lines of text."""
        if code in (op.GLOBAL, op.INST):
            module, _, name = raw.decode("utf-8", "replace").partition("\n")
            if code == op.INST:
                self.unmark()
            # Some writers end lines with a carriage return and a line feed.
            self.push(self.named(module.strip(), name.strip(), at))
            if code == op.INST:
                self.called(self.stack[-1], at)
        elif code in (op.GET, op.PUT):
            try:
                index = int(raw)
            except ValueError:
                return
            if code == op.PUT:
                self.put(index)
            else:
                self.push(self.fetched(index))
        elif code == op.PERSID:
            self.found.persids = True
            self.push(None)
        elif code in (op.UNICODE, op.STRING):
            self.push(_quoted(raw, code))
        else:
            self.push(None)

    def everyday(self, code: int, raw: bytes, at: int) -> None:
        """Execute an opcode whose argument has a fixed length."""
        if code in _PUTS:
            self.put(int.from_bytes(raw, "little"))
        elif code in _GETS:
            self.push(self.fetched(int.from_bytes(raw, "little")))
        elif code == op.MARK:
            if len(self.marks) < MAX_MARKS:
                self.marks.append(self.stack)
                self.stack = []
        elif code == op.STOP:
            self.found.pickles += 1
            self.fresh()
        elif code == op.MEMOIZE:
            self.put(len(self.memo))
        elif code == op.DUP:
            self.push(self.stack[-1] if self.stack else None)
        elif code == op.STACK_GLOBAL:
            name, module = self.pop(), self.pop()
            if not (isinstance(module, str) and isinstance(name, str)):
                module = name = UNRESOLVABLE
            self.push(self.named(module, name, at))
        elif code in (op.EXT1, op.EXT2, op.EXT4):
            self.push(self.named("copyreg", f"_extension_registry[{int.from_bytes(raw, 'little')}]", at))
        elif code == op.POP and not self.stack:
            self.unmark()
        elif code in _MARKED:
            items = self.unmark()
            if code == op.OBJ:
                self.called(items[0] if items else None, at)
            self.stack += [None] * _MARKED[code]
        else:
            self.found.persids |= code == op.BINPERSID
            takes, leaves = _EFFECT.get(code, (0, 1))
            first = None
            for _ in range(takes):
                first = self.pop()
            if code in _CALLS:
                self.called(first, at)
            for _ in range(leaves):
                self.push(None)

    def unmark(self) -> list[Kept]:
        """Return the values above the last mark, and remove the mark."""
        items = self.stack
        self.stack = self.marks.pop() if self.marks else []
        return items

    def put(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        if len(self.memo) < MOST_KEPT or index in self.memo:
            self.memo[index] = self.stack[-1] if self.stack else None

    def fetched(self, index: int) -> Kept:
        return self.memo[index] if index in self.memo else self.older.get(index)

    def named(self, module: str, name: str, at: int) -> Seen:
        """Record a global, and return its entry."""
        seen = self.names.get((module, name))
        if seen is None:
            seen = Seen(module, name, at)
            if len(self.names) < MOST_NAMES:
                self.names[module, name] = seen
                self.found.seen.append(seen)
        return seen

    def called(self, value: Kept, at: int) -> None:
        """Record a call of `value`, if it is a global."""
        if type(value) is Seen and value.called is None:
            value.called = at


def _after_lines(data: bytes, arg: int, lines: int) -> int:
    """Return the offset after `lines` line feeds; -1 if the window does not hold them."""
    end = arg
    for _ in range(lines):
        end = data.find(b"\n", end) + 1
        if not end:
            return -1
    return end


def _quoted(raw: bytes, code: int) -> str | None:
    """Return the text of a line of protocol 0, as exactly as a module name needs it."""
    if len(raw) > LONGEST:
        return None
    try:
        if code == op.UNICODE:
            return raw.decode("raw-unicode-escape")
        return raw.strip(b" '\"").decode("unicode-escape")
    except UnicodeDecodeError:
        return None

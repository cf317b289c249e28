"""The machine that reads a pickle into inert nodes.

One loop over the bytes, most frequent opcodes first: a checkpoint of 100,000 tensors is some four million
opcodes, the metadata of a distributed one eleven million. It resolves no global, calls nothing, and keeps the byte
span of every string. Input that no unpickler would accept raises BadPickle with its offset.
"""

from __future__ import annotations

import codecs
import os
import struct
from collections.abc import Callable, Iterable

from ckptfix.errors import BadPickle, TruncatedPickle
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.collector import collector_paused
from ckptfix.pickles.folded import Memo, Phrases
from ckptfix.pickles.graph import Call, Dict, Global, Node, PersId, Set, Text, set_rows, use_of
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.rows import Rows

UNRESOLVABLE = "<unresolvable>"
SHORT = 200
MAX_REPEATED = 1 << 26
"""Most characters in strings longer than `SHORT` that are fetched from the memo: names are fetched once or twice."""

MAPPINGS = ("OrderedDict", "Counter")
"""Classes of `collections` on which the unpickler of weights_only=True sets items."""


def _py2_text(raw: bytes, start: int, end: int) -> Text | bytes:
    """Return a Python 2 str as text if it is UTF-8 (as torch decodes it), else as bytes."""
    try:
        return use_of(raw.decode("utf-8"), start, end)
    except UnicodeDecodeError:
        return raw


class RareOpcodes:
    """State of the machine, and every opcode that is not in its loop.

    `memo` maps an index to a node; `stack` is the part above the last mark, `marks` are the parts below. `common` is
    the function whose calls are folded, once the stream has named it, and `folds` tells whether calls are folded at
    all.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.at = graph.start
        self.phrases = Phrases(graph.data)
        self.memo = Memo(self.phrases)
        self.common: Global | None = None
        self.folds = type(graph.data) is bytes
        self.repeated = 0
        self.stack: list[Node] = []
        self.marks: list[list[Node]] = []

    def rare(self, code: int, pos: int) -> int:
        """Execute an opcode outside the everyday set at `pos`; return the offset of the next one."""
        graph = self.graph
        data = graph.data
        size = len(data)
        stack = self.stack
        self.at = pos
        if code == op.PROTO:
            graph.protocol = data[pos + 1]
            if graph.protocol > 5:
                raise BadPickle(f"pickle protocol {graph.protocol} does not exist")
            return pos + 2
        if code == op.NONE:
            stack.append(None)
        elif code == op.EMPTY_LIST:
            stack.append([])
        elif code == op.SETITEM:
            value = stack.pop()
            key = stack.pop()
            self.set_items(stack[-1], [(key, value)], pos)
        elif code == op.APPEND:
            value = stack.pop()
            self.extend(stack[-1], [value], pos)
        elif code == op.GLOBAL:
            end = data.index(b"\n", data.index(b"\n", pos) + 1) + 1
            module, name, _ = data[pos + 1 : end].split(b"\n")
            self.add_global(module.decode("utf-8"), name.decode("utf-8"), pos)
            return end
        elif code == op.BINFLOAT:
            stack.append(struct.unpack_from(">d", data, pos + 1)[0])
            return pos + 9
        elif code in (op.LONG1, op.LONG4):
            if code == op.LONG4:
                graph.rare.setdefault(code, pos)
            width = 1 if code == op.LONG1 else 4
            count = int.from_bytes(data[pos + 1 : pos + 1 + width], "little", signed=code == op.LONG4)
            end = pos + 1 + width + count
            if count < 0 or end > size:
                raise BadPickle(f"an integer has {count} bytes, but only {size - pos - 1 - width} are left")
            stack.append(int.from_bytes(data[pos + 1 + width : end], "little", signed=True))
            return end
        else:
            graph.rare.setdefault(code, pos)
            return self.rarer(code, pos)
        return pos + 1

    def rarer(self, code: int, pos: int) -> int:
        """Execute an opcode that torch does not usually write; return the offset of the next one."""
        graph = self.graph
        data = graph.data
        stack = self.stack
        if code in (op.SHORT_BINSTRING, op.BINSTRING):
            end, raw = self.counted(pos, 1 if code == op.SHORT_BINSTRING else 4)
            stack.append(_py2_text(raw, pos, end))
            return end
        if code in (op.SHORT_BINBYTES, op.BINBYTES, op.BINBYTES8, op.BYTEARRAY8):
            end, raw = self.counted(pos, {op.SHORT_BINBYTES: 1, op.BINBYTES: 4}.get(code, 8))
            stack.append(bytearray(raw) if code == op.BYTEARRAY8 else raw)
            return end
        if code == op.BINUNICODE8:
            end, raw = self.counted(pos, 8)
            stack.append(use_of(raw.decode("utf-8", "surrogatepass"), pos, end))
            return end
        if code in (op.FLOAT, op.INT, op.LONG, op.STRING, op.UNICODE, op.PERSID, op.GET, op.PUT):
            return self.line(code, pos)
        if code == op.FRAME:
            length = int.from_bytes(data[pos + 1 : pos + 9], "little")
            if pos + 9 + length > len(data):
                raise TruncatedPickle(f"a frame has {length} bytes, but only {len(data) - pos - 9} are left")
            graph.frames.append((pos, length))
            return pos + 9
        if code == op.EMPTY_SET:
            stack.append(Set("set", []))
        elif code == op.ADDITEMS:
            items = self.pop_mark()
            extend(self.stack[-1], items)
        elif code == op.FROZENSET:
            items = self.pop_mark()
            self.stack.append(Set("frozenset", items))
        elif code == op.STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            if isinstance(module, str) and isinstance(name, str):
                self.add_global(module, name, pos)
            else:
                self.add_global(UNRESOLVABLE, UNRESOLVABLE, pos)
        elif code == op.NEWOBJ_EX:
            kwargs, args = stack.pop(), stack.pop()
            stack[-1] = Call(stack[-1], args, "NEWOBJ_EX", pos, kwargs)
        elif code == op.LIST:
            items = self.pop_mark()
            self.stack.append(items)
        elif code == op.DICT:
            items = self.pop_mark()
            if len(items) % 2:
                raise BadPickle("DICT has a key without a value")
            node = Dict()
            node.items.extend(zip(items[::2], items[1::2], strict=True))
            self.stack.append(node)
        elif code == op.OBJ:
            items = self.pop_mark()
            self.stack.append(Call(items[0], tuple(items[1:]), "OBJ", pos))
        elif code == op.INST:
            end = data.index(b"\n", data.index(b"\n", pos) + 1) + 1
            module_line, name_line, _ = data[pos + 1 : end].split(b"\n")
            args = tuple(self.pop_mark())
            self.add_global(module_line.decode("utf-8"), name_line.decode("utf-8"), pos)
            self.stack[-1] = Call(self.stack[-1], args, "INST", pos)
            return end
        elif code == op.POP:
            if stack:
                stack.pop()
            else:
                self.stack = self.marks.pop()
        elif code == op.POP_MARK:
            self.pop_mark()
        elif code == op.DUP:
            stack.append(self.again(stack[-1], pos, pos + 1))
        elif code in (op.EXT1, op.EXT2, op.EXT4):
            raise BadPickle("the pickle has an extension code (EXT), which only the registry of its writer can resolve")
        elif code in (op.NEXT_BUFFER, op.READONLY_BUFFER):
            raise BadPickle("the pickle has an out-of-band buffer, whose bytes are not in the stream")
        else:
            raise BadPickle(f"unknown opcode {code:#x} in a pickle")
        return pos + 1

    def again(self, value: Node, pos: int, end: int) -> Node:
        """Return the value that ``data[pos:end]`` pushes again: for a string, a use that can be edited separately."""
        if type(value) is not Text:
            return value
        self.repeat(value)
        use = use_of(value, pos, end, value)
        self.graph.loose_gets.append(use)
        return use

    def line(self, code: int, pos: int) -> int:
        """Execute an opcode of protocol 0, whose argument is a line of text."""
        data = self.graph.data
        end = data.index(b"\n", pos) + 1
        raw = data[pos + 1 : end - 1]
        value: Node
        if code == op.GET or code == op.PUT:
            if code == op.PUT:
                self.memo[int(raw)] = self.stack[-1]
                return end
            value = self.again(self.memo[int(raw)], pos, end)
        elif code == op.INT:
            value = {b"00": False, b"01": True}.get(raw)
            value = int(raw) if value is None else value
        elif code == op.LONG:
            value = int(raw.removesuffix(b"L"))
        elif code == op.FLOAT:
            value = float(raw)
        elif code == op.UNICODE:
            value = use_of(raw.decode("raw-unicode-escape"), pos, end)
        elif code == op.PERSID:
            value = PersId(raw.decode("ascii"), pos, -1)
            self.graph.loose_persids.append(value)
        else:
            if len(raw) < 2 or raw[0] != raw[-1] or raw[0] not in b"'\"":
                raise BadPickle("STRING has no quotes")
            value = _py2_text(codecs.escape_decode(raw[1:-1])[0], pos, end)
        self.stack.append(value)
        return end

    def counted(self, pos: int, width: int) -> tuple[int, bytes]:
        """Return the end of the opcode at `pos` and its bytes, whose count takes `width` bytes."""
        data = self.graph.data
        first = pos + 1 + width
        count = int.from_bytes(data[pos + 1 : first], "little")
        if first + count > len(data):
            raise BadPickle(f"{count} bytes are expected, but only {max(len(data) - first, 0)} are left")
        return first + count, data[first : first + count]

    def pop_mark(self) -> list[Node]:
        """Return the values above the last mark, and remove the mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def set_items(self, target: Node, items: Iterable[tuple[Node, Node]], pos: int) -> None:
        """Execute SETITEM or SETITEMS, which the unpickler of weights_only=True allows on three kinds of mapping."""
        set_items(target, items)
        if type(target) is Call and not any(target.is_call_of("collections", name) for name in MAPPINGS):
            self.graph.misuses.append((pos, "items are set on something that is not a dict, OrderedDict or Counter"))

    def extend(self, target: Node, values: list[Node], pos: int) -> None:
        """Execute APPEND or APPENDS, which the unpickler of weights_only=True allows on a list."""
        extend(target, values)
        if type(target) is not list:
            self.graph.misuses.append((pos, "values are appended to something that is not a list"))

    def repeat(self, value: Text) -> None:
        """Count a string that is fetched from the memo, because each use is a copy."""
        if len(value) > SHORT:
            self.repeated += len(value)
            if self.repeated > MAX_REPEATED:
                raise BadPickle(f"strings are fetched so often that they take over {MAX_REPEATED} bytes")

    def add_global(self, module: str, name: str, pos: int) -> None:
        """Push a global, and note the function whose calls are folded."""
        node = Global(str(module), str(name), pos)
        self.graph.globals.append(node)
        self.stack.append(node)
        if self.folds and name == "_rebuild_tensor_v2" and module == "torch._utils":
            self.common = node

    def fold(self, at: int) -> int:
        """Fold the call of `common` whose arguments begin at `at`.

        Returns:
            Its number; -1 if it is not written like most calls.
        """
        if self.common is None:  # the fetched value is None
            return -1
        return self.phrases.read(self.common, at, self.memo)

    def fold_items(self, row: int, get: bytes, stack: list[Node], marks: list[list[Node]]) -> int:
        """Read the folded call `row`, and the keys and folded calls after it.

        The bytes `get` fetch the function each time. If the stream sets the items on a mapping next, the mapping keeps
        them as rows; otherwise they are pushed on the stack.

        Returns:
            Where they end.
        """
        assert self.common is not None
        phrases = self.phrases
        at = phrases.end_of(row)
        if self.graph.data[at : at + 1] != b"X":  # BINUNICODE: a key
            stack.append(phrases.call(row))
            return at
        at = phrases.run(self.common, get, at, self.memo)
        last = len(phrases.starts)
        key = stack[-1] if len(stack) % 2 else None
        target = marks[-1][-1] if marks and marks[-1] else None
        if (
            type(key) is Text
            and (type(target) is Dict or type(target) is Call)
            and self.graph.data[at : at + 1] == b"u"  # SETITEMS
            and phrases.take_key(row, key, len(get))
        ):
            if type(target.rows) is not Rows:
                set_rows(target, Rows(phrases, target.items))
            assert type(target.rows) is Rows
            target.rows.extend(zip(stack[:-1:2], stack[1::2], strict=True))
            target.rows.take(row, last)
            stack.clear()
            return at
        stack.append(phrases.call(row))
        for following in range(row + 1, last):
            stack += (phrases.key(following), phrases.call(following))
        return at

    def count_memo(self) -> None:
        """Stop folding: MEMOIZE counts the entries of the memo, so that it must be complete from here on."""
        self.memo.spread()
        self.common = None
        self.folds = False


def set_items(target: Node, items: Iterable[tuple[Node, Node]]) -> None:
    """Set items on a mapping, as an unpickler would."""
    if (type(target) is Dict or type(target) is Call) and target.rows is not None:
        target.rows.extend(items)
    elif type(target) is Dict:
        target.items.extend(items)
    elif type(target) is Call:
        if target.items is None:
            target.items = []
        target.items.extend(items)
    else:
        raise BadPickle(f"items are set on a {_kind(target)}")


def extend(target: Node, items: list[Node]) -> None:
    """Append elements to a list, a set or an object, as an unpickler would."""
    if type(target) is list:
        target.extend(items)
    elif type(target) is Set:
        target.elements.extend(items)
    elif type(target) is Call:
        if target.elements is None:
            target.elements = []
        target.elements.extend(items)
    else:
        raise BadPickle(f"values are appended to a {_kind(target)}")


def build(target: Node, state: Node) -> None:
    """Set the state of an object, as BUILD does."""
    if type(target) is not Call:
        raise BadPickle(f"state is set on a {_kind(target)}")
    # A second BUILD on one object is legal and adds to the first; both remain reachable.
    target.state = state if target.state is None else (target.state, state)


def _kind(node: Node) -> str:
    return {Text: "string", Dict: "dict", PersId: "persistent id", Global: "global"}.get(
        type(node), type(node).__name__
    )


MAX_BYTES = 1 << 30
"""Longest stream in bytes; each opcode costs at most some 200 bytes of memory."""

MAX_MARKS = 100_000
"""Most open marks; CPython's own pickler stops at a depth of about a thousand."""


RawData = Callable[[Node, int], "tuple[Node, int] | None"]
"""Function from (the object just built, the offset after the opcode) to (its value, the offset after its data); None
for an object that has no data there.
"""


def parse(
    data: bytes,
    *,
    start: int = 0,
    path: str | os.PathLike[str] | None = None,
    where: str | None = None,
    base: int = 0,
    frames: bool = True,
    uses: bool = True,
) -> Graph:
    """Read the pickle that begins at ``data[start]``, up to its STOP.

    Args:
        data: the stream; bytes after STOP are ignored (`Graph.end` is where it stopped).
        path, where, base: for errors: the file, the record, and the offset of ``data[0]`` in it.
        frames: check that frames hold whole opcodes, which `splice` requires.
        uses: create a separate `Text` for each use of a string, which edits of strings require.

    Raises:
        TruncatedPickle: the data ends before STOP, or inside an opcode.
        BadPickle: the data has an unknown opcode, a stack underflow, an unusable argument, ...
    """
    if len(data) - start > MAX_BYTES:
        message = f"a pickle of {len(data) - start} bytes exceeds the limit of {MAX_BYTES}"
        raise BadPickle(message, path=path, where=where)
    machine = Machine(Graph(data, start))
    machine.uses = uses
    return finish(machine, path=path, where=where, base=base, framed=frames)


def finish(
    machine: Machine,
    *,
    path: str | os.PathLike[str] | None = None,
    where: str | None = None,
    base: int = 0,
    framed: bool = True,
) -> Graph:
    """Run `machine` to its STOP, and return its graph; with `framed`, check that frames hold whole opcodes.

    Raises like `parse`.
    """
    graph = machine.graph
    try:
        with collector_paused():
            machine.run()
        if framed:
            _check_frames(graph)
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error, BadPickle) as error:
        size = len(graph.data)
        kind = TruncatedPickle if isinstance(error, TruncatedPickle) or _starved(machine) else BadPickle
        raise kind(_reason(error, machine, size), path=path, where=where, offset=base + min(machine.at, size)) from None
    return graph


def _starved(machine: Machine) -> bool:
    """Return whether the current opcode needs bytes after the end of the data."""
    data = machine.graph.data
    if machine.at >= len(data):
        return True
    try:
        next(op.walk(data, machine.at, len(data)))
    except ValueError:
        return data[machine.at] in op.CODES
    return False


def _reason(error: Exception, machine: Machine, size: int) -> str:
    """Return the message for an error at the current opcode."""
    if isinstance(error, BadPickle):
        return error.message
    if machine.at >= size:
        return "the pickle ends without STOP"
    code = machine.graph.data[machine.at]
    name = op.NAMES.get(code)
    if name is None:
        return f"unknown opcode {code:#x} in a pickle"
    if isinstance(error, KeyError):
        return f"{name} fetches a memo entry that was never stored"
    if isinstance(error, IndexError):
        return f"{name} takes more values than the stack holds, or runs past the end"
    return f"{name} has an unusable argument ({error})"


def _check_frames(graph: Graph) -> None:
    """Raise `BadPickle` unless frames hold whole opcodes: an editor that changes their lengths relies on it."""
    if not graph.frames:
        return
    ends = {start + 9 + length for start, length in graph.frames}
    boundaries = {opcode.end for opcode in op.walk(graph.data, graph.start, graph.end)}
    if not ends <= boundaries:
        raise BadPickle("a FRAME ends inside an opcode")


class Machine(RareOpcodes):
    """Interpreter of a pickle. `run` fills `graph`; `at` is the offset of the current opcode, for errors.

    `u32` takes the data and an offset, and returns a tuple with the 4-byte number there. `raw` returns the value that
    an object represents if bytes that are not opcodes follow it. With `uses`, each use of a string is a `Text`.
    """

    u32: Callable[[bytes, int], tuple[int]] = struct.Struct("<I").unpack_from
    raw: RawData | None = None
    uses = True

    def run(self) -> None:
        """Execute the opcodes up to STOP."""
        graph = self.graph
        data = graph.data
        size = len(data)
        memo = self.memo
        stack = self.stack
        marks = self.marks
        gets = graph.loose_gets
        persids = graph.loose_persids
        pos = graph.start
        last_tuple: Node = None
        last_tuple_at = -1
        new_text = Text
        used = Text if self.uses else None
        new_global = Global
        memoize_at = short_text_at = -1
        u32, raw = self.u32, self.raw
        try:
            while True:
                code = data[pos]
                if code == 0x72:  # LONG_BINPUT
                    memo[u32(data, pos + 1)[0]] = stack[-1]
                    pos += 5
                elif code == 0x94:  # MEMOIZE
                    if self.common is not None:
                        self.count_memo()
                    memo[len(memo)] = stack[-1]
                    if memoize_at < 0:
                        memoize_at = pos
                    pos += 1
                elif code >= 0x80:
                    if code == 0x85:  # TUPLE1
                        stack[-1] = (stack[-1],)
                        pos += 1
                    elif code == 0x86:  # TUPLE2
                        value = stack.pop()
                        stack[-1] = (stack[-1], value)
                        pos += 1
                    elif code == 0x81:  # NEWOBJ
                        args = stack.pop()
                        func = stack[-1]
                        if type(func) is not new_global:
                            graph.misuses.append((pos, "NEWOBJ creates an object of something that is not a class"))
                        stack[-1] = Call(func, args, "NEWOBJ", pos)
                        pos += 1
                    elif code == 0x8C:  # SHORT_BINUNICODE
                        end = pos + 2 + data[pos + 1]
                        if end > size:
                            raise BadPickle(f"a string has {end - pos - 2} bytes, but only {size - pos - 2} are left")
                        if short_text_at < 0:
                            short_text_at = pos
                        use = new_text(data[pos + 2 : end], "utf-8", "surrogatepass")
                        use.start = pos
                        use.end = end
                        use.origin = None
                        stack.append(use)
                        pos = end
                    elif code == 0x87:  # TUPLE3
                        value = stack.pop()
                        middle = stack.pop()
                        stack[-1] = (stack[-1], middle, value)
                        pos += 1
                    elif code == 0x89:  # NEWFALSE
                        stack.append(False)
                        pos += 1
                    elif code == 0x88:  # NEWTRUE
                        stack.append(True)
                        pos += 1
                    else:
                        self.stack = stack
                        pos = self.rare(code, pos)
                        stack = self.stack
                elif code == 0x4B:  # BININT1
                    stack.append(data[pos + 1])
                    pos += 2
                elif code == 0x68 or code == 0x6A:  # BINGET, LONG_BINGET
                    if code == 0x68:
                        end = pos + 2
                        value = memo[data[pos + 1]]
                    else:
                        end = pos + 5
                        value = memo[u32(data, pos + 1)[0]]
                    if type(value) is used:
                        if len(value) > SHORT:
                            self.repeat(value)
                        use = new_text(value)
                        use.start = pos
                        use.end = end
                        use.origin = value
                        gets.append(use)
                        stack.append(use)
                    else:
                        if value is self.common and (row := self.fold(end)) >= 0:
                            end = self.fold_items(row, data[pos:end], stack, marks)
                        else:
                            stack.append(value)
                    pos = end
                elif code == 0x58:  # BINUNICODE
                    end = pos + 5 + u32(data, pos + 1)[0]
                    if end > size:
                        raise BadPickle(f"a string has {end - pos - 5} bytes, but only {size - pos - 5} are left")
                    use = new_text(data[pos + 5 : end], "utf-8", "surrogatepass")
                    use.start = pos
                    use.end = end
                    use.origin = None
                    stack.append(use)
                    pos = end
                elif code == 0x28:  # MARK
                    if len(marks) > MAX_MARKS:
                        raise BadPickle(f"more than {MAX_MARKS} marks are open: no program nests values so deeply")
                    marks.append(stack)
                    stack = []
                    pos += 1
                elif code == 0x74:  # TUPLE
                    last_tuple = tuple(stack)
                    last_tuple_at = pos
                    stack = marks.pop()
                    stack.append(last_tuple)
                    pos += 1
                elif code == 0x52:  # REDUCE
                    args = stack.pop()
                    func = stack[-1]
                    if type(func) is not new_global:
                        graph.misuses.append((pos, "REDUCE calls something that is not a function"))
                    stack[-1] = Call(func, args, "REDUCE", pos)
                    pos += 1
                elif code == 0x4D:  # BININT2
                    stack.append(data[pos + 1] | data[pos + 2] << 8)
                    pos += 3
                elif code == 0x51:  # BINPERSID
                    pid = stack[-1]
                    persid = PersId(pid, pos, last_tuple_at if pid is last_tuple else -1)
                    persids.append(persid)
                    stack[-1] = persid
                    pos += 1
                elif code == 0x71:  # BINPUT
                    memo[data[pos + 1]] = stack[-1]
                    pos += 2
                elif code == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                    pos += 1
                elif code == 0x4A:  # BININT
                    stack.append(int.from_bytes(data[pos + 1 : pos + 5], "little", signed=True))
                    pos += 5
                elif code == 0x75:  # SETITEMS
                    items = stack
                    stack = marks.pop()
                    if len(items) % 2:
                        raise BadPickle("SETITEMS has a key without a value")
                    self.set_items(stack[-1], zip(items[::2], items[1::2], strict=True), pos)
                    pos += 1
                elif code == 0x62:  # BUILD
                    value = stack.pop()
                    build(stack[-1], value)
                    pos += 1
                    made = raw(stack[-1], pos) if raw is not None else None
                    if made is not None:
                        stack[-1], pos = made
                elif code == 0x7D:  # EMPTY_DICT
                    stack.append(Dict())
                    pos += 1
                elif code == 0x65:  # APPENDS
                    items = stack
                    stack = marks.pop()
                    self.extend(stack[-1], items, pos)
                    pos += 1
                elif code == 0x2E:  # STOP
                    graph.root = stack.pop()
                    graph.end = pos + 1
                    graph.phrases = self.phrases if self.phrases.starts else None
                    return
                else:
                    self.stack = stack
                    pos = self.rare(code, pos)
                    stack = self.stack
        finally:
            self.at = pos
            for code, at in ((op.MEMOIZE, memoize_at), (op.SHORT_BINUNICODE, short_text_at)):
                if at >= 0:
                    graph.rare[code] = at

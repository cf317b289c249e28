"""Opcodes outside the hot loop: the rest of protocol 2, and all of 0, 1, 3, 4 and 5."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Iterable

from ckptfix.errors import BadPickle, TruncatedPickle
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.folded import Memo, Phrases
from ckptfix.pickles.graph import Call, Dict, Global, Node, PersId, Set, Text, set_rows, use_of
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.rows import Rows

UNRESOLVABLE = "<unresolvable>"
SHORT = 200
MAX_REPEATED = 1 << 26
"""Most characters in strings longer than `SHORT` that are fetched from the memo: names are fetched once or twice."""

_MAPPINGS = ("OrderedDict", "Counter")


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
        if type(target) is Call and not any(target.is_call_of("collections", name) for name in _MAPPINGS):
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

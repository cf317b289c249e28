"""The machine that reads a pickle into inert nodes.

One loop over the bytes, most frequent opcodes first: a checkpoint of 100,000 tensors is some four million
opcodes, the metadata of a distributed one eleven million. It resolves no global, calls nothing, and keeps the byte
span of every string. Input that no unpickler would accept raises BadPickle with its offset.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from ckptfix.errors import BadPickle, TruncatedPickle
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.collector import collector_paused
from ckptfix.pickles.graph import Call, Dict, Global, Node, PersId, Text
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.rare import SHORT, RareOpcodes, build

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

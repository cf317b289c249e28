"""Splicing: new strings replace the spans that pushed the old ones, and nothing else changes.

A string that the memo shares among many uses is edited use by use. If the new value of a use differs from that of its
memo entry, the string is written out in place of the fetch. That costs some bytes but needs no new memo entry, so
implicit numbering (MEMOIZE) remains valid.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping
from io import BytesIO
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.graph import Text
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.rows import Rows


class Patch(NamedTuple):
    """A replacement of ``data[start:end]`` by `new`."""

    start: int
    end: int
    new: bytes


def string_opcode(value: str, protocol: int, like: int = op.BINUNICODE, used: Container[int] = ()) -> bytes:
    """Return the opcode and argument that push `value` under `protocol`.

    `like` is the opcode that it replaces: a Python 2 str remains one, so that readers decode it in the same way. An
    opcode that weights_only=True refuses is written only if it is in `used`, the opcodes that the stream already has.
    So an edit never turns a file that weights_only=True accepts into one that it refuses, whatever protocol the stream
    claims.
    """
    if like == op.BINUNICODE and op.SHORT_BINUNICODE not in used:
        return _binunicode(value)
    if like in (op.SHORT_BINSTRING, op.BINSTRING, op.STRING):
        raw = value.encode("utf-8")
        if len(raw) < 256 and like != op.STRING:
            return bytes((op.SHORT_BINSTRING, len(raw))) + raw
        if like != op.SHORT_BINSTRING or op.BINSTRING in used:
            return bytes((op.BINSTRING,)) + len(raw).to_bytes(4, "little") + raw
    raw = value.encode("utf-8", "surrogatepass")
    if like == op.UNICODE and protocol == 0:
        return bytes((op.UNICODE,)) + value.translate(_ESCAPED).encode("raw-unicode-escape") + b"\n"
    if op.SHORT_BINUNICODE in used and len(raw) < 256:
        return bytes((op.SHORT_BINUNICODE, len(raw))) + raw
    return _binunicode(value)


_ESCAPED = {ord(char): f"\\u{ord(char):04x}" for char in "\\\0\n\r\x1a"}
"""Characters that a line of a pickle can only hold escaped: a backslash would begin an escape."""


def _binunicode(value: str) -> bytes:
    """Return the BINUNICODE opcode that pushes `value`."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


Replaced = tuple[int, int, bytes]
"""The fields of a `Patch`, as a plain tuple."""


class KeyPatches:
    """The patches that rename keys of folded calls, in order; each is created when it is read.

    Args:
        rows: the items whose keys are renamed.
        nodes: keys that are already nodes, whose patches are created like those of other strings.
        names: old -> new.
        protocol, used: as in `string_opcode`.
    """

    def __init__(
        self, rows: Rows, nodes: Iterable[Text], names: Mapping[str, str], protocol: int, used: Container[int]
    ) -> None:
        self.rows = rows
        self.nodes = frozenset(node.start for node in nodes)
        self.names = names
        self.protocol = protocol
        self.used = used

    def __iter__(self) -> Iterator[Replaced]:
        """Yield the patches, except for keys that are nodes: `string_patches` creates those."""
        get, protocol, used, nodes = self.names.get, self.protocol, self.used, self.nodes
        plain = op.SHORT_BINUNICODE not in used
        for start, end, name in self.rows.spans():
            new = get(name)
            if new is not None and new != name and start not in nodes:
                made = _binunicode(new) if plain else string_opcode(new, protocol, op.BINUNICODE, used)
                yield start, end, made


class Patches:
    """Patches of nodes, and of keys that are not nodes, in the order of the stream."""

    def __init__(self, others: list[Patch], renamed: list[KeyPatches]) -> None:
        self.others = others
        self.renamed = sorted(renamed, key=lambda one: one.rows.ranges[0].start)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __iter__(self) -> Iterator[Replaced]:
        if not self.renamed:
            yield from self.others
            return
        others = sorted(self.others)
        at = 0
        for patch in chain.from_iterable(self.renamed):
            while at < len(others) and others[at] < patch:
                yield others[at]
                at += 1
            yield patch
        yield from others[at:]


def string_patches(graph: Graph, edits: Iterable[tuple[Text, str]]) -> list[Patch]:
    """Return the patches that give each use in `edits` its new value and leave every other use unchanged.

    An edit belongs to a use, not to a value: uses are compared by identity. If a use has several edits, the last one
    counts; they are assumed to be equal. Uses in folded calls follow the string that they fetch.
    """
    wanted: dict[int, str] = {}
    patches = []
    data = graph.data
    protocol, used = graph.protocol, graph.rare
    for use, value in edits:
        wanted[id(use)] = value
        if use.origin is None and value != use:
            patches.append(Patch(use.start, use.end, string_opcode(value, protocol, data[use.start], used)))
    for use in graph.loose_gets:
        origin = use.origin
        if id(use) in wanted or id(origin) in wanted:
            assert origin is not None
            value = wanted.get(id(use), use)
            if value != wanted.get(id(origin), origin):
                patches.append(Patch(use.start, use.end, string_opcode(value, protocol, data[origin.start], used)))
    return patches


@dataclass(frozen=True, slots=True)
class PushedValue:
    """The bytes ``data[start:end]`` that push one value, including a PUT after it; `last` is its final opcode."""

    start: int
    end: int
    last: int


def items_pushed(data: bytes, start: int, stop: int) -> list[PushedValue]:
    """Return the values that ``data[start:stop]`` pushes, in order, if it builds only plain values and tuples.

    Raises:
        Unsupported: the region does something else, such as setting items, or popping values from before it.
    """
    stack: list[PushedValue] = []
    marks: list[int] = []
    for opcode in op.walk(data, start, stop):
        code = opcode.code
        if code in op.PUTS:
            if not stack:
                raise Unsupported("the region memoizes a value from outside it", offset=opcode.start)
            stack[-1] = PushedValue(stack[-1].start, opcode.end, stack[-1].last)
            continue
        if code == op.MARK:
            marks.append(len(stack))
            stack.append(PushedValue(opcode.start, opcode.end, opcode.start))
            continue
        taken = _TAKES.get(code)
        if code == op.TUPLE and marks:
            taken = len(stack) - marks.pop()
        if taken is None or taken > len(stack) - (marks[-1] + 1 if marks and code != op.TUPLE else 0):
            raise Unsupported(f"a region of plain values contains {op.NAMES[code]}", offset=opcode.start)
        first = stack[len(stack) - taken].start if taken else opcode.start
        del stack[len(stack) - taken :]
        stack.append(PushedValue(first, opcode.end, opcode.start))
    if marks:
        raise Unsupported("a region of plain values leaves a mark open", offset=start)
    return stack


# Number of values that an opcode takes from the stack before it pushes one; plain values take none.
_TAKES = {
    **dict.fromkeys((op.BININT, op.BININT1, op.BININT2, op.LONG1, op.LONG4, op.INT, op.LONG), 0),
    **dict.fromkeys((op.BINUNICODE, op.SHORT_BINUNICODE, op.BINUNICODE8, op.UNICODE), 0),
    **dict.fromkeys((op.SHORT_BINSTRING, op.BINSTRING, op.STRING), 0),
    **dict.fromkeys((op.NONE, op.NEWTRUE, op.NEWFALSE, op.BINFLOAT, op.FLOAT, op.EMPTY_TUPLE), 0),
    **dict.fromkeys((op.GET, op.BINGET, op.LONG_BINGET, op.GLOBAL, op.BINBYTES, op.SHORT_BINBYTES), 0),
    op.TUPLE1: 1,
    op.TUPLE2: 2,
    op.TUPLE3: 3,
    op.STACK_GLOBAL: 2,
    op.BINPERSID: 1,
}


def int_opcode(value: int) -> bytes:
    """Return the opcode and argument that push an int, chosen as by a pickler of protocol 2."""
    if 0 <= value < 1 << 8:
        return bytes((op.BININT1, value))
    if 0 <= value < 1 << 16:
        return bytes((op.BININT2,)) + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return bytes((op.BININT,)) + value.to_bytes(4, "little", signed=True)
    raw = value.to_bytes((value if value >= 0 else ~value).bit_length() // 8 + 1, "little", signed=True)
    head = bytes((op.LONG1, len(raw))) if len(raw) < 256 else bytes((op.LONG4,)) + len(raw).to_bytes(4, "little")
    return head + raw


def splice(graph: Graph, patches: Iterable[Replaced]) -> bytes:
    """Return the stream ``data[start:end]`` of `graph` with `patches` applied and frame lengths corrected.

    Raises:
        Unsupported: two patches overlap.
    """
    made = None if graph.frames else _in_order(graph, patches)
    if made is not None:
        return made
    ordered = [Patch(*patch) for patch in sorted(set(patches))]
    if graph.frames:
        ordered = sorted(ordered + _frame_patches(graph, ordered))
    for (_, end, _), (start, _, _) in pairwise([Patch(0, graph.start, b""), *ordered]):
        if start < end:
            raise Unsupported("two edits of the pickle overlap", offset=start)
    return _in_order(graph, ordered, sure=True) or b""


def _in_order(graph: Graph, patches: Iterable[Replaced], *, sure: bool = False) -> bytes | None:
    """Return the stream with `patches` applied; None if two of them begin at one offset, overlap, or are out of order.

    Args:
        sure: skip that check. The patches are in order, except that an insertion may begin where a replacement does.
    """
    data = graph.data
    made = BytesIO()
    pieces: list[bytes] = []
    position, last = graph.start, -1
    for start, end, new in patches:
        if not sure and (start < position or start == last):
            return None
        pieces += (data[position:start], new)
        position, last = end, start
        if len(pieces) > _BLOCK:
            made.write(b"".join(pieces))
            pieces.clear()
    pieces.append(data[position : graph.end])
    made.write(b"".join(pieces))
    return made.getvalue()


_BLOCK = 4096


def _frame_patches(graph: Graph, ordered: list[Patch]) -> list[Patch]:
    """Return patches with the new lengths of changed frames. A frame's length counts the bytes after its opcode."""
    out = []
    starts = [patch.start for patch in ordered]
    ends = [patch.end for patch in ordered]
    grown = [0, *accumulate(len(patch.new) - (patch.end - patch.start) for patch in ordered)]
    for start, length in graph.frames:
        low = bisect_left(starts, start + 9)
        high = bisect_right(ends, start + 9 + length, low)
        delta = grown[high] - grown[low]
        if delta:
            out.append(Patch(start + 1, start + 9, (length + delta).to_bytes(8, "little")))
    return out

"""Facts about torch.load of a pickle: names that it refuses, calls of them, opcodes and strings on which it fails.

They are in the order of the stream, with offsets in it. A verb decides which of them matter, and words them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ckptfix.findings.row import Finding
from ckptfix.formats.loading.hidden_globals import look_into
from ckptfix.formats.torch import failing_calls, weights_only
from ckptfix.formats.torch.common import PickledObject
from ckptfix.formats.torch.dangerous_globals import is_dangerous
from ckptfix.io.layers import Memory
from ckptfix.pickles import Call, Dict, Global, Graph, PersId, Set
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.call_text import call_text
from ckptfix.pickles.names import survey
from ckptfix.pickles.unwritten import stream_of

_BYTES = frozenset((
    op.BINBYTES, op.SHORT_BINBYTES, op.BINBYTES8, op.BYTEARRAY8, op.STRING, op.BINSTRING, op.SHORT_BINSTRING,
))  # fmt: skip


class RefusedGlobal(NamedTuple):
    """A global that ``weights_only=True`` refuses.

    Attributes:
        name: ``module.name`` in Python 3.
        offset: of its first use.
        called: offset of its first call, the outermost one; None if it is not called.
        calls: how many calls of it are in the object.
        text: the first call as text, if it can run code; otherwise "".
    """

    name: str
    offset: int
    called: int | None
    calls: int
    text: str


class OldStrings(NamedTuple):
    """Strings of Python 2: the offset of the first one, or with `fails` of the first on which Python 3 fails."""

    offset: int
    fails: bool


class BytesAfterStop(NamedTuple):
    """Bytes that follow a pickle in its record, from `offset`; `names` are the refused globals in them.

    Attributes:
        pickled: length of the pickles that they begin with; None if there is neither a pickle nor a name.
    """

    offset: int
    length: int
    pickled: int | None
    names: tuple[str, ...]


def refused_globals(parts: PickledObject) -> list[RefusedGlobal]:
    """Return the globals that ``weights_only=True`` refuses, each once."""
    graph = parts.graph
    starts: dict[str, int] = {}
    for node in graph.globals:
        name = weights_only.canonical(node)
        if not weights_only.accepted(name):
            starts.setdefault(name, node.start)
    calls = _calls(graph) if starts else {}
    return [_refused(name, start, calls.get(name, [])) for name, start in starts.items()]


def _refused(name: str, start: int, calls: list[Call]) -> RefusedGlobal:
    text = call_text(calls[0]) if calls and is_dangerous(name) else ""
    return RefusedGlobal(name, start, calls[0].position if calls else None, len(calls), text)


def _calls(graph: Graph) -> dict[str, list[Call]]:
    """Map the name of each global to its calls in the object, the outermost first."""
    found: dict[str, list[Call]] = {}
    seen: set[int] = set()
    queue = deque([graph.root])
    while queue:
        node = queue.popleft()
        if type(node) in (str, int, float, bool, bytes) or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Call:
            if type(node.func) is Global:
                found.setdefault(weights_only.canonical(node.func), []).append(node)
            queue += [node.func, node.args, node.kwargs, node.state]
            queue += node.elements or ()
            queue += [part for pair in node.items or () for part in pair]
        elif type(node) is tuple or type(node) is list:
            queue += node
        elif type(node) is PersId:
            queue.append(node.pid)
        elif type(node) is Dict:
            queue += [part for pair in node.items for part in pair]
        elif type(node) is Set:
            queue += node.elements
    return found


def refused_opcode(parts: PickledObject) -> tuple[int, str] | None:
    """Return (offset, description) of the first opcode that ``weights_only=True`` refuses by itself."""
    graph = parts.graph
    named = any(not weights_only.accepted(weights_only.canonical(node)) for node in graph.globals)
    return weights_only.refused_opcode(graph, strict=not named)


def failing(parts: PickledObject) -> Iterator[Finding]:
    """Yield findings for values that no unpickler can build: calls with wrong arguments, unhashable keys."""
    return failing_calls.findings(parts.graph)


def old_strings(parts: PickledObject) -> OldStrings | None:
    """Return the strings without an encoding; Python 3 fails on those with bytes above 127."""
    graph = parts.graph
    codes = {op.STRING, op.BINSTRING, op.SHORT_BINSTRING} & set(graph.rare)
    if not codes:
        return None
    data, start, end = stream_of(graph)
    for opcode in op.walk(data, start, end):
        if opcode.code not in codes:
            continue
        # A length precedes the bytes; STRING is a line of text in which high bytes are written \\x...
        width = {op.BINSTRING: 4, op.SHORT_BINSTRING: 1}.get(opcode.code, 0)
        text = data[opcode.arg + width : opcode.end]
        if not text.isascii() or (not width and b"\\x" in text):
            return OldStrings(opcode.start, True)
    return OldStrings(min(graph.rare[code] for code in codes), False)


def hidden_in_bytes(parts: PickledObject) -> Iterator[tuple[int, list[str]]]:
    """Yield (offset, refused globals) of each string that is a pickle, or a file with pickles inside, and has such."""
    graph = parts.graph
    # Protocols before 3 write bytes as text, which this function encodes.
    encoded = any(node.name == "encode" and node.module == "_codecs" for node in graph.globals)
    if not encoded and not _BYTES & set(graph.rare):
        return
    data, start, end = stream_of(graph)
    seen = survey(lambda offset, length: data[offset : offset + length], start, end)
    for inner in seen.inner:
        found = data[inner.at : inner.at + inner.length]
        if inner.text:
            found = found.decode("utf-8", "replace").encode("latin-1", "replace")
        if named := _named_in(found):
            yield inner.at, named


def after_stop(parts: PickledObject) -> BytesAfterStop | None:
    """Return the bytes after the STOP of a pickle that has a record of its own; None if there are none."""
    data, end = parts.graph.data, parts.graph.end
    if end >= len(data):
        return None
    named = _named_in(data[end:])
    seen = survey(lambda offset, length: data[offset : offset + length], end, len(data))
    pickled = seen.end - end if named or seen.pickles else None
    return BytesAfterStop(end, len(data) - end, pickled, tuple(named))


def _named_in(data: bytes) -> list[str]:
    """List the refused globals that `data`, a pickle or a file with pickles inside, names; nothing for other data."""
    return look_into(Memory(data, ""), "").names

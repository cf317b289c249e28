"""Findings about a pickle: the functions, further pickles and old strings in it. It is read as text, and never run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Fix
from ckptfix.findings.table import found
from ckptfix.formats.loading import hidden_globals
from ckptfix.formats.loading.hidden_globals import Hidden
from ckptfix.formats.torch import module as torch_module
from ckptfix.formats.torch import weights_only
from ckptfix.formats.torch.call_classes import UNINITIALIZED, class_of
from ckptfix.formats.torch.dangerous_globals import is_dangerous
from ckptfix.io.layers import Memory
from ckptfix.ops import tensor_classes
from ckptfix.pickles import Call, Dict, Global, Graph, PersId, Set
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.call_text import call_text
from ckptfix.pickles.graph import pairs
from ckptfix.pickles.names import survey
from ckptfix.words import plural, some

if TYPE_CHECKING:
    from ckptfix.checkpoint.tree import Item

_ABOUT = (
    ("numpy._core", "a name that only NumPy 2 has"),
    ("numpy", "a NumPy object"),
    ("pathlib", "a path, which another system cannot build"),
    ("argparse.Namespace", "hyper-parameters"),
    ("pytorch_lightning", "an object of Lightning"),
    ("lightning", "an object of Lightning"),
    ("omegaconf", "a configuration of OmegaConf"),
    *((name, "a placeholder of a lazy module that was never initialized") for name in UNINITIALIZED),
    ("__main__", "a class of the script that saved it"),
)
"""Beginnings of names, and a description of such an object."""

_BYTES = frozenset((
    op.BINBYTES, op.SHORT_BINBYTES, op.BINBYTES8, op.BYTEARRAY8, op.STRING, op.BINSTRING, op.SHORT_BINSTRING,
))  # fmt: skip

LISTED = 8
"""Names in a message before the rest are counted."""


def scan(graph: Graph, where: str, base: int = 0) -> Iterator[Finding]:
    """Yield findings about a parsed pickle.

    Args:
        where: its record.
        base: offset in the file of the first byte that the graph's spans count from.
    """
    def root() -> Item:
        from ckptfix.formats.torch.tree import value_of

        return value_of(graph.root)

    calls = _calls(graph)
    known = tensor_classes.libraries(map(weights_only.canonical, graph.globals), root)
    seen: set[str] = set()
    for node in graph.globals:
        name = weights_only.canonical(node)
        if name not in seen and not weights_only.accepted(name):
            seen.add(name)
            if name in UNINITIALIZED:
                message = "the parameters of a lazy module were saved before its first input: they have no values"
                advice = "save the model again after a batch went through it: this file has no weights for them"
                yield found("no-data", message, where=where, severity="warning", fix=advice)
            library = next((row for row in known if row.has(name)), None)
            if library is not None:
                yield _tensor_class(name, library, where, base + node.start)
            else:
                here = calls.get(name, ())
                yield _global(name, where, base + node.start, base + here[0].position if here else None, here)
    opcode = weights_only.refused_opcode(graph, strict=not seen)
    if opcode is not None:
        place, what = opcode
        yield found("unsupported-opcode", f"{what}, which weights_only=True refuses", where=where, offset=base + place)
    yield from _old_strings(graph, where, base)
    yield from _nested(graph, where, base)


def _global(name: str, where: str, offset: int, called_at: int | None, calls: Sequence[Call] = ()) -> Finding:
    """Return the finding for a refused global.

    Args:
        called_at: offset of its first call; None if it is not called.
        calls: its calls, where the pickle was read as nodes.
    """
    module = name.partition(".")[0]
    called = "" if called_at is None else f", which would be called at {called_at:#x}"
    if is_dangerous(name) and calls:
        more = f" and {plural(len(calls) - 1, 'more call')} of it" if len(calls) > 1 else ""
        runs = f"{call_text(calls[0])}{more}"
        place = "" if called_at is None else f", called at {called_at:#x}"
        message = f"loading this file runs {runs} ({name}{place})"
        return replace(found("dangerous-global", message, where=where, offset=offset, about=name), runs=runs)
    if is_dangerous(name):
        message = f"the pickle contains {name}, which can run code or open files"
        return found("dangerous-global", f"{message}{called}", where=where, offset=offset, about=name)
    about = next((text for front, text in _ABOUT if name == front or name.startswith(f"{front}.")), "")
    what = f"{name} ({about or f'from the package {module}'})" if about or module else name
    message = f"torch.load refuses this file: weights_only=True does not allow {what}{called}"
    return found("foreign-global", message, where=where, offset=offset, about=name)


def _tensor_class(name: str, library: tensor_classes.Library, where: str, offset: int) -> Finding:
    message = f"torch.load needs {library.name} for this file: it holds tensors of that library ({name})"
    advice = f"run `{library.statement}` before torch.load(..., weights_only=True), which then accepts the file"
    return found("tensor-class", message, where=where, offset=offset, fix=advice, about=name)


def _calls(graph: Graph) -> dict[str, list[Call]]:
    """Map the name of each refused global to its calls in the object, the outermost first."""
    found_calls: dict[str, list[Call]] = {}
    if all(weights_only.accepted(weights_only.canonical(node)) for node in graph.globals):
        return found_calls
    seen: set[int] = set()
    queue = deque([graph.root])
    while queue:
        node = queue.popleft()
        if type(node) in (str, int, float, bool, bytes) or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Call:
            if type(node.func) is Global:
                found_calls.setdefault(weights_only.canonical(node.func), []).append(node)
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
    return found_calls


def _old_strings(graph: Graph, where: str, base: int) -> Iterator[Finding]:
    """Yield a finding about strings without an encoding; Python 3 fails on those with bytes above 127."""
    codes = {op.STRING, op.BINSTRING, op.SHORT_BINSTRING} & set(graph.rare)
    if not codes:
        return
    first = min(graph.rare[code] for code in codes)
    high = -1
    for opcode in op.walk(graph.data, graph.start, graph.end):
        if opcode.code not in codes:
            continue
        # A length precedes the bytes; STRING is a line of text in which high bytes are written \\x...
        width = {op.BINSTRING: 4, op.SHORT_BINSTRING: 1}.get(opcode.code, 0)
        text = graph.data[opcode.arg + width : opcode.end]
        if not text.isascii() or (not width and b"\\x" in text):
            high = opcode.start
            break
    if high >= 0:
        yield found("python2-strings", where=where, offset=base + high)
    else:
        message = "it has strings as Python 2 wrote them, all ASCII"
        yield found("python2-strings", message, where=where, offset=base + first, severity="info")


def _nested(graph: Graph, where: str, base: int) -> Iterator[Finding]:
    """Yield findings about strings that are pickles, or files with pickles inside, and contain functions."""
    # Protocols before 3 write bytes as text, which this function encodes.
    encoded = any(node.name == "encode" and node.module == "_codecs" for node in graph.globals)
    if not encoded and not _BYTES & set(graph.rare):
        return
    seen = survey(lambda offset, length: graph.data[offset : offset + length], graph.start, graph.end)
    for inner in seen.inner:
        data = graph.data[inner.at : inner.at + inner.length]
        if inner.text:
            data = data.decode("utf-8", "replace").encode("latin-1", "replace")
        if names := named_in(data):
            message = f"a bytes value holds a pickle that contains {names}"
            yield found("nested-pickle", message, where=where, offset=base + inner.at)


def named_in(data: bytes) -> str:
    """List the refused globals that `data`, a pickle or a file with pickles inside, names; "" for anything else."""
    return listed(hidden_globals.look_into(Memory(data, ""), "").names)


def listed(names: Sequence[str]) -> str:
    """Join names in one line, those that run code first."""
    ordered = sorted(names, key=lambda name: not is_dangerous(name))
    return some(ordered, LISTED)


def after_stop(data: bytes, end: int, where: str, base: int = 0) -> Iterator[Finding]:
    """Yield a finding about the bytes after the STOP of a pickle whose record ends with `data`."""
    if end >= len(data):
        return
    rest = len(data) - end
    names = named_in(data[end:])
    seen = survey(lambda offset, length: data[offset : offset + length], end, len(data))
    if not names and not seen.pickles:
        message = f"{rest:,} bytes follow the end of the pickle"
        yield found("bytes-after-stop", message, where=where, offset=base + end)
        return
    named = f", and contains {names}" if names else ""
    message = f"another pickle of {seen.end - end:,} bytes follows the first{named}"
    yield found("stacked-pickles", message, where=where, offset=base + end)


def hidden(rows: Iterable[Hidden], *, fix: Fix | None = None) -> Iterator[Finding]:
    """Yield a finding for each global that `ops.hidden_globals` found, once per place."""
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (row.place, row.name) not in seen:
            seen.add((row.place, row.name))
            finding = _global(row.name, row.place, row.offset, row.called)
            yield finding.fixed_by(fix) if fix is not None else finding


def modules(graph: Graph) -> tuple[str, int] | None:
    """Return (class, offset) of the pickled module that is the object or one of its values; None without one."""
    candidates = [graph.root, *(value for _, value in pairs(graph.root) or ())]
    for node in candidates:
        if type(node) is Call and torch_module.parts_of(node) is not None:
            return (_class_name(node), node.position)
    return None


def _class_name(node: Call) -> str:
    """Return the class of an object, in whichever way the pickle names it."""
    found = class_of(node)
    return found.full if found is not None else "an unnamed class"

"""Removal of code from a repaired file: calls in its object, and records beside it that no tensor needs.

A damaged file is as risky as an intact one, and repair would make it loadable. The
contents of a user's class are kept, as repair gives back what was saved; `sanitize` removes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from ckptfix.checkpoint import ByteRange, Data
from ckptfix.errors import CkptfixError
from ckptfix.findings import table
from ckptfix.findings.row import Finding
from ckptfix.formats.loading import hidden_globals as scan_inside
from ckptfix.formats.loading.hidden_globals import LIMIT, HiddenContents
from ckptfix.formats.torch import weights_only
from ckptfix.formats.torch.dangerous_globals import is_dangerous
from ckptfix.formats.torch.object import TorchObject
from ckptfix.formats.torch.tree import value_of
from ckptfix.io.layers import Memory, WindowSource
from ckptfix.io.read import read_chunks
from ckptfix.io.source import open_source
from ckptfix.ops.hazards import in_texts
from ckptfix.pickles import Call, Dict, PersId
from ckptfix.pickles.graph import Node
from ckptfix.pickles.reemit import children_to_write, every_node

MOST_PLACES = 3
"""Addresses that a finding lists per function."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part left out because it can run code: the function or the record that it names, and the finding."""

    name: str
    finding: Finding


@dataclass(slots=True)
class Cleaned:
    """The parts of an object that are left out.

    Attributes:
        gone: ``id`` of nodes that are written as None, or not written where they are the value of a dict.
        items: ``id`` of a dict -> indices of its items whose key or value is gone.
        kept: ``id`` of every node that is still in the object; None when nothing is left out.
        findings: the functions, each with the addresses of the values that they make.
    """

    gone: set[int] = field(default_factory=set)
    items: dict[int, set[int]] = field(default_factory=dict)
    kept: set[int] | None = None
    findings: list[LeftOut] = field(default_factory=list)

    def lost(self, node: Node) -> bool:
        return self.kept is not None and id(node) not in self.kept


def clean(found: TorchObject) -> Cleaned:
    """Find the code in an object, and everything that it makes."""
    graph = found.graph
    called = {id(node): weights_only.canonical(node) for node in graph.globals}
    names = {node: name for node, name in called.items() if is_dangerous(name)}
    names |= in_texts(value_of(graph.root))
    if not names:
        return Cleaned()
    made_by = dict(names)
    _spread(graph.root, made_by)
    out = Cleaned(set(made_by))
    for node in every_node(graph.root):
        rows = node.items if type(node) is Dict or type(node) is Call else None
        places = {place for place, row in enumerate(rows or ()) if any(id(part) in out.gone for part in row)}
        if places:
            out.items[id(node)] = places
    out.kept = set(_reached(graph.root, out))
    out.findings += _findings(found, names, made_by)
    return out


def _bad(inside: HiddenContents) -> str:
    return next((name for name in inside.names if is_dangerous(name)), "")


def _spread(root: Node, made_by: dict[int, str]) -> None:
    """Add every call and reference that has one of the nodes as its function or as an argument."""
    users: dict[int, list[Node]] = {}
    for node in every_node(root):
        if type(node) is Call:
            args = node.args if type(node.args) is tuple else (node.args,)
            for part in (node.func, *args):
                users.setdefault(id(part), []).append(node)
        elif type(node) is PersId:
            for part in node.pid if type(node.pid) is tuple else (node.pid,):
                users.setdefault(id(part), []).append(node)
    queue = list(made_by)
    while queue:
        place = queue.pop()
        for user in users.get(place, ()):
            if id(user) not in made_by:
                made_by[id(user)] = made_by[place]
                queue.append(id(user))


def _reached(root: Node, out: Cleaned) -> Iterator[int]:
    """Yield ``id`` of every node that is still in the object."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in out.gone or id(node) in seen:
            continue
        seen.add(id(node))
        yield id(node)
        without = out.items.get(id(node), ())
        if without:
            items = node.items if type(node) is Dict or type(node) is Call else None
            rows = [row for place, row in enumerate(items or ()) if place not in without]
            stack += [part for row in rows for part in row]
            if type(node) is Call:
                stack += [node.func, node.args, node.kwargs, node.state, *(node.elements or ())]
        else:
            stack += children_to_write(node)


def _findings(found: TorchObject, names: dict[int, str], made_by: dict[int, str]) -> Iterator[LeftOut]:
    """Yield a finding for each function, with the first addresses that hold what it makes."""
    places: dict[str, list[str]] = {name: [] for name in dict.fromkeys(names.values())}
    for at, node in found.values:
        name = made_by.get(id(node))
        if name is not None and at not in places[name]:
            places[name].append(at)
    starts = {weights_only.canonical(node): node.start for node in reversed(found.graph.globals)}
    for name, several in places.items():
        shown = ", ".join(several[:MOST_PLACES])
        more = f" and {len(several) - MOST_PLACES} more places" if len(several) > MOST_PLACES else ""
        held = f" ({shown}{more})" if any(several) else ""
        message = f"{name} can run code: left out, with everything it makes{held}"
        where = several[0] if several else ""
        made = table.found("dangerous-global", message, where=where, offset=starts.get(name), severity="warning")
        yield LeftOut(name, made)


def clean_records(extras: dict[str, tuple[Data, int | None]]) -> list[LeftOut]:
    """Remove the records with a pickle that runs code, and return a finding for each."""
    out: list[LeftOut] = []
    for name in list(extras):
        inside = _record(extras[name][0], name)
        bad = _bad(inside)
        if bad or inside.cut:
            del extras[name]
            why = f"a pickle that names {bad}, which can run code" if bad else "packed, and too large to search"
            message = f"{why}: the record is left out"
            out.append(LeftOut(bad or name, table.found("hidden-pickle", message, where=name, severity="warning")))
    return out


def _record(data: Data, name: str) -> HiddenContents:
    if isinstance(data, ByteRange):
        with suppress(CkptfixError), open_source(data.path) as reader:
            return scan_inside.look_into(WindowSource(reader, data.offset, data.length), name)
        return HiddenContents()
    first = _first(read_chunks(data))
    inside = scan_inside.look_into(Memory(first, ""), name)
    inside.cut |= len(first) < data.length
    return inside


def _first(chunks: Iterable[bytes]) -> bytes:
    """Return the first bytes of a stream, up to the limit."""
    pieces: list[bytes] = []
    made = 0
    with suppress(CkptfixError):
        for chunk in chunks:
            pieces.append(chunk)
            made += len(chunk)
            if made >= LIMIT:
                break
    return b"".join(pieces)


def listed(left_out: Collection[LeftOut]) -> str:
    """List what was left out, in one line."""
    return ", ".join(dict.fromkeys(row.finding.where or row.name for row in left_out))

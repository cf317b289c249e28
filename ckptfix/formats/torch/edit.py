"""Edits of a torch pickle: patches of the strings that push names and devices, and new shapes.

A device appears in three kinds of places: the location tag of every storage, calls of ``torch.device``,
and the device argument of ``_rebuild_device_tensor_from_*``. Places that no edit can change (a DeviceMesh of
a DTensor) are reported as fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfix.checkpoint import Edit, Put, Rename, SetLocation
from ckptfix.errors import Unsupported
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.object import NodeSite, TorchObject
from ckptfix.pickles import Call, Dict, Global, Graph, Patch, Set, Text
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.folded import Phrases
from ckptfix.pickles.graph import attributes
from ckptfix.pickles.patch import KeyPatches, Patches, int_opcode, items_pushed, string_patches
from ckptfix.pickles.rows import Rows

_DEVICE_TENSORS = tuple(row.name for row in calls.TABLE if row.kind == "device")


@dataclass(slots=True)
class Devices:
    """Every place where a device appears.

    Attributes:
        tags: location tags of storages, and device arguments that are one string, outside folded calls.
        folded: (offset of the first one, tag, number) for the location tags in folded calls.
        calls: calls of ``torch.device``, with the location that each states.
        fixed: descriptions of places that cannot be edited.
    """

    tags: list[Text] = field(default_factory=list)
    folded: list[tuple[int, Text, int]] = field(default_factory=list)
    calls: list[tuple[Call, str]] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return how often each location appears, in order of first use."""
        places = [(tag.start, tag, 1) for tag in self.tags]
        found: Counter[str] = Counter()
        for _, tag, count in sorted([*places, *self.folded]) if self.folded else places:
            found[str(tag)] += count
        found.update(location for _, location in self.calls)
        return dict(found)


def find_devices(graph: Graph) -> Devices:
    """Find every device in the pickle."""
    found = Devices()
    names = {node.full for node in graph.globals}
    inside = any(
        name == "torch.device" or name.endswith(_DEVICE_TENSORS) or name.endswith(".DeviceMesh") for name in names
    )
    if inside:
        graph.unfold()
    for persid in graph.loose_persids:
        pid = persid.pid
        if type(pid) is tuple and len(pid) >= 5 and type(pid[3]) is Text:
            found.tags.append(pid[3])
    if graph.phrases is not None:
        found.folded = graph.phrases.locations()
    if inside:
        _find_in_calls(graph.root, found)
    return found


def _find_in_calls(root: Any, found: Devices) -> None:
    visited: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind not in (tuple, list, Dict, Call, Set) or id(node) in visited:
            continue
        visited.add(id(node))
        if kind is Call:
            _note_call(node, found)
            stack += [node.args, node.state, node.elements, node.kwargs]
            stack += [value for _, value in node.items or ()]
        elif kind is Dict:
            stack += [value for _, value in node.items]
        elif kind is Set:
            stack += node.elements
        else:
            stack += node


def _note_call(call: Call, found: Devices) -> None:
    func = call.func
    if type(func) is not Global or type(call.args) is not tuple:
        return
    if func.full == "torch.device":
        if call.args and type(call.args[0]) is Text:
            index = call.args[1] if len(call.args) > 1 else None
            if index is not None and not (type(index) is int and 0 <= index < 1 << 16):
                found.fixed.append("a torch.device with an invalid index")
                return
            location = call.args[0] if index is None else f"{call.args[0]}:{index}"
            found.calls.append((call, location))
        else:
            found.fixed.append("a torch.device whose type is not a string")
    elif func.name in _DEVICE_TENSORS and len(call.args) > 2 and type(call.args[2]) is Text:
        found.tags.append(call.args[2])
    elif func.name == "DeviceMesh":
        kinds = [value for key, value in attributes(call.state) if key in ("device_type", "_device_type")]
        names = sorted({str(kind) for kind in kinds if isinstance(kind, str)})
        found.fixed.append(f"a DeviceMesh of {', '.join(names) or 'some device'}")


Sites = dict[tuple[str, str], list[NodeSite]]
"""Address and kind -> the sites there that hold names."""


def patches(found: TorchObject, edits: Sequence[Edit]) -> Patches:
    """Return the patches that carry out `edits`.

    Raises:
        Unsupported: a torch pickle does not support an edit, or a place cannot be edited.
    """
    sites: Sites = {}
    for site in found.sites:
        sites.setdefault((site.at, site.kind), []).append(site)
    if found.graph.phrases is not None and not _stay_folded(found, sites, edits, found.graph.phrases):
        found.graph.unfold()
    strings: list[tuple[Text, str]] = []
    others: list[Patch] = []
    keys: list[KeyPatches] = []
    for edit in edits:
        if isinstance(edit, Rename):
            for site in sites.get((edit.at, edit.kind), ()):
                nodes = site.nodes
                strings += [(use, edit.names[use]) for use in nodes if use in edit.names]
                if isinstance(site.keys, Rows):
                    keys.append(KeyPatches(site.keys, nodes, edit.names, found.graph.protocol, found.graph.rare))
        elif isinstance(edit, SetLocation):
            moved, extra = _moved(found.graph, edit.moves)
            strings += moved
            others += extra
        elif isinstance(edit, Put):
            from ckptfix.formats.torch.put_tensors import shape_patches

            others += shape_patches(found, edit)
        else:
            raise Unsupported(f"a torch pickle does not support the edit {type(edit).__name__}")
    return Patches(string_patches(found.graph, strings) + others, keys)


def _stay_folded(found: TorchObject, sites: Sites, edits: Sequence[Edit], phrases: Phrases) -> bool:
    """Return whether folded calls need no patch: their strings stay, or are locations that change at their source."""
    moves: dict[str, str] = {}
    fetched = phrases.fetched()
    touched: set[int] = set()
    for edit in edits:
        if isinstance(edit, Rename):
            uses = (use for site in sites.get((edit.at, edit.kind), ()) for use in site.nodes if id(use) in fetched)
            touched.update(id(use) for use in uses if use in edit.names)
        elif isinstance(edit, SetLocation) and not moves:
            moves = dict(edit.moves)
        else:
            return False
    touched.update(id(tag) for tag in find_devices(found.graph).tags if tag in moves and id(tag) in fetched)
    return touched == {id(tag) for _, tag, _ in phrases.locations() if tag in moves}


def _moved(graph: Graph, moves: Mapping[str, str]) -> tuple[list[tuple[Text, str]], list[Patch]]:
    """Return the new values of location strings, and patches for the indices of ``torch.device`` calls."""
    devices = find_devices(graph)
    strings = [(tag, moves[tag]) for tag in devices.tags if tag in moves]
    others: list[Patch] = []
    for call, location in devices.calls:
        new = moves.get(location, location)
        if new != location:
            kind, _, index = new.partition(":")
            strings.append((_device_type(call), kind))
            others += _reindexed(graph, call, int(index) if index else None)
    return strings, others


def _device_type(call: Call) -> Text:
    """Return the type argument that `find_devices` saw in a ``torch.device`` call."""
    kind = call.arguments[0]
    assert type(kind) is Text
    return kind


def _reindexed(graph: Graph, call: Call, index: int | None) -> list[Patch]:
    """Return patches that turn the arguments of a ``torch.device`` call into ``(type,)`` or ``(type, index)``."""
    data = graph.data
    first = _device_type(call)
    # The arguments are pushed right before the call, unless the tuple comes from the memo.
    closing = _closing(data, first.start, call.position)
    inner = items_pushed(data, first.start, closing)
    out = []
    if len(inner) == 2:
        out.append(Patch(inner[1].start, inner[1].end, b"" if index is None else int_opcode(index)))
    elif index is not None:
        out.append(Patch(inner[0].end, inner[0].end, int_opcode(index)))
    if data[closing] != op.TUPLE:
        out.append(Patch(closing, closing + 1, bytes((op.TUPLE1 if index is None else op.TUPLE2,))))
    return out


def _closing(data: bytes, start: int, stop: int) -> int:
    """Return the offset of the opcode that makes one tuple of the values that ``data[start:stop]`` pushes."""
    # Tuples of one to three values need no MARK in protocol 2 and later; in older protocols they begin with it.
    for first in (start, start - 1):
        try:
            items = items_pushed(data, first, stop) if first < stop else []
        except (Unsupported, ValueError):
            continue
        if len(items) == 1:
            return items[0].last
    raise Unsupported("the arguments of a torch.device are not written next to it", offset=stop)

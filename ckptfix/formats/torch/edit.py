"""Edits of a torch pickle: patches of the strings that push names and devices, and new shapes.

A device appears in three kinds of places: the location tag of every storage, calls of ``torch.device``,
and the device argument of ``_rebuild_device_tensor_from_*``. Places that no edit can change (a DeviceMesh of
a DTensor) are reported as fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptfix.checkpoint import Edit, Put, Rename, SetLocation
from ckptfix.errors import Unsupported
from ckptfix.formats.torch.object import NodeSite, TorchObject, find_devices
from ckptfix.pickles import Call, Graph, Patch, Text
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.folded import Phrases
from ckptfix.pickles.new_tensors import NewTensors
from ckptfix.pickles.patch import KeyPatches, Patches, int_opcode, items_pushed, string_patches
from ckptfix.pickles.rows import Rows

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


def _stay_folded(found: TorchObject, sites: Sites, edits: Sequence[Edit], phrases: Phrases | NewTensors) -> bool:
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

"""Items left out of a torch checkpoint: keys of mappings, or tensors wherever they are, and the storages with them.

The pickle is written again rather than spliced (`pickles.reemit`): what is dropped may have defined a memo entry that
something else fetches. Both torch formats take the result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ckptfix.checkpoint import Checkpoint, Data, Drop, OutputFile, Plan
from ckptfix.errors import DamagedFile, NoSuchTensor
from ckptfix.formats import torch_legacy, torch_zip
from ckptfix.formats.torch_common import fields, parts_of
from ckptfix.formats.torch_object import TorchObject
from ckptfix.formats.torch_tensors import BadTensor
from ckptfix.pickles import Call, Dict
from ckptfix.pickles.graph import children, label, pairs
from ckptfix.pickles.reemit import Rewritten, reemit


def without(found: TorchObject, drops: Sequence[Drop] = (), *, gone: Collection[int] = ()) -> Rewritten:
    """The pickle of `found` without the items that `drops` name.

    Args:
        drops: keys, as they are shown, and the address of their mapping; a key that is there twice is dropped twice.
        gone: ``id`` of nodes (such as a tensor's call) that are left out of every mapping they are a value of, and
            that None replaces anywhere else.

    Raises:
        NoSuchTensor: no mapping at an address, or no such key in it.
        Unsupported: as `reemit`.
    """
    items: dict[int, set[int]] = {}
    for drop in drops:
        mapping = node_at(found.graph.root, drop.at)
        holder, rows = _rows(mapping, drop.at)
        labels = [label(key) for key, _ in rows]
        missing = set(drop.names).difference(labels)
        if missing:
            where = f"{drop.at}/{min(missing)}" if drop.at else min(missing)
            raise NoSuchTensor("no such key", where=where)
        wanted = set(drop.names)
        items.setdefault(id(holder), set()).update(i for i, name in enumerate(labels) if name in wanted)
    return reemit(found.graph, items=items, gone=gone)


def node_at(root: Any, address: str) -> Any:
    """The node at `address`: labels joined by slashes, as `torch_object.walk` gives them; keys may hold slashes too.

    Raises:
        NoSuchTensor: there is none.
    """
    # Cycles and shared nodes repeat addresses, never (node, rest of the address).
    stack = [(root, address)]
    seen: set[tuple[int, str]] = set()
    while stack:
        node, rest = stack.pop()
        if not rest:
            return node
        if (id(node), rest) in seen:
            continue
        seen.add((id(node), rest))
        # The last on the stack is the first that is tried, as the first mapping of an address is the one that has it.
        for name, child in reversed(list(children(node))):
            if rest == name:
                stack.append((child, ""))
            elif rest.startswith(f"{name}/"):
                stack.append((child, rest[len(name) + 1 :]))
    raise NoSuchTensor("no such place", where=address)


def _rows(mapping: Any, at: str) -> tuple[Any, list[tuple[Any, Any]]]:
    """The node that holds the items of `mapping`, and the items, repeated keys too."""
    if pairs(mapping) is None:
        raise NoSuchTensor("no mapping", where=at)
    if type(mapping) is Call and not mapping.items and mapping.arguments:
        # Python 2 pickled an OrderedDict as OrderedDict([[key, value], ...]), and a Counter is Counter({...}).
        held = mapping.arguments[0]
        if type(held) in (list, Dict):
            return held, held.items if type(held) is Dict else [_first(row) for row in held]
    return mapping, mapping.items or []


def _first(row: Any) -> tuple[Any, Any]:
    return row[0] if type(row) in (list, tuple) and row else None, row


def plan_drop(checkpoint: Checkpoint, drops: Sequence[Drop], dest: str, *, gone: Collection[int] = ()) -> Plan:
    """A fresh file of the same torch format without the items that `drops` name, and without their storages.

    A storage that a remaining tensor still views is kept whole.

    Raises:
        NoSuchTensor, Unsupported: as `without`.
        DamagedFile: the file lacks a storage that is left; Truncated, if it is cut short.
    """
    if checkpoint.format == torch_legacy.NAME:
        torch_legacy.refuse_truncated(checkpoint)
    parts = parts_of(checkpoint)
    rewritten = without(parts.found, drops, gone=gone)
    storages = [(key, *parts.storages.place(key)) for key in storage_keys(rewritten, checkpoint.path)]
    lacking = next((key for key, data, _, _ in storages if data is None), None)
    if lacking is not None:
        raise DamagedFile(f"the file has no storage {lacking!r}", path=checkpoint.path)
    kept = [(key, data, crc32) for key, data, _, crc32 in storages if data is not None]
    if checkpoint.format == torch_legacy.NAME:
        layout: torch_legacy.Layout = parts.container
        counts = {key: count for key, (_, count) in layout.storages.items()}
        return legacy_plan(rewritten.pickle, [(key, data, counts[key]) for key, data, _ in kept], dest)
    segments = torch_zip.fresh(rewritten.pickle, kept, checkpoint.byteorder)
    return Plan((OutputFile.of(dest, segments),))


def legacy_plan(pickle: bytes, storages: Sequence[tuple[str, Data, int]], dest: str) -> Plan:
    """A legacy file of an object pickle and (key, data, number of elements) of each storage."""
    sized = [(key, data, max(data.length // max(count, 1), 1)) for key, data, count in storages]
    return Plan((OutputFile.of(dest, torch_legacy.fresh(pickle, sized)),))


def storage_keys(rewritten: Rewritten, path: str) -> list[str]:
    """The keys of the storages that a pickle still refers to, in order.

    Raises:
        DamagedFile: a reference that is none.
    """
    keys: dict[str, None] = {}
    for persid in rewritten.persids:
        if type(persid.pid) is tuple and persid.pid[:1] == ("module",):
            continue
        try:
            key, _, location, _ = fields(persid)
        except BadTensor as error:
            raise DamagedFile(str(error), path=path, where="pickle", offset=persid.position) from None
        if location != "meta":
            keys[key] = None
    return list(keys)

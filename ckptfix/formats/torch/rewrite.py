"""A torch checkpoint with a new object: its graph is replaced in part or whole, and its storages are copied unchanged.

The new object consists of the nodes of `pickles` (plain values, Global, Call, PersId, Dict), which can include
unchanged nodes of the old one. It is written as a fresh pickle of protocol 2. Both torch formats can hold the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import groupby
from math import prod
from typing import Any

from ckptfix.checkpoint import (
    Checkpoint,
    Data,
    Derived,
    Drop,
    Edit,
    OutputFile,
    Plan,
    Put,
    Rename,
    contiguous_stride,
    dtypes,
)
from ckptfix.checkpoint.address import join
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, NoSuchTensor
from ckptfix.formats.base import refuse_truncated
from ckptfix.formats.torch import legacy_layout, zip_layout
from ckptfix.formats.torch.common import Storages, expected_bytes, fields, pickled_object
from ckptfix.formats.torch.edit import patches
from ckptfix.formats.torch.emit import dense_call, reference
from ckptfix.formats.torch.object import TorchObject, walk
from ckptfix.formats.torch.put_tensors import PutStorages, moves_no_bytes, placed, with_tensors
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.pickles import Call, Dict, Graph, PersId, parse, splice
from ckptfix.pickles.emit import Key
from ckptfix.pickles.graph import labels, pairs
from ckptfix.pickles.places import NodesByAddress
from ckptfix.pickles.reemit import Rewritten, reemit

PROTOCOL = 2


@dataclass(frozen=True, slots=True)
class NewStorage:
    """Bytes of an output key: `data` in the byte order of the file, in items of `itemsize` bytes."""

    data: Data
    itemsize: int
    crc32: int | None = None


def literal(data: bytes, what: str) -> Derived:
    """Return bytes in memory as data; for values from a pickle, never for a tensor's record."""
    return Derived(len(data), lambda: (data,), what)


def new_tensor(
    key: str, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...] | None = None, *, legacy: bool = False
) -> Call:
    """Return the rebuild call of a dense tensor over the whole CPU storage `key`, as torch.save writes it.

    Args:
        dtype: torch's name of the dtype.
        shape, stride: in elements; row-major without a stride.
        legacy: for a legacy file, whose references have a sixth field.
    """
    return dense_call(
        dtype,
        prod(shape) * dtypes.by_name(dtype).itemsize,
        lambda kind, count: reference(kind, key, "cpu", count, legacy=legacy),
        (0, shape, contiguous_stride(shape) if stride is None else stride),
    )


def written(checkpoint: Checkpoint, root: Any) -> Rewritten:
    """Return the pickle of the object `root` under protocol 2; its nodes may come from `checkpoint`.

    Raises:
        Unsupported: a node cannot be written.
    """
    # Strings find the opcode that pushed them by their offset in the old stream; the rest of it is not used.
    graph = pickled_object(checkpoint).graph.around(root)
    graph.protocol = PROTOCOL
    return reemit(graph)


def plan_rewrite(
    checkpoint: Checkpoint,
    rewritten: Rewritten,
    dest: str,
    storages: Mapping[str, NewStorage] | None = None,
    *,
    legacy: bool | None = None,
    same_layout: bool = False,
    without: Collection[str] = (),
) -> Plan:
    """Plan a fresh file that holds the object of `rewritten` and the storages that it refers to.

    Args:
        storages: key -> bytes, for keys that the file lacks or whose bytes change; the rest is copied.
        legacy: the container; by default that of `checkpoint`. References must have the fields of that container.
        same_layout: keep the root and the small records of the old archive, unless it has two records of one name.
        without: keys of storages that neither the file nor the output has; the caller names the tensors on them.

    Raises:
        DamagedFile: the file lacks a storage that the object refers to, or its pickle does not match its checksum,
            and a new file would hide that. Or a legacy file would hold a storage whose size differs from its
            references, by which readers find the next storage.
        Truncated: the file is cut short.
    """
    from_legacy = checkpoint.format == legacy_layout.NAME
    parts = pickled_object(checkpoint)
    if from_legacy:
        refuse_truncated(checkpoint)
    elif isinstance(parts.container, zip_layout.ZipCheckpoint):
        zip_layout.refuse_damaged_pickle(parts.container, checkpoint.path)
    kept: list[tuple[str, Data, int | None]] = []
    counts: dict[str, int] = {}
    to_legacy = from_legacy if legacy is None else legacy
    meta = _on_meta(rewritten)
    for key, numel in storage_sizes(rewritten).items():
        new = (storages or {}).get(key)
        if new is not None:
            kept.append((key, new.data, new.crc32))
            counts[key] = new.data.length // new.itemsize
            continue
        data, _, crc32 = parts.storages.place(key)
        if data is None and (key in without or (key in meta and to_legacy)):
            continue
        if data is None:
            raise DamagedFile(f"the file has no storage {key!r}", path=checkpoint.path)
        kept.append((key, data, crc32))
        counts[key] = parts.container.storages[key][1] if from_legacy else numel
    if to_legacy and not from_legacy:
        _refuse_other_sizes(rewritten, {key: data.length for key, data, _ in kept}, checkpoint.path)
    if to_legacy:
        return legacy_plan(rewritten.pickle, [(key, data, counts[key]) for key, data, _ in kept], dest)
    container = parts.container
    if same_layout and isinstance(container, zip_layout.ZipCheckpoint) and not container.ambiguous:
        segments = zip_layout.fresh_like(container, checkpoint.path, rewritten.pickle, kept)
    else:
        segments = zip_layout.fresh(rewritten.pickle, kept, checkpoint.byteorder)
    return Plan((OutputFile.of(dest, segments),))


def lacking(checkpoint: Checkpoint, rewritten: Rewritten, storages: Collection[str] = ()) -> list[str]:
    """Return the keys of storages that a pickle refers to and the file does not have, but for `storages`."""
    place, known = pickled_object(checkpoint).storages.place, {*storages, *_on_meta(rewritten)}
    return [key for key in storage_sizes(rewritten) if key not in known and place(key)[0] is None]


def _on_meta(rewritten: Rewritten) -> set[str]:
    return {str(persid.fields[2]) for persid in rewritten.persids if persid.fields[3:4] == ("meta",)}


def _refuse_other_sizes(rewritten: Rewritten, lengths: Mapping[str, int], path: str) -> None:
    """Raise `DamagedFile` if the size of a storage differs from a reference to it."""
    for persid in rewritten.persids:
        try:
            key, kind, _, numel = fields(persid)
            nbytes = expected_bytes(kind, numel)
        except BadTensor as error:
            message = f"a legacy file cannot hold it: {error}"
            raise DamagedFile(message, path=path, where="pickle", offset=persid.position) from None
        if lengths.get(key, nbytes) != nbytes:
            message = f"a legacy file cannot hold storage {key}, which has {lengths[key]} bytes instead of {nbytes}"
            raise DamagedFile(message, path=path, hint=f"`{command('repair', path, 'OUT')}` keeps the intact data")


def is_needed(checkpoint: Checkpoint, edits: Sequence[Edit]) -> bool:
    """Return whether `edits` need a new layout: a Drop, a Put that moves bytes, or a Put after new names."""
    parts = pickled_object(checkpoint)
    tensors = cache(lambda: placed(parts.found))
    renamed = False
    for edit in edits:
        renamed |= isinstance(edit, Rename)
        if isinstance(edit, Drop):
            return True
        if isinstance(edit, Put) and (renamed or not moves_no_bytes(tensors(), parts.storages, edit)):
            return True
    return False


def plan_edits(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Plan the checkpoint with `edits` carried out in order, in a fresh file; unused storages are dropped too.

    Raises:
        NoSuchTensor: the object, after the earlier edits, lacks a key or an address.
        WouldLoseData: torch cannot load a tensor from a legacy file.
        DamagedFile: as `plan_rewrite`.
        Unsupported: as the edits.
    """
    legacy = checkpoint.format == legacy_layout.NAME
    found = pickled_object(checkpoint).found
    new = PutStorages(legacy, pickled_object(checkpoint).storages.place)

    def edited(pickle: bytes) -> TorchObject:
        return walk(parse(pickle, path=checkpoint.path, where="edited pickle"))

    for kind, group in groupby(edits, _stage):
        run = list(group)
        if kind is Drop:
            found = edited(without(found, [edit for edit in run if isinstance(edit, Drop)]).pickle)
        elif kind is not Put:
            found = edited(splice(found.graph, patches(found, run)))
        else:
            puts = [edit for edit in run if isinstance(edit, Put)]
            tensors = placed(found)
            moving = {edit.at for edit in puts if not moves_no_bytes(tensors, Storages(new), edit)}
            others = [edit for edit in puts if edit.at in moving]
            if legacy:
                for edit in others:
                    legacy_layout.refuse_unloadable([*edit.tensors.values()], checkpoint.path)
            if others:
                found = edited(with_tensors(found, others, new).pickle)
            if shapes := [edit for edit in puts if edit.at not in moving]:
                found = edited(splice(found.graph, patches(found, shapes)))
    graph = found.graph
    storages = {
        key: NewStorage(storage.data, itemsize, storage.crc32)
        for key, (storage, itemsize) in new.new.items()
        if storage.data is not None
    }
    pickle = graph.data[graph.start : graph.end]
    return plan_rewrite(checkpoint, Rewritten(pickle, tuple(graph.persids)), dest, storages)


def _stage(edit: Edit) -> type | None:
    """Return the stage of an edit; consecutive edits of one stage are carried out together."""
    return type(edit) if isinstance(edit, Drop | Put) else None


def storage_sizes(rewritten: Rewritten) -> dict[str, int]:
    """Return the storages that a pickle refers to, in order of first use: key -> stated number of elements."""
    sizes: dict[str, int] = {}
    for persid in rewritten.persids:
        pid = persid.pid
        if type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage":
            sizes.setdefault(str(pid[2]), pid[4] if type(pid[4]) is int else 0)
    return sizes


def without(found: TorchObject, drops: Sequence[Drop] = (), *, gone: Collection[int] = ()) -> Rewritten:
    """Return the pickle of `found` without the items that `drops` name.

    Args:
        drops: keys, as they are shown, and the address of their mapping; a key that occurs twice is dropped twice.
        gone: ``id`` of nodes (such as a tensor's call) that are left out of every mapping that has them as a value, and
            are replaced by None anywhere else.

    Raises:
        NoSuchTensor: an address has no mapping, or the mapping lacks a key.
        Unsupported: as `reemit`.
    """
    items: dict[int, set[int]] = {}
    node_at = NodesByAddress(found.graph.root, found.holders)
    for drop in drops:
        mapping = node_at(drop.at)
        holder, rows = _rows(mapping, drop.at)
        names = labels([key for key, _ in rows])
        missing = set(drop.names).difference(names)
        if missing:
            raise NoSuchTensor("no such key", where=join(drop.at, min(missing)))
        wanted = set(drop.names)
        items.setdefault(id(holder), set()).update(i for i, name in enumerate(names) if name in wanted)
    return reemit(found.graph, items=items, gone=gone)


def _rows(mapping: Any, at: str) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the node that holds the items of `mapping`, and the items, repeated keys included."""
    if pairs(mapping) is None:
        raise NoSuchTensor("this is not a mapping", where=at)
    if type(mapping) is Call and not mapping.items and mapping.arguments:
        # Python 2 pickled an OrderedDict as OrderedDict([[key, value], ...]), and a Counter is Counter({...}).
        held = mapping.arguments[0]
        if type(held) is Dict:
            return held, held.items
        if type(held) is list:
            return held, [_first(row) for row in held]
    return mapping, mapping.items or []


def _first(row: Any) -> tuple[Any, Any]:
    return row[0] if type(row) in (list, tuple) and row else None, row


def legacy_plan(pickle: bytes, storages: Sequence[tuple[str, Data, int]], dest: str) -> Plan:
    """Plan a legacy file from an object pickle and (key, data, number of elements) of each storage."""
    sized = [(key, data, max(data.length // max(count, 1), 1)) for key, data, count in storages]
    return Plan((OutputFile.of(dest, legacy_layout.fresh(pickle, sized, dest)),))


def counted(graph: Graph, rewritten: Rewritten) -> dict[str, str] | None:
    """Return new storage keys for a pickle made from `graph`: torch.save numbers them in order of first use.

    Return None if the keys of `graph` are not numbered that way.
    """
    keys = list(storage_sizes(Rewritten(b"", tuple(graph.persids))))
    if keys != list(map(str, range(len(keys)))):
        return None
    return {key: str(number) for number, key in enumerate(storage_sizes(rewritten))}


def renumbered(rewritten: Rewritten, keys: Mapping[str, str], path: str) -> Rewritten:
    """Return the same pickle with these storage keys, each a separate string, as torch.save writes them."""
    graph = parse(rewritten.pickle, path=path, where="edited pickle")
    new: dict[int, PersId] = {}
    for persid in graph.persids:
        pid = persid.pid
        if type(pid) is tuple and len(pid) >= 5 and str(pid[2]) in keys:
            new[id(persid)] = PersId((*pid[:2], Key(keys[str(pid[2])]), *pid[3:]), persid.position, -1)
    return reemit(graph, replaced=new)


def storage_keys(rewritten: Rewritten, path: str) -> list[str]:
    """Return the keys of the storages that a pickle still refers to, in order.

    Raises:
        DamagedFile: a reference is not valid.
    """
    keys: dict[str, None] = {}
    for persid in rewritten.persids:
        if type(persid.pid) is tuple and persid.pid[:1] == ("module",):
            continue
        try:
            key = fields(persid)[0]
        except BadTensor as error:
            raise DamagedFile(str(error), path=path, where="pickle", offset=persid.position) from None
        keys[key] = None
    return list(keys)

"""Repair of a torch file: a fresh one with what is provably intact; the rest is left out or filled, and listed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckptfix.checkpoint import Checkpoint, Data, OutputFile, Plan, Storage, TensorEntry, address, dtypes
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.formats.repairs import LostTensor, Repair, leaves
from ckptfix.formats.torch import zip_layout
from ckptfix.formats.torch.common import StorageTable, fields, typed_apart, view_of
from ckptfix.formats.torch.object import TorchObject
from ckptfix.formats.torch.rewrite import legacy_plan, renumbered, storage_keys
from ckptfix.formats.torch.tensors import BadTensor, UnknownTensor, is_tensor, tensor_entry
from ckptfix.io.source import found_as, stamp
from ckptfix.ops.repair.clean import clean, clean_records
from ckptfix.ops.repair.fill import Allowance, Donor, Fill, Leaf, constant, taken_from
from ckptfix.ops.repair.remains import IntactStorage, Wreck
from ckptfix.pickles import Call, PersId
from ckptfix.pickles.graph import Node
from ckptfix.pickles.reemit import Rewritten, children_to_write, every_node, reemit
from ckptfix.words import some
from ckptfix.zips.names import safe_name


def repair_torch(wreck: Wreck, *, fill: Fill | None = None, donor: Checkpoint | None = None) -> Repair:
    """Plan the repair of a torch checkpoint whose object is intact.

    Args:
        fill: the replacement of lost tensors that `donor` does not have.
        donor: an older checkpoint, whose tensors with the same key, shape and dtype are used first.

    Raises:
        DamagedFile: no tensor is intact, and nothing is filled.
    """
    found = wreck.found
    assert found is not None
    _note_cases(wreck)
    sight = _Lookup(wreck)
    cleaned = clean(found)
    every = zip(sight.tensors(found), found.tensors, strict=True)
    rows: list[Row] = []
    stands: dict[int, tuple[Node, Node]] = {}
    losses: list[LostTensor] = []
    for row, (at, _, node) in every:
        # A tensor with a second address is lost at this one together with the object that holds it here.
        holder = found.holders.get(at, node)
        if cleaned.lost(node) or cleaned.lost(holder):
            shape, dtype = (row[1].shape, row[1].dtype) if row[1] is not None else (None, "")
            losses.append(LostTensor(row[0], shape, dtype, "it is an argument of code that is left out"))
        elif id(node) in sight.unusable:
            losses.append(LostTensor(row[0], None, "", sight.unusable[id(node)]))
        else:
            rows.append(row)
            stands[id(row[1])] = node, holder
    left_out = (*cleaned.findings, *clean_records(wreck.extras))
    filled = _filled(wreck, sight, rows, fill, donor)
    kept: list[TensorEntry] = []
    for name, entry, lost in rows:
        if not lost:
            if entry is not None:
                kept.append(entry)
            continue
        whats = {filled.done.get(key, "") for key in lost}
        what = "" if "" in whats else ", ".join(sorted(whats))
        reason = sight.reason(lost)
        if not what and (refused := [filled.refused[key] for key in lost if key in filled.refused]):
            reason += f"; not filled: {refused[0]}"
        shape, dtype = (entry.shape, entry.dtype) if entry is not None else (None, "")
        taken = bool(what) and filled.taken.issuperset(lost)
        losses.append(LostTensor(name, shape, dtype, reason, what, taken))
    for key, data in filled.data.items():
        wreck.parts[key] = IntactStorage(data, None, filled.counts.get(key, sight.counts.get(key, 0)))
    after = _Lookup(wreck, frozenset(filled.data))
    after.unusable.update(sight.unusable)
    after.see_all(found)
    gone = after.gone(found)
    if gone:
        left = _left(found.graph.root, gone)
        inside = [one for one in kept if not left.issuperset(map(id, stands[id(one)]))]
        reason = "it belongs to a tensor that is left out"
        losses += [LostTensor(one.name, one.shape, one.dtype, reason) for one in inside]
        lost_too = {id(one) for one in inside}
        kept = [one for one in kept if id(one) not in lost_too]
    if losses and not kept and not any(loss.filled for loss in losses):
        _refuse_empty(wreck.path, losses)
    resized = _resized(found, filled.counts)
    # Calls whose results an unpickler drops are in the stream but not in the object; only a new stream lacks them.
    if gone or resized or cleaned.kept is not None:
        rewritten = reemit(found.graph, items=cleaned.items, gone=gone | cleaned.gone, replaced=resized)
    else:
        rewritten = _untouched(found)

    def plan_to(dest: str) -> Plan:
        return _plan(wreck, rewritten, dest)

    return Repair(wreck.format, tuple(kept), tuple(losses), tuple(wreck.notes), plan_to, left_out, compared=wreck.sums)


def _left(root: Node, gone: Collection[int]) -> set[int]:
    """Return ``id`` of every node that `root` reaches other than through a node in `gone`, or a key of one."""
    left: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) not in left and id(node) not in gone:
            left.add(id(node))
            stack += children_to_write(node, gone)
    return left


def _refuse_empty(path: str, losses: Sequence[LostTensor]) -> None:
    names = ", ".join(loss.name for loss in losses[:4])
    more = f" and {len(losses) - 4} more" if len(losses) > 4 else ""
    raise DamagedFile(
        f"none of its {len(losses)} tensors is intact: {names}{more} ({losses[0].reason})",
        path=path,
        hint="copy them from an older checkpoint with --fill-from OLDER",
    )


MAX_BELOW = 1_000_000
"""Nodes that are visited below calls that do not describe a tensor; such calls may be nested."""

Row = tuple[str, TensorEntry | None, Collection[str]]
"""A tensor: its name, its entry if it describes one, and the keys of its lost storages."""


class _Lookup(StorageTable):
    """The storages of a wreck as the object refers to them: intact ones with their data, lost ones without.

    `counts` has the elements of each storage that was asked for, and `viewed` the keys that a reference names with a
    view. Storages in `filled` are complete at any size. `unusable` maps ``id`` of a node to why it does not describe a
    tensor, so that every loader fails on it; nodes with an unknown name only are not among them.
    """

    def __init__(self, wreck: Wreck, filled: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.wreck = wreck
        self.filled = filled
        if wreck.found is not None:
            self.apart = typed_apart(wreck.found.graph)
        self.counts: dict[str, int] = {}
        self.lost: dict[str, str] = {}
        self.viewed: set[str] = set()
        self.unusable: dict[int, str] = {}
        self.budget = MAX_BELOW

    def __call__(self, persid: PersId) -> Storage:
        if view_of(persid) is not None:
            self.viewed.add(fields(persid)[0])
        return super().__call__(persid)

    def make(self, key: str, kind: str, location: str, nbytes: int) -> Storage:
        self.counts[key] = nbytes // dtypes.by_name(kind).itemsize
        part = self.wreck.parts.get(key)
        whole = part is not None and (part.data.length == nbytes or key in self.filled)
        data = part.data if part is not None and whole and location != "meta" else None
        # torch asks for the record of a storage on the meta device too, and a legacy file has none.
        if not whole and (location != "meta" or not self.wreck.legacy):
            reason = self.wreck.faults.get(key, "its storage is missing from the file")
            if part is not None:
                reason = f"its storage has {part.data.length} bytes where {nbytes} are promised"
            self.lost[key] = reason
        return Storage(key, kind, nbytes, location, data, part.crc32 if part is not None else None)

    def reason(self, keys: Iterable[str]) -> str:
        return "; ".join(dict.fromkeys(f"storage {key}: {self.lost[key]}" for key in sorted(keys)))

    def tensors(self, found: TorchObject) -> list[Row]:
        """List every tensor of the object that has a name."""
        self.see_all(found)
        rows: list[Row] = []
        for at, key, node in found.tensors:
            entry, lost = self.look(node, key, at)
            rows.append((address.join(at, key), entry, lost))
        return rows

    def see_all(self, found: TorchObject) -> None:
        """Ask for every storage once, to find out which are lost."""
        for persid in found.graph.persids:
            with suppress(BadTensor):
                self(persid)

    def look(self, node: Call | PersId, key: str = "", at: str = "") -> tuple[TensorEntry | None, Collection[str]]:
        """Return the entry of a tensor's node, and the keys of the lost storages that it needs."""
        try:
            entry = tensor_entry(node, key, at, self)
        except (BadTensor, OverflowError) as error:
            lost = self._lost_below(node)
            if not lost and not isinstance(error, UnknownTensor):
                self.unusable[id(node)] = str(error)
            return None, lost
        storages = [one.storage for one in leaves(entry) if one.storage is not None]
        return entry, {storage.key for storage in storages if storage.key in self.lost}

    def _lost_below(self, node: Call | PersId) -> set[str]:
        """Return the keys of lost storages anywhere in a call that is not a known kind of tensor."""
        keys: set[str] = set()
        if not self.lost:
            return keys
        for below in every_node(node):
            self.budget -= 1
            if self.budget < 0:
                raise Unsupported("it lacks storages, and its calls are nested too deeply", path=self.wreck.path)
            if type(below) is PersId:
                try:
                    key = self(below).key
                except BadTensor:
                    continue
                if key in self.lost:
                    keys.add(key)
        return keys

    def gone(self, found: TorchObject) -> set[int]:
        """Return ``id`` of every node that needs a lost storage or does not describe a tensor, named or not."""
        gone: set[int] = set()
        if not self.lost and not self.unusable:
            return gone
        for node in every_node(found.graph.root):
            if type(node) is PersId or (type(node) is Call and is_tensor(node)):
                _, lost = self.look(node)
                if lost or id(node) in self.unusable:
                    gone.add(id(node))
        return gone


@dataclass(slots=True)
class _Filled:
    """Results by storage key: the new bytes, their description, or why the other file could not fill it.

    `counts` has the elements of those that get fewer than the pickle promises; `taken` those that came from the other
    file.
    """

    data: dict[str, Data] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)


def _filled(
    wreck: Wreck, sight: _Lookup, rows: Sequence[Row], fill: Fill | None, donor: Checkpoint | None
) -> _Filled:
    out = _Filled()
    if fill is None and donor is None:
        return out
    other = Donor(donor, wreck.byteorder) if donor is not None else None
    allowance = Allowance(wreck.path, _size(wreck))
    on: dict[str, list[Leaf]] = {}
    storages: dict[str, Storage] = {}
    for name, entry, lost in rows:
        for leaf in leaves(entry) if entry is not None and lost else ():
            if leaf.storage is not None and leaf.storage.key in lost:
                on.setdefault(leaf.storage.key, []).append(Leaf(name, leaf))
                storages[leaf.storage.key] = leaf.storage
    for key, several in on.items():
        taken: Data | str = other.storage(storages[key], several) if other is not None else ""
        if not isinstance(taken, str):
            out.data[key], out.done[key] = taken, taken_from(other)
            out.taken.add(key)
        elif fill is not None:
            itemsize = dtypes.by_name(storages[key].dtype).itemsize
            count = -(-reached([leaf.entry for leaf in several]) // itemsize)
            nbytes = storages[key].nbytes if key in sight.viewed else min(count * itemsize, storages[key].nbytes)
            if nbytes < storages[key].nbytes:
                out.counts[key] = count
            allowance.take(nbytes, several[0].name)
            out.data[key], out.done[key] = constant(fill, several, nbytes, wreck.byteorder)
        else:
            out.refused[key] = taken
    return out


def _size(wreck: Wreck) -> int:
    """Return the bytes of the damaged file, or of the intact files of a folder."""
    whole = sum(part.data.length for part in wreck.parts.values())
    return max(stamp(wreck.path).size, whole) if found_as(wreck.path) == "file" else whole


def reached(entries: Sequence[TensorEntry]) -> int:
    """Return how many bytes, from the beginning of their storage, dense tensors use."""
    end = 0
    for entry in entries:
        if 0 not in entry.shape:
            steps = ((size - 1) * step for size, step in zip(entry.shape, entry.stride, strict=True))
            end = max(end, dtypes.by_name(entry.dtype).nbytes(entry.offset + 1 + sum(steps)))
    return end


def _resized(found: TorchObject, counts: Mapping[str, int]) -> dict[int, PersId]:
    """Map ``id`` of each reference to a storage of `counts` to a copy with that number of elements."""
    made: dict[int, PersId] = {}
    for node in found.graph.persids if counts else ():
        with suppress(BadTensor):
            key = fields(node)[0]
            if key in counts:
                made[id(node)] = PersId((*node.fields[:4], counts[key], *node.fields[5:]), node.position, -1)
    return made


def _untouched(found: TorchObject) -> Rewritten:
    graph = found.graph
    return Rewritten(graph.data[graph.start : graph.end], tuple(graph.persids))


def _plan(wreck: Wreck, rewritten: Rewritten, dest: str) -> Plan:
    """Plan a fresh file of the same format."""
    keys = [key for key in storage_keys(rewritten, wreck.path) if key in wreck.parts]
    parts = [(key, wreck.parts[key]) for key in keys]
    if wreck.legacy:
        return legacy_plan(rewritten.pickle, [(key, part.data, part.count) for key, part in parts], dest)
    names = _distinct(keys)
    if any(name != key for key, name in names.items()):
        rewritten = renumbered(rewritten, names, wreck.path)
    storages = [(names[key], part.data, part.crc32) for key, part in parts]
    segments = zip_layout.fresh(rewritten.pickle, storages, wreck.byteorder, _safely_named(wreck, names.values()))
    return Plan((OutputFile.of(dest, segments),))


def _note_cases(wreck: Wreck) -> None:
    """Note which storages torch confuses, as it finds records regardless of the case of their names."""
    alike: dict[str, list[str]] = {}
    for key in () if wreck.legacy else wreck.parts:
        alike.setdefault(key.lower(), []).append(key)
    names = [" and ".join(f"data/{key}" for key in several) for several in alike.values() if len(several) > 1]
    if names:
        message = f"torch reads the same record for {some(names)}; both are kept, under new keys"
        wreck.note("case-variant", message, warns=True)


def _distinct(keys: Sequence[str]) -> dict[str, str]:
    """Map each storage key to its new one, because torch cannot tell apart names that differ only in case."""
    taken = {key.lower() for key in keys}
    used: set[str] = set()
    names: dict[str, str] = {}
    for key in keys:
        number = len(keys)
        name = key
        while name.lower() in used or (name != key and name in taken):
            name, number = str(number), number + 1
        used.add(name.lower())
        names[key] = name
    return names


def _safely_named(wreck: Wreck, keys: Iterable[str]) -> dict[str, tuple[Data, int | None]]:
    """Return the records that torch does not write, under names that stay inside the folder and are unique."""
    taken = {"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment"}
    taken.update(f"data/{key}".lower() for key in keys)
    named: dict[str, tuple[Data, int | None]] = {}
    for name, row in wreck.extras.items():
        safe = safe_name(name, taken)
        taken.add(safe.lower())
        named[safe] = row
    return named

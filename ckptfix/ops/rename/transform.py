"""The state dicts of a checkpoint after a rules file: new keys and new tensors, planned without writing anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import count

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    NameList,
    Storage,
    TensorEntry,
    contiguous_stride,
    dtypes,
    refuse_unusable,
    same_place,
)
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.errors import KeyConflict, Refused, Unsupported
from ckptfix.formats import weights_of
from ckptfix.io import byte_view
from ckptfix.io.byte_view import ByteView
from ckptfix.names.operations import COMPUTE
from ckptfix.names.rulefile import Rules, TensorRule, several
from ckptfix.ops.quantized import refuse_apart
from ckptfix.ops.rank_shards import refuse_odd_keys, refuse_piece
from ckptfix.ops.rename.groups import Grouped, Slot, TensorGroup, grouped
from ckptfix.ops.rename.values import Misfit, Nested, Worker

Row = tuple[str, TensorEntry | None]
"""A key of the output, and its tensor; None keeps the value of the old key."""


@dataclass(slots=True)
class StateDictChange:
    """A state dict, and its contents after the rules.

    Attributes:
        at: its address.
        keys: of the input, in order.
        rows: old key -> the rows that replace it; a key that is missing here stays unchanged.
        entries: old key -> its tensor.
        groups: first key -> its group.
        members: key -> its group.
    """

    at: str
    keys: tuple[str, ...]
    rows: dict[str, list[Row]]
    entries: Mapping[str, TensorEntry]
    groups: Mapping[str, TensorGroup]
    members: Mapping[str, TensorGroup]

    def after(self) -> Iterator[tuple[str, Row]]:
        """Yield the old key and the row of each key of the output, in order."""
        for key in self.keys:
            for row in self.rows.get(key, [(key, None)]):
                yield key, row


@dataclass(slots=True)
class TransformedTensors:
    """The tensors of a checkpoint after the rules.

    Attributes:
        made: name of a tensor of the input -> the tensors made from it.
        partly: tensors that lose rows, or are replaced by others.
        summed: storages whose checksum is combined into that of a new tensor.
        cut: the rows that are cut off, in words.
        dropped: names of tensors that are left out.
        untied: second names that are left out, of tensors that stay.
        used: the lines that matched a key.
        followed: address and key of each name in a flattened optimizer that follows those of the model.
    """

    rules: Rules
    sites: list[StateDictChange] = field(default_factory=list)
    made: dict[str, tuple[TensorEntry, ...]] = field(default_factory=dict)
    partly: set[str] = field(default_factory=set)
    summed: set[tuple[str, str]] = field(default_factory=set)
    cut: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)
    used: set[str | int] = field(default_factory=set)
    followed: set[tuple[str, str]] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=count)
    _known: dict[object, list[tuple[Slot, TensorEntry]]] = field(default_factory=dict)

    def add(self, checkpoint: Checkpoint, site: NameList, current: Mapping[str, str]) -> None:
        """Add a state dict, and apply the rules to it.

        Args:
            current: key -> the name that the lines see.

        Raises:
            Refused: a line does not fit.
            KeyConflict: two keys would get the same name.
        """
        keys = tuple(dict.fromkeys(site.names))
        groups = grouped(keys, self.rules, current)
        self.used |= groups.used
        entries = {entry.key: entry for entry in weights_of(checkpoint, site.at, views=False)}
        if groups.groups or groups.added:
            refuse_piece(checkpoint, site.at)
            refuse_odd_keys(checkpoint, site.at)
            steps = [(group.old(), group.rule.operations) for group in groups.groups.values()]
            rules = [group.rule for group in groups.groups.values()]
            computed = ((rule, one.name) for rule in rules for one in rule.operations if one.name in COMPUTE)
            rule, name = next(computed, (None, ""))
            if rule is not None and checkpoint.byteorder != "little":
                raise self.refused(rule, f"`{name}` computes numbers, and the file is big-endian: convert it first")
            refuse_apart(checkpoint, site.at, steps)
        found = StateDictChange(site.at, keys, {}, entries, groups.groups, groups.members)
        for key in keys:
            if key in groups.groups:
                found.rows[key] = self._rows_of(found, groups.groups[key])
            elif key in groups.members:
                found.rows[key] = []
            elif (new := groups.names.get(key, current[key])) != key:
                found.rows[key] = [(new, None)]
        self._add_names(found, groups)
        self._refuse_untied(found)
        _refuse_conflicts(found, checkpoint.path)
        self.sites.append(found)

    def _rows_of(self, site: StateDictChange, group: TensorGroup) -> list[Row]:
        kind = group.rule.operations[0].name
        if kind in ("drop", "untie"):
            gone = self.dropped if kind == "drop" else self.untied
            gone += [join(site.at, key) for key in group.old() if key in site.entries]
            return []
        entries = []
        for key in group.old():
            if key not in site.entries:
                raise self.refused(group.rule, f"{join(site.at, key)} is not a tensor")
            entries.append(site.entries[key])
        return [(group.new(slot), entry) for slot, entry in self.arranged(group, entries)]

    def arranged(self, group: TensorGroup, entries: Sequence[TensorEntry]) -> list[tuple[Slot, TensorEntry]]:
        """Apply a group's line to tensors, one for each of its keys, in their order.

        Raises:
            Refused: they do not fit.
        """
        places = tuple(same_place(entry) for entry in entries)
        known = (group.rule.line, places)
        made = self._known.get(known) if None not in places else None
        if made is None:
            made = self._known[known] = self._arranged(group, entries)
        rows = [(slot, replace(entry, key=group.new(slot), at=entries[0].at)) for slot, entry in made]
        for entry in entries:
            self.made[entry.name] = tuple(entry for _, entry in rows)
        return rows

    def _arranged(self, group: TensorGroup, entries: Sequence[TensorEntry]) -> list[tuple[Slot, TensorEntry]]:
        rule = group.rule
        assert rule.new is not None
        first = entries[0]
        shown = several([f"{entry.name} {list(entry.shape)}" for entry in entries])
        if len({entry.dtype for entry in entries}) > 1:
            kinds = several(list(dict.fromkeys(entry.dtype for entry in entries)))
            raise self.refused(rule, f"{shown} have different dtypes: {kinds}")
        value: Nested = [array_of(entry) for entry in entries]
        assert isinstance(value, list)
        parts = len(rule.old.names)
        if rule.old.running is not None and parts > 1:
            value = [value[start : start + parts] for start in range(0, len(value), parts)]
        if not rule.old.axes:
            value = value[0]
        wanted = len(rule.new.names) if len(rule.new.names) > 1 else None
        worker = Worker(first.name, wanted, first.dtype)
        try:
            value = worker.made(value, rule.operations, rule.new.axes)
        except Misfit as error:
            raise self.refused(rule, f"{shown}: {error}") from None
        if worker.cut:
            self.partly |= {entry.name for entry in entries}
            self.cut += [f"{first.name} {rows}" for rows in dict.fromkeys(worker.cut)]
        if isinstance(value, ByteView) and value.crc32 is not None:
            self.summed |= {entry.storage.identity for entry in entries if entry.storage is not None}
        return [(slot, self._entry(first, array)) for slot, array in _slots(value, rule.new.running is not None)]

    def _entry(self, like: TensorEntry, array: ByteView) -> TensorEntry:
        assert like.storage is not None
        key = f"made {next(self._numbers)}"
        data = byte_view.bytes_of(array)
        storage = Storage(key, like.dtype, array.nbytes, like.storage.location, data, array.crc32)
        stride = contiguous_stride(array.shape)
        return replace(like, storage=storage, shape=array.shape, stride=stride, offset=0)

    def _add_names(self, site: StateDictChange, groups: Grouped) -> None:
        """Add second names of tensors, whatever their first name and shape have become."""
        for key, added in groups.added.items():
            rows = site.rows.get(key, [(key, None)])
            for group in added:
                if key not in site.entries:
                    raise self.refused(group.rule, f"{join(site.at, key)} is not a tensor")
                if len(rows) != 1:
                    raise self.refused(group.rule, f"{join(site.at, key)} becomes {len(rows)} tensors")
                site.rows[key] = [*site.rows.get(key, [(key, None)]), (group.new((0, 0)), rows[0][1])]

    def _refuse_untied(self, site: StateDictChange) -> None:
        """Raise `Refused` if a second name to leave out belongs to a different tensor."""
        names = {row[0]: key for key, row in site.after()}
        for key, group in site.groups.items():
            if group.rule.operations[0].name != "untie":
                continue
            other = names.get(group.new((0, 0)))
            one, two = site.entries.get(key), site.entries.get(other or "")
            if one is None or two is None or same_place(one) != same_place(two) or same_place(one) is None:
                raise self.refused(group.rule, f"{join(site.at, key)} is not the same tensor as {group.new((0, 0))}")

    def refused(self, rule: TensorRule, message: str) -> Refused:
        """Return the error for a line that does not fit."""
        return Refused(message, path=self.rules.path, where=f"line {rule.line}", hint=f"the line is: {rule}")


def _slots(value: Nested, numbered: bool) -> Iterator[tuple[Slot, ByteView]]:
    """Yield the tensors that a line made, by the slots of its right side."""
    if isinstance(value, ByteView):
        yield (0, 0), value
        return
    for index, one in enumerate(value):
        if isinstance(one, list):
            yield from (((index, part), array) for part, array in enumerate(one) if isinstance(array, ByteView))
        else:
            yield ((index, 0) if numbered else (0, index)), one


def array_of(entry: TensorEntry) -> ByteView:
    """Return a tensor as an array.

    Raises:
        Unsupported: it is not dense, packs several elements in a byte, or is compressed.
        DamagedFile: it reaches outside its storage.
    """
    row = dtypes.find(entry.dtype)
    storage = entry.storage
    refuse_unusable(entry, entry.name)
    if row is None or row.packed != 1 or row.nbytes(8) != 8 * row.itemsize:
        raise Unsupported(f"operations cannot change {entry.dtype}: it packs elements in bytes", where=entry.name)
    if entry.detail or storage is None or not isinstance(storage.data, ByteRange):
        hint = "convert the file first, and edit the result"
        message = "operations cannot change a tensor that is compressed, or of a special kind"
        raise Unsupported(message, where=entry.name, hint=hint)
    whole = entry.is_contiguous and not entry.offset and entry.nbytes == storage.nbytes
    crc32 = storage.crc32 if whole else None
    return ByteView(storage.data, row.itemsize, entry.shape, entry.stride, entry.offset, crc32)


def _refuse_conflicts(site: StateDictChange, path: str) -> None:
    origin: dict[str, list[str]] = {}
    for key, (new, _) in site.after():
        origin.setdefault(new, []).append(key)
    pairs = tuple((new, tuple(dict.fromkeys(old))) for new, old in origin.items() if len(old) > 1)
    if pairs:
        new, old = pairs[0]
        more = f", and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        message = f"{' and '.join(repr(name) for name in old)} would both become {new!r}{more}"
        if len(old) == 1:
            message = f"{old[0]!r} would become {new!r} twice{more}"
        hint = "nothing was written; give one of them a different name"
        raise KeyConflict(message, pairs=pairs, path=path, where=site.at or None, hint=hint)

"""What a rules file makes of the state dicts of a checkpoint: new names and new tensors, and nothing written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    NameSite,
    Storage,
    TensorEntry,
    contiguous_stride,
    dtypes,
    refuse_unusable,
    same_place,
)
from ckptfix.checkpoint.address import join
from ckptfix.errors import KeyConflict, Refused, Unsupported
from ckptfix.formats import weights_of
from ckptfix.io import arranged
from ckptfix.io.arranged import Array
from ckptfix.names.rulefile import Rules, TensorRule, several
from ckptfix.ops.pieces import refuse_odd_keys, refuse_piece
from ckptfix.ops.quantized import refuse_apart
from ckptfix.ops.rename.groups import Group, Grouped, Slot, grouped
from ckptfix.ops.rename.values import Misfit, Nested, Worker

Row = tuple[str, TensorEntry | None]
"""A key of the output, and its tensor; None for the value that the old key has."""


@dataclass(slots=True)
class Site:
    """A state dict, and what becomes of it.

    Attributes:
        at: its address.
        keys: of the input, in order.
        rows: old key -> what stands in its place; a key that is not in it stays as it is.
        entries: old key -> its tensor.
        groups: first key -> its group.
        members: key -> its group.
    """

    at: str
    keys: tuple[str, ...]
    rows: dict[str, list[Row]]
    entries: Mapping[str, TensorEntry]
    groups: Mapping[str, Group]
    members: Mapping[str, Group]

    def after(self) -> Iterator[tuple[str, Row]]:
        """The old key and the row of each key of the output, in order."""
        for key in self.keys:
            for row in self.rows.get(key, [(key, None)]):
                yield key, row


@dataclass(slots=True)
class Made:
    """All that becomes of the tensors of a checkpoint.

    Attributes:
        made: name of a tensor of the input -> what is made of it.
        partly: those of which rows are cut off, or that others stand for.
        summed: storages whose checksum is joined into that of a new tensor.
        cut: what is cut off, in words.
        dropped: names of tensors that are left out.
        untied: second names that are left out, of tensors that stay.
        used: the lines that concerned a key.
        followed: address and key of each name in a flattened optimizer that follows those of the model.
    """

    rules: Rules
    sites: list[Site] = field(default_factory=list)
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

    def add(self, checkpoint: Checkpoint, site: NameSite, current: Mapping[str, str]) -> None:
        """Take in what becomes of a state dict.

        Args:
            current: key -> the name that the lines see.

        Raises:
            Refused: a line does not fit.
            KeyConflict: two keys would have one name.
        """
        keys = tuple(dict.fromkeys(site.names))
        groups = grouped(keys, self.rules, current)
        self.used |= groups.used
        entries = {entry.key: entry for entry in weights_of(checkpoint, site.at, views=False)}
        if groups.groups or groups.added:
            refuse_piece(checkpoint, site.at)
            refuse_odd_keys(checkpoint, site.at)
            steps = [(group.old(), group.rule.operations) for group in groups.groups.values()]
            refuse_apart(checkpoint, site.at, steps)
        found = Site(site.at, keys, {}, entries, groups.groups, groups.members)
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

    def _rows_of(self, site: Site, group: Group) -> list[Row]:
        kind = group.rule.operations[0].name
        if kind in ("drop", "untie"):
            gone = self.dropped if kind == "drop" else self.untied
            gone += [join(site.at, key) for key in group.old() if key in site.entries]
            return []
        entries = []
        for key in group.old():
            if key not in site.entries:
                raise self.refused(group.rule, f"{join(site.at, key)} is no tensor")
            entries.append(site.entries[key])
        return [(group.new(slot), entry) for slot, entry in self.arranged(group, entries)]

    def arranged(self, group: Group, entries: Sequence[TensorEntry]) -> list[tuple[Slot, TensorEntry]]:
        """What the line of a group makes of tensors, one for each of its keys, which stand in their order.

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

    def _arranged(self, group: Group, entries: Sequence[TensorEntry]) -> list[tuple[Slot, TensorEntry]]:
        rule = group.rule
        assert rule.new is not None
        first = entries[0]
        shown = several([f"{entry.name} {list(entry.shape)}" for entry in entries])
        if len({entry.dtype for entry in entries}) > 1:
            kinds = several(list(dict.fromkeys(entry.dtype for entry in entries)))
            raise self.refused(rule, f"{shown} are of {kinds}")
        value: Nested = [array_of(entry) for entry in entries]
        assert isinstance(value, list)
        parts = len(rule.old.names)
        if rule.old.running is not None and parts > 1:
            value = [value[start : start + parts] for start in range(0, len(value), parts)]
        if not rule.old.axes:
            value = value[0]
        wanted = len(rule.new.names) if len(rule.new.names) > 1 else None
        worker = Worker(first.name, wanted)
        try:
            value = worker.made(value, rule.operations, rule.new.axes)
        except Misfit as error:
            raise self.refused(rule, f"{shown}: {error}") from None
        if worker.cut:
            self.partly |= {entry.name for entry in entries}
            self.cut += [f"{first.name} {rows}" for rows in dict.fromkeys(worker.cut)]
        if isinstance(value, Array) and value.crc32 is not None:
            self.summed |= {entry.storage.identity for entry in entries if entry.storage is not None}
        return [(slot, self._entry(first, array)) for slot, array in _slots(value, rule.new.running is not None)]

    def _entry(self, like: TensorEntry, array: Array) -> TensorEntry:
        assert like.storage is not None
        key = f"made {next(self._numbers)}"
        data = arranged.bytes_of(array)
        storage = Storage(key, like.dtype, array.nbytes, like.storage.location, data, array.crc32)
        stride = contiguous_stride(array.shape)
        return replace(like, storage=storage, shape=array.shape, stride=stride, offset=0)

    def _add_names(self, site: Site, groups: Grouped) -> None:
        """Second names for tensors, under whatever name and in whatever shape they are."""
        for key, added in groups.added.items():
            rows = site.rows.get(key, [(key, None)])
            for group in added:
                if key not in site.entries:
                    raise self.refused(group.rule, f"{join(site.at, key)} is no tensor")
                if len(rows) != 1:
                    raise self.refused(group.rule, f"{join(site.at, key)} becomes {len(rows)} tensors")
                site.rows[key] = [*site.rows.get(key, [(key, None)]), (group.new((0, 0)), rows[0][1])]

    def _refuse_untied(self, site: Site) -> None:
        """Refuse to leave out a second name of what is another tensor."""
        names = {row[0]: key for key, row in site.after()}
        for key, group in site.groups.items():
            if group.rule.operations[0].name != "untie":
                continue
            other = names.get(group.new((0, 0)))
            one, two = site.entries.get(key), site.entries.get(other or "")
            if one is None or two is None or same_place(one) != same_place(two) or same_place(one) is None:
                raise self.refused(group.rule, f"{join(site.at, key)} is not the same tensor as {group.new((0, 0))}")

    def refused(self, rule: TensorRule, message: str) -> Refused:
        """The error of a line that does not fit."""
        return Refused(message, path=self.rules.path, where=f"line {rule.line}", hint=f"the line is: {rule}")


def _slots(value: Nested, numbered: bool) -> Iterator[tuple[Slot, Array]]:
    """The tensors that a line made, by the slots of its right side."""
    if isinstance(value, Array):
        yield (0, 0), value
        return
    for index, one in enumerate(value):
        if isinstance(one, list):
            yield from (((index, part), array) for part, array in enumerate(one) if isinstance(array, Array))
        else:
            yield ((index, 0) if numbered else (0, index)), one


def array_of(entry: TensorEntry) -> Array:
    """A tensor as an array.

    Raises:
        Unsupported: it is not dense, packs several elements in a byte, or is compressed.
        DamagedFile: it reaches outside its storage.
    """
    row = dtypes.find(entry.dtype)
    storage = entry.storage
    refuse_unusable(entry, entry.name)
    if row is None or row.packed != 1 or row.nbytes(8) != 8 * row.itemsize:
        raise Unsupported(f"an operation on {entry.dtype}, which packs several elements in a byte", where=entry.name)
    if entry.detail or storage is None or not isinstance(storage.data, ByteRange):
        hint = "convert the file first, and work on that"
        message = "an operation on a tensor that is compressed, or of a special kind"
        raise Unsupported(message, where=entry.name, hint=hint)
    whole = entry.is_contiguous and not entry.offset and entry.nbytes == storage.nbytes
    crc32 = storage.crc32 if whole else None
    return Array(storage.data, row.itemsize, entry.shape, entry.stride, entry.offset, crc32)


def _refuse_conflicts(site: Site, path: str) -> None:
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
        hint = "nothing was written; give one of them another name"
        raise KeyConflict(message, pairs=pairs, path=path, where=site.at or None, hint=hint)

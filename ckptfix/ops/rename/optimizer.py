"""The optimizer's state after its parameters were split, joined, transposed or left out.

A state with the parameter's own shape (Adam's moments, SGD's momentum) goes through the same operations. A state that
is one number, such as Adam's ``step``, is copied to each part of a tensor that is split, and must be equal for tensors
that are joined. Anything else is refused by name, because a factored or quantized moment cannot simply be rearranged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptfix.checkpoint import Storage, TensorEntry, same_place
from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.tree import Item, ListValue, TensorValue, Value, identity, label, listed, pairs_of
from ckptfix.commands import command
from ckptfix.errors import Refused
from ckptfix.formats.object_edit import ObjectEdit
from ckptfix.io.elements import row_major
from ckptfix.io.read import read_chunks
from ckptfix.names import no_weights
from ckptfix.names.rulefile import several
from ckptfix.names.slots import Slot
from ckptfix.ops.rename.groups import TensorGroup
from ckptfix.ops.rename.objects import optimizers, rows_of
from ckptfix.ops.rename.transform import StateDictChange, TransformedTensors
from ckptfix.words import plural

Key = int | str


def follow(edit: ObjectEdit, made: TransformedTensors) -> int:
    """Update every optimizer of the object; return how many of its parameters changed their number, name or state.

    Raises:
        Refused: a state of an optimizer cannot follow, or its parameter is unknown.
    """
    changed = 0
    for at, item in optimizers(edit.root):
        changed += _Optimizer(edit, made, at, item).follow()
    return changed


class _Optimizer:
    """One optimizer's state."""

    def __init__(self, edit: ObjectEdit, made: TransformedTensors, at: str, item: Item) -> None:
        self._checkpoint = edit.checkpoint
        self._edit = edit
        self._made = made
        self._at = at
        rows = rows_of(item)
        self._state = rows["state"]
        self._groups = listed(rows["param_groups"])
        self._ids = [_keys(rows_of(group).get("params")) for group in self._groups]

    def follow(self) -> int:
        everything = [key for ids in self._ids for key in ids]
        if not everything or not self._made.sites:
            return 0
        site, names = self._named(everything)
        if site is None or all(site.rows.get(name, [(name, None)]) == [(name, None)] for name in names.values()):
            return 0
        numbers = self._numbered(everything)
        state = rows_of(self._state)
        fresh: list[tuple[Item, Item]] = []
        number = 0
        changed = 0
        for group, ids in zip(self._groups, self._ids, strict=True):
            new_ids: list[Item] = []
            new_names: list[Item] = []
            for key in ids:
                for name, value in self._rows(site, names, key, ids, state):
                    new: Key = number if numbers else name
                    number += 1
                    changed += new != key or identity(value) != identity(state.get(label(key)))
                    new_ids.append(new)
                    new_names.append(name)
                    if value is not None:
                        fresh.append((new, value))
            self._replace_group(group, new_ids, new_names)
        known = {label(key) for key in everything}
        # States that do not belong to a parameter stay (Adafactor's counters under other keys).
        fresh += [(key, value) for key, value in pairs_of(self._state) or () if label(key) not in known]
        self._edit.replace(self._state, self._edit.with_rows(self._state, fresh))
        return changed

    def _replace_group(self, group: Item, ids: list[Item], names: list[Item]) -> None:
        new = {"params": self._edit.listing(ids), "param_names": self._edit.listing(names)}
        rows = [(key, new.get(label(key), value)) for key, value in pairs_of(group) or ()]
        self._edit.replace(group, self._edit.with_rows(group, rows))

    def _numbered(self, everything: Sequence[Key]) -> bool:
        """Return whether parameters are numbered; torch numbers them from 0 on, through all groups."""
        if all(isinstance(key, str) for key in everything):
            return False
        if list(everything) != list(range(len(everything))):
            raise self._refused("its parameters are not numbered from 0 on, as torch numbers them")
        return True

    def _named(self, everything: Sequence[Key]) -> tuple[StateDictChange | None, dict[Key, str]]:
        """Return the state dict with the optimizer's parameters, and the key of each.

        Raises:
            Refused: the parameters are uncertain.
        """
        names = self._own_names(everything)
        touched = [site for site in self._made.sites if site.rows]
        if names is not None:
            site = next((site for site in self._made.sites if set(names.values()) <= set(site.entries)), None)
            return site, names
        if not touched:
            return None, {}
        for site in self._made.sites:
            found = self._by_order(site, everything)
            if found is not None:
                return (site if site.rows else None), found
        raise self._refused(
            "it numbers its parameters, and it is uncertain which tensor of the model each number is"
        )

    def _own_names(self, everything: Sequence[Key]) -> dict[Key, str] | None:
        if all(isinstance(key, str) for key in everything):
            return {key: str(key) for key in everything}
        made: dict[Key, str] = {}
        for group, ids in zip(self._groups, self._ids, strict=True):
            names = _keys(rows_of(group).get("param_names"))
            if len(names) != len(ids):
                return None
            made |= {key: str(name) for key, name in zip(ids, names, strict=True)}
        return made

    def _by_order(self, site: StateDictChange, everything: Sequence[Key]) -> dict[Key, str] | None:
        """Assign parameters by the order of the state dict, if their number and shapes agree."""
        if len(self._groups) > 1:
            return None
        seen: set[object] = set()
        names = []
        for name, entry in site.entries.items():
            place = same_place(entry)
            if is_buffer(entry) or place in seen:
                continue
            if place is not None:
                seen.add(place)
            names.append(name)
        if len(names) != len(everything):
            return None
        made = dict(zip(everything, names, strict=True))
        for key, name in made.items():
            shapes = [entry.shape for entry in self._checkpoint.entries_at(self._address(key)) if entry.numel > 1]
            if shapes and not any(_is_moment(shape, site.entries[name].shape) for shape in shapes):
                return None
        return made

    def _address(self, key: Key) -> str:
        return join(join(self._at, "state"), label(key))

    def _rows(
        self,
        site: StateDictChange,
        names: Mapping[Key, str],
        key: Key,
        ids: Sequence[Key],
        state: Mapping[str, Item],
    ) -> Iterator[tuple[str, Item]]:
        """Yield the parameters that replace one: the name of each, and its state."""
        name = names[key]
        group = site.members.get(name)
        own = state.get(label(key))
        if group is None or not group.rule.new:
            if group is not None:
                self._leave_out(key)
                return
            new = next((row[0] for row in site.rows.get(name, [(name, None)])), name)
            yield new, own
            return
        if group.rule.operations[0].name == "untie":
            self._leave_out(key)
            return
        if name not in site.groups:
            return
        by_name = {other: number for number, other in names.items()}
        members = [by_name.get(other) for other in group.old()]
        elsewhere = [other for other, number in zip(group.old(), members, strict=True) if number not in ids]
        if elsewhere:
            raise self._refused(f"{several([name, *elsewhere])} are not all in one parameter group", group)
        keys = [number for number in members if number is not None]
        yield from self._states(site, group, keys, [state.get(label(number)) for number in keys])

    def _leave_out(self, key: Key) -> None:
        self._made.dropped += [entry.name for entry in self._checkpoint.entries_at(self._address(key))]

    def _states(
        self, site: StateDictChange, group: TensorGroup, keys: Sequence[Key], states: Sequence[Item]
    ) -> Iterator[tuple[str, Item]]:
        names = [row[0] for row in site.rows[next(key for key in group.old() if key in site.groups)]]
        there = [item for item in states if item is not None]
        if not there:
            yield from ((name, None) for name in names)
            return
        fields = [list(rows_of(item)) for item in states]
        if any(sorted(own) != sorted(fields[0]) for own in fields):
            raise self._refused(f"it does not keep the same states for all of {several(group.old())}", group)
        made: list[list[tuple[Item, Item]]] = [[] for _ in names]
        for field in fields[0]:
            for part, value in enumerate(self._field(site, group, keys, states, field, len(names))):
                made[part].append((field, value))
        for name, items in zip(names, made, strict=True):
            yield name, self._edit.mapping(items)

    def _field(
        self,
        site: StateDictChange,
        group: TensorGroup,
        keys: Sequence[Key],
        states: Sequence[Item],
        field: str,
        parts: int,
    ) -> list[Item]:
        """Return one state of the new parameters, computed from that of the old ones."""
        values = [rows_of(item)[field] for item in states]
        if not any(isinstance(value, TensorValue) for value in values):
            if any(_shared(value) != _shared(values[0]) or _shared(value) is _APART for value in values):
                raise self._refused(f"{field} is not the same for all of {several(group.old())}", group)
            return [values[0]] * parts
        entries = [self._entry(key, field) for key in keys]
        params = [site.entries[name] for name in group.old()]
        if all(entry.shape == param.shape for entry, param in zip(entries, params, strict=True)):
            rows = self._made.arranged(group, entries)
            return [self._value(entry) for _, entry in rows]
        if all(entry.numel == 1 for entry in entries):
            return self._copies(group, field, entries, parts)
        shape, whole = list(entries[0].shape), list(params[0].shape)
        raise self._refused(f"{field} of {params[0].key} has shape {shape}, but its parameter has {whole}", group)

    def _value(self, entry: TensorEntry | None) -> Item:
        return None if entry is None else self._edit.tensor(entry)

    def _entry(self, key: Key, field: str) -> TensorEntry:
        found = next((one for one in self._checkpoint.entries_at(self._address(key)) if one.key == field), None)
        if found is None:
            raise self._refused(f"{join(self._address(key), field)} cannot be read")
        return found

    def _copies(self, group: TensorGroup, field: str, entries: Sequence[TensorEntry], parts: int) -> list[Item]:
        """Copy one number that is kept for each parameter, to a separate tensor for each new one."""
        values = {b"".join(read_chunks(row_major(entry, self._checkpoint.byteorder))) for entry in entries}
        if len(values) > 1:
            raise self._refused(f"{field} is not the same for all of {several(group.old())}", group)
        first = entries[0]
        storage = first.storage
        assert storage is not None
        rows = []
        for part in range(parts):
            own = Storage(f"{first.name} {part}", storage.dtype, storage.nbytes, storage.location, storage.data)
            rows.append(replace(first, storage=replace(own, crc32=storage.crc32)))
        for entry in entries:
            self._made.made[entry.name] = tuple(rows)
            self._made.partly.add(entry.name)
        return [self._value(row) for row in rows]

    def _refused(self, message: str, group: TensorGroup | None = None) -> Refused:
        path = self._checkpoint.path
        hint = f"run `{command('slim', path, 'OUT')} --no-optimizer` first to drop its state, and edit the result"
        if group is not None:
            what = f"{message}, so it cannot follow `{group.rule.operations[0].name}`"
            return Refused(f"{what} (line {group.rule.line})", path=path, where=self._at or "optimizer", hint=hint)
        count = plural(sum(map(len, self._ids)), "parameter")
        return Refused(f"{message} ({count})", path=path, where=self._at, hint=hint)


def _is_moment(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether a moment may belong to a parameter of the shape `whole`: to all of it, its rows or its columns."""
    if len(shape) == len(whole):
        return all(size in (1, own) for size, own in zip(shape, whole, strict=True))
    return tuple(shape) in (tuple(whole[:-1]), (*whole[:-2], *whole[-1:]))


def _keys(item: Item) -> list[Key]:
    """Return the numbers and names in a list of parameters."""
    return [one for one in listed(item) if isinstance(one, int | str)]


_APART = object()


def _shared(item: Item) -> object:
    """Return what two parameters must have in common to share a state: a leaf or a tuple; `_APART` for others."""
    if isinstance(item, ListValue) and item.kind == "tuple":
        return tuple(item)
    return _APART if isinstance(item, Value) else item


def is_buffer(entry: TensorEntry) -> bool:
    """Return whether a tensor is never in an optimizer: running statistics, counts, masks, tables of positions."""
    slot = Slot(entry.key, entry.shape, entry.dtype)
    return no_weights.optional(slot) is not None or entry.key.rpartition(".")[2] in ("running_mean", "running_var")

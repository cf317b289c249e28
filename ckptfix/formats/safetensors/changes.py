"""The effect of edits on the tensors of a safetensors file and their ties: new names, new shapes, replaced tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, Drop, Put, Rename, TensorEntry, dtypes, refuse_unusable
from ckptfix.errors import KeyConflict, NoSuchTensor, Unsupported, WouldLoseData
from ckptfix.formats.safetensors.header import METADATA, Header, HeaderEntry
from ckptfix.formats.safetensors.ties import recorded_views, ties


class Names:
    """The names of the file, including tied names, and how edits change them.

    Attributes:
        new: name in the file -> new name, None for a dropped tensor; all applied at once.
        tied: names that exist only as ties -> the tensor that they name.
        shapes: name in the file -> the shape that its header will state, and the tensor in this shape.
        others: name in the file -> the tensor with different bytes that replaces it.
    """

    def __init__(self, header: Header) -> None:
        self.path = header.path
        self.data_start = header.data_start
        self.rows = {row.key: row for row in header.rows}
        self.views = recorded_views({pair.key: pair.value for pair in header.pairs})
        self.shapes: dict[str, tuple[tuple[int, ...], TensorEntry]] = {}
        self.others: dict[str, TensorEntry] = {}
        tensors = set(self.rows)
        self.tied = ties({pair.key: pair.value for pair in header.pairs}, tensors)
        self.new: dict[str, str | None] = {row.key: row.key for row in header.rows}
        self.new.update((name, name) for name in self.tied)

    @property
    def dropped(self) -> set[str]:
        return {old for old, new in self.new.items() if new is None}

    def rename(self, edit: Rename) -> None:
        if edit.kind != "state_dict":
            raise NoSuchTensor(f"a safetensors file has no {edit.kind} names", path=self.path, where=edit.at)
        self._check(edit.at, edit.names)
        taken: dict[str, str] = {}
        clashes: dict[str, list[str]] = {}
        for name, current in self.new.items():
            if current is not None:
                after = self.new[name] = edit.names.get(current, current)
                first = taken.setdefault(after, name)
                if first is not name:
                    clashes.setdefault(after, [first]).append(name)
        if METADATA in taken:
            clashes.setdefault(METADATA, [taken[METADATA]])
        if clashes:
            after, olds = next(iter(clashes.items()))
            raise KeyConflict(
                f"{' and '.join(olds)} would become {after}",
                path=self.path,
                pairs=tuple((name, tuple(names)) for name, names in clashes.items()),
            )

    def drop(self, edit: Drop) -> None:
        self._check(edit.at, edit.names)
        doomed = set(edit.names)
        for name, current in self.new.items():
            if current in doomed:
                self.new[name] = None
        for name, kept in self.tied.items():
            if self.new[kept] is None and self.new[name] is not None:
                raise WouldLoseData(
                    f"{name!r} is tied to it and has no bytes of its own",
                    path=self.path,
                    where=kept,
                    hint="drop both keys, or neither",
                )

    def put(self, edit: Put) -> None:
        self._check(edit.at, edit.tensors)
        origins = {new: old for old, new in self.new.items() if new is not None}
        for name, entry in edit.tensors.items():
            key = origins[name]
            row = self.rows[self.tied.get(key, key)]
            if self._is_of(row, entry):
                self.others.pop(key, None)
                self._reshape(row, entry, name)
            else:
                refuse_unusable(entry, name)
                self.others[key] = entry

    def _is_of(self, row: HeaderEntry, entry: TensorEntry) -> bool:
        """Return whether `entry` has the bytes of `row`, in any shape."""
        dtype = dtypes.by_safetensors(row.code)
        storage = entry.storage
        if entry.kind != "dense" or storage is None or not isinstance(storage.data, ByteRange):
            return False
        place = ByteRange(self.path, self.data_start + row.begin, row.stop - row.begin)
        return dtype is not None and dtype.name == entry.dtype and entry.is_contiguous and entry.data == place

    def _reshape(self, row: HeaderEntry, entry: TensorEntry, name: str) -> None:
        stated = _stated_shape(row, entry.shape)
        if stated is None or (row.key in self.views and stated != row.shape):
            why = "its bytes are recorded as a view of another tensor" if stated else f"it holds {list(row.shape)}"
            raise Unsupported(f"its shape cannot become {list(entry.shape)}: {why}", path=self.path, where=name)
        if self.shapes.setdefault(row.key, (stated, entry))[0] != stated:
            raise Unsupported("the keys tied to it would have two shapes", path=self.path, where=row.key)

    def replaced(self) -> dict[str, TensorEntry]:
        """Return the tensors with different bytes, under the name in the file of the row that each replaces.

        Raises:
            Unsupported: a name that is tied to it would change too.
        """
        named: dict[str, list[str]] = {}
        for name, new in self.new.items():
            if new is not None:
                named.setdefault(self.tied.get(name, name), []).append(name)
        found: dict[str, TensorEntry] = {}
        for key in {self.tied.get(name, name) for name in self.others if self.new[name] is not None}:
            entries = {replace(self.others[name], key="", at="") for name in named[key] if name in self.others}
            left = [name for name in named[key] if name not in self.others]
            if left or len(entries) > 1:
                other = left[0] if left else named[key][-1]
                message = f"it is tied to {other!r}, which would change too"
                raise Unsupported(message, path=self.path, where=key, hint="put the same tensor under both keys")
            found[key] = entries.pop()
        return found

    def _check(self, at: str, wanted: Iterable[str]) -> None:
        """Refuse names that the file does not have after the edits so far."""
        unknown = set(wanted).difference(name for name in self.new.values() if name is not None)
        if at and wanted:
            raise NoSuchTensor("a safetensors file has no nested dicts", path=self.path, where=at)
        if unknown:
            raise NoSuchTensor("no such tensor", path=self.path, where=min(unknown))


def _stated_shape(row: HeaderEntry, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the header's shape for the torch shape `shape`; None if its element count is not the row's."""
    dtype = dtypes.by_safetensors(row.code)
    if dtype is None:
        return None
    if dtype.packed > 1:
        if not shape:
            return None
        shape = (*shape[:-1], shape[-1] * dtype.packed)
    return shape if math.prod(shape) == math.prod(row.shape) else None

"""Edits of a safetensors file: new text for the parts of the header that they name, the rest unchanged.

The bytes of dropped tensors are removed, so the tensors behind them move up and get new offsets. A replaced tensor
keeps the place of the old one if it has as many bytes; otherwise, the file is laid out anew. Holes, overlaps and
trailing bytes are kept: an edit does not judge them. Only the padding of a changed header is new, so that the data is
aligned.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Drop,
    Edit,
    OutputFile,
    Plan,
    Put,
    Rename,
    Segment,
    SetMetadata,
    TensorEntry,
    dtypes,
    refuse_unusable,
)
from ckptfix.errors import DamagedFile, KeyConflict, NoSuchTensor, Unsupported, WouldLoseData
from ckptfix.formats.safetensors.header import (
    METADATA,
    Header,
    HeaderEntry,
    JsonMember,
    MetadataPair,
    header_of,
    members,
)
from ckptfix.formats.safetensors.ties import follow, recorded_views, ties
from ckptfix.formats.safetensors.write import framed, metadata_text, plan_write, quoted, stated_of
from ckptfix.io.elements import row_major


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


Span = tuple[int, int]
Patch = tuple[int, int, str]
"""Start and end in the header's text, and the replacement text."""


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Plan the file with `edits` applied in order; see the contract in `base`.

    Names that the metadata records as tied or as views are renamed with the tensors. The format does not record
    devices, so `SetLocation` changes nothing. Edits without effect give an identical file.

    Raises:
        NoSuchTensor: the file does not have a name or an address.
        KeyConflict: two names would become one.
        WouldLoseData: a tensor would be dropped whose bytes a tied name needs.
        Unsupported: the header would be longer than readers accept, or a new shape does not fit the bytes.
    """
    header = header_of(checkpoint)
    names = Names(header)
    pairs: dict[str, str | None] = {}
    for edit in edits:
        if isinstance(edit, Rename):
            names.rename(edit)
        elif isinstance(edit, Drop):
            names.drop(edit)
        elif isinstance(edit, Put):
            names.put(edit)
        elif isinstance(edit, SetMetadata):
            pairs.update(edit.pairs)
    puts = names.replaced()
    if not _fit(header, puts):
        return _fresh(checkpoint, names, puts, pairs, dest)
    cuts = _cuts(header.rows, names.dropped)
    patches = [*_row_patches(header, names, puts, cuts), *_metadata_patches(header, names, pairs)]
    text = _patched(header.text, patches)
    if text == header.text and not puts:
        return Plan((OutputFile.of(dest, (ByteRange(header.path, 0, header.size),)),))
    body = text[header.start : len(text) - (len(header.text) - header.end)]
    segments: list[Segment] = []
    at = 0
    new = [(row.begin, row.stop, row_major(puts[row.key], "little")) for row in header.rows if row.key in puts]
    changes = [*((start, end, b"") for start, end in cuts), *(change for change in new if change[2].length)]
    for start, end, data in [*sorted(changes, key=lambda change: change[0]), (header.data_size, header.data_size, b"")]:
        stop = min(start, header.data_size)
        if stop > at:
            segments.append(ByteRange(header.path, header.data_start + at, stop - at))
        segments.append(data)
        at = end
    return Plan((OutputFile.of(dest, framed(body, segments, dest)),))


def _fit(header: Header, puts: Mapping[str, TensorEntry]) -> bool:
    """Return whether each tensor in `puts` fits in the place of the old one: same size, aligned, not shared."""
    if not puts:
        return True
    shared: set[str] = set()
    last: HeaderEntry | None = None
    for row in sorted((row for row in header.rows if row.begin < row.stop), key=lambda row: (row.begin, row.stop)):
        if last is not None and row.begin < last.stop:
            shared |= {last.key, row.key}
        last = row if last is None or row.stop > last.stop else last
    return all(
        row.stop - row.begin == puts[row.key].nbytes
        and row.stop <= header.data_size
        and row.begin % puts[row.key].itemsize == 0
        and row.key not in shared
        for row in header.rows
        if row.key in puts
    )


def _fresh(
    checkpoint: Checkpoint,
    names: Names,
    puts: Mapping[str, TensorEntry],
    pairs: Mapping[str, str | None],
    dest: str,
) -> Plan:
    """Plan a new layout of the same tensors and pairs, with `puts` applied.

    Raises:
        DamagedFile: the file misdescribes a tensor, which a new layout would hide.
    """
    header = header_of(checkpoint)
    for finding in checkpoint.findings:
        if finding.severity == "error" or finding.id == "unknown-dtype":
            raise DamagedFile(finding.message, path=header.path, where=finding.where, offset=finding.offset)
    entries = []
    for entry in checkpoint.entries:
        new = names.new[entry.key]
        if new is not None:
            shaped = names.shapes[entry.key][1] if entry.key in names.shapes else entry
            entries.append(replace(puts.get(entry.key, shaped), key=new, at=""))
    changes = {name: new for name, new in names.new.items() if new != name}
    after = [_pair_after(pair, names, changes, pairs) for pair in header.pairs]
    added = {key: value for key, value in pairs.items() if value is not None}
    return plan_write(entries, dest, metadata=dict(pair for pair in after if pair is not None) | added)


def _cuts(rows: Sequence[HeaderEntry], dropped: set[str]) -> list[Span]:
    """Return the sorted ranges of the data that only dropped tensors use."""
    if not dropped:
        return []
    cuts: list[Span] = []
    at = covered = 0
    events = sorted((row.begin, row.stop, row.key in dropped) for row in rows if row.begin < row.stop)
    doomed = merged([(begin, stop) for begin, stop, gone in events if gone])
    kept = merged([(begin, stop) for begin, stop, gone in events if not gone])
    for begin, stop in doomed:
        at = begin
        while covered < len(kept) and kept[covered][1] <= at:
            covered += 1
        index = covered
        while index < len(kept) and kept[index][0] < stop:
            if kept[index][0] > at:
                cuts.append((at, kept[index][0]))
            at = kept[index][1]
            index += 1
        if at < stop:
            cuts.append((at, stop))
    return cuts


def merged(spans: Sequence[Span]) -> list[Span]:
    """Join the sorted spans that touch or overlap."""
    runs: list[Span] = []
    for begin, stop in spans:
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((begin, stop))
    return runs


def _row_patches(
    header: Header, names: Names, puts: Mapping[str, TensorEntry], cuts: Sequence[Span]
) -> list[Patch]:
    """Return patches for new names and offsets, and removals of dropped tensors."""
    patches: list[Patch] = []
    starts = [start for start, _ in cuts]
    sums = [0, *accumulate(end - start for start, end in cuts)]

    def moved(position: int) -> int:
        index = bisect_right(starts, position)
        if not index:
            return position
        start, end = cuts[index - 1]
        return position - sums[index - 1] - (min(position, end) - start)

    for row in header.rows:
        new = names.new[row.key]
        if new is None:
            continue
        if new != row.key:
            patches.append((row.start, row.key_end, quoted(new)))
        begin, stop = (moved(row.begin), moved(row.stop)) if cuts else (row.begin, row.stop)
        if (begin, stop) != (row.begin, row.stop):
            patches.append(_field_patch(header, row, "data_offsets", (begin, stop)))
        code, shape = row.code, names.shapes[row.key][0] if row.key in names.shapes else row.shape
        if row.key in puts:
            code, shape = _stated(puts[row.key], row.key)
        if shape != row.shape:
            patches.append(_field_patch(header, row, "shape", shape))
        if code != row.code:
            patches.append(_field_patch(header, row, "dtype", code))
    if not names.dropped:
        return patches
    spans = [(row.start, row.end, names.new[row.key] is not None) for row in header.rows]
    if header.metadata is not None:
        spans.append((header.metadata.start, header.metadata.end, True))
    return patches + _removals(sorted(spans))


def _stated(entry: TensorEntry, name: str) -> tuple[str, tuple[int, ...]]:
    stated = stated_of(entry)
    if stated is None:
        raise WouldLoseData(f"safetensors cannot hold a tensor of {entry.dtype}", where=name)
    return stated


def _field_patch(header: Header, row: HeaderEntry, field: str, new: str | Sequence[int]) -> Patch:
    """Return the patch that writes a string or numbers into a field of a tensor's description."""
    value = header.text.index("{", row.key_end)
    place = next(member for member in members(header.text, value) if member.key == field)
    return (place.value_start, place.end, quoted(new) if isinstance(new, str) else f"[{','.join(map(str, new))}]")


def _removals(spans: Sequence[tuple[int, int, bool]]) -> list[Patch]:
    """Return patches that remove the members without the flag from an object, each with one comma."""
    patches: list[Patch] = []
    last_kept = max((index for index, span in enumerate(spans) if span[2]), default=-1)
    for index, (start, _, kept) in enumerate(spans[: last_kept + 1]):
        if not kept:
            patches.append((start, spans[index + 1][0], ""))
    if last_kept + 1 < len(spans):
        start = spans[last_kept][1] if last_kept >= 0 else spans[0][0]
        patches.append((start, spans[-1][1], ""))
    return patches


def _metadata_patches(header: Header, names: Names, wanted: Mapping[str, str | None]) -> list[Patch]:
    """Return patches for ``__metadata__``: pairs that name tensors follow renames; then the edits' own pairs apply."""
    changes = {name: new for name, new in names.new.items() if new != name} if header.pairs else {}
    missing = {key: value for key, value in wanted.items() if value is not None}
    patches: list[Patch] = []
    spans: list[tuple[int, int, bool]] = []
    for pair in header.pairs:
        after = _pair_after(pair, names, changes, wanted)
        missing.pop(pair.key, None)
        spans.append((pair.start, pair.end, after is not None))
        if after is not None and after != (pair.key, pair.value):
            patches.append((pair.start, pair.end, f"{quoted(after[0])}:{quoted(after[1])}"))
    patches += _removals(spans)
    if missing:
        patches.append(_insertion(header, names, missing, any(kept for _, _, kept in spans)))
    return patches


def _pair_after(
    pair: MetadataPair, names: Names, changes: Mapping[str, str | None], wanted: Mapping[str, str | None]
) -> tuple[str, str] | None:
    if pair.key in wanted:
        value = wanted[pair.key]
        return None if value is None else (pair.key, value)
    return follow(pair.key, pair.value, names.tied, changes) if changes else (pair.key, pair.value)


def _insertion(header: Header, names: Names, pairs: Mapping[str, str], others: bool) -> Patch:
    """Return the patch that adds `pairs`; `others` says whether ``__metadata__`` keeps existing pairs."""
    text = metadata_text(pairs.items())
    place: JsonMember | None = header.metadata
    if place is None:
        comma = "," if any(new is not None for new in names.new.values()) else ""
        return (header.start + 1, header.start + 1, f"{quoted(METADATA)}:{text}{comma}")
    if header.text.startswith("{", place.value_start):
        return (place.value_start + 1, place.value_start + 1, text[1:-1] + ("," if others else ""))
    return (place.value_start, place.end, text)


def _patched(text: str, patches: Sequence[Patch]) -> str:
    pieces: list[str] = []
    at = 0
    for start, end, new in sorted(patches):
        pieces += (text[at:start], new)
        at = end
    pieces.append(text[at:])
    return "".join(pieces)

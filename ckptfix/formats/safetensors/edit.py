"""Edits of a safetensors file: new text over the spans of its header that they name, the rest as it was.

Dropped tensors take their bytes with them, so the tensors behind them move up and get new offsets.
Holes, overlaps and trailing bytes are kept: an edit does not judge them. Only the padding of a changed header is
new, so that the data is aligned.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Drop,
    Edit,
    OutputFile,
    Plan,
    Rename,
    Reshape,
    Segment,
    SetMetadata,
    dtypes,
)
from ckptfix.errors import KeyConflict, NoSuchTensor, Unsupported, WouldLoseData
from ckptfix.formats.safetensors.header import METADATA, Header, Member, Pair, Row, header_of, members
from ckptfix.formats.safetensors.ties import follow, recorded_views, ties
from ckptfix.formats.safetensors.write import framed, metadata_text, quoted

Span = tuple[int, int]
Patch = tuple[int, int, str]
"""Start and end in the header's text, and what stands there afterwards."""


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """The file with `edits` carried out in their order; see the contract in `base`.

    Names that the metadata records as tied or as views are renamed with the tensors. A device is nothing that the
    format states, so `SetLocation` changes nothing. Edits that change nothing give an identical file.

    Raises:
        NoSuchTensor: a name or an address that the file does not have.
        KeyConflict: two names would become one.
        WouldLoseData: a tensor would be dropped whose bytes a tied name needs.
        Unsupported: the header would be longer than readers take, or a new shape does not go with the bytes.
    """
    header = header_of(checkpoint)
    names = _Names(header)
    pairs: dict[str, str | None] = {}
    for edit in edits:
        if isinstance(edit, Rename):
            names.rename(edit)
        elif isinstance(edit, Drop):
            names.drop(edit)
        elif isinstance(edit, Reshape):
            names.reshape(edit)
        elif isinstance(edit, SetMetadata):
            pairs.update(edit.pairs)
    cuts = _cuts(header.rows, names.dropped)
    patches = [*_row_patches(header, names, cuts), *_metadata_patches(header, names, pairs)]
    text = _patched(header.text, patches)
    if text == header.text:
        return Plan((OutputFile.of(dest, (ByteRange(header.path, 0, header.size),)),))
    body = text[header.start : len(text) - (len(header.text) - header.end)]
    segments: list[Segment] = [framed(body)]
    at = 0
    for start, end in [*cuts, (header.data_size, header.data_size)]:
        stop = min(start, header.data_size)
        if stop > at:
            segments.append(ByteRange(header.path, header.data_start + at, stop - at))
        at = end
    return Plan((OutputFile.of(dest, segments),))


class _Names:
    """What the names of the file become; ties are names too.

    Attributes:
        new: name in the file -> name afterwards, None for a dropped tensor; all at once.
        tied: names that are only ties -> the tensor that they name.
        shapes: name in the file -> the shape that its header is to state.
    """

    def __init__(self, header: Header) -> None:
        self.path = header.path
        self.rows = {row.key: row for row in header.rows}
        self.views = recorded_views({pair.key: pair.value for pair in header.pairs})
        self.shapes: dict[str, tuple[int, ...]] = {}
        tensors = set(self.rows)
        self.tied = ties({pair.key: pair.value for pair in header.pairs}, tensors)
        self.new: dict[str, str | None] = {row.key: row.key for row in header.rows}
        self.new.update((name, name) for name in self.tied)

    @property
    def dropped(self) -> set[str]:
        return {old for old, new in self.new.items() if new is None}

    def rename(self, edit: Rename) -> None:
        if edit.kind != "state_dict":
            raise NoSuchTensor(f"no {edit.kind} names in a safetensors file", path=self.path, where=edit.at)
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
                    f"{name!r} is tied to it and has no other bytes",
                    path=self.path,
                    where=kept,
                    hint="drop both names, or neither",
                )

    def reshape(self, edit: Reshape) -> None:
        self._check(edit.at, edit.shapes)
        origins = {new: old for old, new in self.new.items() if new is not None}
        for name, shape in edit.shapes.items():
            key = origins[name]
            row = self.rows[self.tied.get(key, key)]
            stated = _stated_shape(row, shape)
            if stated is None or row.key in self.views:
                why = "its bytes are recorded as a view of another tensor" if stated else f"it holds {list(row.shape)}"
                message = f"it cannot become {list(shape)}: {why}"
                raise Unsupported(message, path=self.path, where=name)
            if self.shapes.setdefault(row.key, stated) != stated:
                raise Unsupported("names tied to it would have two shapes", path=self.path, where=row.key)

    def _check(self, at: str, wanted: Iterable[str]) -> None:
        """Refuse names that the file, after the edits so far, does not have."""
        unknown = set(wanted).difference(name for name in self.new.values() if name is not None)
        if at and wanted:
            raise NoSuchTensor("a safetensors file has no mappings inside", path=self.path, where=at)
        if unknown:
            raise NoSuchTensor("no such tensor", path=self.path, where=min(unknown))


def _stated_shape(row: Row, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """What the header is to state for the torch shape `shape`; None if its elements are not as many as the row's."""
    dtype = dtypes.by_safetensors(row.code)
    if dtype is None:
        return None
    if dtype.packed > 1:
        if not shape:
            return None
        shape = (*shape[:-1], shape[-1] * dtype.packed)
    return shape if math.prod(shape) == math.prod(row.shape) else None


def _cuts(rows: Sequence[Row], dropped: set[str]) -> list[Span]:
    """The ranges of the data that only dropped tensors use, in order."""
    if not dropped:
        return []
    cuts: list[Span] = []
    at = covered = 0
    events = sorted((row.begin, row.stop, row.key in dropped) for row in rows if row.begin < row.stop)
    doomed = _merged([(begin, stop) for begin, stop, gone in events if gone])
    kept = _merged([(begin, stop) for begin, stop, gone in events if not gone])
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


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Sorted spans with those joined that touch or overlap."""
    merged: list[Span] = []
    for begin, stop in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((begin, stop))
    return merged


def _row_patches(header: Header, names: _Names, cuts: Sequence[Span]) -> list[Patch]:
    """New names, new offsets, and nothing where a tensor is dropped."""
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
        shape = names.shapes.get(row.key, row.shape)
        if shape != row.shape:
            patches.append(_field_patch(header, row, "shape", shape))
    if not names.dropped:
        return patches
    spans = [(row.start, row.end, names.new[row.key] is not None) for row in header.rows]
    if header.metadata is not None:
        spans.append((header.metadata.start, header.metadata.end, True))
    return patches + _removals(sorted(spans))


def _field_patch(header: Header, row: Row, field: str, numbers: Sequence[int]) -> Patch:
    """The patch that puts `numbers` in a field of the description of a tensor."""
    value = header.text.index("{", row.key_end)
    place = next(member for member in members(header.text, value) if member.key == field)
    return (place.value_start, place.end, f"[{','.join(map(str, numbers))}]")


def _removals(spans: Sequence[tuple[int, int, bool]]) -> list[Patch]:
    """Patches that take the members without the flag out of an object, each with one comma."""
    patches: list[Patch] = []
    last_kept = max((index for index, span in enumerate(spans) if span[2]), default=-1)
    for index, (start, _, kept) in enumerate(spans[: last_kept + 1]):
        if not kept:
            patches.append((start, spans[index + 1][0], ""))
    if last_kept + 1 < len(spans):
        start = spans[last_kept][1] if last_kept >= 0 else spans[0][0]
        patches.append((start, spans[-1][1], ""))
    return patches


def _metadata_patches(header: Header, names: _Names, wanted: Mapping[str, str | None]) -> list[Patch]:
    """What becomes of ``__metadata__``: pairs that name tensors follow them, then come the edits' pairs."""
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
    pair: Pair, names: _Names, changes: Mapping[str, str | None], wanted: Mapping[str, str | None]
) -> tuple[str, str] | None:
    if pair.key in wanted:
        value = wanted[pair.key]
        return None if value is None else (pair.key, value)
    return follow(pair.key, pair.value, names.tied, changes) if changes else (pair.key, pair.value)


def _insertion(header: Header, names: _Names, pairs: Mapping[str, str], others: bool) -> Patch:
    """The patch that adds `pairs`; `others` is whether ``__metadata__`` keeps pairs that it has."""
    text = metadata_text(pairs.items())
    place: Member | None = header.metadata
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

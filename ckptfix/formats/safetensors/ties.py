"""Tied tensors and views in a format without either: written as metadata pairs, and read back.

- ``"lm_head.weight": "embed.weight"`` says that the first name, which the file lacks, is the same tensor as the second.
  ``safetensors.torch.save_model`` writes such pairs, and its ``load_model`` needs nothing else (safetensors/torch.py).
- ``"ckptfix.order"`` is JSON, ``{"lm_head.weight": 17}``: the position of such a name among all tensors.
- ``"ckptfix.views"`` is JSON, ``{name: {"base": name, "offset": n, "shape": [...], "stride": [...]}}``: a tensor that
  has its own bytes in the file and was a view of a part of `base`; offset and stride count elements.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from ckptfix.checkpoint import TensorEntry, same_place
from ckptfix.checkpoint.tensors import reach
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.io.checksums import digest
from ckptfix.io.elements import row_major
from ckptfix.io.read import read_blocks

VIEWS_KEY = "ckptfix.views"
ORDER_KEY = "ckptfix.order"
TIE_KEYS = frozenset({VIEWS_KEY, ORDER_KEY})
_NO_TIES = TIE_KEYS | {"format"}


@dataclass(frozen=True, slots=True)
class _Extent:
    """The bytes of a storage from the first to the last element of a tensor."""

    start: int
    end: int
    index: int
    entry: TensorEntry

    @classmethod
    def of(cls, index: int, entry: TensorEntry) -> _Extent:
        start = entry.offset * entry.itemsize
        return cls(start, start + reach(entry.shape, entry.stride) * entry.itemsize, index, entry)


def share_plan(
    entries: Sequence[TensorEntry],
) -> tuple[tuple[TensorEntry, ...], dict[str, str], tuple[Finding, ...]]:
    """Return the tensors of `entries` to write, and the metadata pairs from which `restore_ties` recovers the others.

    If several tensors are the same view of one storage, only the first is kept. A view of a part of a contiguous tensor
    is kept and recorded. Tensors that overlap in any other way are kept, with a finding: they are separate when read
    back.
    """
    left_out: dict[str, str] = {}
    order: dict[str, int] = {}
    views: dict[str, dict[str, object]] = {}
    findings: list[Finding] = []
    first: dict[object, TensorEntry] = {}
    storages: dict[tuple[str, str], list[_Extent]] = {}
    kept: list[TensorEntry] = []
    for index, entry in enumerate(entries):
        storage = entry.storage
        if storage is None or entry.kind != "dense" or not entry.numel:
            kept.append(entry)
            continue
        same = first.setdefault(same_place(entry), entry)
        if same is not entry and entry.key not in _NO_TIES:
            left_out[entry.key] = same.key
            order[entry.key] = index
            continue
        kept.append(entry)
        storages.setdefault(storage.identity, []).append(_Extent.of(index, entry))
    for extents in storages.values():
        if len(extents) > 1:
            _find_views(extents, views, findings)
    pairs = dict(left_out)
    if order:
        pairs[ORDER_KEY] = _compact(order)
    if views:
        pairs[VIEWS_KEY] = _compact(views)
    return tuple(kept), pairs, tuple(findings)


def _find_views(extents: list[_Extent], views: dict[str, dict[str, object]], findings: list[Finding]) -> None:
    """Sort the tensors of one storage into bases, views of them, and tensors that overlap without a base."""
    # The order guarantees that all tensors that could cover this one come before it. Of the contiguous ones, the one
    # that ends last covers it if any does, and is not a view itself.
    extents.sort(key=lambda extent: (extent.start, -extent.end, not extent.entry.is_contiguous, extent.index))
    bases: dict[object, _Extent] = {}
    last: _Extent | None = None
    for extent in extents:
        entry = extent.entry
        base = bases.get((entry.dtype, entry.lazy))
        if base is not None and base.end >= extent.end:
            views[entry.key] = {
                "base": base.entry.key,
                "offset": entry.offset - base.entry.offset,
                "shape": list(entry.shape),
                "stride": list(entry.stride),
            }
            continue
        if last is not None and extent.start < last.end:
            message = (
                f"it overlaps {last.entry.name!r} in memory, and no tensor covers both; they are written separately"
            )
            findings.append(found("shared-memory", message, where=entry.name))
        if entry.is_contiguous and (base is None or extent.end > base.end):
            bases[entry.dtype, entry.lazy] = extent
        if last is None or extent.end > last.end:
            last = extent


def restore_ties(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[TensorEntry, ...]:
    """Return the tensors as they were before `share_plan`, with names tied again and views restored.

    A recorded view is restored only if its own bytes equal that part of its base: another program may have changed
    either and kept the metadata. Tensor bytes are read only for this comparison.
    """
    found = {entry.key: entry for entry in entries}
    for name, record in _records(metadata.get(VIEWS_KEY)).items():
        view = _view(found.get(name), record, found)
        if view is not None:
            found[name] = view
    places = _records(metadata.get(ORDER_KEY))
    tied = ties(metadata, found.keys())
    waiting = sorted(tied, key=lambda name: _place(places.get(name)), reverse=True)
    restored: list[TensorEntry] = []
    for entry in found.values():
        while waiting and _place(places.get(waiting[-1])) <= len(restored):
            name = waiting.pop()
            restored.append(replace(found[tied[name]], key=name))
        restored.append(entry)
    restored += (replace(found[tied[name]], key=name) for name in reversed(waiting))
    return tuple(restored)


def _place(value: object) -> int:
    """Return a recorded position; a position at the end if it is not valid."""
    return value if type(value) is int and 0 <= value < 1 << 62 else 1 << 62


def _view(entry: TensorEntry | None, record: object, found: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """Return `entry` as the view that `record` describes; None if the record is invalid or the values differ."""
    if entry is None or type(record) is not dict:
        return None
    base = found.get(record["base"]) if type(record.get("base")) is str else None
    offset, shape, stride = record.get("offset"), record.get("shape"), record.get("stride")
    if base is None or base.storage is None or base is entry or not base.is_contiguous or base.dtype != entry.dtype:
        return None
    if type(offset) is not int or not _are_counts(shape) or not _are_counts(stride):
        return None
    if tuple(shape) != entry.shape or len(stride) != len(shape) or not entry.numel:
        return None
    view = replace(entry, storage=base.storage, offset=base.offset + offset, shape=tuple(shape), stride=tuple(stride))
    if view == entry:
        return entry
    extent, whole = _Extent.of(0, view), _Extent.of(0, base)
    if not whole.start <= extent.start < extent.end <= whole.end:
        return None
    try:
        return view if _digest(entry) == _digest(view) else None
    except CkptfixError:
        return None


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return type(value) is list and all(type(count) is int and count >= 0 for count in value)


def _digest(entry: TensorEntry) -> bytes:
    return digest(read_blocks(row_major(entry, "little")))


def ties(metadata: Mapping[str, str], tensors: Collection[str]) -> dict[str, str]:
    """Return the pairs of `metadata` that are ties: from a name that is not a tensor of the file to one that is."""
    return {
        name: kept
        for name, kept in metadata.items()
        if name not in _NO_TIES and name not in tensors and kept in tensors
    }


def recorded_views(metadata: Mapping[str, str]) -> frozenset[str]:
    """Return the names that `metadata` records as views of a part of another tensor."""
    return frozenset(_records(metadata.get(VIEWS_KEY)))


def follow(key: str, value: str, tied: Collection[str], names: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Return a metadata pair updated for new tensor `names` (None: dropped); None if nothing remains of it.

    `tied` are the names that `ties` returns. Other pairs are returned unchanged.
    """
    if key in tied:
        new, kept = names.get(key, key), names.get(value, value)
        return None if new is None or kept is None else (new, kept)
    if key not in TIE_KEYS:
        return key, value
    records = _records(value)
    followed = {}
    for name, record in records.items():
        new = names.get(name, name)
        if key == VIEWS_KEY and type(record) is dict and type(record.get("base")) is str:
            base = names.get(record["base"], record["base"])
            if base is None:
                continue
            record = {**record, "base": base}
        if new is not None:
            followed[new] = record
    if followed == records:
        return key, value
    return (key, _compact(followed)) if followed else None


def both(value: str, other: str) -> str:
    """Merge the records of two files into the value of one metadata pair."""
    return _compact({**_records(value), **_records(other)})


def _records(value: str | None) -> dict[str, object]:
    """Return the JSON object `value`; an empty dict for anything else, since the text is not trusted."""
    try:
        found = json.loads(value or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if type(found) is dict else {}


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))

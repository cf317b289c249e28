"""Storages whose pickle is lost: raw bytes under their numbers, or a model's tensors if they fit in exactly one way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ckptfix.checkpoint import OutputFile, Plan, Storage, TensorEntry, contiguous_stride, dtypes
from ckptfix.errors import DamagedFile, NoMatch
from ckptfix.findings.table import found
from ckptfix.formats.repairs import LostTensor, Repair
from ckptfix.formats.torch import emit as torch_emit
from ckptfix.formats.torch import zip_layout
from ckptfix.names.slots import Slot
from ckptfix.ops.repair.remains import Wreck
from ckptfix.ops.target.targets import ExpectedModel

LISTED = 12


def repair_raw(wreck: Wreck, like: ExpectedModel | None = None) -> Repair:
    """Plan a flat state dict of the storages of `wreck`, whose pickle is lost.

    Without `like`, each is ``storage_KEY``, a uint8 tensor of its bytes, because only the pickle had the dtype. With
    it, they become the tensors of a model, if numbers and sizes allow exactly one assignment.

    Raises:
        DamagedFile: no storage is intact.
        NoMatch: several assignments to the model fit, or no assignment does; `lines` list both sides.
    """
    if not wreck.parts:
        message = f"neither the pickle nor any storage is intact ({wreck.pickle_fault})"
        raise DamagedFile(message, path=wreck.path, hint="use an older checkpoint, or copy the file again")
    entries = _numbered(wreck) if like is None else _matched(wreck, like)
    losses = [LostTensor(f"storage_{key}", None, "", reason) for key, reason in wreck.faults.items()]
    if like is not None:
        named = {entry.key for entry in entries}
        reason = "its storage is not intact"
        losses = [
            LostTensor(slot.name, slot.shape, slot.dtype, reason) for slot in like.slots if slot.name not in named
        ]
    message = f"its pickle is lost ({wreck.pickle_fault}), and with it all keys, shapes and dtypes"
    if like is not None:
        message += f"; they match {like.label} by number and size"
    lost = LostTensor("data.pkl", None, "", wreck.pickle_fault)
    notes = (found("pickle-lost", message, where="data.pkl"), *wreck.notes)

    def plan_to(dest: str) -> Plan:
        pickle, storages = torch_emit.state_dict_pickle(entries)
        return Plan((OutputFile.of(dest, zip_layout.fresh(pickle, storages, wreck.byteorder)),))

    return Repair("zip", tuple(entries), (lost, *losses), notes, plan_to)


def _order(key: str) -> tuple[int, int, str]:
    return (0, int(key), key) if key.isascii() and key.isdecimal() else (1, 0, key)


def _numbered(wreck: Wreck) -> list[TensorEntry]:
    entries = []
    for key in sorted(wreck.parts, key=_order):
        part = wreck.parts[key]
        size = part.data.length
        storage = Storage(key, "uint8", size, "cpu", part.data, part.crc32)
        entries.append(TensorEntry(f"storage_{key}", "", storage, "uint8", (size,), (1,)))
    return entries


def _matched(wreck: Wreck, like: ExpectedModel) -> list[TensorEntry]:
    """Assign the tensors of `like` to the storages, which torch numbers in the order in which it first meets them."""
    unknown = [slot.name for slot in like.slots if dtypes.find(slot.dtype) is None]
    if unknown:
        message = f"{like.label} does not state the dtype of {len(unknown)} tensors, such as {unknown[0]}"
        raise NoMatch(message, path=wreck.path, hint='give {"name": {"shape": [...], "dtype": "float32"}}')
    own = [slot for slot in like.slots if slot.tied is None]
    wanted = [_nbytes(slot) for slot in own]
    sizes = {int(key): part.data.length for key, part in wreck.parts.items() if _order(key)[0] == 0}
    ways = list(islice(_ways(wanted, sizes), LISTED))
    if len(ways) != 1:
        raise _no_match(wreck, like, own, ways)
    (first,) = ways
    made: dict[str, TensorEntry] = {}
    for index, slot in enumerate(own):
        part = wreck.parts.get(str(first + index))
        if part is not None:
            storage = Storage(str(first + index), slot.dtype, part.data.length, "cpu", part.data, part.crc32)
            made[slot.name] = TensorEntry(
                slot.name, "", storage, slot.dtype, slot.shape, contiguous_stride(slot.shape)
            )
    for slot in like.slots:
        if slot.tied is not None and slot.tied in made:
            made[slot.name] = replace(made[slot.tied], key=slot.name, shape=slot.shape)
    return [made[slot.name] for slot in like.slots if slot.name in made]


def _nbytes(slot: Slot) -> int:
    count = 1
    for size in slot.shape:
        count *= size
    return dtypes.by_name(slot.dtype).nbytes(count)


def _ways(wanted: Sequence[int], sizes: Mapping[int, int]) -> Iterator[int]:
    """Yield the numbers that the model's first tensor can have, so that all existing storages have the right size.

    At least one storage must exist. Numbers need not be consecutive, as a name in a damaged file may be anything.
    """
    keys = sorted(sizes)
    after = 0
    for at, key in enumerate(keys):
        # Try the numbers not yet tried for which this storage is the first one that exists.
        for first in range(max(after, key - len(wanted) + 1), key + 1):
            end = bisect_left(keys, first + len(wanted), at)
            if all(sizes[keys[one]] == wanted[keys[one] - first] for one in range(at, end)):
                yield first
        after = key + 1


def _no_match(wreck: Wreck, like: ExpectedModel, own: Sequence[Slot], ways: Sequence[int]) -> NoMatch:
    if ways:
        starts = ", ".join(map(str, ways[:6])) + (", ..." if len(ways) > 6 else "")
        message = f"the {len(own)} tensors of {like.label} could begin at storage {starts}: any choice is a guess"
    else:
        message = f"the sizes of the storages do not match the {len(own)} tensors of {like.label}"
    return NoMatch(
        message,
        path=wreck.path,
        lines=tuple(_listed(wreck, own)),
        hint="leave out --like to get the storages as raw bytes, under their numbers",
    )


def _listed(wreck: Wreck, own: Sequence[Slot]) -> Iterator[str]:
    keys = sorted(wreck.parts, key=_order)
    yield from (f"storage {key}: {wreck.parts[key].data.length:,} bytes" for key in keys[:LISTED])
    if len(keys) > LISTED:
        yield f"... {len(keys) - LISTED:,} more storages"
    yield from (f"{slot.name}: {list(slot.shape)} {slot.dtype}, {_nbytes(slot):,} bytes" for slot in own[:LISTED])
    if len(own) > LISTED:
        yield f"... {len(own) - LISTED:,} more tensors"

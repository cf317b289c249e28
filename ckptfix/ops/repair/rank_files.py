"""Repair of a checkpoint whose tensors are spread over files of several ranks: the intact parts, as one torch file.

It serves folders of DeepSpeed, files of all ranks, and slices by rank. The contents of a missing or damaged file are
reported with their rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from ckptfix.checkpoint import ByteRange, Checkpoint, RangeCheck, TensorEntry
from ckptfix.checkpoint.byte_ranges import pieces_of
from ckptfix.errors import CkptfixError
from ckptfix.formats import FORMATS
from ckptfix.formats.folders.assembly import without
from ckptfix.formats.repairs import LostTensor, Repair
from ckptfix.io import background_checks
from ckptfix.io.read import read_from
from ckptfix.io.virtual_files import checks_of, is_spliced
from ckptfix.ops.repair.fill import Donor, Fill, Filling
from ckptfix.urls import as_path

FORMAT = "zip"


def mended(
    checkpoint: Checkpoint,
    lost: Mapping[str, str],
    losses: Sequence[LostTensor] = (),
    *,
    fill: Fill | None = None,
    donor: Checkpoint | None = None,
) -> Repair:
    """Plan one torch file of `checkpoint` without the tensors that are `lost`, or with other bytes in their place.

    Args:
        lost: name of a tensor -> why it is lost.
        losses: further losses, which are not in the checkpoint.
        fill, donor: replacements of lost tensors; see `repair_torch`.
    """
    filling = Filling(checkpoint, fill, Donor(donor, "little") if donor is not None else None)
    found = list(filling.of_lost(lost))
    gone = [entry for entry, data, _ in found if data is None]
    whole = without(checkpoint, gone, [(entry, data) for entry, data, _ in found if data is not None])
    recode = FORMATS[FORMAT].recode
    assert recode is not None
    kept = tuple(entry for entry in whole.entries if entry.name not in lost)
    return Repair(FORMAT, kept, (*losses, *(row for _, _, row in found)), (), lambda dest: recode(whole, dest))


def lost_tensors(entries: Iterable[TensorEntry]) -> Iterable[tuple[TensorEntry, str]]:
    """Yield each tensor that is not intact, and why; every byte that has a checksum is read and checked once."""
    places: list[tuple[TensorEntry, list[ByteRange]]] = []
    checks: dict[tuple[str, int, int], RangeCheck] = {}
    for entry in entries:
        data = entry.storage.data if entry.storage is not None else None
        if data is None or entry.storage is None:
            if entry.kind == "dense" and entry.numel:
                yield entry, "no file holds the whole tensor"
            continue
        try:
            pieces = list(pieces_of(data)) if is_spliced(data) else [data]
            own = list(checks_of(data))
        except CkptfixError as error:
            yield entry, _said(error)
            continue
        if isinstance(data, ByteRange) and not is_spliced(data) and entry.storage.crc32 is not None:
            own.append(RangeCheck(entry.storage.key, data, entry.storage.crc32))
        for check in own:
            if isinstance(check.data, ByteRange):
                checks[check.data.path, check.data.offset, check.data.length] = check
        places.append((entry, [where for piece in pieces for where in read_from(piece)]))
    damage = _Damage(checks.values())
    for entry, ranges in places:
        why = next((why for where in ranges if (why := damage.of(where)) is not None), None)
        if why is not None:
            yield entry, why


def _said(error: CkptfixError) -> str:
    name = as_path(error.path).name if error.path else ""
    return f"in {name}: {error.message}" if name else error.message


class _Damage:
    """The ranges of files whose bytes do not match their checksum."""

    def __init__(self, checks: Iterable[RangeCheck]) -> None:
        self._starts: dict[str, list[int]] = {}
        self._rows: dict[str, list[tuple[int, str]]] = {}
        for check in sorted(checks, key=lambda check: (str(check.data.path), check.data.offset)):  # type: ignore[union-attr]
            try:
                background_checks.run([check])
            except CkptfixError as error:
                where = check.data
                assert isinstance(where, ByteRange)
                self._starts.setdefault(where.path, []).append(where.offset)
                self._rows.setdefault(where.path, []).append((where.end, _said(error)))

    def of(self, where: ByteRange) -> str | None:
        """Return why the bytes of a range cannot be trusted; None if they can."""
        starts = self._starts.get(where.path)
        if starts is None:
            return None
        index = max(bisect_right(starts, where.end - 1) - 1, 0)
        end, why = self._rows[where.path][index]
        return why if starts[index] < where.end and where.offset < end else None

"""Search for tensors that have the same bytes under different keys.

Only tensors without a counterpart by key are searched, and only if their dtype and shape occur on the other side too.
They are distinguished by CRC-32, where the files state it, or else by their first bytes; those that are still equal, by
BLAKE2b of all their bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial

from ckptfix.checkpoint import Checkpoint, TensorEntry, with_parts
from ckptfix.dataclass import dataclass
from ckptfix.elements.reader import CHUNK, content
from ckptfix.errors import Unsupported
from ckptfix.io.checksums import digest
from ckptfix.io.source import Readers
from ckptfix.io.threads import Workers, batches

HEAD = 1 << 16
"""Bytes at the front that are hashed first."""

Key = Callable[[TensorEntry], Hashable]
Group = tuple[list[TensorEntry], list[TensorEntry]]


@dataclass(frozen=True, slots=True)
class RenamedTensors:
    """Two tensors of A and B with the same bytes; several equal ones are paired in order."""

    a: TensorEntry
    b: TensorEntry
    of_several: bool


def leaves(entry: TensorEntry) -> list[TensorEntry]:
    """List the tensors with their own data that `entry` consists of, in order: itself, or its parts."""
    return [part for part in with_parts([entry]) if part.storage is not None]


def class_of(entry: TensorEntry) -> str:
    """Return what distinguishes a tensor from others of its kind, except lazy marks, which change only its bytes."""
    return "" if entry.lazy else entry.detail


def whole_crc(entry: TensorEntry) -> int | None:
    """Return the CRC-32 that the file states for exactly the bytes of `entry`; None without one."""
    storage = entry.storage
    if storage is None or storage.crc32 is None or not entry.is_contiguous or entry.offset or entry.lazy:
        return None
    return storage.crc32 if entry.nbytes == storage.nbytes else None


def find_renamed(
    a: Checkpoint,
    b: Checkpoint,
    rest_a: Sequence[TensorEntry],
    rest_b: Sequence[TensorEntry],
    readers: Readers,
    *,
    trust_crc: bool,
) -> tuple[list[RenamedTensors], list[Group]]:
    """Pair the equal tensors of `rest_a` and `rest_b`, and return the groups of equal ones whose numbers differ.

    Raises:
        Truncated, DamagedFile: a file is shorter than it promises.
    """
    groups = _split([(_readable(rest_a), _readable(rest_b))], _signature)
    workers = Workers()
    swap = a.byteorder != b.byteorder
    if not swap:
        by_crc = [group for group in groups if _all_crc(group)]
        others = [group for group in groups if not _all_crc(group)]
        by_crc = _split(by_crc, _crcs)
        if trust_crc:
            return _paired(by_crc + _by_digest(others, swap, a, b, readers, workers))
        groups = by_crc + others
    return _paired(_by_digest(groups, swap, a, b, readers, workers))


def _readable(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Return the entries that have bytes to compare."""
    found = []
    for entry in entries:
        parts = leaves(entry)
        try:
            contents = [content(part, "little") for part in parts]
        except Unsupported:
            continue
        if any(place.nbytes for place in contents) and not any(place.endless for place in contents):
            found.append(entry)
    return found


def _signature(entry: TensorEntry) -> Hashable:
    parts = tuple((part.dtype, part.shape) for part in leaves(entry))
    return entry.kind, entry.dtype, entry.shape, class_of(entry), parts


def _crcs(entry: TensorEntry) -> tuple[int | None, ...]:
    return tuple(map(whole_crc, leaves(entry)))


def _all_crc(group: Group) -> bool:
    return all(None not in _crcs(entry) for entries in group for entry in entries)


def _split(groups: Iterable[Group], key: Key) -> list[Group]:
    """Divide the groups by `key`, and drop those that occur on one side only."""
    found = []
    for entries_a, entries_b in groups:
        parts: defaultdict[Hashable, Group] = defaultdict(lambda: ([], []))
        for entry in entries_a:
            parts[key(entry)][0].append(entry)
        for entry in entries_b:
            parts[key(entry)][1].append(entry)
        found += [group for group in parts.values() if group[0] and group[1]]
    return found


def _by_digest(
    groups: list[Group], swap: bool, a: Checkpoint, b: Checkpoint, readers: Readers, workers: Workers
) -> list[Group]:
    """Divide the groups by content: by the first bytes, and if there are more, by all bytes."""
    done: list[Group] = []
    for limit in (HEAD, None):
        tasks = [
            (entry, checkpoint.byteorder, swap)
            for group in groups
            for entries, checkpoint in zip(group, (a, b), strict=True)
            for entry in entries
        ]
        known: dict[int, bytes] = {}
        for digests in workers.run(partial(_digests, limit, readers), batches(tasks, _weight, CHUNK)):
            known.update(digests)
        groups = _split(groups, lambda entry, known=known: known[id(entry)])  # type: ignore[misc]
        done += [group for group in groups if _is_short(group)]
        groups = [group for group in groups if not _is_short(group)]
    return done + groups


Task = tuple[TensorEntry, str, bool]


def _is_short(group: Group) -> bool:
    """Return whether the first bytes of these tensors, which have the same shape and dtype, are all their bytes."""
    return all(part.nbytes <= HEAD for part in leaves(group[0][0]))


def _weight(task: Task) -> int:
    """Return the cost of a tensor in bytes: handing one over costs as much as hashing some 10 KB."""
    return task[0].nbytes + 1024


def _digests(limit: int | None, readers: Readers, batch: list[Task]) -> list[tuple[int, bytes]]:
    return [(id(entry), _digest(entry, order, swap, limit, readers)) for entry, order, swap in batch]


def _digest(entry: TensorEntry, byteorder: str, swap: bool, limit: int | None, readers: Readers) -> bytes:
    """Hash the elements of `entry`, at most `limit` bytes of each part, in little-endian order if `swap`."""

    def chunks() -> Iterator[bytes | memoryview]:
        for part in leaves(entry):
            place = content(part, byteorder)
            for chunk in place.chunks(readers, limit):
                yield place.encoding.little_endian(chunk) if swap else chunk

    return digest(chunks())


def _paired(groups: Iterable[Group]) -> tuple[list[RenamedTensors], list[Group]]:
    renamed: list[RenamedTensors] = []
    ambiguous: list[Group] = []
    for group in groups:
        if len(group[0]) == len(group[1]):
            several = len(group[0]) > 1
            renamed += [RenamedTensors(x, y, several) for x, y in zip(*group, strict=True)]
        else:
            ambiguous.append(group)
    return renamed, ambiguous

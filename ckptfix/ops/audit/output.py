"""A planned file, read back through its plan: its tensors by shape, dtype and the bytes that they are made of."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ckptfix.checkpoint import (
    ByteRange,
    Data,
    Derived,
    Plan,
    RangeCheck,
    Storage,
    TensorEntry,
    dtypes,
    same_bytes,
    storages_of,
    with_parts,
)
from ckptfix.checkpoint.byte_ranges import Spliced, pieces_of
from ckptfix.checkpoint.tensors import reach
from ckptfix.errors import CkptfixError, UnknownFormat, WouldLoseData
from ckptfix.formats import FORMATS, HEAD, by_content
from ckptfix.formats.base import Format
from ckptfix.formats.torch.common import referred
from ckptfix.formats.torch.tensors import KINDS
from ckptfix.io.read import read_from
from ckptfix.io.source import open_source
from ckptfix.io.virtual_files import PlannedFile, checks_of
from ckptfix.ops.audit.pieces import Trail, in_pieces, planned_trail, trail
from ckptfix.ops.audit.promise import Promise, listed
from ckptfix.ops.audit.same import Place, Same

Kind = tuple[str, tuple[int, ...], tuple[str, ...]]
"""dtype, shape, and the flags (conj, neg) that the input bytes need, or that a stream of the output has resolved."""


def kind_of(part: TensorEntry, made: Data | None = None) -> Kind:
    """Return the kind of a tensor; `made` is the stream that produces its bytes, if there is one."""
    done = made.lazy if isinstance(made, Derived) else ()
    lazy = tuple(sorted({*part.lazy} ^ {*done})) if part.lazy or done else ()
    return part.dtype, part.shape, lazy


def leaves(entry: TensorEntry) -> Iterator[TensorEntry]:
    """Yield the tensors with their own bytes that `entry` consists of, or `entry` itself if it has no parts.

    A wrapper without parts yields nothing: a ShardedTensor without a shard in this rank's file holds no bytes to lose.
    """
    for part in with_parts([entry]):
        if part.storage is not None or not (part.parts or not KINDS[part.kind].whole):
            yield part


def _start(entry: TensorEntry) -> int:
    """Return the offset of a tensor's first byte in its storage."""
    return dtypes.by_name(entry.dtype).nbytes(entry.offset) if entry.offset else 0


def _extent(entry: TensorEntry) -> tuple[int, int]:
    """Return the offsets of a tensor's first byte in its storage, and after its last byte."""
    row = dtypes.by_name(entry.dtype)
    if not entry.numel:
        return row.nbytes(entry.offset), row.nbytes(entry.offset)
    return row.nbytes(entry.offset), row.nbytes(entry.offset + reach(entry.shape, entry.stride))


def _run(entry: TensorEntry) -> tuple[int, int]:
    """Return the offset of a tensor's first byte, and its number of bytes, of those that its file has.

    A tensor that is damaged may state more.
    """
    start, end = _extent(entry)
    data = None if entry.storage is None else entry.storage.data
    if data is not None:
        start, end = min(start, data.length), min(end, data.length)
    return start, end - start


def planned(name: PlannedFile, format: Format) -> Format:
    """Return the format of a planned file: that of the output, or for one file of a folder that of its content.

    Raises:
        UnknownFormat: it is not a checkpoint by itself, such as the index of a folder.
    """
    if not format.folder:
        return format
    with open_source(name) as reader:
        return by_content(name, reader.read(0, min(HEAD, reader.size)), reader.size)


class PlannedOutput:
    """The planned files, read back: their tensors by kind and by the input bytes that they are made of."""

    def __init__(self, plan: Plan, format: str, same: Sequence[tuple[Data, Data]] = ()) -> None:
        self.entries: list[TensorEntry] = []
        self._kinds: dict[Kind, Kind] = {}
        self._named: dict[tuple[str, str], tuple[Kind, Place | Derived | None]] = {}
        """The tensors by the address of their mapping and by their key."""
        self._at: Counter[tuple[Kind, Place]] = Counter()
        self._made: dict[Kind, deque[tuple[ByteRange, ...]]] = {}
        self._puts: dict[object, dict[Kind, list[TensorEntry]]] | None = None
        self._literal: Counter[tuple[Kind, str]] = Counter()
        self._bare: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._places: set[Place] = set()
        self._sources: list[ByteRange] = []
        self._sums: set[tuple[Place, int, int]] = set()
        self._copied: list[ByteRange] = []
        self._same = Same(same)
        self._origins: dict[object, Place | Derived | None] = {}
        whole = FORMATS[format].read_planned
        for file in plan.files[-1:] if whole is not None else plan.files:
            if file.along:
                continue
            name = PlannedFile(file)
            try:
                checkpoint = planned(name, FORMATS[format]).read(name) if whole is None else whole(plan)
                entries = listed(checkpoint)
            except UnknownFormat:
                # A program (TorchScript) whose archive was repaired: its tensors are known only by their bytes.
                self._copied += (range for segment in file.segments for range in read_from(segment))
                continue
            except CkptfixError as error:
                message = f"the planned output cannot be read back ({error.message}): a bug in ckptfix"
                raise WouldLoseData(message, path=file.path, hint="please report it") from error
            self.entries += entries
            for entry in entries:
                for part in leaves(entry):
                    self._note(part)
            for storage in referred(checkpoint):
                self._note_storage(storage)
        self._sorted: dict[Kind, list[Place]] | None = None
        self._trails: Counter[tuple[Kind, Trail]] | None = None

    def _note(self, part: TensorEntry) -> None:
        if part.storage is None or part.storage.data is None or not part.numel:
            self._bare[part.dtype, part.shape] += 1
            return
        found = self._note_storage(part.storage)
        start = _start(part)
        if start:
            found = _origin(part.storage.data, start)
        kind = kind_of(part, found if isinstance(found, Derived) else part.storage.data)
        kind = self._kinds.setdefault(kind, kind)
        self._named[part.at, part.key] = kind, found
        if isinstance(found, tuple):
            self._at[kind, found] += 1
        elif found is not None and not found.sources:
            self._literal[kind, found.what] += 1
        elif found is not None:
            self._made.setdefault(kind, deque()).append(found.sources)

    def _note_storage(self, storage: Storage) -> Place | Derived | None:
        """Note a storage, unless it was noted before, and return the origin of its first byte."""
        if storage.data is None or not storage.nbytes:
            return None
        same = storage.identity, storage.nbytes, storage.crc32
        if same in self._origins:
            return self._origins[same]
        found = self._origins[same] = _origin(storage.data, 0)
        if isinstance(found, tuple):
            self._places.add(found)
            if storage.crc32 is not None:
                self._sums.add((found, storage.nbytes, storage.crc32))
        elif found is not None:
            self._sources += found.sources
        return found

    def take(self, part: TensorEntry, promise: Promise) -> bool:
        """Count off one occurrence of this tensor in the output; return whether there was one left."""
        storage = part.storage
        if storage is None or storage.data is None or not part.numel:
            return _taken(self._bare, (part.dtype, part.shape))
        kind = kind_of(part, storage.data)
        if isinstance(storage.data, Derived) and not storage.data.sources:
            return _taken(self._literal, (kind, storage.data.what))
        if in_pieces(storage.data):
            return self._take_pieces(part)
        first = _place(storage, _start(part))
        if _taken(self._at, (kind, first)):
            return True
        for place in (first, *self._same.instead(first)):
            if any(_taken(self._at, (one, place)) for one in chain((kind,), self._reshaped(part, promise))):
                return True
        spans = _spans(part)
        if self._copied and all(any(_contains(range, span) for range in self._copied) for span in spans):
            return True
        return self._take_equal(kind, spans) or self._take_made(kind, spans)

    def _take_made(self, kind: Kind, spans: Iterable[ByteRange]) -> bool:
        """Count off a tensor of the output that is made of some of these bytes."""
        streams = self._made.setdefault(kind, deque())
        for index, sources in enumerate(streams):
            if any(_overlap(span, source) for span in spans for source in sources):
                del streams[index]
                return True
        return False

    def _take_equal(self, kind: Kind, spans: Sequence[ByteRange]) -> bool:
        """Count off a tensor made of, or copied from, bytes that replace these."""
        for equal in self._same.made(spans):
            if self._take_made(kind, equal):
                return True
            if any(_taken(self._at, (kind, place)) for place in self._places_in(kind, equal)):
                return True
        return False

    def _places_in(self, kind: Kind, spans: Iterable[ByteRange]) -> Iterator[Place]:
        """Yield the places in these bytes where tensors of a kind begin."""
        if self._sorted is None:
            self._sorted = {}
            for each, place in sorted(self._at):
                self._sorted.setdefault(each, []).append(place)
        places = self._sorted.get(kind, [])
        for span in spans:
            first = bisect_left(places, (span.path, span.offset, 0))
            yield from places[first : bisect_left(places, (span.path, span.end, 0))]

    def _reshaped(self, part: TensorEntry, promise: Promise) -> Iterator[Kind]:
        """Yield the kinds that a tensor may have after a reshape: a key tied to a reshaped tensor changes with it."""
        if self._puts is None:
            self._puts = {}
            for put in promise.puts.values():
                data = None if put.storage is None else put.storage.data
                self._puts.setdefault(_elements(put), {}).setdefault(kind_of(put, data), []).append(put)
        kinds = self._puts.get(_elements(part), {})
        return (kind for kind, puts in kinds.items() if any(same_bytes(part, put) for put in puts))

    def _take_pieces(self, part: TensorEntry) -> bool:
        """Count off a tensor whose bytes are in several pieces: all of them must be there, in order."""
        if self._trails is None:
            self._trails = Counter(
                (kind_of(made), found)
                for entry in self.entries
                for made in leaves(entry)
                if made.numel and (found := planned_trail(made, *_run(made))) is not None
            )
        kind = kind_of(part)
        assert part.storage is not None and isinstance(part.storage.data, ByteRange)
        start, length = _run(part)
        data = part.storage.data.sub(start, length)
        places = self._same.instead((data.path, data.offset, 0))
        for one in (data, *(ByteRange(path, offset, length) for path, offset, _ in places)):
            if _taken(self._trails, (kind, trail(one, 0, length))):
                return True
        spans = read_from(part.storage.data)
        streams = self._made.setdefault(kind, deque())
        for index, sources in enumerate(streams):
            real = [place for source in sources for place in read_from(source)]
            if all(any(_overlap(span, source) for source in real) for span in spans):
                del streams[index]
                return True
        return self._take_equal(kind, spans)

    def has_other(self, part: TensorEntry) -> bool:
        """Return whether the output has a tensor with the name and kind of this one, but with another's bytes."""
        kind, found = self._named.get((part.at, part.key), (None, None))
        storage = part.storage
        if storage is None or storage.data is None or not part.numel or kind != kind_of(part, storage.data):
            return False
        if in_pieces(storage.data):
            # `take` compares all of its pieces, in order.
            return False
        first = _place(storage, _start(part))
        if found == first:
            return False
        own = _spans(part)
        equal = [span for one in self._same.made(own) for span in one]
        if isinstance(found, Derived):
            return not any(_overlap(span, source) for span in (*own, *equal) for source in found.sources)
        if found is not None and any(_begins_in(found, span) for span in equal):
            return False
        return found not in (first, *self._same.instead(first))

    def has(self, part: TensorEntry) -> bool:
        """Return whether the output has a tensor that was not promised, under any name."""
        if part.storage is None or part.storage.data is None or not part.numel:
            return (part.dtype, part.shape) in self._bare
        if in_pieces(part.storage.data):
            return self._take_pieces(part)
        # The number of those that are left may be 0.
        return (kind_of(part, part.storage.data), _place(part.storage, _start(part))) in self._at

    def holds(self, storage: Storage) -> bool:
        """Return whether the bytes of a storage are in the output."""
        if storage.data is None or not storage.nbytes:
            return True
        first = _place(storage, 0)
        if first in self._places or not self._places.isdisjoint(self._same.instead(first)):
            return True
        real = [place for source in self._sources for place in read_from(source)]
        spans = read_from(storage.data)
        for found in (spans, *self._same.made(spans)):
            if (found[0].path, found[0].offset, 0) in self._places:
                return True
            enough = all if in_pieces(storage.data) else any
            if enough(any(_overlap(span, source) for source in real) for span in found):
                return True
        return False

    def unchecked(self, promise: Promise) -> Iterator[RangeCheck]:
        """Yield a check for each storage that a checksum of the input covers, and no checksum of the output."""
        seen = set(promise.summed)
        for storage in (*storages_of(promise.kept), *promise.storages):
            if storage.data is None or storage.identity in seen:
                continue
            seen.add(storage.identity)
            yield from checks_of(storage.data)
            if storage.crc32 is None:
                continue
            if (_place(storage, 0), storage.nbytes, storage.crc32) not in self._sums:
                yield RangeCheck(storage.key, storage.data, storage.crc32)


def _taken(
    counts: Counter[tuple[Kind, Place]]
    | Counter[tuple[Kind, str]]
    | Counter[tuple[Kind, Trail]]
    | Counter[tuple[str, tuple[int, ...]]],
    key: tuple[object, object],
) -> bool:
    left = counts[key]  # type: ignore[index]
    if left:
        counts[key] = left - 1  # type: ignore[index]
    return left > 0


def _origin(data: Data, offset: int) -> Place | Derived | None:
    """Find the origin of a byte of a planned file: its place in the input, or the stream that makes it."""
    if isinstance(data, Derived):
        if not data.sources:
            return data
        first = _origin(data.sources[0], 0)
        return (first[0], first[1], offset) if isinstance(first, tuple) else first
    if isinstance(data.path, Spliced) and data.length > offset:
        piece = next(iter(pieces_of(data.sub(offset, data.length - offset))))
        return None if isinstance(piece, bytes) else _origin(piece, 0)
    if not isinstance(data.path, PlannedFile):
        return data.path, data.offset + offset, 0
    segment, start = data.path.at(data.offset + offset)
    if isinstance(segment, ByteRange):
        return segment.path, segment.offset + start, 0
    return segment if isinstance(segment, Derived) else None


def _place(storage: Storage, offset: int) -> Place:
    """Return the place of the byte at `offset` of a storage of the input."""
    data = storage.data
    if isinstance(data, ByteRange):
        return data.path, data.offset + offset, 0
    if data is not None and data.sources:
        return data.sources[0].path, data.sources[0].offset, offset
    return "", id(data), offset


def covered_by(entry: TensorEntry, made: Iterable[TensorEntry]) -> bool:
    """Return whether every byte of a tensor is used for the tensors that are made of it."""
    if not entry.numel:
        return True
    spans = sorted(
        (span.path, span.offset, span.end)
        for one in made
        if one.storage is not None and one.storage.data is not None
        for span in read_from(one.storage.data)
    )
    parts = (part for part in leaves(entry) if part.numel)
    return all(_is_covered(place, spans) for part in parts for span in _spans(part) for place in read_from(span))


def _is_covered(place: ByteRange, spans: Sequence[tuple[str, int, int]]) -> bool:
    at = place.offset
    for path, start, end in spans:
        if path == place.path and start <= at < end:
            at = end
    return at >= place.end


def _elements(entry: TensorEntry) -> object:
    """Return a value that is equal for tensors with the same elements in any shape."""
    identity = None if entry.storage is None else entry.storage.identity
    return identity, entry.dtype, entry.offset, entry.numel


def _spans(part: TensorEntry) -> tuple[ByteRange, ...]:
    """Return the ranges of the input that hold the bytes of a tensor."""
    assert part.storage is not None and part.storage.data is not None
    data = part.storage.data
    if isinstance(data, Derived):
        return data.sources
    start, end = _extent(part)
    return (ByteRange(data.path, data.offset + start, end - start),)


def _begins_in(place: Place, span: ByteRange) -> bool:
    path, offset, _ = place
    return path == span.path and span.offset <= offset < span.end


def _contains(outer: ByteRange, inner: ByteRange) -> bool:
    return outer.path == inner.path and outer.offset <= inner.offset and inner.end <= outer.end


def _overlap(one: ByteRange, other: ByteRange) -> bool:
    return one.path == other.path and one.offset < other.end and other.offset < one.end

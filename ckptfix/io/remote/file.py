"""An object of a store as a `Source`: data that was read is cached, and data that will be read is fetched ahead.

A header, a directory or a pickle is one request each, with some bytes around it, because the parts that a format reads
are close together. Data that is read from front to back is fetched ahead in ranges of `RANGE` bytes, `AT_ONCE` at a
time. No more is fetched ahead than was already read, unless the reader announced how far it goes (`expect`).

Every request states the version of the object that it expects, or its answer is compared with the first one: bytes of
two versions are never mixed.
"""

from __future__ import annotations

import atexit
import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from concurrent.futures import Future
from itertools import pairwise

from ckptfix.checkpoint.file_version import FileStat
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, NoSuchFile
from ckptfix.io.open_files import KnownRemote, far
from ckptfix.io.remote.clients import store_of
from ckptfix.io.remote.store import retried
from ckptfix.io.source import Source
from ckptfix.pool import Threads

HEAD = 128 << 10
"""Bytes of the first request: enough for the headers of nearly all safetensors files, and the pickle of most models."""

MARGIN = 64 << 10
"""Bytes that are fetched before and after the requested ones."""

NEAR = 16 << 10
"""The margin around data that a reader announced: there are small records beside a directory and a pickle."""

RANGE = 8 << 20
"""Bytes of one request for data; a request for the rest of a file may have up to twice as many."""

AT_ONCE = 16
"""Simultaneous requests for data."""

KEPT = (AT_ONCE + 4) * RANGE
"""Bytes that are cached of all files together."""

STREAMS = 8
"""Positions of a file that can be read from front to back at the same time."""

SURE = 3
"""Consecutive requests after which more data is fetched ahead."""


class _Fetchers:
    """The threads of this process that fetch data."""

    def __init__(self) -> None:
        self._pool: Threads | None = None
        self._process = 0
        self._lock = threading.Lock()

    def pool(self) -> Threads:
        with self._lock:
            if self._pool is None or self._process != os.getpid():
                self._pool, self._process = Threads(AT_ONCE, "ranges"), os.getpid()
                atexit.register(self._pool.shutdown, wait=False, cancel_futures=True)
            return self._pool


_fetchers = _Fetchers()
_recent: OrderedDict[tuple[int, int], tuple[_Kept, int]] = OrderedDict()
"""The cached blocks of all files, in the order in which they are evicted: (file, offset) -> (the file, bytes)."""

_lock = threading.RLock()
_held = 0


@dataclass(slots=True)
class _Block:
    start: int
    length: int
    data: Future[bytes]
    passing: bool = False
    """It was fetched for a reader that moves on: once passed, it is not needed any more."""
    passed: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(slots=True)
class _Stream:
    """A position that is read from front to back: where it continues, and how far that is known."""

    at: int
    run: int = 0
    misses: int = 0
    until: int = 0


class _Kept:
    """The known facts about an object, and the cached part of its bytes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.object = store_of(name).object_of(name)
        self._stopped = False
        self._starts: list[int] = []
        self._blocks: dict[int, _Block] = {}
        self._streams: list[_Stream] = []
        head, self.facts = retried(name, lambda: self.object.get(0, HEAD, None))
        if head:
            done: Future[bytes] = Future()
            done.set_result(head)
            with _lock:
                self._add(_Block(0, len(head), done))

    def close(self) -> None:
        self._stopped = True
        with _lock:
            for start in list(self._starts):
                self._drop(start)

    def read(self, offset: int, length: int) -> bytes:
        with _lock:
            blocks = self._needed(offset, length)
        pieces = []
        at, end = offset, offset + length
        for block in blocks:
            if block.start > at:  # a block was evicted for other data
                return self._get(offset, length)
            try:
                data = block.data.result()
            except BaseException:
                with _lock:
                    self._drop(block.start)
                raise
            pieces.append(data[at - block.start : end - block.start] if at > block.start or block.end > end else data)
            at = block.end
        made = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        # A block may have been evicted in the meantime.
        return made if len(made) == length else self._get(offset, length)

    def expect(self, offset: int, length: int) -> None:
        if length <= MARGIN:
            return
        with _lock:
            stream = self._stream(offset)
            stream.at, stream.until = offset, max(stream.until, offset + length)

    def _needed(self, offset: int, length: int) -> list[_Block]:
        """Return the blocks that hold these bytes, fetched or on their way, and fetch more if worthwhile."""
        stream = self._stream(offset)
        end = offset + length
        stream.misses += len(self._gaps(offset, end)) > 0
        for block in self._between(offset, end):
            _recent.move_to_end((id(self), block.start))  # data that is fetched ahead must not evict it
        known = stream.until >= end
        if known or stream.misses >= SURE:
            most = AT_ONCE * RANGE
            ahead = min(self.facts.size, end + min(stream.run, most // 2)) if stream.misses >= SURE else end
            ahead = max(ahead, min(stream.until, end + most))
            self._fetch_ahead(offset, end, ahead, begins=not stream.run, until=stream.until)
        else:
            for start, stop in self._gaps(offset, end):
                self._fetch_around(start, stop)
        stream.at, stream.run = end, stream.run + length
        found = self._between(offset, end)
        for block in found:
            # Blocks that were passed are evicted first; blocks that were fetched ahead and not yet read stay.
            block.passed = block.passing and end >= block.end
            _recent.move_to_end((id(self), block.start), last=not block.passed)
        return found

    def _fetch_ahead(self, offset: int, end: int, ahead: int, *, begins: bool, until: int) -> None:
        gaps = self._gaps(offset, ahead)
        # The data on its way is enough for a while. Without this check, many small requests would follow.
        if not gaps or (gaps[0][0] >= end + (ahead - end) // 2 and gaps[0][0] > end and ahead - gaps[0][0] < RANGE):
            return
        for start, stop in gaps:
            first = self._around(start, 0, NEAR)[0] if start == offset and begins else start
            last = self._around(stop, 0, NEAR)[1] if stop == until else stop
            count = max((last - first) // RANGE, 1)
            cuts = [first + (last - first) * number // count for number in range(count + 1)]
            for one, next in pairwise(cuts):
                if one >= end and not _room(next - one):
                    return
                self._fetch(one, next - one, passing=True)

    def _fetch_around(self, start: int, stop: int) -> None:
        """Fetch a gap and the bytes near it in one request."""
        first, last = self._around(start, stop - start, MARGIN)
        self._fetch(first, last - first)

    def _around(self, start: int, length: int, margin: int) -> tuple[int, int]:
        """Return the gap from `start` on, extended by up to `margin` missing bytes before and after it."""
        index = bisect_right(self._starts, start)
        low = self._blocks[self._starts[index - 1]].end if index else 0
        end = start + length
        following = bisect_left(self._starts, end, index if length else 0)
        high = self._starts[following] if following < len(self._starts) else self.facts.size
        return min(start, max(start - margin, low)), max(start + length, min(start + length + margin, high))

    def _fetch(self, start: int, length: int, *, passing: bool = False) -> None:
        self._add(_Block(start, length, _fetchers.pool().submit(self._get, start, length), passing))

    def _get(self, start: int, length: int) -> bytes:
        def ask() -> bytes:
            data, _ = self.object.get(start, length, self.facts)
            return data

        data = retried(self.name, ask, lambda: self._stopped)
        if len(data) != length:
            message = f"{length} bytes were requested, but {len(data)} arrived"
            raise CkptfixError(message, path=self.name, offset=start)
        return data

    def _add(self, block: _Block) -> None:
        global _held
        insort(self._starts, block.start)
        self._blocks[block.start] = block
        _recent[id(self), block.start] = (self, block.length)
        _held += block.length
        while _held > KEPT:
            key = next((key for key, (kept, _) in _recent.items() if kept._blocks[key[1]].data.done()), None)
            if key is None or key == (id(self), block.start):
                break
            _recent[key][0]._drop(key[1])

    def _drop(self, start: int) -> None:
        global _held
        block = self._blocks.pop(start, None)
        if block is not None:
            block.data.cancel()
            del self._starts[bisect_right(self._starts, start) - 1]
            _held -= _recent.pop((id(self), start))[1]

    def _between(self, start: int, end: int) -> list[_Block]:
        index = max(bisect_right(self._starts, start) - 1, 0)
        found = []
        while index < len(self._starts) and self._starts[index] < end:
            block = self._blocks[self._starts[index]]
            if block.end > start:
                found.append(block)
            index += 1
        return found

    def _gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        gaps = []
        for block in self._between(start, end):
            if block.start > start:
                gaps.append((start, block.start))
            start = max(start, block.end)
        if start < end:
            gaps.append((start, end))
        return gaps

    def _stream(self, offset: int) -> _Stream:
        near = [stream for stream in self._streams if 0 <= offset - stream.at <= MARGIN]
        stream = min(near, key=lambda stream: (offset - stream.at, -stream.until), default=None) or _Stream(offset)
        if near:
            self._streams.remove(stream)
        elif len(self._streams) >= STREAMS:
            self._streams.pop(0)
        self._streams.append(stream)
        return stream


def _room(length: int) -> bool:
    """Drop passed blocks, and return whether `length` more bytes fit into the cache."""
    while _held + length > KEPT and _recent:
        (_, start), (kept, _) = next(iter(_recent.items()))
        block = kept._blocks[start]
        if not (block.passed and block.data.done()):
            return False
        kept._drop(start)
    return True


class _Absent:
    """A name that the store does not have: a command asks for it once."""

    def close(self) -> None:
        pass


def _known(name: str) -> KnownRemote:
    try:
        return _Kept(name)
    except NoSuchFile:
        return _Absent()


class RemoteFile(Source):
    """A file of a store; within a command, all its readers share the cached data.

    Raises:
        NoSuchFile, NotPermitted: its store says so.
        MissingExtra: its client is not installed.
        WriteFailed: the store does not answer.
    """

    far = True

    def __init__(self, name: str) -> None:
        kept = far(name, lambda: _known(name))
        if not isinstance(kept, _Kept):
            raise NoSuchFile(name)
        self._kept = kept
        super().__init__(name, kept.facts.size, kept.facts.stamp())

    def _read(self, offset: int, length: int) -> bytes:
        return self._kept.read(offset, length) if length else b""

    def expect(self, offset: int, length: int) -> None:
        self._kept.expect(offset, min(length, self.size - offset))

    def now(self) -> FileStat:
        if self.mark.tag and not self._kept.object.checked_after:
            return self.mark
        return retried(self.name, self._kept.object.facts).stamp()

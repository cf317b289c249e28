"""The one uploader: a file of a plan becomes an object of a store, in parts that are uploaded or copied.

Nothing has the name before `publish`, and a failure removes what was sent. The kind of store decides how many parts are
sent at a time, and how the object gets its name (`store.NewObject`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial

from ckptfix.checkpoint import ByteRange, OutputFile, Segment
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import NoSuchFile, WouldOverwrite
from ckptfix.io.background_checks import Checking
from ckptfix.io.read import read_chunks, row_block
from ckptfix.io.remote.clients import same_store, writable
from ckptfix.io.remote.multipart import LEAST, Copy, Upload, parts_of
from ckptfix.io.remote.store import CannotCopyError, NewObject, Trace, no_trace
from ckptfix.io.source import BATCH, open_source
from ckptfix.pool import Threads
from ckptfix.urls import scheme_of

UNDERWAY = 128 << 20
"""Bytes of parts that are being uploaded at the same time."""


class Uploader:
    """One file in progress.

    Args:
        stamps: the states of the inputs when they were read: parts are copied only from those versions.
        overwrite: replace an object that has the name.
        began: as in `WritableStore.new_object`.

    Attributes:
        copied, sent: bytes that the store copied itself, and that were uploaded.
        not_copied: why ranges of this store's own objects were not copied; empty if they were, or if there are none.

    Raises:
        WouldOverwrite: an object has the name, without `overwrite`.
    """

    def __init__(
        self,
        file: OutputFile,
        stamps: Mapping[str, FileStat],
        *,
        overwrite: bool,
        began: Callable[[Trace], None] = no_trace,
    ) -> None:
        self.file, self._stamps = file, stamps
        self.copied = self.sent = 0
        self.not_copied = ""
        self._published = False
        self._store = writable(file.path)
        self._made: NewObject = self._store.new_object(file.path, overwrite=overwrite, began=began)
        if not self.is_new and not overwrite:
            raise WouldOverwrite("exists", path=file.path, hint="choose a different name, or add --force to replace it")

    @property
    def is_new(self) -> bool:
        """True if no object had its name."""
        return self._made.is_new

    def write(self, advance: Callable[[int], None], checks: Checking) -> None:
        """Send all of it, without its name."""
        ours = [path for path in self._stamps if same_store(path, self.file.path)]
        reads = (piece.path for piece in self.file.segments if isinstance(piece, ByteRange))
        like = next((path for path in reads if same_store(path, self.file.path)), None)
        if ours and not self._made.copies and self.file.nbytes > LEAST:
            self.not_copied = f"{scheme_of(self.file.path)}:// cannot copy ranges of objects"
        try:
            self._send(parts_of(self.file, self._can_copy if self._made.copies else _never), like, advance, checks)
        except CannotCopyError as error:
            self._made.abort()
            self.not_copied = f"the store did not copy ranges ({error})"
            self.copied = self.sent = 0
            self._send(parts_of(self.file, _never), like, advance, checks)
        self._made.end()

    def _can_copy(self, where: ByteRange) -> bool:
        return where.path in self._stamps and same_store(where.path, self.file.path)

    def _send(
        self, parts: list[Upload | Copy], like: str | None, advance: Callable[[int], None], checks: Checking
    ) -> None:
        self._made.begin(self.file.nbytes, like)
        longest = max((size for part in parts if isinstance(part, Upload) for size in part.sizes), default=LEAST)
        many = min(self._made.at_once, max(2, UNDERWAY // longest))
        waiting: set[Future[int]] = set()
        with Threads(many, "parts") as pool:
            try:
                for task in self._tasks(parts, checks):
                    if len(waiting) >= many:
                        waiting = _settled(waiting, advance)
                    waiting.add(pool.submit(task))
                while waiting:
                    waiting = _settled(waiting, advance)
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise

    def _tasks(self, parts: list[Upload | Copy], checks: Checking) -> Iterator[Callable[[], int]]:
        """Yield a function for each part, which sends it and returns its size.

        Copies come first: a store that cannot copy then reports it before much is uploaded.
        """
        number, uploads = 1, []
        for part in parts:
            if isinstance(part, Upload):
                uploads.append((number, part))
                number += len(part.sizes)
            else:
                yield partial(self._copy, number, part.where)
                number += 1
        for first, part in uploads:
            for number, data in enumerate(_read(part, checks), first):
                yield partial(self._put, number, data)

    def _put(self, number: int, data: bytes) -> int:
        self._made.put(number, data)
        self.sent += len(data)
        return len(data)

    def _copy(self, number: int, where: ByteRange) -> int:
        self._made.copy(number, where, self._stamps[where.path].tag)
        self.copied += where.length
        return where.length

    def publish(self) -> None:
        """Publish the object under its name, in one step.

        Raises:
            WouldOverwrite: an object has appeared meanwhile.
        """
        self._made.publish()
        self._published = True

    def abort(self) -> None:
        """Remove what has no name yet, and the object if it is new: a replacement cannot be undone."""
        self._made.abort()
        if self._published and self.is_new:
            with suppress(NoSuchFile):
                self._store.remove(self.file.path)


def _never(where: ByteRange) -> bool:
    return False


def _settled(waiting: set[Future[int]], advance: Callable[[int], None]) -> set[Future[int]]:
    done, left = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        advance(future.result())
    return left


def _read(part: Upload, checks: Checking) -> Iterator[bytes]:
    """Yield the bytes of each part; every segment is read once."""
    sizes = iter(part.sizes)
    made: list[bytes | memoryview] = []
    left = next(sizes)
    for data in (chunk for segment in part.segments for chunk in _chunks(segment, checks)):
        at = 0
        while at < len(data):
            piece = data[at : at + left]
            made.append(piece)
            at += len(piece)
            left -= len(piece)
            if not left:
                yield b"".join(made)
                made, left = [], next(sizes, 0)


def _chunks(segment: Segment, checks: Checking) -> Iterator[bytes | memoryview]:
    block = row_block(segment)
    if block is not None:
        yield block.made(checks.sum)
    elif isinstance(segment, bytes):
        yield segment
    elif isinstance(segment, ByteRange):
        with open_source(segment.path) as source:
            source.expect(segment.offset, segment.length)
            for offset in range(segment.offset, segment.end, BATCH):
                data = source.read(offset, min(BATCH, segment.end - offset))
                checks.saw(segment.path, offset, data)
                yield data
    else:
        yield from read_chunks(segment)

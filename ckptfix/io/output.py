"""An output file: filled beside its destination, synced, renamed to it, and undone if a step fails.

The disk begins to store its bytes in the background while it grows, so the sync at its end is short.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from dataclasses import field
from functools import partial
from io import FileIO
from typing import TYPE_CHECKING, TypeVar

from ckptfix import platform
from ckptfix.checkpoint import ByteRange, OutputFile, Segment
from ckptfix.dataclass import dataclass
from ckptfix.errors import WouldOverwrite, WriteFailed
from ckptfix.io.copy import Sink
from ckptfix.io.durable import NO_LINKS, Kept, adopt_mode, identity, persist
from ckptfix.io.read import RowBlock, Saw, read_chunks, row_block
from ckptfix.io.source import forget
from ckptfix.io.sources import Sources
from ckptfix.io.system import named

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from ckptfix.io.background_checks import Checking

SYNC_EVERY = 64 << 20
"""Bytes after which a sync in the background begins. It writes one GiB in 0.45 s rather than 0.52 s."""

WORTH_A_THREAD = 1 << 20
"""The smallest file, in bytes, whose end is synced while the next file is written."""

MOST_BLOCKS = 2
"""The most blocks of rows that are made before they can be written."""

MOST_ENDING = 4
"""The most complete files that can wait for the disk."""

TEMP_SUFFIX = ".ckptfix-tmp"

SCRATCH = ".ckptfix-"
"""The prefix of the names of folders for unpacked data."""

T = TypeVar("T")


class Syncing:
    """A syncer of files in the background: it syncs a file while it grows, and its end while the next file is written.

    A failed sync is final, also in the background: the kernel reports it once, and forgets what it lost.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._ending: deque[tuple[OutputFile, Future[None]]] = deque()

    def wrote(self, fd: int, count: int) -> None:
        """Note that the file has grown by `count` bytes."""
        self._waiting += count
        if self._waiting < SYNC_EVERY or (self._running is not None and not self._running.done()):
            return
        self._settle()
        self._running = self._submit(platform.sync_data, fd)
        self._waiting = 0

    def finish(self, output: OutputFile, file: FileIO, *, wait: bool) -> None:
        """Sync a complete file and close it, at once or, without `wait`, in the background."""
        try:
            self._settle()
            self._waiting = 0
            while len(self._ending) >= MOST_ENDING:
                self._end_one()
            if not wait:
                self._ending.append((output, self._submit(_end, file)))
        except BaseException:
            file.close()
            raise
        if wait:
            _end(file)

    def wait(self) -> None:
        """Wait until every file is on the disk. Raises WriteFailed for one that could not be synced."""
        while self._ending:
            self._end_one()

    def close(self) -> None:
        """End the thread; work that it has begun is finished."""
        if self._pool is not None:
            self._pool.shutdown()

    def _settle(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _end_one(self) -> None:
        output, ending = self._ending.popleft()
        with named(output.path, output.nbytes):
            ending.result()

    def _submit(self, call: Callable[[T], None], argument: T) -> Future[None]:
        if self._pool is None:
            from ckptfix.pool import Threads

            self._pool = Threads(1, "sync")
        return self._pool.submit(call, argument)


def _end(file: FileIO) -> None:
    with file:
        platform.sync(file.fileno())


def _blocks(segments: Iterable[Segment], summed: Saw) -> Generator[memoryview]:
    """Yield the blocks of rows among these segments; threads read and assemble the next ones while one is written."""
    from ckptfix.io.threads import Workers

    def made(block: RowBlock) -> memoryview:
        return block.made(summed)

    yield from Workers(MOST_BLOCKS).run(made, (block for one in segments if (block := row_block(one)) is not None))


@dataclass(slots=True)
class OutputWriter:
    """An output file in progress: its temporary file, the file that it replaces, and the way back."""

    file: OutputFile
    old: os.stat_result | None
    dest: str
    temp: str = field(init=False)
    backup: str = field(init=False)
    copy: str = field(init=False)
    identity: tuple[int, int] | None = None
    kept: Kept | None = None
    backup_stays: bool = False

    def __post_init__(self) -> None:
        folder, name = os.path.split(self.dest)
        # With forty characters of the name, the result stays under NAME_MAX (255 bytes) in any encoding.
        stem = os.path.join(folder, f".{name[:40]}.{os.urandom(8).hex()}")
        self.temp = stem + TEMP_SUFFIX
        self.backup = stem + ".old" + TEMP_SUFFIX
        self.copy = stem + ".kept" + TEMP_SUFFIX

    def write(
        self, sources: Sources, advance: Callable[[int], None], checking: Checking, syncing: Syncing, *, wait: bool
    ) -> None:
        """Fill the temporary file and sync it; without `wait`, `syncing` syncs it in the background."""
        fd = os.open(self.temp, platform.TO_CREATE, 0o600)
        file = open(fd, "wb", buffering=0)  # noqa: SIM115 -- `syncing` closes it
        try:
            status = os.fstat(fd)
            self.identity = (status.st_dev, status.st_ino)

            def wrote(count: int) -> None:
                syncing.wrote(fd, count)
                advance(count)

            sink = Sink(fd, wrote, checking.saw, advance)
            with closing(_blocks(self.file.segments, checking.sum)) as blocks:
                for segment in self.file.segments:
                    if isinstance(segment, bytes):
                        sink.add(segment)
                    elif isinstance(segment, ByteRange):
                        sink.copy(sources[segment.path], segment.offset, segment.length)
                    elif row_block(segment) is not None:
                        sink.add(next(blocks))
                    else:
                        for chunk in read_chunks(segment):
                            sink.add(chunk)
            sink.flush()
            size = os.fstat(fd).st_size
            if size != self.file.nbytes:
                raise WriteFailed(f"{self.file.nbytes} bytes were written, but {size} arrived", path=self.file.path)
            adopt_mode(fd, self.old, sources.permissions)
        except BaseException:
            file.close()
            raise
        syncing.finish(self.file, file, wait=wait or size < WORTH_A_THREAD)

    def keep_old(self) -> None:
        """Keep a second name of the replaced file, so that `restore` can bring it back."""
        if self.old is not None:
            with suppress(OSError):
                os.link(self.dest, self.backup)

    def publish(self, overwrite: bool) -> None:
        """Rename the temporary file to the destination, in one step."""
        forget(self.file.path)
        forget(self.dest)
        if overwrite:
            os.replace(self.temp, self.dest)
            return
        try:
            os.link(self.temp, self.dest)
        except OSError as error:
            if error.errno in NO_LINKS and not os.path.lexists(self.dest):
                os.replace(self.temp, self.dest)
                return
            if error.errno in (errno.EEXIST, *NO_LINKS):
                raise WouldOverwrite("appeared while it was being written", path=self.file.path) from error
            raise
        os.unlink(self.temp)

    def restore(self) -> None:
        """Undo `publish`, wherever it stopped."""
        persist(self._restore)

    def _restore(self) -> None:
        if self.kept is not None:
            self.kept.undo(self.identity)
        elif os.path.lexists(self.backup):
            os.replace(self.backup, self.dest)
        elif self.old is None and identity(self.dest) == self.identity:
            os.unlink(self.dest)

    def stuck(self) -> str | None:
        """Return the message after a failed `restore`: the new file is there, and the old one has a temporary name."""
        with suppress(OSError, MemoryError):
            if identity(self.dest) != self.identity:
                return None
            line = f"{self.file.path} is already the new file, and the old one could not be restored"
            if self.kept is not None:
                return f"{line}; {self.kept.line}"
            if os.path.lexists(self.backup):
                self.backup_stays = True
                return f"{line}; it is kept as {self.backup}"
            return line
        return None

    def discard(self) -> None:
        for path in (self.temp, *(() if self.backup_stays else (self.backup,)), self.copy):
            persist(partial(os.unlink, path))

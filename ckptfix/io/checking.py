"""Bytes compared with the checksums that their file states for them, in the background while they are copied."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from threading import Event
from typing import TYPE_CHECKING

from ckptfix.checkpoint import Check
from ckptfix.commands import quoted
from ckptfix.errors import DamagedFile
from ckptfix.io.read import read_chunks, read_from
from ckptfix.io.source import threads
from ckptfix.io.sums import CRC_CHUNK

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor


class Checking:
    """The checks of a plan, one after the other in a separate thread.

    They read what the writer reads, in the same order: what one of them has read the other finds in the page cache.
    CRC-32 takes 0.4 s a GB, and leaves the interpreter to others.
    """

    def __init__(self, checks: Sequence[Check]) -> None:
        self._stopped = Event()
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        if checks:
            self._pool = threads(1, "checks")
            self._running = self._pool.submit(self._run, sorted(checks, key=_place))

    def finish(self) -> None:
        """Wait for all of them.

        Raises:
            DamagedFile: bytes have another checksum.
            CkptfixError: they cannot be read.
        """
        if self._running is not None:
            self._running.result()

    def stop(self) -> None:
        """End the thread, whether it is done or not."""
        self._stopped.set()
        if self._pool is not None:
            self._pool.shutdown()

    def _run(self, checks: Sequence[Check]) -> None:
        run(checks, self._stopped)


def run(checks: Iterable[Check], stopped: Event | None = None) -> None:
    """Compare bytes with their checksums, until `stopped`.

    Raises:
        DamagedFile: bytes have another checksum.
        CkptfixError: they cannot be read.
    """
    for check in checks:
        crc = 0
        for chunk in read_chunks(check.data, CRC_CHUNK):
            if stopped is not None and stopped.is_set():
                return
            crc = zlib.crc32(chunk, crc)
        if crc != check.crc32:
            raise _differs(check)


def _place(check: Check) -> tuple[str, int]:
    first = next(iter(read_from(check.data)), None)
    return (first.path, first.offset) if first is not None else ("", 0)


def _differs(check: Check) -> DamagedFile:
    path, offset = _place(check)
    return DamagedFile(
        "its bytes do not match the CRC-32 that the file states: they are damaged",
        path=path or None,
        where=f"storage {check.where}",
        offset=offset,
        hint=f"`ckptfix repair {quoted(path)} OUT` keeps the tensors that are intact",
    )

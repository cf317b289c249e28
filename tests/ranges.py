"""The bytes of a range, read or copied whole; reads in small blocks."""

from __future__ import annotations

import pytest

from ckptfix.checkpoint import ByteRange
from ckptfix.io import source as io_source
from ckptfix.io.copy import Sink
from ckptfix.io.read import Progress
from ckptfix.io.source import open_source


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let every block that is read to be used at once have `size` bytes."""
    monkeypatch.setattr(io_source, "BLOCK", size)
    monkeypatch.setattr(io_source, "_SPARE", [])


def read_exact(where: ByteRange) -> bytes:
    """The bytes of a small range. Raises as `open_source` and `Source.read`."""
    with open_source(where.path) as source:
        return source.read(where.offset, where.length)


def copy_range(where: ByteRange, out_fd: int, progress: Progress | None = None) -> None:
    """Append `where` to `out_fd` at its current position, inside the kernel where it can."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, where.length)

    with open_source(where.path) as source:
        sink = Sink(out_fd, advance)
        sink.copy(source, where.offset, where.length)
        sink.flush()

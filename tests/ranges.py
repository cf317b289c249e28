"""The bytes of a range, read or copied whole."""

from __future__ import annotations

from ckptfix.checkpoint import ByteRange
from ckptfix.io.copy import Sink
from ckptfix.io.read import Progress
from ckptfix.io.source import open_source


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

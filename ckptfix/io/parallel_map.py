"""Bytes that are computed from other bytes, piece by piece on several threads, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

from ckptfix.checkpoint import ByteRange, Data, Derived
from ckptfix.io.read import read_chunks, read_from
from ckptfix.io.source import Readers
from ckptfix.io.system import keep_freed_memory
from ckptfix.io.threads import Workers

PIECE = 1 << 20
"""Bytes of each input that one call gets: small enough that the pieces that run ahead stay below 100 MB."""

AHEAD = 8
"""Pieces that can wait to be written."""

Compute = Callable[[int, Sequence[bytes | memoryview]], bytes]
"""(first element, the same elements of each input) -> their bytes in the output; called again in a second pass. Its
arguments are overwritten after it has returned."""


class _Scratch(threading.local):
    """Memory that a thread reuses for its reads: fresh memory costs as much as the reading, in page faults."""

    def __init__(self) -> None:
        self._held: list[bytearray] = []

    def views(self, lengths: Sequence[int]) -> list[memoryview]:
        """Return one view of each length."""
        for number, length in enumerate(lengths):
            if number == len(self._held):
                self._held.append(bytearray(length))
            elif length > len(self._held[number]):
                self._held[number] = bytearray(length)
        return [memoryview(held)[:length] for held, length in zip(self._held, lengths, strict=False)]


def mapped(inputs: Sequence[Data], widths: Sequence[int], width: int, compute: Compute, what: str) -> Derived:
    """Return the bytes that `compute` makes of the elements of all `inputs`, which have equal numbers of elements.

    Args:
        widths: bytes of an element of each input.
        width: bytes of an element of the output.
        what: the work in words, for a plan that is displayed.
    """
    count = inputs[0].length // widths[0]
    step = max(PIECE // max(widths), 1)
    sources = tuple(place for data in inputs for place in read_from(data))
    ranges = [data for data in inputs if isinstance(data, ByteRange)]

    def at(readers: Readers, scratch: _Scratch, first: int) -> bytes:
        several = min(step, count - first)
        views = scratch.views([several * size for size in widths])
        for data, size, view in zip(ranges, widths, views, strict=True):
            readers[data.path].read_into(data.offset + first * size, view)
        return compute(first, views)

    def chunks() -> Iterator[bytes]:
        if len(ranges) < len(inputs):
            yield from _streamed(inputs, widths, step, count, compute)
            return
        scratch = _Scratch()
        with Readers() as readers:
            if count <= 2 * step:
                for first in range(0, count, step):
                    yield at(readers, scratch, first)
                return
            keep_freed_memory()
            call = partial(at, readers, scratch)
            with closing(Workers(AHEAD).run(call, range(0, count, step))) as made:
                yield from made

    return Derived(count * width, chunks, what, sources)


def _streamed(
    inputs: Sequence[Data], widths: Sequence[int], step: int, count: int, compute: Compute
) -> Iterator[bytes]:
    """Yield the bytes like `mapped`, but from streams that are read front to back."""
    streams = [_cut(read_chunks(data), size * step) for data, size in zip(inputs, widths, strict=True)]
    for first, pieces in zip(range(0, count, step), zip(*streams, strict=True), strict=True):
        yield compute(first, pieces)


def _cut(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Yield the same bytes in pieces of `size`, except for the last one."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)

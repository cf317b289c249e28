"""Bytes that are computed of others, piece by piece and on several threads, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from ckptfix.checkpoint import ByteRange, Data, Derived
from ckptfix.io.read import read_chunks, read_from
from ckptfix.io.source import Readers
from ckptfix.io.threads import Workers

PIECE = 1 << 20
"""Bytes of each input that one call gets: small enough that what runs ahead stays below 100 MB."""

Compute = Callable[[int, Sequence[bytes]], bytes]
"""(first element, the same elements of each input) -> their bytes in the output; called again in a second pass."""


def mapped(inputs: Sequence[Data], widths: Sequence[int], width: int, compute: Compute, what: str) -> Derived:
    """The bytes that `compute` makes of the elements of all `inputs`, which are as many of each.

    Args:
        widths: bytes of an element of each input.
        width: bytes of an element of the output.
        what: is being done, for a plan that is shown.
    """
    count = inputs[0].length // widths[0]
    step = max(PIECE // max(widths), 1)
    sources = tuple(place for data in inputs for place in read_from(data))
    ranges = [data for data in inputs if isinstance(data, ByteRange)]

    def at(readers: Readers, first: int) -> bytes:
        several = min(step, count - first)
        pieces = [
            readers[data.path].read(data.offset + first * size, several * size)
            for data, size in zip(ranges, widths, strict=True)
        ]
        return compute(first, pieces)

    def chunks() -> Iterator[bytes]:
        if len(ranges) < len(inputs):
            yield from _streamed(inputs, widths, step, count, compute)
            return
        with Readers() as readers:
            if count <= 2 * step:
                for first in range(0, count, step):
                    yield at(readers, first)
                return
            with closing(Workers().run(lambda first: at(readers, first), range(0, count, step))) as made:  # type: ignore[type-var]
                yield from made

    return Derived(count * width, chunks, what, sources)


def _streamed(
    inputs: Sequence[Data], widths: Sequence[int], step: int, count: int, compute: Compute
) -> Iterator[bytes]:
    """The same of streams, which are read front to back."""
    streams = [_cut(read_chunks(data), size * step) for data, size in zip(inputs, widths, strict=True)]
    for first, pieces in zip(range(0, count, step), zip(*streams, strict=True), strict=True):
        yield compute(first, pieces)


def _cut(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of `size`, the last one aside."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)

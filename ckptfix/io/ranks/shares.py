"""The files of a folder divided among ranks by size; each share includes the checks of the data that it copies."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, OutputFile, Plan, RangeCheck
from ckptfix.checkpoint.byte_ranges import Segment
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.io import checksums
from ckptfix.io.read import read_from


def shares(plan: Plan, size: int) -> list[Plan]:
    """Return the plan of each of `size` ranks: the largest remaining file goes to the rank with the fewest bytes.

    The last file, an index, is in no share.
    """
    bytes_of = [0] * size
    files: list[list[OutputFile]] = [[] for _ in range(size)]
    order = sorted(range(len(plan.files) - 1), key=lambda number: (-plan.files[number].nbytes, number))
    owner: dict[int, int] = {}
    for number in order:
        rank = min(range(size), key=bytes_of.__getitem__)
        bytes_of[rank] += max(plan.files[number].nbytes, 1)
        owner[number] = rank
    for number, rank in sorted(owner.items()):
        files[rank].append(plan.files[number])
    checks = _checks(plan, owner, size)
    return [replace(plan, files=tuple(files[rank]), checks=tuple(checks[rank])) for rank in range(size)]


def _checks(plan: Plan, owner: Mapping[int, int], size: int) -> list[list[RangeCheck]]:
    """Return the checks of each rank: those of the data that it copies; the remaining ones are dealt out in turn."""
    found: list[list[RangeCheck]] = [[] for _ in range(size)]
    if not plan.checks:
        return found
    read: dict[str, list[tuple[int, int, int]]] = {}
    for number, file in enumerate(plan.files):
        for segment in file.segments:
            for where in read_from(segment):
                read.setdefault(where.path, []).append((where.offset, where.end, owner.get(number, 0)))
    for places in read.values():
        places.sort()
    for turn, check in enumerate(plan.checks):
        first = next(iter(read_from(check.data)), None)
        rank = turn % size
        if first is not None:
            places = read.get(first.path, [])
            number = bisect_right(places, (first.offset, first.end, size)) - 1
            if number >= 0 and places[number][1] > first.offset:
                rank = places[number][2]
        found[rank].append(check)
    return found


def digest(plan: Plan, dest: str, inputs: Mapping[str, FileStat]) -> str:
    """Return a digest that is equal on two ranks only if they plan the same output of the same inputs."""
    words = _words(plan, dest, inputs)
    return checksums.digest(repr(row).encode("utf-8", "surrogateescape") for row in words).hex()


def _words(plan: Plan, dest: str, inputs: Mapping[str, FileStat]) -> Iterator[tuple[object, ...]]:
    for file in plan.files:
        yield os.path.relpath(file.path, dest), file.nbytes
        for segment in file.segments:
            yield _told(segment)
    for path, stamp in sorted(inputs.items()):
        yield path, stamp.size, stamp.mtime_ns


def _told(segment: Segment) -> tuple[object, ...]:
    if isinstance(segment, bytes):
        return ("bytes", segment)
    if isinstance(segment, ByteRange):
        return ("range", str(segment.path), segment.offset, segment.length)
    sources = [(str(where.path), where.offset, where.length) for where in segment.sources]
    return ("derived", segment.what, segment.length, sources)

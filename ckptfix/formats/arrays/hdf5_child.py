"""The process in which h5py parses a file, so that a loop or a crash of the library ends no other one.

It opens no file: it asks its parent for each range. Messages of this process begin with a letter and a length::

    R offset, count   the parent answers with the length of the bytes, and the bytes
    J text            a row of an answer, as JSON; the last one of an answer is null
    D bytes           a block of a dataset, the last part of an answer

The parent's requests are lines of JSON.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

HEAD = struct.Struct("<cQ")
RANGE = struct.Struct("<QQ")
LENGTH = struct.Struct("<Q")

CALL_SECONDS = 10
"""Seconds of computing that one object or block may take."""

LIST_SECONDS = 120
"""Seconds of computing that the list of a file may take."""

MEMORY = 3 << 30
"""Bytes of address space that this process may have."""

MOST_DATASETS = 1 << 20

ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, MemoryError, OverflowError)
"""Errors that h5py raises for a file that it cannot read."""


class Served:
    """A file object whose bytes the parent has."""

    def __init__(self, given: BinaryIO, answers: BinaryIO, size: int) -> None:
        self._given, self._answers, self._size, self._at = given, answers, size, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        count = left if count < 0 else min(count, left)
        self._answers.write(HEAD.pack(b"R", RANGE.size) + RANGE.pack(self._at, count))
        self._answers.flush()
        (length,) = LENGTH.unpack(self._given.read(LENGTH.size))
        data = self._given.read(length)
        self._at += len(data)
        return data

    def readinto(self, target: Any) -> int:
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is only read."""

    def truncate(self, size: int) -> None:
        raise OSError("the file is only read")

    def write(self, data: bytes) -> int:
        raise OSError("the file is only read")


def first_line(error: BaseException) -> str:
    """Return the text of an error, cut to a line."""
    return (str(error).partition("\n")[0] or type(error).__name__)[:200]


class Limits:
    """The time that answers and calls of the library may take; a library that loops does not return to Python."""

    def __init__(self) -> None:
        from ckptfix import platform

        self._platform, self._end = platform, 0.0
        platform.limit_memory(MEMORY)

    def begin(self, seconds: float) -> None:
        """Start the time of an answer."""
        self._end = sum(os.times()[:2]) + seconds
        self.renew()

    def renew(self) -> None:
        """Start the time of a call, which ends with that of the answer at the latest."""
        self._platform.end_after(max(min(float(CALL_SECONDS), self._end - sum(os.times()[:2])), 0.01))

    def end(self) -> None:
        """Stop the time: an answer is complete."""
        self._platform.end_after(0)


def rows(file: Any, limits: Limits) -> Iterator[dict[str, Any]]:
    """Yield what a file holds: a dataset, or why one cannot be read."""
    import h5py

    stack: list[tuple[tuple[str, ...], Any]] = [((), file)]
    seen: set[Any] = set()
    count = 0
    while stack:
        where, group = stack.pop()
        inside: list[tuple[tuple[str, ...], Any]] = []
        for key in group:
            limits.renew()
            place = (*where, key)
            try:
                if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                    yield {"where": place, "bad": "it is a link to other data, which is not followed"}
                    continue
                item = group[key]
                count += 1
                if count > MOST_DATASETS:
                    yield {"stop": f"the file has more than {MOST_DATASETS:,} objects"}
                    return
                if isinstance(item, h5py.Group):
                    identity = h5py.h5o.get_info(item.id).addr
                    if identity in seen:
                        yield {"where": place, "bad": "it is a second name of a group, and is not followed"}
                        continue
                    seen.add(identity)
                    inside.append((place, item))
                elif isinstance(item, h5py.Dataset):
                    yield dataset(place, item)
            except ERRORS as error:
                yield {"where": place, "bad": f"HDF5 cannot read it: {first_line(error)}"}
        stack += reversed(inside)


def dataset(place: tuple[str, ...], item: Any) -> dict[str, Any]:
    """Return the row of a dataset."""
    if item.external or item.is_virtual:
        return {"where": place, "bad": "its data is in another file, which is not opened"}
    code = item.dtype.str if item.dtype.kind != "O" and item.shape is not None else ""
    shape = [int(size) for size in item.shape or ()]
    offset = item.id.get_offset()
    return {
        "where": place,
        "code": code,
        "shape": shape,
        "offset": None if item.chunks is not None or offset is None else int(offset),
        "stored": int(item.id.get_storage_size()),
        "name": item.name,
    }


def block(file: Any, name: str, first: int, last: int) -> bytes:
    """Return rows of a dataset; its only number if it has no dimensions."""
    item = file[name]
    data: bytes = (item[first:last] if item.shape else item[()]).tobytes()
    return data


def serve(given: BinaryIO, answers: BinaryIO) -> None:
    """Answer the requests of the parent until it ends."""
    limits = Limits()
    limits.begin(LIST_SECONDS)

    def row(value: object) -> None:
        text = json.dumps(value).encode()
        answers.write(HEAD.pack(b"J", len(text)) + text)

    size = json.loads(given.readline())
    try:
        import h5py

        file = h5py.File(Served(given, answers, size), "r", driver="fileobj", locking=False)
    except ERRORS as error:
        row({"stop": f"HDF5 cannot open it: {first_line(error)}"})
        answers.flush()
        return
    row(None)
    answers.flush()
    while line := given.readline():
        request = json.loads(line)
        try:
            if request is None:
                limits.begin(LIST_SECONDS)
                for one in rows(file, limits):
                    row(one)
                row(None)
            else:
                limits.begin(CALL_SECONDS)
                data = block(file, *request)
                answers.write(HEAD.pack(b"D", len(data)) + data)
        except ERRORS as error:
            row({"stop": f"HDF5 cannot read it: {first_line(error)}"})
        limits.end()
        answers.flush()


def main() -> None:
    """Serve over the standard streams; what the library prints goes elsewhere."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:] = json.loads(sys.argv[1])
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()

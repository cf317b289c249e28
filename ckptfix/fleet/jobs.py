"""A job: one verb on one input. A plan is a text file with a line of JSON for each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptfix.errors import CkptfixError, Refused
from ckptfix.io.source import Source, found_as, open_source, stamp
from ckptfix.numbers import MOST, whole_number
from ckptfix.urls import as_path, is_url, known, known_word, walk_folder

Identity = dict[str, int | str]
"""What tells a file, a folder or an object from what it was before: size, and mtime_ns or etag."""

LONGEST = 1 << 20
"""Bytes of a line of a plan."""


@dataclass(frozen=True)
class Job:
    """One line of a plan.

    Attributes:
        input: what the verb works on.
        identity: what the input was when the job was planned; None where it was not there.
        output: what the verb writes; the input, for an edit in place; None for a verb that writes nothing.
        bytes: size of the input.
        argv: the verb, and its words.
    """

    input: str
    identity: Identity | None
    output: str | None
    bytes: int
    argv: tuple[str, ...]

    @cached_property
    def key(self) -> str:
        """The name of its record, the same wherever in a plan it stands: by its output, or by what it reads."""
        about = [self.output] if self.output is not None else [None, self.input, *self.argv]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]

    @property
    def in_place(self) -> bool:
        return self.output == self.input

    def as_dict(self) -> dict[str, Any]:
        return {
            "input": self.input,
            "identity": self.identity,
            "output": self.output,
            "bytes": self.bytes,
            "argv": list(self.argv),
        }

    def line(self) -> str:
        """The job as a line of a plan: ASCII, whatever its names hold."""
        return json.dumps(self.as_dict()) + "\n"


def parsed(line: str | bytes, path: str, number: int) -> Job:
    """The job that a line of the plan `path` says.

    Raises:
        Refused: it says none.
    """
    where = f"line {number:,}"
    hint = "`ckptfix fleet plan LIST -- VERB ARGS > plan.jsonl` writes one"
    try:
        return _job(json.loads(line))
    except RecursionError as error:
        raise Refused(f"no line of a plan: {error}", path=path, where=where, hint=hint) from None
    except ValueError as error:
        raise Refused(f"no line of a plan: {str(error)[:200]}", path=path, where=where, hint=hint) from None


def _job(value: Any) -> Job:
    """Raises ValueError where `value` is none: numbers are in their range, and names can be names of files."""
    match value:
        case {"input": str(name), "argv": [str(_), *_] as argv} if all(isinstance(word, str) for word in argv):
            output = value.get("output")
        case _:
            raise ValueError("it lacks input, output or argv")
    if not isinstance(output, str | None):
        raise ValueError("output is not text")
    if any("\0" in word for word in (name, output or "", *argv)):
        raise ValueError("a name has a NUL byte")
    size = _number("bytes", value.get("bytes", 0))
    # A plan that was written by hand may have secrets in its URLs: the record of the job has none.
    dest = None if output is None else known(output)
    return Job(known(name), _identity(value.get("identity")), dest, size, tuple(map(known_word, argv)))


_LEAST = {"mtime_ns": -MOST}
"""Numbers of an identity that may be negative: files may be older than 1970."""


def _number(name: str, value: object) -> int:
    number = None if isinstance(value, str) else whole_number(value, least=_LEAST.get(name, 0))
    if number is None:
        raise ValueError(f"{name} is not a number of the range that it can have")
    return number


def _identity(value: object) -> Identity | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not {*value} <= {"size", "mtime_ns", "etag", "files"}:
        raise ValueError("identity is not what a file can have")
    made: Identity = {}
    for name, part in value.items():
        if name != "etag":
            made[name] = _number(name, part)
        elif isinstance(part, str):
            made[name] = part
        else:
            raise ValueError("etag is not text")
    return made


def lines_of(source: Source) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of all lines of a plan that are not empty; it is never held whole.

    Raises:
        CkptfixError: it cannot be read, or a line is longer than any of a plan.
    """
    offset, rest = 0, b""
    for chunk in source.chunks(0, source.size):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield offset, line
            offset += len(line) + 1
        if len(rest) > LONGEST:
            raise Refused("no plan: a line has no end", path=source.name, offset=offset)
    if rest.strip():
        yield offset, rest


def line_at(source: Source, offset: int) -> bytes:
    """The line of a plan that begins at `offset`."""
    length = 4 << 10
    while True:
        data = source.read(offset, min(length, source.size - offset))
        line, end, _ = data.partition(b"\n")
        if end or len(data) < length:
            return line
        length *= 4


def identity(name: str) -> Identity | None:
    """What `name` is now: of a folder, all of its files together; None for nothing."""
    try:
        kind = found_as(name)
        if not kind:
            return None
        if kind == "folder":
            return _folder(name)
        found = stamp(name)
    except CkptfixError:
        return None
    return {"size": found.size, "etag": found.tag} if found.tag else {"size": found.size, "mtime_ns": found.mtime_ns}


def _folder(name: str) -> Identity:
    size = latest = count = 0
    tags = hashlib.sha256()
    for path in files_below(name):
        try:
            found = stamp(path)
        except CkptfixError:
            continue
        size, latest, count = size + found.size, max(latest, found.mtime_ns), count + 1
        tags.update(f"{path} {found.tag}\n".encode("utf-8", "surrogateescape"))
    if is_url(name):
        return {"size": size, "etag": tags.hexdigest(), "files": count}
    return {"size": size, "mtime_ns": latest, "files": count}


def files_below(folder: str) -> Iterator[str]:
    """The files in `folder` and in the folders there, sorted; without what an interrupted write has left."""
    for above, folders, files in walk_folder(folder):
        folders.sort()
        for name in sorted(files):
            if not name.endswith(".ckptfix-tmp"):
                yield str(as_path(above, name))


def size_of(found: Identity | None) -> int:
    """The bytes of what has this identity."""
    return whole_number(found.get("size", 0)) or 0 if found is not None else 0


def digest(name: str) -> str:
    """The SHA-256 of a file; of a folder, that of the lines ``HEX  NAME`` of its files, as sha256sum prints them."""
    if found_as(name) != "folder":
        return f"sha256:{_sha256(name)}"
    lines = (f"{_sha256(path)}  {os.path.relpath(path, name)}\n" for path in files_below(name))
    whole = hashlib.sha256()
    for line in lines:
        whole.update(line.encode("utf-8", "surrogateescape"))
    return f"sha256:{whole.hexdigest()}"


def _sha256(path: str) -> str:
    whole = hashlib.sha256()
    with open_source(path) as source:
        for chunk in source.chunks(0, source.size):
            whole.update(chunk)
    return whole.hexdigest()

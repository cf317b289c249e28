"""Jobs: one verb on one input. A plan is a text file with a line of JSON for each job."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from ckptfix.dataclass import cached_property, dataclass
from ckptfix.errors import CkptfixError, Refused
from ckptfix.io.source import Source, found_as, open_source, stamp
from ckptfix.numbers import MOST, whole_number
from ckptfix.urls import as_path, is_url, known, walk_folder, word_without_secrets

Identity = dict[str, int | str]
"""The values that distinguish a file, a folder or an object from its earlier states: size, and mtime_ns or etag."""

LONGEST = 1 << 20
"""The longest line of a plan, in bytes."""


@dataclass(frozen=True)
class PlannedJob:
    """One line of a plan.

    Attributes:
        input: the file or folder that the verb works on.
        identity: the identity of the input when the job was planned; None if it did not exist.
        output: the output of the verb; the input, for an in-place edit; None for a verb without output.
        bytes: size of the input.
        argv: the verb and its arguments.
    """

    input: str
    identity: Identity | None
    output: str | None
    bytes: int
    argv: tuple[str, ...]

    @cached_property
    def key(self) -> str:
        """The name of its record, wherever in a plan it is: a hash of its output, or of its input and arguments."""
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
        """Return the job as a line of a plan, in ASCII, whatever characters its names contain."""
        return json.dumps(self.as_dict()) + "\n"


def parsed(line: str | bytes, path: str, number: int) -> PlannedJob:
    """Return the job of a line of the plan `path`.

    Raises:
        Refused: the line is not a job.
    """
    where = f"line {number:,}"
    hint = "write a plan with `ckptfix fleet plan LIST -- VERB ARGS > plan.jsonl`"
    try:
        return _job(json.loads(line))
    except RecursionError as error:
        raise Refused(f"not a line of a plan: {error}", path=path, where=where, hint=hint) from None
    except ValueError as error:
        raise Refused(f"not a line of a plan: {str(error)[:200]}", path=path, where=where, hint=hint) from None


def _job(value: Any) -> PlannedJob:
    """Return the job, or raise ValueError unless numbers are in range and names can be names of files."""
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
    # A plan that was written by hand may have secrets in its URLs: the record of the job must not contain them.
    dest = None if output is None else known(output)
    return PlannedJob(known(name), _identity(value.get("identity")), dest, size, tuple(map(word_without_secrets, argv)))


_LEAST = {"mtime_ns": -MOST}
"""Numbers of an identity that can be negative: files may be older than 1970."""


def _number(name: str, value: object) -> int:
    number = None if isinstance(value, str) else whole_number(value, least=_LEAST.get(name, 0))
    if number is None:
        raise ValueError(f"{name} is not a number in its range")
    return number


def _identity(value: object) -> Identity | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not {*value} <= {"size", "mtime_ns", "etag", "files"}:
        raise ValueError("identity is not the state of a file")
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
    """Yield (offset, line) for all non-empty lines of a plan, which is never in memory as a whole.

    Raises:
        CkptfixError: it cannot be read, or a line is longer than any line of a plan.
    """
    offset, rest = 0, b""
    for chunk in source.chunks(0, source.size):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield offset, line
            offset += len(line) + 1
        if len(rest) > LONGEST:
            raise Refused("not a plan: a line has no end", path=source.name, offset=offset)
    if rest.strip():
        yield offset, rest


def line_at(source: Source, offset: int) -> bytes:
    """Return the line of a plan that begins at `offset`."""
    length = 4 << 10
    while True:
        data = source.read(offset, min(length, source.size - offset))
        line, end, _ = data.partition(b"\n")
        if end or len(data) < length:
            return line
        length *= 4


def identity(name: str) -> Identity | None:
    """Return the present identity of `name`: for a folder, of all its files together; None if it does not exist."""
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
    """Yield the files in `folder` and its subfolders, sorted, without temporary files of interrupted writes."""
    for above, folders, files in walk_folder(folder):
        folders.sort()
        for name in sorted(files):
            if not name.endswith(".ckptfix-tmp"):
                yield str(as_path(above, name))


def size_of(found: Identity | None) -> int:
    """Return the size in an identity."""
    return whole_number(found.get("size", 0)) or 0 if found is not None else 0


def digest(name: str) -> str:
    """Return the SHA-256 of a file; for a folder, that of the lines ``HEX  NAME`` of its files, like sha256sum's."""
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

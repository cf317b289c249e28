"""What is kept of each job beside the plan: a file of JSON, complete or absent.

``plan.jsonl.d/jobs/ab/cdef….json`` is the record of a job that has ended, under the name that its input, output and
words give it: where in the plan it stands plays no part. ``….begun`` beside it says that it has begun, and how often:
what is found of it later was left by a process that was killed. A folder holds 1/256 of the records.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ckptfix.checkpoint import OutputFile, Plan
from ckptfix.errors import CkptfixError
from ckptfix.io.source import open_source
from ckptfix.io.write import write_plan
from ckptfix.io.written import recorded
from ckptfix.numbers import whole_number

SCHEMA = 1
"""Version of what a record holds."""


class Begun(NamedTuple):
    """A job that has begun and not ended: in which run, and how many times in that."""

    run: str
    tries: int


class Records:
    """The records of a plan, in `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def _path(self, key: str, suffix: str) -> str:
        return f"{self.folder}/jobs/{key[:2]}/{key[2:]}{suffix}"

    def read(self, key: str) -> dict[str, Any] | None:
        """The record of a job; None where there is none that can be read."""
        value = _read(self._path(key, ".json"))
        return value if value is not None and value.get("schema") == SCHEMA and _is_record(value) else None

    def write(self, key: str, record: dict[str, Any]) -> None:
        """Keep the record, in the place of an older one; it is on the disk then. Raises WriteFailed."""
        path = self._path(key, ".json")
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        text = json.dumps({"schema": SCHEMA, **record}).encode()
        if Path(path).is_symlink():  # no run has left it, and what it leads to may be anything
            os.unlink(path)  # noqa: PTH108
        with recorded():
            write_plan(Plan((OutputFile.of(path, [text]),)), overwrite=True)

    def begun(self, key: str) -> Begun | None:
        """Whether the job began and did not end."""
        value = _read(self._path(key, ".begun"))
        match value:
            case {"run": str(run), "tries": tries} if (count := whole_number(tries)) is not None:
                return Begun(run, count)
        # It was cut off while it was written: the job had begun.
        return Begun("", 1) if value is not None or os.path.lexists(self._path(key, ".begun")) else None

    def begin(self, key: str, begun: Begun) -> None:
        """Keep that the job has begun."""
        path = self._path(key, ".begun")
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        if Path(path).is_symlink():
            os.unlink(path)  # noqa: PTH108
        with open(path, "w", encoding="ascii") as file:
            json.dump(begun._asdict(), file)

    def began_at(self, key: str) -> float:
        """When the job began, in seconds since the epoch."""
        return os.stat(self._path(key, ".begun")).st_mtime  # noqa: PTH116

    def end(self, key: str) -> None:
        """The job has ended."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(key, ".begun"))  # noqa: PTH108


def _is_record(value: dict[str, Any]) -> bool:
    """Whether it has what a record of a job has; a file that another program left is none."""
    text = all(isinstance(value.get(name), str | None) for name in ("output", "digest", "cause", "message", "fix"))
    numbers = all(type(value.get(name)) is int for name in ("exit_code", "bytes")) and (
        whole_number(value["bytes"]) is not None and whole_number(value["exit_code"], most=255) is not None
    )
    took = value.get("seconds")
    argv = value.get("argv")
    return (
        text
        and numbers
        and isinstance(value.get("input"), str)
        and isinstance(value.get("run"), str)
        and isinstance(took, int | float)
        and abs(took) < _LONG
        and isinstance(argv, list)
        and all(isinstance(word, str) for word in argv)
        and all(isinstance(value.get(name), dict | None) for name in ("identity", "output_identity"))
    )


_LONG = 1e10
"""Seconds: three centuries."""


def _read(path: str) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    try:
        with open_source(path) as source:
            value = json.loads(source.read(0, source.size))
    except (CkptfixError, ValueError):
        return None
    return value if isinstance(value, dict) else None

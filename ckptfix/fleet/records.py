"""The records of jobs beside the plan: each is a file of JSON, complete or absent.

``plan.jsonl.d/jobs/ab/cdef….json`` is the record of a job that has ended. Its name depends on the job's input, output
and arguments, but not on its line in the plan. ``….begun`` beside it shows that the job has begun, and how often: if it
is found later, the process was killed. A folder holds 1/256 of the records.
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
from ckptfix.io.write_log import recorded
from ckptfix.numbers import whole_number

SCHEMA = 1
"""Version of the records' fields."""


class Begun(NamedTuple):
    """A job that has begun and not ended: its run, and the number of attempts in that run."""

    run: str
    tries: int


class PlanRecords:
    """The records of a plan, in `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def _path(self, key: str, suffix: str) -> str:
        return f"{self.folder}/jobs/{key[:2]}/{key[2:]}{suffix}"

    def read(self, key: str) -> dict[str, Any] | None:
        """Return the record of a job; None if it does not exist or cannot be read."""
        value = _read(self._path(key, ".json"))
        return value if value is not None and value.get("schema") == SCHEMA and _is_record(value) else None

    def write(self, key: str, record: dict[str, Any]) -> None:
        """Write the record to the disk, replacing an older one. Raises WriteFailed."""
        path = self._path(key, ".json")
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        text = json.dumps({"schema": SCHEMA, **record}).encode()
        if Path(path).is_symlink():  # no run creates links, and this one may lead anywhere
            os.unlink(path)  # noqa: PTH108
        with recorded():
            write_plan(Plan((OutputFile.of(path, [text]),)), overwrite=True)

    def begun(self, key: str) -> Begun | None:
        """Return the mark of a job that began and did not end; None for other jobs."""
        value = _read(self._path(key, ".begun"))
        match value:
            case {"run": str(run), "tries": tries} if (count := whole_number(tries)) is not None:
                return Begun(run, count)
        # If it was interrupted while it was written, the job had begun.
        return Begun("", 1) if value is not None or os.path.lexists(self._path(key, ".begun")) else None

    def begin(self, key: str, begun: Begun) -> None:
        """Record that the job has begun."""
        path = self._path(key, ".begun")
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        if Path(path).is_symlink():
            os.unlink(path)  # noqa: PTH108
        with open(path, "w", encoding="ascii") as file:
            json.dump(begun._asdict(), file)

    def began_at(self, key: str) -> float:
        """Return the time when the job began, in seconds since the epoch."""
        return os.stat(self._path(key, ".begun")).st_mtime  # noqa: PTH116

    def end(self, key: str) -> None:
        """Record that the job has ended."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(key, ".begun"))  # noqa: PTH108


def _is_record(value: dict[str, Any]) -> bool:
    """Return whether a value has the fields of a record; a file of another program does not."""
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
"""A limit for seconds: three centuries."""


def _read(path: str) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    try:
        with open_source(path) as source:
            value = json.loads(source.read(0, source.size))
    except (CkptfixError, ValueError):
        return None
    return value if isinstance(value, dict) else None

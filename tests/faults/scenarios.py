"""What the fault tests write: plans of every kind of segment, and how to distinguish old, new and torn files.

Run as a program, it writes one plan and says how it went: ``scenarios.py FOLDER NAME [step]``. It ends with 0,
with 2 and the error on stderr, or with 128+n after a signal, as the commands do. With ``step`` it waits for a line on
stdin before each chunk, so that the test can stop it there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from ckptfix.checkpoint import ByteRange, Derived, OutputFile, Plan
from ckptfix.errors import CkptfixError
from ckptfix.io import copy as io_copy
from ckptfix.io import read as io_read
from ckptfix.io.output import TEMP_SUFFIX
from ckptfix.io.write import write_plan

LONG = os.environ.get("CKPTFIX_LONG") == "1"
"""Whether to take all the time that a thorough campaign needs."""

OLD = b"what was there before " * 50
EARLIER = b"kept by an earlier run"
SOURCE = random.Random(7).randbytes(300_000)
SMALLER = {"BATCH": 20_000, "SMALL": 10_000, "KERNEL_CHUNK": 60_000}
"""Values for the constants of `io.copy` that make many calls out of few bytes."""


@dataclass(frozen=True)
class Scenario:
    """Files to write, in order; `replace` says whether they exist, `keep` whether what they replace is kept."""

    files: tuple[str, ...]
    replace: bool
    keep: bool = False


SCENARIOS = {
    "new": Scenario(("out",), False),
    "replace": Scenario(("out",), True),
    "several": Scenario(("one", "two", "index"), True),
    "several new": Scenario(("one", "two", "index"), False),
    "keep": Scenario(("out",), True, True),
    "several keep": Scenario(("one", "two", "index"), True, True),
}

State = Literal["old", "new", "torn"]


def expected(name: str) -> bytes:
    """The content that the plan gives to the file `name`."""
    return b"".join(
        (name.encode().ljust(4096), SOURCE[:150_000], b"-", SOURCE[7:5000], SOURCE[::-1][:30_000], SOURCE[200_000:])
    )


def prepare(folder: Path, scenario: Scenario) -> None:
    """Put the source, and what is to be replaced, into `folder`, and nothing else."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "source").write_bytes(SOURCE)
    if scenario.replace:
        for name in scenario.files:
            (folder / name).write_bytes(OLD)
    if scenario.keep:
        (folder / f"{scenario.files[0]}.~1~").write_bytes(EARLIER)


def plan(folder: Path, scenario: Scenario) -> Plan:
    """The plan that gives every file its `expected` content."""
    source = str(folder / "source")

    def derived() -> Iterator[bytes]:
        for chunk in io_read.read_chunks(ByteRange(source, 270_000, 30_000), 10_000):
            pieces.append(chunk)
        yield from (chunk[::-1] for chunk in reversed(pieces))
        pieces.clear()

    pieces: list[bytes] = []
    middle = Derived(30_000, derived, "reversed", (ByteRange(source, 270_000, 30_000),))
    return Plan(
        tuple(
            OutputFile.of(
                folder / name,
                [
                    name.encode().ljust(4096),
                    ByteRange(source, 0, 150_000),
                    b"-",
                    ByteRange(source, 7, 4993),
                    middle,
                    ByteRange(source, 200_000, 100_000),
                ],
            )
            for name in scenario.files
        )
    )


def states(folder: Path, scenario: Scenario) -> list[State]:
    """Of each file: as before, as planned, or neither."""
    found: list[State] = []
    for name in scenario.files:
        path = folder / name
        content = path.read_bytes() if path.exists() else None
        before = OLD if scenario.replace else None
        found.append("old" if content == before else "new" if content == expected(name) else "torn")
    return found


def writing(scenario: Scenario) -> dict[str, Any]:
    """The keywords of `write_plan`."""
    return {"overwrite": scenario.replace, "keep_old": (lambda path: True) if scenario.keep else None}


def wrongly_kept(folder: Path, scenario: Scenario, found: Sequence[State], code: int) -> str | None:
    """What is wrong with the old files that are kept: each must be whole, and under one of its names."""
    if (folder / f"{scenario.files[0]}.~1~").read_bytes() != EARLIER:
        return "another's kept file was changed"
    for name, state in zip(scenario.files, found, strict=True):
        kept = [path for path in folder.glob(f"{name}.~*~") if path.read_bytes() != EARLIER]
        torn = [path.name for path in kept if path.read_bytes() != OLD]
        # Where no link can be made, an empty file holds the name for a moment: only SIGKILL can leave it.
        if torn and (code != -signal.SIGKILL or any((folder / name).stat().st_size for name in torn)):
            return f"kept in part: {torn}"
        if state == "new" and not set(kept).difference(folder / name for name in torn):
            return f"the old {name} is lost"
        if state == "old" and kept and code != -signal.SIGKILL:
            return f"kept and not replaced: {name}"
    return None


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(TEMP_SUFFIX))


def complaint(folder: Path, scenario: Scenario, code: int, message: str) -> str | None:
    """What is wrong with the files after a writer that ended with `code`, or None.

    Args:
        code: 0; 2 after an error, whose text is `message`; 128+n or negative after a signal.
    """
    found = states(folder, scenario)
    if "torn" in found:
        return f"torn files: {found}"
    if scenario.keep and (wrong := wrongly_kept(folder, scenario, found, code)):
        return wrong
    if code == -signal.SIGKILL:
        return f"an index before its shards: {found}" if found[-1] == "new" and "old" in found else None
    if left := leftovers(folder):
        return f"left behind: {left}"
    if len(set(found)) > 1:
        return f"some of the files: {found}"
    if code == 0:
        return None if found[0] == "new" else "said to be written, and is not"
    if code == 2:
        synced = "new" if "the output is complete" in message else "old"
        return None if found[0] == synced else f"an error, and the files are {found[0]}"
    return None if code > 128 else f"ended with {code}: {message}"


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(folder: str, name: str, step: str = "") -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    for constant, value in SMALLER.items():
        setattr(io_copy, constant, value)

    def wait(done: int, total: int) -> None:
        sys.stdout.write(f"{done}\n")
        sys.stdout.flush()
        sys.stdin.readline()

    scenario = SCENARIOS[name]
    try:
        write_plan(plan(Path(folder), scenario), **writing(scenario), progress=wait if step == "step" else None)
    except CkptfixError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

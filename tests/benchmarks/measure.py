"""Whole processes, raced in turns: wall time, CPU time and peak memory of each, and ratios pair by pair.

A child's ``ru_maxrss`` also counts what its parent held when it was started, up to the exec. So this side imports
nothing but small parts of the standard library, and everything that needs torch or numpy runs in children.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""A program in daily use is not compiled again at every start; the warm-up leaves its .pyc files."""

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in one unit of ``ru_maxrss`` (getrusage(2): KiB on Linux, bytes on macOS)."""


class Failed(Exception):
    """A command ended otherwise than it should."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process, with those that it waited for.

    Attributes:
        wall, cpu: seconds.
        peak: bytes of resident memory.
        moved: bytes that it read and wrote, and `calls` how often; None where the system does not count them. What
            other processes do at the same time does not change these, nor what blocks are shared.
    """

    wall: float
    cpu: float
    peak: int
    moved: int | None = None
    calls: int | None = None


@dataclass(frozen=True, slots=True)
class Contender:
    """A command to be timed.

    Attributes:
        name: as the table shows it.
        command: argument vector.
        output: what it writes; removed before every run.
        sync: whether `output` is synced within the measured time (a writer that syncs by itself says False).
        status: the exit status that means it did its work.
        cold: files that it reads from the disk: no page of them is in memory when it starts.
    """

    name: str
    command: tuple[str, ...]
    output: Path | None = None
    sync: bool = False
    status: int = 0
    cold: tuple[Path, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        if not self.sync:
            return self.command
        synced = f"find {shlex.quote(str(self.output))} -type f -exec sync {{}} +"
        return "sh", "-c", f"{shlex.join(self.command)} && {synced}"


def removed(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def dropped(path: Path) -> None:
    """Take the pages of a file, which is on the disk, from memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(contender: Contender, log: Path) -> Run:
    """Run it once, its output going to the file `log`.

    Raises:
        Failed: it ended with another status than the one it should, with the end of what it said.
    """
    if contender.output is not None:
        removed(contender.output)
    for path in contender.cold:
        dropped(path)
    with log.open("wb") as said:
        start = time.perf_counter()
        child = subprocess.Popen(
            contender.argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=ENVIRONMENT, process_group=0
        )
        try:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        except BaseException:  # the bench is ended, and what still runs would hold the file systems that it unmounts
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        wall = time.perf_counter() - start
        moved, calls = counted(child.pid)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != contender.status:
        last = log.read_text(errors="replace").strip()[-600:]
        raise Failed(f"{contender.name}: exit status {child.returncode}, not {contender.status}: {last}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * RSS_UNIT, moved, calls)


def counted(pid: int) -> tuple[int | None, int | None]:
    """Bytes that an ended process, not waited for yet, has read and written, and in how many calls (on Linux)."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None, None
    found = {name: int(value) for name, _, value in (line.partition(":") for line in lines)}
    return found["rchar"] + found["wchar"], found["syscr"] + found["syscw"]


def race(
    contenders: Sequence[Contender],
    rounds: int,
    log: Path,
    *,
    check: Callable[[Contender], None] = lambda contender: None,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """Every contender once a round, and what came of it: runs by name, and reasons of those that failed.

    One more round goes before, unmeasured: it warms caches, and `check` sees what each has written. Every second
    round goes backwards, so that none always follows the same neighbour.
    """
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            if contender.name in failed:
                continue
            try:
                result = run(contender, log)
                if number == 0:
                    check(contender)
            except Failed as error:
                failed[contender.name] = str(error)
                progress(str(error))
                continue
            finally:
                if contender.output is not None:
                    removed(contender.output)
            if number:
                runs[contender.name].append(result)
            progress(
                f"{contender.name:26} {'warm-up' if number == 0 else f'{number}/{rounds}':8}"
                f" {result.wall:8.3f} s  cpu {result.cpu:7.3f} s  peak {result.peak / 1e6:7.1f} MB"
                f"  moved {moved([result])}"
            )
    return {name: done for name, done in runs.items() if name not in failed}, failed


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of some measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[Run], theirs: Sequence[Run]) -> Spread:
    """Wall time of `ours` over `theirs`, each pair from the same round."""
    return Spread.of([a.wall / b.wall for a, b in zip(ours, theirs, strict=True)])


def walls(runs: Sequence[Run]) -> Spread:
    return Spread.of([run.wall for run in runs])


def cpus(runs: Sequence[Run]) -> Spread:
    return Spread.of([run.cpu for run in runs])


def moved(runs: Sequence[Run]) -> str:
    """The median of MB moved and of calls; nothing where they are not counted."""
    known = [(run.moved, run.calls) for run in runs if run.moved is not None and run.calls is not None]
    if not known:
        return ""
    middle = statistics.median
    return f"{middle(nbytes for nbytes, _ in known) / 1e6:.0f} in {middle(calls for _, calls in known):.0f}"


def peak(runs: Sequence[Run]) -> int:
    """The most memory that any of the runs held, in bytes."""
    return max(run.peak for run in runs)


def quietly(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    """Run a command that is not measured. Raises Failed with the end of what it said."""
    done = subprocess.run(
        [str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env
    )
    if done.returncode:
        raise Failed(f"{shlex.join(map(str, command))}: {(done.stderr or done.stdout).strip()[-600:]}")

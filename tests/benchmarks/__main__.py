"""ckptfix against cp, cmp, torch, numpy and other packages: ``python tests/benchmarks``.

Whole processes, in turns on the same machine and the same files, page cache warm. Every writer syncs its output
within the measured time. A ratio is taken of two runs of the same round; shown are the median and the extremes.
CPU seconds, and MB read and written in so many calls, show a change that the noise of a shared disk hides;
``--dir /dev/shm/bench`` measures on a memory file system. Rows go to stdout as a markdown table, each run to
stderr. Exit status: 0 every target reached, 1 not every one, 2 a command failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import growth
from cases import CASES, MB, MOUNTED, Bench, Case, Target, checker
from measure import Failed, Run, Spread, cpus, moved, peak, race, ratios, walls
from packages import ROOT

COLUMNS = (
    *("job", "ckptfix", "CPU", "MB", "moved", "against", "its time", "its CPU", "its MB", "its moved"),
    *("ckptfix takes", "target", ""),
)
QUICK = 1 / 32
"""Scale of ``--quick``: 67 MB, and 3,125 tensors. It shows that everything runs, not how fast."""

Line = tuple[tuple[str, ...], bool]
"""Cells of the table, and whether their target is reached."""


def line(case: Case, name: str, target: Target | None, ours: list[Run], theirs: list[Run]) -> Line:
    ratio, seconds = ratios(ours, theirs), walls(ours)
    goals = [str(target)] if target else []
    good = target is None or target.met(seconds.median, ratio.median)
    if case.memory is not None:
        goals.append(f"under {case.memory // MB} MB")
        good = good and peak(ours) < case.memory
    cells = (
        case.job,
        f"{seconds.median:.3g} s",
        f"{cpus(ours).median:.3g} s",
        f"{peak(ours) / MB:.0f}",
        moved(ours),
        name,
        f"{walls(theirs).median:.3g} s",
        f"{cpus(theirs).median:.3g} s",
        f"{peak(theirs) / MB:.0f}",
        moved(theirs),
        words(ratio, target),
        ", ".join(goals),
        ("reached" if good else "missed") if goals else "",
    )
    return cells, good


def lines(case: Case, runs: dict[str, list[Run]]) -> Iterator[Line]:
    """ckptfix against each rival; of a command that failed there is none."""
    for contender, target in case.rivals:
        if case.ours.name in runs and contender.name in runs:
            yield line(case, contender.name, target, runs[case.ours.name], runs[contender.name])


def words(ratio: Spread, target: Target | None) -> str:
    """The median and the extremes of times of ckptfix over times of another, put as the target is."""
    if (target is not None and target.kind == "ratio") or ratio.median > 1:
        return f"{ratio.median:.2f} x the time ({ratio.least:.2f} to {ratio.most:.2f})"
    return f"{1 / ratio.median:.1f} x faster ({1 / ratio.most:.1f} to {1 / ratio.least:.1f})"


def machine() -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "numpy", "safetensors"))
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {system}, {versions}"


def markdown(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small inputs and three rounds: does everything run?")
    names = [*CASES, "startup", "growth", "remote"]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, help="measured runs of each command (5; 3 with --quick)")
    parser.add_argument("--dir", type=Path, default=ROOT / ".bench", help="for inputs and outputs, 12 GB (.bench)")
    parser.add_argument("--markdown", action="store_true", help="the table alone, nothing on stderr")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    rounds = chosen.rounds or (3 if chosen.quick else 5)
    chosen.dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(chosen.dir.resolve(), QUICK if chosen.quick else 1.0)
    missed = False
    left_out: dict[str, str] = {}

    def say(text: str) -> None:
        if not chosen.markdown:
            print(f"  {text}", file=sys.stderr)

    print(f"{machine()}; medians of {rounds} rounds\n")
    print(markdown(COLUMNS), markdown(("---",) * len(COLUMNS)), sep="\n", flush=True)
    for name in [name for name in chosen.only or CASES if name in CASES]:
        try:
            case = CASES[name](bench)
        except Failed as error:
            left_out[name] = str(error)
            continue
        say(case.job)
        runs, failed = race(case.contenders, rounds, bench.output("log.txt"), check=checker(case), progress=say)
        left_out |= {f"{case.job}: {who}": why for who, why in (case.skipped | failed).items()}
        for cells, good in lines(case, runs):
            print(markdown(cells), flush=True)
            missed |= not good
    if "startup" in (chosen.only or ["startup"]):
        command = [sys.executable, str(Path(__file__).with_name("startup.py")), "--dir", str(chosen.dir)]
        print(flush=True)
        missed |= subprocess.run([*command, *(["--rounds", "3"] if chosen.quick else [])]).returncode != 0
    if "growth" in (chosen.only or ["growth"]):
        # In a process of its own: it forks, and its children must not hold what this one does.
        most = round(growth.MOST * bench.scale)
        command = [sys.executable, growth.__file__, "--dir", str(chosen.dir), "--most", str(most)]
        print(flush=True)
        missed |= subprocess.run(command, stderr=subprocess.DEVNULL if chosen.markdown else None).returncode != 0
    if "remote" in (chosen.only or ["remote"]):
        command = [sys.executable, str(Path(__file__).with_name("remote.py")), "--dir", str(chosen.dir)]
        print(flush=True)
        missed |= subprocess.run([*command, "--scale", str(bench.scale)]).returncode != 0
    for who, why in left_out.items():
        print(f"\nleft out: {who}: {why}")
    return 2 if left_out else int(missed)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # which end a process before it unmounts
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with MOUNTED:
        status = main()
    sys.exit(status)

"""CPU time of each command on a small file: ``python tests/benchmarks/startup.py``.

Nearly all of it is the start: the interpreter, click, and the modules that the command imports. Each command runs in
turns with an interpreter that does nothing and with one that imports click, so that a busy machine shows in all three.
Exit status: 1 where a median is above its target, 2 where a command failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from measure import Contender, Run, Spread, cpus, race
from packages import ROOT

FILE = ROOT / "fixtures" / "zip-data-parallel.pth"
ROUNDS = 20
COLUMNS = ("command", "CPU", "times `python -c pass`", "times `import click`", "target", "")

TARGETS = {
    "--help": 0.08,
    "to-cpu": 0.12,
    "inspect": 0.12,
    "strip-module": 0.12,
    "ls": 0.16,
    "ls FOLDER": 0.16,
    "doctor": 0.20,
    "fix": 0.25,
}
"""Command -> seconds of CPU on an idle machine."""


def contenders(folder: Path) -> list[Contender]:
    """The commands, and the two interpreters beside them."""
    python = sys.executable
    several = folder / "several"
    shutil.copytree(ROOT / "fixtures", several, ignore=lambda _, names: {n for n in names if not n.startswith("zip-t")})
    made = [Contender("pass", (python, "-c", "pass")), Contender("click", (python, "-c", "import click"))]
    for name in TARGETS:
        verb, _, inside = name.partition(" ")
        output = folder / "out.pth" if verb in ("to-cpu", "strip-module", "fix") else None
        words = [] if verb == "--help" else [str(several if inside else FILE), *([str(output)] if output else [])]
        command = (python, "-m", "ckptfix", verb, *words)
        made.append(Contender(name, command, output))
    return made


def over(ours: list[Run], theirs: list[Run]) -> Spread:
    return Spread.of([a.cpu / b.cpu for a, b in zip(ours, theirs, strict=True)])


def table(folder: Path, rounds: int) -> int:
    """Print a row for each command; the exit status."""
    runs, failed = race(contenders(folder), rounds, folder / "log.txt")
    print(f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", sep="\n")
    missed = False
    for name, target in TARGETS.items():
        if name in failed:
            continue
        seconds = cpus(runs[name]).median
        ratios = (f"{over(runs[name], runs[beside]).median:.1f}" for beside in ("pass", "click"))
        good = seconds <= target
        missed |= not good
        cells = (name, f"{seconds:.3f} s", *ratios, f"at most {target:g} s", "reached" if good else "missed")
        print(f"| {' | '.join(cells)} |", flush=True)
    for name, why in failed.items():
        print(f"\nleft out: {name}: {why}")
    return 2 if failed else int(missed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/startup.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dir", type=Path, default=ROOT / ".bench")
    chosen = parser.parse_args()
    folder = chosen.dir.resolve() / "startup"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return table(folder, chosen.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

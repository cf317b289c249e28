"""T14: mutants of our own code, each against the tests that run its line. ``python -m campaigns.code_kills``.

The tree is copied, and the tests are collected once in the copy. A run of all of them under coverage, in a fork, tells
which tests run which line, and what share of the branches. Then each mutant is put into a fork of its own, which runs
the tests of its line until one fails. A mutant that survives is a missing test, or stands in `EQUIVALENT`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from campaigns.code_equivalent import EQUIVALENT
from campaigns.code_mutants import ROOMS, Mutant, code_of, drawn

ROOT = Path(__file__).parents[2]
COPIED = ("ckptfix", "fixtures", "tests", ".ci", ".github", "LICENSE", "Makefile", "README.md", "pyproject.toml")
TESTS = (
    "tests/unit", "tests/audit", "tests/recorded", "tests/contract", "tests/cli", "tests/faults", "tests/property",
    "tests/roundtrip",
)  # fmt: skip
MARK = "not campaign or sampled"
"""With all cases of the tests that run a sample in make test."""
ENOUGH = 60.0
"""Seconds of CPU, as measured under coverage, of the tests that a mutant meets at most."""

LIMIT = 20
"""Seconds of CPU that a mutant may take beyond five times what its tests take; each test, and all of them."""

WALL = 900
"""Seconds after which a mutant counts as killed that waits for something."""

Map = dict[str, dict[int, list[str]]]
"""File and line -> names of the tests that run it."""


class Plugin:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.package = Path(asked["root"]) / "ckptfix"
        self.work = Path(asked["work"])
        self.failed = False
        self.cover: Any = None
        if not (self.work / "map.json").exists():
            # From before the package is imported.
            coverage = import_module("coverage")
            every = drawn(self.package, sys.maxsize, asked["rooms"])
            files = sorted({str(self.package / mutant.file) for mutant in every})
            data = str(self.work / "coverage")
            self.cover = coverage.Coverage(data_file=data, branch=True, include=files, config_file=False)
            self.cover.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        mutants = drawn(self.package, self.asked["mutants"], self.asked["rooms"], self.asked["seed"])
        if self.asked["only"]:
            mutants = [mutant for mutant in mutants if self.asked["only"] in str(mutant)]
        items = {item.nodeid: item for item in session.items}
        kept = self.work / "map.json"
        if self.cover is not None:
            self._apart(lambda: self._measure(session.items, kept))
            self.cover.stop()
        told = json.loads(kept.read_text())
        seconds = told["seconds"]
        lines: Map = {name: {int(line): tests for line, tests in rows.items()} for name, rows in told["lines"].items()}
        results = self.work / "results.jsonl"
        done = {json.loads(row)["what"] for row in results.read_text().splitlines()} if results.exists() else set()
        for mutant in mutants:
            if mutant.what in done:
                continue
            names = self._tests(mutant, lines, seconds)
            started = time.monotonic()
            end = self._try(mutant, [items[name] for name in names if name in items], seconds) if names else "no test"
            row = {"what": mutant.what, "shown": str(mutant), "end": end, "tests": len(names)}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{end.partition(' ')[0]:9} {mutant}  ({len(names)} tests, {time.monotonic() - started:.0f} s)",
                  file=sys.__stderr__, flush=True)  # fmt: skip
        return True

    def _apart(self, work: Any) -> int:
        child = os.fork()
        if not child:
            code = 70
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _measure(self, items: list[pytest.Item], kept: Path) -> None:
        """Run all tests under coverage; which tests run the lines of the rooms, and how long each takes."""
        cover = self.cover
        seconds: dict[str, float] = {}
        for item, following in zip(items, [*items[1:], None], strict=True):
            cover.switch_context(item.nodeid)
            self.failed, started = False, time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                print(f"fails without a change: {item.nodeid}", file=sys.__stderr__, flush=True)
            else:
                seconds[item.nodeid] = time.process_time() - started
        cover.stop()
        cover.save()
        lines: Map = {}
        for file in {mutant.file for mutant in drawn(self.package, sys.maxsize, self.asked["rooms"])}:
            rows = cover.get_data().contexts_by_lineno(str(self.package / file))
            lines[file] = {line: sorted({name for name in names if name in seconds}) for line, names in rows.items()}
        with open(kept.with_name("coverage.txt"), "w") as out:
            cover.report(file=out, show_missing=True, precision=1)
        kept.write_text(json.dumps({"seconds": seconds, "lines": lines}))

    def _tests(self, mutant: Mutant, lines: Map, seconds: dict[str, float]) -> list[str]:
        """The tests that run the mutant's line, the quickest modules first, in at most `ENOUGH` seconds."""
        rows = lines.get(mutant.file, {})
        # A line inside a statement may have no event of its own: then those of the line before count.
        near = [line for line in range(mutant.line, mutant.first - 1, -1) if rows.get(line)]
        names = rows[near[0]] if near else []
        total = Counter[str]()
        for name in names:
            total[name.partition("::")[0]] += seconds[name]  # type: ignore[assignment]
        chosen, spent = [], 0.0
        for name in sorted(names, key=lambda name: (total[name.partition("::")[0]], name)):
            if spent + seconds[name] <= ENOUGH:
                chosen.append(name)
                spent += seconds[name]
        return chosen

    def _try(self, mutant: Mutant, items: list[pytest.Item], seconds: dict[str, float]) -> str:
        limit = int(LIMIT + 5 * sum(seconds[item.nodeid] for item in items))
        place = Path(tempfile.mkdtemp(prefix="mutant-", dir=self.asked["temporary"]))
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.setsid()
                os.close(reading)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
                os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = str(place)
                os.write(writing, self._run(mutant, items, seconds).encode()[:4000])
            except BaseException as error:
                os.write(writing, f"killed {type(error).__name__} {error}".encode()[:4000])
            os._exit(0)
        os.close(writing)
        deadline = time.monotonic() + WALL
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        _end_group(child)
        if not ended[0]:
            os.waitpid(child, 0)
        with os.fdopen(reading, errors="replace") as file:
            text = file.read()
        shutil.rmtree(place, ignore_errors=True)
        return text or f"killed by the end of its process, {ended[1]:#x}"

    def _run(self, mutant: Mutant, items: list[pytest.Item], seconds: dict[str, float]) -> str:
        code = code_of(self.package, mutant)
        # Some are imported when they are first needed.
        import_module(".".join(("ckptfix", *Path(mutant.file).with_suffix("").parts)).removesuffix(".__init__"))
        gc.unfreeze()
        put = 0
        for found in gc.get_objects():
            if type(found) is FunctionType and _is(found, code):
                found.__code__ = code
                put += 1
        if not put:
            return "unused: no function has this code"
        self.failed = False
        for item, following in zip(items, [*items[1:], None], strict=True):
            # What goes round for ever is not waited for as long as all tests may take: the signal ends the process.
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT + 5 * seconds[item.nodeid])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return f"killed by {item.nodeid}"
        return "survived"


def _is(function: FunctionType, code: Any) -> bool:
    old = function.__code__
    return (old.co_filename, old.co_qualname, old.co_firstlineno) == (
        code.co_filename, code.co_qualname, code.co_firstlineno
    )  # fmt: skip


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before a conftest imports the package."""
    early_config.pluginmanager.register(Plugin(json.loads(os.environ["CKPTFIX_CODE_MUTANTS"])), "code mutants")


def report(rows: Iterable[dict[str, Any]]) -> int:
    """Print what survived, and the figures; the number of survivors that have no reason."""
    ends = Counter[str]()
    found = 0
    for row in rows:
        reason = EQUIVALENT.get(row["what"])
        end = row["end"].partition(" ")[0]
        if end == "killed":
            ends["killed"] += 1
        elif reason:
            ends["equivalent"] += 1
        else:
            ends["survived"] += 1
            found += 1
            print(f"survived ({row['end']}, {row['tests']} tests)  {row['shown']}\n    {row['what']!r}")
    able = ends["killed"] + ends["survived"]
    share = 100 * ends["killed"] / able if able else 100.0
    print(f"T14  {sum(ends.values())} mutants  {dict(ends)}  {share:.1f} % of those that can be are killed")
    return found


def run(
    work: Path, mutants: int, only: str, tests: list[str], mark: str, rooms: Sequence[str] = ROOMS, seed: int = 0
) -> list[dict[str, Any]]:
    """Copy the tree, collect, and try each mutant; the rows of what came of them."""
    root = work / "tree"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, root / name)
    temporary = work / "temporary"
    temporary.mkdir(exist_ok=True)
    asked = {
        "root": str(root), "work": str(work), "temporary": str(temporary), "mutants": mutants, "only": only,
        "rooms": list(rooms), "seed": seed,
    }  # fmt: skip
    path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ, "CKPTFIX_CODE_MUTANTS": json.dumps(asked), "PYTHONPATH": path,
        "TMPDIR": str(temporary), "HOME": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": "",
    }  # fmt: skip
    options = ["-o", "addopts=--import-mode=importlib", "-p", "campaigns.code_kills"]
    for name in ("terminal", "cacheprovider", "xdist", "logging"):
        options += ["-p", f"no:{name}"]
    command = [sys.executable, "-m", "pytest", *options, "-m", mark, *tests]
    done = subprocess.run(command, cwd=root, env=environment, check=False)
    results = work / "results.jsonl"
    if not results.exists():
        raise SystemExit(f"pytest ended with {done.returncode}")
    return [json.loads(row) for row in results.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="another number draws other mutants")
    parser.add_argument("--room", action="append", help="a folder or file of the package, in place of those of T14")
    parser.add_argument("--only", default="", help="those alone whose line has this text")
    parser.add_argument("--mark", default=MARK, help="which tests, as pytest's -m")
    parser.add_argument("--work", type=Path, help="folder that is kept: map of tests, and what is done already")
    parser.add_argument("tests", nargs="*", default=list(TESTS))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = (chosen.work or Path(folder)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        rooms = chosen.room or ROOMS
        rows = run(work, chosen.mutants, chosen.only, chosen.tests, chosen.mark, rooms, chosen.seed)
        return 1 if report(rows) else 0


if __name__ == "__main__":
    sys.exit(main())

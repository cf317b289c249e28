"""What all tests share: the corpus of real files, and how much hypothesis does."""

from __future__ import annotations

import csv
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import pytest
from forks import ALL_MODULES, OUR_MODULES, Forks
from hypothesis import HealthCheck, settings
from real_disk import on_disk as on_disk
from stores import _hub as _hub
from stores import _local as _local
from stores import _moto as _moto
from stores import _web as _web
from stores import bucket as bucket
from stores import hub as hub
from stores import strict_bucket as strict_bucket
from stores import web as web

ROOT = Path(__file__).parents[1]
CORPUS = ROOT.parent / "shared" / "corpus"
LONG = os.environ.get("CKPTFIX_LONG") == "1"

# Files are written in memory where that is large enough: nearly all tests sync what they write, and would wait for a
# disk most of the time. TMPDIR names another place. What torch.compile keeps is for later runs, and stays on the disk.
MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# The tensors of tests are small: threads would only wait for each other, most of all where two workers have two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A runner may have been started with signals ignored (nohup, a shell's &), and every child would inherit that.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

QUICK_CASES = 8
"""So many cases of a test are quick, drawn from all of them; the others are slow."""
MOST_CASES = 12
"""So many cases of a test run in make test, unless ``sampled(N)`` says otherwise; the others in make test-all."""
QUICK_EXAMPLES = 10
"""So many examples hypothesis makes where the slow tests are left out."""


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile(
        "ckptfix",
        deadline=None,
        max_examples=1000 if LONG else QUICK_EXAMPLES if "not slow" in config.getoption("markexpr") else 40,
        derandomize=not LONG,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("ckptfix")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most cases of a test with many as slow or as a campaign.

    Where no ``-m`` asks for them, two thirds of what ``sampled(N)`` leaves out are left to long runs.
    """
    long: set[pytest.Item] = set()
    for _, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        sampled = cases[0].get_closest_marker("sampled")
        if sampled is None:
            cases = [item for item in cases if not item.get_closest_marker("campaign")]
        sizes = _sizes(*sampled.args, **sampled.kwargs) if sampled else _sizes()
        drawn = _drawn(cases, max(sizes.test_all, sizes.test), sizes.quick)
        left = sorted(set(cases) - set(drawn), key=_by_name)
        long.update(item for number, item in enumerate(left) if number % 3)
        for item in (*drawn[sizes.test :], *left):
            item.add_marker(pytest.mark.campaign)
            item.add_marker(pytest.mark.sampled)  # so that mutants of the code meet all cases
        for item in drawn[sizes.quick : sizes.test]:
            item.add_marker(pytest.mark.slow)
    if long and not LONG and not config.getoption("markexpr"):
        config.hook.pytest_deselected(items=[item for item in items if item in long])
        items[:] = [item for item in items if item not in long]


def _by_name(item: pytest.Item) -> int:
    """Return a number that puts cases in an order that is always the same, and follows no parameter."""
    return crc32(item.name.encode())


def _plain(value: object) -> object:
    """Return what tells values of a parameter apart: texts and numbers are equal, other objects are the same one.

    pytest's own number of a value is no help: it is that of the case.
    """
    return (type(value), value) if isinstance(value, str | int | None) else id(value)


class _Sizes(NamedTuple):
    """How many cases of a test run in make quick, in make test and in test-all."""

    quick: int
    test: int
    test_all: int


def _sizes(test: int | None = None, *, quick: int = QUICK_CASES, test_all: int | None = None) -> _Sizes:
    """Return what the arguments of ``sampled`` say, and what goes for a test without it."""
    most, in_all = (MOST_CASES, sys.maxsize) if test is None else (test, test)
    return _Sizes(quick, most, in_all if test_all is None else test_all)


def _drawn(cases: Sequence[pytest.Item], count: int, quick: int) -> list[pytest.Item]:
    """Return at most `count` cases of a test, always the same ones, in no regular pattern of the parameters.

    The first ones have every value of every parameter, if there are not more values than `count`.
    """
    if len(cases) <= min(count, quick):
        return list(cases)
    rest = {item: _values(item) for item in sorted(cases, key=_by_name)}
    seen: set[tuple[str, object]] = set()
    first: list[pytest.Item] = []
    for all_new in (True, False):  # those with new values only come first, so that few have all
        for item, values in rest.items():
            if seen.isdisjoint(values) if all_new else not seen >= values:
                first.append(item)
                seen |= values
    return [*first, *(item for item in rest if item not in first)][:count]


def _values(item: pytest.Item) -> set[tuple[str, object]]:
    """Return (parameter, value) of a case."""
    params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
    return {(name, _plain(value)) for name, value in params.items()}


@pytest.fixture(scope="session", autouse=True)
def _numbered_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Number the folders of tests by a count: pytest lists what all tests before have left to number one more."""
    made = Counter[str]()

    def mktemp(basename: str, numbered: bool = True) -> Path:
        while True:
            path = tmp_path_factory.getbasetemp() / (f"{basename}{made[basename]}" if numbered else basename)
            made[basename] += 1
            with suppress(FileExistsError) if numbered else nullcontext():
                path.mkdir(0o700)
                return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tmp_path_factory, "mktemp", mktemp)
        yield


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """An interpreter that has imported our modules alone, for tests that look at what a command imports then."""
    with Forks(tmp_path_factory.mktemp("forks"), OUR_MODULES) as made:
        yield made


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """An interpreter that has imported all that the commands need: the fastest for tests of what a process shows."""
    with Forks(tmp_path_factory.mktemp("program"), ALL_MODULES) as made:
        yield made


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """An interpreter that has imported torchrun, for `TORCHRUN`."""
    with Forks(tmp_path_factory.mktemp("launcher"), "import torch.distributed.run") as made:
        yield made


@dataclass(frozen=True)
class RealFile:
    """A row of the corpus manifest."""

    path: Path
    container: str
    loads: bool


Case = TypeVar("Case")


def in_turn(cases: Sequence[Case], turn: int, parts: int) -> Sequence[Case]:
    """Every case in a long run; else one of `parts` parts, so that as many turns that follow each other have all."""
    return cases if LONG else cases[turn % parts :: parts]


def corpus_files() -> list[RealFile]:
    """The files of the corpus; empty where it is absent."""
    manifest = CORPUS / "manifest.tsv"
    if not manifest.exists():
        return []
    with open(manifest, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [
        RealFile(
            CORPUS / row["repo"].replace("/", "+") / row["path"],
            row["container"],
            row["notes"].startswith("weights_only=ok"),
        )
        for row in rows
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collection makes lives as long as the process: torch, and thousands of tests.

    The garbage collector is not to look through it while it is made, nor again with every test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _left_out(config: pytest.Config) -> set[str]:
    """Return the marks whose tests ``-m "not MARK and not MARK"`` leaves out."""
    parts = str(config.getoption("markexpr")).split(" and ")
    return {part.removeprefix("not ") for part in parts if part.startswith("not ") and " or " not in part}


WHOLE = re.compile(r"^pytestmark = .*?\bmark\.(\w+)", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module whose every test ``-m "not MARK"`` leaves out is not imported: some import much of torch."""
    if not collection_path.match("test_*.py"):
        return None
    whole = WHOLE.search(collection_path.read_text(encoding="utf-8"))
    return True if whole and whole[1] in _left_out(config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """A test that ``-m "not MARK"`` leaves out is not made, nor any of its cases."""
    if not (name.lower().startswith("test") and isinstance(obj, FunctionType | type)):
        return None
    own = {mark.name for mark in vars(obj).get("pytestmark", ())}
    return None if own.isdisjoint(_left_out(collector.config)) else []


def pytest_make_parametrize_id(val: object) -> str | None:
    """A long text is named by its beginning: names go from process to process, several times a test."""
    return f"{val[:40]}..." if isinstance(val, str) and len(val) > 60 else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """``--dist loadgroup`` in time that grows with the number of tests, not with its square.

    xdist counts all tests that a worker ever had after each of them. Here what is done is forgotten, and the
    parameters of a test go to one worker together, so that what its module makes for it is made once.
    """
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            name = self.registered_collections[node][item_index]
            scope = self._split_scope(name)
            work = self.assigned_work[node]
            del work[scope][name]
            if not work[scope]:
                del work[scope]
            self._reschedule(node)

        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return scope.partition("[")[0] if scope == nodeid else scope

    return Scheduling(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument `real_file` runs over the corpus, in a campaign."""
    if "real_file" in metafunc.fixturenames:
        files = corpus_files()
        skip = pytest.mark.skip(reason="the corpus of real files is not here (../shared/corpus)")
        metafunc.parametrize(
            "real_file",
            [pytest.param(file, marks=pytest.mark.campaign) for file in files] or [pytest.param(None, marks=skip)],
            ids=[file.path.relative_to(CORPUS).parts[0] + "-" + file.path.name for file in files] or ["absent"],
        )

"""What all tests share: the corpus of real files, and how much hypothesis does."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from forks import ALL_MODULES, Forks
from hypothesis import HealthCheck, settings
from real_disk import on_disk as on_disk

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

settings.register_profile(
    "ckptfix",
    deadline=None,
    max_examples=1000 if LONG else 40,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ckptfix")


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """An interpreter that has imported what ``ckptfix --help`` does, for tests that look at what is imported then."""
    with Forks(tmp_path_factory.mktemp("forks"), "import ckptfix.cli") as made:
        yield made


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """An interpreter that has imported all that the commands need: the fastest for tests of what a process shows."""
    with Forks(tmp_path_factory.mktemp("program"), ALL_MODULES) as made:
        yield made


@dataclass(frozen=True)
class RealFile:
    """A row of the corpus manifest."""

    path: Path
    container: str
    loads: bool


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


WHOLE = re.compile(r"^pytestmark = .*?\bmark\.(\w+)", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module whose every test ``-m "not MARK"`` leaves out is not imported: some import much of torch."""
    if not collection_path.match("test_*.py"):
        return None
    whole = WHOLE.search(collection_path.read_text(encoding="utf-8"))
    left_out = str(config.getoption("markexpr")).split(" and ")
    return True if whole and f"not {whole[1]}" in left_out else None


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

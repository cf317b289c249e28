"""Commands on systems that lack calls of Linux: the same bytes and exit codes, or a refusal that names the way out."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG
from lesser_system import SYSTEMS, WHOLE

from ckptfix.names import regexes

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"

COMMANDS: list[list[str]] = [
    ["strip-module", "ddp.pth", "plain.pth"],
    ["strip-module", "legacy.pth", "plain-legacy.pth"],
    ["to-cpu", "cuda.pth", "-o", "plain.pth", "--force"],
    ["strip-module", "ddp.pth", "-o", "plain.pth", "--force"],
    ["add-module", "plain.pth", "wrapped.pth"],
    ["strip-module", "ddp.pth", "ddp.pth"],
    ["convert", "ddp.pth", "ddp.safetensors"],
    ["convert", "ddp.pth", "shards", "--to", "hf", "--shard-size", "1KB"],
    ["convert", "shards", "joined.pth"],
    ["convert", "ddp.pth", "dcp", "--to", "dcp"],
    ["convert", "dcp", "from-dcp.pth"],
    ["strip-module", "dcp", "dcp-plain"],
    ["strip-module", "dcp", "-o", "dcp-plain", "--force"],
    ["cast", "plain.pth", "half.pth", "--to", "float16"],
    ["slim", "training.pth", "slim.pth"],
    ["diff", "ddp.pth", "plain.pth", "--json"],
    ["digest", "ddp.pth", "plain.pth", "--json"],
    ["doctor", "ddp.pth", "--json"],
    ["doctor", "dcp", "--json"],
    ["inspect", "plain.pth", "--json"],
    ["stats", "plain.pth", "--json"],
    ["ls", ".", "--json"],
    ["fix", "ddp.pth", "fixed.pth"],
    ["repair", "cut.pth", "repaired.pth"],
    ["to-cpu", "cuda.pth", "gone/plain.pth"],
    ["inspect", "no-such-file.pth"],
    ["inspect", "."],
]
"""Command lines that must do the same everywhere."""

IN_PLACE: list[list[str]] = [
    ["strip-module", "edited.safetensors", "--in-place"],
    ["strip-module", "edited.pth", "--in-place"],
    ["strip-module", "dcp", "--in-place"],
    ["undo", "edited.safetensors", "--dry-run"],
]
"""Edits in place: the same, or nothing at all."""


def files(folder: Path) -> None:
    folder.mkdir()
    for name, fixture in {
        "ddp": "zip-data-parallel", "legacy": "legacy-data-parallel", "cuda": "zip-cuda-tagged",
        "training": "trainer-checkpoint-training", "edited": "zip-data-parallel",
    }.items():  # fmt: skip
        shutil.copy(FIXTURES / f"{fixture}.pth", folder / f"{name}.pth")
    shutil.copy(FIXTURES / "safetensors-data-parallel.safetensors", folder / "edited.safetensors")
    whole = (FIXTURES / "zip-data-parallel.pth").read_bytes()
    (folder / "cut.pth").write_bytes(whole[: len(whole) * 3 // 4])


def content(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def ran(system: str, commands: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    words = [sys.executable, str(ROOT / "tests/lesser_system.py"), system, json.dumps(commands)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said: list[dict[str, Any]] = json.loads(done.stdout)
    return said


@cache
def _on_this_system(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    files(folder)
    return ran("this one", COMMANDS + IN_PLACE, folder), content(folder)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[dict[str, Any]], dict[str, str]]]:
    """What the commands say and write where nothing is hidden."""
    yield _on_this_system(tmp_path_factory.mktemp("complete") / "files")


def same(text: str) -> str:
    """The text without the time of an edit, and without the random part of a folder's name."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|/[^ ]*/files", "", text)


LACKING = ("no os.pread", "no fcntl", "no leases", "no signal.pthread_sigmask", "no os.statvfs")
"""Systems without one call that are tried in test-all; campaigns try all."""


@pytest.mark.sampled(1_000)
@pytest.mark.slow
@pytest.mark.parametrize(
    "system",
    [
        name if name in WHOLE else pytest.param(name, marks=pytest.mark.campaign)
        for name in SYSTEMS
        if name in (*WHOLE, *LACKING) or (LONG and name != "this one")
    ],
)
def test_commands_do_the_same(
    system: str, tmp_path: Path, complete: tuple[list[dict[str, Any]], dict[str, str]]
) -> None:
    folder = tmp_path / "files"
    files(folder)
    said = ran(system, COMMANDS + IN_PLACE, folder)
    for row, expected in zip(said, complete[0], strict=True):
        for key in ("code", "out", "err"):
            assert same(str(row[key])) == same(str(expected[key])), f"{row['words']}: {row['err']}"
    written = content(folder)
    different = {name for name in written.keys() | complete[1].keys() if written.get(name) != complete[1].get(name)}
    assert not {name for name in different if not name.endswith("ckptfix-undo")}  # these hold the time of the edit


def test_a_pattern_that_would_take_forever_ends_without_timers() -> None:
    child = f"import signal\ndel signal.setitimer\n{regexes._CHILD}"
    asked = json.dumps({"pattern": "(.*.*)*x", "seconds": 0.3}) + "\n" + json.dumps(["search", "", ["a" * 40]]) + "\n"
    done = subprocess.run([sys.executable, "-c", child], input=asked, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")

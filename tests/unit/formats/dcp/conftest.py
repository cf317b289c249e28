"""Folders that torch itself saves on one to four ranks, made once for all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dcp_ranks
import pytest


def on_ranks(*arguments: object) -> None:
    """Run ``dcp_ranks`` in an interpreter of its own: it forks."""
    command = [sys.executable, dcp_ranks.__file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``dcp_ranks save`` makes: a folder of each name in `SAVES`, and NAME.pt, what torch converts it to."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / "dcp-folders", shared / "dcp-folders.done"
    try:
        folder.mkdir()
    except FileExistsError:
        for _ in range(3000):
            if done.exists():
                return folder
            time.sleep(0.1)
    on_ranks("save", folder)
    done.touch()
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of the folders, which the test may change."""

    def copy(name: str) -> Path:
        shutil.copytree(saved / name, tmp_path / name)
        return tmp_path / name

    return copy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs several ranks takes long."""
    for item in items:
        if "saved" in getattr(item, "fixturenames", ()) and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)

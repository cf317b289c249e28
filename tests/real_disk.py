"""A folder of a real disk: temporary files of the tests are in memory, where there are no blocks to put in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfix.io.inplace.disk import insertable

USUAL = Path("/var/tmp")


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder of a file system that puts blocks in front of a file."""
    with tempfile.TemporaryDirectory(dir=USUAL if USUAL.is_dir() else None) as folder:
        if not insertable(folder):
            pytest.skip("no file system here puts blocks in front of a file (FALLOC_FL_INSERT_RANGE)")
        yield Path(folder).resolve()

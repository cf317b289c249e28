"""The second name of a file that is replaced takes no name that another file has, on any file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckptfix.checkpoint import OutputFile, Plan
from ckptfix.io.write import write_plan


def others(folder: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in folder.iterdir() if path.name != "out")


@pytest.mark.parametrize("links", [True, False])
def test_the_names_of_earlier_copies_are_left_alone(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    out = tmp_path / "out"
    out.write_bytes(b"0")
    for number in range(1, 4):
        write_plan(Plan((OutputFile.of(out, [b"%d" % number]),)), overwrite=True, keep_old=lambda path: True)
        assert out.read_bytes() == b"%d" % number
        assert others(tmp_path) == [b"%d" % old for old in range(number)]

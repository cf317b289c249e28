"""Folders of many files, one of them a mutant: a result or one of our errors, nothing run, nothing half written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG
from property.folder_mutants import MAKE, folder_mutant, write
from property.survive import describe, judge, look

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.ops.doctor import doctor

pytestmark = [pytest.mark.campaign, pytest.mark.usefixtures("nothing_is_run")]


def converted(folder: Path, **options: Any) -> None:
    out = folder.parent / "out.pth"
    out.unlink(missing_ok=True)
    try:
        done = ckptfix.convert(folder, out, **options)
    except CkptfixError:
        assert not out.exists()
        raise
    assert done.exit_code in (0, 3) and out.exists()


OPERATIONS: tuple[Callable[[Path], object], ...] = (
    look, judge, describe, doctor, converted, lambda folder: converted(folder, to="safetensors", drop_unsupported=True),
    lambda folder: converted(folder, optimizer=True), lambda folder: ckptfix.load_state_dict(folder),
    lambda folder: ckptfix.slim(folder, folder.parent / "out.pth", force=True),
)  # fmt: skip


def survive(kind: str, number: int, place: Path) -> None:
    what, files = folder_mutant(kind, number)
    folder = write(files, place / str(number))
    for operation in OPERATIONS:
        try:
            operation(folder)
        except CkptfixError as error:
            assert str(error) and "a bug in ckptfix" not in str(error), what
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("kind", MAKE)
def test_mutants_of_a_file_of_a_folder(kind: str, tmp_path: Path) -> None:
    for number in range(400 if LONG else 8):
        survive(kind, number, tmp_path)

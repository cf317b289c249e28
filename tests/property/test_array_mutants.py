"""Damaged files of other frameworks: a result or one of our errors, in bounded time."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from conftest import LONG
from property.array_mutants import KINDS, array_mutant, contents
from property.folder_mutants import write
from property.survive import judge, look

import ckptfix
from ckptfix.errors import CkptfixError

SECONDS = 20.0
"""Wall time of a mutant: reading HDF5 starts a process, whose calls of the library have 10 seconds of computing."""

FEW, MANY, MOST = 12, 160, 20_000
SLOW = ("hdf5", "chunked hdf5", "keras")
"""Kinds that start a process for each reading."""


def turn(path: Path) -> None:
    ckptfix.convert(path, path.with_name("out.safetensors"), drop_unsupported=True, force=True)


OPERATIONS = (look, judge, turn)


def try_one(kind: str, number: int, folder: Path) -> bool:
    """Return whether every operation took the mutant. Any error that is not ours comes out."""
    what, files = array_mutant(kind, number)
    path = write(files, folder) / f"in{KINDS[kind]}"
    start, taken = time.monotonic(), True
    for operation in OPERATIONS:
        try:
            operation(path)
        except CkptfixError as error:
            taken = False
            assert str(error), what
        except Exception as error:
            error.add_note(f"{what}: {operation.__name__}")
            raise
    assert time.monotonic() - start < SECONDS, what
    return taken


def run(kind: str, numbers: range, folder: Path) -> int:
    """Return how many mutants were refused."""
    refused = 0
    for number in numbers:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        refused += not try_one(kind, number, folder)
    return refused


every = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.sampled(4, quick=1, test_all=10_000)
@every
def test_the_file_is_sound(kind: str, tmp_path: Path) -> None:
    path = write(contents(kind), tmp_path) / f"in{KINDS[kind]}"
    for operation in OPERATIONS:
        operation(path)
    assert len(ckptfix.load_state_dict(tmp_path / "out.safetensors")) == 3


@pytest.mark.sampled(4, test_all=10_000)
@pytest.mark.slow
@every
def test_few_mutants(kind: str, tmp_path: Path) -> None:
    assert run(kind, range(3 if kind in SLOW else FEW), tmp_path / "in")


@pytest.mark.campaign
@every
def test_many_mutants(kind: str, tmp_path: Path) -> None:
    many = (MOST if LONG else MANY) // (1 if kind not in SLOW else 10 if LONG else 40)
    assert run(kind, range(FEW, FEW + many), tmp_path / "in") > many // 10

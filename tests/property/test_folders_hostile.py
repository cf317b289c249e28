"""Folders of many files, one of them a mutant: a result or one of our errors, nothing run, nothing half written."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from conftest import LONG
from property.mutants import in_pickle, in_records, raw
from property.survive import describe, judge, look
from rank_files import dtensors, sharded
from zero_files import example

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.ops.doctor import doctor

pytestmark = [pytest.mark.campaign, pytest.mark.usefixtures("nothing_is_run")]


def _ranks(folder: Path, make: Callable[..., object]) -> None:
    folder.mkdir()
    for rank in range(2):
        make(folder / f"model_rank{rank}.pt", rank)


MAKE: dict[str, Callable[[Path], object]] = {
    "zero 1": lambda folder: example(2, 1, torch.bfloat16).save(folder),
    "zero 3": lambda folder: example(3, 3, torch.bfloat16).save(folder),
    "zero 0": lambda folder: example(2, 0).save(folder),
    "universal": lambda folder: example(2, 2).universal(folder),
    "DTensors": lambda folder: _ranks(folder, dtensors),
    "shards": lambda folder: _ranks(folder, sharded),
}


@cache
def contents(kind: str) -> dict[str, bytes]:
    with TemporaryDirectory() as place:
        folder = Path(place, "in")
        MAKE[kind](folder)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }


def mutated(kind: str, number: int, folder: Path) -> str:
    """Write a folder of which one file is another; what was done to it."""
    dice = random.Random(number)
    files = dict(contents(kind))
    names = sorted(files)
    name = dice.choice(names)
    ways: list[Callable[[bytes, random.Random], bytes]] = [raw]
    if files[name][:2] == b"PK":
        ways += [*[in_pickle] * 6, in_records]
    way = dice.choice(ways)
    for _ in range(dice.choice((1, 1, 2, 4))):
        files[name] = way(files[name], dice)
    if dice.random() < 0.1:
        files[name] = files[dice.choice(names)]
    if dice.random() < 0.05:
        del files[name]
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return f"{kind} {number} {name} {way.__name__}"


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
    folder = place / str(number)
    what = mutated(kind, number, folder)
    for operation in OPERATIONS:
        try:
            operation(folder)
        except CkptfixError as error:
            assert str(error) and "a fault in ckptfix" not in str(error), what
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("kind", MAKE)
def test_mutants_of_a_file_of_a_folder(kind: str, tmp_path: Path) -> None:
    for number in range(400 if LONG else 15):
        survive(kind, number, tmp_path)

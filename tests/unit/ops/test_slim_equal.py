"""Storages of equal bytes become one wherever those lie: in the file as they are, packed, with gaps, or in pieces."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from builders import Tensor, assemble, build_zip, replace, state_dict_ops, torch_records

import ckptfix

DATA = struct.pack("<6f", *range(6))
NAMES = ["a", "b", "c", "d"]
DCP = Path(__file__).parents[2] / "recorded" / "dcp"


def several(path: Path, deflated: Iterable[int] = (), **view: Any) -> Path:
    """Four tensors with equal storages, some of them deflated."""
    tensors = {name: Tensor(str(key), **{"shape": (6,), "numel": 6, **view}) for key, name in enumerate(NAMES)}
    records = torch_records(assemble(("PROTO", 2), *state_dict_ops(tensors), "STOP"), [DATA] * 4)
    chosen = {f"archive/data/{key}" for key in deflated}
    path.write_bytes(build_zip([replace(one, method=8) if one.name in chosen else one for one in records]))
    return path


def same_values(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same values under the same names."""
    before, after = (values(ckptfix.load_checkpoint(path)) for path in (one, other))
    return before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


def values(inside: Any, at: str = "") -> dict[str, Any]:
    if isinstance(inside, dict):
        return {name: found for key, value in inside.items() for name, found in values(value, f"{at}/{key}").items()}
    return {at: inside} if hasattr(inside, "equal") else {}


COLUMN: dict[str, Any] = {"shape": (3,), "stride": (2,)}
KINDS: dict[str, Callable[[Path], Path]] = {
    "as they are": several,
    "deflated": lambda path: several(path, range(4)),
    "the first deflated": lambda path: several(path, [0]),
    "the last deflated": lambda path: several(path, [3]),
    "with gaps": lambda path: several(path, **COLUMN),
    "behind the first": lambda path: several(path, [1, 2], shape=(2,), offset=3),
}


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_storages_become_one(tmp_path: Path, kind: str, contiguous: bool) -> None:
    source = KINDS[kind](tmp_path / "in.pth")
    done = ckptfix.slim(source, tmp_path / "out.pth", dedupe=True, contiguous=contiguous)
    assert done.exit_code == 0 and done.account is not None and not done.account.lost, str(done)
    made = ckptfix.open_checkpoint(tmp_path / "out.pth")
    # A view of a packed storage is not cut out of it.
    left = 2 if kind == "behind the first" else 1
    assert len({entry.storage.identity for entry in made.entries if entry.storage is not None}) == left
    assert [entry.name for entry in made.entries] == NAMES
    assert same_values(source, tmp_path / "out.pth")


@pytest.mark.parametrize("contiguous", [False, True])
def test_of_a_distributed_folder(tmp_path: Path, contiguous: bool) -> None:
    """One in pieces, equal to another in other pieces; and two of one piece each."""
    done = ckptfix.slim(DCP, tmp_path / "out.pth", dedupe=True, contiguous=contiguous)
    assert done.exit_code == 0 and done.account is not None and not done.account.lost, str(done)
    made = ckptfix.open_checkpoint(tmp_path / "out.pth").entries
    assert len(made) == 5 and len({entry.storage.identity for entry in made if entry.storage is not None}) == 3
    assert same_values(DCP, tmp_path / "out.pth")

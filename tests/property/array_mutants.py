"""Mutants of other frameworks' files: bytes of one of their files changed, taken out, doubled, or cut off.

Changes are drawn from the structure rather than the data: the arrays of these files are small.
"""

from __future__ import annotations

import random
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from array_files import WRITERS, packed_npz
from property.mutants import raw

NEEDS = {"hdf5": "h5py", "keras": "h5py", "chunked hdf5": "h5py", "orbax": "tensorstore"}
"""Kind -> the package that reads it."""

ARRAYS = {"a.w": np.arange(6, dtype="f4").reshape(2, 3), "a.b": np.ones(3, "f4"), "n": np.arange(4, dtype="i8")}


def _chunked(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for key, value in ARRAYS.items():
            file.create_dataset(key, data=value, chunks=tuple(1 for _ in value.shape), compression="gzip")


def _kinds() -> dict[str, str]:
    """Return the kinds whose reader is installed, and the suffix of their files."""
    kinds = {name: one.suffix for name, one in WRITERS.items()} | {"packed npz": ".npz", "chunked hdf5": ".h5"}
    return {name: suffix for name, suffix in kinds.items() if name not in NEEDS or find_spec(NEEDS[name])}


KINDS = _kinds()


@cache
def contents(kind: str) -> dict[str, bytes]:
    """Return the files of a kind: path -> bytes. The one to open is `in`, with a suffix."""
    with TemporaryDirectory() as place:
        path = Path(place, f"in{KINDS[kind]}")
        if kind == "packed npz":
            packed_npz(ARRAYS, path)
        elif kind == "chunked hdf5":
            _chunked(path)
        else:
            WRITERS[kind].save(ARRAYS, path)
        files = [one for one in Path(place).rglob("*") if one.is_file()]
        return {one.relative_to(place).as_posix(): one.read_bytes() for one in files}


def array_mutant(kind: str, number: int) -> tuple[str, dict[str, bytes]]:
    """(what was done, files) of mutant `number` of a kind."""
    dice = random.Random(f"{kind} {number}")
    files = dict(contents(kind))
    name = dice.choice(sorted(files))
    for _ in range(dice.choice((1, 1, 2, 4))):
        files[name] = raw(files[name], dice)
    return f"{kind} {number} {name}", files

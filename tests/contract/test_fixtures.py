"""The fixtures, as ckptfix reads them, against what torch read when they were made."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

import ckptfix
from ckptfix.checkpoint import TensorEntry
from ckptfix.io.derived import gathered
from ckptfix.io.read import read_chunks

pytestmark = pytest.mark.sampled(1_000)  # each row is a rule of its own

FOLDER = ROOT / "fixtures"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".pth", ".safetensors"))


def digest(entry: TensorEntry) -> str:
    storage: Any = entry.storage
    total = hashlib.sha256()
    data = entry.data if entry.is_contiguous else gathered(
        storage.data, entry.itemsize, entry.shape, entry.stride, entry.offset
    )  # fmt: skip
    for chunk in read_chunks(data):
        total.update(chunk)
    return total.hexdigest()


def test_there_are_fixtures() -> None:
    assert len(FILES) >= 12 and all(path.stat().st_size < 20_000 for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_reads_as_torch_did(path: Path) -> None:
    truth = json.loads(path.with_name(f"{path.stem}.truth.json").read_text())["tensors"]
    entries = list(ckptfix.open_checkpoint(path).entries)
    assert len(entries) == len(truth)
    if path.suffix == ".safetensors":
        entries.sort(key=lambda entry: entry.key)
    for row, entry in zip(truth, entries, strict=True):
        if "module" not in path.stem:  # the attributes of a whole module have addresses of their own
            assert entry.name == row["name"]
        assert (entry.dtype, list(entry.shape)) == (row["dtype"], row["shape"]), entry.name
        assert entry.requires_grad == row["requires_grad"], entry.name
        if row["layout"] == "strided":
            assert list(entry.stride) == row["stride"], entry.name
            assert digest(entry) == row["sha256"], entry.name
        else:
            assert entry.kind == "sparse"
    cuda = {entry.location for entry in entries if entry.location.startswith("cuda")}
    assert bool(cuda) == ("cuda-tagged" in path.stem)


@pytest.mark.campaign
def test_they_can_be_made_again() -> None:
    made_by = json.loads((FOLDER / "zip-state-dict.truth.json").read_text())["made_by"]
    here = f"torch {torch.__version__.partition('+')[0]}"
    if made_by != here:
        pytest.skip(f"they were made by {made_by}, and this is {here}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(FOLDER / "make.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "nothing changed\n", done.stdout + done.stderr

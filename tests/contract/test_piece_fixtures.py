"""The fixtures of one rank's files, as ckptfix reads them, against what was written into them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from compare import tensor_bytes
from conftest import ROOT
from nestings import covered, found_in, referenced

import ckptfix
from ckptfix.errors import DistributedPart
from ckptfix.formats import open_checkpoint
from ckptfix.ops.rank_shards import piece_of

FOLDER = ROOT / "fixtures"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".pt", ".distcp"))


def test_there_is_one_of_each_kind() -> None:
    assert len(FILES) == 4 and all(path.stat().st_size < 6000 for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_what_its_truth_says(path: Path, tmp_path: Path) -> None:
    truth = json.loads(path.with_name(f"{path.stem}.truth.json").read_text())
    if truth["kind"] == "distcp":
        with pytest.raises(DistributedPart):
            open_checkpoint(path)
        return
    checkpoint = open_checkpoint(path)
    found = piece_of(checkpoint)
    assert found is not None
    assert (found.kind, found.rank, found.world) == (truth["kind"], truth["rank"], truth["world"])
    assert covered(checkpoint.entries) == referenced(checkpoint)
    ckptfix.sanitize(path, tmp_path / "plain.pt")
    sums = {
        hashlib.sha256(tensor_bytes(tensor)).hexdigest()
        for tensor in found_in(torch.load(tmp_path / "plain.pt", weights_only=True))
    }
    assert {row["sha256"] for row in truth["tensors"]} <= sums

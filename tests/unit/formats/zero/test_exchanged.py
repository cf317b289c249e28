"""Files of DeepSpeed's ranks that were exchanged, copied, lost, or are of another step: a slice of the campaign."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from campaigns import swapped_ranks
from zero_files import Run

import ckptfix
from ckptfix.errors import DamagedFile
from ckptfix.ops.doctor import doctor


@pytest.mark.campaign
def test_values_are_right_or_refused_and_doctor_names_a_file(tmp_path: Path) -> None:
    ends, wrong = swapped_ranks.run(tmp_path, 25)
    assert not wrong, wrong[:3]
    assert ends["swapped: refused"] and ends["swapped: doctor names it"]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("half", [torch.float32, torch.bfloat16])
def test_two_ranks_that_were_exchanged(tmp_path: Path, stage: int, half: torch.dtype) -> None:
    run = Run([{"a.weight": torch.randn(10, 4)}], 2, stage, half)
    first, second = sorted(run.save(tmp_path / "in").glob("*_optim_states.pt"))
    aside = first.rename(tmp_path / "aside")
    second.rename(first)
    aside.rename(second)
    found = [row for row in doctor(tmp_path / "in").findings if row.id == "other-save"]
    assert [(row.where, row.message) for row in found] == [
        (str(first), "it was saved as the file of rank 1"),
        (str(second), "it was saved as the file of rank 0"),
    ]
    with pytest.raises(DamagedFile, match="it was saved as the file of rank 1"):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")

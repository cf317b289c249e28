"""A slice of the campaign over what repair writes; `campaigns.repaired` says what is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns.repaired import run

pytestmark = pytest.mark.campaign


def test_doctor_finds_no_damage_in_what_was_repaired(tmp_path: Path) -> None:
    count = run(tmp_path, range(150), range(8))
    print(dict(count.ends))
    assert count.wrong == []
    assert count.ends["exit 0"] > 20 and count.ends["exit 3"] > 20


def test_a_repair_that_leaves_damage_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a repair that keeps tensors on which every loader fails, the campaign says so."""
    monkeypatch.setattr("ckptfix.formats.torch.damaged.object.DamagedObject.gone", lambda self: set())
    count = run(tmp_path, range(60), range(0))
    assert any("doctor finds damage" in line for line in count.wrong)

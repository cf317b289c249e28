"""A slice of the campaign over fleets: see tests/campaigns/fleet.py, and ``make fleet``."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns import fleet


@pytest.mark.campaign
def test_a_fleet_that_is_killed_and_stopped_comes_to_what_one_process_does(tmp_path: Path) -> None:
    assert fleet.main(tmp_path, 40, verbs=("to-cpu",), on_dask=False) == 0


@pytest.mark.campaign
def test_a_fleet_on_dask(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="pip install distributed")
    assert fleet.main(tmp_path, 60) == 0

"""Slices of `campaigns.pipes` and `campaigns.signals`."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns import pipes, signals

pytestmark = [pytest.mark.campaign, pytest.mark.slow]


def test_pipes_and_fifos(tmp_path: Path) -> None:
    ends, wrong = pipes.run(tmp_path, (("strip-module",), ("inspect",)))
    assert not wrong, wrong[:3]
    assert ends["pipe: exit 0"] == 2


def test_batches_that_are_stopped_or_whose_inputs_are_replaced(tmp_path: Path) -> None:
    ends, wrong = signals.batches(tmp_path, 4)
    assert not wrong, wrong[:3]
    assert ends


def test_edits_in_place_that_are_killed(tmp_path: Path) -> None:
    ends, wrong = signals.large(tmp_path.resolve(), 10, 8 << 20)
    assert not wrong, wrong[:3]
    assert sum(ends.values()) == 10

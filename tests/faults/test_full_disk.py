"""Slices of `campaigns.full_disk`: edits in place that a full disk really refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns import full_disk
from disks import Unavailable

pytestmark = [pytest.mark.campaign, pytest.mark.slow]


@pytest.mark.parametrize("kind", full_disk.DISKS)
def test_a_refused_edit_leaves_everything_as_it_was(tmp_path: Path, kind: str) -> None:
    try:
        with full_disk.disk(kind, tmp_path) as place:
            ends, wrong = full_disk.run(place, range(0, 160 * 1024, 20 * 1024))
    except Unavailable as error:
        pytest.skip(str(error))
    assert not wrong, wrong[:3]
    assert ends["zip refused: no room for the journal"] and ends["zip done"]

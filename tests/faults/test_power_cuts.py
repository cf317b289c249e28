"""The states that a power cut may leave; `campaigns.power_cuts` says what they are."""

from __future__ import annotations

import pytest
from campaigns.power_cuts import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str]]]:
    right, broken = run(tmp_path_factory.mktemp("disk"))
    return {name: (count.states, count.wrong) for name, count in (*right, *broken)}


def test_in_every_state_a_file_is_old_or_new(counts: dict[str, tuple[int, list[str]]]) -> None:
    right = {name: count for name, count in counts.items() if "without" not in name}
    print({name: states for name, (states, _) in right.items()})
    assert {name: wrong for name, (_, wrong) in right.items() if wrong} == {}
    assert sum(states for states, _ in right.values()) >= 10_000


def test_a_writer_that_leaves_out_a_sync_is_found_out(counts: dict[str, tuple[int, list[str]]]) -> None:
    broken = {name: wrong for name, (_, wrong) in counts.items() if "without" in name}
    assert len(broken) == 12
    assert [name for name, wrong in broken.items() if not wrong] == []

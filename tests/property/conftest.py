"""What the tests of hostile files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from watch import RUNS, watched


@pytest.fixture
def nothing_is_run() -> Iterator[None]:
    """The test fails if it runs a command or connects to anything."""
    with watched(*RUNS) as seen:
        yield
    assert not seen

"""Memory that runs out at some request of the interpreter, or at a limit; `campaigns.memory` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns.memory import limited, requests

pytestmark = pytest.mark.slow

pytest.importorskip("_testcapi", reason="this interpreter cannot be refused memory")


@pytest.mark.parametrize("name", ["replace", "several keep"])
def test_a_request_that_gets_nothing(tmp_path: Path, name: str) -> None:
    ends, wrong = requests(tmp_path, name, range(0, 1200, 24), 1)
    print(name, dict(ends))
    assert wrong == []
    assert ends["MemoryError"] > 10


def test_a_real_limit(tmp_path: Path) -> None:
    ends, wrong = limited(tmp_path, range(24, 120, 24))
    print(dict(ends))
    assert wrong == []
    assert ends["exit 0"]

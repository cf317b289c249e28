"""Memory that runs out at some request of the interpreter, or at a limit; `campaigns.memory` has the rest."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from campaigns.memory import limited, requests

from ckptfix.io.threads import Flag

pytestmark = pytest.mark.slow

pytest.importorskip("_testcapi", reason="this interpreter cannot be refused memory")


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.parametrize("name", ["replace", "several keep"])
def test_a_request_that_gets_nothing(tmp_path: Path, name: str) -> None:
    ends, wrong = requests(tmp_path, name, range(0, 1200, 24), 1)
    print(name, dict(ends), *wrong, sep="\n")
    assert wrong == []
    assert ends["MemoryError"] > 10


def test_a_real_limit(tmp_path: Path) -> None:
    ends, wrong = limited(tmp_path, range(24, 120, 24))
    print(dict(ends), *wrong, sep="\n")
    assert wrong == []
    assert ends["exit 0"]


def set_twice(flag: Flag | threading.Event, point: int) -> bool:
    """Whether `flag` can be set again in a process in which its first setting was refused request `point`."""
    import _testcapi  # type: ignore[import-not-found]

    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            _testcapi.set_nomemory(point, point + 1)
            try:
                flag.set()
            except MemoryError:
                pass
            finally:
                _testcapi.remove_mem_hooks()
            flag.set()
        finally:
            os._exit(0 if flag.is_set() else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_flag_can_be_set_again() -> None:
    assert all(set_twice(Flag(), point) for point in range(20))

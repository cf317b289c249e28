"""What a forked process needs of locks that other threads of its parent held."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, threading
from ckptfix.dataclass import cached_property
from ckptfix.io import open_files

inside, done = threading.Event(), threading.Event()

class Slow:
    def __init__(self, waits):
        self.waits = waits

    @cached_property
    def value(self):
        if self.waits:
            inside.set()
            done.wait(20)
        return 5

def hold():
    with open_files._lock:
        inside.set()
        done.wait(0.3)

what = {"property": lambda: Slow(True).value, "lock": hold}[sys.argv[1]]
other = threading.Thread(target=what)
other.start()
inside.wait()
child = os.fork()
if not child:
    signal.alarm(10)
    with open_files._lock:
        os._exit(0 if Slow(False).value == 5 else 1)
status = os.waitpid(child, 0)[1]
done.set()
other.join()
assert status == 0, status
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("held", ["property", "lock"])
def test_a_child_waits_for_no_lock_of_its_parent(held: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, held], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr

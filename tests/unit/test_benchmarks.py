"""A benchmark that is ended leaves nothing behind that runs: a child would hold the file system that is unmounted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

ENDED = """
import pathlib, signal, sys
from measure import Contender, run
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
run(Contender("a", ("sh", "-c", "echo $$; sleep 0.5; kill -TERM $PPID; exec sleep 600")), pathlib.Path(sys.argv[1]))
"""


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="benchmarks run on Linux")
def test_an_ended_benchmark_ends_what_it_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDED, str(tmp_path / "log")], cwd=BENCHMARKS, check=False)
    assert done.returncode == 3
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "log").read_text()), 0)

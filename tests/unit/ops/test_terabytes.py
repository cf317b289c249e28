"""A folder of a terabyte is listed, planned and judged in seconds, and in little memory: its data are holes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sparse

COMMANDS = {
    "inspect": ("inspect", "{folder}", "--json"),
    "doctor": ("doctor", "--fast", "{folder}", "--json"),
    "one file": ("convert", "--dry-run", "{folder}", "{out}.safetensors", "--json"),
    "shards": ("convert", "--dry-run", "--to", "hf", "--shard-size", "5GB", "{folder}", "{out}", "--json"),
}

MEMORY = 500 << 20
SECONDS = 30
"""Of CPU; some take three on a machine that does nothing else."""

MEASURED = """
import runpy, sys, time
try:
    runpy.run_module("ckptfix", run_name="__main__", alter_sys=True)
finally:
    lines = open("/proc/self/status").read().splitlines()  # ru_maxrss begins with what the parent has
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")), time.process_time(), file=sys.stderr)
"""


def measured(*words: str) -> tuple[Any, int, float]:
    """What a command prints, the bytes of memory that it took at most, and its seconds of CPU."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, timeout=600, check=True
    )
    peak, seconds = done.stderr.split()[-2:]
    return json.loads(done.stdout), int(peak) * 1024, float(seconds)


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("kind", sparse.KINDS)
@pytest.mark.parametrize("names", [
    ("inspect", "doctor", "shards"),
    pytest.param(("one file",), marks=pytest.mark.campaign),  # is planned as shards are
], ids=len)  # fmt: skip
def test_a_terabyte(tmp_path: Path, kind: str, names: tuple[str, ...]) -> None:
    try:
        folder = sparse.KINDS[kind](tmp_path / kind)
    except OSError as error:
        pytest.skip(f"no sparse files here: {error}")
    if sum(path.stat().st_blocks for path in folder.rglob("*")) * 512 > 1 << 30:
        pytest.skip("no sparse files here")
    assert sum(path.stat().st_size for path in folder.rglob("*")) > 0.99 * sparse.TERABYTE
    said = {}
    for name in names:
        filled = [word.format(folder=folder, out=tmp_path / "out") for word in COMMANDS[name]]
        said[name], memory, seconds = measured(*filled)
        assert memory < MEMORY and seconds < SECONDS, f"{name}: {memory:,} bytes, {seconds} s"
    if "doctor" in said:
        assert not [found for found in said["doctor"]["findings"] if found["severity"] == "error"]
    weights = sparse.TERABYTE // 3 if kind == "zero" else sparse.TERABYTE
    for name in {"one file", "shards"} & set(said):
        assert said[name]["output_size"] > 0.99 * weights
        assert not said[name]["written"]
    assert [path.name for path in tmp_path.iterdir()] == [kind]

"""What a command imports on a small file: a shell loop, a completion or git pays for it at every start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures"
FILE = FIXTURES / "zip-data-parallel.pth"

PROBE = """
import json, sys
from ckptfix.cli import commands
code = commands.main(sys.argv[1:], standalone_mode=False)
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""

HEAVY = {
    *("torch", "numpy", "ml_dtypes", "safetensors", "tabulate", "rich", "textual", "fsspec", "obstore", "asyncio"),
    *("concurrent.futures", "multiprocessing", "logging", "subprocess", "email", "importlib.metadata", "hashlib"),
    *("difflib", "html", "socket", "ssl", "ctypes"),
}
"""Packages that no command needs for a small zip of finite numbers."""

ROOMS = {
    *("align", "browse", "fleet", "git", "html", "loaders", "trainer", "io.remote", "io.inplace"),
    *("runner.engines", "formats.runs", "ops.dequantize.table", "checkpoint.quantization"),
    *(f"formats.{name}" for name in ("deepspeed", "programs", "shards", "zero", "torch.legacy", "torch.readonly")),
    *(f"formats.ranks.{name}" for name in ("file", "format", "merge", "names")),
    *(f"formats.safetensors.{name}" for name in ("edit", "format", "header", "ties", "write")),
    *(f"formats.dcp.{name}" for name in ("edit", "format", "metadata", "read", "skim", "write")),
}
"""Rooms that a zip does not need, and a folder of zips neither."""

BOUNDS = {
    "--help": 15,
    "to-cpu": 125,
    "inspect": 133,
    "strip-module": 135,
    "ls": 161,
    "ls FOLDER": 165,
    "doctor": 161,
    "FILE": 168,
    "fix": 190,
    "to-cpu LEGACY": 130,
    "inspect SAFETENSORS": 140,
}
"""Command -> most modules of ours."""

OWN = {
    "ls FOLDER": {"formats.deepspeed"},
    "to-cpu LEGACY": {"formats.torch.legacy"},
    "inspect SAFETENSORS": {row for row in ROOMS if row.startswith("formats.safetensors.")},
}
"""Rooms that these inputs do need."""


def loaded(words: list[str], folder: Path, **more: str) -> tuple[int, set[str]]:
    environment = {**os.environ, **more}
    command = [sys.executable, "-c", PROBE, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=True)
    code, names = json.loads(done.stderr.splitlines()[-1])
    return code, set(names)


def below(names: set[str], rooms: set[str], package: str = "") -> set[str]:
    """The modules that are one of `rooms`, or inside one."""
    prefixes = {f"{package}{room}" for room in rooms}
    return {name for name in names if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)}


@pytest.mark.slow
@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("name", BOUNDS)
def test_a_command_imports_what_its_file_needs(tmp_path: Path, name: str) -> None:
    verb, _, kind = name.partition(" ")
    path = FILE
    if kind == "FOLDER":
        path = tmp_path / "several"
        path.mkdir()
        for one in ("zip-data-parallel", "zip-cuda-tagged"):
            shutil.copy(FIXTURES / f"{one}.pth", path)
    elif kind:
        named = {"LEGACY": "legacy-cuda-tagged.pth", "SAFETENSORS": "safetensors-data-parallel.safetensors"}
        path = FIXTURES / named[kind]
    words = [*([] if verb == "FILE" else [verb]), *([] if verb == "--help" else [str(path)])]
    words += ["out.pth"] if verb in ("to-cpu", "strip-module", "fix") else []
    code, names = loaded(words, tmp_path)
    ours = {row for row in names if row.partition(".")[0] == "ckptfix"}
    assert code == 0
    assert not below(names, HEAVY)
    assert not below(ours, ROOMS - OWN.get(name, set()), "ckptfix.")
    assert len(ours) <= BOUNDS[name]


def test_a_completion_imports_no_room(tmp_path: Path) -> None:
    asked = {"_CKPTFIX_COMPLETE": "zsh_complete", "COMP_WORDS": "ckptfix to", "COMP_CWORD": "1"}
    code, names = loaded([], tmp_path, **asked)
    assert code == 0
    assert not below(names, HEAVY)
    assert not below(names, {"formats", "ops", "zips", "pickles"}, "ckptfix.")


@pytest.mark.slow
def test_the_probe_sees_what_is_imported(tmp_path: Path) -> None:
    _, names = loaded(["stats", str(FILE)], tmp_path)
    assert "numpy" in below(names, HEAVY)
    _, names = loaded(["inspect", str(FIXTURES / "safetensors-data-parallel.safetensors")], tmp_path)
    assert "ckptfix.formats.safetensors.header" in below(names, ROOMS, "ckptfix.")

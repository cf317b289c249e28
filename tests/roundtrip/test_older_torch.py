"""What another, older torch reads of what ckptfix writes, beside what this torch reads of it.

`CKPTFIX_OLDER_TORCH` names the interpreter that has it; else the system's own python3 is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

import ckptfix
from ckptfix.errors import CkptfixError

pytestmark = pytest.mark.campaign

READ = """
import hashlib, json, sys, warnings
import torch

def walk(value, name, found):
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().flatten()
        digest = hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest() if data.numel() else ""
        found[name] = [str(value.dtype), list(value.shape), list(value.stride()), value.requires_grad, digest]
    elif isinstance(value, dict):
        for key in value:
            walk(value[key], name + "/" + str(key), found)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            walk(item, name + "/" + str(index), found)

rows = {}
warnings.simplefilter("ignore")
for path in sys.argv[1:]:
    try:
        found = {}
        walk(torch.load(path, map_location="cpu", weights_only=True), "", found)
        rows[path] = found
    except Exception as error:
        rows[path] = "%s: %s" % (type(error).__name__, str(error)[:200])
print(json.dumps([torch.__version__, rows]))
"""

FILES = sorted((ROOT / "fixtures").glob("*.pth"))


@cache
def older() -> str | None:
    """An interpreter with another torch than this one's, or None."""
    python = os.environ.get("CKPTFIX_OLDER_TORCH") or shutil.which("python3", path="/usr/bin")
    if python is None:
        return None
    ask = [python, "-c", "import torch; print(torch.__version__)"]
    done = subprocess.run(ask, capture_output=True, text=True, cwd="/", env={"PATH": os.environ["PATH"]}, check=False)
    return python if done.returncode == 0 and done.stdout.strip() != torch.__version__ else None


def read(python: str, paths: list[Path]) -> dict[str, Any]:
    """path -> tensors by address, or the error."""
    done = subprocess.run(
        [python, "-c", READ, *map(str, paths)], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 0, done.stderr
    _, rows = json.loads(done.stdout)
    assert isinstance(rows, dict)
    return rows


def _in_place(*edits: Callable[[Path], Any]) -> Callable[[Path, Path], Any]:
    def make(source: Path, dest: Path) -> None:
        shutil.copy(source, dest)
        for edit in edits:
            edit(dest)

    return make


def _add(path: Path) -> Any:
    return ckptfix.add_module(path, prefix="wrapped.in.a.longer.name.", in_place=True)


def _strip(path: Path) -> Any:
    return ckptfix.strip_module(path, in_place=True)


def _cpu(path: Path) -> Any:
    return ckptfix.to_cpu(path, in_place=True)


MAKE: dict[str, Callable[[Path, Path], Any]] = {
    "strip-module": ckptfix.strip_module,
    "add-module": ckptfix.add_module,
    "to-cpu": ckptfix.to_cpu,
    "slim": ckptfix.slim,
    "sanitize": ckptfix.sanitize,
    "zip": lambda source, dest: ckptfix.convert(source, dest, to="zip"),
    "legacy": lambda source, dest: ckptfix.convert(source, dest, to="legacy"),
    "in place": _in_place(_strip),
    "in place, longer": _in_place(_add),
    "in place, three times": _in_place(_add, _cpu, _strip),
    "undone": _in_place(_add, ckptfix.undo),
}


def test_an_older_torch_reads_the_same(tmp_path: Path) -> None:
    """Every output of every fixture that it can read: the same tensors, whichever torch reads them."""
    python = older()
    if python is None:
        pytest.skip("no other torch is here (CKPTFIX_OLDER_TORCH names an interpreter that has one)")
    readable = [Path(path) for path, found in read(python, FILES).items() if isinstance(found, dict)]
    assert len(readable) >= 15
    made: list[Path] = []
    for source in readable:
        for number, make in enumerate(MAKE.values()):
            dest = tmp_path / f"{number}-{source.name}"
            try:
                make(source, dest)
            except CkptfixError:
                dest.unlink(missing_ok=True)  # a refusal, which other tests look at
            if dest.exists():
                made.append(dest)
    assert len(made) >= 10 * len(readable)
    theirs, ours = read(python, made), read(sys.executable, made)
    wrong = [
        f"{list(MAKE)[int(Path(path).name.partition('-')[0])]} of {path}: {found if isinstance(found, str) else ''}"
        for path, found in theirs.items()
        if isinstance(found, str) or found != ours[path]
    ]
    assert not wrong, "\n".join(wrong)

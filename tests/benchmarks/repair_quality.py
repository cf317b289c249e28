"""How much of a cut file is saved, beside torch.load and ``zip -FF``: ``python tests/benchmarks/repair_quality.py``.

A checkpoint of 24 tensors and some 200 kB is cut at 60 lengths, and has one byte changed at 60 places. Each tool gets
each wreck; a tensor counts as saved when it loads with its own values, and as wrong when it loads with others.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptfix.ops import repair

Rescued = dict[str, torch.Tensor]
Tool = Callable[[Path, Path], Rescued]


@dataclass
class Score:
    """Tensors over all wrecks, and wrecks of which nothing came."""

    saved: int = 0
    wrong: int = 0
    nothing: int = 0


def by_torch(wreck: Path, out: Path) -> Rescued:
    loaded: Rescued = torch.load(wreck)
    return loaded


def by_zip(wreck: Path, out: Path) -> Rescued:
    """``zip -FF`` asks whether the archive is split; the answer is no."""
    command = ["zip", "-FF", str(wreck), "--out", str(out)]
    subprocess.run(command, input=b"y\n", capture_output=True, check=False, timeout=60)
    return by_torch(out, out)


def by_ckptfix(wreck: Path, out: Path) -> Rescued:
    repair.repair(wreck, out, force=True)
    return by_torch(out, out)


TOOLS: dict[str, Tool] = {"torch.load": by_torch, "zip -FF": by_zip, "ckptfix repair": by_ckptfix}


def wrecks(data: bytes, count: int) -> dict[str, list[bytes]]:
    """Cut files, and files with one changed byte."""
    generator = random.Random(0)
    cut = [data[: len(data) * step // (count + 1)] for step in range(1, count + 1)]
    changed = []
    for _ in range(count):
        at = generator.randrange(len(data))
        changed.append(data[:at] + bytes((data[at] ^ 1 << generator.randrange(8),)) + data[at + 1 :])
    return {"cut short": cut, "one bit changed": changed}


def measure(folder: Path, count: int) -> dict[str, dict[str, Score]]:
    """Kind of damage -> tool -> what it saved."""
    torch.manual_seed(0)
    values = {f"layer{index}": torch.randn(500 + 130 * index) for index in range(24)}
    torch.save(values, folder / "whole.pth")
    tools = {name: tool for name, tool in TOOLS.items() if name != "zip -FF" or shutil.which("zip")}
    found: dict[str, dict[str, Score]] = {}
    for kind, several in wrecks((folder / "whole.pth").read_bytes(), count).items():
        scores = found[kind] = {name: Score() for name in tools}
        for data in several:
            for name, tool in tools.items():
                (folder / "wreck.zip").write_bytes(data)
                (folder / "out.zip").unlink(missing_ok=True)
                _count(scores[name], values, tool, folder)
    return found


def _count(score: Score, values: Rescued, tool: Tool, folder: Path) -> None:
    try:
        loaded = tool(folder / "wreck.zip", folder / "out.zip")
    except Exception:  # whatever torch says about a wreck
        score.nothing += 1
        return
    for name, value in loaded.items():
        good = name in values and torch.equal(values[name], value)
        score.saved += good
        score.wrong += not good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="wrecks of each kind")
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as folder:
        for kind, scores in measure(Path(folder), count).items():
            print(f"{kind} ({count} files of 24 tensors)")
            for name, score in scores.items():
                share = score.saved / (24 * count)
                print(
                    f"  {name:15} saved {score.saved:5} ({share:6.1%})  "
                    f"wrong {score.wrong:3}  nothing of {score.nothing} files"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

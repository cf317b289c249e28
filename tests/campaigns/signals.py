"""Batches that are stopped, or whose inputs are replaced meanwhile; killed edits of large files.

Of a batch each output is whole, or absent. Of an edit in place the file is as before or as after, or refused until
`undo` brings the old one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from campaigns.frame import Table, report, start

import ckptfix
from ckptfix.errors import CkptfixError

COMMAND = [sys.executable, "-m", "ckptfix"]
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


def batches(folder: Path, count: int, files: int = 12) -> Table:
    """Stop `count` batches at any moment, or replace their inputs; how they ended, and what was wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    source, fresh = folder / "in", folder / "fresh"
    rights: dict[str, list[bytes]] = {}
    for place, value in ((source, 1.0), (fresh, 2.0)):
        place.mkdir()
        for number in range(files):
            path, out = place / f"m{number}.pth", folder / "right.pth"
            torch.save({"module.w": torch.full((300_000,), value + number), "module.b": torch.ones(3)}, path)
            ckptfix.strip_module(path, out, force=True)
            rights.setdefault(path.name, []).append(out.read_bytes())
    first = {path.name: path.read_bytes() for path in source.iterdir()}
    for number in range(count):
        dice = random.Random(number)
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        for name, data in first.items():
            (source / name).write_bytes(data)
        words = [*COMMAND, "strip-module", "-q", "-r", str(source), "--out-dir", str(out)]
        process = subprocess.Popen([*words, "--jobs", dice.choice("13")], stderr=subprocess.PIPE, text=True)
        way = ("signal", "replaced")[number % 2]
        sent = None
        if way == "signal":
            deadline = time.monotonic() + 20
            while not out.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(dice.random() * 0.15)
            sent = dice.choice(list(STOPPED))
            process.send_signal(sent)
        else:
            while process.poll() is None:
                name = dice.choice(list(first))
                aside = folder / "aside"
                shutil.copyfile((fresh if dice.random() < 0.5 else folder / "in") / name, aside)
                aside.replace(source / name)
                time.sleep(0.005)
        said = process.communicate(timeout=60)[1]
        code = process.returncode
        ends[f"{way}: exit {code}"] += 1
        allowed = {0, STOPPED[sent], -sent} if sent is not None else {0, 2}
        if code not in allowed or "Traceback" in said:
            wrong.append(f"{number} {way} {sent}: exit {code}: {said[-300:]}")
        made = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()} if out.exists() else {}
        torn = [name for name, data in made.items() if data not in rights.get(name, [])]
        if torn:
            wrong.append(f"{number} {way}, exit {code}: not whole, or left: {torn}")
        if code == 0 and len(made) != files:
            wrong.append(f"{number} {way}: exit 0, and {len(made)} of {files} outputs")
        ends[f"{way}: outputs whole"] += len(made) - len(torn)
    return ends, wrong


def large(folder: Path, count: int, size: int = 200 << 20) -> Table:
    """Kill `count` edits in place of a file of `size` bytes; how they ended, and what was wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    path = folder / "large.safetensors"
    from safetensors.torch import save_file

    save_file({f"block.{number}.w": torch.randn(size // 32) for number in range(8)}, path)
    before = ckptfix.digest(path)
    old_size = path.stat().st_size
    head = path.read_bytes()[:4096]
    for number in range(count):
        dice = random.Random(number)
        prefix = "p" * dice.choice((3, 900))  # fits into the padding, or needs blocks
        process = os.fork()
        if not process:
            with suppress(BaseException):
                ckptfix.add_module(path, prefix=prefix, in_place=True)
            os._exit(0)
        time.sleep(dice.random() * 0.06)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        try:
            names = list(ckptfix.load_state_dict(path, strip=None))
            end = "new" if names[0].startswith(prefix) else "old"
        except CkptfixError:
            end = "refused, taken back"
        ends[end] += 1
        if end != "old":
            ckptfix.undo(path)
        now = path.stat().st_size, path.open("rb").read(4096)
        if now != (old_size, head) or list(folder.glob(".*ckptfix*")):
            wrong.append(f"{number}: {end}, and it is not the old file: {[one.name for one in folder.iterdir()]}")
            break
    if ckptfix.digest(path) != before:
        wrong.append("other values than before")
    return ends, wrong


def main(folder: Path, count: int = 40) -> int:
    """Print the table; the number of faults that were found."""
    found = 0
    for name, run in (("batches", batches), ("kills at 200 MB", large)):
        place = folder / name.replace(" ", "-")
        place.mkdir()
        found += report(f"{name:16} {count} runs", run(place, count), 10)
    return found


if __name__ == "__main__":
    start(main)

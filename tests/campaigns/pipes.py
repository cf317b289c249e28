"""Verbs that take ``-``: their input by a pipe, their output into a pipe, a FIFO, or a reader that closes early.

What comes out is what the verb writes to a file, whole; a reader that closes early ends the command without a
traceback; and nothing waits for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from campaigns.frame import Table, report, start

import ckptfix

COMMAND = [sys.executable, "-m", "ckptfix"]
WRITERS: tuple[tuple[str, ...], ...] = (
    ("strip-module",), ("add-module",), ("unwrap",), ("rename", "--sub", "w$=v"), ("to-cpu",),
    ("convert", "--to", "legacy"), ("extract", "--to", "zip"), ("sanitize",),
    ("slim",), ("repair",), ("cast", "--to", "float16"), ("select", "--keep", "*"),
)  # fmt: skip
READERS: tuple[tuple[str, ...], ...] = (("inspect",), ("ls",), ("doctor",), ("digest",), ("stats",))
LONGEST = 30


def _run(words: list[str], data: bytes | None) -> tuple[int, bytes, str]:
    done = subprocess.run([*COMMAND, *words], input=data, capture_output=True, timeout=LONGEST, check=False)
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")


def _early(words: list[str], data: bytes) -> tuple[int, str]:
    """Exit code and messages where the reader of the output takes ten bytes and closes."""
    process = subprocess.Popen(
        [*COMMAND, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    with process.stdin as given, suppress(BrokenPipeError):
        given.write(data)
    process.stdout.read(10)
    process.stdout.close()
    said = process.stderr.read().decode(errors="replace")
    process.stderr.close()
    return process.wait(LONGEST), said


def _read(path: Path, taken: list[bytes]) -> None:
    taken.append(path.read_bytes())


def run(folder: Path, verbs: tuple[tuple[str, ...], ...] = WRITERS + READERS) -> Table:
    """Every way of each verb; how they ended, and what was wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    path, out, fifo = folder / "in.pth", folder / "out.pth", folder / "fifo.pth"
    torch.save({"module.a.w": torch.randn(200_000), "module.b": torch.ones(3)}, path)
    data = path.read_bytes()
    for verb in verbs:
        writes = verb in WRITERS
        out.unlink(missing_ok=True)
        words, last = list(verb), [str(out)] if writes else []
        code, _, said = _run([*words, str(path), *last], None)
        if code not in (0, 1) or (writes and not out.exists()):
            wrong.append(f"{verb}: does not work on files: exit {code}: {said[-200:]}")
            continue
        piped = _run([*words, "-", *(["-"] if writes else [])], data)
        ends[f"pipe: exit {piped[0]}"] += 1
        if "Traceback" in piped[2]:
            wrong.append(f"{verb}: pipe: {piped[2][-300:]}")
        if writes and piped[0] == 0:
            back = folder / "back"
            back.write_bytes(piped[1])
            if not ckptfix.diff(back, out).same:
                wrong.append(f"{verb}: what went through a pipe has other values")
        elif piped[0] != code:
            wrong.append(f"{verb}: pipe: exit {piped[0]}, and {code} of a file: {piped[2][-200:]}")
        if not writes:
            continue
        early, message = _early([*words, "-", "-"], data)
        ends[f"closed early: exit {early}"] += 1
        if early == 0 or "Traceback" in message:
            wrong.append(f"{verb}: the reader closed early: exit {early}: {message[-300:]}")
        os.mkfifo(fifo)
        taken: list[bytes] = []
        reader = threading.Thread(target=_read, args=(fifo, taken), daemon=True)
        reader.start()
        code, _, said = _run([*words, str(path), str(fifo)], None)
        if reader.is_alive():  # nothing was written: the reader is let go
            os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))
            reader.join(1)
        ends[f"FIFO: exit {code}"] += 1
        if "Traceback" in said or (code == 0 and taken and taken[0] not in (b"", out.read_bytes())):
            wrong.append(f"{verb}: FIFO: exit {code}: {said[-300:]}")
        if code == 2 and not fifo.is_fifo():
            wrong.append(f"{verb}: the FIFO was refused and replaced")
        fifo.unlink()
    return ends, wrong


def main(folder: Path) -> int:
    """Print the table; the number of faults that were found."""
    return report("pipes", run(folder))


if __name__ == "__main__":
    start(main)

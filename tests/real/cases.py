"""The cases of the printed commands: every fixture, real file, real folder, hostile file, and reported thread."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from real.files import SHARED, fixture_files, name_of, real_files, real_folders
from real.printed import Case
from threads.threads import HELD_OUT, THREADS, Thread

SHARED_THREADS = SHARED / "threads"

BUILD = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import lib
for module in sorted(name[:-3] for name in os.listdir(sys.argv[1]) if name.startswith("cases")):
    __import__(module)
for name, (build, url, kind) in lib.CASES.items():
    place = os.path.join(sys.argv[2], name)
    os.makedirs(place)
    os.chdir(place)
    made = build()
    with open(place + ".json", "w") as file:
        json.dump({key: made.get(key) for key in ("file", "like", "msg")}, file)
"""
"""The modules of shared/threads make classes of libraries up, so they are imported in a process of their own."""


def attack_files() -> list[Path]:
    return sorted(path for path in (SHARED / "attacks").rglob("*") if path.is_file())


def thread_names() -> list[str]:
    """The names of the cases of shared/threads; none where it is absent."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(SHARED_THREADS.glob("cases*.py"))]
    return [name for text in texts for name in re.findall(r"^@case\('(\w+)'", text, re.MULTILINE)]


def thread_case(thread: Thread, folder: Path) -> Case:
    """A thread of the table, as its file and the state dict of its model."""
    file, want = ({name: torch.zeros(shape) for name, shape in one.items()} for one in (thread.file, thread.want))
    path = folder / "model.pth"
    torch.save({thread.at: file} if thread.at else file, path)
    if want:
        torch.save(want, folder / "want.pt")
    return Case(path, thread.message, folder / "want.pt" if want else None)


def build_threads(folder: Path) -> None:
    """Make all cases of shared/threads in `folder`."""
    words = [sys.executable, "-c", BUILD, str(SHARED_THREADS), str(folder)]
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def shared_thread(name: str, folder: Path) -> Case:
    """A case of shared/threads, which `build_threads` made in `folder`."""
    made = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    like = None if made["like"] is None else folder / name / made["like"]
    return Case(folder / name / made["file"], made["msg"] or "", like)


TABLE: dict[str, Path | Thread | str] = {
    **{name_of(path): path for path in (*fixture_files(), *real_files(), *real_folders(), *attack_files())},
    **{thread.url: thread for thread in (*THREADS, *HELD_OUT)},
    **{f"shared {name}": name for name in thread_names()},
}
"""Name of a case -> the file, the row of the table of threads, or the name of the case of shared/threads."""

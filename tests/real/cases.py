"""The cases of the printed commands: every fixture, real file, real folder, hostile file, and reported thread."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch
from real.files import SHARED, fixture_files, name_of, real_files, real_folders
from real.printed import Case
from threads.threads import HELD_OUT, THREADS, Thread

SHARED_THREADS = SHARED / "threads"

ROOMS = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parents[2])))
"""The folders of the packages that a process of its own imports."""
SEED = 67280421310721
"""What torch begins with in a process of its own, whatever tests ran before."""

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
    """Make all cases of shared/threads in `folder`, in a process of its own: they make classes of libraries up.

    A fork of this process would wait forever for the threads of torch, which it lacks.
    """
    line = "import sys; from pathlib import Path; from real.cases import made_here; made_here(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", line, str(folder)], check=True, env={**os.environ, "PYTHONPATH": ROOMS})


def made_here(folder: Path) -> None:
    """Make all cases in this process; see `build_threads`."""
    sys.path.insert(0, str(SHARED_THREADS))
    torch.manual_seed(SEED)
    for path in sorted(SHARED_THREADS.glob("cases*.py")):
        import_module(path.stem)
    for name, (build, *_) in import_module("lib").CASES.items():
        (folder / name).mkdir(parents=True)
        os.chdir(folder / name)
        made = build()
        text = json.dumps({key: made.get(key) for key in ("file", "like", "msg")})
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


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

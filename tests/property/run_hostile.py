"""Run the operations on the files of a folder in this process, under an audit hook; print what happened as JSON.

    python -m property.run_hostile FOLDER

A line for each file: name, seconds of CPU of the slowest operation, bytes by which the peak of memory exceeds
what it was before the first file, messages of our errors, any other error, events that the hook saw. The last
line is a control: an import that the hook must have seen.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from property.small_files import SMALL
from property.survive import EVERYTHING, judge, survives

import ckptfix

WATCHED = (
    "import", "exec", "compile", "open", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "marshal.",
    "pickle.find_class", "builtins.input", "code.__new__", "webbrowser.", "urllib.", "pty.", "tempfile.",
)  # fmt: skip
LAZY = (
    *(f"encodings.{name}" for name in ("idna", "latin_1", "raw_unicode_escape", "unicode_escape")),
    *("bz2", "concurrent.futures.thread", "ctypes", "difflib", "hashlib", "html", "lzma", "subprocess", "unicodedata"),
    *("numpy", "ml_dtypes"),
)
"""Modules of others that are imported where they are first needed."""
APART = ("__main__", "browse", "cli", "fleet", "git", "loaders", "trainer", "io.remote", "ops.target")
"""Rooms that no operation on a local file needs; the loaders import torch."""
OPERATIONS = tuple(operation for operation in EVERYTHING if operation is not judge)
"""All but the judgment, which `property.run_doctor` asks for on the same files."""
LONG = os.environ.get("CKPTFIX_LONG") == "1"
"""All operations on each file; else every second, on the next file the others."""
ADDRESS_SPACE = 1 << 30
"""Far above what is allowed, and low enough for a bomb to hit it before it hits the machine."""
UNIT = 1 if sys.platform == "darwin" else 1024


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


def preload() -> None:
    """Import what an operation may import, so that the hook sees only imports that a file causes."""
    for name in LAZY:
        importlib.import_module(name)
    package = Path(ckptfix.__file__).parent
    for path in sorted(package.rglob("*.py")):
        room = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        if room and not any(room == apart or room.startswith(f"{apart}.") for apart in APART):
            importlib.import_module(f"ckptfix.{room}")


def main(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    names: list[str] = json.loads((folder / "names.json").read_text())
    for data in SMALL.values():
        survives(folder / "warm", data, EVERYTHING)
    preload()
    events: list[str] = []
    allowed: set[str] | None = None

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if allowed is None or not event.startswith(WATCHED):
            return
        if event == "open" and str(arguments[0]) in allowed and not isinstance(arguments[1], str | None):
            return
        if event == "open" and str(arguments[0]) in allowed and "w" not in (arguments[1] or ""):
            return
        if event == "os.scandir" and str(arguments[0]) == str(folder):  # an index beside a file that may hold codes
            return
        events.append(f"{event} {arguments!r:.200}")

    sys.addaudithook(hook)
    base = _peak()
    for index, name in enumerate(names):
        path = folder / str(index)
        messages: list[str] = []
        failure, slowest = "", 0.0
        for operation in OPERATIONS if LONG else OPERATIONS[index % 2 :: 2]:
            start = time.process_time()
            error: BaseException | None = None
            allowed = {str(path)}
            try:
                operation(path)
            except Exception as caught:
                error = caught
            allowed = None
            slowest = max(slowest, time.process_time() - start)
            if error is not None and hasattr(error, "hint"):
                messages.append(f"{operation.__name__}: {type(error).__name__}: {error}")
            elif error is not None:
                failure = failure or f"{operation.__name__}: {''.join(traceback.format_exception(error)[-4:])}"
        row = {"name": name, "seconds": slowest, "grown": _peak() - base, "messages": messages}
        print(json.dumps({**row, "failure": failure, "events": events}), flush=True)
        events.clear()
    allowed = set()
    importlib.import_module("pyclbr")
    allowed = None
    print(json.dumps({"name": "control", "events": events, "torch": "torch" in sys.modules}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

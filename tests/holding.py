"""A command that is held before an output gets its name, until a signal comes: no machine is too slow, or too fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SITE = """
import sys, time

written, held = 0, False

def hold(event, arguments):
    global written, held
    if event in ("os.rename", "os.link") and not held and str(arguments[1]).endswith({suffix!r}):
        written += 1
        if written > {outputs}:
            held = True
            while True:
                time.sleep(0.05)  # a signal just before one long sleep would not end it

sys.addaudithook(hold)
"""


def holding(folder: Path, outputs: int, suffix: str = ".pth") -> dict[str, str]:
    """Return an environment in which each process stops before it names one output more than `outputs`.

    Args:
        folder: for the module that does it; made if it is not there.
        suffix: of the names that count.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE.format(suffix=suffix, outputs=outputs))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}

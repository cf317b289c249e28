"""A command that is held before it opens an input, until a signal comes: no machine is too slow, or too fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SITE = """
import os, sys, time

opened, held = set(), False

def hold(event, arguments):
    global held
    if event == "open" and not held and isinstance(arguments[0], str):
        folder, name = os.path.split(arguments[0])
        if os.path.basename(folder) == {folder!r}:
            opened.add(name)
        if len(opened) > {inputs}:
            held = True
            while True:
                time.sleep(0.05)  # a signal just before one long sleep would not end it

sys.addaudithook(hold)
"""


def holding(place: Path, folder: str, inputs: int) -> dict[str, str]:
    """Return an environment in which each process stops before it opens one file more of `folder` than `inputs`.

    It does not stop where an output gets its name: there a signal waits.

    Args:
        place: for the module that does it; made if it is not there.
    """
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(SITE.format(folder=folder, inputs=inputs))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *sys.path])}

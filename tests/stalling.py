"""A command that does not end on some inputs, in all processes of a run: they cannot finish before a signal comes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SITE = """
import sys, time
sys.path[:0] = {path!r}
from ckptfix.cli.shared import one_job

known = one_job.callback_of

def callback_of(name):
    callback = known(name)
    def stalling(**params):
        while "stall" in params["source"]:
            time.sleep(0.05)
        return callback(**params)
    return stalling

one_job.callback_of = callback_of
"""


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process in which a command stalls on each input called ``stall...``; `folder` is used."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(path=sys.path))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}

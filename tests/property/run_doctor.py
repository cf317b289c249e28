"""Run doctor on the files of a folder in this process, under an audit hook; print what it said as JSON.

    python -m property.run_doctor FOLDER

A line for each file: name, ids of its findings, whether one is more than a note, seconds of CPU, growth of the peak of
memory in bytes, an error that came out, events that the hook saw. The last line is a control.
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

from property.run_hostile import ADDRESS_SPACE, UNIT, WATCHED, preload
from property.small_files import SMALL

import ckptfix


def main(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 * ADDRESS_SPACE, 2 * ADDRESS_SPACE))
    names: list[str] = json.loads((folder / "names.json").read_text())
    preload()
    for data in SMALL.values():
        (folder / "warm").write_bytes(data)
        ckptfix.doctor(folder / "warm")
    events: list[str] = []
    allowed: set[str] | None = None

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if allowed is None or not event.startswith(WATCHED):
            return
        if event == "open" and str(arguments[0]) in allowed and "w" not in (arguments[1] or ""):
            return
        if event == "os.scandir" and str(arguments[0]) == str(folder):  # an index beside a file that may hold codes
            return
        events.append(f"{event} {arguments!r:.200}")

    sys.addaudithook(hook)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index, name in enumerate(names):
        path = folder / str(index)
        failure, ids, serious = "", [], False
        start = time.process_time()
        allowed = {str(path)}
        try:
            diagnosis = ckptfix.doctor(path)
        except Exception as caught:
            allowed = None
            failure = "".join(traceback.format_exception(caught)[-4:])
        else:
            allowed = None
            ids = [finding.id for finding in diagnosis.findings]
            # What every sample has beside its threat does not show the threat.
            told = (finding for finding in diagnosis.findings if finding.id not in ("wrapped-names", "device-tags"))
            serious = any(finding.severity != "info" for finding in told)
        seconds = time.process_time() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * UNIT
        row = {"name": name, "ids": ids, "serious": serious, "seconds": seconds, "grown": grown}
        print(json.dumps({**row, "failure": failure, "events": events}), flush=True)
        events.clear()
    allowed = set()
    importlib.import_module("pyclbr")
    allowed = None
    row = {"name": "control", "ids": [], "serious": False, "seconds": 0, "grown": 0, "failure": ""}
    print(json.dumps({**row, "events": events}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Memory that runs out while a plan is written: at every N-th request of the interpreter, and by a real limit."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

from builders import Tensor, assemble, state_dict_ops, torch_zip
from campaigns.frame import Table, report
from faults.scenarios import OLD, SCENARIOS, complaint, plan, prepare, writing

from ckptfix.errors import CkptfixError
from ckptfix.io.write import write_plan

SECONDS = 120
"""After which a process that has not ended counts as hanging."""


def nth_request(folder: Path, name: str, first: int, how_many: int) -> tuple[str, str | None]:
    """Write the plan of scenario `name` in a process in which requests `first` to `first + how_many` get nothing.

    Returns:
        How it ended, and what is wrong with the files, or None.
    """
    import _testcapi  # type: ignore[import-not-found]

    scenario = SCENARIOS[name]
    prepare(folder, scenario)
    planned = plan(folder, scenario)
    stacks = folder.with_suffix(".stacks")
    child = os.fork()
    if not child:
        code = 70
        file = stacks.open("w")
        faulthandler.enable(file)
        try:
            _testcapi.set_nomemory(first, first + how_many)
            try:
                write_plan(planned, **writing(scenario))
                code = 0
            except MemoryError:
                code = 130
            except SystemError:  # what an enum of the interpreter raises for it
                code = 131
            except RuntimeError as error:  # and a lock
                code = 131 if "allocate lock" in str(error) else 70
            except CkptfixError:
                code = 2
            except BaseException:
                _testcapi.remove_mem_hooks()
                traceback.print_exc(file=file)
                file.flush()
            finally:
                _testcapi.remove_mem_hooks()
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGABRT)
            os.waitpid(child, 0)
            return "hangs", "hangs in\n" + stacks.read_text()
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(ended[1])
    words = {0: "written", 130: "MemoryError", 131: "an error of the interpreter", 2: "an error of ours"}
    word = words.get(code, f"exit {code}")
    return word, complaint(folder, scenario, code, stacks.read_text()) or (None if code in (0, 2, 130, 131) else word)


def requests(folder: Path, name: str, points: range, how_many: int) -> Table:
    """How the writes at `points` ended, and what was wrong."""
    ends: Counter[str] = Counter()
    wrong = []
    for point in points:
        ended, complaint = nth_request(folder, name, point, how_many)
        ends[ended] += 1
        if complaint:
            wrong.append(f"{name}, {how_many} requests from {point}: {complaint}")
    return ends, wrong


def limited(folder: Path, megabytes: range) -> Table:
    """``ckptfix strip-module`` within real limits of its address space: old and exit 2, or new and exit 0."""
    values = 2_000_000
    tensor = Tensor("0", (values,), values, location="cuda:0")
    source, dest = folder / "in.pth", folder / "out.pth"
    source.write_bytes(
        torch_zip(assemble(("PROTO", 2), *state_dict_ops({"module.weight": tensor}), "STOP"), [bytes(4 * values)])
    )
    ends: Counter[str] = Counter()
    wrong = []
    for limit in megabytes:
        dest.write_bytes(OLD)
        done = subprocess.run(
            [sys.executable, "-B", "-m", "ckptfix", "strip-module", str(source), "-o", str(dest), "--force"],
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_AS, (limit << 20, limit << 20)),
            capture_output=True,
            text=True,
            check=False,
        )
        new = dest.read_bytes() != OLD
        trace = "Traceback" in done.stderr
        started = "ckptfix/cli/exits.py" in done.stderr or not trace
        ends[f"exit {done.returncode}" + (" with a traceback" if trace else "")] += 1
        left = [path.name for path in folder.iterdir() if path not in (source, dest)]
        if new != (done.returncode == 0) or left or (trace and started):
            state = "new" if new else "old"
            wrong.append(f"{limit} MB: exit {done.returncode}, OUT {state}, left {left}, {done.stderr[-300:]}")
    return ends, wrong


def main(folder: Path) -> int:
    """Print the table; the number of faults that were found."""
    found = 0
    files = folder / "files"
    files.mkdir()
    for name in SCENARIOS:
        for how_many in (1, 8):
            ends, wrong = requests(files, name, range(0, 1200, 4), how_many)
            points = f"{sum(ends.values()):5} points, {how_many:2} requests each"
            found += report(f"T9   {name:14} {points}", (ends, wrong), 5)
    (folder / "limits").mkdir()
    ends, wrong = limited(folder / "limits", range(16, 160, 3))
    return found + report(f"T9   RLIMIT_AS      {sum(ends.values()):5} limits", (ends, wrong), 5)

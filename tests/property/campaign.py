"""A long campaign: mutants by every verb and loader, in forked workers with limits; what came out is summed up.

    python -m property.campaign --mutants 50000 --workers 2 [--first N] [--verbs 6] [--seconds S]

Each mutant gets `--verbs` commands and a loader in turn, so that all verbs get equally many. A failure is an error that
is not ours, a call of more than `SECONDS` of CPU or `MEMORY` bytes more, an executed command, a worker that died.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from property.mutants import mutant
from property.verbs import COMMANDS, LOADERS, Outcome, run_commands, run_loaders

SECONDS = 1.0
MEMORY = 100 << 20
HANG = 20
"""Seconds of CPU after which a call is broken off."""
FILE_SIZE = 64 << 20
CHUNK = 250
RUNS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pty.spawn")


class Hung(BaseException):
    pass


def outcomes(number: int, path: Path, verbs: int) -> Iterator[Outcome]:
    """What some commands and a loader say about mutant `number`."""
    _, data = mutant(number)
    path.write_bytes(data)
    names, loaders = list(COMMANDS), list(LOADERS)
    start = number * verbs
    yield from run_commands(path, tuple(names[(start + step) % len(names)] for step in range(verbs)))
    yield from run_loaders(path, (loaders[number % len(loaders)],))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def examine(number: int, path: Path, verbs: int, events: list[str]) -> Iterator[dict[str, Any]]:
    """The failures of one mutant, and a last row with how many calls there were."""
    row: dict[str, Any] = {"number": number}
    calls, codes = 0, Counter[str]()
    before, memory = time.process_time(), peak()
    events.clear()
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG)
    try:
        for outcome in outcomes(number, path, verbs):
            calls += 1
            codes[str(outcome.code)] += 1
            seconds, grown = time.process_time() - before, peak() - memory
            if outcome.failure:
                yield {**row, "verb": outcome.name, "what": "raw error", "text": outcome.failure}
            if seconds > SECONDS:
                yield {**row, "verb": outcome.name, "what": "slow", "text": f"{seconds:.1f} s"}
            if grown > MEMORY:
                yield {**row, "verb": outcome.name, "what": "memory", "text": f"{grown >> 20} MiB"}
            if "File too large" in outcome.stderr:
                yield {**row, "verb": outcome.name, "what": "large output", "text": outcome.stderr[-200:]}
            if events:
                yield {**row, "verb": outcome.name, "what": "executed", "text": "; ".join(events)}
            before, memory = time.process_time(), peak()
            signal.setitimer(signal.ITIMER_VIRTUAL, HANG)
    except Hung:
        yield {**row, "verb": "?", "what": "hang", "text": f"more than {HANG} s"}
    yield {**row, "calls": calls, "codes": codes}


def work(numbers: range, verbs: int, pipe: int) -> None:
    """A worker: the rows of `numbers` as lines of JSON, each mutant announced before it is tried."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), size + (2 << 30)))
    events: list[str] = []
    sys.addaudithook(lambda event, arguments: events.append(f"{event} {arguments!r:.200}") if event in RUNS else None)

    def hung(number: int, frame: FrameType | None) -> None:
        raise Hung

    signal.signal(signal.SIGVTALRM, hung)
    folder = Path(tempfile.mkdtemp(prefix="ckptfix-mutants-"))
    with os.fdopen(pipe, "w") as out:
        for number in numbers:
            print(json.dumps({"number": number}), file=out, flush=True)
            for row in examine(number, folder / "in.pth", verbs, events):
                print(json.dumps(row), file=out, flush=True)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    shutil.rmtree(folder, ignore_errors=True)


def fork(numbers: range, verbs: int) -> tuple[int, int]:
    """(process id, descriptor to read from) of a new worker."""
    reading, writing = os.pipe()
    worker = os.fork()
    if worker:
        os.close(writing)
        return worker, reading
    os.close(reading)
    code = 1
    with suppress(BaseException):
        work(numbers, verbs, writing)
        code = 0
    os._exit(code)


def run(numbers: range, workers: int, verbs: int, seconds: float) -> dict[str, Any]:
    """The sums of a campaign: mutants, calls, exit codes and failures by kind and place."""
    started = time.monotonic()
    waiting = [numbers[at : at + CHUNK] for at in range(0, len(numbers), CHUNK)][::-1]
    running: dict[int, tuple[Any, range, dict[str, Any]]] = {}
    sums: dict[str, Any] = {"mutants": 0, "calls": 0, "codes": Counter(), "failures": []}
    while running or waiting:
        while waiting and len(running) < workers and time.monotonic() - started < seconds:
            chunk = waiting.pop()
            worker, descriptor = fork(chunk, verbs)
            running[worker] = (os.fdopen(descriptor), chunk, {"number": None})
        if not running:
            break
        for worker, (stream, chunk, last) in list(running.items()):
            # A worker writes little: one after the other they are read to the end.
            for line in stream:
                note(json.loads(line), last, sums)
            stream.close()
            _, status = os.waitpid(worker, 0)
            del running[worker]
            if status:
                number = last["number"]
                died = {"number": number, "verb": "?", "what": "died", "text": f"status {status:#x}"}
                sums["failures"].append(died)
                rest = range(chunk[0] if number is None else number + 1, chunk[-1] + 1)
                waiting += [rest] if len(rest) and number is not None else []
    sums["seconds"] = round(time.monotonic() - started)
    return sums


def note(row: dict[str, Any], last: dict[str, Any], sums: dict[str, Any]) -> None:
    last["number"] = row["number"]
    if "what" in row:
        sums["failures"].append(row)
    elif "calls" in row:
        sums["mutants"] += 1
        sums["calls"] += row["calls"]
        sums["codes"].update(row["codes"])


def place_of(failure: dict[str, Any]) -> str:
    """Failures of one kind at one line are one."""
    lines = [line.strip() for line in failure["text"].splitlines() if line.strip().startswith("File ")]
    place = lines[-1] if lines else failure["text"] if failure["what"] != "slow" else failure["verb"]
    error = failure["text"].strip().splitlines()[-1].partition(":")[0] if lines else ""
    return f"{failure['what']}: {error} {place}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mutants", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    with suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    numbers = range(options.first, options.first + options.mutants)
    # Everything is imported once, before the workers are forked.
    for number in range(-60, 0):
        for _ in outcomes(number, Path(tempfile.gettempdir(), "ckptfix-mutant-warm.pth"), options.verbs):
            pass
    sums = run(numbers, options.workers, options.verbs, options.seconds)
    failures: dict[str, list[dict[str, Any]]] = {}
    for failure in sums["failures"]:
        failures.setdefault(place_of(failure), []).append(failure)
    for place, rows in sorted(failures.items(), key=lambda item: -len(item[1])):
        verbs = sorted({row["verb"] for row in rows})
        print(f"{len(rows)} x {place}\n  mutants {[row['number'] for row in rows][:5]}, by {', '.join(verbs)[:200]}")
        print("  " + "\n  ".join(rows[0]["text"].rstrip().splitlines()[-8:]))
    codes = ", ".join(f"{code}: {count:,}" for code, count in sorted(sums["codes"].items()))
    print(f"{sums['mutants']:,} mutants, {sums['calls']:,} calls in {sums['seconds']} s; exit codes {codes}")
    print(f"{len(sums['failures'])} failures at {len(failures)} places")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""A long campaign: mutants by every verb and loader, in forked workers with limits; what came out is a table.

    python -m property.campaign --mutants 1000000 [--from N] [--calls 1] [--workers 2] [--seconds S] [--sums FILE]

Each mutant meets the next `--calls` of all commands and loaders. A failure is an error that is not ours, a call of more
than `SECONDS` of CPU or `MEMORY` bytes more, an executed command, a worker that died, or an output of exit code 0 in
which torch finds other values than in the input. With `--sums` the sums are kept in a file, and the campaign goes on
where it was.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from property.folder_mutants import MAKE
from property.trials import KEEPING, Place, attacks, calls_of, changed, trial

SECONDS = 1.0
MEMORY = 100 << 20
HANG = 20
"""Seconds of CPU after which a call is broken off."""

WAIT = 100 * HANG
"""The same of wall time: a call that waits for something takes no CPU, and nor does one that gets none."""

FILE_SIZE = 64 << 20
CHUNK = 500
RUNS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pty.spawn")
SHARED = Path("/dev/shm")

Sums = dict[str, Any]


class Hung(BaseException):
    pass


def limit() -> None:
    """Start or renew the time that a call may take."""
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG)
    signal.setitimer(signal.ITIMER_REAL, WAIT)


def used() -> tuple[float, int]:
    """(seconds of CPU, most bytes of memory) of this process until now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def new_sums(first: int) -> Sums:
    return {"from": first, "next": first, "mutants": 0, "cpu": 0.0, "compared": 0, "calls": {}, "failures": []}


def family(kind: str) -> str:
    """Kinds of mutants by their first word, for the table; folders by their whole name."""
    return kind if kind in MAKE else kind.partition("-")[0].partition(".")[0]


def count(sums: Sums, kind: str, outcome: str, times: int = 1) -> None:
    row = sums["calls"].setdefault(kind, {})
    row[outcome] = row.get(outcome, 0) + times


def examine(number: int, place: Place, how_many: int, events: list[str], sums: Sums) -> None:
    """Try one mutant, and note in `sums` what came of it."""
    kind, path = place.put(number)
    calls = calls_of(number, how_many)
    before, memory = used()
    events.clear()
    limit()

    def fail(verb: str, what: str, text: str) -> None:
        sums["failures"].append({"number": number, "kind": kind, "verb": verb, "what": what, "text": text})

    done = 0
    try:
        for outcome in trial(path, calls):
            done += 1
            now, most = used()
            seconds, grown = now - before, most - memory
            ended = str(outcome.code) if outcome.code is not None else "refused" if outcome.stderr else "loaded"
            count(sums, family(kind), ended)
            if outcome.failure:
                fail(outcome.name, "raw error", outcome.failure)
            if seconds > SECONDS:
                fail(outcome.name, "slow", f"{seconds:.1f} s")
            if grown > MEMORY:
                fail(outcome.name, "memory", f"{grown >> 20} MiB")
            if "File too large" in outcome.stderr:
                fail(outcome.name, "large output", outcome.stderr[-200:])
            if events:
                fail(outcome.name, "executed", "; ".join(events))
            if outcome.name in KEEPING and outcome.code == 0:
                sums["compared"] += 1
                if difference := changed(outcome, path):
                    fail(outcome.name, "silent", difference)
                now, most = used()
            before, memory = now, most
            limit()
    except Hung:
        count(sums, family(kind), "hung")
        fail(calls[min(done, len(calls) - 1)], "hang", f"more than {HANG} s")
    sums["mutants"] += 1


def work(numbers: range, how_many: int, reached: mmap.mmap, out: int) -> None:
    """A worker: it tries `numbers`, writes which it is at into `reached`, and its sums to `out` at the end."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), size + (2 << 30)))
    events: list[str] = []
    sys.addaudithook(lambda event, arguments: events.append(f"{event} {arguments!r:.200}") if event in RUNS else None)

    def hung(number: int, frame: FrameType | None) -> None:
        raise Hung

    signal.signal(signal.SIGVTALRM, hung)
    signal.signal(signal.SIGALRM, hung)
    folder = Path(tempfile.mkdtemp(prefix="ckptfix-mutants-", dir=SHARED if SHARED.is_dir() else None))
    sums, started = new_sums(numbers[0]), time.process_time()
    try:
        place = Place(folder)
        for number in numbers:
            reached[:8] = number.to_bytes(8, "little")
            examine(number, place, how_many, events, sums)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        shutil.rmtree(folder, ignore_errors=True)
    sums["cpu"] = time.process_time() - started
    with os.fdopen(out, "w") as file:
        json.dump(sums, file)


def fork(numbers: range, how_many: int) -> tuple[int, int, mmap.mmap]:
    """(process id, descriptor to read from, where it says how far it is) of a new worker."""
    reading, writing = os.pipe()
    reached = mmap.mmap(-1, 8)
    worker = os.fork()
    if worker:
        os.close(writing)
        return worker, reading, reached
    os.close(reading)
    code = 1
    try:
        work(numbers, how_many, reached, writing)
        code = 0
    except BaseException:
        with suppress(OSError):
            os.write(writing, traceback.format_exc()[-2000:].encode())
    os._exit(code)


def add(sums: Sums, more: Sums) -> None:
    for name in ("mutants", "cpu", "compared"):
        sums[name] += more[name]
    for kind, row in more["calls"].items():
        for outcome, times in row.items():
            count(sums, kind, outcome, times)
    sums["failures"] += more["failures"]


def run(sums: Sums, end: int, workers: int, how_many: int, seconds: float, keep: Path | None) -> None:
    """Try the mutants from ``sums["next"]`` to `end`, and add them to the sums."""
    started = time.monotonic()
    waiting = [range(at, min(at + CHUNK, end)) for at in range(sums["next"], end, CHUNK)][::-1]
    running: list[tuple[int, Any, mmap.mmap, range]] = []
    again: list[range] = []
    while running or waiting or again:
        while (waiting or again) and len(running) < workers and time.monotonic() - started < seconds:
            chunk = again.pop() if again else waiting.pop()
            worker, descriptor, reached = fork(chunk, how_many)
            running.append((worker, os.fdopen(descriptor), reached, chunk))
        if not running:
            break
        # In the order in which they were started, so that all before the first that runs are done.
        worker, stream, reached, chunk = running.pop(0)
        with stream:
            text = stream.read()
        _, status = os.waitpid(worker, 0)
        if text and not status:
            add(sums, json.loads(text))
        else:
            # The others of its chunk are tried again, without the one that ended it.
            number = int.from_bytes(reached[:8], "little")
            sums["failures"].append({
                "number": number, "kind": "?", "verb": ", ".join(calls_of(number, how_many)), "what": "died",
                "text": f"status {status:#x} {text}",
            })  # fmt: skip
            again += [part for part in (range(chunk[0], number), range(number + 1, chunk[-1] + 1)) if part]
        if not again:
            sums["next"] = max(sums["next"], chunk[-1] + 1)
            if keep is not None:
                new = keep.with_name(f"{keep.name}.new")
                new.write_text(json.dumps(sums))
                new.replace(keep)


def place_of(failure: dict[str, Any]) -> str:
    """Failures of one kind at one line are one."""
    lines = [line.strip() for line in failure["text"].splitlines() if line.strip().startswith("File ")]
    place = lines[-1] if lines else failure["verb"] if failure["what"] in ("slow", "memory") else failure["text"][:100]
    error = failure["text"].strip().splitlines()[-1].partition(":")[0] if lines else ""
    return f"{failure['what']}: {error} {place}"


def table(sums: Sums) -> str:
    """Calls by kind of mutant and by how they ended."""
    outcomes = sorted({outcome for row in sums["calls"].values() for outcome in row})
    rows = [[kind, *(row.get(outcome, 0) for outcome in outcomes)] for kind, row in sorted(sums["calls"].items())]
    total = Counter[str]()
    for row in sums["calls"].values():
        total.update(row)
    rows.append(["all", *(total[outcome] for outcome in outcomes)])
    heads = [f"exit {outcome}" if outcome.isdigit() else outcome for outcome in outcomes]
    names = ["mutants of", *heads]
    counts = ([kind, *(f"{count:,}" for count in row)] for kind, *row in rows)
    lines = [names, ["---", *("---:" for _ in heads)], *counts]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def report(sums: Sums) -> int:
    """Print the failures and the table; the number of places at which something failed."""
    failures: dict[str, list[dict[str, Any]]] = {}
    for failure in sums["failures"]:
        failures.setdefault(place_of(failure), []).append(failure)
    for place, rows in sorted(failures.items(), key=lambda item: -len(item[1])):
        verbs = sorted({row["verb"] for row in rows})
        print(f"{len(rows)} x {place}\n  mutants {[row['number'] for row in rows][:5]}, by {', '.join(verbs)[:200]}")
        print("  " + "\n  ".join(rows[0]["text"].rstrip().splitlines()[-8:]))
    print(table(sums))
    calls = sum(times for row in sums["calls"].values() for times in row.values())
    print(f"\n{sums['mutants']:,} mutants from {sums['from']:,}, {calls:,} calls in {sums['cpu']:,.0f} s of CPU; "
          f"{sums['compared']:,} outputs compared with their input by torch; "
          f"{len(sums['failures'])} failures at {len(failures)} places")  # fmt: skip
    return len(failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mutants", type=int, default=1_000_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--sums", type=Path, help="file that keeps the sums; where it is there, the campaign goes on")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    sums = new_sums(options.first)
    if options.sums is not None and options.sums.exists():
        sums = json.loads(options.sums.read_text())
    # Everything is imported and made once, before the workers are forked; and left alone by their collectors.
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        for number in range(16):
            _, path = place.put(number)
            for outcome in trial(path, calls_of(number, 60)):
                changed(outcome, path)
        for number in range(7, 16 * len(MAKE), 16):
            place.put(number)
    attacks()
    gc.collect()
    gc.freeze()
    run(sums, options.first + options.mutants, options.workers, options.calls, options.seconds, options.sums)
    return 1 if report(sums) else 0


if __name__ == "__main__":
    sys.exit(main())

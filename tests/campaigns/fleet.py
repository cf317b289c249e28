"""Fleets over checkpoints of all kinds: doctor and to-cpu, in processes and on Dask, killed, stopped and resumed.

The checkpoints are those of ``fixtures/`` and small ones made here, sound and broken, each under a name of its own.
The truth is what one process says of each file and writes of it, one after the other. A fleet whose worker is killed in
the middle, and which is stopped by Ctrl-C and started again, has to come to the same: each output once, with the same
bytes, the same exit code of each file, and nothing beside.

    python -m campaigns.fleet [COUNT]
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from builders import Tensor, assemble, legacy, safetensors, state_dict_ops, torch_zip, written

from ckptfix.cli.shared.command_lines import job_of
from ckptfix.cli.shared.one_job import perform

FIXTURES = Path(__file__).parents[2] / "fixtures"
COUNT = 2000
VERBS: dict[str, tuple[str, ...]] = {"doctor": ("doctor",), "to-cpu": ("to-cpu", "-o", "out/{parent}/{name}")}
MARGIN = 120
"""Seconds that a run may take."""
POLL = 0.005
"""Seconds between two counts of the records."""


def make(folder: Path, count: int) -> None:
    """`count` checkpoints below ``in``: as many of each kind, two of five broken or none at all."""
    known = sorted(path for path in FIXTURES.iterdir() if not path.name.endswith((".py", ".json")) and path.is_file())
    for number in range(count):
        place = folder / "in" / str(number % 7)
        place.mkdir(parents=True, exist_ok=True)
        if number % 3 == 0 and known:
            source = known[number // 3 % len(known)]
            shutil.copyfile(source, place / f"{number}{source.suffix}")
        else:
            name, content = _made(number)
            written(place / f"{number}{name}", content)


def _made(number: int) -> tuple[str, bytes]:
    size = 1 + number % 50
    raw = number.to_bytes(4, "little") * size
    tensor = Tensor("0", (size,), size, location=("cpu", "cuda:0", "cuda:7")[number % 3])
    ops = state_dict_ops({f"{('', 'module.')[number % 2]}fc.weight": tensor})
    pickle = assemble(("PROTO", 2), *ops, "STOP")
    kinds: Sequence[Callable[[], tuple[str, bytes]]] = (
        lambda: (".pth", torch_zip(pickle, [raw])),
        lambda: (".pth", legacy(pickle, [("0", size, raw)])),
        lambda: (".safetensors", safetensors([("w", "F32", [size], raw)])),
        lambda: (".pth", torch_zip(pickle, [raw])[: 300 + number % 400]),
        lambda: (".pth", b"<!DOCTYPE html><html></html>"),
    )
    return kinds[number % 5]()


def truth(folder: Path, verb: str) -> dict[str, tuple[int, str | None]]:
    """Input -> (exit code, SHA-256 of the output), of one process that does one after the other."""
    found = {}
    with contextlib.chdir(folder):
        for path in sorted(Path("in").rglob("*.*")):
            out = f"alone/{path}"
            argv = ["to-cpu", str(path), "-o", out] if verb == "to-cpu" else ["doctor", str(path)]
            job = job_of(argv)
            assert not isinstance(job, str), job
            code = perform(job).code
            found[str(path)] = code, _sha256(Path(out))
    return found


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ckptfix", "fleet", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def planned(folder: Path, verb: str) -> Path:
    """The plan of a verb on all checkpoints."""
    words = ["plan", "in/**/*.*", "--", *VERBS[verb]]
    made = subprocess.run(command(*words), cwd=folder, env=environment(), capture_output=True, check=True)
    plan = folder / f"{verb}.jsonl"
    plan.write_bytes(made.stdout)
    return plan


def through(plan: Path, *words: str, kill: Callable[[int], int | None], stop: bool) -> list[str]:
    """Run a plan until it is done: a worker is killed in the middle, and with `stop` the run is stopped once.

    Args:
        kill: kills a worker of the run with this process id.

    Returns:
        what went wrong.
    """
    total = len(plan.read_bytes().splitlines())
    faults = []
    for part in ("stopped", "resumed") if stop else ("whole",):
        process = subprocess.Popen(
            command("run", plan.name, *words), cwd=plan.parent, env=environment(), start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        before, end, killed = ended(plan), time.monotonic() + MARGIN, False
        try:
            while process.poll() is None and time.monotonic() < end:
                count = ended(plan) - before
                # The first records are the sign that workers are at work: with most of the jobs before them.
                if not killed and count > 0:
                    killed = kill(process.pid) is not None
                elif part == "stopped" and count > total // 4:
                    os.killpg(process.pid, signal.SIGINT)
                    break
                time.sleep(POLL)
            _, said = process.communicate(timeout=MARGIN)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if "Traceback" in said:
            faults.append(f"{part}: {said}")
        if not killed:
            faults.append(f"{part}: no worker was killed, of {total - before:,} jobs that were left")
        if part == "stopped" and process.returncode != 130 and ended(plan) < total:
            faults.append(f"{part}: exit code {process.returncode}: {said}")
    return faults


def ended(plan: Path) -> int:
    """The jobs of a plan that have records."""
    return sum(name.endswith(".json") for _, _, names in os.walk(f"{plan}.d/jobs") for name in names)


def kill_child(pid: int) -> int | None:
    """Kill a process of the pool of a run."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in map(int, reversed(children)):
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, signal.SIGKILL)
                return child
    return None


def faults(folder: Path, verb: str, plan: Path, known: dict[str, tuple[int, str | None]]) -> list[str]:
    """What of the records and outputs is not as one process has it."""
    found = []
    rows = [json.loads(path.read_bytes()) for path in Path(f"{plan}.d/jobs").glob("*/*.json")]
    counts = Counter(row["input"] for row in rows)
    if counts.keys() != known.keys() or set(counts.values()) != {1}:
        found.append(f"{len(rows)} records of {len(known)} inputs")
    for row in rows:
        code, digest = known[row["input"]]
        if row["exit_code"] != code:
            found.append(f"{row['input']}: exit code {row['exit_code']}, not {code}")
        if verb != "doctor" and row["digest"] != (None if digest is None else f"sha256:{digest}"):
            found.append(f"{row['input']}: the record has another digest")
        if verb != "doctor" and _sha256(folder / row["output"]) != digest:
            found.append(f"{row['input']}: other bytes")
    there = {str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*") if path.is_file()}
    wanted = {name for name, (_, digest) in known.items() if digest}
    found += [f"left behind: {name}" for name in sorted(there - wanted)]
    begun = Path(f"{plan}.d/jobs").glob("*/*.begun")
    found += [f"begun, and not ended: {path}" for path in begun if not path.with_suffix(".json").exists()]
    return found


@contextlib.contextmanager
def cluster() -> Iterator[tuple[str, Callable[[int], int | None]]]:
    """A Dask cluster of two workers: the words of its executor, and what kills a worker."""
    import distributed

    start: Any = distributed.LocalCluster
    with start(n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50) as running:

        def kill(_: int) -> int | None:
            pid: int | None = next(iter(running.workers.values())).pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            return pid

        yield f"dask://{running.scheduler_address.removeprefix('tcp://')}", kill


def main(
    folder: Path, count: int = COUNT, *, verbs: Sequence[str] = (*VERBS,), on_dask: bool = True, stop: bool = True
) -> int:
    """Do all of it in `folder`; the number of faults, which are shown."""
    make(folder, count)
    total = 0
    for verb in verbs:
        known = truth(folder, verb)
        with contextlib.ExitStack() as stack:
            engines: dict[str, tuple[tuple[str, ...], Callable[[int], int | None]]] = {
                "processes": (("--jobs", "2"), kill_child)
            }
            if on_dask and find_spec("distributed") is not None:
                address, kill = stack.enter_context(cluster())
                engines["dask"] = (("--executor", address), kill)
            for engine, (words, kill) in engines.items():
                begun = time.monotonic()
                for old in (folder / "out", folder / f"{verb}.jsonl.d"):
                    shutil.rmtree(old, ignore_errors=True)
                plan = planned(folder, verb)
                found = through(plan, *words, kill=kill, stop=stop)
                found += faults(folder, verb, plan, known)
                codes = Counter(code for code, _ in known.values())
                took = time.monotonic() - begun
                print(f"{verb} by {engine}: {len(known):,} files, exit codes {dict(sorted(codes.items()))}, "
                      f"{len(found)} faults, {took:.0f} s")  # fmt: skip
                print(*found[:20], sep="\n", end="\n" if found else "")
                total += len(found)
    return total


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.exit(main(Path(place).resolve(), int(sys.argv[1]) if sys.argv[1:] else COUNT) > 0)

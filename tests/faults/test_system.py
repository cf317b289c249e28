"""A writer in a process of its own: killed, interrupted, out of space, and lied to by the kernel."""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import scenarios
from faults.scenarios import LONG, SCENARIOS, complaint, leftovers, prepare, states

pytestmark = pytest.mark.slow

WRITER = [sys.executable, "-B", scenarios.__file__]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(scenarios.__file__).parents[2])}
STRACE = ["-f", "-y"]  # with --seccomp-bpf, strace 6.1 injects no signals
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@functools.cache
def strace_refuses() -> str:
    """Why strace cannot be used here; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", *STRACE, "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return f"strace does not work here: {tried.stderr.strip()[:80]}" if tried.returncode else ""


@pytest.fixture
def strace() -> None:
    if reason := strace_refuses():
        pytest.skip(reason)


class TestSignals:
    @pytest.mark.campaign
    @pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
    @pytest.mark.parametrize(("name", "stride"), [("new", 1 if LONG else 2), ("several", 1 if LONG else 5)])
    def test_at_every_step(self, tmp_path: Path, name: str, stride: int, number: signal.Signals) -> None:
        scenario = SCENARIOS[name]
        for step in range(0, 100, stride):
            prepare(tmp_path, scenario)
            with subprocess.Popen(
                [*WRITER, tmp_path, name, "step"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=ENVIRONMENT,
            ) as writer:
                assert writer.stdin and writer.stdout
                line = writer.stdout.readline()
                for _ in range(step):
                    if line:
                        writer.stdin.write("\n")
                        writer.stdin.flush()
                        line = writer.stdout.readline()
                finished = not line
                if not finished:
                    assert leftovers(tmp_path)
                    writer.send_signal(number)
                    writer.wait()
            code = writer.returncode
            assert code == (0 if finished else -9 if number == signal.SIGKILL else 128 + number)
            assert complaint(tmp_path, scenario, code, "") is None, f"at step {step}"
            assert states(tmp_path, scenario)[0] == ("new" if finished else "old")
            if finished:
                break
        assert step >= 5

    def test_at_any_time(self, tmp_path: Path) -> None:
        rng = random.Random(None if LONG else 1)
        seen: Counter[str] = Counter()
        for _ in range(400 if LONG else 12):
            name = rng.choice(list(SCENARIOS))
            scenario = SCENARIOS[name]
            prepare(tmp_path, scenario)
            writer = subprocess.Popen([*WRITER, tmp_path, name], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not leftovers(tmp_path) and writer.poll() is None:
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.01)
            writer.send_signal(rng.choice(SIGNALS))
            message = writer.communicate()[1]
            wrong = complaint(tmp_path, scenario, writer.returncode, message)
            # A signal that comes after main() is taken by the interpreter as it ends: the files are what counts.
            assert wrong is None or writer.returncode < 0, wrong
            assert "torn" not in states(tmp_path, scenario)
            seen[str(writer.returncode)] += 1
        assert seen

    def test_a_killed_writer_does_not_stand_in_the_way_of_the_next(self, tmp_path: Path) -> None:
        scenario = SCENARIOS["replace"]
        prepare(tmp_path, scenario)
        with subprocess.Popen(
            [*WRITER, tmp_path, "replace", "step"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
        ) as writer:
            assert writer.stdout
            writer.stdout.readline()
            writer.kill()
        assert len(leftovers(tmp_path)) == 1
        subprocess.run([*WRITER, tmp_path, "replace"], env=ENVIRONMENT, check=True)
        assert states(tmp_path, scenario) == ["new"]
        assert len(leftovers(tmp_path)) == 1


def numbered(log: Path) -> Iterator[tuple[str, int, str]]:
    """The lines of a log of strace: name of the call, how many of that name came until then, the line."""
    count: Counter[str] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        call = re.match(r"\d+ +(\w+)\(", line)
        if call:
            count[call[1]] += 1
            yield call[1], count[call[1]], line


class Traced:
    """The writer of scenario `name` under strace, which makes system calls fail."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / "files"
        self.folder.mkdir(exist_ok=True)
        self.log = folder / "strace.log"
        self.name = name
        self.scenario = SCENARIOS[name]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        prepare(self.folder, self.scenario)
        return subprocess.run(
            ["strace", *STRACE, "-o", self.log, *options, *WRITER, self.folder, self.name],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )

    def places(self) -> list[tuple[str, int]]:
        """Each system call that touches the folder: its name, and how many of that name came until then.

        An interpreter starts the same way every time, so that the same numbers point at the same calls again.
        """
        assert self.run().returncode == 0
        return [
            (call, number)
            for call, number, line in numbered(self.log)
            if str(self.folder) in line and call not in ("execve", "read", "getdents64")
        ]

    def complaint(self, call: str, number: int, fault: str) -> str | None:
        done = self.run("-e", f"trace={call}", "-e", f"inject={call}:{fault}:when={number}")
        code = done.returncode
        if not re.search("INJECTED|--- SIG|killed by SIG", self.log.read_text(errors="replace")):
            return "nothing was injected"
        wrong = complaint(self.folder, self.scenario, -9 if code == 137 else code, done.stderr)
        if wrong and call.startswith("unlink") and fault.startswith("error") and len(leftovers(self.folder)) == 1:
            return None  # what cannot be removed stays
        return wrong


FAULTS = ("error=EIO", "error=ENOSPC", "signal=KILL", "signal=TERM", "signal=INT")
EVERY_FAULT = list(itertools.product(SCENARIOS, FAULTS))
SOME_FAULTS = [("replace", "error=EIO"), ("replace", "signal=KILL"), ("new", "error=ENOSPC"), ("new", "signal=TERM")]


@pytest.mark.usefixtures("strace")
class TestSystemCalls:
    @pytest.mark.campaign
    @pytest.mark.parametrize(("name", "fault"), EVERY_FAULT if LONG else SOME_FAULTS)
    def test_each_fails_once(self, tmp_path: Path, name: str, fault: str) -> None:
        traced = Traced(tmp_path, name)
        places = traced.places()
        assert {"write", "fsync", "copy_file_range", "close"} <= {call for call, _ in places}
        if not LONG:
            # Looking is the in-process tests' part; here are the calls that write, and those that read the source.
            places = [place for place in places if "stat" not in place[0] and place[0] != "access"]
            places = places[SOME_FAULTS.index((name, fault)) % 3 :: 3]
        wrong = []
        for call, number in places:
            if found := traced.complaint(call, number, fault):
                wrong.append(f"{fault} at {call} number {number}: {found}")
        assert wrong == []

    @pytest.mark.campaign
    def test_interrupted_calls_are_continued(self, tmp_path: Path) -> None:
        traced = Traced(tmp_path, "replace")
        for call, number in traced.places():
            if call in ("openat", "write", "pread64", "copy_file_range", "fsync"):
                done = traced.run("-e", f"trace={call}", "-e", f"inject={call}:error=EINTR:when={number}")
                assert (done.returncode, states(traced.folder, traced.scenario)) == (0, ["new"]), (call, number)

    def test_copy_file_range_that_never_works(self, tmp_path: Path) -> None:
        traced = Traced(tmp_path, "new")
        calls = "copy_file_range,sendfile"
        for fault in ("error=ENOSYS", "error=EXDEV", "retval=0"):
            done = traced.run("-e", f"trace={calls}", "-e", f"inject={calls}:{fault}")
            assert (done.returncode, states(traced.folder, traced.scenario)) == (0, ["new"]), fault


COMMON = """
import resource, sys
from pathlib import Path
from ckptfix.io import write as output
from ckptfix.errors import WriteFailed
from faults.scenarios import SCENARIOS, complaint, expected, plan, prepare

folder, step, scenario = Path(sys.argv[1]), int(sys.argv[2]), SCENARIOS["replace"]
size = len(expected("out"))

def attempt(said, fits):
    code, message = 0, ""
    try:
        output.write_plan(plan(folder, scenario), overwrite=True)
    except WriteFailed as error:
        code, message = 2, str(error)
        assert said in message and f"{size:,} bytes" in error.hint, (message, error.hint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert code == (0 if fits else 2), (message, fits)
    assert not complaint(folder, scenario, code, message), complaint(folder, scenario, code, message)

hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
done = 0
"""

LIMITS = """
for limit in [*range(0, size, step), size - 1, size, size + 1]:
    prepare(folder, scenario)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    attempt("File too large", limit >= size)
    done += 1
print(done)
"""

FULL = """
import os, subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
for asked in (True, False):
    if not asked:  # as if the space was taken after the question
        output.free_space = lambda folder: None
    for taken in range(0, (1 << 20) - 400_000, step):
        prepare(folder, scenario)
        (folder / "ballast").write_bytes(bytes(taken))
        status = os.statvfs(folder)
        attempt("No space left", status.f_bavail * status.f_frsize >= size)
        done += 1
print(done)
"""


def python(script: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `script` with this interpreter; the arguments of `before` come first on the command line."""
    return subprocess.run(
        [*before, sys.executable, "-B", "-c", script, *map(str, arguments)],
        env={**ENVIRONMENT, "PYTHONPATH": str(Path(scenarios.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )


class TestSpace:
    def test_files_may_not_grow_beyond_any_limit(self, tmp_path: Path) -> None:
        """A real limit of the kernel, at sizes from nothing to one byte too few, and beyond."""
        if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
            pytest.skip("the size of files is limited already")
        done = python(COMMON + LIMITS, tmp_path, 97 if LONG else 1399)
        assert done.stderr == ""
        assert int(done.stdout) > 200

    def test_a_disk_that_is_full(self, tmp_path: Path) -> None:
        """A real file system of 1 MiB, filled more and more, in a mount namespace that goes with the process."""
        namespace = ("unshare", "--user", "--map-root-user", "--mount")
        if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
            pytest.skip("no mount namespace can be made here")
        done = python(COMMON + FULL, tmp_path, 1024 if LONG else 8192, before=namespace)
        if "CalledProcessError" in done.stderr and "mount" in done.stderr:
            pytest.skip("no tmpfs can be mounted here")
        assert done.stderr == ""
        assert int(done.stdout) > 100

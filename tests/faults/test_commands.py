"""The commands under faults: exit codes, and the output absent, as before, or complete."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Tensor, assemble, legacy, safetensors, state_dict_ops, torch_zip, written
from faults.scenarios import OLD, leftovers
from faults.test_system import numbered, strace_refuses

from ckptfix.io.output import TEMP_SUFFIX

DATA = struct.pack("<50000f", *range(50_000))


def inputs() -> dict[str, bytes]:
    """A wrapped checkpoint in each format, large enough that its data is copied by itself."""
    tensor = Tensor("0", (50_000,), 50_000, location="cuda:0")
    pickle = assemble(("PROTO", 2), *state_dict_ops({"module.weight": tensor}), "STOP")
    old = Tensor("0", (50_000,), 50_000, location="cuda:0", legacy=True)
    legacy_pickle = assemble(("PROTO", 2), *state_dict_ops({"module.weight": old}), "STOP")
    return {
        "zip.pth": torch_zip(pickle, [DATA]),
        "legacy.pth": legacy(legacy_pickle, [("0", 50_000, DATA)]),
        "model.safetensors": safetensors([("module.weight", "F32", [50_000], DATA)]),
    }


class Command:
    """``ckptfix strip-module IN OUT --force`` under strace, with OUT being replaced."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.source = written(folder / name, inputs()[name])
        self.dest = folder / f"out-{name}"
        self.log = folder / "strace.log"
        self.line = [sys.executable, "-B", "-m", "ckptfix", "strip-module", str(self.source), str(self.dest), "--force"]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        self.dest.write_bytes(OLD)
        return subprocess.run(
            ["strace", "-f", "-y", "-o", str(self.log), *options, *self.line],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=False,
        )


    def undisturbed(self) -> dict[str, int]:
        """Run it without a fault; call -> how many of that name came until the first for the output.

        An interpreter starts the same way every time, so that the same numbers point at the same calls again.
        """
        done = self.run()
        assert (done.returncode, done.stderr) == (0, "")
        assert b"module.weight" not in self.dest.read_bytes()
        first: dict[str, int] = {}
        for name, number, line in numbered(self.log):
            if TEMP_SUFFIX in line:
                first.setdefault(name, number)
        return first


@pytest.fixture(scope="module")
def command(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, dict[str, int]]:
    """The command on a file, and the numbers of its calls, which are counted once."""
    if reason := strace_refuses():
        pytest.skip(reason)
    made = Command(tmp_path_factory.mktemp("command"), name)
    return made, made.undisturbed()


@pytest.mark.campaign
@pytest.mark.parametrize("name", inputs(), scope="module")
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("fsync:error=EIO", 2),
        ("write:error=ENOSPC", 2),
        ("rename:error=EIO", 2),
        ("fsync:signal=TERM", 128 + signal.SIGTERM),
        ("fsync:signal=KILL", -signal.SIGKILL),
    ],
)
def test_a_fault_at_the_first_call_for_the_output(
    name: str, command: tuple[Command, dict[str, int]], fault: str, code: int
) -> None:
    run, first = command
    for left in leftovers(run.folder):
        (run.folder / left).unlink()
    call, _, how = fault.partition(":")
    done = run.run("-e", f"trace={call}", "-e", f"inject={call}:{how}:when={first[call]}")
    assert done.returncode == code, done.stderr
    assert run.dest.read_bytes() == OLD
    assert "Traceback" not in done.stderr
    assert bool(leftovers(run.folder)) == (code == -signal.SIGKILL)
    if code == 2:
        assert done.stderr.startswith(f"{run.dest}: ")
    if "ENOSPC" in fault:
        assert "bytes are needed" in done.stderr

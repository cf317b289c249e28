"""What is reported about OUT when a command ends badly: that it is complete, once it is, and never before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import state, wrapped
from forks import Done, Forks

pytestmark = pytest.mark.slow

Run = Callable[..., Done]

OLD = state(weight=(1.0, 2.0))
COMPLETE = "is complete: it was written before that"

SCRIPT = """
import errno, os, signal, stat, sys
from ckptfix.cli import commands

call, when, what, nth = sys.argv[1:5]
real = getattr(os, call)
count = 0

def fail(*arguments, **options):
    global count
    count += 1
    due = count == int(nth)
    if due and what == "EIO":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if due and when == "before":
        os.kill(os.getpid(), signal.Signals[what])
    result = real(*arguments, **options)
    if due and when == "after":
        os.kill(os.getpid(), signal.Signals[what])
    return result

def fail_folders(fd):
    return fail(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else real(fd)

setattr(os, call, fail_folders if call == "fsync" else fail)
commands.main(sys.argv[5:])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.pth").write_bytes(wrapped())
    Path("b.pth").write_bytes(OLD)
    return tmp_path


@pytest.fixture
def run(program: Forks) -> Run:
    def run(call: str, when: str, what: str, *words: str, nth: int = 1, stdout: int | None = None) -> Done:
        return program(SCRIPT, [call, when, what, nth, *words], stdout=stdout)

    return run


def is_new() -> bool:
    content = Path("b.pth").read_bytes()
    assert content == OLD or b"module." not in content
    return content != OLD


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("output", [["b.pth", "--backup"], ["-o", "b.pth", "--force"], ["-o", "new.pth"]])
def test_a_signal_around_the_rename(
    run: Run, folder: Path, number: signal.Signals, when: str, output: list[str]
) -> None:
    name = "new.pth" if "new.pth" in output else "b.pth"
    # A new file gets its name by a link; a kept one gets its second name by one.
    done = run("link" if name == "new.pth" else "replace", when, number.name, "strip-module", "a.pth", *output)
    assert done.code == 128 + number
    assert is_new() if name == "b.pth" else Path(name).exists()
    kept = "; kept the old b.pth as b.pth.~1~" if output[0] == "b.pth" else ""
    assert done.stderr == f"stopped by {number.name}\n{name} {COMPLETE}{kept}\n"
    assert [path.name for path in folder.iterdir() if "ckptfix-tmp" in path.name] == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_while_the_old_file_gets_its_second_name(run: Run, folder: Path, when: str) -> None:
    done = run("link", when, "SIGTERM", "strip-module", "a.pth", "b.pth", "--backup")
    assert (done.code, done.stderr) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")
    assert not is_new()
    assert sorted(path.name for path in folder.iterdir()) == ["a.pth", "b.pth"]


def test_a_signal_while_the_folder_is_synced(run: Run, folder: Path) -> None:
    done = run("fsync", "before", "SIGTERM", "strip-module", "a.pth", "-o", "b.pth", "--force")
    assert done.code == 128 + signal.SIGTERM
    assert is_new()
    assert done.stderr == f"stopped by SIGTERM\nb.pth {COMPLETE}\n"


@pytest.mark.parametrize("output", [["b.pth", "--backup"], ["-o", "b.pth", "--force"], ["-o", "new.pth"]])
def test_a_folder_that_cannot_be_synced(run: Run, folder: Path, output: list[str]) -> None:
    last = 2 if output[0] == "b.pth" else 1
    done = run("fsync", "before", "EIO", "strip-module", "a.pth", *output, nth=last)
    assert done.code == 2
    assert "the output is complete, but may not survive a power cut" in done.stderr
    assert COMPLETE not in done.stderr, "said twice"
    assert Path("b.pth.~1~").exists() == (output[0] == "b.pth") == ("kept the old b.pth as b.pth.~1~" in done.stderr)
    assert is_new() == ("b.pth" in output)


def test_a_folder_that_cannot_be_synced_after_the_old_file_got_its_second_name(run: Run, folder: Path) -> None:
    done = run("fsync", "before", "EIO", "strip-module", "a.pth", "b.pth", "--backup", nth=1)
    assert done.code == 2 and "complete" not in done.stderr
    assert not is_new()
    assert sorted(path.name for path in folder.iterdir()) == ["a.pth", "b.pth"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_result_that_cannot_be_shown(run: Run, how: list[str]) -> None:
    with open("/dev/full", "w") as full:
        words = ["strip-module", "a.pth", "-o", "b.pth", "--force", *how]
        done = run("fsync", "after", "none", *words, nth=0, stdout=full.fileno())
    assert done.code == 2
    assert is_new()
    assert done.stderr == f"No space left on device\nb.pth {COMPLETE}\n"


def test_a_reader_of_the_result_that_left(run: Run) -> None:
    read, write = os.pipe()
    os.close(read)
    words = ["strip-module", "a.pth", "-o", "b.pth", "--force"]
    done = run("fsync", "after", "none", *words, nth=0, stdout=write)
    os.close(write)
    assert (done.code, done.stderr) == (128 + signal.SIGPIPE, f"b.pth {COMPLETE}\n")


def test_json_has_it_too(program: Forks) -> None:
    """Another fault after the file was written: of two commands in one process, the second is not blamed for it."""
    script = (
        "from ckptfix.cli import commands; from ckptfix.ops import rename; real = rename.strip_module\n"
        "def both(*arguments, **options):\n    real(*arguments, **options); raise MemoryError\n"
        "rename.strip_module = both\n"
        "print(commands.main('strip-module a.pth -o b.pth --force --json'.split(), standalone_mode=False))\n"
        "commands.main('strip-module none.pth -o b.pth --force --json'.split(), standalone_mode=False)\n"
    )
    done = program(script)
    decoder = json.JSONDecoder()
    first, end = decoder.raw_decode(done.stdout)
    second, _ = decoder.raw_decode(done.stdout[end:].lstrip().removeprefix("2").lstrip())
    assert first["error"]["written"] == [f"b.pth {COMPLETE}"]
    assert "written" not in second["error"]


STARTING = """
import importlib, importlib.abc, os, runpy, signal, sys

name = sys.argv.pop(1)

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, wanted, path=None, target=None):
        if wanted == name:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
if how == "module":
    runpy.run_module("ckptfix", run_name="__main__", alter_sys=True)
else:
    module, _, attribute = how.partition(":")
    getattr(importlib.import_module(module), attribute)()
"""


def entry_point() -> str:
    import tomllib

    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["scripts"]["ckptfix"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["module", entry_point()])
@pytest.mark.parametrize("name", ["ckptfix.cli", "click", "ckptfix.cli.shared.exits"])
def test_an_interrupt_while_it_starts_gives_no_traceback(how: str, name: str) -> None:
    line = [sys.executable, "-c", f"how = {how!r}\n{STARTING}", name, "inspect", "a.pth"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT)

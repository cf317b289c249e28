"""Errors and signals become exit codes in one place, and never a traceback."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from forks import ALL_MODULES, MAIN, Forks

from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import describe, run
from ckptfix.errors import CkptfixError, KeyConflict, Truncated


def outcome(error: BaseException, *, as_json: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that raises `error`."""

    def invoke() -> object:
        raise error

    console = Console()
    console.json = as_json
    with CliRunner().isolation() as (out, err, _):
        code = run(invoke, console, [])
        return code, out.getvalue().decode(), err.getvalue().decode()


def test_an_error_says_where_and_what_to_do() -> None:
    error = Truncated(
        "4096 bytes are expected, but only 1200 are left",
        path="model.pth",
        where="archive/data/17",
        offset=0x4F0000,
        hint="ckptfix repair model.pth fixed.pth",
    )
    assert outcome(error) == (
        2,
        "",
        "model.pth: archive/data/17 @ 0x4f0000: 4096 bytes are expected, but only 1200 are left\n"
        "hint: ckptfix repair model.pth fixed.pth\n",
    )


def test_json_carries_the_fields() -> None:
    code, out, err = outcome(KeyConflict("two", path="m.pth", pairs=(("a", ("b", "c")),)), as_json=True)
    assert code == 2
    assert err == "m.pth: two\n"
    assert json.loads(out) == {
        "schema_version": 1,
        "command": None,
        "exit_code": 2,
        "path": "m.pth",
        "error": {
            "type": "KeyConflict",
            "message": "two",
            "path": "m.pth",
            "where": None,
            "offset": None,
            "hint": None,
            "pairs": [["a", ["b", "c"]]],
        },
    }


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out.pth"), "out.pth: No space left on device\n"),
        (OSError("odd"), "odd\n"),
        (PermissionError(errno.EACCES, "Permission denied", b"\xff.pth"), "\\udcff.pth: Permission denied\n"),
        (MemoryError(), "not enough memory\n"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply\n"),
        (CkptfixError("it \x1b[31mbites", path="a\nb"), "a\\nb: it \\x1b[31mbites\n"),
    ],
)
def test_other_trouble_is_one_line(error: Exception, line: str) -> None:
    assert outcome(error) == (2, "", line)


def test_a_fault_of_ours_asks_to_be_reported() -> None:
    code, _, err = outcome(KeyError("x"))
    assert code == 2
    assert "Traceback" not in err
    assert "bug in ckptfix: KeyError: 'x'" in err
    assert "CKPTFIX_DEBUG=1" in err


def test_the_traceback_shows_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTFIX_DEBUG", "1")
    assert "Traceback (most recent call last)" in outcome(CkptfixError("m"))[2]


def test_wrong_usage_keeps_the_form_of_click_and_json_has_it_too() -> None:
    code, out, err = outcome(click.UsageError("No such thing."), as_json=True)
    assert code == 2
    assert "Error: No such thing." in err
    assert json.loads(out)["error"]["message"] == "No such thing."


def test_an_unparsed_command_line_that_wanted_json_gets_it(program: Forks) -> None:
    done = program(MAIN, ["inspect", "--json", "--nonsense"])
    assert done.code == 2
    assert json.loads(done.stdout)["error"]["type"] == "NoSuchOption"


def test_fields_of_every_error_are_the_same() -> None:
    keys = {"type", "message", "path", "where", "offset", "hint"}
    for error in (CkptfixError("m"), OSError(2, "no"), MemoryError(), ValueError("v"), click.UsageError("u")):
        assert set(describe(error)) == keys


def test_a_reader_that_left_early_is_no_trouble(program: Forks, tensors: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = program(MAIN, ["inspect", tensors], stdout=write)
    os.close(write)
    assert (done.code, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"]])
def test_a_full_disk_under_stdout_is_trouble(program: Forks, tensors: Path, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = program(MAIN, [*arguments, tensors], stdout=full.fileno())
    assert (done.code, done.stderr) == (2, "No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_trouble(tensors: Path, closed: str) -> None:
    script = f'"{sys.executable}" -m ckptfix inspect "{tensors}" {closed}'
    assert subprocess.run(["sh", "-c", script], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.sampled(1, test_all=2)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_name_under_any_locale(tmp_path: Path, encoding: str) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    (tmp_path / "there.pth").write_bytes(b"")
    (tmp_path / "out").mkdir()
    with Forks(tmp_path / "out", ALL_MODULES, environment) as program:
        for name in ("モデル.pth", os.fsdecode(b"caf\xe9.pth"), "red\x1b[31m.pth", "there.pth"):
            done = program(MAIN, ["inspect", tmp_path / name], encoding=encoding)
            assert done.code == 2
            assert "Traceback" not in done.stderr
            assert "\x1b" not in done.stderr
            assert done.stderr.count("\n") in (1, 2)


SLOW = """
import pathlib, sys, time
from ckptfix.ops import rename
from ckptfix.cli import commands

(mark,) = sys.argv[1:]

def slow(*arguments, **options):
    try:
        print("begun", flush=True)
        for _ in range(3000):
            time.sleep(0.01)  # a signal just before one long sleep would not end it
    finally:
        print("cleaning", flush=True)
        for line in sys.stdin:  # until nothing more comes, whatever signals come
            pass
        pathlib.Path(mark).write_text("cleaned")

rename.strip_module = slow
commands.main(["strip-module", "in", "out"])
"""


def interrupted(tmp_path: Path, *numbers: signal.Signals) -> tuple[int, str, bool]:
    """Exit code, stderr, and whether the cleanup of a command ran to its end that got these signals.

    All but the first come while it cleans up.
    """
    mark = tmp_path / "mark"
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(mark)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(numbers[0])
        assert child.stdout.readline() == "cleaning\n"
        for number in numbers[1:]:
            child.send_signal(number)
        _, err = child.communicate(timeout=120)
        return child.returncode, err, mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cleans_up_and_exits_with_its_number(tmp_path: Path, number: signal.Signals) -> None:
    assert interrupted(tmp_path, number) == (128 + number, f"stopped by {number.name}\n", True)


@pytest.mark.slow
def test_a_second_signal_does_not_cut_the_cleanup_short(tmp_path: Path) -> None:
    code, err, cleaned = interrupted(tmp_path, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert (code, err, cleaned) == (128 + signal.SIGTERM, "stopped by SIGTERM\n", True)


DROPPED = """
import os, signal, time, weakref
from ckptfix.ops import rename
from ckptfix.cli import commands

class Any: pass

def slow(*arguments, **options):
    one = Any()
    held = weakref.ref(one, lambda _: [os.kill(os.getpid(), signal.SIGTERM), *range(1000)])
    del one
    for _ in range(3000):
        time.sleep(0.01)

rename.strip_module = slow
commands.main(["strip-module", "in", "out"])
"""


@pytest.mark.slow
def test_a_signal_in_a_callback_is_not_lost() -> None:
    """No exception leaves the callback: the signal is sent again."""
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")


def test_a_signal_ignored_at_the_start_stays_ignored() -> None:
    script = (
        "import os, signal; from ckptfix.cli.shared.exits import run; from ckptfix.cli.shared.console import Console\n"
        "def invoke():\n    os.kill(os.getpid(), signal.SIGHUP); return 0\n"
        "raise SystemExit(run(invoke, Console(), []))"
    )
    ignoring = f"trap '' HUP; exec '{sys.executable}' -c \"$SCRIPT\""
    environment = {**os.environ, "SCRIPT": script}
    assert subprocess.run(["sh", "-c", ignoring], env=environment).returncode == 0
    assert subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL).returncode == 128 + signal.SIGHUP


def test_handlers_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with CliRunner().isolation():
        run(lambda: 0, Console(), [])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize("said", ["can't allocate lock", "can't start new thread"])
def test_what_the_interpreter_says_for_memory_that_runs_out(said: str) -> None:
    assert describe(RuntimeError(said))["message"] == "not enough memory"
    assert "a bug in ckptfix" in describe(RuntimeError("else"))["message"]

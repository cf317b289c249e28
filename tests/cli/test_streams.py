"""``-`` is standard input and standard output, for every command, as if a file had been named."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from builders import written
from cli.conftest import Cli, wrapped
from click.testing import CliRunner, Result
from file_commands import CODES, COMMANDS, arguments
from json_contract import faults

from ckptfix.cli import commands
from ckptfix.cli.shared import streams

CKPTFIX = [sys.executable, "-m", "ckptfix"]
ONE_INPUT = [name for name, words in COMMANDS.items() if len(words) > 1 and words[1] in ("{torch}", "{safetensors}")]
WRITING = [name for name in ONE_INPUT if len(COMMANDS[name]) > 2 and COMMANDS[name][2].startswith("{out}")]
TO = {"convert": ("--to", "safetensors"), "convert back": ("--to", "zip"), "extract": ("--to", "zip")}
"""What the suffix of the output says otherwise."""


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that stand for streams go to a folder of the test."""
    place = tmp_path / "spool"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)


def run(words: list[str], content: bytes = b"") -> Result:
    return CliRunner().invoke(commands, words, input=content)


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("name", ONE_INPUT)
def test_standard_input_is_read_as_a_file_is(name: str, tmp_path: Path) -> None:
    words = arguments(name, tmp_path)
    if name == "undo":
        assert "cannot be undone" in run(["undo", "-"], Path(words[1]).read_bytes()).output
        return
    plain = run(words)
    outputs = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    for path in tmp_path.glob("out*"):
        path.unlink()
    content = Path(words[1]).read_bytes()
    done = run([words[0], "-", *words[2:]], content)
    assert done.exit_code == plain.exit_code == CODES.get(name, 0)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == outputs
    if words[0] != "doctor":  # its commands name files
        said = [line.split() for line in done.stdout.splitlines() if line.strip(" -")]
        # A shorter name leaves the columns narrower.
        shown = plain.stdout.replace(words[1], "-").splitlines()
        assert said == [line.split() for line in shown if line.strip(" -")]
    assert str(tmp_path / "spool") not in done.output
    assert not list((tmp_path / "spool").iterdir())


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("option", [False, True])
def test_standard_output_gets_what_a_file_would(name: str, option: bool, tmp_path: Path) -> None:
    words = arguments(name, tmp_path)
    plain = run(words)
    content = Path(words[2]).read_bytes()
    Path(words[2]).unlink()
    out = ["-o", "-"] if option else ["-"]
    done = run([*words[:2], *out, *words[3:], *TO.get(name, ())])
    assert done.exit_code == plain.exit_code == 0
    assert done.stdout_bytes == content
    assert done.stderr == plain.stdout + plain.stderr
    assert not list(tmp_path.glob("out*")) and not list((tmp_path / "spool").iterdir())


def test_from_stream_to_stream_with_json(ddp: Path) -> None:
    done = run(["to-cpu", "-", "-", "--json"], ddp.read_bytes())
    document = json.loads(done.stderr)
    assert (document["path"], document["output"], document["written"]) == ("-", "-", True)
    assert not faults(document) and document["command"] == "to-cpu"
    assert done.stdout_bytes.startswith(b"PK")


def test_a_dry_run_writes_nothing_to_the_stream(ddp: Path) -> None:
    done = run(["to-cpu", str(ddp), "-", "--dry-run"])
    assert (done.exit_code, done.stdout_bytes) == (0, b"")
    assert "would write -:" in done.stderr


def test_an_error_names_the_stream_and_writes_nothing() -> None:
    done = run(["strip-module", "-", "-"], b"<html>")
    assert (done.exit_code, done.stdout_bytes) == (2, b"")
    assert done.stderr.startswith("-: ")
    lines = run(["inspect", "-", "--json"], b"<html>").stdout
    assert json.loads(lines)["error"]["path"] == "-"


def test_the_commands_that_doctor_prints_name_no_option(ddp: Path) -> None:
    lines = run(["doctor", "-", "-v"], ddp.read_bytes()).stdout.splitlines()
    assert lines[1:4] == [
        "Fix: ckptfix fix - stdin.fixed",
        "Or: ckptfix strip-module - stdin.stripped",
        "Then: ckptfix to-cpu stdin.stripped stdin.cpu.stripped",
    ]


@pytest.mark.parametrize(
    "line",
    ["diff - -", "match - {out} --like -", "repair - {out} --fill-from -", "doctor - --error -", "inspect - -",
     "rename - {out} --map -", "doctor {in} --like - --error -"],
)  # fmt: skip
def test_standard_input_is_read_once(line: str, ddp: Path) -> None:
    done = run(line.replace("{out}", f"{ddp}.out").replace("{in}", str(ddp)).split(), ddp.read_bytes())
    assert done.exit_code == 2
    assert "given twice, but can be read once" in done.stderr
    assert not Path(f"{ddp}.out").exists()


def test_every_option_that_reads_a_file_takes_a_stream(ddp: Path, plain: Path, tmp_path: Path) -> None:
    like = plain.read_bytes()
    assert run(["match", str(ddp), str(tmp_path / "1.pth"), "--like", "-"], like).exit_code == 0
    judged = run(["doctor", str(ddp), "--like", str(plain)])
    assert run(["doctor", str(ddp), "--like", "-"], like).stdout == judged.stdout.replace(str(plain), "-")
    assert run(["diff", str(ddp), "-"], ddp.read_bytes()).exit_code == 0
    assert run(["doctor", str(ddp), "-"], like).stdout.startswith("2 files: 0 with errors, 1 with warnings")
    names = run(["rename", str(ddp), str(tmp_path / "2.pth"), "--map", "-"], b"module.fc.weight net.w\n")
    assert names.exit_code == 0 and "renamed 1 key" in names.stdout


def test_the_rules_of_match_may_go_to_standard_output(ddp: Path, plain: Path, tmp_path: Path) -> None:
    done = run(["match", str(ddp), str(tmp_path / "o.pth"), "--like", str(plain), "--rules", "-"])
    assert done.stdout.startswith("#") or "->" in done.stdout
    assert "matched 2 of 2 keys" in done.stderr
    both = run(["match", str(ddp), "-", "--like", str(plain), "--rules", "-"])
    assert both.exit_code == 2 and "given twice" in both.stderr


def test_a_stream_has_nothing_beside_it(ddp: Path) -> None:
    for line in (["strip-module", "-"], ["fix", "-"], ["repair", "-"], ["convert", "-", "--to", "zip"]):
        done = run(line, ddp.read_bytes())
        assert done.exit_code == 2
        assert "OUT is required if IN is -" in done.stderr
    assert run(["repair", "-", "--check-only"], ddp.read_bytes()).exit_code == 0


def test_a_folder_is_no_stream(ddp: Path) -> None:
    done = run(["convert", str(ddp), "-", "--to", "hf"])
    assert (done.exit_code, done.stdout_bytes) == (2, b"")
    assert "the output is a folder" in done.stderr


@pytest.mark.parametrize("words", [["to-cpu", "{}", "-"], ["to-cpu", "-", "{}.out"], ["inspect", "-"]])
def test_a_terminal_is_refused(words: list[str], ddp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "is_terminal", lambda stream: True)
    done = run([word.format(ddp) for word in words], ddp.read_bytes())
    assert (done.exit_code, done.stdout_bytes) == (2, b"")
    assert "but that is a terminal" in done.stderr


def test_a_full_disk_is_named_with_what_to_do(ddp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    def opened(path: object, mode: str) -> object:
        return contextlib.nullcontext(Full()) if mode == "xb" else open(path, mode)  # type: ignore[call-overload]

    monkeypatch.setattr(streams, "open", opened, raising=False)
    done = run(["inspect", "-"], ddp.read_bytes())
    assert done.exit_code == 2
    assert done.stderr.startswith("-: No space left on device") and "set TMPDIR" in done.stderr


def test_large_input_goes_to_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert streams.on_disk() == str(tmp_path / "spool")
    monkeypatch.delenv("TMPDIR")
    assert streams.on_disk() == "/var/tmp"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "CKPTFIX": " ".join(CKPTFIX)}
    return subprocess.run(["sh", "-c", line], cwd=folder, env=environment, capture_output=True)


@pytest.mark.slow
def test_in_a_shell(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    assert cli("strip-module", ddp, tmp_path / "expected.pth").exit_code == 0
    expected = (tmp_path / "expected.pth").read_bytes()
    for number, line in enumerate(
        ("$CKPTFIX strip-module - - < ddp.pth > {}", "cat ddp.pth | $CKPTFIX strip-module - - | cat > {}",
         "cat ddp.pth | $CKPTFIX strip-module - {}", ": > {0}; $CKPTFIX strip-module ddp.pth - >> {0}")
    ):  # fmt: skip
        done = shell(line.format(number), tmp_path)
        assert (done.returncode, (tmp_path / str(number)).read_bytes()) == (0, expected), line
    (tmp_path / "packed").write_bytes(gzip.compress(ddp.read_bytes()))
    assert shell("$CKPTFIX fix - fixed.pth < packed", tmp_path).returncode == 0
    (tmp_path / "both").write_bytes(b"0123456789" + ddp.read_bytes())
    done = shell("{ head -c 10 > /dev/null; $CKPTFIX inspect -; } < both", tmp_path)
    assert b"PyTorch zip" in done.stdout
    assert not list((tmp_path / "spool").iterdir())


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_trouble(tmp_path: Path) -> None:
    written(tmp_path / "a.pth", wrapped())
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*CKPTFIX, "to-cpu", tmp_path / "a.pth", "-"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in done.stderr and not list((tmp_path / "spool").iterdir())


@pytest.mark.slow
def test_a_signal_leaves_no_file(tmp_path: Path) -> None:
    with subprocess.Popen([*CKPTFIX, "to-cpu", "-", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(b"PK" * 10)
        child.stdin.flush()
        while not [*(tmp_path / "spool").glob("*/stdin")]:  # it stays: the command waits for the end of its input
            assert child.poll() is None
            time.sleep(0.005)
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 128 + signal.SIGTERM
    assert not list((tmp_path / "spool").iterdir())

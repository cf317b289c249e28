from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from builders import written
from cli.conftest import Cli, state, wrapped
from click.testing import CliRunner
from forks import MAIN, Done, Forks

from ckptfix import formats
from ckptfix.cli import COMPLETE, commands
from ckptfix.cli.shared import values
from ckptfix.cli.shared.shells import SHELLS
from ckptfix.command_table import COMMANDS
from ckptfix.findings.table import ENTRIES


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_that_the_shell_reads(cli: Cli, shell: str) -> None:
    result = cli("completion", shell)
    assert result.exit_code == 0
    assert COMPLETE in result.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=result.stdout, text=True, check=True)


def test_another_shell_is_wrong_usage(cli: Cli) -> None:
    assert cli("completion", "tcsh").exit_code == 2


def proposed(shell: str, line: str) -> set[str]:
    """What a completion script is told of a line that ends at the cursor."""
    words = line.split(" ")
    incomplete = words[-1] if shell == "fish" else str(len(words) - 1)
    environment = {COMPLETE: f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": incomplete}
    done = CliRunner().invoke(commands, [], env=environment)
    assert (done.exit_code, done.stderr) == (0, "")
    if shell == "zsh":  # type, value, help
        return {value.replace("\\:", ":") for value in done.stdout.splitlines()[1::3]}
    return {row.partition(",")[2].partition("\t")[0] for row in done.stdout.splitlines() if row}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ckptfix ", set(COMMANDS)),
        ("ckptfix str", {"strip-module"}),
        ("ckptfix convert --dr", {"--drop", "--drop-unsupported", "--dry-run"}),
    ],
)
def test_what_bash_is_given(line: str, expected: set[str]) -> None:
    assert proposed("bash", line) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_values_are_proposed(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "BUDGET", 60)
    monkeypatch.chdir(tmp_path)
    nets = {"generator": {"a.w": torch.ones(2)}, "discriminator": {"b.w": torch.ones(2)}, "net": torch.nn.Linear(1, 1)}
    torch.save(nets, tmp_path / "gan.pth")
    written(tmp_path / "ddp.pth", wrapped())
    written(tmp_path / "a.pth", state(w=(1, 2)))
    for line, expected in {
        "ckptfix convert a.pth b.pth --to ": {"zip", "legacy", "safetensors", "hf", "dcp", "megatron", "meta"},
        "ckptfix extract a.pth --to sa": {"safetensors"},
        "ckptfix doctor --explain bad-": {id for id in ENTRIES if id.startswith("bad-")},
        "ckptfix doctor a.pth --fail-on n": {"never"},
        "ckptfix extract gan.pth --at ": {"generator", "discriminator", "net"},
        "ckptfix strip-module gan.pth out.pth --at gen": {"generator"},
        "ckptfix diff ddp.pth gan.pth --at m": {"model_state_dict"},
        "ckptfix doctor gan.pth --at d": {"discriminator"},
        "ckptfix doctor gan.pth ddp.pth --at m": {"model_state_dict"},
        "ckptfix match a.pth b.pth --like gan.pth --like-at d": {"discriminator"},
        "ckptfix extract none.pth --at ": set(),
        "ckptfix map-location ddp.pth out.pth cuda:0": {"cuda:0=", "cuda:0"},
        "ckptfix map-location ddp.pth out.pth cuda:0=m": {"cuda:0=mps", "cuda:0=meta"},
        "ckptfix help json": {"json", "json-schema"},
    }.items():
        assert proposed(shell, line) == expected, line


def test_an_unknown_request_says_nothing(program: Forks) -> None:
    for what in ("tcsh_complete", "bash_dance"):
        script = f"import sys; sys.argv = ['ckptfix']; {MAIN}"
        assert program(script, environment={COMPLETE: what}) == Done(1, "", "")


def completed(path: object, incomplete: str = "") -> list[str]:
    command = commands.get_command(click.Context(commands), "extract")
    assert command is not None
    context = click.Context(command)
    context.params["source"] = path
    return [item.value for item in values.addresses(context, command.params[0], incomplete)]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 50, b"\x80\x02}q\x00.", wrapped()[:700]])
def test_a_file_that_cannot_be_read_proposes_nothing(content: bytes, tmp_path: Path) -> None:
    assert completed(str(written(tmp_path / "odd.pth", content))) == []
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path / "pipe", tmp_path):
        assert completed(str(path)) == []
    assert completed(None) == completed(3) == []


def test_a_name_that_a_terminal_could_not_show_is_left_out(tmp_path: Path) -> None:
    torch.save({"good": {"w": torch.ones(1)}, "e\x1b[31m": {"w": torch.ones(2)}, "a\nb": {"w": torch.ones(3)}},
               tmp_path / "a.pth")  # fmt: skip
    assert completed(str(tmp_path / "a.pth")) == ["good"]


def test_many_addresses_are_cut(tmp_path: Path) -> None:
    torch.save({f"m{index:04}": {"w": torch.ones(1)} for index in range(values.MOST + 50)}, tmp_path / "a.pth")
    assert len(completed(str(tmp_path / "a.pth"))) == values.MOST
    assert completed(str(tmp_path / "a.pth"), "m0249") == ["m0249"]


def test_a_file_that_takes_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, ended = threading.Event(), threading.Event()

    def slow(path: object) -> Any:
        release.wait(60)
        ended.set()

    monkeypatch.setattr(values, "BUDGET", 0.05)
    monkeypatch.setattr(formats, "open_checkpoint", slow)
    try:
        assert completed(str(tmp_path)) == []
        assert not ended.is_set()
    finally:
        release.set()
    assert ended.wait(60)


class Terminal:
    """An interactive bash in a pseudo-terminal, with the completion script read."""

    def __init__(self, folder: Path, script: str) -> None:
        (folder / "bin").mkdir()
        program = folder / "bin/ckptfix"
        program.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckptfix \"$@\"\n")
        program.chmod(0o755)
        (folder / "script.bash").write_text(script)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.pid, self.stream = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = {**os.environ, "PATH": path, "PS1": "", "TERM": "dumb", "INPUTRC": "/dev/null"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self.send("bind 'set enable-bracketed-paste off'; source script.bash; echo re''ady\n")
        self.until("ready")

    def send(self, text: str) -> None:
        os.write(self.stream, text.encode())

    def until(self, mark: str, seconds: float = 60) -> str:
        """What is shown up to `mark`."""
        end, shown = time.monotonic() + seconds, ""
        while mark not in shown:
            ready, _, _ = select.select([self.stream], [], [], max(end - time.monotonic(), 0))
            assert ready, f"not shown in time: {shown!r}"
            shown += os.read(self.stream, 4096).decode()
        return shown

    def line(self, typed: str) -> str:
        """The command line after `typed` and a tab."""
        # The tab is answered before what follows is read; then the line becomes an argument of echo, unexpanded.
        self.send(f"{typed}\t\x05>'\x01echo '<\n")
        shown = self.until(">\r\n")
        found: list[str] = re.findall(r"^<(.*)>\r$", shown, re.MULTILINE)
        return found[-1]

    def close(self) -> None:
        self.send("\x03\nexit\n")
        os.close(self.stream)
        os.waitpid(self.pid, 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_an_interactive_bash(cli: Cli, tmp_path: Path) -> None:
    torch.save({"my model": {"a.w": torch.ones(2)}, "ema": {"a.w": torch.ones(2)}}, tmp_path / "train.pth")
    written(tmp_path / "ddp.pth", wrapped())
    bash = Terminal(tmp_path, cli("completion", "bash").stdout)
    try:
        assert bash.line("ckptfix strip-m") == "ckptfix strip-module "
        assert bash.line("ckptfix inspect dd") == "ckptfix inspect ddp.pth "
        assert bash.line("ckptfix convert ddp.pth out --to saf") == "ckptfix convert ddp.pth out --to safetensors "
        for typed, whole in (("e", "ema "), ("my", "my\\ model ")):
            line = "ckptfix extract train.pth --at "
            # On a busy machine the file is not always read in time.
            assert any(bash.line(line + typed) == line + whole for _ in range(5))
        line = "ckptfix map-location ddp.pth out.pth cuda:0=c"
        assert bash.line(f"{line}p") == f"{line}pu "
        assert bash.line(f"{line}uda:4") == f"{line}uda:4 "
    finally:
        bash.close()

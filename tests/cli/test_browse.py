"""ckptfix browse: what it refuses, and keys in a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browsed import training
from cli.conftest import Cli

from ckptfix.errors import MissingExtra
from ckptfix.extras import need_textual


def test_without_a_terminal_it_names_the_command_that_prints(cli: Cli, ddp: Path) -> None:
    result = cli("browse", ddp)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.splitlines() == [
        "browse needs a terminal", f"hint: `ckptfix inspect {ddp}` prints the same data"
    ]  # fmt: skip
    assert f"`ckptfix diff {ddp} {ddp}`" in cli("browse", ddp, ddp).stderr


def test_at_is_for_two_files(cli: Cli, ddp: Path) -> None:
    assert "--at needs two files" in cli("browse", ddp, "--at", "model").stderr


def test_without_textual_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == "textual":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "textual"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(MissingExtra, match="browse needs textual") as caught:
        need_textual("browse")
    assert caught.value.hint == "pip install 'ckptfix[browse]'"


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, words: list[str], **environment: str) -> None:
        pty = pytest.importorskip("pty")
        try:
            self.fd, inner = pty.openpty()
        except OSError as error:
            pytest.skip(f"no pseudo-terminal: {error}")
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(inner)
        self.inner = inner
        environment = {**os.environ, "TERM": "xterm-256color", **environment}
        script = (
            "import sys\nfrom ckptfix.cli import commands\ncode = commands.main(sys.argv[1:], standalone_mode=False)\n"
            "print('torch was loaded' if 'torch' in sys.modules else 'no torch')\nsys.exit(code)"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *words], stdin=inner, stdout=inner, stderr=inner, env=environment
        )
        self.seen = ""

    def until(self, pattern: str, seconds: float = 120.0) -> None:
        """Read until what was written, without its escapes, has `pattern`."""
        end = time.monotonic() + seconds
        while not re.search(pattern, re.sub(r"\x1b(\[[0-9;?=<>$]*[a-zA-Z@`]|\][^\a]*\a|[=>c])", "", self.seen)):
            left = end - time.monotonic()
            assert left > 0, f"{pattern} was not written: {self.seen[-3000:]!r}"
            if select.select([self.fd], [], [], min(left, 0.5))[0]:
                self.seen += os.read(self.fd, 1 << 16).decode("utf-8", "replace")
            elif self.process.poll() is not None:
                raise AssertionError(f"it ended: {self.seen[-3000:]!r}")

    def type(self, keys: str) -> None:
        """Press keys; what was written before is forgotten."""
        self.seen = ""
        os.write(self.fd, keys.encode())

    def ended(self) -> int:
        """Read what is left; its exit code."""
        end = time.monotonic() + 120
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 1 << 16).decode("utf-8", "replace")
        return self.process.wait(1)


@contextmanager
def terminal(words: list[str], **environment: str) -> Iterator[Terminal]:
    made = Terminal(words, **environment)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()
        os.close(made.fd)
        os.close(made.inner)


@pytest.mark.slow
def test_keys_in_a_terminal(tmp_path: Path) -> None:
    path = training(tmp_path, prefix="module.")
    with terminal(["browse", str(path)]) as shown:
        shown.until(r"1 warning")
        shown.type("/norm")
        shown.until(r"1 found")
        shown.type("\r\r")
        shown.until(r"module.norm.bias")
        shown.until(r"mean 12")
        shown.type("y")
        shown.until(r"copied to the clipboard")
        assert "\x1b]52;c;" in shown.seen
        shown.type("v")
        shown.until(r"Go to index")
        shown.type("\x1b")
        shown.until(r"Search")
        shown.type("q")
        assert shown.ended() == 0
        assert "\x1b[?1049l" in shown.seen and "no torch" in shown.seen
        assert termios.tcgetattr(shown.inner)[3] == shown.before[3]


@pytest.mark.slow
def test_a_signal_gives_the_terminal_back(tmp_path: Path) -> None:
    with terminal(["browse", str(training(tmp_path))], NO_COLOR="1") as shown:
        shown.until(r"train\.pth")
        shown.until(r"no problems")
        shown.process.send_signal(signal.SIGTERM)
        assert shown.ended() == 128 + signal.SIGTERM
        assert "\x1b[?1049l" in shown.seen and "Traceback" not in shown.seen
        assert termios.tcgetattr(shown.inner)[3] == shown.before[3]

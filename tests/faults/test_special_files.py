"""What is no regular file, or may not be read, as an input of every command: one error, at once, that says so."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import pytest
from file_commands import ANY, IN, MACHINE, OTHER, OUT, lines
from property.small_files import SMALL
from property.verbs import Outcome, run_command

NOBODY = 65534
DENIED = "permission denied|no such file or folder"
LONGEST = 5
"""Seconds: what waits for a writer, or reads a device to its end, takes for ever."""

LINES = lines(ANY | MACHINE)
"""Name -> arguments. Of each, every input is tried."""

OTHERWISE = {"git textconv": (0, 2)}
"""Exit codes that are not 2: git gets a line about what is there and cannot be read."""

READS_PIPES = ("rename --map",)
"""Rules are text that a shell may make: ``--map <(...)`` is a pipe."""


def pipe(place: Path) -> None:
    os.mkfifo(place)


def link_to_a_pipe(place: Path) -> None:
    pipe(place.with_name("pipe"))
    place.symlink_to("pipe")


def below_a_file(place: Path) -> None:
    place.parent.write_bytes(SMALL["zip"])


def listener(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))


def device(kind: int, major: int, minor: int) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        try:
            os.mknod(place, 0o666 | kind, os.makedev(major, minor))
        except PermissionError:
            pytest.skip("only root makes devices")

    return make


def closed_folder(place: Path) -> None:
    place.mkdir(mode=0)


def unreadable(place: Path) -> None:
    place.write_bytes(SMALL["zip"])
    place.chmod(0)


def in_a_closed_folder(place: Path) -> None:
    place.parent.mkdir()
    place.write_bytes(SMALL["zip"])
    place.parent.chmod(0o600)


KINDS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "pipe": ("pipe.pth", pipe, "is a pipe"),
    "link to a pipe": ("link.pth", link_to_a_pipe, "is a pipe"),
    "socket": ("socket.pth", listener, "is a socket"),
    "zeros without end": ("zero.pth", device(stat.S_IFCHR, 1, 5), "is a device"),
    "nothing": ("null.pth", device(stat.S_IFCHR, 1, 3), "is a device"),
    "block device": ("block.pth", device(stat.S_IFBLK, 7, 250), "is a device"),
    "link to nothing": ("link.pth", lambda place: place.symlink_to("nowhere"), "no such file"),
    "link to itself": ("link.pth", lambda place: place.symlink_to("link.pth"), "too many levels of symbolic links"),
    "a file as a folder": ("file/x.pth", below_a_file, "not a directory|no such"),
    "a long name": ("x" * 300, lambda place: None, "file name too long|no such file or folder"),
    "folder of no rights": ("closed", closed_folder, f"{DENIED}|is a folder|no file in it"),
    "file of no rights": ("unread.pth", unreadable, DENIED),
    "file in a folder of no rights": ("closed/in.pth", in_a_closed_folder, f"{DENIED}|is a folder|no file in it"),
}
"""Name -> (what it is called, makes it, what has to be said of it)."""


class Waits(BaseException):
    """A command did not end."""


@contextmanager
def ended_by(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Waits

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def nobody() -> Iterator[None]:
    """As a user for whom rights count."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def run(line: tuple[str, ...], odd: str, folder: Path, special: Path) -> Outcome | None:
    """The command line with `special` in the place of `odd`; None where it did not end."""
    places = {IN: folder / "good.pth", OTHER: folder / "good.pth", OUT: folder / "out", odd: special}
    words = line
    for name, path in places.items():
        words = tuple(word.replace(name, str(path)) for word in words)
    with ExitStack() as stack:
        try:
            stack.enter_context(ended_by(LONGEST))
            return run_command(words)
        except Waits:
            return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_says_what_it_is(place: Path, kind: str) -> None:
    called, make, wanted = KINDS[kind]
    special = place / "k" / called
    special.parent.parent.mkdir(exist_ok=True)
    (place / "k").mkdir(exist_ok=True)
    make(special)
    folder = place / "w"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "good.pth").write_bytes(SMALL["zip"])
    wrong = []
    for name, line in LINES.items():
        for odd in (part for part in (IN, OTHER) if part in line):
            if "pipe" in kind and name in READS_PIPES:
                continue
            if DENIED in wanted:
                with nobody():
                    done = run(line, odd, folder, special)
            else:
                done = run(line, odd, folder, special)
            if complaint := _complaint(done, name, wanted, special, folder):
                wrong.append(f"{name} {odd}: {complaint}")
    assert not wrong, "\n".join(wrong)


def _complaint(done: Outcome | None, name: str, wanted: str, special: Path, folder: Path) -> str | None:
    if done is None:
        return "it waits"
    if done.failure:
        return done.failure[-300:]
    if left := [path.name for path in folder.iterdir() if path.name != "good.pth"]:
        for name in left:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).unlink(missing_ok=True)
        return f"left {left}"
    if done.code not in OTHERWISE.get(name, (2,)):
        return f"exit {done.code}: {done.stdout[-200:]} {done.stderr[-200:]}"
    said = done.stderr + done.stdout
    if done.code == 2 and (not re.search(wanted, said.lower()) or str(special) not in said):
        return f"it says {said[-200:]}"
    return None

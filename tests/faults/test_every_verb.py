"""Every command that writes, while its disk fails, another writes the same output, or its input changes."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from file_commands import ANY, IN, OTHER, OUT, WRITES, lines
from property.small_files import SMALL
from property.verbs import COMMANDS, Outcome, run_command

from ckptfix.io import output

pytestmark = pytest.mark.slow

NOTHING_WRITTEN = ("--dry-run", "--check-only", "--html")
WRITING = {
    name: line for name, line in lines(ANY | WRITES).items() if OUT in line and not set(NOTHING_WRITTEN) & set(line)
}
FOLDERS = ("convert hf, all of it", "convert dcp, all of it")
OLD = b"what was there before"
Make = Callable[[pytest.MonkeyPatch, list[str]], None]


def failing(name: str, number: int) -> Make:
    """``os.name`` fails for regular files; that it did is noted."""

    def arm(patch: pytest.MonkeyPatch, raised: list[str]) -> None:
        real = getattr(os, name)

        def call(fd: int, *arguments: Any) -> Any:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return real(fd, *arguments)
            raised.append(name)
            raise OSError(number, os.strerror(number))

        patch.setattr(os, name, call)

    return arm


def failing_close(patch: pytest.MonkeyPatch, raised: list[str]) -> None:
    class File(io.FileIO):
        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                raised.append("close")
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(output, "open", lambda fd, mode, buffering=0: File(fd, mode), raising=False)


FAULTS: dict[str, tuple[Make, str]] = {
    "a full disk": (failing("write", errno.ENOSPC), "No space left on device"),
    "a bad disk": (failing("write", errno.EIO), "Input/output error"),
    "a failing sync": (failing("fsync", errno.EIO), "Input/output error"),
    "a failing close": (failing_close, "Input/output error"),
}


def good_inputs(folder: Path) -> None:
    for name in ("in", "other"):
        (folder / name).write_bytes(SMALL["safetensors" if name == "in-metadata" else "zip"])


def line_of(name: str, folder: Path, *more: str) -> tuple[str, ...]:
    places = {IN: "in", OTHER: "other", OUT: "out"}
    if name == "set-metadata":
        (folder / "in").write_bytes(SMALL["safetensors"])
    return (*(str(folder / places[word]) if word in places else word for word in WRITING[name]), *more)


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    good_inputs(folder)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("in", "other", "out"))


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The commands that write an output of these inputs, and their exit codes."""
    folder = tmp_path_factory.mktemp("able")
    codes = {}
    for name in WRITING:
        emptied(folder)
        done = run_command(line_of(name, folder))
        if (folder / "out").exists() and done.code is not None:
            codes[name] = done.code
    assert len(codes) > 25
    return codes


@pytest.mark.sampled(4, test_all=10_000)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("before", [None, OLD], ids=["new", "replaced"])
def test_a_fault_of_the_disk(
    tmp_path: Path, able: dict[str, int], fault: str, before: bytes | None
) -> None:
    arm, said = FAULTS[fault]
    wrong = []
    for name in able:
        if before is not None and name in FOLDERS:
            continue
        emptied(tmp_path)
        out = tmp_path / "out"
        if before is not None:
            out.write_bytes(before)
        raised: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            arm(patch, raised)
            done = run_command(line_of(name, tmp_path, *(("--force",) if before is not None else ())))
        now = out.read_bytes() if out.is_file() else None
        named = done.stderr.startswith((f"{out}: ", f"{out}/")) and said in done.stderr
        if done.failure or done.code != 2 or not named:
            wrong.append(f"{name}: exit {done.code} {done.failure[-300:]}{done.stderr}")
        elif len(done.stderr.splitlines()) > 2:
            wrong.append(f"{name}: more than an error and a hint: {done.stderr}")
        elif now != before or (out.exists() and before is None) or left(tmp_path) or not raised:
            wrong.append(f"{name}: {raised}, left {left(tmp_path)}, out is {now!r:.40}")
    assert not wrong, "\n".join(wrong)


@contextmanager
def while_written(act: Callable[[], None]) -> Iterator[None]:
    """Do something when the first byte of an output is brought to the disk."""
    real, acted = os.fsync, False

    def fsync(fd: int) -> None:
        nonlocal acted
        real(fd)
        if not acted:
            acted = True
            act()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.mark.parametrize("force", [False, True])
def test_another_writer_is_done_before(tmp_path: Path, able: dict[str, int], force: bool) -> None:
    wrong = []
    for name, code in able.items():
        if name in FOLDERS:
            continue
        emptied(tmp_path)
        out, another = tmp_path / "out", tmp_path / "another"
        if force:
            out.write_bytes(OLD)
        another.write_bytes(b"another's")
        with while_written(lambda: os.replace(another, out)):  # noqa: B023, PTH105
            done = run_command(line_of(name, tmp_path, *(("--force",) if force else ())))
        theirs = out.read_bytes() == b"another's"
        kept = [path for path in left(tmp_path) if "~" not in path]
        if done.failure or kept or (done.code, theirs) != ((code, False) if force else (2, True)):
            wrong.append(f"{name}: exit {done.code}, left {kept}, {theirs=} {done.failure[-300:]}{done.stderr}")
    assert not wrong, "\n".join(wrong)


def replaced(path: Path) -> None:
    other = path.with_name("replacing")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 30)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(30))


def written_to(path: Path) -> None:
    """A byte is another, and the times are put back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {"replaced": replaced, "truncated": shorter, "appended to": longer, "written to": written_to}


def run_while_read(line: tuple[str, ...], path: Path, change: Callable[[Path], None]) -> tuple[Outcome, bool]:
    """The command, whose input changes at its second read; and whether it came to that."""
    inode, count, changed = path.stat().st_ino, 0, False

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(fd: int, *arguments: Any) -> Any:
            nonlocal count, changed
            if os.fstat(fd).st_ino == inode:
                count += 1
                if count == 2:
                    changed = True
                    change(path)
            return real(fd, *arguments)

        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", counted(os.pread))
        patch.setattr(os, "preadv", counted(os.preadv))
        return run_command(line), changed


@pytest.mark.parametrize("how", CHANGES)
def test_the_input_changes_while_it_is_read(tmp_path: Path, able: dict[str, int], how: str) -> None:
    wrong, seen = [], 0
    for name in able:
        emptied(tmp_path)
        done, changed = run_while_read(line_of(name, tmp_path), tmp_path / "in", CHANGES[how])
        seen += changed
        if not changed or name == "repair from it":  # which takes nothing of it
            continue
        if done.failure or done.code != 2 or (tmp_path / "out").exists() or left(tmp_path):
            wrong.append(f"{name}: exit {done.code}, left {left(tmp_path)} {done.failure[-300:]}{done.stderr}")
    assert not wrong, "\n".join(wrong)
    assert seen > 25


READING = {name: line for name, line in COMMANDS.items() if OUT not in line}


@pytest.mark.parametrize("how", CHANGES)
def test_a_reader_whose_input_changes(tmp_path: Path, how: str) -> None:
    """It may have read all before; what it says is no error of its own."""
    wrong = []
    for name, line in READING.items():
        emptied(tmp_path)
        words = tuple({IN: str(tmp_path / "in"), OTHER: str(tmp_path / "other")}.get(word, word) for word in line)
        done, _ = run_while_read(words, tmp_path / "in", CHANGES[how])
        if done.failure or "bug in ckptfix" in done.stderr:
            wrong.append(f"{name}: exit {done.code} {done.failure[-300:]}{done.stderr}")
    assert not wrong, "\n".join(wrong)

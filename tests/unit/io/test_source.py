"""Names are opened in one place, and once by each command."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from file_commands import COMMANDS, small_files
from forks import Forks
from ranges import read_exact

import ckptfix
from ckptfix.checkpoint import ByteRange, OutputFile, Plan
from ckptfix.errors import CkptfixError, DamagedFile, WouldOverwrite, WriteFailed
from ckptfix.io import open_files as io_pool
from ckptfix.io.layers import Memory, WindowSource
from ckptfix.io.read import read_chunks
from ckptfix.io.source import KINDS, LocalFile, forget, open_source, shares_open_files, stamp, threads
from ckptfix.io.write import write_plan
from ckptfix.ops import writing
from ckptfix.ops.audit import audit


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(b"0123456789")
    return str(tmp_path / "file")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were opened."""
    names: list[str] = []

    class Counting(io_pool.OpenFile):
        def __init__(self, name: str) -> None:
            names.append(name)
            super().__init__(name)

    monkeypatch.setattr(io_pool, "OpenFile", Counting)
    return names


def descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(fd.readlink()))
    return found


class TestOpenedOnce:
    def test_every_step_shares_one_descriptor(self, file: str, opened: list[str]) -> None:
        with shares_open_files():
            with open_source(file) as first, open_source(file) as second:
                assert first.fd == second.fd
            with shares_open_files():  # the outermost counts
                assert read_exact(ByteRange(file, 2, 3)) == b"234"
            assert b"".join(read_chunks(ByteRange(file, 0, 10), 4)) == b"0123456789"
            assert file in descriptors()
        assert opened == [file] and file not in descriptors()

    def test_threads_share_it(self, file: str, opened: list[str]) -> None:
        with shares_open_files(), threads(2) as pool:
            read = [pool.submit(read_exact, ByteRange(file, index, 1)) for index in range(10)]
            assert b"".join(each.result() for each in read) == b"0123456789"
        assert opened == [file] and file not in descriptors()

    def test_without_it_nothing_stays_open(self, file: str, opened: list[str]) -> None:
        read_exact(ByteRange(file, 0, 1))
        read_exact(ByteRange(file, 0, 1))
        assert opened == [file, file] and file not in descriptors()

    def test_an_error_closes_all(self, file: str) -> None:
        with suppress(KeyError), shares_open_files():
            read_exact(ByteRange(file, 0, 1))
            raise KeyError
        assert file not in descriptors()

    def test_what_is_in_use_outlives_the_command_and_is_closed_then(self, file: str) -> None:
        with shares_open_files():
            source = open_source(file)
        assert source.read(0, 2) == b"01" and file in descriptors()
        source.close()
        source.close()
        assert file not in descriptors()
        with pytest.raises(ValueError, match="closed"):
            source.read(0, 2)

    def test_threads_that_outlive_the_command_open_for_themselves(self, file: str) -> None:
        with shares_open_files():
            pool = threads(1)
            pool.submit(read_exact, ByteRange(file, 0, 1)).result()
        with pool:
            assert pool.submit(read_exact, ByteRange(file, 0, 1)).result() == b"0"
        assert file not in descriptors()

    def test_few_stay_open(self, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(io_pool, "OPEN_SOURCES", 2)
        names = [str(tmp_path / name) for name in "abc"]
        for name in names:
            Path(name).write_bytes(name.encode())
        a, b, c = names
        with shares_open_files(), open_source(a) as used:
            for name in (b, c, b, a):
                read_exact(ByteRange(name, 0, 1))
            assert c not in descriptors() and {a, b} <= descriptors()
            assert used.read(0, len(a)) == a.encode()
        assert opened == [a, b, c, a] and not {*names} & descriptors()

    def test_what_was_read_first_is_read_to_the_end(self, tmp_path: Path, file: str) -> None:
        (tmp_path / "new").write_bytes(b"abcdefghij")
        with shares_open_files():
            with open_source(file) as source:
                mark = source.mark
            (tmp_path / "new").replace(file)
            assert read_exact(ByteRange(file, 0, 4)) == b"0123"
            assert mark == source.mark and not stamp(file).same(mark)
            forget(file)
            assert read_exact(ByteRange(file, 0, 4)) == b"abcd"

    def test_what_a_command_wrote_is_read_as_it_is_now(self, tmp_path: Path, file: str) -> None:
        dest = str(tmp_path / "dest")
        Path(dest).write_bytes(b"old")
        with shares_open_files():
            assert read_exact(ByteRange(dest, 0, 3)) == b"old"
            write_plan(Plan((OutputFile.of(dest, [ByteRange(file, 0, 10)]),)), overwrite=True)
            assert read_exact(ByteRange(dest, 0, 3)) == b"012"

    def test_a_name_that_cannot_be_opened_can_be_later(self, tmp_path: Path) -> None:
        path = str(tmp_path / "late")
        with shares_open_files():
            with pytest.raises(WriteFailed):
                open_source(path)
            Path(path).write_bytes(b"x")
            assert read_exact(ByteRange(path, 0, 1)) == b"x"

    def test_an_input_that_is_replaced_meanwhile_is_noticed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch_file, _ = small_files(tmp_path)
        other = Path(torch_file).read_bytes()

        def replacing(*arguments: Any) -> object:
            (tmp_path / "other").write_bytes(other)
            (tmp_path / "other").replace(torch_file)
            return audit(*arguments)

        monkeypatch.setattr(writing, "audit", replacing)
        with pytest.raises(DamagedFile, match="changed"):
            ckptfix.strip_module(torch_file, tmp_path / "out.pth")
        assert not (tmp_path / "out.pth").exists() and torch_file not in descriptors()

    def test_a_checkpoint_holds_no_descriptor(self, tmp_path: Path) -> None:
        torch_file, _ = small_files(tmp_path)
        checkpoint = ckptfix.open_checkpoint(torch_file)
        assert torch_file not in descriptors()
        (entry,) = checkpoint.entries
        assert entry.name == "model/module.w" and torch_file not in descriptors()


class TestKinds:
    @pytest.fixture
    def memory(self) -> Iterator[dict[str, bytes]]:
        """Files of the scheme ``mem``."""
        files: dict[str, bytes] = {}
        KINDS["mem"] = lambda name: Memory(files[name], name)
        yield files
        del KINDS["mem"]

    def test_one_row_opens_the_names_of_a_scheme(self, tmp_path: Path, memory: dict[str, bytes]) -> None:
        pytest.importorskip("torch")
        local, _ = small_files(tmp_path)
        memory["mem://it/in.pth"] = Path(local).read_bytes()
        ckptfix.strip_module(local, tmp_path / "a.pth")
        ckptfix.strip_module("mem://it/in.pth", tmp_path / "b.pth")
        assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()
        loaded = ckptfix.load_state_dict("mem://it/in.pth", map_location="cpu")
        assert loaded["w"].tolist() == [0.0, 0.0]
        with pytest.raises(CkptfixError):
            ckptfix.open_checkpoint("mem:/it/in.pth")

    def test_the_disk_is_not_asked_about_the_names_of_a_scheme(
        self, tmp_path: Path, memory: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch = pytest.importorskip("torch")
        memory["mem://it/in.pth"] = Path(small_files(tmp_path)[0]).read_bytes()
        memory["mem://it/cut.pth"] = memory["mem://it/in.pth"][:-30]
        memory["mem://it/other"] = b"<html>"
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "program.pt"))
        memory["mem://it/program.pt"] = (tmp_path / "program.pt").read_bytes()
        places = {str(Path(name)) for name in (*memory, "mem://it", "mem://it/.metadata")}
        for name in ("stat", "lstat", "open", "access", "scandir", "listdir"):
            real = getattr(os, name)

            def asked(path: object, *args: object, real: Callable[..., object] = real, **named: object) -> object:
                assert isinstance(path, int) or str(Path(os.fsdecode(path))) not in places, path  # type: ignore[arg-type]
                return real(path, *args, **named)

            monkeypatch.setattr(os, name, asked)
        healthy = ckptfix.doctor("mem://it/in.pth")
        assert (healthy.exit_code(), healthy.size) == (0, len(memory["mem://it/in.pth"]))
        assert ckptfix.doctor("mem://it/cut.pth").exit_code() == ckptfix.doctor("mem://it/other").exit_code() == 1
        assert ckptfix.doctor("mem://it/program.pt").findings
        ckptfix.extract("mem://it/in.pth", tmp_path / "a.pth")
        ckptfix.extract("mem://it/program.pt", tmp_path / "b.pth")
        ckptfix.repair("mem://it/cut.pth", tmp_path / "c.pth", fill_from="mem://it/in.pth")
        ckptfix.match("mem://it/in.pth", tmp_path / "d.pth", like="mem://it/in.pth")
        for out in "acd":
            assert ckptfix.load_state_dict(tmp_path / f"{out}.pth")["w"].tolist() == [0.0, 0.0]
        with pytest.raises(WouldOverwrite):
            ckptfix.strip_module("mem://it/in.pth", tmp_path / "a.pth")

    def test_any_other_scheme_is_the_beginning_of_a_path(
        self, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("xs3:").mkdir()
        Path(file).rename("xs3:/x")
        with open_source("xs3://x") as source:
            assert isinstance(source, LocalFile) and source.read(0, 1) == b"0"

    def test_a_window_knows_where_it_is(self, file: str) -> None:
        with open_source(file) as source:
            window = WindowSource(WindowSource(source, 2, 100), 3, 2)
            assert (window.read(0, 2), window.base, window.size, window.fd) == (b"56", 5, 2, None)


PROBE = """
import json, os, sys
watched, seen = sys.argv[1], []
def hook(event, arguments):
    if event == "open" and arguments[0] == watched:
        seen.append(arguments)
sys.addaudithook(hook)
from ckptfix.cli import commands
code = commands.main(sys.argv[2:], standalone_mode=False)
left = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == watched]
print(json.dumps([code, len(seen), len(left)]), file=sys.stderr)
"""

READING = sorted(name for name, words in COMMANDS.items() if words[1:2] in (["{torch}"], ["{safetensors}"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", READING)
def test_a_command_opens_its_input_once(program: Forks, tmp_path: Path, name: str) -> None:
    """The file is a zip for most: its pickle, records, directory and checksums are all read."""
    torch_file, safetensors_file = small_files(tmp_path)
    values = {"torch": torch_file, "safetensors": safetensors_file, "out": str(tmp_path / "out")}
    line = [word.format(**values) for word in COMMANDS[name]]
    done = program(PROBE, [os.path.realpath(line[1]), *line])
    code, opens, left = json.loads(done.stderr.splitlines()[-1])
    assert code in (0, 1) and opens == 1 and not left, done.stderr


def test_a_damaged_file_is_opened_once(program: Forks, tmp_path: Path) -> None:
    torch_file, _ = small_files(tmp_path)
    with zipfile.ZipFile(torch_file) as archive:
        end = archive.start_dir
    Path(torch_file).write_bytes(Path(torch_file).read_bytes()[:end])
    done = program(PROBE, [torch_file, "repair", torch_file, str(tmp_path / "out.pth")])
    assert json.loads(done.stderr.splitlines()[-1])[1:] == [1, 0]

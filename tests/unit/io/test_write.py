"""Durable output: modes, links, refusals, and the order of what is done. Faults have a folder of their own."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfix import platform
from ckptfix.checkpoint import ByteRange, Derived, OutputFile, Plan, Segment
from ckptfix.errors import CkptfixError, DamagedFile, Truncated, Unsupported, WouldOverwrite, WriteFailed
from ckptfix.io import copy, durable, system
from ckptfix.io import open_files as io_pool
from ckptfix.io import output as io_output
from ckptfix.io import write as io_write
from ckptfix.io.output import OutputWriter
from ckptfix.io.source import BATCH, stamp
from ckptfix.io.write import check_destination, write_plan

CONTENT = bytes(range(256)) * 1200
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return str(path)


def plan_of(path: str | os.PathLike[str], *segments: Segment) -> Plan:
    return Plan((OutputFile.of(path, segments),))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestContent:
    def test_every_kind_of_segment(self, tmp_path: Path, source: str) -> None:
        derived = Derived(6, lambda: (b"der", b"", b"ved"), "test", (ByteRange(source, 0, 1),))
        segments = (b"head", ByteRange(source, 9, 200_000), derived, ByteRange(source, 0, 10), b"", b"tail")
        write_plan(plan_of(tmp_path / "out", *segments))
        expected = b"head" + CONTENT[9:200_009] + b"derved" + CONTENT[:10] + b"tail"
        assert (tmp_path / "out").read_bytes() == expected
        assert names(tmp_path) == ["out", "source"]

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        write_plan(Plan(()))
        write_plan(plan_of(tmp_path / "empty"))
        assert (tmp_path / "empty").read_bytes() == b""

    def test_a_segment_larger_than_a_batch(self, tmp_path: Path) -> None:
        large = os.urandom(BATCH * 3 + 5)
        write_plan(plan_of(tmp_path / "out", b"x", large, b"y"))
        assert (tmp_path / "out").read_bytes() == b"x" + large + b"y"

    def test_many_sources_with_few_of_them_open(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = []

        class Counting(io_pool.OpenFile):
            def __init__(self, name: str) -> None:
                opened.append(name)
                super().__init__(name)

        monkeypatch.setattr(io_pool, "OpenFile", Counting)
        monkeypatch.setattr(io_pool, "OPEN_SOURCES", 3)
        segments: list[Segment] = []
        for number in range(8):
            (tmp_path / str(number)).write_bytes(bytes([number]) * 100)
            segments += [ByteRange(str(tmp_path / str(number)), 0, 10), b"-"]
        segments += [ByteRange(str(tmp_path / "7"), 5, 10), b"-", ByteRange(str(tmp_path / "0"), 5, 10)]
        write_plan(plan_of(tmp_path / "out", *segments))
        expected = b"".join(bytes([number]) * 10 + b"-" for number in (*range(8), 7)) + bytes(10)
        assert (tmp_path / "out").read_bytes() == expected
        assert [Path(path).name for path in opened] == [*"01234567", "0"]

    def test_progress_ends_at_the_total(self, tmp_path: Path, source: str) -> None:
        calls: list[tuple[int, int]] = []
        files = (
            OutputFile.of(tmp_path / "a", [b"1234", ByteRange(source, 0, 200_000)]),
            OutputFile.of(tmp_path / "b", [Derived(3, lambda: (b"abc",))]),
        )
        write_plan(Plan(files), progress=lambda done, total: calls.append((done, total)))
        assert calls[-1] == (200_007, 200_007)
        assert calls == sorted(calls)

    def test_a_derived_stream_that_breaks_its_promise(self, tmp_path: Path) -> None:
        with pytest.raises(DamagedFile):
            write_plan(plan_of(tmp_path / "out", Derived(5, lambda: (b"abc",))))
        assert names(tmp_path) == []

    def test_a_file_of_another_size_than_its_plan(self, tmp_path: Path) -> None:
        with pytest.raises(WriteFailed, match="5 bytes were written, but 3 arrived"):
            write_plan(Plan((OutputFile(str(tmp_path / "out"), (b"abc",), 5),)))
        assert names(tmp_path) == []

    def test_a_range_beyond_its_file_is_found_before_anything_is_written(
        self, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(io_output.OutputWriter, "write", lambda *arguments: pytest.fail("began to write"))
        with pytest.raises(Truncated) as caught:
            write_plan(plan_of(tmp_path / "out", b"head", ByteRange(source, 100, len(CONTENT))))
        assert (caught.value.path, caught.value.offset) == (source, 100)

    def test_a_missing_source(self, tmp_path: Path) -> None:
        with pytest.raises(WriteFailed) as caught:
            write_plan(plan_of(tmp_path / "out", ByteRange(str(tmp_path / "none"), 0, 1)))
        assert caught.value.path == str(tmp_path / "none")


class TestDestination:
    def test_an_existing_file_needs_overwrite(self, tmp_path: Path) -> None:
        dest = tmp_path / "out"
        dest.write_bytes(b"old")
        with pytest.raises(WouldOverwrite) as caught:
            write_plan(plan_of(dest, b"new"))
        assert "--force" in str(caught.value.hint)
        assert dest.read_bytes() == b"old"
        write_plan(plan_of(dest, b"new"), overwrite=True)
        assert dest.read_bytes() == b"new"

    @pytest.mark.parametrize("how", ["name", "other spelling", "symlink", "hard link"])
    def test_the_input_is_refused_even_with_overwrite(
        self, tmp_path: Path, source: str, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        dest = {"name": source, "other spelling": "./source"}.get(how, "link")
        if how == "symlink":
            Path(dest).symlink_to(source)
        elif how == "hard link":
            Path(dest).hardlink_to(source)
        with pytest.raises(WouldOverwrite, match="the output is the input"):
            check_destination(dest, [source], overwrite=True)
        with pytest.raises(WouldOverwrite, match="the output is the input"):
            write_plan(plan_of(dest, ByteRange(source, 0, 5)), overwrite=True)
        assert Path(source).read_bytes() == CONTENT

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(Unsupported, match="is a folder"):
            check_destination(tmp_path, overwrite=True)

    @pytest.mark.parametrize("name", ["new/", "", "."])
    def test_no_file_name(self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(Unsupported):
            check_destination(name, overwrite=True)

    def test_a_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(Unsupported, match="is a pipe"):
            check_destination(tmp_path / "fifo", overwrite=True)

    def test_a_device(self) -> None:
        with pytest.raises(Unsupported, match="is a device"):
            check_destination(os.devnull, overwrite=True)

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(WriteFailed, match="folder does not exist") as caught:
            check_destination(tmp_path / "none" / "out", overwrite=False)
        assert caught.value.hint == f"mkdir -p {tmp_path / 'none'}"

    def test_a_file_where_a_folder_should_be(self, tmp_path: Path, source: str) -> None:
        with pytest.raises(WriteFailed, match="Not a directory"):
            check_destination(source + "/out", overwrite=False)

    @pytest.mark.skipif(ROOT, reason="root may write anywhere")
    def test_a_folder_without_permission(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        try:
            with pytest.raises(WriteFailed, match="cannot be written"):
                check_destination(tmp_path / "out", overwrite=False)
        finally:
            tmp_path.chmod(0o700)

    def test_a_loop_of_links(self, tmp_path: Path) -> None:
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(CkptfixError):
            check_destination(tmp_path / "loop", overwrite=True)

    def test_a_symlink_stays_and_its_target_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        target = tmp_path / "there" / "target"
        target.write_bytes(b"old")
        link = tmp_path / "link"
        link.symlink_to("there/target")
        write_plan(plan_of(link, b"new"), overwrite=True)
        assert link.is_symlink()
        assert target.read_bytes() == b"new"
        assert names(tmp_path / "there") == ["target"]

    def test_a_dangling_symlink_gets_its_target(self, tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to("target")
        write_plan(plan_of(link, b"new"))
        assert link.is_symlink()
        assert (tmp_path / "target").read_bytes() == b"new"

    def test_two_outputs_of_one_name(self, tmp_path: Path) -> None:
        files = (OutputFile.of(tmp_path / "a", [b"1"]), OutputFile.of(f"{tmp_path}/./a", [b"2"]))
        with pytest.raises(WouldOverwrite, match="twice"):
            write_plan(Plan(files))
        assert names(tmp_path) == []

    @pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, os.fsdecode(b"\xff\xfe\x80")])
    def test_names_that_are_long_or_no_text(self, tmp_path: Path, name: str) -> None:
        try:
            (tmp_path / name).touch()
        except OSError:
            pytest.skip("the file system does not take such names")
        write_plan(plan_of(tmp_path / name, b"new"), overwrite=True)
        assert (tmp_path / name).read_bytes() == b"new"
        assert names(tmp_path) == [name]


class TestMode:
    @pytest.fixture
    def umask(self) -> Iterator[int]:
        before = os.umask(0o027)
        yield 0o027
        os.umask(before)

    def test_a_new_file_has_what_the_umask_gives(self, tmp_path: Path, umask: int) -> None:
        write_plan(plan_of(tmp_path / "out", b"new"))
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o666 & ~umask

    @pytest.mark.parametrize("mode", [0o400, 0o664, 0o755])
    def test_a_replaced_file_gives_its_mode(self, tmp_path: Path, mode: int, umask: int) -> None:
        dest = tmp_path / "out"
        dest.touch()
        dest.chmod(mode)
        write_plan(plan_of(dest, b"new"), overwrite=True)
        assert stat.S_IMODE(dest.stat().st_mode) == mode

    @pytest.mark.skipif(not ROOT, reason="only root can give files away")
    def test_a_replaced_file_gives_its_owner(self, tmp_path: Path) -> None:
        dest = tmp_path / "out"
        dest.touch()
        os.chown(dest, 12345, 23456)
        write_plan(plan_of(dest, b"new"), overwrite=True)
        assert (dest.stat().st_uid, dest.stat().st_gid) == (12345, 23456)

    def test_nobody_else_can_read_the_temp_file(self, tmp_path: Path) -> None:
        seen = []

        def look() -> Iterator[bytes]:
            (temp,) = tmp_path.iterdir()
            seen.append((temp.name, stat.S_IMODE(temp.stat().st_mode)))
            yield b"abc"

        write_plan(plan_of(tmp_path / "model.pth", Derived(3, look)))
        ((name, mode),) = seen
        assert mode == 0o600
        assert name.startswith(".model.pth.")
        assert name.endswith(".ckptfix-tmp")

    def test_a_link_in_the_way_of_the_temp_file_is_not_followed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "urandom", bytes)
        victim = tmp_path / "victim"
        victim.write_bytes(b"precious")
        (tmp_path / f".out.{'00' * 8}.ckptfix-tmp").symlink_to(victim)
        with pytest.raises(WriteFailed, match="File exists"):
            write_plan(plan_of(tmp_path / "out", b"new"))
        assert victim.read_bytes() == b"precious"
        assert not (tmp_path / "out").exists()


class TestMeanwhile:
    """What others do to the files between the first byte and the last."""

    def write_while(self, dest: Path, source: str, act: Any, *, overwrite: bool = False) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"abc"
            act()
            yield b"def"

        plan = plan_of(dest, ByteRange(source, 0, 200_000), Derived(6, chunks), ByteRange(source, 0, 10))
        write_plan(plan, overwrite=overwrite)

    @pytest.mark.parametrize("how", ["grown", "same size", "mtime put back", "replaced", "gone"])
    def test_a_source_that_changes(self, tmp_path: Path, source: str, how: str) -> None:
        def act() -> None:
            if how == "grown":
                with open(source, "ab") as file:
                    file.write(b"x")
            elif how == "same size":
                Path(source).write_bytes(CONTENT[::-1])
                os.utime(source, ns=(0, Path(source).stat().st_mtime_ns + 1))
            elif how == "mtime put back":
                before = Path(source).stat().st_mtime_ns
                Path(source).write_bytes(CONTENT[::-1])
                os.utime(source, ns=(before, before))
            elif how == "replaced":
                stamp = Path(source).stat().st_mtime_ns
                (tmp_path / "copy").write_bytes(CONTENT)
                os.utime(tmp_path / "copy", ns=(stamp, stamp))
                (tmp_path / "copy").replace(source)
            else:
                Path(source).unlink()

        message = "No such file" if how == "gone" else "changed while it was being read"
        (tmp_path / "out").write_bytes(b"old")
        with pytest.raises(WriteFailed, match=message) as caught:
            self.write_while(tmp_path / "out", source, act, overwrite=True)
        assert caught.value.path == source
        assert (tmp_path / "out").read_bytes() == b"old"
        assert [name for name in names(tmp_path) if "ckptfix" in name] == []

    @pytest.mark.parametrize("how", ["made", "gone"])
    def test_a_link_to_a_source_is_no_change(self, tmp_path: Path, source: str, how: str) -> None:
        """A link changes the ctime: one of ours, to what is kept, or one of a backup by links."""
        link = tmp_path / "link"
        if how == "gone":
            link.hardlink_to(source)
        self.write_while(tmp_path / "out", source, lambda: link.hardlink_to(source) if how == "made" else link.unlink())
        assert (tmp_path / "out").stat().st_size == 200_016

    def test_a_source_that_changed_before_the_plan_was_written(self, tmp_path: Path, source: str) -> None:
        before = stamp(source)
        Path(source).write_bytes(CONTENT[::-1])
        os.utime(source, ns=(before.mtime_ns, before.mtime_ns))
        with pytest.raises(WriteFailed, match="changed"):
            write_plan(plan_of(tmp_path / "out", ByteRange(source, 0, 9)), inputs={source: before})
        assert names(tmp_path) == ["source"]

    def test_a_source_that_only_a_derived_stream_reads(self, tmp_path: Path, source: str) -> None:
        def chunks() -> Iterator[bytes]:
            os.utime(source, ns=(0, 0))
            yield b"abc"

        with pytest.raises(WriteFailed, match="changed"):
            write_plan(plan_of(tmp_path / "out", Derived(3, chunks, "", (ByteRange(source, 0, 3),))))
        assert names(tmp_path) == ["source"]

    def test_a_destination_that_appears(self, tmp_path: Path, source: str) -> None:
        dest = tmp_path / "out"
        with pytest.raises(WouldOverwrite, match="appeared while"):
            self.write_while(dest, source, lambda: dest.write_bytes(b"theirs"))
        assert dest.read_bytes() == b"theirs"
        assert names(tmp_path) == ["out", "source"]

    @pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
    @pytest.mark.parametrize("appears", [True, False])
    def test_where_there_are_no_hard_links(
        self, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, number: int, appears: bool
    ) -> None:
        def link(*arguments: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", link)
        dest = tmp_path / "out"
        if appears:
            with pytest.raises(WouldOverwrite):
                self.write_while(dest, source, lambda: dest.write_bytes(b"theirs"))
            assert dest.read_bytes() == b"theirs"
        else:
            self.write_while(dest, source, lambda: None)
            assert dest.stat().st_size == 200_016
        assert names(tmp_path) == ["out", "source"]

    @pytest.mark.parametrize("overwrite", [True, False])
    def test_eight_writers_of_one_file(self, tmp_path: Path, overwrite: bool) -> None:
        outcomes: list[str] = []
        dest = tmp_path / "out"
        contents = [bytes([number]) * 300_000 for number in range(8)]
        start = threading.Barrier(8)

        def write(content: bytes) -> None:
            start.wait()
            try:
                write_plan(plan_of(dest, content[:10], content[10:]), overwrite=overwrite)
                outcomes.append("written")
            except WouldOverwrite:
                outcomes.append("refused")

        threads = [threading.Thread(target=write, args=(content,)) for content in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert dest.read_bytes() in contents
        assert outcomes.count("written") == (8 if overwrite else 1)
        assert len(outcomes) == 8
        assert names(tmp_path) == ["out"]


class TestSignals:
    @pytest.mark.parametrize("before", [True, False])
    def test_one_that_comes_as_the_cleanup_begins_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
    ) -> None:
        real = durable.persist
        calls: list[object] = []

        def interrupted(clean_up: Callable[[], None]) -> None:
            calls.append(clean_up)
            if len(calls) > 1 or not before:
                real(clean_up)
            if len(calls) == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(io_write, "persist", interrupted)
        names = [tmp_path / "one", tmp_path / "two"]
        for name in names:
            name.write_bytes(b"old")
        with pytest.raises(KeyboardInterrupt):
            write_plan(Plan(tuple(OutputFile.of(name, [b"new"]) for name in names)), overwrite=True)
        assert sorted(tmp_path.iterdir()) == names
        assert [name.read_bytes() for name in names] == [b"new", b"new"]


class TestSpace:
    def test_a_full_disk_is_reported_before_the_first_byte(
        self, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(io_write, "free_space", lambda folder: 299_999)
        monkeypatch.setattr(system, "free_space", lambda folder: 299_999)
        monkeypatch.setattr(io_output.OutputWriter, "write", lambda *arguments: pytest.fail("began to write"))
        with pytest.raises(WriteFailed, match="No space left") as caught:
            write_plan(plan_of(tmp_path / "out", ByteRange(source, 0, 300_000)))
        assert caught.value.path == str(tmp_path / "out")
        assert str(caught.value.hint).startswith("300,000 bytes are needed, 299,999 are free")

    def test_all_files_of_a_plan_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(io_write, "free_space", lambda folder: 150)
        files = tuple(OutputFile.of(tmp_path / name, [bytes(100)]) for name in "ab")
        with pytest.raises(WriteFailed):
            write_plan(Plan(files))
        assert names(tmp_path) == []

    def test_a_file_system_that_does_not_say(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(io_write, "free_space", lambda folder: None)
        write_plan(plan_of(tmp_path / "out", b"new"))
        assert (tmp_path / "out").read_bytes() == b"new"


class TestOrder:
    """What reaches the disk before what, as a power cut would see it."""

    @pytest.fixture
    def log(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Names of the calls and of the files they are for, without the random part."""
        calls: list[str] = []

        def record(name: str, real: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                path = Path(f"/proc/self/fd/{arguments[0]}").readlink() if name == "fsync" else Path(arguments[0])
                where = "folder" if path.is_dir() else path.name
                where = f"temp {where.split('.')[1]}" if where.endswith(".ckptfix-tmp") else where
                calls.append(f"{name} {where}")
                return real(*arguments, **options)

            return call

        if not Path("/proc/self/fd").is_dir():
            pytest.skip("no /proc")
        for name in ("fsync", "link", "replace"):
            monkeypatch.setattr(os, name, record(name, getattr(os, name)))
        return calls

    def test_a_new_file(self, tmp_path: Path, log: list[str]) -> None:
        write_plan(plan_of(tmp_path / "out", b"new"))
        assert log == ["fsync temp out", "link temp out", "fsync folder"]

    def test_a_replaced_file(self, tmp_path: Path, log: list[str]) -> None:
        (tmp_path / "out").touch()
        write_plan(plan_of(tmp_path / "out", b"new"), overwrite=True)
        assert log == ["fsync temp out", "replace temp out", "fsync folder"]

    def test_an_index_comes_last(self, tmp_path: Path, log: list[str]) -> None:
        files = tuple(OutputFile.of(tmp_path / name, [b"new"]) for name in ("one", "two", "index"))
        write_plan(Plan(files))
        assert log == [
            "fsync temp one",
            "fsync temp two",
            "fsync temp index",
            "link temp one",
            "link temp two",
            "fsync folder",
            "link temp index",
            "fsync folder",
        ]

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
    def test_a_folder_that_can_not_be_synced_is_no_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        fsync = os.fsync

        def unsupported(fd: int) -> None:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", unsupported)
        write_plan(plan_of(tmp_path / "out", b"new"))
        assert (tmp_path / "out").read_bytes() == b"new"

    def test_a_failed_sync_is_not_tried_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        def fsync(fd: int) -> None:
            calls.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(WriteFailed, match="Input/output error"):
            write_plan(plan_of(tmp_path / "out", b"new"))
        assert len(calls) == 1
        assert names(tmp_path) == []

    def test_syncing_begins_while_the_file_grows(
        self, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(io_output, "SYNC_EVERY", 50_000)
        monkeypatch.setattr(copy, "BATCH", 10_000)
        sizes = []
        threads = threading.active_count()
        monkeypatch.setattr(platform, "sync_data", lambda fd: sizes.append(os.fstat(fd).st_size))
        write_plan(plan_of(tmp_path / "out", *[bytes(10_000)] * 30))
        assert sizes
        assert 50_000 <= sizes[0] <= 300_000
        assert threading.active_count() == threads

    def test_a_sync_that_fails_in_the_background_is_final(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(io_output, "SYNC_EVERY", 50_000)
        monkeypatch.setattr(copy, "BATCH", 10_000)
        monkeypatch.setattr(platform, "sync_data", failing)
        monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("synced again"))
        for count in (5, 30):  # the failure is seen at the end, or at the next write
            with pytest.raises(WriteFailed, match="Input/output error") as caught:
                write_plan(plan_of(tmp_path / "out", *[bytes(10_000)] * count))
            assert caught.value.path == str(tmp_path / "out")
            assert names(tmp_path) == []


@pytest.mark.parametrize("kept", [False, True])
def test_where_undoing_fails_too_the_old_file_is_named(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The second of two files cannot get its name, nor the first its old content."""
    for name in "ab":
        (tmp_path / name).write_bytes(b"old")
    plan = Plan(tuple(OutputFile.of(tmp_path / name, [b"new"]) for name in "ab"))
    real = OutputWriter.publish

    def publish(self: OutputWriter, overwrite: bool) -> None:
        if self.dest.endswith("b"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(self, overwrite)

    def restore(self: OutputWriter) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(OutputWriter, "publish", publish)
    monkeypatch.setattr(OutputWriter, "restore", restore)
    with pytest.raises(WriteFailed) as caught:
        write_plan(plan, overwrite=True, keep_old=(lambda path: True) if kept else None)
    assert f"{tmp_path / 'a'} is already the new file, and the old one could not be restored" in caught.value.message
    assert (tmp_path / "a").read_bytes() == b"new" and (tmp_path / "b").read_bytes() == b"old"
    (old,) = (path for path in tmp_path.iterdir() if path.name not in ("a", "b", "source", "b.~1~"))
    assert old.read_bytes() == b"old" and old.name in caught.value.message

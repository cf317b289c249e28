"""Several ranks that write one folder: threads here, which share a dictionary."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptfix.checkpoint import ByteRange, OutputFile, Plan, RangeCheck
from ckptfix.checkpoint.byte_ranges import Derived
from ckptfix.errors import CkptfixError, DamagedFile, Refused, WouldOverwrite
from ckptfix.io import folders, ranks
from ckptfix.io.crc import checksum
from ckptfix.io.folders import write_folder
from ckptfix.io.ranks import RankFailed, Team, Watching, joined
from ckptfix.io.ranks.shares import digest, shares
from ckptfix.io.write import write_plan


class Shared:
    """A store in memory, as torch's TCPStore is used."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self.lock:
            return self.values[key]

    def check(self, keys: list[str]) -> bool:
        with self.lock:
            return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            found = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(found).encode()
            return found


def heard_until(monkeypatch: pytest.MonkeyPatch, rank: int) -> threading.Event:
    """Let no rank count as silent but this one, and only after the event that is returned.

    A busy machine may hold the thread of any other for longer than a test wants to wait.
    """
    ended, listen = threading.Event(), Team.listen

    def listened(team: Team, asked: int) -> None:
        if asked == rank and ended.is_set():
            listen(team, asked)

    monkeypatch.setattr(Team, "listen", listened)
    return ended


Outcome = str | None | BaseException
Together = Callable[..., list[Outcome]]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    """Does a call in each of `size` ranks; what it returned or raised. A busy machine may hold a thread for seconds."""
    monkeypatch.setattr(ranks, "BEAT", 0.02)
    monkeypatch.setattr(ranks, "POLL", 0.005)
    monkeypatch.setattr(ranks, "PATIENCE", 60)

    def run(
        size: int, call: Callable[[int], Outcome], store: Shared | None = None, timeout: float = 60
    ) -> list[Outcome]:
        store = store or Shared()

        def one(rank: int) -> Outcome:
            team = Team(store, rank, size, timeout)
            try:
                with joined(team):
                    return call(rank)
            except BaseException as error:
                return error
            finally:
                team.end()

        with ThreadPoolExecutor(size) as pool:
            return [*pool.map(one, range(size))]

    return run


@pytest.fixture(autouse=True)
def source(tmp_path: Path) -> Path:
    """What all outputs are made of."""
    path = tmp_path / "source"
    path.write_bytes(bytes(range(256)) * 4)
    return path


def planned(folder: Path, dest: Path, sizes: tuple[int, ...] = (70, 10, 30, 20, 40)) -> Plan:
    """Ranges of one input, and an index of literal bytes; each range has a check."""
    source = folder / "source"
    files, checks, at = [], [], 0
    for number, size in enumerate(sizes):
        where = ByteRange(str(source), at, size)
        files.append(OutputFile.of(dest / f"part{number}", [b"head", where]))
        checks.append(RangeCheck(str(number), where, checksum(source.read_bytes()[at : at + size])))
        at += size
    files.append(OutputFile.of(dest / "index", [b"the index"]))
    return Plan(tuple(files), checks=tuple(checks))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_the_bytes_are_equal_whoever_writes(tmp_path: Path, together: Together, size: int) -> None:
    write_folder(planned(tmp_path, tmp_path / "alone"), str(tmp_path / "alone"))
    dest = tmp_path / "out"
    done = together(size, lambda rank: write_folder(planned(tmp_path, dest), str(dest)))
    assert done == [None] * size
    assert content(dest) == content(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out", "source"]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_shares_are_of_equal_bytes_and_all_of_it(tmp_path: Path, size: int) -> None:
    plan = planned(tmp_path, tmp_path / "out")
    parts = shares(plan, size)
    assert len(parts) == size
    assert {file.path for part in parts for file in part.files} == {file.path for file in plan.files[:-1]}
    assert sum(len(part.checks) for part in parts) == len(plan.checks)
    if size < 4:
        assert max(part.nbytes for part in parts) <= max(-(-plan.nbytes // size) + 20, 74)
    for part in parts:
        copied = {segment for file in part.files for segment in file.segments}
        assert all(check.data in copied for check in part.checks)


def test_the_index_comes_last(tmp_path: Path, together: Together) -> None:
    """A rank that is slow: the index is not there while it writes, nor is the folder."""
    dest = tmp_path / "out"
    seen = []

    def slow() -> Iterator[bytes]:
        (temp,) = tmp_path.glob(".out.*.ckptfix-tmp")
        threading.Event().wait(0.2)
        seen.append((dest.exists(), (temp / "index").exists()))
        yield b"slow"

    def write(rank: int) -> Outcome:
        plan = planned(tmp_path, dest)
        files = (OutputFile(str(dest / "slow"), (Derived(4, slow),), 4), *plan.files)
        return write_folder(Plan(files), str(dest))

    assert together(2, write) == [None, None]
    assert seen == [(False, False)]
    assert (dest / "slow").read_bytes() == b"slow"


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("before", [False, True])
def test_a_rank_that_fails_takes_all_down(
    tmp_path: Path, together: Together, failing: int, before: bool
) -> None:
    dest = tmp_path / "out"
    if before:
        dest.mkdir()
        (dest / "old").write_bytes(b"old")

    def full() -> Iterator[bytes]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(rank: int) -> Outcome:
        plan = planned(tmp_path, dest, (50, 50, 50))
        if rank == failing:
            mine = {file.path for file in shares(plan, 3)[rank].files}
            files = [
                OutputFile(file.path, (b"head", Derived(50, full)), file.nbytes) if file.path in mine else file
                for file in plan.files
            ]
            ranks_digest = digest(plan, str(dest), {})
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ckptfix.io.folders.digest", lambda *args: ranks_digest)
                return write_folder(Plan(tuple(files)), str(dest), overwrite=True)
        return write_folder(plan, str(dest), overwrite=True)

    done = together(3, write)
    assert all(isinstance(one, CkptfixError) for one in done), done
    assert getattr(done[failing], "errno", None) == errno.ENOSPC
    others = [one for rank, one in enumerate(done) if rank != failing]
    assert all(isinstance(one, RankFailed) and one.said and "No space" in str(one) for one in others)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out", "source"] if before else ["source"])
    if before:
        assert content(dest) == {"old": b"old"}


@pytest.mark.slow
@pytest.mark.parametrize("slow", [1, 2])
@pytest.mark.parametrize("folder", ["", "below"])
@pytest.mark.parametrize("where", ["before it writes", "in what it writes", "when all is written"])
def test_a_rank_that_nobody_waited_for_says_what_failed(
    tmp_path: Path, together: Together, monkeypatch: pytest.MonkeyPatch, slow: int, where: str, folder: str
) -> None:
    """The folder that it writes in was taken away: that is not what failed, and it does not come back."""
    monkeypatch.setattr(ranks, "PATIENCE", 0.2)
    dest = tmp_path / "out"
    given_up = threading.Event()

    def full() -> Iterator[bytes]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def late() -> Iterator[bytes]:
        assert where != "in what it writes" or given_up.wait(60)
        yield bytes(50)

    def step(done: int, total: int) -> None:
        assert where != "when all is written" or done < total or given_up.wait(60)

    def placed(plan: Plan, *args: Any) -> Plan:
        mine = any(file.path == str(dest / folder / f"{slow}") for file in plan.files)
        assert where != "before it writes" or not mine or given_up.wait(60)
        return place(plan, *args)

    place = folders._placed
    monkeypatch.setattr(folders, "_placed", placed)

    def write(rank: int) -> Outcome:
        contents = {0: full, slow: late}
        files = [
            OutputFile(str(dest / folder / f"{number}"), (Derived(50, contents.get(number, lambda: [bytes(50)])),), 50)
            for number in range(3)
        ]
        plan = Plan((*files, OutputFile.of(dest / "index", [b"the index"])))
        try:
            return write_folder(plan, str(dest), progress=step if rank == slow else None)
        finally:
            if rank == 0:
                assert [*tmp_path.glob(".out.*")] == []
                given_up.set()

    done = together(3, write)
    assert getattr(done[0], "errno", None) == errno.ENOSPC
    assert all(isinstance(one, RankFailed) and one.said and "No space" in str(one) for one in done[1:]), done
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_is_silent_takes_all_down(
    tmp_path: Path, together: Together, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    dest = tmp_path / "out"
    ended = heard_until(monkeypatch, gone)

    def write(rank: int) -> Outcome:
        if rank == gone:
            team = ranks.current()
            assert team is not None
            team.end()  # it says no more
            ended.set()
            return None
        return write_folder(planned(tmp_path, dest), str(dest))

    monkeypatch.setattr(ranks, "PATIENCE", 0.5)
    done = together(3, write, timeout=0.3)
    failed = [one for rank, one in enumerate(done) if rank != gone]
    assert all(isinstance(one, RankFailed) and f"rank {gone} of 3 is gone" in str(one) for one in failed), done
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_what_rank_0_left_is_taken_away(
    tmp_path: Path, together: Together, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """It is killed with a folder begun, or when that has its name already: then the folder is whole, and stays."""
    dest = tmp_path / "out"
    ended = heard_until(monkeypatch, 0)

    def write(rank: int) -> Outcome:
        if rank:
            return write_folder(planned(tmp_path, dest), str(dest))
        team = ranks.current()
        assert team is not None
        word = team.folder()
        team.agree(f"{word}/plan", digest(planned(tmp_path, dest), str(dest), {}))
        temp = tmp_path / ".out.1.ckptfix-tmp"
        temp.mkdir()
        team.told(f"{word}/temp", lambda: temp.name)
        for number in range(1, team.size):
            team.wait(f"{word}/written/{number}", number)
        if named:
            temp.rename(dest)
        team.end()
        ended.set()
        return None

    monkeypatch.setattr(ranks, "PATIENCE", 0.5)
    done = together(3, write, timeout=0.3)[1:]
    assert all(isinstance(one, RankFailed) and "rank 0 of 3 is gone" in str(one) for one in done), done
    assert all(("is complete" in str(getattr(one, "hint", ""))) is named for one in done)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out", "source"] if named else ["source"])


def test_a_store_that_was_used_before(tmp_path: Path, together: Together) -> None:
    """A launcher that starts all again, or a script of several commands: what was said before counts no more."""
    store, dest = Shared(), tmp_path / "out"
    failed = together(2, lambda rank: write_folder(planned(tmp_path, dest, (10, 20 + rank)), str(dest)), store)
    assert all(isinstance(one, CkptfixError) for one in failed)
    assert together(2, lambda rank: write_folder(planned(tmp_path, dest), str(dest)), store) == [None, None]


def test_ranks_that_plan_other_things_are_refused(tmp_path: Path, together: Together) -> None:
    dest = tmp_path / "out"
    done = together(2, lambda rank: write_folder(planned(tmp_path, dest, (10, 20 + rank)), str(dest)))
    assert isinstance(done[1], Refused) and "plans a different output" in str(done[1])
    assert isinstance(done[0], RankFailed)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_damaged_input_is_seen_by_whoever_copies_it(tmp_path: Path, together: Together) -> None:
    dest = tmp_path / "out"

    def write(rank: int) -> Outcome:
        plan = planned(tmp_path, dest)
        wrong = RangeCheck("3", plan.checks[3].data, 1)
        return write_folder(Plan(plan.files, checks=(*plan.checks[:3], wrong)), str(dest))

    done = together(4, write)
    assert sum(isinstance(one, DamagedFile) for one in done) == 1
    assert sum(isinstance(one, RankFailed) for one in done) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_output_that_exists_is_refused_and_replaced(tmp_path: Path, together: Together) -> None:
    dest = tmp_path / "out"
    dest.mkdir()
    (dest / "old").write_bytes(b"old")
    done = together(2, lambda rank: write_folder(planned(tmp_path, dest), str(dest)))
    assert isinstance(done[0], WouldOverwrite) and isinstance(done[1], RankFailed)
    kept = together(2, lambda rank: write_folder(planned(tmp_path, dest), str(dest), overwrite=True, keep_old=True))
    assert kept == [f"{dest}.~1~"] * 2
    assert content(tmp_path / "out.~1~") == {"old": b"old"}


def test_one_file_is_written_by_rank_0(tmp_path: Path, together: Together) -> None:
    dest = tmp_path / "out"

    def write(rank: int) -> Outcome:
        write_plan(Plan((OutputFile.of(dest, [b"file"]),)))
        return None

    first, second = together(2, write)
    assert first is None and isinstance(second, Watching)
    assert dest.read_bytes() == b"file"


def test_a_process_alone_is_no_team() -> None:
    assert ranks.current() is None

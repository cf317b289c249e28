"""A folder in a bucket by several ranks: all of it under its names, the index last, or nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from stores import Bucket
from unit.io.test_ranks import Shared, heard_until

from ckptfix.checkpoint import ByteRange, OutputFile, Plan
from ckptfix.checkpoint.byte_ranges import Derived
from ckptfix.errors import WouldOverwrite, WriteFailed
from ckptfix.io import ranks
from ckptfix.io.background_checks import Checking
from ckptfix.io.folders import write_folder
from ckptfix.io.ranks import RankFailed, Team, joined
from ckptfix.io.ranks.shares import shares
from ckptfix.io.remote import rank_folder, s3
from ckptfix.io.remote.rank_folder import _Ranks, take_away
from ckptfix.io.remote.store import Trace
from ckptfix.io.remote.upload import Uploader

pytest.importorskip("botocore", reason="s3fs or boto3 is not installed")
pytestmark = pytest.mark.xdist_group("stores")


def planned(source: Path, dest: str, full: int | None = None) -> Plan:
    """Four ranges of a file, and an index; the file number `full` cannot be made."""

    def chunks() -> Iterator[bytes]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = [OutputFile.of(f"{dest}/part{at}", [b"head", ByteRange(str(source), 10 * at, 10 + at)]) for at in range(4)]
    if full is not None:
        derived = Derived(files[full].nbytes, chunks)
        files[full] = OutputFile(files[full].path, (derived,), files[full].nbytes)
    return Plan((*files, OutputFile.of(f"{dest}/index", [b"the index"])))


SMALL, LARGE = 4, 6 << 20


@pytest.mark.slow
@pytest.mark.sampled(2, test_all=4)
@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("named", [False, True])
def test_what_a_killed_rank_left_is_taken_away(
    bucket: Bucket, source: Path, monkeypatch: pytest.MonkeyPatch, size: int, named: bool, heard: bool
) -> None:
    """Its uploads, and the objects that it gave their names; an object that is another's stays."""
    if not heard and (named or bucket.kind == "localbucket"):
        pytest.skip("the store of the ranks is gone, and the bucket lists no uploads")
    dest = bucket.url("out")
    files = [OutputFile.of(f"{dest}/part{at}", [bytes([at]) * size]) for at in range(4)]
    plan = Plan((*files, OutputFile.of(f"{dest}/index", [b"the index"])))
    store = Shared()
    ended = heard_until(monkeypatch, 1)

    def killed() -> None:
        team = Team(store, 1, 2, timeout=1)
        word = team.folder()
        steps = _Ranks(team, word)
        for file in shares(plan, 2)[1].files:
            output = Uploader(file, {}, overwrite=False, began=steps.began)
            output.write(lambda count: None, Checking(Plan(())))
            if named:
                output.publish()
        team.say(f"{word}/up/1")
        team.end()
        if not heard:
            monkeypatch.setattr(Shared, "check", _gone)
        ended.set()

    monkeypatch.setattr(rank_folder, "CLOCKS", timedelta(days=36_500))  # moto says that every upload began in 2010
    with ThreadPoolExecutor(1) as pool:
        team = Team(store, 0, 2, timeout=0.3)
        with joined(team):
            alone = pool.submit(killed)
            with pytest.raises(RankFailed, match=r"rank [01].* is gone"):
                write_folder(plan, dest)
        alone.result()
        if not heard:
            take_away(team, "folder1", 1, shares(plan, 2)[1].files)
        team.end()
    assert not bucket.below("out/") and not bucket.uploads()


def _gone(*_: object) -> bool:
    raise ConnectionError


def test_an_upload_whose_id_was_never_reported(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank was killed while the bucket created it."""
    if bucket.kind == "localbucket":
        pytest.skip("this bucket lists no uploads")
    monkeypatch.setattr(rank_folder, "CLOCKS", timedelta(days=36_500))
    file = OutputFile.of(bucket.url("out/part"), [bytes(LARGE)])
    store = Shared()
    killed, left = Team(store, 1, 2, timeout=1), Team(store, 0, 2, timeout=1)
    word = killed.folder()
    steps = _Ranks(killed, word)

    def began(trace: Trace) -> None:
        if trace["upload"] is None:
            steps.began(trace)

    output = Uploader(file, {}, overwrite=False, began=began)
    output.write(lambda count: None, Checking(Plan(())))
    assert bucket.uploads()
    take_away(left, word, 1)
    assert not bucket.uploads()
    killed.end()
    left.end()


@pytest.mark.slow
def test_an_object_of_another_stays(bucket: Bucket) -> None:
    url = bucket.put("theirs", b"theirs")
    s3.STORE.take_away({"url": url, "upload": None, "tag": md5(b"ours").hexdigest()})
    assert bucket.get("theirs") == b"theirs"
    s3.STORE.take_away({"url": url, "upload": None, "tag": md5(b"theirs").hexdigest()})
    assert not bucket.below("theirs")


def together(size: int, plans: list[Plan], dest: str, **how: Any) -> list[BaseException | str | None]:
    store = Shared()

    def one(rank: int) -> BaseException | str | None:
        team = Team(store, rank, size, timeout=60)
        try:
            with joined(team):
                return write_folder(plans[rank], dest, **how)
        except BaseException as error:
            return error
        finally:
            team.end()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as pool:
        patch.setattr(ranks, "PATIENCE", 60)  # no rank is gone, and a busy machine may hold one for seconds
        return [*pool.map(one, range(size))]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ranks, "BEAT", 0.05)
    monkeypatch.setattr(ranks, "PATIENCE", 0.5)
    path = tmp_path / "source"
    path.write_bytes(bytes(range(100)))
    return path


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_bytes_are_equal_and_the_index_is_last(bucket: Bucket, source: Path, size: int) -> None:
    alone, dest = bucket.url("alone"), bucket.url("out")
    write_folder(planned(source, alone), alone)
    bucket.traffic.clear()
    assert together(size, [planned(source, dest)] * size, dest) == [None] * size
    names = [key.partition("/")[2] for key in bucket.below("out/")]
    assert names == ["index", "part0", "part1", "part2", "part3"]
    assert all(bucket.get(f"out/{name}") == bucket.get(f"alone/{name}") for name in names)
    named = [path for method, path, _, _ in bucket.traffic.calls if method in ("PUT", "POST") and "out/" in path]
    assert "out/index" in named[-1]
    again = together(size, [planned(source, dest)] * size, dest)
    assert isinstance(again[0], WouldOverwrite)
    assert together(size, [planned(source, dest)] * size, dest, overwrite=True) == [None] * size


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_leaves_nothing(
    bucket: Bucket, source: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr("ckptfix.io.remote.rank_folder.digest", lambda *args: "the same")
    dest = bucket.url("out")
    plans = [planned(source, dest, None if rank != failing else 3 - rank) for rank in range(2)]
    done = together(2, plans, dest)
    assert isinstance(done[failing], WriteFailed | OSError), done
    assert isinstance(done[1 - failing], RankFailed)
    assert not bucket.below("out/") and not bucket.uploads()

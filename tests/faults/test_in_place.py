"""Edits in place that are cut off, fail or are killed; `campaigns.in_place` says what a power cut may leave."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from builders import Tensor, assemble, legacy, safetensors, state_dict_ops, torch_zip
from campaigns.in_place import Call, Case, MemoryDisk, MemoryFile, cases, made, states
from conftest import LONG

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile, Refused, Unsupported, WriteFailed
from ckptfix.io.inplace import disk as real_disk
from ckptfix.io.inplace import edit
from ckptfix.io.unfinished_edits import JOURNAL, beside

pytestmark = pytest.mark.slow

NUMBERS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return dict(cases(tmp_path_factory.mktemp("cases").resolve()))


@pytest.mark.campaign
@pytest.mark.parametrize("back", [False, True], ids=["edit", "undo"])
def test_after_a_power_cut_a_file_is_as_before_or_as_after(every: dict[str, Case], back: bool) -> None:
    ends: Counter[str] = Counter()
    for name, case in every.items():
        counted, wrong = states(case, 120, 3, back=back)
        assert not wrong, f"{name}: {wrong[0]}"
        ends += counted
    print(dict(ends))
    assert min(ends["before"], ends["after"]) > 300


@pytest.mark.parametrize("left_out", ["sync", "create", "probes"])
def test_an_edit_that_leaves_out_a_step_is_found_out(
    every: dict[str, Case], left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if left_out == "sync":
        monkeypatch.setattr(MemoryFile, "sync", lambda self: None)
    elif left_out == "create":
        monkeypatch.setattr(MemoryDisk, "create", lambda self, path, data, like: None)
    else:
        monkeypatch.setattr("ckptfix.io.inplace.shifted._gap", lambda *arguments: 0)
    wrong = [name for name, case in every.items() if states(case, 60, 3)[1]]
    assert len(wrong) >= (len(every) if left_out == "create" else 8), wrong


@pytest.mark.sampled(4, test_all=10_000)
@pytest.mark.parametrize("fault", NUMBERS)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("back", [False, True], ids=["edit", "undo"])
def test_every_call_fails_once(every: dict[str, Case], fault: str, lasting: bool, back: bool) -> None:
    failed = 0
    for name, case in every.items():
        first = case.after() if back else case.before
        calls = MemoryDisk(first)
        _run(case, calls, back=back)
        for nth in range(len(calls.calls)):
            disk = MemoryDisk(first)
            disk.fail = _failing(nth, NUMBERS[fault], lasting=lasting)
            try:
                _run(case, disk, back=back)
            except WriteFailed as error:
                failed += 1
                disk.fail = lambda call: None
                stuck = beside(case.target, JOURNAL) in disk.files
                assert not stuck or "ckptfix undo" in str(error.hint), (name, nth, error)
                if stuck:
                    edit.finish(case.target, disk=disk)
            now = {path: disk.files[path].data for path in case.before}
            plain = {path: content.data for path, content in case.before.items()}
            edited = {path: content.data for path, content in case.after().items() if path in plain}
            assert now in (plain, edited), (name, nth)
            assert beside(case.target, JOURNAL) not in disk.files
    assert failed > 50


def _run(case: Case, disk: MemoryDisk, *, back: bool) -> None:
    if back:
        edit.take_back(case.target, case.record, disk=disk)
    else:
        edit.carry_out(case.target, case.record, keep=case.keep, disk=disk)


def _failing(nth: int, number: int, *, lasting: bool) -> Callable[[Call], None]:
    seen = iter(range(1 << 30))

    def fail(call: Call) -> None:
        count = next(seen)
        if call.kind == "lease":
            return
        if count == nth or (lasting and count > nth):
            raise OSError(number, os.strerror(number))

    return fail


FILES = ("zip", "legacy", "safetensors")


def write(path: Path, size: int = 1 << 18) -> Path:
    raw = random.Random(5).randbytes(4 * size)
    keys = {f"module.{number}.weight": Tensor(str(number), (size,), size) for number in range(2)}
    if path.suffix == ".safetensors":
        path.write_bytes(safetensors([(name, "F32", [size], raw) for name in keys]))
        return path
    pickle = assemble(("PROTO", 2), *state_dict_ops(keys), "STOP")
    storages = [(str(number), size, raw) for number in range(2)]
    path.write_bytes(legacy(pickle, storages) if "legacy" in path.name else torch_zip(pickle, [raw, raw]))
    return path


def name_of(kind: str) -> str:
    return f"{kind}.safetensors" if kind == "safetensors" else f"{kind}.pth"


@pytest.mark.parametrize("kind", ["legacy", "safetensors"])
def test_blocks_are_put_in_and_taken_out(on_disk: Path, kind: str) -> None:
    path = write(on_disk / name_of(kind))
    before = path.read_bytes()
    status = path.stat()
    done = ckptfix.add_module(path, prefix="p" * 900, in_place=True)
    assert "blocks inserted before the data" in str(done)
    assert path.stat().st_ino == status.st_ino
    assert path.read_bytes()[-(1 << 20) :] == before[-(1 << 20) :]
    assert ckptfix.open_checkpoint(path).entries[0].name.startswith("ppp")
    assert len(path.read_bytes()) % 4096 == len(before) % 4096
    ckptfix.undo(path)
    assert path.read_bytes() == before
    assert path.stat().st_blocks == status.st_blocks
    assert [left.name for left in on_disk.iterdir()] == [path.name]


def test_where_no_blocks_can_be_put_in_a_copy_is_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.io.inplace.disk.insertable", lambda folder: 0)
    path = write(tmp_path / "a.safetensors")
    before = path.read_bytes()
    with pytest.raises(Unsupported, match="insert blocks there") as caught:
        ckptfix.add_module(path, prefix="p" * 900, in_place=True)
    assert "give OUT" in str(caught.value.hint)
    assert path.read_bytes() == before


@pytest.mark.parametrize("way", ["open", "mapped"])
def test_a_file_that_another_program_has_open_is_not_shifted(on_disk: Path, way: str) -> None:
    path = write(on_disk / "a.safetensors")
    before = path.read_bytes()
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if way == "mapped" else None
        if held is not None:
            file.close()
        with pytest.raises(Refused, match="open or mapped"):
            ckptfix.add_module(path, prefix="p" * 900, in_place=True)
        if held is not None:
            held.close()
    assert path.read_bytes() == before
    assert list(on_disk.iterdir()) == [path]
    ckptfix.add_module(path, prefix="p" * 900, in_place=True)
    with path.open("rb"), pytest.raises(Refused, match="open or mapped"):
        ckptfix.undo(path)


@pytest.mark.parametrize("kind", FILES)
def test_a_second_writer_is_refused(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / name_of(kind))
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="another program is editing it"):
            ckptfix.strip_module(path, in_place=True)
    assert ckptfix.strip_module(path, in_place=True).written


@pytest.mark.parametrize("kind", FILES)
def test_a_file_whose_journal_is_there_is_refused_until_undo(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / name_of(kind))
    before = path.read_bytes()
    Path(beside(str(path), JOURNAL)).write_bytes(b"torn")
    for call in (ckptfix.inspect, ckptfix.doctor, lambda path: ckptfix.strip_module(path, in_place=True)):
        with suppress(CkptfixError):
            result = call(path)
            assert any(finding.id == "unfinished-edit" for finding in result.findings)
    with pytest.raises(Refused, match="did not finish") as caught:
        ckptfix.open_checkpoint(path)
    assert caught.value.hint == f"run `ckptfix undo {path}` to restore its earlier state"
    assert ckptfix.undo(path).unfinished
    assert path.read_bytes() == before
    ckptfix.open_checkpoint(path)


@pytest.mark.parametrize("kind", FILES)
def test_another_program_wrote_meanwhile(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / name_of(kind))
    ckptfix.strip_module(path, in_place=True)
    with path.open("ab") as file:
        file.write(b"more")
    now = path.read_bytes()
    result: object = None
    with suppress(DamagedFile):
        result = ckptfix.undo(path)
    assert path.read_bytes() == now
    assert result is None or "nothing to undo" in str(result)


def test_a_record_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors")
    other = tmp_path / "other"
    other.write_bytes(b"safe")
    ckptfix.strip_module(path, in_place=True)
    (record,) = edit.past(str(path))
    (change,) = record.changes
    folder = tmp_path / "inner"
    folder.mkdir()
    victim = write(folder / "b.safetensors")
    for name in ("../other", str(other)):
        hostile = replace(record, changes=(replace(change, name=name),))
        Path(beside(str(victim), JOURNAL)).write_bytes(hostile.encoded())
        with pytest.raises(DamagedFile, match="about a different file"):
            ckptfix.undo(victim)
    assert other.read_bytes() == b"safe"


def kills(folder: Path, kind: str, count: int, seed: int) -> Counter[str]:
    """Kill a process that edits and takes back, `count` times; how it was found after `undo`.

    Raises:
        AssertionError: it was neither as before nor as after.
    """
    path = write(folder / name_of(kind))
    before = path.read_bytes()
    grows = bool(real_disk.insertable(str(folder))) and kind != "zip"
    prefix = "p" * 900 if grows or kind == "zip" else "m"
    ckptfix.strip_module(path, in_place=True)
    plain = path.read_bytes()
    ckptfix.add_module(path, prefix=prefix, in_place=True)
    edited = path.read_bytes()
    chance = random.Random(seed)
    longest = 0.03  # seconds; a busy machine has not begun by then
    ends: Counter[str] = Counter()
    for _ in range(count):
        child = os.fork()
        if not child:
            with suppress(BaseException):
                while True:
                    ckptfix.undo(path)
                    ckptfix.add_module(path, prefix=prefix, in_place=True)
            os._exit(1)
        time.sleep(chance.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        if Path(beside(str(path), JOURNAL)).exists():
            assert ckptfix.undo(path).unfinished
            ends["taken back"] += 1
        elif not ends["taken back"]:
            longest = min(1.1 * longest, 1)
        now = path.read_bytes()
        assert now in (plain, edited)
        ends["edited" if now == edited else "plain"] += 1
        if now == plain:
            ckptfix.add_module(path, prefix=prefix, in_place=True)
    while ckptfix.undo(path).undone:
        pass
    assert path.read_bytes() == before
    assert {left.name for left in folder.iterdir()} == {path.name}
    return ends


@pytest.mark.campaign
@pytest.mark.parametrize("kind", FILES)
def test_a_process_is_killed(tmp_path: Path, kind: str) -> None:
    count = 500 if LONG else 20
    ends = kills(tmp_path, kind, count, 1)
    print(dict(ends))
    assert ends["edited"] + ends["plain"] == count


@pytest.mark.campaign
@pytest.mark.parametrize("kind", FILES)
def test_a_process_is_killed_on_a_real_disk(on_disk: Path, kind: str) -> None:
    count = 500 if LONG else 30
    ends = kills(on_disk, kind, count, 2)
    print(dict(ends))
    assert ends["taken back"]


def test_a_case_that_grows_by_blocks_and_one_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    longer = made(tmp_path / "a", "safetensors", "random", longer=True)
    shorter = made(tmp_path / "b", "safetensors", "random", longer=False)
    assert longer.record.changes[0].shift
    assert not shorter.record.changes[0].shift


@pytest.mark.parametrize("kind", FILES)
def test_a_journal_that_is_left_does_not_change_another_file(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / name_of(kind))
    size = path.stat().st_size
    record = made(_folder(tmp_path, "made"), kind, "random", longer=False).record
    change = record.changes[0]
    other = random.Random(3).randbytes(size)
    for content in (other, other[: change.before], other[: change.after]):
        path.write_bytes(content)
        named = replace(record, changes=(replace(change, name=path.name),))
        Path(beside(str(path), JOURNAL)).write_bytes(named.encoded())
        # A journal that cannot fit the file is removed; one whose sizes fit is refused, since either may be right.
        try:
            done = ckptfix.undo(path)
        except DamagedFile as error:
            assert "another program wrote" in str(error)
        else:
            assert done.unfinished
            assert not done.undone or kind == "zip"  # in a zip nothing was added, so there is nothing to cut off
        assert path.read_bytes() == content


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder

"""Journals and former headers that no edit has written, though their checksums are right; and races for them."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import safetensors
from campaigns.in_place import made

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile, Refused
from ckptfix.io.inplace import edit
from ckptfix.io.inplace.disk import DISK, RealDisk, RealFile
from ckptfix.io.inplace.record import MAGIC, EditRecord, FileChange, decoded
from ckptfix.io.unfinished_edits import JOURNAL, UNDO, beside
from ckptfix.ops.undo import listed

VALUES: list[Any] = [
    0, -1, 1, 4096, 2**31, 2**62, 2**63, 2**70, 1.5, 1e308, float("nan"), True, None, "", "x", "\0", "\ud800", "a/b",
    "..", "other.safetensors", [], {}, [[]], [[1]], [[-1, 5]], [[0, -5]], [["a", "b"]], [[0, 2**62]], [[2**63, 1]],
    [[0, 1, "x"]], [[0, 2**40, "x"]], [[0, -1, "x"]],
]  # fmt: skip


def signed(body: bytes) -> bytes:
    return body + hashlib.blake2b(body, digest_size=32).digest()


def parts_of(record: EditRecord) -> tuple[Any, bytes]:
    """What a record says, and the bytes behind that."""
    data = record.encoded()[len(MAGIC) : -32]
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(said: bytes, blobs: bytes) -> bytes:
    return signed(b"".join((MAGIC, len(said).to_bytes(8, "little"), said, blobs)))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    keys = value if isinstance(value, dict) else range(min(len(value), 2)) if isinstance(value, list) else ()
    for key in keys:
        yield from places(value[key], (*at, key))


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    changed = json.loads(json.dumps(value))
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return changed


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> EditRecord:
    record = made(tmp_path_factory.mktemp("shifted").resolve(), "safetensors", "random", longer=True).record
    return replace(record, changes=(replace(record.changes[0], name="a.safetensors"),))


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.campaign) for turn in (1, 2))])
@pytest.mark.parametrize("kind", [JOURNAL, UNDO])
def test_what_no_edit_writes_is_refused_in_plain_words(
    tmp_path: Path, shifted: EditRecord, kind: str, turn: int
) -> None:
    """A third of the records at a turn: each place, and each value in some place."""
    path, other = tmp_path / "a.safetensors", tmp_path / "other.safetensors"
    plain = safetensors([("module.a", "F32", [10_000], os.urandom(40_000))])
    said, blobs = parts_of(shifted)
    hostile = [joined(json.dumps(put(said, at, new)).encode(), blobs) for at in places(said) for new in VALUES]
    texts = (b"[" * 100_000, b"1" * 6000, b'{"id":1}', b"\xff", b'{"id":"x","what":"w","when":"","files":[]}')
    hostile += [joined(text, b"") for text in texts]
    assert len(hostile) > 400
    calls: list[Callable[[Path], object]] = [ckptfix.inspect, listed, ckptfix.undo]
    for data in hostile[turn::3]:
        path.write_bytes(plain)
        other.write_bytes(plain)
        Path(beside(str(path), kind)).write_bytes(data)
        for call in calls:
            with suppress(CkptfixError):
                str(call(path))
        assert other.read_bytes() == plain
        Path(beside(str(path), kind)).unlink(missing_ok=True)


def test_lengths_that_lead_backwards_are_no_record(shifted: EditRecord) -> None:
    said, blobs = parts_of(shifted)
    said["files"][0]["old"] = [[0, -len(blobs) - 10_000]]
    assert list(decoded(joined(json.dumps(said).encode(), blobs))) == []


def test_a_record_of_another_file_of_the_folder_changes_nothing(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    for path in (one, other):
        path.write_bytes(safetensors([("module.a", "F32", [100], bytes(400))]))
    ckptfix.strip_module(other, in_place=True)
    Path(beside(str(other), UNDO)).rename(beside(str(one), JOURNAL))
    before = one.read_bytes(), other.read_bytes()
    with pytest.raises(DamagedFile, match="about a different file"):
        ckptfix.undo(one)
    assert (one.read_bytes(), other.read_bytes()) == before


@pytest.mark.parametrize("torn", [True, False])
def test_the_journal_of_an_edit_that_goes_on_is_left_alone(
    tmp_path: Path, torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half written, it is not taken for one that was cut off; and what has ended meanwhile is not taken back."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors([("module.a", "F32", [100], bytes(400))]))
    refused: list[str] = []

    class Racing(RealDisk):
        def create(self, path: str, data: bytes, like: str) -> None:
            if torn and path.endswith(JOURNAL):
                Path(path).write_bytes(data[:20])
                self.meanwhile()
                assert Path(path).exists()
                Path(path).unlink()
            super().create(path, data, like)

        def delete(self, path: str) -> None:
            if not torn and path.endswith(JOURNAL):
                self.meanwhile()
            super().delete(path)

        def meanwhile(self) -> None:
            with pytest.raises(Refused) as caught:
                ckptfix.undo(path)
            refused.append(caught.value.message)

    monkeypatch.setattr(edit.carry_out, "__kwdefaults__", {"keep": True, "disk": Racing()})
    assert ckptfix.strip_module(path, in_place=True).written
    assert len(refused) == 1 and "another program is editing it" in refused[0]
    assert ckptfix.open_checkpoint(path).entries[0].name == "a"


def test_an_edit_that_ended_before_undo_held_the_file_is_not_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors([("module.a", "F32", [100], bytes(400))]))
    ckptfix.strip_module(path, in_place=True)
    after = path.read_bytes()
    with pytest.raises(Refused, match="just ended"):
        edit.finish(str(path), disk=DISK)
    assert path.read_bytes() == after


def link(place: Path) -> None:
    target = place.with_name("target")
    target.write_bytes(b"hello")
    place.symlink_to(target)


def pipe(place: Path) -> None:
    os.mkfifo(place)


def listener(place: Path) -> None:
    folder = os.open(place.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        # The name of a socket is a hundred characters at most.
        server.bind(f"/proc/self/fd/{folder}/{place.name}")
    os.close(folder)


KINDS: dict[str, Callable[[Path], None]] = {
    "link": link, "dangling link": lambda place: place.symlink_to("nowhere"), "pipe": pipe, "socket": listener,
    "folder": lambda place: place.mkdir(),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [JOURNAL, UNDO, f"{UNDO}.new"])
def test_what_is_no_file_in_the_place_of_one(tmp_path: Path, kind: str, suffix: str) -> None:
    """The file is edited and taken back, or it is as it was and can be again once the thing is gone."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors([("module.a", "F32", [100], bytes(400))]))
    before = path.read_bytes()
    place = Path(beside(str(path), suffix))
    KINDS[kind](place)
    try:
        assert ckptfix.strip_module(path, in_place=True).written
    except CkptfixError as error:
        assert path.read_bytes() == before
        assert suffix == JOURNAL or f"{place.name}: " in str(error), error
        if suffix == JOURNAL:
            with pytest.raises(CkptfixError, match="which no in-place edit creates"):
                ckptfix.undo(path)
        place.rmdir() if kind == "folder" else place.unlink()
        assert {left.name for left in tmp_path.iterdir()} <= {path.name, "target"}
        assert ckptfix.strip_module(path, in_place=True).written
    assert ckptfix.undo(path).undone
    assert path.read_bytes() == before
    if kind == "link":
        assert (tmp_path / "target").read_bytes() == b"hello"


@pytest.mark.parametrize("length", [237, 238, 255])
def test_a_name_that_leaves_no_room_for_a_journal(tmp_path: Path, length: int) -> None:
    path = tmp_path / ".safetensors".rjust(length, "n")
    path.write_bytes(safetensors([("module.a", "F32", [100], bytes(400))]))
    before = path.read_bytes()
    if length == 237:
        assert ckptfix.strip_module(path, in_place=True).written
        assert ckptfix.undo(path).undone
    else:
        with pytest.raises(Refused, match="name is too long for an in-place edit"):
            ckptfix.strip_module(path, in_place=True)
        assert "nothing to undo" in str(ckptfix.undo(path))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def as_another_user() -> Iterator[Callable[[], None]]:
    if os.geteuid():
        pytest.skip("only root can become another user")
    yield lambda: os.seteuid(65534)
    os.seteuid(0)


@pytest.fixture
def for_all() -> Iterator[Path]:
    """A folder that another user may write to: that of the tests is root's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder).resolve()


def test_what_root_edited_its_owner_can_take_back(for_all: Path, as_another_user: Callable[[], None]) -> None:
    path = for_all / "a.safetensors"
    path.write_bytes(safetensors([("module.a", "F32", [100], bytes(400))]))
    os.chown(path, 65534, 65534)
    path.chmod(0o640)
    before = path.read_bytes()
    ckptfix.strip_module(path, in_place=True)
    status = Path(beside(str(path), UNDO)).stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (65534, 65534, 0o640)
    as_another_user()
    assert ckptfix.undo(path).undone
    assert path.read_bytes() == before


def test_former_headers_that_cannot_be_read_leave_the_file_alone(
    for_all: Path, as_another_user: Callable[[], None]
) -> None:
    path = for_all / "a.safetensors"
    path.write_bytes(safetensors([("module.module.a", "F32", [100], bytes(400))]))
    path.chmod(0o666)
    ckptfix.strip_module(path, in_place=True)
    Path(beside(str(path), UNDO)).chmod(0o600)
    before = path.read_bytes()
    as_another_user()
    with pytest.raises(CkptfixError, match="ckptfix-undo: Permission denied"):
        ckptfix.strip_module(path, in_place=True)
    assert path.read_bytes() == before
    assert not Path(beside(str(path), JOURNAL)).exists()


def test_what_was_written_aside_goes_with_the_edit_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors([("module.a", "F32", [100], bytes(400))]))
    before = path.read_bytes()
    ckptfix.strip_module(path, in_place=True)
    undo = Path(beside(str(path), UNDO))
    undo.with_name(f"{undo.name}.new").write_bytes(b"half")
    undo.rename(beside(str(path), JOURNAL))
    assert ckptfix.undo(path).unfinished
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_whose_data_another_program_moves_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors([("module.a", "F32", [100], bytes(400))]))
    before = path.read_bytes()
    held, free = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        file = DISK.open(str(path))
        file.alone()
        os.write(held[1], b"x")
        os.read(free[0], 1)
        os._exit(0)
    os.read(held[0], 1)
    try:
        with pytest.raises(Refused, match="another program is editing it in place") as caught:
            RealFile(str(path))
        assert caught.value.hint
        with pytest.raises(CkptfixError, match="another program is editing it in place"):
            ckptfix.open_checkpoint(path)
    finally:
        os.write(free[1], b"x")
        os.waitpid(child, 0)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("after", "now", "taken_back"), [
    (2048, bytes(2048), False),  # another file, of zeros
    (2048, b"y" * 512 + b"x" * 1536, True),  # one sector was written
    (2048, b"y" * 512 + bytes(512) + b"x" * 1024, False),
    (4096, b"x" * 2048 + b"y" * 512 + bytes(1536), True),  # what is new was not written to its end
    (4096, b"x" * 1536 + bytes(2560), False),
    (4096, b"x" * 2048 + bytes(512) + b"z" * 1536, False),
])  # fmt: skip
def test_zeros_are_of_an_edit_only_behind_the_end_that_the_file_had(
    tmp_path: Path, after: int, now: bytes, taken_back: bool
) -> None:
    """A sector that a disk lost while a file grew is zeros; one that was there before is as before or as after."""
    file = (tmp_path / "a.bin").resolve()
    file.write_bytes(b"x" * 2048)
    grown = after > 2048
    change = FileChange(file.name, 2048, after, ((1536, b"x" * 512),) if grown else ((0, b"x" * 1024),),
                    ((1536, b"x" * 512 + b"y" * 2048),) if grown else ((0, b"y" * 1024),))  # fmt: skip
    record = EditRecord("1", "an edit", "", (change,))
    journal = beside(str(file), JOURNAL)
    DISK.create(journal, record.encoded(), str(file))
    file.write_bytes(now)
    if taken_back:
        assert edit.finish(str(file)) == record
        assert file.read_bytes() == b"x" * 2048
    else:
        with pytest.raises(DamagedFile, match="another program wrote to it"):
            edit.finish(str(file))
        assert file.read_bytes() == now and Path(journal).exists()

"""Journals and former headers that no edit has written, though their checksums are right; and races for them."""

from __future__ import annotations

import hashlib
import json
import os
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
from ckptfix.io.inplace.disk import DISK, RealDisk
from ckptfix.io.inplace.record import MAGIC, Record, decoded
from ckptfix.io.unfinished import JOURNAL, UNDO, beside
from ckptfix.ops.undo import listed

VALUES: list[Any] = [
    0, -1, 1, 4096, 2**31, 2**62, 2**63, 2**70, 1.5, 1e308, float("nan"), True, None, "", "x", "\0", "\ud800", "a/b",
    "..", "other.safetensors", [], {}, [[]], [[1]], [[-1, 5]], [[0, -5]], [["a", "b"]], [[0, 2**62]], [[2**63, 1]],
    [[0, 1, "x"]], [[0, 2**40, "x"]], [[0, -1, "x"]],
]  # fmt: skip


def signed(body: bytes) -> bytes:
    return body + hashlib.blake2b(body, digest_size=32).digest()


def parts_of(record: Record) -> tuple[Any, bytes]:
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
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Record:
    record = made(tmp_path_factory.mktemp("shifted").resolve(), "safetensors", "random", longer=True).record
    return replace(record, changes=(replace(record.changes[0], name="a.safetensors"),))


@pytest.mark.parametrize("kind", [JOURNAL, UNDO])
def test_what_no_edit_writes_is_refused_in_plain_words(tmp_path: Path, shifted: Record, kind: str) -> None:
    path, other = tmp_path / "a.safetensors", tmp_path / "other.safetensors"
    plain = safetensors([("module.a", "F32", [10_000], os.urandom(40_000))])
    said, blobs = parts_of(shifted)
    hostile = [joined(json.dumps(put(said, at, new)).encode(), blobs) for at in places(said) for new in VALUES]
    texts = (b"[" * 100_000, b"1" * 6000, b'{"id":1}', b"\xff", b'{"id":"x","what":"w","when":"","files":[]}')
    hostile += [joined(text, b"") for text in texts]
    assert len(hostile) > 400
    calls: list[Callable[[Path], object]] = [ckptfix.inspect, listed, ckptfix.undo]
    for data in hostile:
        path.write_bytes(plain)
        other.write_bytes(plain)
        Path(beside(str(path), kind)).write_bytes(data)
        for call in calls:
            with suppress(CkptfixError):
                str(call(path))
        assert other.read_bytes() == plain
        Path(beside(str(path), kind)).unlink(missing_ok=True)


def test_lengths_that_lead_backwards_are_no_record(shifted: Record) -> None:
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
    with pytest.raises(DamagedFile, match="about another file"):
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
        def create(self, path: str, data: bytes) -> None:
            if torn and path.endswith(JOURNAL):
                Path(path).write_bytes(data[:20])
                self.meanwhile()
                assert Path(path).exists()
                Path(path).unlink()
            super().create(path, data)

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
    assert len(refused) == 1 and "another program edits it" in refused[0]
    assert ckptfix.open_checkpoint(path).entries[0].name == "a"


def test_an_edit_that_ended_before_undo_held_the_file_is_not_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors([("module.a", "F32", [100], bytes(400))]))
    ckptfix.strip_module(path, in_place=True)
    after = path.read_bytes()
    with pytest.raises(Refused, match="just ended"):
        edit.finish(str(path), disk=DISK)
    assert path.read_bytes() == after

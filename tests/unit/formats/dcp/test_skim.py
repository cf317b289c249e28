"""Metadata read in bulk: what is understood is what the reader of all pickles finds, and all else is left to it."""

from __future__ import annotations

import pickle
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.formats.dcp import metadata as dcp_metadata
from ckptfix.formats.dcp.skim import Boxes, StoredItem, skim
from ckptfix.pickles.opcodes import walk


def slowly(data: bytes, monkeypatch: pytest.MonkeyPatch) -> dcp_metadata.Metadata:
    with monkeypatch.context() as patch:
        patch.setattr(dcp_metadata, "skim", lambda data: None)
        return dcp_metadata.understood(data, "x")


def same(one: dcp_metadata.Metadata, other: dcp_metadata.Metadata) -> bool:
    return replace(one, source=b"") == replace(other, source=b"")


def sharded(tensors: int, ranks: int) -> bytes:
    """Keys, chunks and items as FSDP2 over many ranks has them: a row a rank, and nothing on those behind."""
    keys: dict[str, Any] = {}
    items: dict[MetadataIndex, _StorageInfo] = {}
    files = [f"__{rank}_0.distcp" for rank in range(ranks)]
    for number in range(tensors):
        name, chunks = f"model.layers.{number}.\u00e9\u0394.weight", []
        for rank in range(ranks):
            offsets, sizes = torch.Size((min(rank, 3), 0)), torch.Size((int(rank < 3), 70_000 + number))
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            place = _StorageInfo(files[rank], number * 3_000_000_000, 280_000 + 4 * number + 1600)
            items[MetadataIndex(name, offsets, rank)] = place
        keys[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size((3, 70_000 + number)), chunks)
        keys[f"state.{number}.step"] = TensorStorageMetadata(
            TensorProperties(), torch.Size(()), [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
        )
        items[MetadataIndex(f"state.{number}.step", torch.Size(()), 0)] = _StorageInfo(files[0], number, 1577)
        keys[f"lr.{number}"] = BytesStorageMetadata()
        items[MetadataIndex(f"lr.{number}")] = _StorageInfo(files[0], number, 1261)
    paths = {name: ("groups", number, name) for number, name in enumerate(keys)}
    return pickle.dumps(Metadata(keys, paths, items))


def test_it_is_what_the_other_reader_finds(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {path: path.read_bytes() for path in saved.rglob("*.metadata")} | {Path(): sharded(40, 5)}
    assert len(found) > 6
    for path, data in found.items():
        rows = skim(data)
        assert rows is not None, path
        whole = path.name in ("", ".metadata")
        if whole:
            assert same(dcp_metadata.understood(data, "x"), slowly(data, monkeypatch)), path


def test_entries_are_read_whole() -> None:
    """All but the first of each kind, and what a frame ends in."""
    rows = skim(sharded(300, 8))
    assert rows is not None and len(rows.items) == 300 * 6
    assert sum(type(value) is Boxes for _, value in rows.keys) >= 598
    assert sum(type(row) is StoredItem for row in rows.items) >= 300 * 6 - 2


@pytest.mark.slow
def test_what_is_damaged_is_left_to_the_other_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed byte, a byte more or less: the same is found, or nothing."""
    whole = sharded(6, 2)
    whole = whole[:2] + whole[11:]  # without its frame, whose length would say so
    dice = random.Random(7)
    understood = 0
    for _ in range(1500):
        at = dice.randrange(2, len(whole))
        change = dice.choice((b"", bytes((dice.randrange(256),)), whole[at : at + 1] * 2, whole[at - 9 : at + 1]))
        data = whole[:at] + change + whole[at + 1 :]
        rows = skim(data)
        if rows is None:
            continue
        try:
            other = slowly(data, monkeypatch)
        except CkptfixError as error:
            with pytest.raises(type(error)) as caught:
                dcp_metadata.understood(data, "x")
            assert caught.value.message == error.message
            continue
        assert same(dcp_metadata.understood(data, "x"), other)
        understood += 1
    assert understood > 50


@pytest.mark.parametrize("opcode", [b"a", b"e", b"(a", b"0"])
def test_a_list_of_chunks_to_which_nothing_is_appended(opcode: bytes) -> None:
    """APPEND without a chunk would append the list to what is below it."""
    whole = sharded(3, 2)
    whole = whole[:2] + whole[11:]
    for at in (hit.end() for hit in re.finditer(rb"]\x94(?=\()", whole)):
        data = whole[:at] + opcode + whole[at:]
        assert skim(data) is None
        with pytest.raises(CkptfixError):
            dcp_metadata.understood(data, "x")


@pytest.mark.slow
def test_a_frame_begins_between_two_opcodes() -> None:
    """An unpickler takes the head of one that begins within an opcode for a part of it: so does what is understood."""
    opcodes = sharded(2, 2)[11:]
    starts = {opcode.start for opcode in walk(opcodes, 0, len(opcodes))}
    for cut in range(1, len(opcodes)):
        parts = opcodes[:cut], opcodes[cut:cut], opcodes[cut:]
        data = b"\x80\x04" + b"".join(b"\x95" + len(part).to_bytes(8, "little") + part for part in parts)
        assert (skim(data) is not None) == (cut in starts), cut


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\x80\x04", b"\x80\x03"),
        (b"\x80\x04\x95", b"\x80\x04\x95\xff"),
        (b"planner_data\x94}", b"storage_data\x94}"),
        (b"u}\x94(K\x01K\x02u", b""),
        (b".", b""),
    ],
)
def test_what_is_written_otherwise(old: bytes, new: bytes) -> None:
    whole = sharded(2, 2)
    at = whole.rfind(old) if old == b"." else whole.find(old)
    if at < 0:
        at, old = 2, b""
        new = b"("
    assert skim(whole[:at] + new + whole[at + len(old) :]) is None


def test_a_list_of_chunks_that_many_keys_fetch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million keys with the million chunks of one list would be a million times a million of them."""
    box = ChunkStorageMetadata(torch.Size((0,)), torch.Size((0,)))
    entry = TensorStorageMetadata(TensorProperties(), torch.Size((0,)), [box] * 3000)
    data = pickle.dumps(Metadata({f"k{number}": entry for number in range(3000)}, None, {}))
    with pytest.raises(DamagedFile, match="more chunks"):
        dcp_metadata.understood(data, "x")


def outcome(read: Callable[[], dcp_metadata.Metadata]) -> object:
    try:
        return replace(read(), source=b"")
    except CkptfixError as error:
        return type(error), error.message, error.offset


class OfList:
    """Is pickled as a torch.Size that is made of a list."""

    def __reduce__(self) -> Any:
        return torch.Size, ([2],)


def test_sizes_that_are_no_sizes_are_what_the_other_reader_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One object in the place of several sizes, which all but the first place fetch from the memo."""
    odd: list[Any] = [torch.Size((2,)), OfList(), (2,), [2], "text", b"bytes", OrderedDict(), {"a": 1}, frozenset("a")]
    wrong = 0
    for value in odd:
        for where in range(16):
            places = (value if where >> n & 1 else torch.Size((2,)) for n in range(4))
            keys: dict[str, Any] = {}
            for name in "abc":
                size, box = (next(places, torch.Size((2,))) for _ in "ab")
                boxes = box, torch.Size((2,))
                chunks = [ChunkStorageMetadata(torch.Size((0,)), box) for box in boxes]
                keys[name] = TensorStorageMetadata(TensorProperties(), size, chunks)
            items = {MetadataIndex(name, torch.Size((0,)), 0): _StorageInfo("__0_0.distcp", 0, 100) for name in keys}
            data = pickle.dumps(Metadata(keys, {name: (name,) for name in keys}, items))
            found = outcome(lambda data=data: dcp_metadata.understood(data, "x"))  # type: ignore[misc]
            assert found == outcome(lambda data=data: slowly(data, monkeypatch))  # type: ignore[misc]
            wrong += isinstance(found, tuple)
    assert wrong < len(odd) * 16

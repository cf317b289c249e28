"""doctor and repair of folders: what is damaged is named by tensor and rows, what is intact is kept."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from compare import assert_same
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckptfix
from ckptfix.checkpoint import ByteRange, Data
from ckptfix.errors import DamagedFile
from ckptfix.formats import open_checkpoint
from ckptfix.formats.dcp.read import folder_of, tensor_piece
from ckptfix.io.read import read_blocks
from ckptfix.io.source import Block
from ckptfix.ops.doctor import data as doctor_data

Copied = Callable[[str], Path]


def ids(folder: Path) -> dict[str, str]:
    return {row.id: row.where for row in ckptfix.doctor(folder).findings}


def flipped(folder: Path, name: str, chunk: int) -> Path:
    """The file in which a byte of a chunk of the tensor is another one now."""
    inside = folder_of(open_checkpoint(folder))
    (saved,) = (saved for saved in inside.tensors if saved.fqn == name)
    place = tensor_piece(saved, inside.files).checks[chunk].data
    assert isinstance(place, ByteRange)
    path = Path(place.path)
    data = bytearray(path.read_bytes())
    data[place.offset] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["fsdp", "mesh", "odd", "flat"])
def test_a_sound_folder_has_no_error(saved: Path, name: str) -> None:
    found = ckptfix.doctor(saved / name)
    assert not [row for row in found.findings if row.severity == "error"]
    assert "dcp-saved-at" in {row.id for row in found.findings}


@pytest.mark.parametrize("name", ["plain.weight", "rows.weight", "blocks.weight", "deep.weight"])
def test_a_flipped_bit_is_found(copied: Copied, name: str) -> None:
    folder = copied("mesh")
    flipped(folder, name, -1)
    assert re.match(rf"__\d+_0\.distcp: {re.escape(name)}", ids(folder)["bad-crc"])


def test_a_file_of_another_step_is_named(copied: Copied) -> None:
    folder = copied("fsdp")
    assert "steps-differ" not in ids(folder)
    inside = folder_of(open_checkpoint(folder))
    for saved in inside.tensors:
        place = saved.parts[0].place
        if saved.fqn.endswith(".step") and place is not None and place.name == "__1_0.distcp":
            data = tensor_piece(saved, inside.files).checks[0].data
            assert isinstance(data, ByteRange)
            with (folder / place.name).open("r+b") as file:
                file.seek(data.offset)
                file.write(struct.pack("<f", 9.0))
    row = {row.id: row for row in ckptfix.doctor(folder).findings}["steps-differ"]
    assert row.where == "__1_0.distcp" and "at step 9, and most of those in the other files at step 2" in row.message


def test_leftovers_and_entries_of_nothing_are_named(copied: Copied) -> None:
    folder = copied("mesh")
    (folder / "__9_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data[MetadataIndex("gone")] = _StorageInfo("__0_0.distcp", 0, 10)
    metadata.storage_data[MetadataIndex("rows.weight", (9, 9))] = _StorageInfo("__0_0.distcp", 0, 10)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    found = ids(folder)
    assert found["dcp-leftover"] == "__9_0.distcp" and "dcp-unused" in found


def test_items_that_share_bytes_are_named(copied: Copied) -> None:
    folder = copied("mesh")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = next(info for info in metadata.storage_data.values() if info.offset)
    info.offset -= 100
    info.length += 100
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert ids(folder)["dcp-overlap"] == info.relative_path


def test_repair_keeps_what_is_intact(copied: Copied, tmp_path: Path) -> None:
    folder = copied("mesh")
    ckptfix.convert(folder, tmp_path / "sound.pth")
    file = flipped(folder, "blocks.weight", 2)
    done = ckptfix.repair(folder, tmp_path / "out.pth")
    assert done.exit_code == 3
    (loss,) = done.losses
    assert loss.name == "blocks.weight" and file.name in loss.reason and "[4:7, 0:3]" in loss.reason
    found, wanted = torch.load(tmp_path / "out.pth"), torch.load(tmp_path / "sound.pth")
    del wanted["blocks.weight"]
    assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_repair_without_a_file(copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp")
    (folder / "__1_0.distcp").unlink()
    done = ckptfix.repair(folder, tmp_path / "out.pth")
    assert done.exit_code == 3 and done.kept and all("the file is missing" in loss.reason for loss in done.losses)
    found = torch.load(tmp_path / "out.pth", weights_only=False)
    assert {f"model/{name}" for name in found["model"]} <= set(done.kept)
    assert not ckptfix.repair(folder, None, check_only=True).written


def test_repair_of_a_sound_folder_loses_nothing(saved: Path, tmp_path: Path) -> None:
    done = ckptfix.repair(saved / "fsdp", tmp_path / "out.pth")
    assert (done.exit_code, done.losses, done.account.lost) == (0, (), ())
    assert list(torch.load(tmp_path / "out.pth", weights_only=False)) == ["model", "optim", "epoch", "seen"]


def test_lost_tensors_are_filled(saved: Path, copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp")
    (folder / "__1_0.distcp").unlink()
    done = ckptfix.repair(folder, tmp_path / "out.pth", fill_from=saved / "fsdp")
    assert done.losses and all(loss.taken for loss in done.losses if loss.shape is not None)
    wanted, found = (torch.load(path, weights_only=False) for path in (saved / "fsdp.pt", tmp_path / "out.pth"))
    assert_same(wanted["model"], found["model"])
    assert_same(wanted["optim"]["state"], found["optim"]["state"])
    ckptfix.repair(folder, tmp_path / "zeros.pth", fill="zeros")
    found = torch.load(tmp_path / "zeros.pth", weights_only=False)
    assert list(found["model"]) == list(wanted["model"]) and not found["model"]["embed.weight"].any()


def test_what_repair_refuses(copied: Copied, tmp_path: Path) -> None:
    folder = copied("mesh")
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:500])
    with pytest.raises(DamagedFile):
        ckptfix.repair(folder, tmp_path / "out.pth")


def test_a_sound_folder_is_read_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have the checksums of their items, joined; the items by themselves are read where these do not match."""
    read: list[int] = []
    real = read_blocks

    def counted(data: Data) -> Iterator[Block]:
        for block in real(data):
            read.append(len(block))
            yield block

    monkeypatch.setattr(doctor_data, "read_blocks", counted)
    assert "bad-crc" not in {row.id for row in ckptfix.doctor(saved / "fsdp").findings}
    checkpoint = open_checkpoint(saved / "fsdp")
    storages = {entry.storage.identity: entry.storage.nbytes for entry in checkpoint.entries if entry.storage}
    assert sum(read) == sum(storages.values())

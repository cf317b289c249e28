"""Folders of torch.distributed.checkpoint, read and made one file: bit for bit what torch makes of them."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from dcp_ranks import SAVES, Net
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save as save_folder
from torch_versions import ALONE

import ckptfix
from ckptfix.errors import DamagedFile, UnknownFormat, Unsupported, WouldLoseData
from ckptfix.formats import detect, open_checkpoint
from ckptfix.formats.dcp import read as dcp_read
from ckptfix.ops.doctor import doctor

Copied = Callable[[str], Path]

FRAMEWORKS = Path(__file__).parents[5] / "shared" / "frameworks"
MADE_BY_OTHERS = sorted(path.parent for path in FRAMEWORKS.glob("*/**/.metadata")) if FRAMEWORKS.exists() else []


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("to", ["zip", "legacy"])
def test_one_file_holds_what_torch_makes_of_it(saved: Path, tmp_path: Path, name: str, to: Any) -> None:
    if name == "odd" and to == "legacy":
        pytest.skip("float8 has no storage class, which legacy files need")
    done = ckptfix.convert(saved / name, tmp_path / "out.pth", to=to)
    assert (done.exit_code, done.account.lost, done.account.left) == (0, (), ())
    assert_same(load(saved / f"{name}.pt"), load(tmp_path / "out.pth"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", MADE_BY_OTHERS, ids=lambda path: path.relative_to(FRAMEWORKS).as_posix())
def test_folders_of_frameworks(folder: Path, tmp_path: Path) -> None:
    ckptfix.convert(folder, tmp_path / "out.pth")
    wanted = folder.with_name(f"{folder.name}_dcp2torch.pt")
    if not wanted.exists():
        wanted = tmp_path / "wanted.pt"
        dcp_to_torch_save(folder, wanted)
    assert_same(load(wanted), load(tmp_path / "out.pth"))


def test_the_weights_alone(saved: Path, tmp_path: Path) -> None:
    done = ckptfix.convert(saved / "fsdp", tmp_path / "out.safetensors")
    assert done.at == "model" and set(done.left) == {"optim", "epoch", "seen"}
    wanted = load(saved / "fsdp.pt")["model"]
    found = load_file(tmp_path / "out.safetensors")
    assert_same(wanted, {name: found.pop(name) for name in wanted})
    assert not found


def test_it_is_listed_without_a_look_at_its_tensors(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_read, "tensor_item", None)
    found = ckptfix.inspect(saved / "mesh")
    assert (found.format, found.tensors) == ("dcp", 6)
    assert str(found.traits["saved at"]).endswith("mesh")
    assert detect(saved / "mesh").folder
    names = {mark.path.rpartition("/")[2] for mark in open_checkpoint(saved / "mesh").files}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_flipped_bit_is_found_on_the_way(copied: Copied, tmp_path: Path, suffix: str) -> None:
    folder = copied("mesh")
    checkpoint = open_checkpoint(folder)
    piece = dcp_read.tensor_piece(folder_of(checkpoint).tensors[0], folder_of(checkpoint).files)
    place = piece.checks[-1].data
    flip(Path(place.path), place.offset + 5)  # type: ignore[union-attr]
    with pytest.raises(DamagedFile, match=r"blocks\.weight.*do not match the CRC-32"):
        ckptfix.convert(folder, tmp_path / f"out{suffix}")
    assert not (tmp_path / f"out{suffix}").exists()


def folder_of(checkpoint: Any) -> dcp_read.Folder:
    found = checkpoint.inside.container
    assert isinstance(found, dcp_read.Folder)
    return found


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_missing_or_cut_file_is_named(copied: Copied, tmp_path: Path) -> None:
    folder = copied("mesh")
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(WouldLoseData, match=r"__1_0\.distcp: the file is missing"):
        ckptfix.convert(folder, tmp_path / "out.pth")
    assert ckptfix.inspect(folder).tensors == 6
    path = folder / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])
    rows = [row for row in doctor(folder).findings if row.id == "truncated"]
    assert {row.where for row in rows} == {"__1_0.distcp", "__2_0.distcp"}
    with pytest.raises(WouldLoseData):
        ckptfix.convert(folder, tmp_path / "out.safetensors")


def test_a_value_that_is_lost_leaves_the_rest_readable(copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp")
    (folder / "__0_0.distcp").unlink()
    assert ckptfix.inspect(folder).tensors == 35
    with pytest.raises(WouldLoseData):
        ckptfix.convert(folder, tmp_path / "out.pth")


def test_without_its_metadata_it_is_named(copied: Copied) -> None:
    folder = copied("mesh")
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    with pytest.raises(UnknownFormat) as raised:
        open_checkpoint(folder)
    assert raised.value.kind == "dcp-folder"
    assert "dcp-no-metadata" in {row.id for row in doctor(folder).findings}


def test_a_link_out_of_the_folder_is_not_followed(copied: Copied, tmp_path: Path) -> None:
    folder = copied("mesh")
    shutil.move(folder / "__0_0.distcp", tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    rows = [row for row in doctor(folder).findings if "leads out of its folder" in row.message]
    assert rows and {(row.id, row.severity) for row in rows} == {("truncated", "error")}
    with pytest.raises(WouldLoseData, match="leads out of its folder"):
        ckptfix.convert(folder, tmp_path / "out.pth")


@pytest.mark.parametrize(
    ("name", "words"),
    [(".metadata.tmp", "the save did not finish"), ("x", "without its")],
)
def test_what_can_be_known_without_metadata_is_said(copied: Copied, name: str, words: str) -> None:
    folder = copied("mesh")
    (folder / ".metadata").rename(folder / name)
    (found,) = (row for row in doctor(folder).findings if row.id == "dcp-no-metadata")
    assert words in found.message


def test_loaders_and_other_verbs_take_the_folder(saved: Path, tmp_path: Path) -> None:
    whole = load(saved / "fsdp.pt")
    assert_same(whole, ckptfix.load_checkpoint(saved / "fsdp"))
    assert_same(whole["model"], dict(ckptfix.load_state_dict(saved / "fsdp")))
    assert ckptfix.extract(saved / "fsdp", tmp_path / "out.pth").tensors == len(whole["model"])
    assert_same(whole["model"], dict(load(tmp_path / "out.pth")))
    assert ckptfix.diff(saved / "fsdp", saved / "fsdp.pt").same
    ckptfix.slim(saved / "fsdp", tmp_path / "slim.pth", no_optimizer=True)
    assert_same(whole["model"], load(tmp_path / "slim.pth")["model"])
    with pytest.raises(Unsupported, match="does not write a distributed checkpoint") as raised:
        ckptfix.sanitize(saved / "fsdp", tmp_path / "other")
    assert raised.value.hint is not None and "OUT.pth" in raised.value.hint


@pytest.mark.parametrize("edit", ["as it is", "stripped"])
def test_model_and_optimizer_are_resumed(saved: Path, tmp_path: Path, edit: str) -> None:
    folder = saved / "fsdp"
    if edit == "stripped":
        ckptfix.add_module(folder, tmp_path / "wrapped")
        folder = tmp_path / "wrapped"
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    ckptfix.load_into(model, folder)
    ckptfix.load_optimizer(optimizer, folder, model=model)
    whole = load(saved / "fsdp.pt")
    assert_same(whole["model"]["embed.weight"], model.embed.weight.detach())
    state = optimizer.state_dict()
    number = [name for name, _ in model.named_parameters()].index("embed.weight")
    assert torch.equal(state["state"][number]["exp_avg"], whole["optim"]["state"]["embed.weight"]["exp_avg"])
    assert state["param_groups"][0]["lr"] == 0.01


def test_sanitize_makes_one_plain_file_of_a_folder(tmp_path: Path) -> None:
    """What a value of a class is, and every tensor as it was; torch alone would run the pickle of the value."""
    state = {"model": {"w": torch.randn(3, 2)}, "args": Namespace(lr=0.1), "epoch": 3}
    save_folder(state, checkpoint_id=tmp_path / "in", **ALONE)
    done = ckptfix.sanitize(tmp_path / "in", tmp_path / "out.pth")
    assert done.exit_code == 0 and not done.dropped
    assert_same({**state, "args": {"lr": 0.1}}, torch.load(tmp_path / "out.pth", weights_only=True))

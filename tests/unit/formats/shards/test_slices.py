"""Tensors in slices, a file or more for each rank: joined, and refused where slices are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from sharded import State, load, same, write_index

import ckptfix
from ckptfix.errors import CkptfixError, Unsupported, WouldLoseData
from ckptfix.formats import open_checkpoint

FRAMEWORKS = ROOT.parent / "shared" / "frameworks"


def rank(folder: Path, number: int, rows: State, offsets: dict[str, list[int]], file: int = 1, files: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    said = json.dumps({name: {"saved_offsets": row} for name, row in offsets.items()})
    path = folder / f"shard-{number:05d}-model-{file:05d}-of-{files:05d}.safetensors"
    save_file(rows, path, metadata={"DCP_SHARDING_INFO": said, "DCP_VERSION": "1.0", "format": "pt"})
    return path


def made(folder: Path) -> State:
    """Rows, columns, tiles of a mesh, one row for each rank, and whole tensors."""
    torch.manual_seed(0)
    rows: State = {
        "rows": torch.randn(11, 3),
        "columns": torch.randn(4, 9).to(torch.bfloat16),
        "tiles": torch.randn(5, 7),
        "whole": torch.randn(3),
        "scalar": torch.tensor(3),
    }
    tiles = rows["tiles"]
    one = {
        "rows": rows["rows"][:6].clone(),
        "columns": rows["columns"][:, :5].contiguous(),
        "tiles": tiles[:3].contiguous(),
        "whole": rows["whole"],
    }
    two = {
        "rows": rows["rows"][6:].clone(),
        "columns": rows["columns"][:, 5:].contiguous(),
        "tiles": tiles[3:, :4].contiguous(),
        "scalar": rows["scalar"],
    }
    zero = [0, 0]
    rank(folder, 1, one, {"rows": zero, "columns": zero, "tiles": zero, "whole": [0]})
    rank(folder, 2, two, {"rows": [6, 0], "columns": [0, 5], "tiles": [3, 0], "scalar": []})
    rank(folder, 3, {"tiles": tiles[3:, 4:].contiguous()}, {"tiles": [3, 4]})
    return rows


def test_slices_are_joined(tmp_path: Path) -> None:
    wanted = made(tmp_path / "in")
    found = open_checkpoint(tmp_path / "in")
    assert found.format == "hf-dcp" and not list(found.findings)
    assert {entry.key: entry.shape for entry in found.entries} == {
        name: tuple(value.shape) for name, value in wanted.items()
    }
    assert "DCP_SHARDING_INFO" not in found.metadata
    assert same(ckptfix.load_state_dict(tmp_path / "in"), wanted)
    for name in ("out.pth", "out.safetensors"):
        done = ckptfix.convert(tmp_path / "in", tmp_path / name)
        assert (done.exit_code, done.account.lost) == (0, ())
        assert same(ckptfix.load_state_dict(tmp_path / name), wanted)
        assert ckptfix.diff(tmp_path / "in", tmp_path / name).same
    ckptfix.convert(tmp_path / "in", tmp_path / "out", to="hf", shard_size=100)
    assert same(load(tmp_path / "out"), wanted)
    assert ckptfix.doctor(tmp_path / "in").exit_code() == 0
    ckptfix.extract(tmp_path / "in", tmp_path / "taken.pth")
    assert same(torch.load(tmp_path / "taken.pth"), wanted)


def test_a_rank_whose_file_is_missing_leaves_holes(tmp_path: Path) -> None:
    made(tmp_path / "in")
    next((tmp_path / "in").glob("shard-00001-*")).unlink()
    holes = {row.where: row.message for row in open_checkpoint(tmp_path / "in").findings}
    assert set(holes) == {"rows", "columns", "tiles"}
    assert "rows 0 to 5" in holes["rows"]
    with pytest.raises(WouldLoseData, match="its slices do not cover") as caught:
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert "3 such" in str(caught.value)
    assert {row.where for row in ckptfix.doctor(tmp_path / "in").findings if row.id == "missing-slices"} == set(holes)
    assert not (tmp_path / "out.pth").exists()


def test_slices_that_overlap_are_refused_though_their_sizes_fit(tmp_path: Path) -> None:
    rank(tmp_path / "in", 1, {"w": torch.ones(2), "v": torch.ones(1)}, {"w": [0], "v": [0]})
    rank(tmp_path / "in", 2, {"w": torch.ones(2)}, {"w": [1]})
    rank(tmp_path / "in", 3, {"w": torch.ones(1)}, {"w": [4]})
    assert not list(open_checkpoint(tmp_path / "in").findings)
    assert {row.id for row in ckptfix.doctor(tmp_path / "in", fast=True).findings} >= {"missing-slices"}
    with pytest.raises(CkptfixError, match="w"):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(
    "said", ["{", "[]", '{"w": 1}', '{"w": {"saved_offsets": [-1]}}', '{"w": {"saved_offsets": [0, 0]}}', "[" * 9999]
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, said: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata={"DCP_SHARDING_INFO": said})
    assert [row.id for row in open_checkpoint(folder).findings] == ["missing-slices"]
    with pytest.raises(CkptfixError):
        ckptfix.convert(folder, tmp_path / "out.pth")


def test_slices_are_joined_before_they_are_edited(tmp_path: Path) -> None:
    made(tmp_path / "in")
    with pytest.raises(Unsupported, match="slices of tensors") as caught:
        ckptfix.add_module(tmp_path / "in", tmp_path / "out")
    assert "--to hf" in str(caught.value.hint)


def test_files_that_ranks_wrote_over_each_other_are_refused(tmp_path: Path) -> None:
    """What HuggingFaceStorageWriter leaves with save_distributed=False and two ranks: the index looks sound."""
    folder = tmp_path / "in"
    path = rank(folder, 1, {"w": torch.ones(2, 3), "v": torch.ones(1)}, {"w": [2, 0], "v": [0]})
    path.rename(folder / "model-00001-of-00001.safetensors")
    write_index(folder / "model.safetensors.index.json", dict.fromkeys("wv", "model-00001-of-00001.safetensors"), 28)
    with pytest.raises(WouldLoseData, match="rows 0 to 1"):
        ckptfix.convert(folder, tmp_path / "out.pth")


@pytest.mark.parametrize("name", ["dist/hf_dcp_sharded", "dist/hf_dcp_consol", "dist/hf_dcp_consol/sharded"])
def test_what_the_storage_writer_wrote_has_the_tensors_of_the_model(name: str, tmp_path: Path) -> None:
    if not (FRAMEWORKS / name).is_dir():
        pytest.skip("no shared/frameworks here")
    truth = torch.load(FRAMEWORKS / "dist" / "fsdp2_truth.pt", weights_only=True)
    ckptfix.convert(FRAMEWORKS / name, tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert set(truth) - set(found) <= {"steps", "bn.num_batches_tracked"}
    assert {key: value.shape for key, value in found.items()} == {key: truth[key].shape for key in found}
    # The running statistics are of the rank that wrote them.
    shared = [key for key in found if not key.startswith("bn.running")]
    assert same({key: found[key] for key in shared}, {key: truth[key] for key in shared})


def test_what_torch_broke_is_refused_by_name(tmp_path: Path) -> None:
    if not (FRAMEWORKS / "dist" / "hf_dcp").is_dir():
        pytest.skip("no shared/frameworks here")
    with pytest.raises(WouldLoseData, match=r"blocks\.0\.a\.bias.*do not cover \[26\]"):
        ckptfix.convert(FRAMEWORKS / "dist" / "hf_dcp", tmp_path / "out.pth")
    assert ckptfix.doctor(FRAMEWORKS / "dist" / "hf_dcp").exit_code() == 1

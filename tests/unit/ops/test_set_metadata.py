"""The pairs of a safetensors file: those that are named change, and no tensor byte does."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import ckptfix
from ckptfix.errors import Refused, Unsupported, WouldLoseData


def metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    safetensors.torch.save_file({"w": torch.randn(300)}, path, metadata={"format": "pt", "a": "1", "b": "2" * 60})
    return path


@pytest.mark.parametrize("in_place", [False, True])
def test_pairs_are_set_and_deleted(source: Path, tmp_path: Path, in_place: bool) -> None:
    before = source.read_bytes()
    weights = safetensors.torch.load_file(source)
    dest = source if in_place else tmp_path / "out.safetensors"
    done = ckptfix.set_metadata(
        source,
        None if in_place else dest,
        pairs={"a": "ü", "c": "x" * 20},
        delete=["b", "no"],
        allow_unmatched=True,
        in_place=in_place,
    )
    assert {key: value for key, value in metadata(dest).items() if not key.startswith("ckptfix")} == {
        "format": "pt", "a": "ü", "c": "x" * 20,
    }  # fmt: skip
    assert torch.equal(safetensors.torch.load_file(dest)["w"], weights["w"])
    assert (done.changed, done.deleted) == (("a", "c"), ("b",))
    assert [row.where for row in done.findings if row.id == "unused-rule"] == ["no"]
    if in_place:
        ckptfix.undo(source)
        assert source.read_bytes() == before


def test_shards_all_get_them(tmp_path: Path) -> None:
    torch.save({f"w{i}": torch.randn(100) for i in range(4)}, tmp_path / "in.pth")
    ckptfix.convert(tmp_path / "in.pth", tmp_path / "in", to="hf", shard_size=500)
    ckptfix.set_metadata(tmp_path / "in", tmp_path / "out", pairs={"a": "b"})
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and all(metadata(file)["a"] == "b" for file in files)


def test_what_would_make_or_break_a_tie_is_refused(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2, bias=False), "b": torch.nn.Linear(3, 2, bias=False)})
    model["b"].weight = model["a"].weight
    safetensors.torch.save_model(model, str(tmp_path / "in.safetensors"))
    for tie in (name for name in ("a.weight", "b.weight") if name in metadata(tmp_path / "in.safetensors")):
        with pytest.raises(WouldLoseData):
            ckptfix.set_metadata(tmp_path / "in.safetensors", tmp_path / "out.safetensors", delete=[tie])
    (stored,) = safetensors.torch.load_file(tmp_path / "in.safetensors")
    with pytest.raises(Refused, match="the key of a tensor"):
        ckptfix.set_metadata(tmp_path / "in.safetensors", tmp_path / "out.safetensors", pairs={stored: "x"})


def test_a_torch_file_has_none(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "in.pth")
    with pytest.raises(Unsupported, match="has no metadata pairs"):
        ckptfix.set_metadata(tmp_path / "in.pth", tmp_path / "out.pth", pairs={"a": "b"})


def test_both_set_and_deleted_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="both set and deleted"):
        ckptfix.set_metadata(source, tmp_path / "out.safetensors", pairs={"a": "b"}, delete=["a"])

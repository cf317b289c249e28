"""Edits of a folder of shards: the headers, the index, and what lies beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file
from sharded import State, index_of, load, nbytes, parted, same, state, write

import ckptfix
from ckptfix.checkpoint import Drop, Put, Rename, SetMetadata
from ckptfix.errors import CkptfixError, KeyConflict, NoSuchTensor
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.io.folders import write_folder

FRAMEWORKS = ROOT.parent / "shared" / "frameworks"


@pytest.fixture(params=["safetensors", "bin"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def edited(folder: Path, dest: Path, *edits: object) -> Path:
    checkpoint = open_checkpoint(folder)
    write_folder(FORMATS[checkpoint.format].plan_edit(checkpoint, edits, str(dest)), str(dest))  # type: ignore[arg-type]
    return dest


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


RENAMES: dict[str, tuple[str, Callable[[Path, Path], object], Callable[[str], str]]] = {
    "strip-module": ("module.", ckptfix.strip_module, lambda name: name.removeprefix("module.")),
    "add-module": ("", ckptfix.add_module, lambda name: f"module.{name}"),
    "unwrap": ("_orig_mod.", ckptfix.unwrap, lambda name: name.removeprefix("_orig_mod.")),
    "rename": (
        "",
        lambda source, dest: ckptfix.rename(source, dest, subs=[(r"layers\.(\d+)", r"blocks.\1.inner")]),
        lambda name: re.sub(r"layers\.(\d+)", r"blocks.\1.inner", name),
    ),
}


@pytest.mark.parametrize("verb", RENAMES)
def test_names_change_in_the_shards_and_in_the_index(tmp_path: Path, kind: str, verb: str) -> None:
    prefix, call, new = RENAMES[verb]
    wanted = {new(name): value for name, value in state(6, prefix).items()}
    folder = write(tmp_path / "in", parted(state(6, prefix), 3), kind=kind)
    before = bytes_of(folder)
    done = call(folder, tmp_path / "out")
    assert (done.exit_code, done.account.lost) == (0, ())  # type: ignore[attr-defined]
    assert same(load(tmp_path / "out"), wanted)
    assert index_of(tmp_path / "out")["weight_map"] == {
        new(name): shard for name, shard in index_of(folder)["weight_map"].items()
    }
    assert index_of(tmp_path / "out")["metadata"] == index_of(folder)["metadata"]
    assert set(bytes_of(tmp_path / "out")) == set(before) == set(bytes_of(folder))
    assert bytes_of(folder) == before
    assert (tmp_path / "out" / "config.json").read_bytes() == before["config.json"]
    assert not ckptfix.inspect(tmp_path / "out").findings


def test_there_and_back_is_the_same_folder(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "in", parted(state(), 3), kind=kind)
    ckptfix.add_module(folder, tmp_path / "added")
    ckptfix.strip_module(tmp_path / "added", tmp_path / "out")
    if kind == "safetensors":
        assert bytes_of(tmp_path / "out") == bytes_of(folder)
    assert same(load(tmp_path / "out"), state())
    assert index_of(tmp_path / "out") == index_of(folder)


def test_an_edit_with_nothing_to_do_is_a_copy(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "in", parted(state(), 3), kind=kind)
    (folder / "empty.txt").write_bytes(b"")
    done = ckptfix.strip_module(folder, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(folder) and "identical copy" in str(done)


def test_an_index_keeps_its_layout_and_what_else_it_says(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    index = folder / "model.safetensors.index.json"
    about = {"total_size": nbytes(state(2)), "total_parameters": 5}
    document: dict[str, Any] = {"metadata": about, "more": [1, {"\u00fc": None}]}
    document["weight_map"] = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps(document, indent="\t", ensure_ascii=False), encoding="utf-8")
    ckptfix.add_module(folder, tmp_path / "out")
    text = (tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8")
    document["weight_map"] = {f"module.{name}": shard for name, shard in document["weight_map"].items()}
    assert text == json.dumps(document, indent="\t", ensure_ascii=False)


def test_folders_and_other_checkpoints_stay_behind_and_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    (folder / "runs").mkdir()
    (folder / "runs" / "log").write_text("x")
    (tmp_path / "secret").write_text("key")
    (folder / "link").symlink_to("../secret")
    save_file(state(1), folder / "model-00009-of-00009.safetensors")
    done = ckptfix.add_module(folder, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert "left behind: model-00009-of-00009.safetensors, link, runs" in str(done)
    assert {row.where for row in done.findings if row.id == "left-behind"} == {
        "link", "runs", "model-00009-of-00009.safetensors"
    }  # fmt: skip


def test_shards_of_a_download_cache_are_links_to_blobs(tmp_path: Path) -> None:
    made = write(tmp_path / "made", parted(state(2, "module."), 2))
    blobs = tmp_path / "models--x" / "blobs"
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in made.iterdir():
        path.rename(blobs / f"hash-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash-{path.name}")
    ckptfix.strip_module(snapshot, tmp_path / "out")
    assert same(load(tmp_path / "out"), state(2))
    assert (tmp_path / "out" / "config.json").read_text() == '{"hidden_size": 5}\n'
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_names_of_different_shards_may_not_become_one(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "in", [{"a.w": torch.ones(1)}, {"b.w": torch.ones(2)}], kind=kind)
    with pytest.raises(KeyConflict):
        ckptfix.rename(folder, tmp_path / "out", subs=[(r"[ab]\.w", "w")])
    with pytest.raises(KeyConflict, match=r"a\.w and b\.w would become w"):
        edited(folder, tmp_path / "out", Rename("", "state_dict", {"a.w": "w"}), Rename("", "state_dict", {"b.w": "w"}))
    assert not (tmp_path / "out").exists()


def test_names_of_different_shards_may_change_places(tmp_path: Path, kind: str) -> None:
    rows: list[State] = [{"a": torch.ones(1)}, {"b": torch.ones(2)}]
    folder = write(tmp_path / "in", rows, kind=kind)
    edited(folder, tmp_path / "out", Rename("", "state_dict", {"a": "b", "b": "a"}))
    assert same(load(tmp_path / "out"), {"b": torch.ones(1), "a": torch.ones(2)})


def test_edits_follow_each_other(tmp_path: Path, kind: str) -> None:
    rows = state(2)
    folder = write(tmp_path / "in", parted(rows, 2), kind=kind)
    new = open_checkpoint(folder).entries[-1]
    renamed = {name: f"x.{name}" for name in rows}
    edits = [Rename("", "state_dict", renamed), Drop("", ("x.layers.0.bias",)), Put("", {"x.layers.0.weight": new})]
    edited(folder, tmp_path / "out", *edits)
    wanted = {f"x.{name}": value for name, value in rows.items() if name != "layers.0.bias"}
    wanted["x.layers.0.weight"] = rows[new.key]
    assert same(load(tmp_path / "out"), wanted)
    index: dict[str, Any] = index_of(tmp_path / "out")
    assert set(index["weight_map"]) == set(wanted)
    assert index["metadata"]["total_size"] == nbytes(wanted)
    with pytest.raises(NoSuchTensor, match="no such tensor"):
        edited(folder, tmp_path / "no", Drop("", ("nobody",)))


def test_metadata_is_set_in_every_shard(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    edited(folder, tmp_path / "out", SetMetadata({"who": "me"}))
    shards = [open_checkpoint(path) for path in (tmp_path / "out").glob("*.safetensors")]
    assert [shard.metadata["who"] for shard in shards] == ["me", "me"]


def test_ties_of_a_shard_follow_its_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    shard = folder / "model-00001-of-00002.safetensors"
    save_file(load_file(shard), shard, metadata={"format": "pt", "head.weight": "layers.0.weight"})
    assert "head.weight" in ckptfix.load_state_dict(folder)
    ckptfix.add_module(folder, tmp_path / "out")
    found = ckptfix.load_state_dict(tmp_path / "out", strip=None)
    assert found["module.head.weight"].data_ptr() == found["module.layers.0.weight"].data_ptr()
    assert not ckptfix.inspect(tmp_path / "out").findings


def test_ties_within_a_torch_shard_are_kept(tmp_path: Path) -> None:
    base = torch.randn(4, 3)
    folder = write(tmp_path / "in", [{"module.a": base, "module.b": base}, {"module.c": torch.ones(2)}], kind="bin")
    done = ckptfix.strip_module(folder, tmp_path / "out")
    found = torch.load(tmp_path / "out" / "pytorch_model-00001-of-00002.bin", weights_only=True)
    assert list(found) == ["a", "b"] and found["a"].data_ptr() == found["b"].data_ptr() and done.exit_code == 0


def test_devices_of_torch_shards_move(tmp_path: Path) -> None:
    rows = state(4)
    folder = write(tmp_path / "in", parted(rows, 2), kind="bin")
    ckptfix.map_location(folder, tmp_path / "moved", {"cpu": "cuda:1"})
    assert ckptfix.inspect(tmp_path / "moved").devices == {"cuda:1": 8}
    assert "device-tags" in {finding.id for finding in ckptfix.doctor(tmp_path / "moved").findings}
    done = ckptfix.to_cpu(tmp_path / "moved", tmp_path / "out")
    assert done.exit_code == 0 and same(load(tmp_path / "out"), rows)
    again = ckptfix.to_cpu(write(tmp_path / "st", parted(rows, 2)), tmp_path / "same")
    assert "nothing to do" in str(again)


def test_names_are_matched_to_a_model(tmp_path: Path, kind: str) -> None:
    rows = state(4)
    folder = write(tmp_path / "in", parted(rows, 2), kind=kind)
    torch.save({f"net.{name}": value for name, value in rows.items()}, tmp_path / "like.pth")
    assert ckptfix.match(folder, tmp_path / "out", like=tmp_path / "like.pth").exit_code == 0
    assert same(load(tmp_path / "out"), {f"net.{name}": value for name, value in rows.items()})
    done = ckptfix.match(tmp_path / "like.pth", tmp_path / "back.pth", like=folder)
    assert done.exit_code == 0 and same(torch.load(tmp_path / "back.pth"), rows)


def test_a_folder_is_replaced_when_asked(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    ckptfix.add_module(folder, tmp_path / "out")
    with pytest.raises(CkptfixError, match="exists"):
        ckptfix.add_module(folder, tmp_path / "out")
    done = ckptfix.add_module(folder, tmp_path / "out", prefix="net", force=True)
    assert done.backup is not None and same(load(tmp_path / "out"), state(2, "net."))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "out.~1~"]
    with pytest.raises(CkptfixError, match="the output is the input"):
        ckptfix.add_module(folder, folder, force=True)
    dry = ckptfix.add_module(folder, tmp_path / "dry", dry_run=True)
    assert len(dry.plan.files) == 4 and not (tmp_path / "dry").exists()


def test_a_suffix_of_one_file_makes_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    ckptfix.add_module(folder, tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors"), state(2, "module."))


def test_it_is_loaded_into_a_model(tmp_path: Path, kind: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    rows = {f"module.{name}": value for name, value in model.state_dict().items()}
    folder = write(tmp_path / "in", parted(rows, 3), kind=kind)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    ckptfix.load_into(other, folder)
    assert same(other.state_dict(), model.state_dict())
    assert same(ckptfix.load_checkpoint(folder), rows)


@pytest.mark.parametrize("name", ["hf/gpt2_sharded", "hf/gpt2_acc_bin", "hf/llama_bf16", "hf/mixtral"])
def test_folders_of_frameworks_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    if not (FRAMEWORKS / name).is_dir():
        pytest.skip("no shared/frameworks here")
    ckptfix.add_module(FRAMEWORKS / name, tmp_path / "added")
    assert same(
        load(tmp_path / "added"), {f"module.{key}": value for key, value in load(FRAMEWORKS / name).items()}
    )
    ckptfix.strip_module(tmp_path / "added", tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(FRAMEWORKS / name)

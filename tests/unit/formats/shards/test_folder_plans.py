"""What each way to plan a folder of shards does to its files, its index and what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded import index_of, load, nbytes, parted, same, state, write

import ckptfix
from ckptfix.checkpoint import Drop, Edit, Put, Rename, SetLocation, SetMetadata
from ckptfix.errors import KeyConflict, NoSuchTensor, Refused, Unsupported, WouldLoseData
from ckptfix.formats import FORMATS, open_checkpoint, weights_of
from ckptfix.formats.shards.write import plan_write, split
from ckptfix.io.folders import write_folder


@pytest.fixture(params=["safetensors", "bin"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edited(folder: Path, dest: Path, *edits: Edit) -> Path:
    checkpoint = open_checkpoint(folder)
    write_folder(FORMATS[checkpoint.format].plan_edit(checkpoint, edits, str(dest)), str(dest))
    return dest


def said(folder: Path, **total: int) -> None:
    """Let the index give another total than its shards have."""
    (path,) = folder.glob("*.index.json")
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "metadata": {"total_size": 1, **total}}))


def cut(folder: Path) -> Path:
    """Take a shard away."""
    sorted(folder.glob("*-of-*"))[-1].unlink()
    return folder


def test_an_edit_in_place_makes_what_a_copy_is(tmp_path: Path, kind: str) -> None:
    rows = state(6)
    folder = write(tmp_path / "in", parted(state(6, "module."), 3), kind=kind)
    before = bytes_of(folder)
    shards = {path: path.stat().st_ino for path in folder.glob("*-of-*")}
    done = ckptfix.strip_module(folder, in_place=True)
    assert done.exit_code == 0
    assert same(load(folder), {name: state(6, "module.")[f"module.{name}"] for name in rows})
    assert set(index_of(folder)["weight_map"]) == set(rows)
    assert {path: path.stat().st_ino for path in shards} == shards
    while ckptfix.undo(folder).undone:
        pass
    assert bytes_of(folder) == before


@pytest.mark.parametrize("verb", ["slim", "sanitize", "strip_module"])
def test_what_changes_no_shard_keeps_the_index_as_it_is(tmp_path: Path, kind: str, verb: str) -> None:
    folder = write(tmp_path / "in", parted(state(4), 2), kind=kind)
    said(folder)
    getattr(ckptfix, verb)(folder, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(folder)


@pytest.mark.parametrize("verb", ["slim", "sanitize", "strip_module"])
def test_a_missing_shard_is_refused(tmp_path: Path, kind: str, verb: str) -> None:
    folder = cut(write(tmp_path / "in", parted(state(4, "module."), 2), kind=kind))
    with pytest.raises(WouldLoseData):
        getattr(ckptfix, verb)(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_slim_says_the_new_total(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", [{"a": torch.zeros(1000, 4)[0]}, {"b": torch.ones(2)}], kind="bin")
    said(folder)
    ckptfix.slim(folder, tmp_path / "out")
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == 4 * 4 + 2 * 4


@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_of_which_nothing_is_left_goes_if_an_index_can_say_so(tmp_path: Path, kind: str, indexed: bool) -> None:
    rows = state(4)
    one, two = parted(rows, 2)
    folder = write(tmp_path / "in", [one, two], kind=kind, index=indexed)
    edited(folder, tmp_path / "out", Drop("", tuple(one)))
    shards = sorted(path.name for path in (tmp_path / "out").glob("*-of-*"))
    assert len(shards) == (1 if indexed else 2)
    if indexed:
        assert same(load(tmp_path / "out"), two)
        assert index_of(tmp_path / "out")["metadata"]["total_size"] == nbytes(two)


def test_shards_stay_where_all_is_dropped(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2), kind=kind)
    edited(folder, tmp_path / "out", Drop("", tuple(state(2))))
    assert len([*(tmp_path / "out").glob("*-of-*")]) == 2
    assert index_of(tmp_path / "out")["weight_map"] == {}
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == 0


@pytest.mark.parametrize("edit", [
    Rename("", "state_dict", {"layers.0.bias": "b", "no.b": "c", "no.a": "d"}),
    Drop("", ("no.b", "no.a")),
], ids=["rename", "drop"])  # fmt: skip
def test_a_name_that_no_shard_has_is_refused(tmp_path: Path, kind: str, edit: Edit) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2), kind=kind)
    with pytest.raises(NoSuchTensor) as caught:
        edited(folder, tmp_path / "out", edit)
    assert caught.value.where == "no.a" and caught.value.path == str(folder)
    with pytest.raises(NoSuchTensor):
        edited(folder, tmp_path / "out", Put("", {"no.a": open_checkpoint(folder).entries[0]}))


def test_every_name_that_two_shards_would_share_is_listed(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "in", [{"a": torch.ones(1), "b": torch.ones(1)}, {"c": torch.ones(1)}], kind=kind)
    with pytest.raises(KeyConflict, match="a and c would become x") as caught:
        edited(folder, tmp_path / "out", Rename("", "state_dict", {"a": "x", "c": "x"}))
    assert caught.value.pairs == (("x", ("a", "c")),)
    edited(folder, tmp_path / "dropped", Drop("", ("a",)), Rename("", "state_dict", {"c": "a"}))
    assert set(load(tmp_path / "dropped")) == {"a", "b"}


def test_a_device_moves_only_in_the_shards_that_have_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2), kind="bin")
    checkpoint = open_checkpoint(folder)
    plan = FORMATS[checkpoint.format].plan_edit(checkpoint, [SetLocation({"cuda:7": "cpu"})], str(tmp_path / "out"))
    write_folder(plan, str(tmp_path / "out"))
    assert bytes_of(tmp_path / "out") == bytes_of(folder)


def planned_rows(folder: Path, dest: Path, new: Mapping[str, str]) -> None:
    """Write these tensors of a folder under new keys, as rules that change tensors do."""
    checkpoint = open_checkpoint(folder)
    entries = {entry.key: entry for entry in weights_of(checkpoint, "")}
    plan = FORMATS[checkpoint.format].plan_rows
    assert plan is not None
    rows = [(old, replace(entries[old], key=key)) for old, key in new.items()]
    write_folder(plan(checkpoint, rows, str(dest), {"who": "me"}), str(dest))


def test_new_tensors_lie_in_the_shards_of_their_old_keys(tmp_path: Path) -> None:
    rows = state(4)
    parts = parted(rows, 4)
    folder = write(tmp_path / "in", parts)
    said(folder)
    first = folder / "model-00001-of-00004.safetensors"
    save_file(load_file(first), first, metadata={"format": "pt", "head": "layers.0.weight"})
    kept = {old: f"x.{old}" for part in parts[:3] for old in part}
    planned_rows(folder, tmp_path / "out", {"head": "x.head", **kept})
    wanted = {f"x.{old}": rows[old] for old in kept}
    assert same(ckptfix.load_state_dict(tmp_path / "out", strip=None), {**wanted, "x.head": rows["layers.0.weight"]})
    index = index_of(tmp_path / "out")
    assert len(index["weight_map"]) == len(kept), "a tie has no place of its own"
    before = index_of(folder)["weight_map"]
    assert all(index["weight_map"][f"x.{old}"] == before[old] for old in kept if old != "layers.0.weight")
    assert index["metadata"]["total_size"] == nbytes(wanted)
    shards = [open_checkpoint(path) for path in (tmp_path / "out").glob("*-of-*")]
    assert [shard.metadata["who"] for shard in shards] == ["me"] * 3, "a shard that keeps no tensor is not written"
    assert (tmp_path / "out/config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert not ckptfix.inspect(tmp_path / "out").findings


def test_a_folder_without_an_index_gets_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2), index=False)
    planned_rows(folder, tmp_path / "out", {name: f"x.{name}" for name in state(2)})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in folder.iterdir())


def test_shards_that_are_full_are_ended(tmp_path: Path) -> None:
    """Tensors of 4, 8, 4, 40 and 4 bytes in shards of 12: the large one has a shard of its own."""
    sizes = {"a": 1, "b": 2, "c": 1, "large": 10, "d": 1, "e": 1, "f": 1}
    source = tmp_path / "in.safetensors"
    save_file({name: torch.full((count,), 1.0) for name, count in sizes.items()}, source)
    entries = {entry.key: entry for entry in open_checkpoint(source).entries}
    plan = plan_write([entries[name] for name in sizes], str(tmp_path / "out"), shard_size=12)
    write_folder(plan, str(tmp_path / "out"))
    index = index_of(tmp_path / "out")
    shards: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        shards.setdefault(file, []).append(name)
    assert sorted(shards.values()) == [["a", "b"], ["c", "d", "e"], ["f"], ["large"]]
    assert list(index["weight_map"]) == list(sizes)
    assert index["metadata"] == {"total_size": 4 * sum(sizes.values())}
    assert {file.partition("-of-")[2] for file in shards} == {"00004.safetensors"}
    whole = plan_write([entries[name] for name in sizes], str(tmp_path / "one"), shard_size=68)
    assert [Path(file.path).name for file in whole.files] == ["model.safetensors"]
    with pytest.raises(KeyConflict):
        plan_write([entries["a"], entries["b"], entries["large"], entries["a"]], str(tmp_path / "no"), shard_size=12)


def test_as_many_shards_as_an_index_may_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.formats.shards.write.MAX_SHARDS", 2)
    save_file({name: torch.ones(2) for name in "abc"}, tmp_path / "in.safetensors")
    entries = open_checkpoint(tmp_path / "in.safetensors").entries
    plan = plan_write(entries, str(tmp_path / "out"), shard_size=16)
    assert [Path(file.path).name for file in plan.files] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip
    with pytest.raises(Refused, match="3 shards of 8 bytes are too many; the limit is 2"):
        plan_write(entries, str(tmp_path / "out"), shard_size=8)


def test_a_view_stays_with_what_it_is_a_view_of(tmp_path: Path) -> None:
    save_file({name: torch.ones(2) for name in "abcd"}, tmp_path / "in.safetensors")
    entries = open_checkpoint(tmp_path / "in.safetensors").entries
    found = split(entries, {"d": "a", "b": "gone", "gone": "c"}, 8)
    assert [[entry.key for entry in shard] for shard in found] == [["a", "d"], ["b"], ["c"]]


def test_some_names_of_a_shard_change(tmp_path: Path, kind: str) -> None:
    rows = state(4)
    folder = write(tmp_path / "in", parted(rows, 2), kind=kind)
    new = {"layers.0.bias": "first", "layers.3.weight": "last"}
    edited(folder, tmp_path / "out", Rename("", "state_dict", new))
    assert same(load(tmp_path / "out"), {new.get(name, name): value for name, value in rows.items()})


def test_torch_shards_have_no_metadata(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2), kind="bin")
    with pytest.raises(Unsupported, match="a torch file has no string metadata"):
        edited(folder, tmp_path / "out", SetMetadata({"who": "me"}))

"""Edits of a folder: `.metadata` is written again, everything else is the same; torch reads what comes out."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from dcp_ranks import merged
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_folder
from torch_versions import ALONE

import ckptfix
from ckptfix.checkpoint import Checkpoint, Drop, Edit, Plan, Put, Rename, Storage, TensorEntry
from ckptfix.errors import CkptfixError, KeyConflict, Unsupported
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.formats.dcp import edit as dcp_edit
from ckptfix.formats.dcp import format as dcp_format
from ckptfix.io.folders import write_folder
from ckptfix.ops.audit import output as law_output
from ckptfix.ops.doctor import doctor

Copied = Callable[[str], Path]


def wrapped(state: Any) -> Any:
    """What DistributedDataParallel would have saved: every name of a parameter begins with ``module.``."""
    model = {f"module.{name}": value for name, value in state["model"].items()}
    optim = dict(state["optim"])
    optim["state"] = {f"module.{name}": value for name, value in optim["state"].items()}
    group = dict(optim["param_groups"][0])
    group["params"] = [f"module.{name}" for name in group["params"]]
    optim["param_groups"] = [group]
    return {**state, "model": model, "optim": optim}


def test_names_change_wherever_they_stand(saved: Path, tmp_path: Path) -> None:
    whole = torch.load(saved / "fsdp.pt", weights_only=False)
    done = ckptfix.add_module(saved / "fsdp", tmp_path / "out")
    assert (done.exit_code, done.format, done.account.lost) == (0, "dcp", ())
    assert_same(wrapped(whole), merged(tmp_path / "out", tmp_path))
    ckptfix.strip_module(tmp_path / "out", tmp_path / "back")
    assert_same(whole, merged(tmp_path / "back", tmp_path))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "at"), [("fsdp", None), ("mesh", None), ("odd", "tied"), ("flat", "inner"), ("small", None)]
)
def test_an_edit_in_place_equals_the_copy_and_is_taken_back(
    copied: Copied, tmp_path: Path, name: str, at: str | None
) -> None:
    folder = copied(name)
    subs = [("weight$", "a_longer_weight"), ("w$", "ww")]
    before = contents(folder)
    wanted = ckptfix.rename(folder, tmp_path / "copy", subs=subs, at=at, allow_unmatched=True)
    done = ckptfix.rename(folder, in_place=True, subs=subs, at=at, allow_unmatched=True)
    assert done.written and done.exit_code == wanted.exit_code == 0 and not done.account.lost
    assert_same(merged(tmp_path / "copy", tmp_path), merged(folder, tmp_path))
    assert contents(folder).keys() == before.keys() | {".ckptfix-undo"}
    grown = [file for file, data in contents(folder).items() if len(data) > len(before.get(file, data))]
    assert all(contents(folder)[file].startswith(before[file]) for file in grown if file != ".metadata")
    assert not [row for row in doctor(folder).findings if row.severity == "error" and row.id != "wrapped-names"]
    assert ckptfix.undo(folder).undone
    assert contents(folder) == before


def test_torch_loads_a_folder_that_was_edited_in_place_twice(copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp")
    before = contents(folder)
    whole = merged(folder, tmp_path)
    ckptfix.add_module(folder, in_place=True)
    assert_same(wrapped(whole), merged(folder, tmp_path))
    once = contents(folder)
    ckptfix.strip_module(folder, in_place=True)
    assert_same(whole, merged(folder, tmp_path))
    ckptfix.undo(folder)
    assert {**contents(folder), ".ckptfix-undo": b""} == {**once, ".ckptfix-undo": b""}
    ckptfix.undo(folder)
    assert contents(folder) == before


def test_an_edit_in_place_that_replaces_or_drops_tensors_is_refused(copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp")
    checkpoint = open_checkpoint(folder)
    entry = next(entry for entry in checkpoint.entries if entry.name == "model/few")
    for edit in (Put("model", {"few": entry}), Drop("model", ("few",))):
        plan = dcp_edit.plan_edit(checkpoint, [edit], str(folder))
        with pytest.raises(Unsupported, match="changes data too"):
            dcp_edit.in_place(checkpoint, plan, lambda: 0)


def test_a_file_that_was_cut_short_does_not_grow(copied: Copied) -> None:
    """New bytes at its end would become those that an item has lost."""
    folder = copied("fsdp")
    first = folder / "__0_0.distcp"
    os.truncate(first, first.stat().st_size - 1)
    checkpoint = open_checkpoint(folder)
    edits = ckptfix.ops.rename.sites.add(checkpoint, prefix="module").edits
    plan = dcp_edit.in_place(checkpoint, dcp_edit.plan_edit(checkpoint, edits, str(folder)), lambda: 0)
    old = {Path(path).name: size for path, size in checkpoint_sizes(checkpoint)}
    grown = [Path(file.path).name for file in plan.files if file.nbytes > old.get(Path(file.path).name, 0)]
    assert grown == ["__1_0.distcp", ".metadata"]


def checkpoint_sizes(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    return [(mark.path, mark.stamp.size) for mark in checkpoint.files]


def test_the_files_of_tensors_are_the_same_and_what_lies_beside_goes_along(copied: Copied, tmp_path: Path) -> None:
    source = copied("mesh")
    (source / "common.pt").write_bytes(b"of Megatron")
    done = ckptfix.rename(source, tmp_path / "out", subs=[("^blocks", "layers")])
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names and done.account.lost == ()
    for name in names - {".metadata"}:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    found = merged(tmp_path / "out", tmp_path)
    wanted = merged(source, tmp_path)
    assert_same({name.replace("blocks", "layers"): value for name, value in wanted.items()}, found)


def test_nothing_to_do_is_a_copy(saved: Path, tmp_path: Path) -> None:
    done = ckptfix.strip_module(saved / "fsdp", tmp_path / "out")
    assert "identical copy" in done.lines[0]
    for path in (saved / "fsdp").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_torch_loads_it_into_a_model(saved: Path, tmp_path: Path) -> None:
    ckptfix.rename(saved / "mesh", tmp_path / "out", mapping={"plain.weight": "other.weight"})
    state = {"other.weight": torch.zeros(5, 3), "blocks.weight": torch.zeros(7, 6)}
    load_folder(state, checkpoint_id=tmp_path / "out", **ALONE)
    whole = torch.load(saved / "mesh.pt")
    assert_same({"other.weight": whole["plain.weight"], "blocks.weight": whole["blocks.weight"]}, state)


def test_flat_names_change_too(saved: Path, tmp_path: Path) -> None:
    ckptfix.rename(saved / "flat", tmp_path / "out", mapping={"top.weight": "new.weight"}, at="")
    found = merged(tmp_path / "out", tmp_path)
    assert list(found) == ["new.weight", "inner"]
    ckptfix.strip_module(saved / "flat", tmp_path / "inner", at="inner", partial=True)
    assert list(merged(tmp_path / "inner", tmp_path)["inner"]) == ["weight", "step"]


def planned(folder: Path, edits: Sequence[Edit], out: Path) -> Plan:
    plan = FORMATS["dcp"].plan_edit(open_checkpoint(folder), edits, str(out))
    write_folder(plan, str(out))
    return plan


def test_a_key_is_dropped(saved: Path, tmp_path: Path) -> None:
    planned(saved / "fsdp", [Drop("", ("optim", "epoch")), Drop("seen", ("none",))], tmp_path / "out")
    found = merged(tmp_path / "out", tmp_path)
    whole = torch.load(saved / "fsdp.pt", weights_only=False)
    del whole["optim"], whole["epoch"], whole["seen"]["none"]
    assert_same(whole, found)


def test_a_key_of_a_value_that_is_pickled_whole_is_dropped(tmp_path: Path) -> None:
    inside = {"a": torch.ones(2), "b": torch.zeros(2)}
    torch.save({"w": torch.ones(3), "pair": (inside,)}, tmp_path / "in.pth")
    ckptfix.convert(tmp_path / "in.pth", tmp_path / "in", to="dcp")
    planned(tmp_path / "in", [Drop("pair/0", ("a",))], tmp_path / "out")
    found = merged(tmp_path / "out", tmp_path)
    assert list(found["pair"][0]) == ["b"] and list(found) == ["w", "pair"]


def test_a_tensor_is_put_in_the_place_of_another(saved: Path, tmp_path: Path) -> None:
    (entry,) = (entry for entry in open_checkpoint(saved / "mesh").entries if entry.key == "rows.weight")
    assert entry.storage is not None and entry.storage.data is not None
    storage = Storage("new", "float32", entry.nbytes, "cpu", entry.storage.data)
    new = TensorEntry("any", "", storage, "float32", (3, 5), (5, 1))
    planned(saved / "mesh", [Put("", {"plain.weight": new})], tmp_path / "out")
    found, wanted = merged(tmp_path / "out", tmp_path), torch.load(saved / "mesh.pt")
    wanted["plain.weight"] = wanted["rows.weight"].clone().view(3, 5)
    assert_same(wanted, found)


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (Rename("", "state_dict", {"plain.weight": "rows.weight"}), KeyConflict),
        (Rename("", "state_dict", {"no such": "x"}), Unsupported),
        (Put("", {"no such": TensorEntry("x", "", None, "float32", (), ())}), Unsupported),
    ],
)
def test_what_cannot_be_done_is_refused(saved: Path, tmp_path: Path, edit: Edit, error: type[CkptfixError]) -> None:
    with pytest.raises(error):
        FORMATS["dcp"].plan_edit(open_checkpoint(saved / "mesh"), [edit], str(tmp_path / "out"))


def test_devices(saved: Path, tmp_path: Path) -> None:
    assert "nothing to do" in ckptfix.to_cpu(saved / "fsdp", tmp_path / "out").lines[0]
    with pytest.raises(Unsupported, match="states no device"):
        ckptfix.map_location(saved / "fsdp", tmp_path / "gpu", {"cpu": "cuda:0"})


def test_an_edit_is_counted_by_its_metadata_alone(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(law_output, "PlannedOutput", None)
    ckptfix.add_module(saved / "fsdp", tmp_path / "out")


def test_a_plan_is_trusted_where_its_files_are_copied_whole(saved: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved / "mesh")
    done = ckptfix.rename(saved / "mesh", tmp_path / "out", subs=[("^rows", "lines")], dry_run=True)
    assert done.plan is not None and dcp_edit.keeps_all(checkpoint, done.plan)
    one, two, *rest = done.plan.files
    swapped = (replace(one, path=two.path), replace(two, path=one.path), *rest)
    no_metadata = tuple(file for file in done.plan.files if not file.path.endswith(".metadata"))
    for files in (swapped, no_metadata, done.plan.files[1:]):
        assert not dcp_edit.keeps_all(checkpoint, replace(done.plan, files=files))


@pytest.mark.parametrize("fault", ["dropped", "swapped", "cut"])
def test_an_edit_that_loses_a_tensor_is_seen(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def forgetful(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
        if fault == "dropped":
            edits = [*edits, Drop("", ("plain.weight",))]
        plan = dcp_edit.plan_edit(checkpoint, edits, dest)
        if fault == "swapped":
            one, two, *rest = plan.files
            plan = replace(plan, files=(replace(one, path=two.path), replace(two, path=one.path), *rest))
        if fault == "cut":
            plan = replace(plan, files=plan.files[1:])
        return plan

    monkeypatch.setitem(FORMATS, "dcp", replace(dcp_format.FORMAT, plan_edit=forgetful))
    try:
        done = ckptfix.rename(saved / "mesh", tmp_path / "out", subs=[("^rows", "lines")])
    except CkptfixError:
        assert fault != "dropped" and not os.path.exists(tmp_path / "out")  # noqa: PTH110
    else:
        assert done.exit_code == 3 and done.account.lost


def test_files_that_do_not_change_may_be_linked(copied: Copied, tmp_path: Path) -> None:
    source = copied("fsdp")
    done = ckptfix.add_module(source, tmp_path / "out", link=True)
    assert [row.id for row in done.findings if row.severity == "warning"] == ["linked-files"]
    for rank in range(3):
        assert (tmp_path / "out" / f"__{rank}_0.distcp").samefile(source / f"__{rank}_0.distcp")
    assert not (tmp_path / "out" / ".metadata").samefile(source / ".metadata")
    assert_same(wrapped(merged(source, tmp_path)), merged(tmp_path / "out", tmp_path))


def test_one_file_is_not_linked(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "in.pth")
    with pytest.raises(CkptfixError, match="this is one file"):
        ckptfix.to_cpu(tmp_path / "in.pth", tmp_path / "out.pth", link=True)


def test_tensors_in_columns_are_counted_after_items_have_moved(saved: Path, tmp_path: Path) -> None:
    whole = torch.load(saved / "mesh.pt")
    for done, dest in (
        (ckptfix.select(saved / "mesh", tmp_path / "less", drop=["plain.weight"]), tmp_path / "less"),
        (ckptfix.cast(saved / "mesh", tmp_path / "cast", "bfloat16", only=["plain.weight"]), tmp_path / "cast"),
    ):
        assert not done.account.lost and done.exit_code == 0
        found = ckptfix.load_state_dict(dest)
        for name, tensor in found.items():
            expected = whole[name].bfloat16() if name == "plain.weight" else whole[name]
            assert torch.equal(tensor, expected), name


def test_items_without_archives_around_them_move_too(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    wanted = {name: torch.full((3,), float(number)) for number, name in enumerate("abc")}
    (folder / "__0_0.distcp").write_bytes(b"".join(tensor.numpy().tobytes() for tensor in wanted.values()))
    box = ChunkStorageMetadata(torch.Size((0,)), torch.Size((3,)))
    keys: dict[str, Any] = dict.fromkeys(wanted, TensorStorageMetadata(TensorProperties(), torch.Size((3,)), [box]))
    items = {
        MetadataIndex(name, box.offsets, 0): _StorageInfo("__0_0.distcp", 12 * number, 12)
        for number, name in enumerate(wanted)
    }
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(keys, {name: (name,) for name in wanted}, items)))
    ckptfix.select(folder, tmp_path / "out", drop=["b"])
    assert_same({name: wanted[name] for name in "ac"}, dict(ckptfix.load_state_dict(tmp_path / "out")))
    assert (tmp_path / "out" / "__0_0.distcp").stat().st_size == 24


def test_a_tensor_of_which_a_part_is_in_no_file_is_named_by_an_edit(copied: Copied, tmp_path: Path) -> None:
    """The metadata says so at no cost: what is copied as it is was damaged before."""
    folder = copied("mesh")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    lost = next(index for index in metadata.storage_data if index.fqn == "blocks.weight")
    del metadata.storage_data[lost]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    done = ckptfix.rename(folder, tmp_path / "out", subs=[("^blocks", "layers")])
    assert done.exit_code == 3 and any("DAMAGED in the input" in line for line in done.lines)
    found = [row for row in doctor(folder).findings if row.id == "bad-tensor"]
    assert [row.where for row in found] == ["blocks.weight"] and "no item" in found[0].message

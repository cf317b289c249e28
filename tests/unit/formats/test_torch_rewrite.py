"""Drop as an edit of torch files, alone and with other edits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptfix import formats
from ckptfix.checkpoint import Drop, Edit, Rename, SetLocation, TensorEntry
from ckptfix.errors import DamagedFile, NoSuchTensor, WouldLoseData
from ckptfix.formats.torch import emit, rewrite
from ckptfix.formats.torch.common import pickled_object
from ckptfix.io import write as io_write
from ckptfix.pickles import parse
from ckptfix.pickles.reemit import reemit

Made = dict[str, object]


@pytest.fixture(params=["zip", "legacy"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    weight = torch.arange(6.0)
    made: Made = {
        "model": {"fc.weight": weight, "fc.bias": torch.ones(2), "tied": weight[2:4]},
        "optimizer": {"state": {0: {"m": torch.zeros(100)}}, "param_groups": [{"lr": 0.1}]},
        "epoch": 3,
    }
    path = tmp_path / "in.pt"
    torch.save(made, path, _use_new_zipfile_serialization=request.param == "zip")
    return path


def edited(path: Path, *edits: Edit) -> Path:
    checkpoint = formats.open_checkpoint(path)
    dest = path.with_name("out.pt")
    io_write.write_plan(formats.FORMATS[checkpoint.format].plan_edit(checkpoint, edits, str(dest)))
    return dest


def test_what_is_dropped_takes_its_storage_along(saved: Path) -> None:
    out = edited(saved, Drop("", ("optimizer",)))
    found = torch.load(out, weights_only=True)
    assert set(found) == {"model", "epoch"}
    before = torch.load(saved, weights_only=True)
    assert all(torch.equal(found["model"][name], before["model"][name]) for name in before["model"])
    assert out.stat().st_size < saved.stat().st_size - 400
    checkpoint = formats.open_checkpoint(out)
    assert len({entry.storage.key for entry in checkpoint.entries if entry.storage}) == 2
    assert formats.FORMATS[checkpoint.format].name == formats.open_checkpoint(saved).format


def test_a_tied_view_keeps_the_storage(saved: Path) -> None:
    found = torch.load(edited(saved, Drop("model", ("fc.weight",))), weights_only=True)
    assert found["model"]["tied"].tolist() == [2.0, 3.0]


def test_edits_are_carried_out_in_their_order(saved: Path) -> None:
    renamed = Rename("model", "state_dict", {"fc.bias": "head.bias"})
    out = edited(saved, SetLocation({"cpu": "cuda:0"}), renamed, Drop("model", ("head.bias",)), Drop("", ("epoch",)))
    found = torch.load(out, map_location="cpu", weights_only=True)
    assert set(found["model"]) == {"fc.weight", "tied"} and "epoch" not in found
    assert set(formats.open_checkpoint(out).devices) == {"cuda:0"}
    with pytest.raises(NoSuchTensor):
        edited(saved, Drop("model", ("head.bias",)), renamed)


@pytest.mark.parametrize("drop", [Drop("", ("nothing",)), Drop("nowhere", ("x",)), Drop("model", ("fc",))])
def test_what_is_not_there_can_not_go(saved: Path, drop: Drop) -> None:
    with pytest.raises(NoSuchTensor):
        edited(saved, drop)


def test_a_pickle_that_fails_its_checksum_is_not_edited(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    torch.save({"a": torch.ones(2), "lr": 7}, path)
    data = path.read_bytes()
    at = data.index(b"lr")
    path.write_bytes(data[:at] + b"Lr" + data[at + 2 :])
    with pytest.raises(DamagedFile, match="CRC-32"):
        edited(path, Drop("", ("Lr",)))


def test_storages_that_get_no_new_key_keep_theirs(saved: Path) -> None:
    def keys(pickle: bytes) -> set[str]:
        return set(parse(pickle).storages())

    before = reemit(pickled_object(formats.open_checkpoint(saved)).graph)
    one, *others = keys(before.pickle)
    assert others
    after = rewrite.renumbered(before, {one: "new"}, "in")
    assert keys(after.pickle) == {"new", *others}


@pytest.mark.parametrize("count", [8, 9])
def test_of_the_tensors_that_cannot_be_written_eight_are_named(count: int) -> None:
    entry = TensorEntry(key="", at="", storage=None, dtype="float32", shape=(), stride=(), kind="sparse")
    names = [f"t{number}" for number in range(count)]
    with pytest.raises(WouldLoseData) as caught:
        emit.fresh([replace(entry, key=name) for name in names])
    assert caught.value.message == f"only dense tensors can be written; not {', '.join(names[:8])}"

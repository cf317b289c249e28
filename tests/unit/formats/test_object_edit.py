"""Values of a checkpoint are replaced by new ones, without a word about how the file spells them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path

import torch

import ckptfix
from ckptfix.checkpoint.tree import TensorValue
from ckptfix.formats import open_checkpoint
from ckptfix.formats.object_edit import ObjectEdit
from ckptfix.io.write import write_plan


def test_new_values_take_the_place_of_old_ones_wherever_they_occur(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    shared = OrderedDict(weight=weight)
    counts = Counter(a=1)
    saved = {"model": shared, "again": shared, "counts": counts, "epoch": 3, "left": [1, 2]}
    torch.save(saved, tmp_path / "in.pth")
    edit = ObjectEdit(open_checkpoint(tmp_path / "in.pth"))
    model = edit.at("model")
    rows = edit.rows(model)
    assert rows is not None and [name for name, _, _ in rows] == ["weight"]
    assert isinstance(rows[0][2], TensorValue) and edit.rows(edit.at("epoch")) is None
    row = edit.tensor(edit.checkpoint.entries[0])
    edit.replace(model, edit.with_rows(model, [("w", row), ("same", row), ("left", edit.listing(["a", 2]))]))
    edit.replace(edit.at("counts"), edit.with_rows(edit.at("counts"), [("b", 2)]))
    edit.replace(edit.at("left"), edit.mapping([(1, edit.copy(edit.at("left")))]))
    write_plan(edit.plan(str(tmp_path / "out.pth")))
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    assert made["model"] is made["again"] and list(made["model"]) == ["w", "same", "left"]
    assert made["model"]["w"] is made["model"]["same"] and torch.equal(made["model"]["w"], weight)
    assert (made["model"]["left"], made["counts"], made["left"], made["epoch"]) == (["a", 2], {"b": 2}, {1: [1, 2]}, 3)
    assert ckptfix.inspect(tmp_path / "out.pth").weights_only is None

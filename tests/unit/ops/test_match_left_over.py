"""What a refusal says of tensors that are left over and whose shapes are related."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.errors import NoMatch
from ckptfix.names.slots import Slot
from ckptfix.ops.match.left_over import reasons

Shapes = dict[str, tuple[int, ...]]

GRU: Shapes = {"rnn.weight_ih_l0": (18, 4), "rnn.weight_hh_l0": (18, 6), "rnn.bias_ih_l0": (18,)}
LSTM: Shapes = {"rnn.weight_ih_l0": (24, 4), "rnn.weight_hh_l0": (24, 6)}
X2H: Shapes = {"cell.x2h.weight": (18, 4), "cell.h2h.weight": (18, 6)}
HEADS: Shapes = {f"heads.{at}.{word}.weight": (4, 8) for at in range(2) for word in ("key", "query", "value")}
FUSED: Shapes = {f"attn.{word}.weight": (8, 8) for word in ("q_proj", "k_proj", "v_proj")}
GCN: Shapes = {"gc1.weight": (5, 8), "gc2.weight": (8, 3), "gc1.bias": (8,)}
TURNED: Shapes = {"conv1.lin.weight": (8, 5), "conv2.lin.weight": (3, 8), "conv1.bias": (8,)}


def said(ours: Shapes, theirs: Shapes) -> list[str]:
    return [*reasons(*([Slot(name, shape) for name, shape in side.items()] for side in (ours, theirs)))]


@pytest.mark.parametrize("gates", [X2H, {f"W_i{gate}.weight": (6, 4) for gate in "rzn"}, {"W_xr": (4, 6)}])
def test_gates_have_an_order(gates: Shapes) -> None:
    (here,), (there,) = said(GRU, gates), said(gates, GRU)
    assert here.startswith("IN has rnn.weight_ih_l0 [18, 4] with 3 gates in torch's order (reset, update, new)")
    assert there == here.replace("IN", "TARGET", 1)


def test_four_gates_are_those_of_an_lstm() -> None:
    (text,) = said(LSTM, {"cell.forget_gate.weight": (6, 4)})
    assert "(input, forget, cell, output)" in text
    assert not said(LSTM, {"fc.weight": (7, 3)})


def test_heads_may_be_rows_of_one_tensor() -> None:
    (text,) = said(HEADS, FUSED)
    assert "attn.q_proj.weight [8, 8], which may be 2 tensors of IN, such as heads.0.key.weight [4, 8]" in text
    assert "2 tensors of TARGET" in said(FUSED, HEADS)[0]
    assert not said({"heads.0.key.weight": (4, 8), "heads.1.key.weight": (5, 8)}, FUSED)


@pytest.mark.parametrize("more", [{"gc3.weight": (4, 4)}, {"gc3.weight": (5, 8)}, {"gc3.weight": (7, 2)}])
def test_a_transpose_is_named_only_if_each_has_one(more: Shapes) -> None:
    assert len(said(GCN, TURNED)) == 1
    assert not said({**GCN, **more}, TURNED | {f"x.{name}": shape for name, shape in more.items()})


def test_the_line_of_a_transpose_does_what_it_says(tmp_path: Path) -> None:
    files = [tmp_path / "one.pth", tmp_path / "other.pth"]
    for file, shapes in zip(files, (GCN, TURNED), strict=True):
        torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, file)
    with pytest.raises(NoMatch) as refused:
        ckptfix.match(files[0], tmp_path / "out.pth", like=files[1])
    (found,) = [match[1] for line in refused.value.lines if (match := re.search("`(.* [|] transpose)`", line))]
    ckptfix.rename(files[0], tmp_path / "out.pth", lines=[found], allow_unmatched=True)
    old, new = torch.load(files[0], weights_only=True), torch.load(tmp_path / "out.pth", weights_only=True)
    assert torch.equal(new["conv1.lin.weight"], old["gc1.weight"].T)

"""What two spellings mean, against the modules of torch that write them, and what must not be taken for one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from ckptfix.names import no_weights, spellings
from ckptfix.names.no_weights import optional
from ckptfix.names.slots import Slot
from ckptfix.names.spellings import canonical, fusions


def keys(module: nn.Module) -> list[str]:
    return list(module.state_dict())


def all_canonical(names: list[str]) -> set[str]:
    changed = canonical(names)
    return {changed.get(name, name) for name in names}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_weight_norm_before_and_after_parametrizations(parameter: str) -> None:
    old = weight_norm(nn.Linear(3, 5), parameter, dim=0)
    new = parametrizations.weight_norm(nn.Linear(3, 5), parameter, dim=0)
    assert set(keys(old)) != set(keys(new))
    assert all_canonical(keys(old)) == all_canonical(keys(new)) == set(keys(new))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weight_norm_maps_magnitude_to_magnitude() -> None:
    old = weight_norm(nn.Conv1d(4, 6, 3)).state_dict()
    new = parametrizations.weight_norm(nn.Conv1d(4, 6, 3)).state_dict()
    renamed = canonical(list(old))
    assert {renamed.get(name, name): tensor.shape for name, tensor in old.items()} == {
        name: tensor.shape for name, tensor in new.items()
    }


def test_weight_norm_of_recurrent_parameters() -> None:
    assert canonical(["rnn.weight_hh_l0_g", "rnn.weight_hh_l0_v", "rnn.weight_ih_l0"]) == {
        "rnn.weight_hh_l0_g": "rnn.parametrizations.weight_hh_l0.original0",
        "rnn.weight_hh_l0_v": "rnn.parametrizations.weight_hh_l0.original1",
    }


def test_spectral_norm_before_and_after_parametrizations() -> None:
    old = spectral_norm(nn.Linear(3, 5)).state_dict()
    new = parametrizations.spectral_norm(nn.Linear(3, 5)).state_dict()
    renamed = canonical(list(old))
    assert {renamed.get(name, name): tensor.shape for name, tensor in old.items()} == {
        name: tensor.shape for name, tensor in new.items()
    }


def test_spectral_norm_of_files_without_v() -> None:
    assert set(canonical(["c.weight_orig", "c.weight_u", "c.bias"])) == {"c.weight_orig", "c.weight_u"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["ln.gamma", "ln.beta"], {"ln.weight", "ln.bias"}),
        (["a.a_2", "a.b_2"], {"a.weight", "a.bias"}),
        (["ln_1.g", "ln_1.b"], {"ln_1.weight", "ln_1.bias"}),
        (["gamma", "beta"], {"weight", "bias"}),
        (
            ["bn.gamma", "bn.beta", "bn.moving_mean", "bn.moving_variance"],
            {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"},
        ),
        (
            ["bn.gamma", "bn.beta", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"],
            {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"},
        ),
        (
            ["bn.weight", "bn.bias", "bn._mean", "bn._variance"],
            {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"},
        ),
    ],
)
def test_norms(names: list[str], expected: set[str]) -> None:
    assert all_canonical(names) == expected


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(
    "names",
    [
        ["blocks.0.gamma"],  # ConvNeXt's layer scale
        ["blocks.0.gamma", "blocks.0.norm.weight", "blocks.0.norm.bias"],
        ["x.gamma", "x.beta", "x.weight", "x.bias"],
        ["x.gamma", "x.beta", "x.alpha"],
        ["x.moving_mean", "x.moving_variance", "x.running_mean"],
        ["attn.w_q", "attn.w_k", "attn.w_v", "attn.w_g"],  # parameters of a gated attention
        ["c.weight_g"],
        ["c.weight_g", "c.weight_v", "c.weight"],
        ["c.weight_orig", "c.weight_mask"],  # pruning
        ["m.in_proj.weight", "m.out_proj.weight", "m.A_log", "m.conv1d.weight"],  # Mamba
        ["attention.query_key_value.weight"],  # head by head: another layout
        ["fc.weight", "fc.bias"],
        [],
    ],
)
def test_what_stays_as_it_is(names: list[str]) -> None:
    assert canonical(names) == {}


def test_fused_attention_has_one_name() -> None:
    torch_names = keys(nn.MultiheadAttention(4, 2))
    assert all_canonical(torch_names) == {"qkv.weight", "qkv.bias", "out_proj.weight", "out_proj.bias"}
    for module in spellings.FUSED_QKV:
        assert all_canonical([f"h.0.attn.{module}.weight"]) == {"h.0.attn.qkv.weight"}


def test_two_names_never_become_one() -> None:
    assert canonical(["a.in_proj_weight", "a.qkv.weight"]) == {}
    assert canonical(["a.Wqkv.weight", "a.c_attn.weight"]) == {}


def test_every_canonical_name_stays_canonical() -> None:
    names = ["a.gamma", "a.beta", "b.weight_g", "b.weight_v", "c.weight_orig", "c.weight_u", "d.in_proj_weight"]
    once = [canonical(names)[name] for name in names]
    assert canonical(once) == {}


@pytest.mark.parametrize(
    ("slot", "family"),
    [
        (Slot("bn.num_batches_tracked", (), "int64"), "num_batches_tracked"),
        (Slot("bn.num_batches_tracked", ()), "num_batches_tracked"),
        (Slot("embeddings.position_ids", (1, 512), "int64"), "position_ids"),
        (Slot("attn.relative_position_index", (49, 49), "int64"), "relative_position_index"),
        (Slot("h.0.attn.bias", (1, 1, 8, 8), "uint8"), "attention-mask"),
        (Slot("h.0.attn.bias", (1, 1, 8, 8), "float32"), "attention-mask"),
        (Slot("h.0.attn.masked_bias", (), "float32"), "masked_bias"),
        (Slot("layers.1.blocks.1.attn_mask", (64, 49, 49), "float32"), "attention-mask"),
        (Slot("rotary_emb.inv_freq", (16,), "float32"), "rotary"),
        (Slot("n_averaged", (), "int64"), "n_averaged"),
        (Slot("layer.total_ops", (1,), "float64"), "profile"),
        (Slot("rope.freqs", (64,), "bfloat16"), "rotary"),
        (Slot("decoder.layers.0.mlp.linear_fc1._extra_state", (0,), "uint8"), "extra-state"),
    ],
)
def test_optional_buffers(slot: Slot, family: str) -> None:
    found = optional(slot)
    assert found is not None
    assert (found.id, found.optional) == (family, True)


@pytest.mark.parametrize(
    "slot",
    [
        Slot("fc.bias", (8,), "float32"),
        Slot("attn.bias", (1, 4, 8, 8), "float32"),  # a learned bias of each head
        Slot("conv.bias", (1, 1, 8, 4), "float32"),
        Slot("x.position_ids", (512, 16), "float32"),  # a learned embedding under that name
        Slot("bn.num_batches_tracked", (3,), "int64"),
        Slot("my_position_ids.weight", (4, 4), "float32"),
        Slot("total_ops", (4, 4), "float32"),
        Slot("bn.running_mean", (4,), "float32"),
        Slot("europe.freqs", (4,), "float32"),
        Slot("criterion.weight", (4,), "float32"),
        Slot("fc.weight_mask", (4, 4), "float32"),
        Slot("conv.activation_post_process.min_val", (), "float32"),
    ],
)
def test_no_parameter_is_optional(slot: Slot) -> None:
    assert optional(slot) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("criterion.weight", "loss"),
        ("model.loss_fn.pos_weight", "loss"),
        ("ce_loss.weight", "loss"),
        ("train_acc.tp", "metric"),
        ("metrics.f1.total", "metric"),
        ("conv.weight_fake_quant.scale", "observer"),
        ("conv.activation_post_process.observer_enabled", "observer"),
        ("fc.weight_mask", "pruning-mask"),
        ("fc.weight", None),
        ("glossary.weight", None),
        ("fc.weight_orig", None),
        ("encoder.masks.weight", None),
    ],
)
def test_what_is_no_weight_is_said(name: str, kind: str | None) -> None:
    found = no_weights.kind_of(Slot(name, (4,), "float32"))
    assert (found and found.id) == kind
    assert found is None or (not found.optional and found.about in no_weights.described([Slot(name, (4,), "float32")]))


def test_each_kind_has_a_source() -> None:
    assert all(row.about and row.source for row in no_weights.KINDS)


@pytest.mark.parametrize(
    ("missing", "over", "which"),
    [
        (["conv.bias"], ["bn.weight", "bn.bias", "bn.running_mean"], "model"),
        (["bn.weight", "bn.bias", "bn.running_mean"], ["conv.bias"], "file"),
        (["stage.0.rbr_reparam.weight"], ["stage.0.rbr_dense.conv.weight"], "branches"),
        (["fc.bias"], ["aux.weight"], None),
        (["bn.running_mean"], [], None),
    ],
)
def test_convolutions_fused_with_their_norm_are_said(missing: list[str], over: list[str], which: str | None) -> None:
    assert no_weights.fused(missing, over) == ("" if which is None else no_weights.FUSED[which])


def test_an_attention_in_one_piece_and_in_three() -> None:
    fused = [Slot("attn.in_proj_weight", (12, 4)), Slot("attn.in_proj_bias", (12,)), Slot("fc.weight", (12, 4))]
    split = [Slot(f"a.{part}.{leaf}", (4, 4) if leaf == "weight" else (4,)) for part in ("q_proj", "k_proj", "v_proj")
             for leaf in ("weight", "bias")]  # fmt: skip
    assert fusions(fused, split) == (
        ("attn.in_proj_weight", ("a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight")),
        ("attn.in_proj_bias", ("a.q_proj.bias", "a.k_proj.bias", "a.v_proj.bias")),
    )
    assert fusions(split, fused) == ()


def test_grouped_queries_and_gates_add_up_too() -> None:
    one = [Slot("m.qkv_proj.weight", (8, 4)), Slot("m.gate_up_proj.weight", (6, 4)), Slot("b.w12.weight", (10, 4))]
    other = [
        *(Slot(f"s.{name}.weight", (rows, 4)) for name, rows in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2))),
        *(Slot(f"s.{name}.weight", (3, 4)) for name in ("gate_proj", "up_proj")),
        *(Slot(f"t.{name}.weight", (5, 4)) for name in ("w1", "w2")),
    ]
    assert [name for name, _ in fusions(one, other)] == [slot.name for slot in one]
    assert fusions(one, [Slot(slot.name, (slot.shape[0], 5)) for slot in other]) == ()


def test_each_part_is_used_once() -> None:
    one = [Slot(f"layers.{index}.in_proj_weight", (6, 2)) for index in range(2)]
    other = [Slot(f"blocks.{index}.{part}.weight", (2, 2)) for index in range(2) for part in ("to_q", "to_k", "to_v")]
    assert [parts[0] for _, parts in fusions(one, other)] == ["blocks.0.to_q.weight", "blocks.1.to_q.weight"]


def test_the_table_is_sound() -> None:
    ids = [family.id for family in spellings.FAMILIES]
    prefixes = [prefix.component for prefix in spellings.BASE_PREFIXES]
    assert len(set(ids)) == len(ids)
    assert len(set(prefixes)) == len(prefixes)
    assert all(family.about and family.source for family in spellings.FAMILIES)
    assert not any(prefix.startswith(".") or prefix.endswith(".") for prefix in prefixes)


def test_the_buffers_of_torch_modules_that_a_rule_passes_over() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(4, 4))
    passed = [
        name
        for name, tensor in model.state_dict().items()
        if optional(Slot(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    ]
    assert passed == ["1.num_batches_tracked"]
    assert model[1].num_batches_tracked.dtype == torch.int64

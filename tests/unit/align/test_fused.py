"""Fused tensors taken apart: what words and sizes say, what is asked, and the lines that carry it out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.align.fused import Heads
from ckptfix.align.match import match
from ckptfix.errors import NoMatch, Refused
from ckptfix.names.slots import Slot
from ckptfix.ops.match.fused import Operations, lines, with_operations

Shapes = Mapping[str, tuple[int, ...]]

D, H = 8, 12


def side(shapes: Shapes) -> list[Slot]:
    return [Slot(name, shape, "float32") for name, shape in shapes.items()]


def found(source: Shapes, target: Shapes, heads: Heads | None = None) -> tuple[bool, Operations, list[str]]:
    """Whether all is paired, what is done and asked, and the lines."""
    ours, theirs = side(source), side(target)
    matching, operations = with_operations(match(ours, theirs), ours, theirs, heads or Heads(), {})
    complete = matching.complete and not operations.refused
    return complete, operations, lines(operations.taken, list(source))


def layered(one: Shapes, front: str = "layers", count: int = 2) -> Shapes:
    return {f"{front}.{number}.{name}": shape for number in range(count) for name, shape in one.items()}


def split(query: str, key: str, value: str, kv: int = D) -> Shapes:
    sizes = {query: D, key: kv, value: kv}
    return {f"attn.{name}.weight": (rows, D) for name, rows in sizes.items()}


OUT: Shapes = {"attn.out_proj.weight": (D, D), "mlp.fc1.weight": (H, D), "mlp.fc2.weight": (D, H)}


@pytest.mark.parametrize(
    ("fused", "parts", "line"),
    [
        ({"attn.qkv.weight": (3 * D, D)}, split("q_proj", "k_proj", "v_proj"),
         "layers.{n}.attn.qkv.weight -> layers.{n}.attn.{q_proj,k_proj,v_proj}.weight | split"),
        ({"attn.in_proj_weight": (3 * D, D)}, split("query", "key", "value"),
         "layers.{n}.attn.in_proj_weight -> layers.{n}.attn.{query,key,value}.weight | split"),
        ({"attn.qkv_proj.weight": (2 * D, D)}, split("q_proj", "k_proj", "v_proj", D // 2),
         "layers.{n}.attn.qkv_proj.weight -> layers.{n}.attn.{q_proj,k_proj,v_proj}.weight | split sizes=8,4,4"),
        ({"attn.q.weight": (D, D), "attn.kv.weight": (2 * D, D)}, split("q", "k", "v"),
         "layers.{n}.attn.kv.weight -> layers.{n}.attn.{k,v}.weight | split"),
        ({"mlp.gate_up_proj.weight": (2 * H, D)},
         {"mlp.gate_proj.weight": (H, D), "mlp.up_proj.weight": (H, D)},
         "layers.{n}.mlp.gate_up_proj.weight -> layers.{n}.mlp.{gate_proj,up_proj}.weight | split"),
        ({"moe.experts.gate_up_proj": (3, 2 * H, D)},
         {f"moe.experts.{e}.{w}.weight": (H, D) for e in range(3) for w in ("w1", "w3")},
         "layers.{n}.moe.experts.gate_up_proj -> layers.{n}.moe.experts.{e}.{w1,w3}.weight | unstack | split"),
        ({"moe.experts.down_proj": (3, H, D)},
         {f"moe.experts.{e}.w2.weight": (D, H) for e in range(3)},
         "layers.{n}.moe.experts.down_proj -> layers.{n}.moe.experts.{e}.w2.weight | unstack | transpose"),
        ({"mlp.gate_up_proj.weight": (2 * H, D)}, {f"mlp.{w}.weight": (H, D) for w in ("fc_1", "fc_2")},
         "layers.{n}.mlp.gate_up_proj.weight -> layers.{n}.mlp.{fc_1,fc_2}.weight | split"),
    ],
)  # fmt: skip
def test_both_ways(fused: Shapes, parts: Shapes, line: str) -> None:
    one, other = layered({**fused, **OUT}), layered({**parts, **OUT})
    complete, operations, rows = found(one, other)
    assert complete and rows == [line]
    assert not operations.questions
    complete, _, rows = found(other, one)
    assert complete
    (old, _, rest) = rows[0].partition(" -> ")
    assert old == line.partition(" -> ")[2].partition(" |")[0]
    assert "concat" in rest or "stack" in rest


@pytest.mark.parametrize(
    ("fused", "parts", "line", "back"),
    [
        ("kqv", {"attn.qkv.weight": (3 * D, D)}, "qkv.weight | order to=1,0,2", "order to=1,0,2"),
        ("to_vkq", {"attn.to_qkv.weight": (3 * D, D)}, "to_qkv.weight | order to=2,1,0", "order to=2,1,0"),
        ("kvq", {"attn.c_attn.weight": (3 * D, D)}, "c_attn.weight | order to=2,0,1", "order to=1,2,0"),
        ("kqv", {"attn.vqk.weight": (3 * D, D)}, "vqk.weight | order to=1,0,2 | order to=2,0,1",
         "order to=1,2,0 | order to=1,0,2"),
        ("kqv", split("q", "k", "v"), "{q,k,v}.weight | order to=1,0,2 | split", "concat | order to=1,0,2"),
    ],
)  # fmt: skip
def test_the_order_that_a_name_spells(fused: str, parts: Shapes, line: str, back: str) -> None:
    one, other = layered({f"attn.{fused}.weight": (3 * D, D), **OUT}), layered({**parts, **OUT})
    complete, operations, rows = found(one, other)
    assert complete and not operations.questions
    assert rows == [f"layers.{{n}}.attn.{fused}.weight -> layers.{{n}}.attn.{line}"]
    complete, _, rows = found(other, one)
    assert complete and rows[0].partition(" | ")[2] == back
    assert found(one, one) == (True, Operations(), [])


def test_the_rows_of_a_name_that_spells_their_order(tmp_path: Path) -> None:
    key, query, value = (torch.randn(D, D) for _ in range(3))
    rows = {"attn.kqv.weight": torch.cat([key, query, value]), "attn.kqv.bias": torch.arange(3.0 * D)}
    torch.save(rows, tmp_path / "a")
    torch.save({"attn.qkv.weight": torch.zeros(3 * D, D), "attn.qkv.bias": torch.zeros(3 * D)}, tmp_path / "b")
    ckptfix.match(tmp_path / "a", tmp_path / "out", tmp_path / "b")
    made = torch.load(tmp_path / "out")
    assert torch.equal(made["attn.qkv.weight"], torch.cat([query, key, value]))
    assert made["attn.qkv.bias"][:D].tolist() == [*range(D, 2 * D)]


@pytest.mark.parametrize("name", ["qkv", "c_attn", "query_key_value"])
def test_parts_that_may_differ_in_size_are_put_in_no_order(name: str) -> None:
    """Grouped heads: which rows are the query's is unknown."""
    one, other = (layered({f"attn.{word}.weight": (2 * D, D), **OUT}) for word in ("kqv", name))
    for source, target in ((one, other), (other, one)):
        complete, operations, rows = found(source, target)
        assert not complete and not rows
        assert operations.refused and "different orders" in operations.questions[-1]
    assert not found(one, layered({**split("q", "k", "v", D // 2), **OUT}))[0]


def test_projections_of_gpt2() -> None:
    conv = {"attn.c_attn.weight": (D, 3 * D), "attn.c_proj.weight": (D, D), "mlp.c_fc.weight": (D, 4 * D),
            "mlp.c_proj.weight": (4 * D, D)}  # fmt: skip
    linear = {name: shape[::-1] for name, shape in conv.items()}
    complete, _, rows = found(layered(conv), layered(linear))
    assert complete
    assert [row.rpartition(" | ")[2] for row in rows] == ["transpose"] * 4
    apart = layered({**split("q", "k", "v"), "attn.proj.weight": (D, D), "mlp.fc1.weight": (4 * D, D),
                     "mlp.fc2.weight": (D, 4 * D)})  # fmt: skip
    complete, _, rows = found(layered(conv), apart)
    assert complete
    assert rows[0] == "layers.{n}.attn.c_attn.weight -> layers.{n}.attn.{q,k,v}.weight | transpose | split"
    assert len(rows) == 4, "the square one is turned as the others are"


def test_a_square_projection_of_clip_is_turned_by_its_name() -> None:
    """Its shape fits as it is, and a renaming alone would be wrong."""
    clip: Shapes = {"positional_embedding": (5, D), "text_projection": (D, D), "logit_scale": ()}
    plain: Shapes = {"logit_scale": (), "position.weight": (5, D), "text_projection.weight": (D, D)}
    complete, _, rows = found(clip, plain)
    assert complete and rows == ["text_projection -> text_projection.weight | transpose"]


def test_head_by_head_is_asked() -> None:
    one = layered({"attn.query_key_value.weight": (3 * D, D), **OUT})
    other = layered({**split("q_proj", "k_proj", "v_proj"), **OUT})
    complete, operations, rows = found(one, other)
    assert not complete and not rows and "--heads" in operations.questions[0]
    complete, _, rows = found(one, other, Heads(4))
    assert complete and rows[0].endswith("| deinterleave groups=4")
    complete, _, rows = found(other, one, Heads(4))
    assert complete and rows[0].endswith("| interleave groups=4")
    assert not found(one, other, Heads(3))[0], "3 heads do not divide the rows"


@pytest.mark.parametrize(
    ("kv", "there", "back"),
    [
        (4, "deinterleave groups=4 parts=3 | concat parts=3", "split parts=3 | interleave groups=4 parts=3"),
        (2, "deinterleave heads=4 kv=2 | concat heads=4 kv=2", "split heads=4 kv=2 | interleave heads=4 kv=2"),
    ],
)
def test_two_orders_of_a_fused_tensor_are_one_line(kv: int, there: str, back: str) -> None:
    """Head by head in one model, and one after another in the other: the number of heads leaves one way."""
    rows = D + 2 * kv * D // 4
    one = layered({"attention.query_key_value.weight": (rows, D), "attention.query_key_value.bias": (rows,), **OUT})
    other = layered({"attn.qkv.weight": (rows, D), "attn.qkv.bias": (rows,), **OUT}, "h")
    for sides, said in (((one, other), there), ((other, one), back)):
        complete, operations, _ = found(*sides)
        assert not complete and "--heads" in operations.questions[-1]
        complete, operations, lines = found(*sides, Heads(4, kv))
        assert complete and [line.partition(" | ")[2] for line in lines] == [said, said]
    assert not found(one, other, Heads(5))[0], "5 heads do not divide the rows"


def test_rotary_pairs_of_fused_rows_are_reordered_as_parts() -> None:
    meta = layered({f"attention.{name}.weight": (rows, D) for name, rows in (("wq", D), ("wk", 4), ("wv", 4))})
    fused = layered({"attn.qkv.weight": (D + 8, D)}, "h")
    complete, operations, _ = found(meta, fused)
    assert not complete and "--heads" in operations.questions[-1]
    complete, _, (line,) = found(meta, fused, Heads(4, 2))
    ropes = "rope of=0 heads=4 to=half | rope of=1 heads=2 to=half"
    assert complete and line.endswith(f"{{wq,wk,wv}}.weight -> h.{{n}}.attn.qkv.weight | {ropes} | concat sizes=8,4,4")
    complete, _, (line,) = found(fused, meta, Heads(4, 2))
    assert complete and line.endswith(f"| split sizes=8,4,4 | {ropes.replace('half', 'interleaved')}")


def test_stacked_experts_are_transposed_as_those_beside_them() -> None:
    one = layered({"moe.experts.down_proj": (3, D, D), "moe.experts.gate_up_proj": (3, 2 * D, D), **OUT})
    other = layered({"moe.experts.down_proj": (3, D, D), "moe.experts.gate_up_proj": (3, D, 2 * D), **OUT})
    complete, _, rows = found(one, other)
    assert complete and [row.partition(" | ")[2] for row in rows] == ["transpose dims=1,2"] * 2
    biased = layered({"moe.experts.gate_up_proj_bias": (3, 2 * D)})
    assert not found({**one, **biased}, {**other, **biased})[0], "with a bias, rows of gate and up may alternate"


def test_old_files_of_litgpt_hold_groups() -> None:
    one = layered({"attn.attn.weight": (2 * D, D), **OUT})
    other = layered({**split("q_proj", "k_proj", "v_proj", D // 2), **OUT})
    assert not found(one, other)[0]
    complete, _, rows = found(one, other, Heads(4, 2))
    assert complete and rows[0].endswith("| deinterleave heads=4 kv=2")


def test_the_gate_of_litgpt() -> None:
    gated = {"mlp.fc_1.weight": (H, D), "mlp.fc_2.weight": (H, D), "mlp.proj.weight": (D, H)}
    words = ("gate_proj", "up_proj", "down_proj")
    plain = {f"mlp.{word}.weight": shape for word, shape in zip(words, gated.values(), strict=True)}
    names = {pair.source: pair.target for pair in match(side(layered(gated)), side(layered(plain))).pairs}
    assert [names[f"layers.1.{name}"] for name in gated] == [f"layers.1.{name}" for name in plain]


@pytest.mark.parametrize("turned", [False, True])
def test_square_experts_lie_as_gate_and_up_do(turned: bool) -> None:
    whole = (3, D, 2 * D) if turned else (3, 2 * D, D)
    one = layered({"moe.experts.gate_up_proj": whole, "moe.experts.down_proj": (3, D, D)})
    other = layered({f"moe.experts.{e}.{w}.weight": (D, D) for e in range(3) for w in ("w1", "w2", "w3")})
    for sides in ((one, other), (other, one)):
        complete, _, rows = found(*sides)
        assert complete and [row.count("transpose") for row in rows] == [turned, turned]


@pytest.mark.parametrize("turned", [False, True])
def test_square_gate_and_up_lie_as_the_way_down_does(turned: bool) -> None:
    """Sizes of OLMoE: gate and up together are as high as wide."""
    half = D // 2
    down = (3, half, D) if turned else (3, D, half)
    one = layered({"moe.experts.gate_up_proj": (3, D, D), "moe.experts.down_proj": down})
    parts = {"gate_proj": (half, D), "up_proj": (half, D), "down_proj": (D, half)}
    other = layered({f"moe.experts.{e}.{name}.weight": shape for e in range(3) for name, shape in parts.items()})
    for sides in ((one, other), (other, one)):
        complete, operations, rows = found(*sides)
        assert complete and not operations.questions
        assert [row.count("transpose") for row in rows] == [turned, turned]


def test_a_question_about_every_layer_comes_once() -> None:
    one = layered({"attn.wqkv.weight": (3 * D, D)}, count=4)
    _, operations, _ = found(one, layered(split("wq", "wk", "wv"), count=4))
    assert len(operations.questions) == 1


def test_gate_and_up_are_split_into_the_parts_of_litgpt() -> None:
    """Phi-3 to LitGPT, as by way of the names of LLaMA."""
    one = layered({"mlp.gate_up_proj.weight": (2 * H, D), "mlp.down_proj.weight": (D, H)})
    other = layered({"mlp.fc_1.weight": (H, D), "mlp.fc_2.weight": (H, D), "mlp.proj.weight": (D, H)}, "transformer.h")
    for sides, verb in (((one, other), "split"), ((other, one), "concat")):
        complete, _, rows = found(*sides)
        assert complete and len(rows) == 1 and rows[0].endswith(f"| {verb}") and "{fc_1,fc_2}" in rows[0]


META: Shapes = {
    "tok_embeddings.weight": (20, D),
    **layered({"attention.wq.weight": (D, D), "attention.wk.weight": (D // 2, D), "attention.wv.weight": (D // 2, D),
               "attention.wo.weight": (D, D)}),
}  # fmt: skip
LLAMA: Shapes = {
    "model.embed_tokens.weight": (20, D),
    **layered({"self_attn.q_proj.weight": (D, D), "self_attn.k_proj.weight": (D // 2, D),
               "self_attn.v_proj.weight": (D // 2, D), "self_attn.o_proj.weight": (D, D)}, "model.layers"),
}  # fmt: skip


def test_rotary_pairs_of_metas_files_are_asked() -> None:
    """All names find their counterpart, and the model would talk nonsense."""
    complete, operations, _ = found(META, LLAMA)
    assert not complete and operations.refused and "--heads" in operations.questions[0]
    complete, _, rows = found(META, LLAMA, Heads(4, 2))
    assert complete
    assert [row.rpartition(" | ")[2] for row in rows] == ["rope heads=4 to=half", "rope heads=2 to=half"]
    complete, _, rows = found(LLAMA, META, Heads(4))
    assert [row.rpartition(" | ")[2] for row in rows] == ["rope heads=4 to=interleaved", "rope heads=2 to=interleaved"]
    assert found(LLAMA, META, Heads(5))[1].refused


def test_experts_are_told_by_how_their_library_spells_them() -> None:
    one = layered({"mlp.experts.gate_up_proj": (3, 2 * H, D), "mlp.experts.down_proj": (3, D, H), **OUT})
    names = {"fc_1": (H, D), "fc_2": (H, D), "proj": (D, H)}
    other = layered({**{f"mlp.experts.{e}.{w}.weight": size for e in range(3) for w, size in names.items()}, **OUT})
    assert found(one, other)[::2] == (True, [
        "layers.{n}.mlp.experts.gate_up_proj -> layers.{n}.mlp.experts.{e}.{fc_1,fc_2}.weight | unstack | split",
        "layers.{n}.mlp.experts.down_proj -> layers.{n}.mlp.experts.{e}.proj.weight | unstack",
    ])  # fmt: skip
    # fc_1 and fc_2 alone may be one behind the other.
    alone = layered({**{f"mlp.experts.{e}.{w}.weight": names[w] for e in range(3) for w in ("fc_1", "fc_2")}, **OUT})
    assert not found(one, alone)[0]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"moe.experts.gate_up_proj": (3, 2 * H, D), "moe.experts.gate_up_proj_bias": (3, 2 * H)},
         {f"moe.experts.{e}.{w}.weight": (H, D) for e in range(3) for w in ("w1", "w3")}),
        ({"attn.wqkv.weight": (3 * D, D)}, split("q_proj", "k_proj", "v_proj")),
        ({"attn.wqkv.weight": (3 * D, D)}, {"attn.qkv.weight": (3 * D, D)}),
        ({"moe.experts.w2": (3, D, D)}, {f"moe.experts.{e}.w2.weight": (D, D) for e in range(3)}),
    ],
)  # fmt: skip
def test_two_orders_are_never_certain(source: Shapes, target: Shapes) -> None:
    complete, operations, _ = found(layered({**source, **OUT}), layered({**target, **OUT}))
    assert not complete and operations.questions and not operations.taken


@pytest.mark.parametrize(
    ("source", "target", "word"),
    [
        # CodeGen: four blocks of query, value and key each.
        (layered({"attn.qkv_proj.weight": (3 * D, D), "mlp.fc_in.weight": (H, D)}),
         layered({**split("q_proj", "k_proj", "v_proj"), "mlp.fc_in.weight": (H, D)}), "special order"),
        # A renaming alone would be complete.
        (layered({"attn.query_key_value.weight": (3 * D, D), **OUT}),
         layered({"attn.c_attn.weight": (3 * D, D), **OUT}), "different orders"),
        # torchtune, under the names that transformers has.
        ({"tok_embeddings.weight": (20, D), **layered(split("q_proj", "k_proj", "v_proj"))},
         {"model.embed_tokens.weight": (20, D), **layered(split("q_proj", "k_proj", "v_proj"), "model.layers")},
         "rotary"),
        # GLM turns neighbours, and has LLaMA's names otherwise.
        (layered({"self_attn.q_proj.weight": (D, D), "mlp.gate_up_proj.weight": (2 * H, D)}),
         layered({"self_attn.q_proj.weight": (D, D), "mlp.gate_proj.weight": (H, D), "mlp.up_proj.weight": (H, D)}),
         "GLM"),
        (META, {"embed.weight": (20, D), **layered({"attn.qkv_proj.weight": (2 * D, D), "attn.o_proj.weight": (D, D)})},
         "rotary"),
    ],
)  # fmt: skip
def test_orders_that_models_are_known_for(source: Shapes, target: Shapes, word: str) -> None:
    """Found by outputs of real models: names and shapes fit, and the values would stand in the wrong rows."""
    for one, other in ((source, target), (target, source)):
        complete, operations, _ = found(one, other)
        assert not complete
        assert any(word in question for question in operations.questions) or not operations.taken


GPT = {"ln_1.weight": (D,), "attn.c_attn.bias": (3 * D,), "attn.c_proj.bias": (D,), "ln_2.weight": (D,),
       "mlp.c_fc.bias": (4 * D,), "mlp.c_proj.bias": (D,)}  # fmt: skip
MATRICES = {"attn.c_attn.weight": (3 * D, D), "attn.c_proj.weight": (D, D), "mlp.c_fc.weight": (4 * D, D),
            "mlp.c_proj.weight": (D, 4 * D)}  # fmt: skip
LINEAR: Shapes = layered({**GPT, **MATRICES}, "transformer.h")
"""nanoGPT, or GPTBigCode without multi_query."""


def plain(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if "c_attn.bias" not in name}


BIGCODE = {"model_type": "gpt_bigcode", "multi_query": False}

CONV: Shapes = layered({**GPT, **{name: shape[::-1] for name, shape in MATRICES.items()}}, "transformer.h")
MASKED: Shapes = {**LINEAR, **layered({"attn.bias": (1, 1, 9, 9)}, "transformer.h")}
PARTS: Shapes = layered({**{name: shape for name, shape in {**GPT, **MATRICES}.items() if "c_attn" not in name},
                         **{f"attn.{part}_proj.weight": (D, D) for part in "qkv"},
                         **{f"attn.{part}_proj.bias": (D,) for part in "qkv"}}, "transformer.h")  # fmt: skip


@pytest.mark.parametrize(
    ("source", "target", "config", "heads", "said"),
    [
        (CONV, LINEAR, {}, None, None),
        (CONV, LINEAR, BIGCODE, None, None),
        (CONV, LINEAR, BIGCODE, 2, "transpose | split parts=3 | interleave"),
        (CONV, LINEAR, {"model_type": "gpt2"}, None, "transpose"),
        (CONV, LINEAR, {}, 2, "transpose | split parts=3 | interleave"),
        (CONV, MASKED, {}, None, "transpose"),
        (plain(CONV), plain(LINEAR), {}, None, "transpose"),
        (PARTS, LINEAR, {}, None, None),
        (PARTS, LINEAR, {}, 2, "interleave"),
        (PARTS, LINEAR, {"model_type": "gpt2"}, None, "concat"),
        (LINEAR, LINEAR, {}, None, ""),
    ],
)  # fmt: skip
def test_c_attn_of_a_linear_layer_has_either_of_two_orders(
    source: Shapes, target: Shapes, config: Mapping[str, object], heads: int | None, said: str | None
) -> None:
    """GPTBigCode has nanoGPT's names and shapes, and holds query, key and value head by head."""
    ours, theirs = side(source), side(target)
    made, done = with_operations(match(ours, theirs), ours, theirs, Heads(heads), {}, configs=({}, config))
    if said is None:
        assert done.questions and (done.refused or not made.complete)
    else:
        assert made.complete and not done.refused
        lines = {" | ".join(map(str, one.operations)) for one in done.taken if "c_attn" in str((one.old, one.new))}
        assert any(said in line for line in lines) or (not said and not lines)


def saved(path: Path, shapes: Shapes) -> Path:
    torch.manual_seed(0)
    torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, path)
    return path


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "meta.pth", META), saved(tmp_path / "llama.pth", LLAMA)
    out, rules = tmp_path / "out.pth", tmp_path / "learned.rules"
    with pytest.raises(NoMatch, match="--heads N"):
        ckptfix.match(source, out, target)
    assert not out.exists()
    as_it_is = ckptfix.match(source, tmp_path / "rows.pth", target, accept_ambiguous=True)
    assert len(as_it_is.names) == len(META) and not any(pair.operation for pair in as_it_is.matching.pairs)
    result = ckptfix.match(source, out, target, heads=4, kv_heads=2)
    made = torch.load(out)
    assert {name: tuple(value.shape) for name, value in made.items()} == LLAMA
    from ckptfix.ops.match import find, write_rules

    write_rules(find(source, target, heads=4, kv_heads=2), rules)
    assert [line for line in rules.read_text().splitlines() if not line.startswith("#")] == list(map(str, result.rules))
    ckptfix.rename(source, tmp_path / "again.pth", rules=rules)
    again = torch.load(tmp_path / "again.pth")
    assert all(torch.equal(again[name], value) for name, value in made.items())
    ckptfix.rename(out, tmp_path / "back.pth", rules=rules, reverse=True)
    back, before = torch.load(tmp_path / "back.pth"), torch.load(source)
    assert back.keys() == before.keys() and all(torch.equal(back[name], value) for name, value in before.items())
    with pytest.raises(Refused, match="in-place"):
        ckptfix.match(source, None, target, heads=4, in_place=True)
    with pytest.raises(Refused, match="JSON"):
        write_rules(find(source, target, heads=4), tmp_path / "rules.json")
    for heads, kv_heads in ((None, 2), (4, 3), (0, None)):
        with pytest.raises(Refused):
            ckptfix.match(source, out, target, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("parts", ["W_Q W_K W_V", "w_qs w_ks w_vs", "linear_keys linear_query linear_values"])
@pytest.mark.parametrize("whole", ["qkv", "W_pack", "in_proj_"])
def test_parts_of_attention_follow_from_words(parts: str, whole: str) -> None:
    joint = whole if whole.endswith("_") else f"{whole}."
    one = [Slot(f"h.{n}.attn.{joint}weight", (12, 4)) for n in range(2)]
    other = [Slot(f"layers.{n}.attn.{part}.weight", (4, 4)) for n in range(2) for part in parts.split()]
    for sides in ((one, other), (other, one)):
        matching, operations = with_operations(match(*sides), *sides, Heads(), {})
        assert matching.complete and not operations.refused and len(operations.taken) == 2
        names = [*operations.taken[0].new, *operations.taken[0].old]
        order = [name for name in names if name in {slot.name for slot in other}]
        assert ["q" in order[0].lower(), "k" in order[1].lower(), "v" in order[2].lower()] == [True] * 3


def test_a_list_of_projections_is_query_key_value_and_output() -> None:
    """The Annotated Transformer has such a list; numbers in names are no list, and say no order."""
    one = [Slot(f"layers.0.self_attn.linears.{n}.weight", (4, 4)) for n in range(4)]
    other = [Slot(f"h.0.attn.{part}.weight", (4, 4)) for part in ("k_proj", "out_proj", "v_proj", "q_proj")]
    found = match(one, other)
    assert [pair.target.split(".")[3] for pair in found.pairs] == ["q_proj", "k_proj", "v_proj", "out_proj"]
    assert found.complete
    plain = [Slot(slot.name.replace("linears.", "linear"), slot.shape) for slot in one]
    assert not match(plain, other).complete


@pytest.mark.parametrize("beside", ["gpt2", "gpt_bigcode", None])
def test_config_beside_a_file_tells_the_rows_of_c_attn(tmp_path: Path, beside: str | None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    source, target = saved(tmp_path / "in.pth", CONV), saved(folder / "pytorch_model.bin", LINEAR)
    if beside is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": beside, "multi_query": False}))
    old, name = torch.load(source, weights_only=True), "transformer.h.1.attn.c_attn.bias"
    if beside != "gpt2":
        with pytest.raises(NoMatch, match="query, key and value"):
            ckptfix.match(source, tmp_path / "out.pth", target)
    heads = None if beside == "gpt2" else 2
    ckptfix.match(source, tmp_path / "out.pth", target, heads=heads)
    new = torch.load(tmp_path / "out.pth", weights_only=True)
    wanted = old[name] if heads is None else old[name].view(3, heads, -1).transpose(0, 1).flatten()
    assert torch.equal(new[name], wanted)
    weight = name.replace("bias", "weight")
    rows = old[weight].T
    wanted = rows if heads is None else rows.view(3, heads, -1, D).transpose(0, 1).reshape(3 * D, D)
    assert torch.equal(new[weight], wanted)

"""Modules in doubt are told inside of blocks that certain modules show to be the same."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckptfix.align import roles
from ckptfix.align.match import match
from ckptfix.names.slots import Slot

Shapes = Mapping[str, tuple[int, ...]]

WEIGHTS = {"conv": (4, 4, 3, 3), "norm": (4,), "qkv": (12, 4), "o": (4, 4), "fc1": (8, 4), "fc2": (4, 8)}


def slots(shapes: Shapes) -> list[Slot]:
    return [Slot(f"{name}.weight", shape, "float32") for name, shape in shapes.items()]


def answered(pairs: Mapping[str, str], shapes: Shapes, order: list[str] | None = None) -> bool:
    """Whether all of `pairs` is certain, after no certain pair was wrong."""
    theirs = {other: shapes[one] for one, other in pairs.items()}
    found = match(slots(shapes), slots({name: theirs[name] for name in order or sorted(theirs)}))
    sure = {pair.source: pair.target for pair in found.pairs if not pair.instead}
    assert all(pairs[one.removesuffix(".weight")] == other.removesuffix(".weight") for one, other in sure.items())
    return found.complete


def test_a_norm_belongs_to_the_convolution_in_its_module() -> None:
    """Both norms are outside of the blocks; the convolution beside one of them is the only one of its shape."""
    stem = {"conv1": "net.entry.convolution", "bn1": "net.entry.normalization", "norm": "net.normalization"}
    body = {f"layers.{at}.fc1": f"net.h.{at}.lin" for at in range(2)}
    shapes = {"conv1": (4, 3, 7, 7), "bn1": (4,), "norm": (4,)} | dict.fromkeys(body, (8, 4))
    assert answered(stem | body, shapes)


@pytest.mark.parametrize("towers", [("text", "vision"), ("encoder", "decoder")])
def test_norms_of_blocks_are_told_in_each_tower(towers: tuple[str, str]) -> None:
    parts = {"norm1": ("attention_norm", "norm"), "qkv": ("attention.wqkv", "qkv"), "o": ("attention.wo", "o"),
             "norm2": ("ffn_norm", "norm"), "fc1": ("ffn.lin1", "fc1"), "fc2": ("ffn.lin2", "fc2")}  # fmt: skip
    pairs = {f"{tower}.h.{at}.{part}": f"net.{tower}.layers.{at + 1}.{other}"
             for tower in towers for at in range(2) for part, (other, _) in parts.items()}  # fmt: skip
    shapes = {name: WEIGHTS[parts[name.rpartition(".")[2]][1]] for name in pairs}
    assert answered(pairs, shapes)


def test_inputs_and_hidden_states_of_recurrent_layers() -> None:
    pairs = {f"fwd.layers.{at}.{one}": f"f.cells.{at}.{other}"
             for at in range(2) for one, other in (("i2h", "wx"), ("h2h", "wh"))}  # fmt: skip
    assert answered(pairs, dict.fromkeys(pairs, (16, 4)))


def test_what_is_between_two_stages_may_be_part_of_either() -> None:
    """Stage 0 with the transition has the contents of stage 1 with it, and is another stage."""
    block = ("norm", "qkv", "o", "fc1", "fc2")
    pairs = {f"stages.{stage}.0.{part}": f"levels.{stage}.0.{part}" for stage in range(2) for part in block}
    shapes = {name: WEIGHTS[name.rpartition(".")[2]] for name in pairs}
    pairs["stages.0.trans.o"], shapes["stages.0.trans.o"] = "levels.1.trans.o", (4, 4)
    answered(pairs, shapes)


@pytest.mark.parametrize("last", ["norm", "final_norm", "zandex"])
@pytest.mark.parametrize("order", ["as run", "sorted"])
@pytest.mark.parametrize("back", [False, True])
def test_a_norm_before_its_convolution_is_not_that_after_it(last: str, order: str, back: bool) -> None:
    """One side groups each norm with the convolution behind it, the other side with the one in front of it."""
    pairs = {"stem.conv": "stem.conv"}
    shapes: dict[str, tuple[int, ...]] = {"stem.conv": (4, 3, 3, 3)}
    norm = "stem.norm"
    for block, (part, size) in ((at, one) for at in range(2) for one in ((1, 1), (2, 3))):
        pairs |= {f"layers.{block}.part{part}.norm": norm,
                  f"layers.{block}.part{part}.conv": f"blocks.{block}.unit{part}.conv"}  # fmt: skip
        shapes |= {f"layers.{block}.part{part}.norm": (4,), f"layers.{block}.part{part}.conv": (4, 4, size, size)}
        norm = f"blocks.{block}.unit{part}.norm"
    pairs |= {last: norm, "fc": "fc"}
    shapes |= {last: (4,), "fc": (7, 4)}
    run = sorted(pairs.values(), key=lambda name: (name == "fc", name != "stem.conv", name != "stem.norm",
                                                   name.rpartition(".")[0], name))  # fmt: skip
    if back:
        pairs, shapes = {other: one for one, other in pairs.items()}, {pairs[one]: shapes[one] for one in shapes}
        run = [pairs[one] for one in run]
    theirs = {other: shapes[one] for one, other in pairs.items()}
    found = match(slots(shapes), slots({name: theirs[name] for name in (sorted(theirs) if order == "sorted" else run)}))
    assert not found.complete or all(pairs[row.source[:-7]] == row.target[:-7] for row in found.pairs)


@pytest.mark.parametrize("text", ["final_norm", "norm"])
def test_norms_that_both_sides_group_alike_are_certain(text: str) -> None:
    pairs = {"stem.conv": "entry.conv", "stem.norm": "entry.norm", text: text}
    shapes = {"stem.conv": (4, 3, 3, 3), "stem.norm": (4,), text: (4,)}
    for block, (part, size) in ((at, one) for at in range(2) for one in ((1, 1), (2, 3))):
        for leaf, shape in (("conv", (4, 4, size, size)), ("norm", (4,))):
            pairs[f"layers.{block}.part{part}.{leaf}"] = f"blocks.{block}.unit{part}.{leaf}"
            shapes[f"layers.{block}.part{part}.{leaf}"] = shape
    assert answered(pairs, shapes, [*pairs.values()])


def test_three_projections_in_one_module_are_not_any_three() -> None:
    """One side has query, key and value in a module; the other has query, value and output in one."""
    parts = {"attention.self.query": "self_attn.q_proj", "attention.self.key": "zanpel",
             "attention.self.value": "self_attn.v_proj", "attention.output.dense": "self_attn.out_proj"}  # fmt: skip
    pairs = {f"layer.{at}.{one}": f"h.{at}.{other}" for at in range(2) for one, other in parts.items()}
    answered(pairs, dict.fromkeys(pairs, (4, 4)))


def test_a_word_for_the_whole_tells_no_part_of_it() -> None:
    assert not roles.told(["{}.mlp.c_fc", "{}.mlp.c_proj"], ["{}.ffn.lin2", "{}.fimjup"])
    assert roles.told(["{}.attention_norm", "{}.ffn_norm"], ["{}.norm2", "{}.norm1"]) == [(0, 1), (1, 0)]


def test_parts_of_different_wholes_are_not_the_same() -> None:
    """Each may be what the other side has no word for."""
    assert not roles.told(["{}.attention.output.norm", "{}.zan"], ["{}.output.norm", "{}.lor"])


@pytest.mark.parametrize("names", [{"bn1": "bn1", "norm": "norm"}, {"0": "0", "norm": "norm"}])
def test_equal_names_in_one_module_are_the_same(names: dict[str, str]) -> None:
    pairs = {f"net.{one}": f"module.model.{other}" for one, other in names.items()}
    body = {f"net.layers.{at}.fc": f"module.model.h.{at}.lin" for at in range(2)}
    assert answered(pairs | body, dict.fromkeys(pairs, (4,)) | dict.fromkeys(body, (8, 4)))


def test_a_list_in_a_block_that_holds_nothing_else() -> None:
    """Norms follow their convolutions when the block and the list in it have the same modules."""
    parts = {"layer.0.convolution": "conv_a", "layer.0.normalization": "bn_a",
             "layer.1.convolution": "conv_b", "layer.1.normalization": "bn_b"}  # fmt: skip
    pairs = {f"blocks.{at + 1}.{one}": f"stage0.unit{at}.{other}" for at in range(3) for one, other in parts.items()}
    shapes = {name: (4,) if "norm" in name else (4, 4, 1, 1) if ".0." in name else (4, 4, 3, 3) for name in pairs}
    assert answered(pairs, shapes)


def test_a_norm_tells_its_place_though_others_have_no_convolution_beside_them() -> None:
    parts = {"convs.0": "layer.0.conv", "norms.0": "layer.0.norm", "convs.1": "layer.1.conv", "norms.1": "zan"}
    pairs = {f"blocks.{at}.{one}": f"h.{at}.{other}" for at in range(2) for one, other in parts.items()}
    shapes = {name: (4,) if "norm" in name else (4, 4, 1, 1) if ".0" in name[8:] else (4, 4, 3, 3) for name in pairs}
    assert answered(pairs, shapes)


BLOCK = {"self_attn_layer_norm": "kip", "self_attn.q_proj": "bol", "self_attn.k_proj": "fim", "fc1": "lor",
         "self_attn.v_proj": "mev", "self_attn.out_proj": "nar", "fc2": "tus", "final_layer_norm": "zan"}  # fmt: skip

LIST = {"0": "block1.proj", "1": "block1.norm", "2": "block2.proj", "3": "block2.norm", "4": "skip.conv",
        "5": "skip.bn"}  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "around", "order"),
    [
        # A norm of the only block, called like the one at the end on the other side.
        (BLOCK, {"ln_f": "h.3.final_norm", "head": "h.3.classifier"}, []),
        # A module of the one side may hold others than that of the other side.
        ({"attention.output.dense": "attention.output.dense", "attention.self.query": "attention.self.query",
          "tus": "attention.self.key", "attention.self.value": "jup", "attention.output.norm": "attention.output.norm"},
         {}, []),
        # Of an attention's norm and a cross attention's norm, one may be what the other side has no word for.
        ({"attention_norm": "jup", "rik": "cross_attention_norm", "ffn_norm": "ffn_norm", "attention.q": "attention.q",
          "cross_attention.q": "cross_attention.q"}, {}, []),
        # The order of a list is that of the modules that have numbers on the other side, but not of some of them.
        (LIST, {"layers.1.1": "h.1.norm", "layers.1.0": "h.1.proj"},
         ["block1.norm", "skip.bn", "block2.proj", "skip.conv", "block2.norm", "block1.proj"]),
        # Numbers count modules that are certain, too.
        ({"fim": "0", "conv2": "3", "kip": "6", "bn1": "1", "bn2": "4", "bn3": "7"}, {}, []),
        # Of two norms, each side has another one beside its convolution.
        ({"layer.0.convolution": "layer.0.convolution", "mev": "layer.0.normalization",
          "layer.1.convolution": "layer.1.convolution", "layer.1.normalization": "lor"}, {}, []),
    ],
    ids=["a norm at the end", "other contents", "cross attention", "some of a list", "a certain one", "two norms"],
)  # fmt: skip
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_certain_is_right(
    parts: dict[str, str], around: dict[str, str], order: list[str], depth: int, back: bool
) -> None:
    pairs = {f"layers.{at}.{one}": f"h.{at}.{other}" for at in range(2, depth + 2) for one, other in parts.items()}
    pairs |= around
    shapes: dict[str, tuple[int, ...]]
    shapes = {one: (4,) if any(word in one + other for word in ("norm", "bn", "ln_f")) else (4, 4, 1, 1) if
              one[-2:] in (".0", ".4") else (4, 4, 3, 3) for one, other in pairs.items()}  # fmt: skip
    shapes |= dict.fromkeys(shapes.keys() & {"layers.2.fim", "head"}, (4, 8))
    names = [other for one, other in around.items()]
    names += [f"h.{at}.{name}" for name in order or parts.values() for at in range(2, depth + 2)]
    if back:
        pairs, shapes = {other: one for one, other in pairs.items()}, {pairs[one]: shapes[one] for one in shapes}
        names = [pairs[name] for name in names]
    answered(pairs, shapes, names)

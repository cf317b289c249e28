"""Key names taken apart: templates, numbers, modules, and whether an order is one of definition."""

from __future__ import annotations

import random

import pytest

from ckptfix.align.units import ModelSide, fronts, natural, side, template, words
from ckptfix.names.slots import Slot


def of(*names: str, shape: tuple[int, ...] = (2,)) -> ModelSide:
    return side([Slot(name, shape, "float32") for name in names])


@pytest.mark.parametrize(
    ("path", "text", "numbers"),
    [
        ("layer1.0.conv2", "layer{}.{}.conv{}", (1, 0, 2)),
        ("res2a_branch2b", "res{}{}_branch{}{}", (2, 0, 2, 1)),
        ("conv_a", "conv_{}", (0,)),
        ("attn", "attn", ()),
        ("layers.3.feed_forward.w2", "layers.{}.feed_forward.w2", (3,)),
        ("w12", "w{}", (12,)),
        ("a{}.7", "a<>.{}", (7,)),
        ("٣.x", "{}.x", (3,)),
        ("x²", "x²", ()),
        ("007", "{}", (7,)),
    ],
)
def test_templates(path: str, text: str, numbers: tuple[int, ...]) -> None:
    assert template(path) == (text, numbers)
    assert text.count("{}") == len(numbers) == len(fronts(path))


def test_a_number_of_thousands_of_digits_is_several() -> None:
    text, numbers = template("9" * 5000)
    assert text == "{}" * len(numbers) and all(number < 10**18 for number in numbers)
    assert natural("a" + "9" * 5000)


def test_words() -> None:
    assert words("encoder.LayerNorm1.qkvProj_out") == ["encoder", "layer", "norm", "qkv", "proj", "out"]


def test_a_module_is_one_unit_and_a_parameter_is_its_own() -> None:
    found = of("bn.weight", "bn.bias", "bn.running_mean", "pos_embed", "rnn.weight_ih_l0", "rnn.weight_ih_l1_reverse")
    assert [(unit.path, sorted(unit.slots)) for unit in found.units] == [
        ("bn", ["bias", "running_mean", "weight"]),
        ("pos_embed", [""]),
        ("rnn.l0", ["weight_ih"]),
        ("rnn.l1.reverse", ["weight_ih"]),
    ]


def test_the_signature_leaves_out_names_and_precision() -> None:
    one = side([Slot("a.weight", (2, 3), "float32")]).units[0]
    assert side([Slot("b.c.weight", (2, 3), "bfloat16")]).units[0].signature == one.signature
    assert side([Slot("a.weight", (2, 3), "int64")]).units[0].signature != one.signature
    assert side([Slot("a.weight", (3, 2), "float32")]).units[0].signature != one.signature


def test_two_slots_of_one_name_are_both_kept() -> None:
    assert sum(len(unit.slots) for unit in of("a.weight", "a.bias", "a.weight").units) >= 2


NAMES = [f"{part}.{at}.weight" for part in ("stem", "body") for at in range(12)]


def test_the_order_of_definition_is_recognised() -> None:
    assert of(*NAMES).in_order
    assert not of(*sorted(NAMES)).numbers_rise
    assert not of(*reversed(NAMES)).in_order
    assert not of(*random.Random(1).sample(NAMES, len(NAMES))).in_order


def test_an_alphabetical_order_is_no_proof_of_definition() -> None:
    found = of(*(f"{part}.weight" for part in "abcdef"))
    assert found.numbers_rise and not found.in_order


def test_keys_of_a_module_that_stand_apart() -> None:
    names = [f"m{at}.{leaf}" for leaf in ("weight", "bias") for at in range(6)]
    assert not of(*names).in_order


def test_how_many_modules_stand_under_a_number() -> None:
    found = of("h.0.a.weight", "h.0.b.weight", "h.1.a.weight", "head.weight")
    assert (found.under["h.0"], found.under["h.1"], found.under["head"]) == (2, 1, 0)

"""Rules learned from renamings: few where they are regular, and exact always."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.names.learn import learn
from ckptfix.names.rules import NameRule, is_rule, renamed

PARTS = st.sampled_from(
    [
        *("a", "b", "layer0", "layer12", "0", "1", "2", "10", "007", "00", "w_3", "x9y"),
        *("{}", "{n}", "{name}", "é", "٣", "1234567890123456789012", "weight", "bias"),
    ]
)
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


def made(names: list[str], rules: tuple[NameRule, ...]) -> dict[str, str]:
    """What the rules change."""
    return {old: new for old, new in renamed(names, rules).items() if old != new}


@given(st.dictionaries(NAMES, NAMES, max_size=12), st.lists(NAMES, max_size=6))
def test_any_renaming_comes_back_and_other_names_stay(wanted: dict[str, str], others: list[str]) -> None:
    names = list(dict.fromkeys([*wanted, *others]))
    told = {old: new for old, new in wanted.items() if old != new and not is_rule(old) and not is_rule(new)}
    assert made(names, learn(wanted, names)) == told


@st.composite
def templates(draw: st.DrawFn) -> tuple[dict[str, str], list[str]]:
    """Blocks with roles: numbers swapped, moved or dropped into words, with exceptions, and names that stay."""
    order, move = draw(st.booleans()), draw(st.integers(-1, 2))
    every = st.sampled_from(["q", "k", "v", "o", "fc1", "fc2", "norm1"])
    roles = draw(st.lists(every, min_size=1, max_size=4, unique=True))
    others = {role: draw(st.sampled_from([role, f"x.{role}", f"{role}s.0", f"y{len(role)}{role}"])) for role in roles}
    first = draw(st.integers(1, 3))
    wanted = {}
    for outer in range(first, first + draw(st.integers(1, 4))):
        for inner in range(draw(st.integers(1, 3))):
            for role in roles:
                numbers = (inner, outer + move) if order else (outer + move, inner)
                new = f"n.{numbers[0]}.c.{numbers[1]}.{others[role]}.weight"
                wanted[f"m.{outer}.b{inner}.{role}.weight"] = new
    names = list(wanted)
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        wanted[name] = draw(st.sampled_from(["odd.0.weight", name]))
    near = st.sampled_from(["m.1.b0.z.weight", "m.9.b1.q.weight", "m.1.b01.q.weight", "m.1.q"])
    stay = draw(st.lists(near, max_size=2, unique=True))
    return wanted, [*names, *(name for name in stay if name not in wanted)]


@given(templates())
def test_regular_renamings_come_back(case: tuple[dict[str, str], list[str]]) -> None:
    wanted, names = case
    assert made(names, learn(wanted, names)) == {old: new for old, new in wanted.items() if old != new}


def test_resnet() -> None:
    """torchvision to a library that counts stages from 0 and calls the shortcut by its name."""
    wanted = {}
    for stage in range(1, 5):
        for block in range(2):
            for number in (1, 2):
                for leaf in ("weight", "bias"):
                    old, new = f"layer{stage}.{block}", f"stages.{stage - 1}.blocks.{block}"
                    wanted[f"{old}.conv{number}.{leaf}"] = f"{new}.conv.{number - 1}.{leaf}"
                    wanted[f"{old}.bn{number}.{leaf}"] = f"{new}.norm.{number - 1}.{leaf}"
        wanted[f"layer{stage}.0.downsample.0.weight"] = f"stages.{stage - 1}.blocks.0.shortcut.conv.weight"
    assert {str(rule) for rule in learn(wanted, [*wanted, "fc.weight"])} == {
        "layer{n}.{m}.conv{k}.{*} -> stages.{n-1}.blocks.{m}.conv.{k-1}.{*}",
        "layer{n}.{m}.bn{k}.{*} -> stages.{n-1}.blocks.{m}.norm.{k-1}.{*}",
        "layer{n}.0.downsample.0.{*} -> stages.{n-1}.blocks.0.shortcut.conv.{*}",
    }


def test_llama() -> None:
    """transformers to Meta: one rule for each module."""
    roles = {"self_attn.q_proj": "attention.wq", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1"}
    wanted = {
        f"model.layers.{layer}.{old}.weight": f"layers.{layer}.{new}.weight"
        for layer in range(12)
        for old, new in roles.items()
    }
    wanted["lm_head.weight"] = "output.weight"
    rules = learn(wanted, list(wanted))
    assert {str(rule) for rule in rules} == {
        "lm_head.{*} -> output.{*}",
        "model.layers.{n}.self_attn.q_proj.{*} -> layers.{n}.attention.wq.{*}",
        "model.layers.{n}.self_attn.o_proj.{*} -> layers.{n}.attention.wo.{*}",
        "model.layers.{n}.mlp.gate_proj.{*} -> layers.{n}.feed_forward.w1.{*}",
    }


def test_vgg_has_a_line_for_each_irregular_number() -> None:
    numbers = {0: 0, 3: 4, 6: 8, 8: 11}
    wanted = {f"features.{old}.{leaf}": f"body.{new}.{leaf}" for old, new in numbers.items() for leaf in ("w", "b")}
    rules = learn(wanted, list(wanted))
    assert len(rules) <= 4
    assert made(list(wanted), rules) == wanted


def test_a_prefix_is_one_rule() -> None:
    names = [f"module.l.{index}.weight" for index in range(5)]
    assert [str(rule) for rule in learn({name: name[7:] for name in names}, names)] == ["module.{*} -> {*}"]


def test_a_name_in_the_way_keeps_a_rule_narrow() -> None:
    wanted = {f"a.{index}.w": f"b.{index}.w" for index in range(3)}
    names = [*wanted, "a.7.w", "a.01.w"]
    assert made(names, learn(wanted, names)) == wanted


def test_loose_names_do_not() -> None:
    wanted = {f"a.{index}.w": f"b.{index}.w" for index in range(3)}
    rules = learn(wanted, [*wanted, "a.0.n"], ["a.0.n"])
    assert [str(rule) for rule in rules] == ["a.{*} -> b.{*}"]


@pytest.mark.parametrize("wanted", [{}, {"a": "a"}])
def test_nothing_to_learn(wanted: dict[str, str]) -> None:
    assert learn(wanted, ["a", "b"]) == ()

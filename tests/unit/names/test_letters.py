"""Letters in names count like numbers if they are a series; neither moves a key that both sides have."""

from __future__ import annotations

import pytest

from ckptfix.align.match import match
from ckptfix.names.letters import series, spelled
from ckptfix.names.slots import Slot


def slots(names: list[str]) -> list[Slot]:
    return [Slot(f"{name}.weight", (8, 14), "float32") for name in names] + [Slot("fc.weight", (2, 8), "float32")]


def paired(one: list[str], other: list[str]) -> dict[str, str] | None:
    """Return the pairs that a matching is certain of; None if it is not complete."""
    found = match(slots(one), slots(other))
    return {old[:-7]: new[:-7] for old, new in found.names.items() if old != "fc.weight"} if found.complete else None


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["conv_a", "conv_b", "conv_c"], ["conv_a", "conv_b", "conv_c"]),
        (["res2a_branch2a", "res2b_branch2b"], ["res2a_branch2a", "res2b_branch2b"]),
        (["0.f.a", "0.f.b", "1.f.a"], ["0.F.a", "0.F.b", "1.F.a"]),
        (["conv_a", "conv_b", "zan", "bn_b"], ["conv_a", "conv_b", "zan", "bn_b"]),
        (["0.zan", "0.bn_b", "1.zan", "1.bn_b"], ["0.zan", "0.bn_b", "1.zan", "1.bn_b"]),
        (["conv_a", "conv_b", "fc_z"], ["conv_a", "conv_b", "fc_z"]),
        (["W_f", "W_i", "W_c", "W_o"], ["W_F", "W_i", "W_C", "W_o"]),
        (["W_c", "W_f"], ["W_C", "W_F"]),
        (["path_b", "path_c", "path_d"], ["path_B", "path_C", "path_D"]),
        (["fc_a", "fc_b", "fc_g"], ["fc_A", "fc_B", "fc_G"]),
        (["h.0.q", "h.1.q"], ["H.0.q", "H.1.q"]),
    ],
)  # fmt: skip
def test_letters_count_if_they_are_the_first_ones(names: list[str], wanted: list[str]) -> None:
    assert [spelled(name, series(names)) for name in names] == wanted


def test_letters_count_on_both_sides_or_on_none() -> None:
    assert not series(["conv_a", "conv_b"], ["conv_a", "conv_c"])
    assert series(["conv_a", "conv_b"], ["zan", "kip"])


@pytest.mark.parametrize("prefix", ["W_", "linear_", "U_", "gate_"])
@pytest.mark.parametrize("other", ["W_", "linear_", ""])
def test_gates_of_an_lstm_are_no_series(prefix: str, other: str) -> None:
    """The third is the cell's candidate, ``c`` in some papers and libraries, and ``g`` in torch."""
    ours, theirs = ([f"{front}{gate}" for gate in gates] for front, gates in ((prefix, "fico"), (other, "ifgo")))
    wanted = {f"{prefix}{gate}": f"{other}{twin}" for gate, twin in zip("fico", "figo", strict=True)}
    assert paired(ours, theirs) == wanted
    assert paired(theirs, ours) == {new: old for old, new in wanted.items()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["W_z", "W_r", "W_h"], ["W_r", "W_u", "W_c"]),
        (["W_z", "W_r", "W_h", "U_z", "U_r", "U_h"], ["W_r", "W_u", "W_c", "U_r", "U_u", "U_c"]),
        (["path_b", "path_c", "path_d"], ["net_f", "net_g", "net_h"]),
    ],
)
def test_letters_that_are_no_series_move_nothing(one: list[str], other: list[str]) -> None:
    """Only ``r`` and ``r`` are the same for sure; a GRU's update gate is ``z`` or ``u``."""
    pairs = match(slots(one), slots(other)).pairs
    sure = {(pair.source[:-7], pair.target[:-7]) for pair in pairs if not pair.instead and pair.source != "fc.weight"}
    assert len(sure) < len(one)
    assert all(old == new for old, new in sure)


def test_letters_do_not_move_words() -> None:
    assert paired(["q_a", "k_b"], ["q_b", "k_a"]) in (None, {"q_a": "q_b", "k_b": "k_a"})


def test_a_series_is_in_order_whatever_the_words() -> None:
    assert paired(["conv_b", "conv_a"], ["conv1", "conv2"]) == {"conv_a": "conv1", "conv_b": "conv2"}
    assert paired(["mlp_a", "mlp_b"], ["net_b", "net_a"]) == {"mlp_a": "net_a", "mlp_b": "net_b"}


@pytest.mark.parametrize("word", ["fc{}", "layers.0.conv_{}", "layer{}.conv"])
def test_a_key_that_both_sides_have_does_not_move_because_of_its_number(word: str) -> None:
    one, other = ([word.format(number) for number in numbers] for numbers in ((1, 2, 4), (2, 3, 4)))
    assert paired(one, other) is None and paired(other, one) is None


def test_numbers_may_be_shifted() -> None:
    """One side counts from 0, the other from 1; and the places of a list may be those of other layers too."""
    assert paired(["fc0", "fc1", "fc2"], ["fc1", "fc2", "fc3"]) == {"fc0": "fc1", "fc1": "fc2", "fc2": "fc3"}
    assert paired(["net.0", "net.2"], ["net.0", "net.1"]) == {"net.0": "net.0", "net.2": "net.1"}
    assert paired(["net.1", "net.3"], ["net.0", "net.1"]) == {"net.1": "net.0", "net.3": "net.1"}

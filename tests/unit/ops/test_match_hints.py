"""What a refusal of match advises: options that were not given, and nothing that loses a trained weight."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfix
from ckptfix.errors import CkptfixError, NoMatch, Refused, WouldOverwrite
from ckptfix.ops.match import find, write_rules
from ckptfix.ops.match.rules_check import check_rules

D = 8


class _Chooses(nn.Module):
    """One of two experts of one shape, which the sign of the first number chooses."""

    names = ("one", "two")

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            setattr(self, name, nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return torch.as_tensor(first(x) if x[0, 0] > 0 else second(x))


class _ChoosesToo(_Chooses):
    names = ("left", "right")


class _Picky(_Chooses):
    """It refuses every input."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not such an input")


class _PickyToo(_Picky):
    names = ("left", "right")


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType("choosing_models")
    made.old, made.new, made.picky, made.picky_too = _Chooses, _ChoosesToo, _Picky, _PickyToo
    made.given = lambda: torch.ones(2, D)
    monkeypatch.setitem(sys.modules, "choosing_models", made)


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    torch.save(_Chooses().state_dict(), tmp_path / "in.pth")
    return tmp_path / "in.pth"


def _hints(source: Path, like: str, **options: Any) -> str:
    found = find(source, like, allow_import=True, **options)
    assert found.refusals
    return " ".join(refusal.hint or "" for refusal in found.refusals)


PROVES: dict[str, Any] = {"verify": True, "source_model": "choosing_models:old"}


def test_a_hint_names_what_settles_open_pairs_next(experts: Path) -> None:
    plain = _hints(experts, "choosing_models:new")
    assert "--verify" in plain and "--report" in plain and "--input" not in plain
    assert "--report" not in _hints(experts, "choosing_models:new", reported=True)
    ran = _hints(experts, "choosing_models:new", **PROVES)
    assert "--verify" not in ran and "--input with more tokens" in ran and "rules file" in ran
    given = _hints(experts, "choosing_models:new", **PROVES, inputs="choosing_models:given")
    assert "--verify" not in given and "--input" not in given and "an input with more tokens" in given


@pytest.mark.parametrize("which", ["source", "target"])
def test_a_hint_names_an_input_only_if_none_was_given(experts: Path, which: str) -> None:
    like = "choosing_models:picky_too" if which == "target" else "choosing_models:new"
    source = "choosing_models:picky" if which == "source" else "choosing_models:old"
    for inputs in (None, "choosing_models:given"):
        with pytest.raises(CkptfixError, match="cannot run on the input") as caught:
            ckptfix.match(
                *(experts, experts.with_name("out.pth"), like),
                verify=True, source_model=source, inputs=inputs, allow_import=True,
            )  # fmt: skip
        assert ("--input" in (caught.value.hint or "")) is (inputs is None)


def test_other_hints_name_no_option_that_was_given(tmp_path: Path) -> None:
    source, target = tmp_path / "in.pth", tmp_path / "target.pth"
    torch.save({"fc.weight": torch.zeros(4, 6), "extra": torch.zeros(3)}, source)
    torch.save({"fc.weight": torch.zeros(24), "more": torch.zeros(5)}, target)
    for drops in (False, True):
        hint = find(source, target, drop_unexpected=drops).refusals[0].hint or ""
        assert ("--drop-unexpected" in hint) is not drops and "--partial" in hint
    torch.save({"fc.weight": torch.zeros(4, 6)}, source)
    torch.save({"fc.weight": torch.zeros(2, 12)}, target)
    assert "--reshape" in (find(source, target).refusals[0].hint or "")
    torch.save({"fc.weight": torch.zeros(4, 6), "b": torch.zeros(2, 3, 4)}, source)
    torch.save({"fc.weight": torch.zeros(6, 4), "b": torch.zeros(2, 3, 5)}, target)
    assert "--reshape" not in (find(source, target, reshape=True).refusals[0].hint or "")


def test_the_output_is_the_target(experts: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.pth"
    torch.save(_ChoosesToo().state_dict(), target)
    with pytest.raises(WouldOverwrite, match="the output is the target"):
        ckptfix.match(experts, target, target, force=True)
    with pytest.raises(WouldOverwrite, match="the output is the input"):
        ckptfix.match(experts, experts, target, force=True)
    with pytest.raises(WouldOverwrite, match="exists"):
        ckptfix.match(experts, target, "choosing_models:new", allow_import=True)


def test_a_message_spells_the_rest_of_a_key_as_the_user_does(experts: Path, tmp_path: Path) -> None:
    (tmp_path / "x.rules").write_text("{*} -> {*}.{*}\n")
    said = str(check_rules(experts, experts, tmp_path / "x.rules"))
    assert "{*} appears 2 times" in said and "{rest}" not in said


def test_the_error_of_match_has_a_public_name() -> None:
    assert ckptfix.NoMatch is NoMatch and "NoMatch" in ckptfix.__all__


def _tied(tmp_path: Path, *further: str, **ours: Tensor) -> tuple[Path, Path]:
    """Return a file with a tensor for each of `ours`, and a target that ties `further` keys to its embedding."""
    source, target = tmp_path / "in.pth", tmp_path / "target.pth"
    wide = torch.randn(6, 5)
    torch.save({f"{name}.weight": value for name, value in ours.items()} | {"fc.weight": wide}, source)
    state = {"embed.weight": torch.randn(20, 6), "lin.weight": torch.randn(6, 5)}
    torch.save(state | dict.fromkeys(further, state["embed.weight"]), target)
    return source, target


def test_weights_of_a_key_that_the_target_ties_are_not_to_be_dropped(tmp_path: Path) -> None:
    ours = {"tok": torch.randn(20, 6), "head": torch.randn(20, 6)}
    source, target = _tied(tmp_path, "lm_head.weight", "dec.weight", **ours)
    with pytest.raises(NoMatch, match=r"which TARGET ties to embed\.weight") as caught:
        ckptfix.match(source, tmp_path / "out.pth", target)
    assert "head.weight may be lm_head.weight or dec.weight" in caught.value.message
    assert "--drop-unexpected" not in (caught.value.hint or "") and "--partial" in (caught.value.hint or "")
    done = ckptfix.match(source, tmp_path / "out.pth", target, drop_unexpected=True)
    assert any("TARGET ties" in note for note in done.notes)


@pytest.mark.parametrize("equal", [True, False])
def test_a_note_says_whether_two_tensors_of_a_tied_key_are_equal(tmp_path: Path, equal: bool) -> None:
    table = torch.randn(20, 6)
    source, target = _tied(tmp_path, "lm_head.weight", tok=table, head=table.clone() if equal else -table)
    (note,) = [one for one in find(source, target).notes if "TARGET ties" in one]
    assert note.endswith("with equal values" if equal else "with other values, and a load uses the last one")


def test_an_edit_in_place_names_the_reason(tmp_path: Path) -> None:
    source, target = _tied(tmp_path, "lm_head.weight", tok=torch.randn(20, 6))
    with pytest.raises(Refused, match=r"this one adds 1 second key of tensors \(lm_head.weight\)"):
        ckptfix.match(source, None, target, in_place=True)


def test_the_summary_and_json_say_where_safetensors_has_a_second_key(tmp_path: Path) -> None:
    source, target = _tied(tmp_path, "lm_head.weight", tok=torch.randn(20, 6))
    plain = ckptfix.match(source, tmp_path / "out.pth", target)
    assert "1 second key added: lm_head.weight" in plain.lines[0] and "metadata" not in plain.lines[0]
    done = ckptfix.match(source, tmp_path / "out.safetensors", target)
    assert "1 second key added: lm_head.weight (in the metadata if OUT is safetensors)" in done.lines[0]
    assert done.as_dict()["second_keys"] == plain.as_dict()["second_keys"] == {"lm_head.weight": "embed.weight"}


@pytest.mark.parametrize("key", ["x{n}.0.weight", "{*}.0.weight", "{e}", "x{n+1}"])
@pytest.mark.parametrize("suffix", ["txt", "json"])
def test_a_key_that_no_rule_can_hold_is_not_left_out_silently(tmp_path: Path, key: str, suffix: str) -> None:
    source, target = tmp_path / "in.pth", tmp_path / "target.pth"
    torch.save({"tok.weight": torch.randn(20, 6), "x0.weight": torch.randn(6, 5)}, source)
    wanted = {"embed.weight": torch.randn(20, 6), key: torch.randn(6, 5)}
    torch.save(wanted, target)
    done = ckptfix.match(source, tmp_path / "out.pth", target)
    assert done.names["x0.weight"] == key and any("no rule can hold" in note for note in done.notes)
    with pytest.raises(Refused, match="no rule can hold the key"):
        write_rules(find(source, target), tmp_path / f"rules.{suffix}")
    assert not (tmp_path / f"rules.{suffix}").exists()
    torch.save({**wanted, "lm_head.weight": wanted["embed.weight"]}, target)
    with pytest.raises(Refused, match="no rule can hold"):
        ckptfix.match(source, tmp_path / "tied.pth", target)
    assert not (tmp_path / "tied.pth").exists()


def test_a_line_with_operations_holds_no_key_with_spaces(tmp_path: Path) -> None:
    source, target = _tied(tmp_path, "lm head.weight", tok=torch.randn(20, 6))
    assert "lm head.weight" in ckptfix.load_state_dict(ckptfix.match(source, tmp_path / "out.pth", target).dest)
    with pytest.raises(Refused, match=r"cannot hold 'lm head\.weight'"):
        write_rules(find(source, target), tmp_path / "x.rules")

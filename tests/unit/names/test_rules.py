"""Rules with placeholders, alone and in `rename`: what they make of names, and which of them counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import CkptfixError, Refused
from ckptfix.names import rules
from ckptfix.names.rules import NameRule, is_rule, renamed
from ckptfix.ops.rename.run import read_rules


@pytest.mark.parametrize(
    ("old", "new", "name", "expected"),
    [
        ("features.{n}.conv.weight", "backbone.{n}.0.weight", "features.12.conv.weight", "backbone.12.0.weight"),
        ("layer{n}.{m}.{*}", "stages.{n-1}.{m+1}.{*}", "layer2.0.conv.weight", "stages.1.1.conv.weight"),
        ("a.{n}.b.{m}", "b.{m}.{n}", "a.1.b.2", "b.2.1"),
        ("a.{n}", "b", "a.3", "b"),
        ("{*}", "model.{*}", "fc.weight", "model.fc.weight"),
        ("a.{n}", "b.{n-1}", "a.0", None),
        ("a.{n}", "b.{n}", "a.x", None),
        ("a.{n}", "b.{n}", "a.1.weight", None),
        ("a.{n}", "b.{n}", "xa.1", None),
        ("a.{n}.w", "b.{n}.w", "a.1xw", None),
        ("a.{*}", "b.{*}", "a.", None),
        ("fc.weight", "head.weight", "fc.weight", "head.weight"),
    ],
)
def test_what_a_rule_makes_of_a_name(old: str, new: str, name: str, expected: str | None) -> None:
    assert NameRule(old, new).apply(name) == expected
    assert str(NameRule(old, new)) == f"{old} -> {new}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("a.{n}", "b.{m}"), ("a", "b.{n}"), ("{n}.{n}", "{n}"), ("a.{n+1}", "b.{n}")),
        *(("a.{*}.{*}", "c.{*}"), ("a", "{*}")),
    ],
)
def test_rules_that_are_none(old: str, new: str) -> None:
    with pytest.raises(Refused):
        NameRule(old, new)


def test_braces_that_are_no_placeholder_stand_for_themselves() -> None:
    assert not is_rule("a.{name}.b")
    assert not is_rule("a.{N}")
    assert NameRule("a.{name}", "b").apply("a.{name}") == "b"


def test_the_first_rule_counts() -> None:
    rules = [NameRule("a.0.{*}", "first.{*}"), NameRule("a.{n}.{*}", "rest.{n-1}.{*}")]
    assert renamed(["a.0.w", "a.1.w", "b.w"], rules) == {"a.0.w": "first.w", "a.1.w": "rest.0.w"}


def checkpoint(path: Path, *names: str) -> Path:
    torch.save({name: torch.full((1,), float(index)) for index, name in enumerate(names)}, path)
    return path


def after(path: Path, mapping: dict[str, str], **how: Any) -> list[str]:
    out = path.with_name("out.pth")
    ckptfix.rename(path, out, mapping=mapping, force=True, **how)
    return list(torch.load(out, weights_only=True))


def test_rename_takes_rules_in_its_map(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a.pth", "layer1.0.w", "layer2.1.w", "layer2.1.b", "fc.w")
    assert after(path, {"layer{n}.{m}.{*}": "stage.{n-1}.{m}.{*}", "fc.w": "head.w"}) == [
        "stage.0.0.w", "stage.1.1.w", "stage.1.1.b", "head.w",
    ]  # fmt: skip


def test_an_exact_name_counts_before_every_rule(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a.pth", "l.0.w", "l.1.w", "l.2.w")
    assert after(path, {"l.{n}.w": "m.{n}.w", "l.1.w": "l.1.w"}) == ["m.0.w", "l.1.w", "m.2.w"]


def test_a_key_that_looks_like_a_rule_is_itself_first(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a.pth", "l.{n}.w", "l.1.w")
    assert after(path, {"l.{n}.w": "m.{n}.w"}) == ["m.{n}.w", "m.1.w"]


def test_rules_come_after_substitutions(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a.pth", "module.l.0.w")
    assert after(path, {"l.{n}.w": "m.{n}.w"}, subs=[(r"^module\.", "")]) == ["m.0.w"]


def test_a_rule_that_matches_nothing_is_a_finding(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a.pth", "l.0.w")
    result = ckptfix.rename(path, tmp_path / "out.pth", mapping={"x.{n}.w": "y.{n}.w", "l.{n}.w": "m.{n}.w"})
    assert [(finding.id, finding.where) for finding in result.findings] == [("unused-rule", "x.{n}.w")]


def test_metadata_of_modules_without_tensors_follows_a_rule(tmp_path: Path) -> None:
    """``features.0`` holds no tensor of its own: only the rule says what becomes of it."""
    inner = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1))
    model = torch.nn.ModuleDict({"features": torch.nn.Sequential(inner)})
    torch.save(model.state_dict(), tmp_path / "a.pth")
    ckptfix.rename(tmp_path / "a.pth", tmp_path / "out.pth", mapping={"features.{n}.{*}": "trunk.{n}.{*}"})
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert {"trunk.0", "trunk.0.0", "trunk.0.1"} <= set(found._metadata)
    assert "features.0" not in found._metadata
    assert found._metadata["trunk.0.1"] == {"version": 2}


def test_the_file_of_names_takes_arrows_and_rules(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("# learned\nl.{n}.{*} -> m.{n}.{*}\nfc.w head.w\na -> b # one\n")
    assert read_rules(str(path)).names == {"l.{n}.{*}": "m.{n}.{*}", "fc.w": "head.w", "a": "b"}
    path.write_text('{"l.{n}.w": "m.{n}.w"}')
    assert read_rules(str(path)).names == {"l.{n}.w": "m.{n}.w"}


@pytest.mark.parametrize("text", ["a.{n} -> b.{m}", '{"a": "b.{n}"}', "a => b", "a -> b c"])
def test_bad_files_of_names(tmp_path: Path, text: str) -> None:
    path = tmp_path / "names.txt"
    path.write_text(text)
    with pytest.raises(CkptfixError) as caught:
        read_rules(str(path))
    assert caught.value.path == str(path)


@pytest.mark.parametrize("kept", [0, 2, rules.KEPT])
def test_the_table_knows_the_rules_that_trying_each_one_finds(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What follows a component is kept up to a limit, and is the same for all components that lead to the same rules.
    monkeypatch.setattr(rules, "KEPT", kept)
    lines = [
        NameRule("a.{n}.{*}", "1.{n}.{*}"),
        NameRule("a.{n}.fc{m}.weight", "2.{n}.{m}"),
        NameRule("a.3.{*}", "3.{*}"),
        NameRule("a.{n}", "4.{n}"),
        NameRule("{*}.norm.weight", "5.{*}"),
        NameRule("a.b.c", "6"),
    ]
    names = [f"a.{n}.{end}" for n in (3, 4, 4, "x") for end in ("fc1.weight", "fc2.weight", "norm.weight", "fc.weight")]
    names += ["a.3", "a.4", "a", "", "a.", "a.b.c", "a.b.c.d", "a.b"]
    table = rules.RuleTable(lines)
    for name in [*names, *names]:
        tried = [rule for rule in lines if rule.apply(name) is not None]
        assert [rule for rule in table.about(name) if rule.apply(name) is not None] == tried, name


def test_many_rules_are_not_all_tried_on_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 300
    state = {f"blocks.{number}.norm.weight": torch.zeros(1) for number in range(count)}
    torch.save(state, tmp_path / "in.pth")
    apply, tried = NameRule.apply, 0

    def counted(rule: NameRule, name: str) -> str | None:
        nonlocal tried
        tried += 1
        return apply(rule, name)

    monkeypatch.setattr(NameRule, "apply", counted)
    mapping = {f"blocks.{number}.{{*}}": f"layers.{number}.{{*}}" for number in range(count)}
    done = ckptfix.rename(tmp_path / "in.pth", tmp_path / "out.pth", mapping=mapping)
    assert len(done.changes) == count
    assert tried < 20 * count

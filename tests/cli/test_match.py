"""``ckptfix match``: what is written, what is refused and shown, and what `rename --map` makes of the learned rules."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from builders import Tensor, assemble, state_dict_ops, torch_zip, written
from cli.conftest import Cli
from torch import nn

import ckptfix
from ckptfix.align import match as match_op
from ckptfix.align.result import MatchedPair, Matching
from ckptfix.errors import KeyConflict
from ckptfix.names.slots import Slot
from ckptfix.ops import match as matching_module


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(3 if index == 0 else 4, 4, 3), nn.BatchNorm2d(4)) for index in range(3)]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(4, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(self.features(images).mean((2, 3)))
        return result


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(
            nn.ModuleDict({"conv": nn.Conv2d(3 if index == 0 else 4, 4, 3), "bn": nn.BatchNorm2d(4)})
            for index in range(3)
        )
        self.head = nn.Linear(4, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for layer in self.backbone:
            assert isinstance(layer, nn.ModuleDict)
            images = layer["bn"](layer["conv"](images))
        result: torch.Tensor = self.head(images.mean((2, 3)))
        return result


RULES = [
    "fc.{*} -> head.{*}",
    "features.{n}.0.{*} -> backbone.{n}.conv.{*}",
    "features.{n}.1.{*} -> backbone.{n}.bn.{*}",
]
WAYS = ["position", "structure"]


@pytest.fixture
def one(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return saved(tmp_path / "one.pth", One().state_dict())


@pytest.fixture
def other(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    return saved(tmp_path / "other.pth", Other().state_dict())


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def flat(**shapes: tuple[int, ...]) -> OrderedDict[str, torch.Tensor]:
    torch.manual_seed(crc32(" ".join(shapes).encode()))  # other names, other values: equal ones would be proof
    return OrderedDict((name.replace("__", "."), torch.randn(shape)) for name, shape in shapes.items())


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("by", WAYS)
def test_the_other_model_loads_it_and_computes_the_same(
    cli: Cli, one: Path, other: Path, tmp_path: Path, by: str
) -> None:
    out = tmp_path / "out.pth"
    result = cli("match", one, out, "--like", other, "--by", by)
    assert result.exit_code == 0, result.output
    assert f"matched 23 of 23 keys by {by}; 23 renamed" in result.stdout
    assert all(f"  {rule}" in result.stdout for rule in RULES)
    left, right = One().eval(), Other().eval()
    left.load_state_dict(load(one))
    right.load_state_dict(load(out))
    images = torch.randn(2, 3, 9, 9)
    assert torch.equal(left(images), right(images))
    versions = {name: own for name, own in load(out)._metadata.items() if name.endswith("bn")}
    assert versions == {f"backbone.{index}.bn": {"version": 2} for index in range(3)}


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("name", ["rules.txt", "rules.json"])
@pytest.mark.parametrize("tracked", [True, False])
def test_rename_takes_the_rules_back(
    cli: Cli, one: Path, other: Path, tmp_path: Path, by: str, name: str, tracked: bool
) -> None:
    if not tracked:
        saved(other, {key: value for key, value in load(other).items() if "tracked" not in key})
    rules, out, again = tmp_path / name, tmp_path / "out.pth", tmp_path / "again.pth"
    assert cli("match", one, out, "--like", other, "--by", by, "--rules", rules).exit_code == 0
    result = cli("rename", one, again, "--map", rules)
    assert result.exit_code == 0
    assert not result.stderr
    assert again.read_bytes() == out.read_bytes()
    assert len(rules.read_text().splitlines()) <= 6


def test_buffers_that_the_target_lacks_go_with_their_module(cli: Cli, one: Path, other: Path, tmp_path: Path) -> None:
    saved(other, {key: value for key, value in load(other).items() if "tracked" not in key})
    result = cli("match", one, tmp_path / "out.pth", "--like", other, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["complete"]
    assert [row["rule"] for row in document["skipped_in_source"]] == ["num_batches_tracked"] * 3
    assert Other().load_state_dict(load(tmp_path / "out.pth"), strict=True)


def test_nested_with_an_optimizer_that_knows_names(cli: Cli, other: Path, tmp_path: Path) -> None:
    model = One()
    names = [name for name, _ in model.named_parameters()]
    groups = [{"lr": 0.1, "params": list(range(len(names))), "param_names": names}]
    value = {"epoch": 3, "model": model.state_dict(), "optimizer": {"state": {}, "param_groups": groups}}
    source = saved(tmp_path / "training.pth", value)
    assert cli("match", source, tmp_path / "out.pth", "--like", other, "--at", "model").exit_code == 0
    found = load(tmp_path / "out.pth")
    assert list(found["model"]) == list(load(other))
    assert found["optimizer"]["param_groups"][0]["param_names"][0] == "backbone.0.conv.weight"
    assert found["epoch"] == 3


def test_safetensors_and_a_file_of_keys(cli: Cli, one: Path, other: Path, tmp_path: Path) -> None:
    ckptfix.convert(one, tmp_path / "one.safetensors")
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({name: list(tensor.shape) for name, tensor in load(other).items()}))
    out = tmp_path / "out.safetensors"
    assert cli("match", tmp_path / "one.safetensors", out, "--like", keys).exit_code == 0
    found = ckptfix.load_state_dict(out)
    expected = dict(zip(load(other), load(one).values(), strict=True))
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_position_says_that_safetensors_are_sorted(cli: Cli, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pth", flat(a__w=(2,), b__w=(2,)))
    ckptfix.convert(source, tmp_path / "a.safetensors")
    result = cli("match", tmp_path / "a.safetensors", "--like", source, "--by", "position", "--dry-run")
    assert "note: IN is a safetensors file, which is sorted" in result.stdout


def test_a_model_is_imported_only_with_leave(
    cli: Cli, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_net_to_match.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))\n"
    )
    source = saved(tmp_path / "a.pth", nn.ModuleDict({"x": nn.Linear(2, 3), "y": nn.Linear(3, 4)}).state_dict())
    refused = cli("match", source, "out.pth", "--like", "a_net_to_match:build")
    assert refused.exit_code == 2
    assert "--allow-import" in refused.stderr
    assert cli("match", source, "out.pth", "--like", "a_net_to_match:build", "--allow-import").exit_code == 0
    assert list(load(tmp_path / "out.pth")) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_the_report_shows_pairs_rules_and_what_is_left(cli: Cli, one: Path, tmp_path: Path) -> None:
    target = saved(tmp_path / "t.pth", {**Other().state_dict(), "extra.weight": torch.zeros(9, 9)})
    result = cli("match", one, "--like", target, "--report")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["source", "target", "shape", "confidence", "why"]
    assert lines[2].split()[:6] == ["features.0.0.weight", "backbone.0.conv.weight", "[4,", "3,", "3,", "3]"]
    assert all(f"  {rule}" in lines for rule in RULES)
    assert lines[lines.index("only in TARGET:") + 1].strip().startswith("extra.")
    assert "1 of TARGET have no counterpart" in result.stderr
    assert set(tmp_path.glob("*.pth")) == {one, target}


def test_a_dry_run_writes_nothing(cli: Cli, one: Path, other: Path, tmp_path: Path) -> None:
    out, rules = tmp_path / "out.pth", tmp_path / "rules.txt"
    result = cli("match", one, out, "--like", other, "--dry-run", "--rules", rules)
    assert result.exit_code == 0
    assert f"would write {out}" in result.stdout
    assert not out.exists()
    assert not rules.exists()


@pytest.mark.parametrize("extra", [[], ["--report"], ["--json"], ["--json", "--report"]])
def test_what_is_left_over_is_refused(cli: Cli, one: Path, tmp_path: Path, extra: list[str]) -> None:
    target = saved(tmp_path / "t.pth", {**Other().state_dict(), "extra.weight": torch.zeros(9, 9)})
    out = tmp_path / "out.pth"
    result = cli("match", one, out, "--like", target, *extra)
    assert result.exit_code == 2
    assert not out.exists()
    if "--json" in extra:
        document = json.loads(result.stdout)
        assert "extra.weight" in json.dumps(document)
    else:
        assert "only in TARGET: extra.weight" in result.stderr or "only in TARGET: extra.*" in result.stderr
        assert "--partial" in result.stderr


def test_partial_renames_the_rest(cli: Cli, one: Path, tmp_path: Path) -> None:
    saved(one, {**load(one), "mine.weight": torch.ones(5, 5)})
    target = saved(tmp_path / "t.pth", {**Other().state_dict(), "extra.weight": torch.zeros(9, 9)})
    out = tmp_path / "out.pth"
    result = cli("match", one, out, "--like", target, "--partial")
    assert result.exit_code == 1
    assert "extra.weight: only in TARGET" in result.stderr
    assert "mine.weight: only in IN" in result.stderr
    found = load(out)
    assert torch.equal(found["mine.weight"], torch.ones(5, 5))
    assert set(found) == {*Other().state_dict(), "mine.weight"}


def test_a_name_that_stays_may_not_be_taken(tmp_path: Path) -> None:
    """``b.w`` of IN has no counterpart and stays, and another tensor would get its name."""
    source = saved(tmp_path / "a.pth", flat(a__w=(3,), b__w=(4, 4)))
    target = saved(tmp_path / "t.pth", flat(b__w=(3,)))
    with pytest.raises(KeyConflict):
        ckptfix.match(source, tmp_path / "out.pth", target, partial=True)
    assert not (tmp_path / "out.pth").exists()


def ambiguous(source: list[Slot], target: list[Slot], **how: Any) -> Matching:
    pairs = tuple(
        MatchedPair(a.name, b.name, 0.5, "order", (target[0].name,)) for a, b in zip(source, target, strict=True)
    )
    return Matching("structure", pairs, ())


def test_ambiguous_pairs_are_listed_and_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(match_op, "match", ambiguous)
    source = saved(tmp_path / "a.pth", flat(a__w=(3,), b__w=(3,)))
    target = saved(tmp_path / "t.pth", flat(x__w=(3,), y__w=(3,)))
    out = tmp_path / "out.pth"
    result = cli("match", source, out, "--like", target)
    assert result.exit_code == 2
    assert "2 of 2 pairs are ambiguous" in result.stderr
    assert "b.w -> y.w, or x.w" in result.stderr
    assert not out.exists()
    assert cli("match", source, "--like", target, "--report").exit_code == 1
    assert cli("match", source, out, "--like", target, "--accept-ambiguous").exit_code == 0
    assert list(load(out)) == ["x.w", "y.w"]


def test_keys_that_nothing_tells_apart_are_listed_and_refused(cli: Cli, tmp_path: Path) -> None:
    """Two layers of one shape, and names that say nothing on one side: what is proposed is a guess."""
    source = saved(tmp_path / "a.pth", flat(q__weight=(3, 3), k__weight=(3, 3), fc__weight=(5, 3)))
    target = saved(tmp_path / "t.pth", flat(zan__weight=(3, 3), lor__weight=(3, 3), head__weight=(5, 3)))
    out = tmp_path / "out.pth"
    result = cli("match", source, out, "--like", target)
    assert result.exit_code == 2
    assert "2 of 3 pairs are ambiguous" in result.stderr
    assert "q.weight -> zan.weight, or lor.weight" in result.stderr
    assert "k.weight -> lor.weight, or zan.weight" in result.stderr
    assert "--accept-ambiguous" in result.stderr
    assert not out.exists()
    report = cli("match", source, "--like", target, "--report", "--json")
    assert report.exit_code == 1
    document = json.loads(report.stdout)
    assert not document["complete"]
    assert [bool(row["instead"]) for row in document["pairs"]] == [True, True, False]
    assert cli("match", source, out, "--like", target, "--accept-ambiguous").exit_code == 0
    found, before = load(out), load(source)
    assert list(found) == ["zan.weight", "lor.weight", "head.weight"]
    assert all(torch.equal(one, other) for one, other in zip(found.values(), before.values(), strict=True))


def test_where_positions_part_is_shown(cli: Cli, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pth", flat(a__w=(3,), b__w=(4,), c__w=(5,)))
    target = saved(tmp_path / "t.pth", flat(x__w=(3,), y__w=(5,)))
    result = cli("match", source, tmp_path / "out.pth", "--like", target, "--by", "position")
    assert result.exit_code == 2
    assert "after 1 pairs" in result.stderr
    assert "  x b.w [4] float32  y.w [5] float32" in result.stderr
    document = json.loads(cli("match", source, "--like", target, "--by", "position", "--report", "--json").stdout)
    assert document["error"]["type"] == "NoMatch"
    assert len(document["error"]["lines"]) == 3


def test_reshape(cli: Cli, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pth", flat(fc__weight=(4, 6), fc__bias=(4,)))
    target = saved(tmp_path / "t.pth", flat(conv__weight=(4, 6, 1, 1), conv__bias=(4,)))
    out = tmp_path / "out.pth"
    assert cli("match", source, out, "--like", target, "--by", "position").exit_code == 2
    result = cli("match", source, out, "--like", target, "--by", "position", "--reshape", "--report")
    assert result.exit_code == 0, result.output
    assert "[4, 6] -> [4, 6, 1, 1]" in result.stdout
    assert "1 reshaped" in result.stdout
    found = load(out)
    assert found["conv.weight"].shape == (4, 6, 1, 1)
    assert torch.equal(found["conv.weight"].flatten(), load(source)["fc.weight"].flatten())


def test_a_refusal_names_the_option_that_settles_it(cli: Cli, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pth", flat(cls=(1, 1, 8), fc__weight=(5, 8)))
    target = saved(tmp_path / "b.pth", flat(token=(8,), head__weight=(5, 8)))
    result = cli("match", source, tmp_path / "o.pth", "--like", target)
    assert result.exit_code == 2 and "--reshape" in result.stderr and "[1, 1, 8]" in result.stderr
    assert cli("match", source, tmp_path / "o.pth", "--like", target, "--reshape").exit_code == 0


def test_a_fused_attention_is_taken_apart(tmp_path: Path) -> None:
    whole = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)}).state_dict()
    source = saved(tmp_path / "a.pth", whole)
    parts = {f"attn.{part}_proj.{leaf}": (4, 4) if leaf == "weight" else (4,) for part in ("q", "k", "v", "out")
             for leaf in ("weight", "bias")}  # fmt: skip
    target = saved(tmp_path / "t.pth", {name: torch.zeros(shape) for name, shape in parts.items()})
    result = ckptfix.match(source, tmp_path / "out.pth", target)
    assert str(result.rules[0]) == "attn.in_proj_weight -> attn.{q_proj,k_proj,v_proj}.weight | split"
    found = load(tmp_path / "out.pth")
    assert found.keys() == parts.keys()
    for part, rows in zip(("q", "k", "v"), whole["attn.in_proj_weight"].split(4), strict=True):
        assert torch.equal(found[f"attn.{part}_proj.weight"], rows)
    back = ckptfix.match(tmp_path / "out.pth", tmp_path / "back.pth", source)
    assert str(back.rules[0]).endswith("| concat")
    again = load(tmp_path / "back.pth")
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_dtypes_and_ties_that_differ_are_noted(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pth", flat(a__w=(3, 2), b__w=(2,), c__w=(3, 2)))
    weight = torch.zeros(3, 2, dtype=torch.float16)
    target = saved(tmp_path / "t.pth", {"x.w": weight, "y.w": torch.zeros(2), "z.w": weight})
    result = ckptfix.match(source, tmp_path / "out.pth", target, by="position")
    assert "2 of IN are float32 but float16 in TARGET, such as a.w: they stay float32" in result.notes
    said = "IN has a tensor for each, with other values, and a load uses the last one"
    assert f"TARGET ties z.w to x.w; {said}" in result.notes


def test_the_target_is_not_overwritten(cli: Cli, one: Path, other: Path) -> None:
    before = other.read_bytes()
    assert cli("match", one, other, "--like", other, "--force").exit_code == 2
    assert other.read_bytes() == before


def test_rules_do_not_overwrite(cli: Cli, one: Path, other: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("mine")
    assert cli("match", one, "--like", other, "--rules", rules).exit_code == 2
    assert rules.read_text() == "mine"
    assert cli("match", one, "--like", other, "--rules", rules, "--force").exit_code == 0
    assert "head" in rules.read_text()


def test_names_that_no_line_can_hold(cli: Cli, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pth", OrderedDict([("a name", torch.zeros(2)), ("#x.w", torch.zeros(3))]))
    target = saved(tmp_path / "t.pth", flat(b__w=(2,), c__w=(3,)))
    arguments = ("match", source, tmp_path / "out.pth", "--like", target, "--by", "position", "-f", "--rules")
    assert cli(*arguments, tmp_path / "rules.txt").exit_code == 2
    assert not (tmp_path / "out.pth").exists()
    assert cli(*arguments, tmp_path / "rules.json").exit_code == 0
    assert cli("rename", source, tmp_path / "again.pth", "--map", tmp_path / "rules.json").exit_code == 0
    assert (tmp_path / "again.pth").read_bytes() == (tmp_path / "out.pth").read_bytes()


def test_equal_names_are_an_identical_copy(cli: Cli, one: Path, tmp_path: Path) -> None:
    result = cli("match", one, tmp_path / "out.pth", "--like", one)
    assert result.exit_code == 0
    assert "all have the right keys already" in result.stdout
    assert (tmp_path / "out.pth").read_bytes() == one.read_bytes()


def test_the_library_previews_without_a_destination(one: Path, other: Path) -> None:
    result = matching_module.preview(matching_module.find(one, other))
    assert not result.written
    assert len(result.names) == 23
    assert [str(rule) for rule in result.rules] == RULES


def test_equal_names_are_not_called_a_match_by_shape(cli: Cli, tmp_path: Path) -> None:
    """A module that is the only one of its shapes is found by these, and its name may be the same all the same."""
    items = {"features.1.weight": Tensor("0", (3, 5), 15), "old.weight": Tensor("0", (2, 2), 15)}
    other = {"features.1.weight": Tensor("0", (3, 5), 15), "new.other.weight": Tensor("0", (2, 2), 15)}
    a, b = (
        written(tmp_path / name, torch_zip(assemble(("PROTO", 2), *state_dict_ops(rows), "STOP"), [data]))
        for name, rows, data in (("a.pth", items, bytes(60)), ("b.pth", other, b"?" * 60))
    )
    shown = cli("match", a, "--like", b, "--report").stdout.splitlines()
    (same,) = [line for line in shown if line.startswith("features.1.weight")]
    assert "only shape" not in same and same.endswith("same name")
    assert any("only shape" in line for line in shown if line.startswith("old.weight"))


@pytest.mark.parametrize("both", [False, True])
def test_the_rules_reshape_too_and_run_backwards(tmp_path: Path, both: bool) -> None:
    """Also beside tensors that are split."""
    source = flat(cls=(1, 1, 8), fc__weight=(5, 8), conv__weight=(8, 3, 2, 2))
    target = flat(token=(8,), head__weight=(5, 8), stem__weight=(8, 3, 2, 2))
    if both:
        source |= flat(attn__qkv__weight=(24, 8), attn__proj__weight=(8, 8))
        target |= {f"self_attn.{name}.weight": torch.zeros(8, 8) for name in ("query", "key", "value", "out")}
    one, other = saved(tmp_path / "a.pth", source), saved(tmp_path / "b.pth", target)
    found = matching_module.find(one, other, reshape=True)
    assert not found.refusals
    matching_module.write_rules(found, tmp_path / "found.rules")
    ckptfix.match(one, tmp_path / "o.pth", other, reshape=True)
    ckptfix.rename(one, tmp_path / "again.pth", rules=tmp_path / "found.rules")
    ckptfix.rename(tmp_path / "again.pth", tmp_path / "back.pth", rules=tmp_path / "found.rules", reverse=True)
    made, again, back = (load(tmp_path / name) for name in ("o.pth", "again.pth", "back.pth"))
    assert {key: value.shape for key, value in made.items()} == {key: value.shape for key, value in target.items()}
    assert all(torch.equal(made[key], value) for key, value in again.items()) and made.keys() == again.keys()
    assert all(torch.equal(source[key], value) for key, value in back.items()) and source.keys() == back.keys()

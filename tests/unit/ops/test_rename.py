"""Key surgery on real files: which names change, which follow, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Tensor, assemble, tensor_ops, torch_zip, written

import ckptfix
from ckptfix.errors import KeyConflict, NoSuchTensor, PartialPrefix, Refused


def save(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


def weights(*names: str) -> OrderedDict[str, torch.Tensor]:
    return OrderedDict((name, torch.full((2,), float(index))) for index, name in enumerate(names))


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.pth"


def test_a_name_that_only_contains_the_prefix_is_left(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", weights("module.submodule.weight", "module.module_list.0.bias"))
    result = ckptfix.strip_module(source, out)
    assert list(load(out)) == ["submodule.weight", "module_list.0.bias"]
    assert [change.old for change in result.changes] == ["module.submodule.weight", "module.module_list.0.bias"]


def test_nothing_to_do_is_an_identical_copy(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", weights("submodule.weight"))
    result = ckptfix.strip_module(source, out)
    assert out.read_bytes() == source.read_bytes()
    assert "nothing to do" in result.lines[0]
    assert "identical copy" in result.lines[0]


def test_a_partial_prefix_is_refused_and_named(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", {"model": weights("module.fc.weight", "head.weight")})
    with pytest.raises(PartialPrefix) as caught:
        ckptfix.strip_module(source, out)
    assert caught.value.others == ("head.weight",)
    assert caught.value.where == "model"
    assert not out.exists()
    ckptfix.strip_module(source, out, partial=True)
    assert list(load(out)["model"]) == ["fc.weight", "head.weight"]


@pytest.mark.parametrize("at", [None, "model"])
@pytest.mark.parametrize("verb", [ckptfix.strip_module, ckptfix.unwrap])
def test_a_scalar_beside_a_prefix_is_named(tmp_path: Path, out: Path, verb: Any, at: str | None) -> None:
    """CLIP's logit_scale beside a wrapped tower: a tensor without a dimension does not stop the prefix."""
    weights = {"module.a.weight": torch.ones(2, 2), "logit_scale": torch.tensor(4.6), "epoch": 3}
    source = save(tmp_path / "a.pth", {at: weights} if at else weights)
    result = verb(source, out)
    found = load(out)[at] if at else load(out)
    assert list(found) == ["a.weight", "logit_scale", "epoch"]
    assert "left logit_scale: not under 'module.'" in str(result) and "epoch" not in str(result)
    (note,) = [row for row in result.findings if row.id == "partial-prefix"]
    assert (note.severity, note.where) == ("info", at or "")
    (said,) = [row for row in ckptfix.doctor(source).findings if row.id == "wrapped-names"]
    assert "logit_scale lacks it" in said.message and "strip-module" in (said.fix or "")
    model = torch.nn.Module()
    model.a = torch.nn.Linear(2, 2, bias=False)
    model.logit_scale = torch.nn.Parameter(torch.tensor(0.0))
    for path in (source, out):
        ckptfix.load_into(model, path)
        assert model.logit_scale.item() == pytest.approx(4.6) and bool((model.a.weight == 1).all())
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)


def test_a_scalar_under_the_prefix_is_the_models(tmp_path: Path, out: Path) -> None:
    names = {"module.a.weight": torch.ones(2, 2), "module.a.num_batches_tracked": torch.tensor(1)}
    result = ckptfix.strip_module(save(tmp_path / "a.pth", names), out)
    assert list(load(out)) == ["a.weight", "a.num_batches_tracked"] and not result.findings


def test_a_model_with_a_submodule_called_module(tmp_path: Path, out: Path) -> None:
    """Only some of its keys begin with it: refused plain, left by unwrap, taken once when it is wrapped."""
    plain = save(tmp_path / "plain.pth", weights("module.weight", "fc.weight"))
    with pytest.raises(PartialPrefix):
        ckptfix.strip_module(plain, out)
    assert "nothing to do" in ckptfix.unwrap(plain, out).lines[0]
    wrapped = save(tmp_path / "wrapped.pth", weights("module.module.weight", "module.fc.weight"))
    ckptfix.strip_module(wrapped, out, force=True)
    assert list(load(out)) == ["module.weight", "fc.weight"]
    ckptfix.strip_module(wrapped, out, all_levels=True, force=True)
    assert list(load(out)) == ["module.weight", "fc.weight"]


def test_levels(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", weights("module.module.a", "module.module.b"))
    ckptfix.strip_module(source, out)
    assert list(load(out)) == ["module.a", "module.b"]
    ckptfix.strip_module(source, out, all_levels=True, force=True)
    assert list(load(out)) == ["a", "b"]


def test_a_conflict_is_refused(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", weights("module.a", "a"))
    with pytest.raises(KeyConflict) as caught:
        ckptfix.strip_module(source, out, partial=True)
    assert caught.value.pairs == (("a", ("module.a", "a")),)
    with pytest.raises(KeyConflict):
        ckptfix.rename(source, out, subs=[(r".*", "x")])
    assert not out.exists()


def test_averaged_model_keeps_its_counter(tmp_path: Path, out: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    source = save(tmp_path / "a.pth", averaged.state_dict())
    ckptfix.strip_module(source, out)
    assert list(load(out)) == ["n_averaged", "weight", "bias"]


def test_metadata_follows_as_torch_itself_would_do(tmp_path: Path, out: Path) -> None:
    model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    source = save(tmp_path / "a.pth", model.state_dict())
    ckptfix.strip_module(source, out)
    expected: Any = model.state_dict()
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(expected, "module.")
    assert dict(load(out)._metadata) == dict(expected._metadata)
    torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).load_state_dict(load(out))


def test_optimizer_names_follow(tmp_path: Path, out: Path) -> None:
    names = ["module.a", "module.b"]
    optimizer = {
        "state": {name: {"exp_avg": torch.ones(2), "step": 1} for name in names},
        "param_groups": [{"lr": 0.1, "params": names, "param_names": list(names)}],
    }
    source = save(tmp_path / "a.pth", {"model": weights(*names), "optimizer": optimizer})
    result = ckptfix.strip_module(source, out)
    loaded = load(out)
    assert list(loaded["optimizer"]["state"]) == ["a", "b"]
    assert loaded["optimizer"]["param_groups"][0]["params"] == ["a", "b"]
    assert loaded["optimizer"]["param_groups"][0]["param_names"] == ["a", "b"]
    assert list(loaded["optimizer"]["state"]["a"]) == ["exp_avg", "step"]
    assert result.references == 6


def test_an_optimizer_alone(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", {"state": {"module.a": {"exp_avg": torch.ones(1)}}, "param_groups": []})
    ckptfix.strip_module(source, out)
    assert list(load(out)["state"]) == ["a"]


def test_at_limits_to_one_mapping(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", {"model": weights("module.a.w"), "ema": {"net": weights("module.a.w")}})
    ckptfix.strip_module(source, out, at="ema/net")
    loaded = load(out)
    assert list(loaded["model"]) == ["module.a.w"]
    assert list(loaded["ema"]["net"]) == ["a.w"]
    with pytest.raises(NoSuchTensor) as caught:
        ckptfix.strip_module(source, out, at="emma/net", force=True)
    assert caught.value.near == ("ema/net",)


def test_add_leaves_what_is_not_a_model(tmp_path: Path, out: Path) -> None:
    checkpoint = {
        "epoch": 3,
        "rng": torch.get_rng_state(),
        "model": weights("fc.weight", "fc.bias"),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]},
    }
    source = save(tmp_path / "a.pth", checkpoint)
    ckptfix.add_module(source, out)
    loaded = load(out)
    assert list(loaded) == list(checkpoint)
    assert list(loaded["model"]) == ["module.fc.weight", "module.fc.bias"]
    assert list(loaded["optimizer"]["state"][0]) == ["exp_avg"]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False])
def test_strip_undoes_add_to_the_byte(tmp_path: Path, protocol: int, zipped: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    how = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": zipped}
    source = save(tmp_path / "a.pth", {"model": model.state_dict(), "epoch": 1}, **how)
    ckptfix.add_module(source, tmp_path / "b.pth")
    ckptfix.strip_module(tmp_path / "b.pth", tmp_path / "c.pth")
    assert (tmp_path / "c.pth").read_bytes() == source.read_bytes()


def test_unwrap_in_any_order_and_depth(tmp_path: Path, out: Path) -> None:
    names = [
        "module._orig_mod.layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.w",
        "module._orig_mod._encoder._module.w",
    ]
    source = save(tmp_path / "a.pth", weights(*names))
    ckptfix.unwrap(source, out)
    assert list(load(out)) == ["layers.0.w", "_encoder._module.w"]


def test_rename_by_rule_in_order_and_by_map(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", weights("features.0.weight", "features.1.weight", "fc.bias"))
    result = ckptfix.rename(
        source,
        out,
        subs=[(r"^features\.(\d)", r"conv\1"), (r"^conv0", "stem"), ("nothing", "x")],
        mapping={"fc.bias": "head.bias", "fc.bais": "y"},
        allow_unmatched=True,
    )
    assert list(load(out)) == ["stem.weight", "conv1.weight", "head.bias"]
    assert [(finding.id, finding.where) for finding in result.findings] == [
        ("unused-rule", "nothing"),
        ("unused-rule", "fc.bais"),
    ]
    assert "fc.bias" in result.findings[1].message


@pytest.mark.parametrize("sub", [("(", "x"), ("a", r"\2"), ("a", r"\g<b>")])
def test_rules_that_are_no_regular_expressions(tmp_path: Path, out: Path, sub: tuple[str, str]) -> None:
    source = save(tmp_path / "a.pth", weights("a"))
    with pytest.raises(Refused, match="not a regular expression"):
        ckptfix.rename(source, out, subs=[sub])


def test_a_swap_is_no_conflict(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", weights("a", "b"))
    ckptfix.rename(source, out, mapping={"a": "b", "b": "a"})
    loaded = load(out)
    assert list(loaded) == ["b", "a"]
    assert loaded["b"].tolist() == [0.0, 0.0]


def test_an_empty_prefix_is_refused(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", weights("a"))
    with pytest.raises(Refused, match="prefix is empty"):
        ckptfix.strip_module(source, out, prefix=".")


def test_a_dry_run_writes_nothing(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", weights("module.a"))
    result = ckptfix.strip_module(source, out, dry_run=True)
    assert not out.exists()
    assert not result.written
    assert result.plan.nbytes > 0
    assert list(tmp_path.iterdir()) == [source]


def test_a_source_that_changes_between_reading_and_writing(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfix.errors import DamagedFile
    from ckptfix.ops import rename, writing

    source = save(tmp_path / "a.pth", weights("module.a"))
    plan = writing.plan_edits

    def late(*arguments: Any) -> Any:
        with open(source, "ab") as file:
            file.write(b"more")
        return plan(*arguments)

    monkeypatch.setattr(rename, "plan_edits", late)
    with pytest.raises(DamagedFile, match="changed while it was read"):
        ckptfix.strip_module(source, out)
    assert not out.exists()


def test_mappings_whose_addresses_read_alike_are_kept_apart(tmp_path: Path, out: Path) -> None:
    one, two = weights("module.fc.w", "module.fc.b"), weights("module.fc.w", "fc.w")
    values: list[dict[Any, Any]] = [
        {("net", 0): one, ("net", 1): two},
        {1: one, "1": two},
        {"a/b": one, "a": {"b": two}},
    ]
    for value in values:
        source = save(tmp_path / "a.pth", value)
        result = ckptfix.unwrap(source, out, force=True)
        assert len(result.changes) == 2
        first, second = load(out).values()
        assert list(first) == ["fc.w", "fc.b"]
        assert list(second.get("b", second)) == ["module.fc.w", "fc.w"]


def test_at_leaves_an_optimizer_that_may_be_anothers(tmp_path: Path, out: Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": [0], "param_names": ["module.a.w"]}]}
    value = {"g": weights("module.a.w"), "d": weights("module.a.w"), "optimizer": optimizer}
    source = save(tmp_path / "a.pth", value)
    result = ckptfix.strip_module(source, out, at="g")
    assert load(out)["optimizer"]["param_groups"][0]["param_names"] == ["module.a.w"]
    assert [finding.id for finding in result.findings] == ["optimizer-names-left"]


def test_a_prefix_that_no_key_has_names_the_nearest_one(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", {"state_dict": weights("module.fc.weight", "module.fc.bias"), "n": 1})
    result = ckptfix.strip_module(source, out, prefix="modul")
    assert result.lines[0].startswith("nothing to do: no key begins with 'modul.' (nearest is 'module.')")
    two = ckptfix.strip_module(source, out, prefix="moduel.fd", dry_run=True, force=True)
    assert "nearest is 'module.fc.'" in two.lines[0]
    far = ckptfix.strip_module(source, out, prefix="encoder", dry_run=True, force=True)
    assert "nearest" not in far.lines[0]


def test_a_prefix_that_all_keys_have_already_is_reported_when_it_is_added_again(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", {"state_dict": weights("module.fc.weight", "module.fc.bias")})
    result = ckptfix.add_module(source, out)
    assert list(load(out)["state_dict"]) == ["module.module.fc.weight", "module.module.fc.bias"]
    assert [(found.id, found.severity, found.where) for found in result.findings] == [
        ("prefix-twice", "info", "state_dict")
    ]
    assert "'module.module.'" in result.lines[1]
    single = save(tmp_path / "b.pth", weights("module.weight", "fc.bias"))
    assert not ckptfix.add_module(single, out, force=True).findings


@pytest.mark.parametrize("name", ["層.weight", "back\\u0041.weight", "a\rb.weight", "\ud800.weight"])
def test_a_name_of_protocol_0_is_what_it_was_said_to_become(name: str, tmp_path: Path, out: Path) -> None:
    ops = ["EMPTY_DICT", "MARK", ("UNICODE", "fc.weight"), *tensor_ops(Tensor("0", (2,), 2)), "SETITEMS", "STOP"]
    source = written(tmp_path / "a.pth", torch_zip(assemble(*ops), [bytes(8)]))
    ckptfix.rename(source, out, mapping={"fc.weight": name})
    assert list(torch.load(out, weights_only=False)) == [name]  # a file of this test's own making
    assert [entry.key for entry in ckptfix.open_checkpoint(out).entries] == [name]


@pytest.mark.parametrize(("others", "shown"), [(5, "h0, h1, h2, h3, h4"), (7, "h0, h1, h2, h3, h4 and 2 more")])
def test_of_keys_without_the_prefix_some_are_shown(others: int, shown: str, tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "a.pth", weights("module.fc.weight", *(f"h{number}" for number in range(others))))
    with pytest.raises(PartialPrefix) as caught:
        ckptfix.strip_module(source, out)
    assert caught.value.message.endswith(f"these do not: {shown}")

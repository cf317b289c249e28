"""Rules that change tensors: what goes along with them, what is refused, and what it is said of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune

import ckptfix
from ckptfix.errors import CkptfixError, KeyConflict, Refused

QKV = "{n}.qkv.{*} -> {n}.{q,k,v}.{*} | split\n"


class Fused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(4, 12)
        self.norm = torch.nn.BatchNorm1d(4)


class Apart(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(4, 4) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(4)


def run(tmp_path: Path, rules: str, saved: Any, *, suffix: str = "pth", **how: Any) -> Any:
    torch.save(saved, tmp_path / f"in.{suffix}")
    (tmp_path / "rules.txt").write_text(rules)
    ckptfix.rename(tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}", rules=tmp_path / "rules.txt", **how)
    return torch.load(tmp_path / f"out.{suffix}", weights_only=True)


def trained(model: torch.nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for step in range(3):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return {"epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


def thirds(tensor: torch.Tensor, part: int) -> torch.Tensor:
    return tensor[4 * part : 4 * part + 4]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_the_moments_are_split_with_their_parameter(tmp_path: Path, kind: Any) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"amsgrad": True}
    saved = trained(torch.nn.Sequential(Fused(), Fused()), kind, **options)
    found = run(tmp_path, QKV, saved)
    model = torch.nn.Sequential(Apart(), Apart())
    model.load_state_dict(found["model"])
    optimizer = kind(model.parameters(), lr=0.1, **options)
    optimizer.load_state_dict(found["optimizer"])
    # In the order of the file: q and k of weight, then of bias; the model has weight and bias of q first.
    group = found["optimizer"]["param_groups"][0]["params"]
    assert group == list(range(2 * (6 + 2)))
    old, new = saved["optimizer"]["state"], found["optimizer"]["state"]
    for part in range(3):
        for number, kept in ((0, part), (1, 3 + part)):
            for name, value in old[number].items():
                if value is not None:
                    expected = value if value.dim() == 0 else thirds(value, part)
                    assert torch.equal(new[kept][name], expected)
    assert torch.equal(new[6].get("exp_avg", torch.ones(1)), old[2].get("exp_avg", torch.ones(1)))
    steps = [row["step"] for row in new.values() if "step" in row]
    assert len({step.data_ptr() for step in steps}) == len(steps)
    assert found["epoch"] == 3


def test_backwards_the_optimizer_is_as_it_was(tmp_path: Path) -> None:
    saved = trained(torch.nn.Sequential(Fused(), Fused()))
    run(tmp_path, QKV, saved)
    ckptfix.rename(tmp_path / "out.pth", tmp_path / "back.pth", rules=tmp_path / "rules.txt", reverse=True)
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert back["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    assert back["optimizer"]["state"].keys() == saved["optimizer"]["state"].keys()
    for number, row in saved["optimizer"]["state"].items():
        assert all(torch.equal(back["optimizer"]["state"][number][name], value) for name, value in row.items())
    assert all(torch.equal(back["model"][name], value) for name, value in saved["model"].items())
    assert back["model"]._metadata == saved["model"]._metadata


def test_names_of_parameters_follow(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Fused(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = run(tmp_path, QKV + "1.bias -> head.bias\n", saved)
    assert found["optimizer"]["param_groups"][0]["param_names"] == [
        *("0.q.weight", "0.k.weight", "0.v.weight", "0.q.bias", "0.k.bias", "0.v.bias"),
        *("0.norm.weight", "0.norm.bias", "1.weight", "head.bias"),
    ]


def test_steps_that_differ_cannot_be_joined(tmp_path: Path) -> None:
    saved = trained(Apart())
    saved["optimizer"]["state"][2]["step"] = torch.tensor(9.0)
    with pytest.raises(Refused, match=r"step is not the same for all of q\.weight, k\.weight, v\.weight"):
        run(tmp_path, "{q,k,v}.{*} -> qkv.{*} | concat", saved)
    assert not (tmp_path / "out.pth").exists()


def test_parts_of_two_groups_cannot_be_joined(tmp_path: Path) -> None:
    model = Apart()
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(name, one) for name, one in named.items() if name.startswith("q")], "lr": 1.0},
        {"params": [(name, one) for name, one in named.items() if not name.startswith("q")]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(Refused, match="are not all in one parameter group"):
        run(tmp_path, "{q,k,v}.{*} -> qkv.{*} | concat", saved)


def test_factored_moments_are_refused_by_name(tmp_path: Path) -> None:
    saved = trained(Fused(), torch.optim.Adafactor)
    with pytest.raises(Refused, match=r"row_var of qkv.weight has shape \[12, 1\]") as caught:
        run(tmp_path, "qkv.{*} -> {q,k,v}.{*} | split", saved)
    assert "--no-optimizer" in (caught.value.hint or "")


def test_the_versions_of_modules_follow(tmp_path: Path) -> None:
    found = run(tmp_path, QKV + "{n}.norm.{*} -> {n}.bn.{*}", torch.nn.Sequential(Fused(), Fused()).state_dict())
    expected = {"", "0", "0.q", "0.k", "0.v", "0.bn", "1", "1.q", "1.k", "1.v", "1.bn"}
    assert set(found._metadata) == expected
    assert found._metadata["0.bn"] == {"version": 2}
    assert found._metadata["0.q"] == {"version": 1}


def test_what_was_tied_stays_tied_where_both_change(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    found = run(tmp_path, "{*} -> {*} | transpose", {"wte": weight, "head": weight, "other": torch.randn(2, 3)})
    assert found["wte"].data_ptr() == found["head"].data_ptr()
    assert torch.equal(found["wte"], weight.T)


def test_what_is_not_tied_any_more_is_said(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    torch.save({"wte": weight, "head": weight}, tmp_path / "in.pth")
    (tmp_path / "rules.txt").write_text("wte -> wte | rows to=4")
    done = ckptfix.rename(tmp_path / "in.pth", tmp_path / "out.pth", rules=tmp_path / "rules.txt")
    messages = [finding.message for finding in done.findings]
    assert "was one tensor with head, but no longer is" in messages
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert torch.equal(found["head"], weight)
    assert torch.equal(found["wte"], weight[:4])


def test_a_name_more_and_back(tmp_path: Path) -> None:
    found = run(tmp_path, "wte -> embed | transpose\nwte -> head | tie", {"wte": torch.randn(6, 4)})
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    ckptfix.rename(tmp_path / "out.pth", tmp_path / "back.pth", rules=tmp_path / "rules.txt", reverse=True)
    assert list(torch.load(tmp_path / "back.pth", weights_only=True)) == ["wte"]


def test_a_second_name_of_another_tensor_is_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="head is not the same tensor as embed"):
        run(tmp_path, "head -> embed | untie", {"embed": torch.ones(2), "head": torch.ones(2)})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a -> {q,k,v} | split", r"a \[8, 6\]: `split`: 8 rows cannot be divided into 3 equal parts"),
        ("a -> {q,k} | split sizes=4,5", "are 9 together, but there are 8"),
        ("a -> {q,k} | split sizes=4,2,2", "states 3 parts, but names 2"),
        ("a -> {q,k,v} | split heads=3 kv=1", "into 3 [+] 1 [+] 1 heads"),
        ("a -> {q,k} | split dim=2", "there is no dimension 2"),
        ("a -> {q,k} | unstack", "has 8 rows, but 2 are named"),
        ("a -> q.{e} | split", "the number of parts is not stated"),
        ("c -> q | transpose", "it has 1 dimension: name the two"),
        ("a -> q | permute dims=0,1,2", "it has 2 dimensions"),
        ("a -> q | reshape from=o,i,1 to=o,i", "from= has 3"),
        ("a -> q | reshape from=3*o,i to=3,o,i", "a dimension of 8 is not a multiple of 3"),
        ("a -> q | reshape from=o*i,c to=o,i,c", "write numbers for some"),
        ("a -> q | reshape from=8,6 to=7,7", "holds 49 elements"),
        ("a -> q | rope heads=3 to=half", "8 rows cannot be divided into 3 heads of pairs"),
        ("a -> q | rows from=7 to=9", "it has 8 rows"),
        ("a -> q | rows to=9", "add fill=0"),
        ("{a,b} -> q | concat", "state sizes=8,4"),
        ("{a,b} -> q | concat sizes=6,6", "have 8, 4 rows, not 6, 6"),
        ("{a,b} -> q | stack", "cannot be joined"),
        ("{a,b} -> q | concat dim=1", "cannot be joined"),
        ("{a,h} -> q | concat", "different dtypes: float32, float16"),
        ("{a,b} -> q | interleave groups=3 sizes=8,4", "into 3 equal groups"),
        ("{a,z} -> q | concat", "it has a, but not z"),
        ("x.{n} -> q | stack", "it has x.0, x.2, but not x.1"),
        ("t -> q | transpose", "t is not a tensor"),
    ],
)
def test_lines_that_do_not_fit_are_refused_with_line_key_and_shape(tmp_path: Path, line: str, why: str) -> None:
    saved = {
        "a": torch.ones(8, 6),
        "b": torch.ones(4, 6),
        "h": torch.ones(8, 6).half(),
        "c": torch.ones(3),
        "x.0": torch.ones(2),
        "x.2": torch.ones(2),
        "t": "text",
    }
    with pytest.raises(CkptfixError, match=why) as caught:
        run(tmp_path, f"# first\n{line}\n", saved)
    assert (caught.value.path, caught.value.where) == (str(tmp_path / "rules.txt"), "line 2")
    assert not (tmp_path / "out.pth").exists()


def test_two_lines_for_one_name_are_a_conflict(tmp_path: Path) -> None:
    with pytest.raises(KeyConflict, match="'a' and 'b' would both become 'c'"):
        run(tmp_path, "a -> c | transpose\nb -> c", {"a": torch.ones(2, 2), "b": torch.ones(2)})


def test_names_may_be_exchanged(tmp_path: Path) -> None:
    a, b = torch.randn(2, 3), torch.randn(4)
    found = run(tmp_path, "a -> b | transpose\nb -> a\n", {"a": a, "b": b})
    assert torch.equal(found["b"], a.T)
    assert torch.equal(found["a"], b)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4, 2), "b": torch.ones(1), "c": torch.ones(1)}, tmp_path / "in.pth")
    (tmp_path / "rules.txt").write_text("a -> a | rows to=3\nb | drop\nz | drop")
    done = ckptfix.rename(tmp_path / "in.pth", tmp_path / "out.pth", rules=tmp_path / "rules.txt")
    assert done.exit_code == 0
    behind = [finding.where for finding in done.findings if finding.id == "left-behind"]
    assert behind == ["b", "a rows 3 to 3"]
    assert [finding.where for finding in done.findings if finding.id == "unused-rule"] == ["z"]
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == ["a", "c"]


def test_parameters_stay_parameters(tmp_path: Path) -> None:
    found = run(tmp_path, "a -> a | transpose", {"a": torch.nn.Parameter(torch.randn(2, 3))})
    assert isinstance(found["a"], torch.nn.Parameter)
    assert found["a"].requires_grad


def test_substitutions_come_first(tmp_path: Path) -> None:
    found = run(tmp_path, "a -> b | transpose", {"model.a": torch.ones(2, 3)}, subs=[("^model[.]", "")])
    assert found["b"].shape == (3, 2)


def test_an_average_beside_the_model_goes_along(tmp_path: Path) -> None:
    saved = {"model": {"a.weight": torch.ones(2, 3)}, "ema": {"a.weight": torch.zeros(2, 3)}}
    found = run(tmp_path, "a.weight -> b.weight | transpose", saved)
    assert found["ema"]["b.weight"].shape == found["model"]["b.weight"].shape == (3, 2)


def test_tensors_are_not_changed_in_place(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 3)}, tmp_path / "in.pth")
    (tmp_path / "rules.txt").write_text("a -> b | transpose")
    with pytest.raises(Refused, match="an in-place edit changes only keys"):
        ckptfix.rename(tmp_path / "in.pth", rules=tmp_path / "rules.txt", in_place=True)


def test_the_checksums_of_parts_are_joined(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(300, 7), "b": torch.randn(300, 7)}, tmp_path / "in.pth")
    damaged = bytearray((tmp_path / "in.pth").read_bytes())
    first = damaged.index(torch.load(tmp_path / "in.pth")["a"].numpy().tobytes())
    damaged[first + 40] ^= 1
    (tmp_path / "in.pth").write_bytes(damaged)
    (tmp_path / "joined.txt").write_text("{a,b} -> c | concat")
    (tmp_path / "turned.txt").write_text("a -> c | transpose")
    done = ckptfix.rename(tmp_path / "in.pth", tmp_path / "joined.pth", rules=tmp_path / "joined.txt")
    assert not done.plan.checks
    report = ckptfix.doctor(tmp_path / "joined.pth")
    assert any(finding.id == "bad-crc" for finding in report.findings)
    with pytest.raises(CkptfixError, match="CRC"):
        ckptfix.rename(tmp_path / "in.pth", tmp_path / "turned.pth", rules=tmp_path / "turned.txt")
    assert not (tmp_path / "turned.pth").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_pruned_layer_is_multiplied_with_its_mask_as_torch_does(tmp_path: Path, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(64, 33).to(dtype)
    torch.nn.utils.prune.random_unstructured(layer, "weight", 0.4)  # type: ignore[no-untyped-call]
    torch.save(layer.state_dict(), tmp_path / "pruned.pth")
    line = "{weight_orig,weight_mask} -> weight | mask"
    ckptfix.rename(tmp_path / "pruned.pth", tmp_path / "out.pth", lines=(line,))
    torch.nn.utils.prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
    made = torch.load(tmp_path / "out.pth")
    assert set(made) == {"weight", "bias"}
    # The signs of zeros too.
    assert torch.equal(made["weight"].view(torch.uint8), layer.weight.detach().view(torch.uint8))


@pytest.mark.parametrize("odd", [{"weight_mask": 0.5}, {"weight_orig": math.inf, "weight_mask": 0.0}], ids=str)
def test_a_mask_of_other_numbers_is_refused(tmp_path: Path, odd: dict[str, float]) -> None:
    state = {"weight_orig": torch.ones(4), "weight_mask": torch.ones(4)}
    for name, value in odd.items():
        state[name][2] = value
    torch.save(state, tmp_path / "pruned.pth")
    with pytest.raises(Refused, match="mask"):
        line = "{weight_orig,weight_mask} -> weight | mask"
        ckptfix.rename(tmp_path / "pruned.pth", tmp_path / "out.pth", lines=(line,))
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_number_is_added_as_torch_does(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 3, 300_001).to(dtype)
    torch.save({"w": values, "v": values[::2]}, tmp_path / "in.pth")
    ckptfix.rename(tmp_path / "in.pth", tmp_path / "out.pth", lines=("w -> w | add n=-1", "v -> v | add n=2"))
    made = torch.load(tmp_path / "out.pth")
    assert torch.equal(made["w"], values - 1) and torch.equal(made["v"], values[::2] + 2)


def test_a_number_is_not_added_to_integers(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4, dtype=torch.int64)}, tmp_path / "in.pth")
    with pytest.raises(Refused, match="int64"):
        ckptfix.rename(tmp_path / "in.pth", tmp_path / "out.pth", lines=("w -> w | add n=1",))


@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 3), (4, 5, 2, 3), (6, 4, 5, 2, 3)], ids=str)
def test_outputs_are_put_first_and_last_again(tmp_path: Path, shape: tuple[int, ...]) -> None:
    value = torch.arange(float(math.prod(shape))).reshape(shape)
    torch.save({"w": value}, tmp_path / "in.pth")
    rules = tmp_path / "rules.txt"
    rules.write_text("w -> w | outputs to=first")
    ckptfix.rename(tmp_path / "in.pth", tmp_path / "out.pth", rules=rules)
    *spatial, inner, outer = range(len(shape))
    assert torch.equal(torch.load(tmp_path / "out.pth")["w"], value.permute(outer, inner, *spatial))
    ckptfix.rename(tmp_path / "out.pth", tmp_path / "back.pth", rules=rules, reverse=True)
    assert torch.equal(torch.load(tmp_path / "back.pth")["w"], value)


def test_a_placeholder_for_any_text_stands_anywhere(tmp_path: Path) -> None:
    keys = ("net.a.kernel", "net.a.b.kernel", "net.c.bias")
    torch.save({key: torch.ones(size) for size, key in enumerate(keys)}, tmp_path / "in.pth")
    ckptfix.rename(tmp_path / "in.pth", tmp_path / "out.pth", lines=("net.{*}.kernel -> m.{*}.weight",))
    assert set(torch.load(tmp_path / "out.pth")) == {"m.a.weight", "m.a.b.weight", "net.c.bias"}

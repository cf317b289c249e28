"""DeepSpeed folders: every stage and number of ranks is read as the one object that it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare import assert_same_state
from zero_files import KEYS, Run, example

import ckptfix
from ckptfix.errors import Refused
from ckptfix.formats import detect, open_checkpoint
from ckptfix.formats.target import FormatName
from ckptfix.ops.doctor import doctor

HALVES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_its_weights_are_whole(stage: int, ranks: int, half: str, tmp_path: Path) -> None:
    run = example(ranks, stage, HALVES[half])
    inner = run.save(tmp_path / "in")
    wanted = run.weights if stage else run.model
    for source, out in ((tmp_path / "in", "a.pth"), (inner, "b.safetensors")):
        done = ckptfix.convert(source, tmp_path / out)
        assert (done.exit_code, done.account.lost, done.at) == (0, (), "module")
        found = ckptfix.load_state_dict(tmp_path / out, strip=None)
        assert_same_state(found, wanted)
        assert found["head.weight"].data_ptr() == found["emb.weight"].data_ptr()
    assert_same_state(torch.load(tmp_path / "a.pth"), wanted)


@pytest.mark.parametrize("to", ["zip", "legacy", "dcp", "safetensors", "hf"])
def test_what_was_left_names_the_option_that_takes_it(to: FormatName, tmp_path: Path) -> None:
    """Only where that option is not refused."""
    example(2, 3).save(tmp_path / "in")
    done = ckptfix.convert(tmp_path / "in", tmp_path / "out", to=to)
    assert "optimizer" in done.left
    try:
        ckptfix.convert(tmp_path / "in", tmp_path / "all", to=to, optimizer=True)
        works = True
    except ckptfix.CkptfixError:
        works = False
    assert any("--optimizer writes" in line for line in done.lines) is works is (to not in ("safetensors", "hf"))


@pytest.mark.sampled(4, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_its_moments_go_by_name(stage: int, ranks: int, tmp_path: Path) -> None:
    run = example(ranks, stage, torch.bfloat16)
    run.save(tmp_path / "in")
    run.universal(tmp_path / "universal")
    for source in ("in", "universal"):
        for to in ("zip", "legacy"):
            out = tmp_path / f"{source}-{to}.pth"
            ckptfix.convert(tmp_path / source, out, optimizer=True, to=to)
            found = torch.load(out)
            assert_same_state(found["module"], run.weights)
            assert "module_16bit" not in found and found["global_steps"] == 3
            optimizer = found["optimizer"]
            assert [group["params"] for group in optimizer["param_groups"]] == [list(group) for group in run.groups]
            assert [round(group["lr"], 3) for group in optimizer["param_groups"]] == [0.1, 0.2, 0.3]
            for name, state in optimizer["state"].items():
                assert state["step"] == 3 and all(torch.equal(state[key], run.moment(name, key)) for key in KEYS)
            steps = {state["step"].data_ptr() for state in optimizer["state"].values()}
            assert len(steps) == len(optimizer["state"]) == 6, "each parameter counts its own steps"


def test_groups_of_stage_3_may_be_parts_of_one(tmp_path: Path) -> None:
    groups = [{"a": torch.randn(5, 3)}, {"b": torch.randn(7)}, {"c": torch.randn(2, 2)}]
    run = Run(groups, 3, 3, subgroups=[0, 0, 1])
    run.save(tmp_path / "in")
    ckptfix.convert(tmp_path / "in", tmp_path / "out.pth", optimizer=True)
    assert [group["params"] for group in torch.load(tmp_path / "out.pth")["optimizer"]["param_groups"]] == [
        ["a", "b"], ["c"],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_weights_of_the_model_are_taken(stage: int, half: str, tmp_path: Path) -> None:
    run = example(3, stage, HALVES[half])
    run.save(tmp_path / "in")
    done = ckptfix.convert(tmp_path / "in", tmp_path / "out.pth", weights="model")
    assert done.at == "module_16bit" and "module" in done.left
    assert_same_state(torch.load(tmp_path / "out.pth"), run.model)
    ckptfix.convert(tmp_path / "in", tmp_path / "both.pth", weights="model", optimizer=True)
    both = torch.load(tmp_path / "both.pth")
    assert_same_state(both["module"], run.model)
    assert both["optimizer"]["state"]["fc.bias"]["exp_avg"].dtype == torch.float32
    ckptfix.extract(tmp_path / "in", tmp_path / "taken.pth", at="module_16bit")
    assert_same_state(torch.load(tmp_path / "taken.pth"), run.model)


def test_a_model_in_fp32_has_one_form_of_its_weights(tmp_path: Path) -> None:
    run = example(2, 2)
    run.save(tmp_path / "in")
    assert [state.at for state in open_checkpoint(tmp_path / "in").state_dicts if state.weights] == ["module"]
    ckptfix.convert(tmp_path / "in", tmp_path / "out.pth", weights="model")
    assert_same_state(torch.load(tmp_path / "out.pth"), run.model)


def test_what_is_not_there_is_refused_with_why(tmp_path: Path) -> None:
    example(2, 3, torch.bfloat16).save(tmp_path / "z3")
    with pytest.raises(Refused, match="no file has the model's weights in bfloat16") as caught:
        ckptfix.convert(tmp_path / "z3", tmp_path / "out.pth", weights="model")
    assert "leave out --weights" in str(caught.value.hint)
    with pytest.raises(Refused, match="one state dict, without optimizer"):
        ckptfix.convert(tmp_path / "z3", tmp_path / "out.safetensors", optimizer=True)
    with pytest.raises(Refused, match="--at cannot be combined"):
        ckptfix.convert(tmp_path / "z3", tmp_path / "out.safetensors", optimizer=True, at="module")
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pth")
    for options in ({"weights": "model"}, {"optimizer": True}):
        with pytest.raises(Refused, match="works only on a DeepSpeed folder"):
            ckptfix.convert(tmp_path / "plain.pth", tmp_path / "out.safetensors", **options)
    assert not list(tmp_path.glob("out*"))


def test_without_the_optimizers_files_the_model_is_what_there_is(tmp_path: Path) -> None:
    run = example(2, 2, torch.bfloat16)
    for path in run.save(tmp_path / "in").glob("*_optim_states.pt"):
        path.unlink()
    assert "no-masters" in {finding.id for finding in doctor(tmp_path / "in").findings}
    ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert_same_state(torch.load(tmp_path / "out.pth"), run.model)
    with pytest.raises(Refused, match="those files are missing"):
        ckptfix.convert(tmp_path / "in", tmp_path / "again.pth", weights="fp32")
    with pytest.raises(Refused, match="no optimizer state"):
        ckptfix.convert(tmp_path / "in", tmp_path / "again.pth", optimizer=True)


def test_frozen_parameters_of_a_save_without_them(tmp_path: Path) -> None:
    """``exclude_frozen_parameters=True``: neither the module nor the fragments have them."""
    run = example(2, 2)
    run.frozen = {}
    run.save(tmp_path / "in")
    ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert_same_state(torch.load(tmp_path / "out.pth"), run.weights)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_verb_that_reads_reads_it(stage: int, tmp_path: Path) -> None:
    run = example(3, stage)
    run.save(tmp_path / "in")
    source = tmp_path / "in"
    assert detect(source).name == "zero"
    assert ckptfix.inspect(source).format == "zero"
    report = doctor(source)
    assert not [finding for finding in report.findings if finding.severity != "info"]
    assert_same_state(ckptfix.load_state_dict(source, strip=None), run.weights)
    assert ckptfix.extract(source, tmp_path / "taken.pth").tensors == len(run.weights)
    run.save(tmp_path / "again")
    assert ckptfix.diff(source, tmp_path / "again").same
    run.groups[0]["emb.weight"][3, 2] += 1
    run.save(tmp_path / "other")
    other = ckptfix.diff(source, tmp_path / "other")
    assert not other.same and "emb.weight" in str(other)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = torch.nn.Linear(5, 3), torch.nn.Linear(3, 2, bias=False)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_and_its_optimizer_go_on_from_it(stage: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    values = {name: torch.randn(value.shape) for name, value in Net().state_dict().items()}
    groups = [{name: values[name] for name in names} for names in (["fc.weight", "head.weight"], ["fc.bias"])]
    run = Run(groups, 3, stage, torch.bfloat16)
    run.save(tmp_path / "in")
    model = Net()
    assert ckptfix.load_into(model, tmp_path / "in").complete
    assert_same_state(dict(model.state_dict()), values)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam([{"params": [parameters[name] for name in group]} for group in groups])
    ckptfix.load_optimizer(optimizer, tmp_path / "in", model=model)
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], run.moment(name, "exp_avg"))
        assert optimizer.state[parameter]["step"] == 3


@pytest.mark.parametrize("no_optimizer", [False, True])
def test_slim_makes_one_file(no_optimizer: bool, tmp_path: Path) -> None:
    run = example(3, 2, torch.bfloat16)
    run.save(tmp_path / "in")
    done = ckptfix.slim(tmp_path / "in", tmp_path / "out.pth", no_optimizer=no_optimizer)
    assert (done.exit_code, done.account.lost, done.format) == (0, (), "zip")
    found = torch.load(tmp_path / "out.pth")
    assert_same_state(found["module"], run.weights)
    assert_same_state(found["module_16bit"], run.model)
    assert ("optimizer" in found) is not no_optimizer


@pytest.mark.parametrize("verb", ["strip_module", "add_module", "unwrap", "to_cpu", "match"])
def test_a_verb_that_edits_writes_the_weights_as_one_file(verb: str, tmp_path: Path) -> None:
    run = example(2, 2)
    run.save(tmp_path / "in")
    torch.save({f"module.{name}": value for name, value in run.weights.items()}, tmp_path / "like.pth")
    options = {"like": tmp_path / "like.pth"} if verb == "match" else {}
    result = getattr(ckptfix, verb)(tmp_path / "in", tmp_path / "out", **options)
    assert result.format == "zip" and "input: DeepSpeed folder; output: PyTorch zip" in result.lines
    found = {name.removeprefix("module."): value for name, value in torch.load(tmp_path / "out").items()}
    assert_same_state(found, run.weights)

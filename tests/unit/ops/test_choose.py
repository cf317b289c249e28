"""Which state dict is meant: a table of what trainers write, and the same answer from every verb, shell and Python."""

from __future__ import annotations

import json
import shlex
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from forks import MAIN, Forks
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptfix
from ckptfix import errors
from ckptfix.cli.shared.exits import describe
from ckptfix.names import kinds
from ckptfix.ops import choose
from ckptfix.ops.candidates import Candidate, candidates

SHARED = ROOT.parent / "shared"


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def state(seed: int = 0) -> Any:
    return net(seed).state_dict()


def averaged(seed: int = 5) -> nn.Module:
    return AveragedModel(net(seed))


class Steps(nn.Module):
    """MMEngine's averaged model: a module, and the buffer steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self.register_buffer("steps", torch.tensor(4))


def prefixed(prefix: str, values: Any) -> Any:
    return OrderedDict((f"{prefix}{name}", value) for name, value in values.items())


def adam() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def loss() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.ones(2))


def hydra(model: nn.Module) -> dict[str, Any]:
    """lightning-hydra-template: the network and the loss are arguments, and the network is the model's own."""
    return {
        "epoch": 1,
        "pytorch-lightning_version": "2.6.1",
        "state_dict": prefixed("net.", model.state_dict()),
        "hyper_parameters": {"net": model, "criterion": nn.CrossEntropyLoss(), "lr": 0.1},
    }


def deepspeed() -> dict[str, Any]:
    values = state()
    return {
        "module": values,
        "buffer_names": ["1.running_mean"],
        "param_shapes": [OrderedDict((name, value.shape) for name, value in values.items())],
        "frozen_param_shapes": OrderedDict({"0.weight": values["0.weight"].shape}),
        "frozen_param_fragments": OrderedDict({"0.weight": values["0.weight"], "0.bias": values["0.bias"]}),
        "ds_version": "0.19.8",
    }


def same_twice(first: str, second: str) -> Any:
    values = state()
    return {first: values, second: values, "epoch": 3}


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the address of what is meant, or those between which nothing decides."""

    make: Callable[[], Any]
    at: str | tuple[str, ...]
    module: bool = False


CASES: dict[str, Case] = {
    "bare": Case(state, ""),
    "pytorch tutorial": Case(
        lambda: {"epoch": 1, "model_state_dict": state(), "optimizer_state_dict": adam(), "loss": torch.tensor(0.3)},
        "model_state_dict",
    ),
    "pytorch imagenet": Case(
        lambda: {"epoch": 1, "arch": "x", "state_dict": nn.DataParallel(net()).state_dict(), "optimizer": adam()},
        "state_dict",
    ),
    "pytorch-cifar": Case(lambda: {"net": state(), "acc": 91.0, "epoch": 3}, "net"),
    "torchvision references": Case(
        lambda: {"model": state(), "optimizer": adam(), "model_ema": averaged().state_dict(), "epoch": 3}, "model"
    ),
    "timm": Case(lambda: {"arch": "x", "state_dict": state(), "state_dict_ema": state(5)}, "state_dict"),
    "average first": Case(lambda: {"ema": state(5), "model": state()}, "model"),
    "MMEngine": Case(
        lambda: {"meta": {}, "state_dict": state(), "ema_state_dict": Steps(net(5)).state_dict()}, "state_dict"
    ),
    "Lightning": Case(
        lambda: {"state_dict": prefixed("model.", state()), "hyper_parameters": {"loss": loss()}}, "state_dict"
    ),
    "Lightning, hydra": Case(lambda: hydra(net()), "state_dict"),
    "Lightning, a loss without tensors": Case(
        lambda: {"state_dict": state(), "hyper_parameters": {"criterion": nn.MSELoss()}}, "state_dict"
    ),
    "Lightning WeightAveraging": Case(
        lambda: {
            "state_dict": state(),
            "current_model_state": state(5),
            "averaging_state": {"n_averaged": torch.tensor(3)},
        },
        "state_dict",
    ),
    "DeepSpeed": Case(deepspeed, "module"),
    "BasicSR": Case(lambda: {"params": state(), "params_ema": state(5)}, "params"),
    "nnU-Net": Case(
        lambda: {"network_weights": state(), "optimizer_state": adam(), "trainer_name": "x"}, "network_weights"
    ),
    "fastai with optimizer": Case(
        lambda: {"model": state(), "opt": {"state": [{"grad_avg": torch.ones(2)}], "hypers": [{"lr": 0.1}]}}, "model"
    ),
    "fastai learner": Case(
        lambda: {"model": net(), "loss_func": nn.CrossEntropyLoss(), "lr": 0.1}, "model", module=True
    ),
    "Ultralytics in training": Case(lambda: {"epoch": 1, "model": None, "ema": net(), "n": 9}, "ema", module=True),
    "YOLOv5": Case(lambda: {"epoch": 1, "model": net(), "ema": net(5), "updates": 9}, "model", module=True),
    "whole": Case(net, "", module=True),
    "whole in DataParallel": Case(lambda: nn.DataParallel(net()), "", module=True),
    "an average alone": Case(lambda: {"model_ema": averaged().state_dict(), "epoch": 1}, "model_ema"),
    "hyper-parameters alone": Case(lambda: {"hyper_parameters": {"net": net()}}, "hyper_parameters/net", module=True),
    "a loss beside an unusual name": Case(lambda: {"detector": state(), "criterion": loss().state_dict()}, "detector"),
    "nested": Case(lambda: {"checkpoint": {"model": state(), "optim": adam()}, "epoch": 1}, "checkpoint/model"),
    "a deeper one of that name": Case(lambda: {"model": state(), "teacher": {"model": state(5)}}, "model"),
    "twice the same": Case(lambda: same_twice("generator", "generator_copy"), "generator"),
    "twice the same, both named": Case(lambda: same_twice("model", "state_dict"), "model"),
    "a module and its state dict": Case(
        lambda: (lambda model: {"model": model, "state_dict": model.state_dict()})(net()), "state_dict"
    ),
    "GAN": Case(lambda: {"generator": state(), "discriminator": state(5)}, ("generator", "discriminator")),
    "GAN with an average": Case(lambda: {"g": state(), "d": state(5), "g_ema": state(6)}, ("g", "d")),
    "GAN, nested": Case(
        lambda: {"G": {"state_dict": state()}, "D": {"state_dict": state(5)}}, ("G/state_dict", "D/state_dict")
    ),
    "one of a GAN is called as models are, deeper": Case(
        lambda: {"generator": state(), "discriminator": {"model": state(5)}}, ("generator", "discriminator/model")
    ),
    "a module and another state dict": Case(lambda: {"model": net(), "state_dict": state(5)}, ("model", "state_dict")),
    "encoder and decoder": Case(lambda: {"encoder": state(), "decoder": state(5)}, ("encoder", "decoder")),
}
SURE = [name for name, case in CASES.items() if isinstance(case.at, str)]
TIED = [name for name, case in CASES.items() if not isinstance(case.at, str)]
MAPPINGS = [name for name in SURE if not CASES[name].module]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    def save(name: str) -> Path:
        torch.save(CASES[name].make(), tmp_path / "source.pt")
        return tmp_path / "source.pt"

    return save


def inside(path: Path, at: str) -> Any:
    """What torch finds at an address, as a state dict."""
    found = torch.load(path, weights_only=False)
    for key in at.split("/") if at else ():
        found = found[key]
    return found.state_dict() if isinstance(found, nn.Module) else found


def equal(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def modules(path: Path) -> list[Candidate]:
    return [row for row in choose.models(ckptfix.open_checkpoint(path)) if row.module is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", SURE)
def test_every_verb_takes_the_same(saved: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    source, at = saved(name), CASES[name].at
    assert isinstance(at, str)
    wanted = inside(source, at)
    plain = tmp_path / "plain.pt"
    torch.save(wanted, plain)

    taken = ckptfix.extract(source, tmp_path / "extracted.pt")
    assert taken.at == at
    assert equal(torch.load(tmp_path / "extracted.pt"), wanted)
    others = {row.at for row in candidates(ckptfix.open_checkpoint(source))} - {at}
    assert set(taken.others) == others
    assert all(any(other == left or other.startswith(f"{left}/") for left in taken.left) for other in others)

    assert ckptfix.inspect(source).parameters == ckptfix.inspect(plain).parameters
    result = ckptfix.diff(source, plain)
    assert not (result.changed or result.only_b or result.renamed)
    assert result.counts.matched == len(wanted)
    assert not at or [(row.at_a, row.at_b) for row in result.pairings if row.how == "main state dict"] == [(at, "")]
    assert [row.at for row in result.modules] == [row.at for row in modules(source)]
    assert ckptfix.load_into(net(8), source).at == at
    found = {row.id for row in ckptfix.doctor(source, like=plain).findings}
    assert not found & {"missing-keys", "unexpected-keys", "no-names-match", "names-prefixed", "no-tensors"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPPINGS)
def test_verbs_of_mappings_take_it_too(saved: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    source, at = saved(name), CASES[name].at
    assert isinstance(at, str)
    wanted = inside(source, at)
    torch.save(wanted, tmp_path / "plain.pt")
    assert ckptfix.convert(source, tmp_path / "o.safetensors").at == at
    assert equal(ckptfix.load_state_dict(source, strip=None), wanted)
    assert not ckptfix.match(source, tmp_path / "matched.pt", tmp_path / "plain.pt").names
    assert not ckptfix.match(tmp_path / "plain.pt", tmp_path / "back.pt", source).names
    ckptfix.sanitize(source, tmp_path / "clean.pt", keep_only="weights")
    assert equal(inside(tmp_path / "clean.pt", at), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SURE if CASES[name].module])
def test_of_a_whole_module_it_is_the_state_dict(saved: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    source, at = saved(name), CASES[name].at
    assert isinstance(at, str)
    ckptfix.extract(source, tmp_path / "wanted.pt")
    wanted = torch.load(tmp_path / "wanted.pt", weights_only=True)
    for verb in (
        lambda: ckptfix.convert(source, tmp_path / "o.safetensors"),
        lambda: ckptfix.match(source, tmp_path / "o.pt", tmp_path / "wanted.pt"),
        lambda: ckptfix.strip_module(source, tmp_path / "o.pt"),
        lambda: ckptfix.strip_module(source, tmp_path / "o.pt", at=at),
        lambda: ckptfix.sanitize(source, tmp_path / "o.pt", keep_only="weights"),
    ):
        out = Path(verb().dest)
        made = load_file(out) if out.suffix == ".safetensors" else torch.load(out, weights_only=True)
        bare = {name.removeprefix("module."): value for name, value in made.items()}
        assert all(torch.equal(bare[name.removeprefix("module.")], value) for name, value in wanted.items())
        assert len(made) == len(wanted)
        out.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("name", TIED)
def test_a_tie_is_asked_for_by_every_verb(saved: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    source, ats = saved(name), CASES[name].at
    assert isinstance(ats, tuple)
    torch.save(state(7), tmp_path / "plain.pt")
    modules = {row.at for row in candidates(ckptfix.open_checkpoint(source)) if row.module is not None}
    verbs: dict[str, Callable[[], Any]] = {
        "extract": lambda: ckptfix.extract(source, tmp_path / "o.pt"),
        "convert": lambda: ckptfix.convert(source, tmp_path / "o.safetensors"),
        "load_into": lambda: ckptfix.load_into(net(), source),
        "match": lambda: ckptfix.match(source, tmp_path / "o.pt", tmp_path / "plain.pt"),
        "match --like": lambda: ckptfix.match(tmp_path / "plain.pt", tmp_path / "o.pt", source),
        "doctor --like": lambda: ckptfix.doctor(tmp_path / "plain.pt", like=source),
        "diff": lambda: ckptfix.diff(source, tmp_path / "plain.pt"),
    }
    for verb, call in verbs.items():
        with pytest.raises(errors.Undecided) as caught:
            call()
        choices = caught.value.choices
        # A verb that takes no whole module does not offer one.
        assert choices == ats or (choices and set(ats) - set(choices) <= modules), verb
        assert ", ".join(choices) in str(caught.value)
        argument = "like_at" if "like" in verb else "at"
        choice: Any = (choices[0], "") if verb == "diff" else choices[0]
        assert (caught.value.hint or "").startswith(f"choose one with {argument}={choice!r}")
        option = f"--{argument.replace('_', '-')}"
        said = f"choose one with {option} {choices[0]}" + (f" {option} /" if verb == "diff" else "")
        assert describe(caught.value)["hint"].startswith(said)
        assert not (tmp_path / "o.pt").exists() and not (tmp_path / "o.safetensors").exists()
    for at in ats:
        assert ckptfix.extract(source, tmp_path / "o.pt", at=at, force=True).at == at
        assert ckptfix.load_into(net(), source, at=at).at == at
        assert ckptfix.diff(source, tmp_path / "o.pt", at=(at, "")).same


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchvision references", "Lightning, hydra", "DeepSpeed"])
def test_the_command_line_takes_the_same(
    program: Forks, saved: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    source, at = saved(name), CASES[name].at
    assert isinstance(at, str)
    torch.save(inside(source, at), tmp_path / "plain.pt")
    for verb, out in (("extract", "e.pt"), ("convert", "c.safetensors")):
        assert json.loads(program(MAIN, [verb, "--json", source, tmp_path / out]).stdout)["at"] == at
    found = json.loads(program(MAIN, ["diff", "--json", source, tmp_path / "plain.pt"]).stdout)
    assert found["pairings"] == [{"at_a": at, "at_b": "", "how": "main state dict"}]
    assert program(MAIN, ["match", source, tmp_path / "m.pt", "--like", tmp_path / "plain.pt"]).code == 0


@pytest.mark.slow
def test_the_command_line_asks_in_its_words(program: Forks, saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = saved("GAN")
    torch.save(state(), tmp_path / "plain.pt")
    like = ("match", tmp_path / "plain.pt", tmp_path / "o.pt", "--like", source)
    for arguments, hint in (
        (("extract", source, tmp_path / "o.pt"), "--at generator"),
        (("convert", source, tmp_path / "o.safetensors"), "--at generator"),
        (("diff", source, tmp_path / "plain.pt"), "--at generator --at /"),
        (like, "--like-at generator"),
    ):
        done = program(MAIN, arguments)
        assert done.code == 2
        assert f"hint: choose one with {hint}\n" in done.stderr
        assert "it holds 2 state dicts: generator, discriminator" in done.stderr
        assert program(MAIN, [*arguments, *shlex.split(hint)]).code == 0
        (tmp_path / "o.pt").unlink(missing_ok=True)


def test_edits_do_the_state_dicts_and_leave_modules_among_hyper_parameters(tmp_path: Path) -> None:
    source, out = tmp_path / "a.ckpt", tmp_path / "out.ckpt"
    torch.save(hydra(net()), source)
    for verb in (ckptfix.strip_module, ckptfix.unwrap):
        verb(source, out, force=True)
        assert out.read_bytes() == source.read_bytes()
    wrapped = hydra(net())
    wrapped["state_dict"] = prefixed("module.", wrapped["state_dict"])
    torch.save(wrapped, source)
    for verb in (ckptfix.strip_module, ckptfix.unwrap):
        verb(source, out, force=True)
        done = torch.load(out, weights_only=False)
        assert list(done["state_dict"]) == list(hydra(net())["state_dict"])
        assert list(done["hyper_parameters"]["net"].state_dict()) == list(state())


def test_companions_keep_the_names_of_their_model(tmp_path: Path) -> None:
    torch.save(deepspeed(), tmp_path / "a.pt")
    ckptfix.add_module(tmp_path / "a.pt", tmp_path / "b.pt")
    done = torch.load(tmp_path / "b.pt", weights_only=False)
    assert "module.0.weight" in done["module"]
    assert "module.0.weight" in done["frozen_param_fragments"]


def test_an_optimizer_s_rows_get_no_prefix(tmp_path: Path) -> None:
    torch.save(CASES["fastai with optimizer"].make(), tmp_path / "a.pt")
    ckptfix.add_module(tmp_path / "a.pt", tmp_path / "b.pt")
    done = torch.load(tmp_path / "b.pt", weights_only=False)
    assert list(done["opt"]["state"][0]) == ["grad_avg"]
    assert all(name.startswith("module.") for name in done["model"])


def test_lightning_s_average_is_its_state_dict(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = saved("Lightning WeightAveraging")
    result = ckptfix.extract(source, tmp_path / "o.pt", ema=True)
    assert result.at == "state_dict"
    assert "Lightning's WeightAveraging" in result.what
    assert equal(torch.load(tmp_path / "o.pt"), inside(source, "state_dict"))
    assert "current_model_state" in result.left


def test_the_average_of_mmengine_loads_by_its_address(saved: Callable[[str], Path]) -> None:
    model = net(8)
    report = ckptfix.load_into(model, saved("MMEngine"), at="ema_state_dict")
    assert report.unexpected == ()
    assert equal(model.state_dict(), state(5))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("inv_freq", torch.ones(3), persistent=False)
        self.plain = torch.arange(4.0)


@pytest.mark.parametrize("at", ["", "model"])
def test_what_a_module_has_and_no_state_dict_is_left_behind(tmp_path: Path, at: str) -> None:
    source, out = tmp_path / "whole.pt", tmp_path / "out.pt"
    torch.save({"model": Rotary(), "epoch": 1} if at else Rotary(), source)
    result = ckptfix.extract(source, out)
    front = f"{at}/" if at else ""
    gone = {f"{front}_buffers/inv_freq", f"{front}plain"}
    assert gone <= set(result.left) == set(result.as_dict()["left_behind"])
    told = [line for line in result.lines if line.startswith("left behind: ")]
    assert len(told) == 1 and all(name in told[0] for name in gone)
    assert len(result.left) == len(set(result.left))
    found = ckptfix.diff(source, out)
    assert found.same or at
    assert not (found.changed or found.only_a or found.only_b)
    assert any(f"`ckptfix extract {source} OUT" in line for line in found.lines)
    assert any("inv_freq" in line for line in found.lines)


def test_a_module_that_cannot_be_read_whole_is_not_the_same(tmp_path: Path) -> None:
    packed = torch.ao.nn.quantized.Linear(2, 2)  # type: ignore[no-untyped-call]
    torch.save(nn.Sequential(net(), packed), tmp_path / "whole.pt")
    ckptfix.extract(tmp_path / "whole.pt", tmp_path / "o.pt")
    assert not ckptfix.diff(tmp_path / "whole.pt", tmp_path / "o.pt").same


def test_the_tables_have_a_source_and_no_key_twice() -> None:
    tables = (choose.NAMES, {key: who for key, (_, who) in kinds.ASIDE.items()}, choose.COPIES, kinds.AVERAGES)
    keys = [key for table in tables for key in table]
    assert len(keys) == len(set(keys))
    assert all(source for table in tables for source in table.values())


REAL = {
    "lightning/hydra.ckpt": ("state_dict", "lightning/hydra_truth.pt"),
    "lightning/plain.ckpt": ("state_dict", "lightning/plain_truth.pt"),
    "lightning/criterion.ckpt": ("state_dict", None),
    "lightning/wa/epoch=1-step=16.ckpt": ("state_dict", "lightning/wa_truth.pt"),
    "deepspeed/z2_tied/global_step3/mp_rank_00_model_states.pt": ("module", None),
    "hf/llama_whole.pt": ("", "hf/llama_truth.pt"),
    "hf/vit_whole.pt": ("", None),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(tmp_path: Path, name: str) -> None:
    source = SHARED / "frameworks" / name
    if not source.exists():
        pytest.skip("no shared/frameworks here")
    at, truth = REAL[name]
    assert ckptfix.extract(source, tmp_path / "o.pt").at == at
    result = ckptfix.diff(source, tmp_path / "o.pt")
    assert not (result.changed or result.only_b or result.renamed or result.wrapped)
    if truth is not None:
        model = torch.load(SHARED / "frameworks" / truth)
        assert sorted(torch.load(tmp_path / "o.pt")) == sorted(model)


@pytest.mark.parametrize("size", [2, 500])
@pytest.mark.parametrize("key", ["normalizer", "obs_rms", "whitening"])
def test_statistics_are_not_taken_for_parameters_of_unusual_names(tmp_path: Path, key: str, size: int) -> None:
    own = {"means": torch.rand(9, 3), "scales": torch.rand(9, 3)}
    path = tmp_path / "splats.pth"
    torch.save({**own, key: {"mean": torch.rand(size), "var": torch.rand(size)}}, path)
    if size > 27:
        with pytest.raises(errors.Undecided):
            ckptfix.load_state_dict(path)
    assert choose.choose(ckptfix.open_checkpoint(path), doubt=False).at == ""

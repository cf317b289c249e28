"""load_optimizer: which state goes to which parameter, and when it refuses."""

from __future__ import annotations

import copy
import json
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import tensor
from torch import nn
from torch_versions import ADAMW_IS_ADAM, named_parameters, need_named_parameters

import ckptfix
from ckptfix.errors import NoSuchTensor, Refused, WouldLoseData

ORDERS = (("a", "b", "c"), ("c", "a", "b"))


class Net(nn.Module):
    """Three layers of equal shapes, defined in a given order, used in another: only names distinguish them."""

    a: nn.Linear
    b: nn.Linear
    c: nn.Linear

    def __init__(self, order: tuple[str, ...] = ORDERS[0]) -> None:
        super().__init__()
        for name in order:
            layer = nn.Linear(4, 4)
            layer.register_buffer("steps", torch.zeros(4, 4))
            setattr(self, name, layer)
        for index, name in enumerate("abc"):
            layer = getattr(self, name)
            for offset, parameter in enumerate(layer.parameters()):
                parameter.data.copy_(tensor(*parameter.shape, seed=10 * index + offset))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> Any:
        for name in "abc":
            x = torch.tanh(self.get_submodule(name)(x))
        return self.norm(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = (model(tensor(8, 4, seed=50 + step)) - tensor(8, 4, seed=90 + step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Adafactor"):
        pytest.skip("Adafactor came with torch 2.5")
    return torch.optim.Adafactor(parameters, lr=0.01)


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "adafactor": adafactor,
}


def checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> Path:
    torch.save({"epoch": 1, "model_state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, path, **how)
    return path


@pytest.mark.slow
@pytest.mark.sampled(14)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("order", ORDERS, ids="".join)
@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_bit_for_bit(
    tmp_path: Path, make: Any, named: bool, order: tuple[str, ...], zipped: bool
) -> None:
    """Saved from DataParallel; resumed without it, by a model that may define its layers in another order."""
    wrapped = nn.DataParallel(Net())
    optimizer = make(named_parameters(wrapped) if named else wrapped.parameters())
    train(wrapped, optimizer, 0, 3)
    path = checkpoint(tmp_path / "a.pth", wrapped, optimizer, _use_new_zipfile_serialization=zipped)
    wanted = train(wrapped, optimizer, 3, 3)

    torch.manual_seed(5)
    model = Net(order)
    again = make(model.parameters())
    for group in again.param_groups:
        group["lr"] = 0.5
    ckptfix.load_into(model, path)
    report = ckptfix.load_optimizer(again, path, model=model)
    assert train(model, again, 3, 3) == wanted
    state = wrapped.module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert report.by == ("param_names" if named else "model order") and report.at == "optimizer"
    assert len(report.restored) == 8 and not report.fresh
    assert report.groups[0].restored["lr"][0] == 0.5 and "lr 0.5 ->" in str(report)
    json.dumps(report.as_dict())


def by_name(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As torch.distributed.checkpoint.state_dict and FSDP give it: everything keyed by name."""
    saved = optimizer.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    groups = []
    for group in saved["param_groups"]:
        rest = {key: value for key, value in group.items() if key != "param_names"}
        groups.append({**rest, "params": [names[index] for index in group["params"]]})
    return {"state": {names[index]: value for index, value in saved["state"].items()}, "param_groups": groups}


@pytest.mark.slow
@pytest.mark.parametrize("wrap_saved", [False, True])
@pytest.mark.parametrize("wrap_model", [False, True])
def test_state_keyed_by_name(tmp_path: Path, wrap_saved: bool, wrap_model: bool) -> None:
    trained: Any = nn.DataParallel(Net()) if wrap_saved else Net()
    optimizer = torch.optim.Adam(named_parameters(trained), lr=0.01)
    train(trained, optimizer, 0, 2)
    torch.save({"optim": by_name(optimizer)}, tmp_path / "a.pth")
    model: Any = torch.compile(nn.DataParallel(Net(ORDERS[1]))) if wrap_model else Net(ORDERS[1])
    again = torch.optim.Adam(model.parameters(), lr=0.3)
    report = ckptfix.load_optimizer(again, tmp_path / "a.pth", model=model)
    assert report.by == "names" and again.param_groups[0]["lr"] == 0.01
    own = {name.removeprefix("_orig_mod.").removeprefix("module."): value for name, value in model.named_parameters()}
    for name, parameter in trained.named_parameters():
        mine = own[name.removeprefix("module.")]
        assert torch.equal(again.state[mine]["exp_avg"], optimizer.state[parameter]["exp_avg"]), name


def test_groups_follow_their_parameters(tmp_path: Path) -> None:
    need_named_parameters()

    def make(model: Net, swap: bool) -> torch.optim.Optimizer:
        groups: list[Any] = [
            {"params": list(model.a.named_parameters("a")), "lr": 0.5},
            {"params": [*model.b.named_parameters("b"), *model.c.named_parameters("c")], "weight_decay": 0.25},
        ]
        return torch.optim.SGD(reversed(groups) if swap else groups, lr=0.125, momentum=0.5)

    trained = Net()
    optimizer = make(trained, False)
    train(trained, optimizer, 0, 2)
    path = checkpoint(tmp_path / "a.pth", trained, optimizer)
    model = Net(ORDERS[1])
    again = make(model, True)
    for group in again.param_groups:
        group.update(lr=9.0, weight_decay=9.0)
    report = ckptfix.load_optimizer(again, path, model=model)
    assert [(group["lr"], group["weight_decay"]) for group in again.param_groups] == [(0.125, 0.25), (0.5, 0)]
    assert [(group.index, group.saved, group.parameters) for group in report.groups] == [(0, 1, 4), (1, 0, 2)]
    assert again.param_groups[1]["param_names"] == ["a.weight", "a.bias"]
    momentum = again.state[model.get_parameter("c.bias")]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[trained.get_parameter("c.bias")]["momentum_buffer"])


def test_frozen_parameters_are_not_held(tmp_path: Path) -> None:
    """The optimizer held the trainable parameters only, without names, in two groups."""

    def make(model: Net) -> torch.optim.Optimizer:
        model.a.requires_grad_(False)
        groups: list[Any] = [{"params": model.b.parameters()}, {"params": model.c.parameters(), "lr": 0.5}]
        return torch.optim.Adam(groups)

    trained = Net()
    optimizer = make(trained)
    train(trained, optimizer, 0, 2)
    path = checkpoint(tmp_path / "a.pth", trained, optimizer)
    wanted = train(trained, optimizer, 2, 2)
    model = Net(ORDERS[1])
    again = make(model)
    ckptfix.load_into(model, path)
    report = ckptfix.load_optimizer(again, path, model=model)
    assert train(model, again, 2, 2) == wanted
    assert report.restored == ("b.weight", "b.bias", "c.weight", "c.bias")


def test_parameters_without_state_may_be_left_out(tmp_path: Path) -> None:
    """All parameters were held then, only the trainable ones now: frozen ones have no state to lose."""
    trained = Net()
    trained.a.requires_grad_(False)
    optimizer = torch.optim.Adam(trained.parameters())
    train(trained, optimizer, 0, 2)
    path = checkpoint(tmp_path / "a.pth", trained, optimizer)
    model = Net(ORDERS[1])
    again = torch.optim.Adam([*model.b.parameters(), *model.c.parameters(), *model.norm.parameters()])
    report = ckptfix.load_optimizer(again, path, model=model)
    assert report.dropped == ("a.weight", "a.bias") and len(report.restored) == 6
    momentum = again.state[model.get_parameter("c.bias")]["exp_avg"]
    assert torch.equal(momentum, optimizer.state[trained.get_parameter("c.bias")]["exp_avg"])
    trained.a.requires_grad_(True)
    train(trained, optimizer, 2, 1)
    with pytest.raises(Refused, match=r"not held by the optimizer: a\.weight, a\.bias"):
        ckptfix.load_optimizer(again, checkpoint(tmp_path / "b.pth", trained, optimizer), model=model)


def test_tied_parameters_count_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        y: nn.Linear
        z: nn.Linear

        def __init__(self, head_first: bool) -> None:
            super().__init__()
            one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            other.weight = one.weight
            for name, layer in (("z", other), ("y", one)) if head_first else (("y", one), ("z", other)):
                setattr(self, name, layer)
            self.last = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.y(torch.tanh(self.z(x))))

    trained = Tied(False)
    optimizer = torch.optim.Adam(trained.parameters())
    train(trained, optimizer, 0, 2)
    path = checkpoint(tmp_path / "a.pth", trained, optimizer)
    wanted = train(trained, optimizer, 2, 2)
    model = Tied(True)
    again = torch.optim.Adam(model.parameters())
    ckptfix.load_into(model, path)
    ckptfix.load_optimizer(again, path, model=model)
    assert train(model, again, 2, 2) == wanted


def test_old_files_number_parameters_by_id(tmp_path: Path) -> None:
    trained = Net()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    train(trained, optimizer, 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {140_000_000 - 7 * index: value for index, value in saved["state"].items()}
    saved["param_groups"][0]["params"] = [140_000_000 - 7 * index for index in saved["param_groups"][0]["params"]]
    torch.save({"model": trained.state_dict(), "optimizer": saved}, tmp_path / "a.pth")
    model = Net(ORDERS[1])
    again = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckptfix.load_optimizer(again, tmp_path / "a.pth", model=model)
    for name, parameter in model.named_parameters():
        wanted = optimizer.state[trained.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(again.state[parameter]["momentum_buffer"], wanted), name


def test_without_any_names_the_order_counts_as_in_torch(tmp_path: Path) -> None:
    trained = Net()
    optimizer = torch.optim.Adam(trained.parameters())
    train(trained, optimizer, 0, 2)
    torch.save(optimizer.state_dict(), tmp_path / "a.pth")
    again = torch.optim.Adam(Net().parameters())
    report = ckptfix.load_optimizer(again, tmp_path / "a.pth")
    assert (report.by, report.at, report.restored[0]) == ("order", "", "parameter 0")
    assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_its_state_is_no_map_of_the_file(tmp_path: Path) -> None:
    trained = Net()
    optimizer = torch.optim.Adam(trained.parameters())
    train(trained, optimizer, 0, 1)
    path = checkpoint(tmp_path / "a.pth", trained, optimizer)
    again = torch.optim.Adam(trained.parameters())
    ckptfix.load_optimizer(again, path, model=trained)
    if Path("/proc/self/maps").exists():
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_tensor_as_learning_rate_and_what_a_scheduler_adds(tmp_path: Path) -> None:
    trained = Net()
    optimizer = torch.optim.Adam(trained.parameters(), lr=torch.tensor(0.25))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(trained, optimizer, 0, 1)
    path = checkpoint(tmp_path / "a.pth", trained, optimizer)
    again = torch.optim.Adam(trained.parameters(), lr=torch.tensor(0.5))
    report = ckptfix.load_optimizer(again, path, model=trained)
    assert again.param_groups[0]["lr"].item() == 0.25 == again.param_groups[0]["initial_lr"]
    assert "lr" in report.groups[0].restored


# --- refusals: the optimizer is as it was ---------------------------------------------------------------------------


def refused(tmp_path: Path, value: Any, optimizer: torch.optim.Optimizer, model: Any, match: str) -> Refused:
    torch.save(value, tmp_path / "refused.pth")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(Refused, match=match) as caught:
        ckptfix.load_optimizer(optimizer, tmp_path / "refused.pth", model=model)
    after = optimizer.state_dict()
    assert repr(after) == repr(before)
    assert caught.value.path == str(tmp_path / "refused.pth") and caught.value.hint
    return caught.value


def trained_file() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 0, 1)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def current() -> tuple[torch.optim.Optimizer, Net]:
    model = Net(ORDERS[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    train(model, optimizer, 7, 1)
    return optimizer, model


def test_counts_must_agree(tmp_path: Path) -> None:
    value = trained_file()
    _, model = current()
    part = torch.optim.Adam(model.a.parameters())
    refused(tmp_path, value, part, model, r"not held by the optimizer: b\.weight")
    del value["model"]
    refused(tmp_path, value, part, model, r"groups of \[8\] parameters without names")
    apart = torch.optim.Adam([{"params": model.a.parameters()}, {"params": model.b.parameters()}])
    refused(tmp_path, value, apart, model, r"groups of \[8\]")


def test_a_state_dict_that_is_not_the_models_names_nothing(tmp_path: Path) -> None:
    value = trained_file()
    value["model"] = OrderedDict((name.replace("a.", "x."), tensor) for name, tensor in value["model"].items())
    refused(tmp_path, value, *current(), r"numbers have no names, and the file's state dict lacks a\.weight, a\.bias")


def test_shapes_must_fit(tmp_path: Path) -> None:
    value = trained_file()
    value["optimizer"]["state"][0]["exp_avg"] = torch.zeros(4)
    refused(tmp_path, value, *current(), r"exp_avg of a\.weight: \[4\] in the file, \[4, 4\] in the model")


def test_an_order_of_its_own_is_not_guessed(tmp_path: Path) -> None:
    _, model = current()
    shuffled = torch.optim.Adam(list(model.parameters())[::-1])
    refused(tmp_path, trained_file(), shuffled, model, "its own order")
    trained, same_order = Net(), Net()
    optimizer, again = (torch.optim.Adam(list(net.parameters())[::-1]) for net in (trained, same_order))
    train(trained, optimizer, 0, 1)
    report = ckptfix.load_optimizer(again, checkpoint(tmp_path / "a.pth", trained, optimizer), model=same_order)
    assert report.restored[0] == "norm.bias" and report.by == "model order"


def saved(tmp_path: Path, value: Any) -> Path:
    torch.save(value, tmp_path / "saved.pth")
    return tmp_path / "saved.pth"


def test_names_must_agree(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(named_parameters(model))
    train(model, optimizer, 0, 1)
    value = {"optimizer": optimizer.state_dict()}
    names = value["optimizer"]["param_groups"][0]["param_names"]
    names[names.index("b.bias")] = "other.bias"
    refused(tmp_path, value, *current(), r"not in the file: b\.bias; not held by the optimizer: other\.bias")
    plain, _ = current()
    refused(tmp_path, value, plain, None, "the file has names, but the optimizer does not")


def test_groups_must_agree(tmp_path: Path) -> None:
    need_named_parameters()
    model = Net()
    layers = list(model.named_children())[:2]
    groups: list[Any] = [{"params": list(layer.named_parameters(name))} for name, layer in layers]
    optimizer = torch.optim.Adam(groups)
    train(model, optimizer, 0, 1)
    one = torch.optim.Adam([*model.a.parameters(), *model.b.parameters()])
    torch.save(optimizer.state_dict(), tmp_path / "equal.pth")
    assert len(ckptfix.load_optimizer(one, tmp_path / "equal.pth", model=model).restored) == 4
    optimizer.param_groups[1]["lr"] = 0.5
    refused(tmp_path, {"optimizer": optimizer.state_dict()}, one, model, "group 0 has parameters of groups 0 and 1")
    single = torch.optim.Adam([*model.a.named_parameters("a"), *model.b.named_parameters("b")])
    refused(tmp_path, {"optimizer": single.state_dict()}, optimizer, model, "file's group 0 in several groups")


def test_another_optimizer_is_not_taken(tmp_path: Path) -> None:
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd, 0, 1)
    value = {"model": model.state_dict(), "optimizer": sgd.state_dict()}
    error = refused(tmp_path, value, *current(), "a different optimizer saved it: it has dampening, momentum")
    assert error.where == "optimizer"


def test_parameters_of_another_model(tmp_path: Path) -> None:
    optimizer, _ = current()
    refused(tmp_path, trained_file(), optimizer, Net(), "8 parameters of the optimizer are not the model's")


def test_which_optimizer(tmp_path: Path) -> None:
    value = trained_file()
    optimizer, model = current()
    refused(tmp_path, {"model": value["model"]}, optimizer, model, "has no optimizer state")
    both = {"model": value["model"], "g": value["optimizer"], "optims": [trained_file()["optimizer"]]}
    refused(tmp_path, both, optimizer, model, "holds 2 optimizers: g, optims/0")
    assert ckptfix.load_optimizer(optimizer, tmp_path / "refused.pth", model=model, at="optims/0").at == "optims/0"
    with pytest.raises(NoSuchTensor, match="no optimizer at 'd'"):
        ckptfix.load_optimizer(optimizer, tmp_path / "refused.pth", model=model, at="d")


def test_state_of_a_foreign_class(tmp_path: Path) -> None:
    value = trained_file()
    value["optimizer"]["state"][0]["extra"] = pytest.ExitCode.OK
    with pytest.raises(Refused, match=r"an object of class .*ExitCode"):
        ckptfix.load_optimizer(current()[0], saved(tmp_path, value))


def test_an_optimizer_that_fails_is_as_it_was(tmp_path: Path) -> None:
    optimizer, model = current()

    def fail(*_: Any) -> None:
        optimizer.param_groups.clear()
        raise ValueError("not today")

    optimizer.register_load_state_dict_pre_hook(fail)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(Refused, match="Adam rejects the state: not today"):
        ckptfix.load_optimizer(optimizer, saved(tmp_path, trained_file()), model=model)
    assert repr(optimizer.state_dict()) == repr(before)


# --- other classes, other machines, other layouts -------------------------------------------------------------------


MOMENTUM = {"momentum": 0.9}
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "nadam": (torch.optim.NAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "sgd": (torch.optim.SGD, MOMENTUM),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
}
UNTOLD = set() if ADAMW_IS_ADAM else {"adam", "adamw"}
"""Classes that nothing in a file tells apart."""


@pytest.mark.sampled(5, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("given", CLASSES)
def test_no_class_takes_the_state_of_another(tmp_path: Path, given: str) -> None:
    trained = Net()
    make, how = CLASSES[given]
    optimizer = make(trained.parameters(), **how)
    train(trained, optimizer, 0, 1)
    path = checkpoint(tmp_path / "a.pth", trained, optimizer)
    for name, (kind, options) in CLASSES.items():
        again = kind(trained.parameters(), **options)
        if name == given:
            assert len(ckptfix.load_optimizer(again, path, model=trained).restored) == 8
            continue
        if {name, given} <= UNTOLD:
            continue
        before = copy.deepcopy(again.state_dict())
        with pytest.raises(Refused, match="a different optimizer saved it"):
            ckptfix.load_optimizer(again, path, model=trained)
        assert repr(again.state_dict()) == repr(before)


def test_state_without_options_tells_the_class(tmp_path: Path) -> None:
    value = trained_file()
    value["optimizer"]["param_groups"] = [{"lr": 0.1, "params": value["optimizer"]["param_groups"][0]["params"]}]
    for own in value["optimizer"]["state"].values():
        own["momentum_buffer"] = own.pop("exp_avg")
    refused(tmp_path, value, *current(), r"the state of a\.weight has .*momentum_buffer.*, and not exp_avg")


def test_how_to_compute_is_not_taken_from_the_file(tmp_path: Path) -> None:
    """Saved with capturable=True on a GPU, training on a CPU would fail at its first step."""
    value = trained_file()
    value["optimizer"]["param_groups"][0].update(capturable=True, fused=True, lr=0.25)
    torch.save(value, tmp_path / "a.pth")
    optimizer, model = current()
    report = ckptfix.load_optimizer(optimizer, tmp_path / "a.pth", model=model)
    group = optimizer.param_groups[0]
    assert (group["capturable"], group["fused"], group["lr"]) == (False, None, 0.25)
    assert report.groups[0].kept == ("capturable", "fused")
    assert "group 0: unchanged: capturable, fused" in report.lines
    train(model, optimizer, 0, 1)


def test_options_that_an_older_torch_did_not_write_stay(tmp_path: Path) -> None:
    value = trained_file()
    later = ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay")
    new = [option for option in later if option in value["optimizer"]["param_groups"][0]]
    for option in new:
        del value["optimizer"]["param_groups"][0][option]
    for own in value["optimizer"]["state"].values():
        own["step"] = int(own["step"])
    torch.save(value, tmp_path / "a.pth")
    optimizer, model = current()
    report = ckptfix.load_optimizer(optimizer, tmp_path / "a.pth", model=model)
    assert report.groups[0].kept == tuple(sorted(new)) and len(report.restored) == 8
    train(model, optimizer, 0, 1)


def test_groups_of_equal_shapes_in_another_order(tmp_path: Path) -> None:
    """Without names only their options distinguish them."""

    def make(model: Net, names: str) -> torch.optim.Optimizer:
        decay = {"a": 0.5, "b": 0.0}
        groups = ({"params": model.get_submodule(name).parameters(), "weight_decay": decay[name]} for name in names)
        return torch.optim.Adam(list(groups), lr=0.1)

    trained = Net()
    optimizer = make(trained, "ab")
    train(trained, optimizer, 0, 1)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    value = {"model": trained.state_dict(), "optimizer": optimizer.state_dict()}
    refused(tmp_path, value, make(trained, "ba"), trained, "options of these groups in a different order")
    again = make(trained, "ab")
    ckptfix.load_optimizer(again, tmp_path / "refused.pth", model=trained)
    assert [(group["lr"], group["weight_decay"]) for group in again.param_groups] == [(0.05, 0.5), (0.05, 0.0)]


@pytest.mark.parametrize("same_order", [True, False])
def test_state_in_one_piece_wants_the_same_order(tmp_path: Path, same_order: bool) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = trained(tensor(8, 4)).square().mean()
        loss.backward()
        return float(loss.detach())

    trained = Net()
    optimizer: Any = torch.optim.LBFGS(trained.parameters(), max_iter=3)
    optimizer.step(closure)
    value = {"model": trained.state_dict(), "optimizer": optimizer.state_dict()}
    model = Net(ORDERS[0 if same_order else 1])
    again = torch.optim.LBFGS(model.parameters(), max_iter=3)
    if not same_order:
        refused(tmp_path, value, again, model, "covers all parameters in one flat tensor")
        return
    torch.save(value, tmp_path / "a.pth")
    ckptfix.load_optimizer(again, tmp_path / "a.pth", model=model)
    first, wanted = again.state[model.a.weight], optimizer.state[trained.a.weight]
    assert torch.equal(first["d"], wanted["d"]) and len(first["old_dirs"]) == len(wanted["old_dirs"])


def test_sparse_state(tmp_path: Path) -> None:
    trained = nn.Embedding(5, 3, sparse=True)
    optimizer: Any = torch.optim.SparseAdam(list(trained.parameters()))
    trained(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    path = checkpoint(tmp_path / "a.pth", trained, optimizer)
    again = torch.optim.SparseAdam(list(trained.parameters()))
    ckptfix.load_optimizer(again, path, model=trained)
    assert torch.equal(again.state[trained.weight]["exp_avg"], optimizer.state[trained.weight]["exp_avg"])


@pytest.mark.parametrize("given", ["model", "names"])
def test_doubled_wrappers_around_the_names(tmp_path: Path, given: str) -> None:
    trained = nn.DataParallel(nn.DataParallel(Net()))
    optimizer = torch.optim.Adam(named_parameters(trained))
    train(trained, optimizer, 0, 1)
    path = checkpoint(tmp_path / "a.pth", trained, optimizer)
    model = nn.DataParallel(Net(ORDERS[1]))
    if given == "model":
        again = torch.optim.Adam(model.parameters())
        report = ckptfix.load_optimizer(again, path, model=model)
    else:
        again = torch.optim.Adam(named_parameters(model))
        report = ckptfix.load_optimizer(again, path)
    assert (report.by, report.rule, len(report.restored)) == ("param_names", "wrapper module.", 8)
    for name, parameter in model.module.named_parameters():
        wanted = optimizer.state[trained.module.module.get_parameter(name)]["exp_avg"]
        assert torch.equal(again.state[parameter]["exp_avg"], wanted), name


@pytest.mark.parametrize("groups", [1, 2])
def test_a_flattened_state(tmp_path: Path, groups: int) -> None:
    """As torch.distributed.checkpoint.state_dict writes it when asked to flatten."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    def make(model: Net, lr: float) -> torch.optim.Optimizer:
        rest: list[Any] = [*model.b.parameters(), *model.c.parameters(), *model.norm.parameters()]
        if groups == 1:
            return torch.optim.Adam([*model.a.parameters(), *rest], lr=lr)
        apart: list[Any] = [{"params": rest, "lr": 2 * lr}, {"params": model.a.parameters()}]
        return torch.optim.Adam(apart, lr=lr)

    trained = Net()
    optimizer = make(trained, 0.25)
    train(trained, optimizer, 0, 2)
    flat = get_optimizer_state_dict(trained, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert "state.a.weight.exp_avg" in flat
    torch.save({"model": trained.state_dict(), "optim": flat}, tmp_path / "a.pth")
    wanted = train(trained, optimizer, 2, 2)
    model = Net(ORDERS[1])
    again = make(model, 9.0)
    assert ckptfix.load_into(model, tmp_path / "a.pth").at == "model"
    report = ckptfix.load_optimizer(again, tmp_path / "a.pth", model=model)
    assert (report.at, report.by, len(report.restored)) == ("optim", "names", 8)
    assert [group["lr"] for group in again.param_groups] == [0.25] if groups == 1 else [0.5, 0.25]
    assert train(model, again, 2, 2) == wanted
    del flat["param_groups.a.weight.lr"]
    refused(tmp_path, {"optim": flat}, again, model, r"group \d has parameters of groups")


def test_a_flattened_state_without_its_group(tmp_path: Path) -> None:
    flat = {"state.a.weight.exp_avg": tensor(4, 4), "param_groups.b.weight.lr": 0.5}
    torch.save(flat, tmp_path / "a.pth")
    optimizer, model = current()
    with pytest.raises(Refused, match=r"in no group: a\.weight"):
        ckptfix.load_optimizer(optimizer, tmp_path / "a.pth", model=model)


def test_state_in_no_group_and_parameters_that_are_none(tmp_path: Path) -> None:
    value = trained_file()
    value["optimizer"]["state"][17] = value["optimizer"]["state"][0]
    refused(tmp_path, value, *current(), "has parameters that are in no group: 17")
    value["optimizer"]["param_groups"][0]["params"] = [[0]] * 8
    torch.save(value, tmp_path / "a.pth")
    optimizer, model = current()
    with pytest.raises(Refused, match="a parameter is neither a number nor a name"):
        ckptfix.load_optimizer(optimizer, tmp_path / "a.pth", model=model)


def test_what_is_no_optimizer(tmp_path: Path) -> None:
    torch.save(trained_file(), tmp_path / "a.pth")
    optimizer, model = current()
    others: list[Any] = [model, torch.optim.lr_scheduler.StepLR(optimizer, 1), {}]
    for other in others:
        with pytest.raises(Refused, match=f"not an optimizer but a {type(other).__name__}"):
            ckptfix.load_optimizer(other, tmp_path / "a.pth", model=model)


@pytest.mark.parametrize("shapes", [((4, 4), (4, 4)), ((4, 4), (3, 3))], ids=["alike", "unlike"])
def test_order_alone_is_said_where_a_swap_would_not_show(tmp_path: Path, shapes: tuple[tuple[int, int], ...]) -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.Adam(parameters)
    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "o.pth")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = ckptfix.load_optimizer(torch.optim.Adam(parameters), tmp_path / "o.pth")
    assert report.by == "order"
    told = [row for row in caught if "order alone" in str(row.message)]
    assert len(told) == (shapes[0] == shapes[1])
    assert all(row.filename == __file__ for row in told)


def test_a_flat_partition_of_zero_is_named_with_its_way_out(tmp_path: Path) -> None:
    """What DeepSpeed's stages 1 and 2 write for a rank: groups of one row, whatever the number of parameters."""
    flat = torch.ones(5)
    inner = {"state": {0: {"exp_avg": flat}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    states = {"base_optimizer_state": inner, "single_partition_of_fp32_groups": [flat], "partition_count": [2]}
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": states, "ds_version": "0.15"}, path)
    model = nn.Linear(3, 2)
    with pytest.raises(WouldLoseData, match=r"rank 0 of 2.* a flat ZeRO partition") as caught:
        ckptfix.load_optimizer(torch.optim.Adam(model.parameters()), path)
    assert "ckptfix convert FOLDER OUT.pth" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin"])
def test_the_folder_of_a_trainer_has_it_in_a_file(tmp_path: Path, name: str) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / name)
    restored = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = ckptfix.load_optimizer(restored, tmp_path)
    assert report.path == str(tmp_path / name)
    assert all(
        torch.equal(restored.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
        for parameter in model.parameters()
    )


def test_parameters_of_one_side_are_named_without_strict(tmp_path: Path) -> None:
    """One layer is frozen now, one is gone, and one is new."""
    need_named_parameters()
    old = Net()
    optimizer = torch.optim.AdamW(named_parameters(old), lr=0.5)
    train(old, optimizer, 0, 2)
    path = tmp_path / "o.pth"
    torch.save(optimizer.state_dict(), path)
    new = Net()
    del new.b
    new.d = nn.Linear(4, 4)
    new.a.requires_grad_(False)
    rows = [(name, one) for name, one in new.named_parameters() if one.requires_grad]
    resumed = torch.optim.AdamW(rows, lr=0.1)
    with pytest.raises(Refused, match=r"not in the file: d\.weight") as refusal:
        ckptfix.load_optimizer(resumed, path, model=new)
    assert "strict=False" in str(refusal.value.hint) and not resumed.state
    report = ckptfix.load_optimizer(resumed, path, model=nn.DataParallel(new), strict=False)
    assert set(report.added) == {"module.d.weight", "module.d.bias"}
    assert set(report.frozen) == {"a.weight", "a.bias"} and set(report.removed) == {"b.weight", "b.bias"}
    assert len(report.restored) == 4 and resumed.param_groups[0]["lr"] == 0.5
    assert torch.equal(resumed.state[new.c.weight]["exp_avg"], optimizer.state[old.c.weight]["exp_avg"])
    assert new.d.weight not in resumed.state
    text = str(report)
    assert all(name in text for name in ("d.weight", "a.weight", "b.weight")) and json.dumps(report.as_dict())


def test_a_group_that_was_split_gives_its_options_to_groups_that_do_not_differ(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.3)
    train(model, optimizer, 0, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pth")
    split = torch.optim.AdamW([{"params": list(layer.parameters())} for layer in model.children()], lr=0.1)
    ckptfix.load_optimizer(split, tmp_path / "one.pth", model=model)
    assert all((group["lr"], group["weight_decay"]) == (0.5, 0.3) for group in split.param_groups)
    for parameter in model.parameters():
        assert torch.equal(split.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_groups_that_changed_keep_their_own_options_without_strict(tmp_path: Path) -> None:
    need_named_parameters()
    model = Net()
    optimizer = torch.optim.AdamW(named_parameters(model), lr=0.5, weight_decay=0.3)
    train(model, optimizer, 0, 2)
    torch.save(optimizer.state_dict(), tmp_path / "one.pth")
    decay = [(name, one) for name, one in model.named_parameters() if one.ndim > 1]
    plain = [(name, one) for name, one in model.named_parameters() if one.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decay}, {"params": plain, "weight_decay": 0.0}]
    split = torch.optim.AdamW(groups, lr=0.1)
    with pytest.raises(Refused, match="in several groups"):
        ckptfix.load_optimizer(split, tmp_path / "one.pth", model=model)
    report = ckptfix.load_optimizer(split, tmp_path / "one.pth", model=model, strict=False)
    assert [group["weight_decay"] for group in split.param_groups] == [0.01, 0.0], "not those of the one group"
    assert [group.saved for group in report.groups] == [None, None] and "keeps its own options" in str(report)
    for parameter in model.parameters():
        assert torch.equal(split.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    torch.save(split.state_dict(), tmp_path / "two.pth")
    whole = torch.optim.AdamW(named_parameters(model), lr=0.7)
    ckptfix.load_optimizer(whole, tmp_path / "two.pth", model=model, strict=False)
    assert whole.param_groups[0]["lr"] == 0.7 and len(whole.state) == len(optimizer.state)


def test_without_names_strict_false_guesses_nothing(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 0, 1)
    torch.save(optimizer.state_dict(), tmp_path / "o.pth")
    fewer = torch.optim.SGD(model.a.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(Refused, match="without names"):
        ckptfix.load_optimizer(fewer, tmp_path / "o.pth", model=model, strict=False)
    assert not fewer.state


class EightBit(torch.optim.Optimizer):
    """Keeps its state as the 8-bit optimizers of bitsandbytes do: codes, a code book, and scales of blocks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    def fill(self) -> None:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            codes = torch.full(parameter.shape, number, dtype=torch.uint8)
            book = torch.linspace(-1, 1, 256)
            self.state[parameter] = {"step": 3, "state1": codes, "state2": codes + 1, "qmap1": book, "qmap2": book,
                                     "absmax1": torch.full((1,), 0.5), "absmax2": torch.full((1,), 0.25)}  # fmt: skip

    def load_state_dict(self, state_dict: Any) -> None:
        """Assign the state without a cast, as bitsandbytes does."""
        parameters = [one for group in self.param_groups for one in group["params"]]
        self.state.clear()
        self.state.update({parameters[number]: dict(own) for number, own in state_dict["state"].items()})


def test_8_bit_state_keeps_its_codes_and_is_named(tmp_path: Path) -> None:
    model = Net()
    optimizer = EightBit(model.parameters())
    optimizer.fill()
    checkpoint(tmp_path / "c.pth", model, optimizer)
    resumed = EightBit(model.parameters())
    ckptfix.load_optimizer(resumed, tmp_path / "c.pth", model=model)
    for parameter in model.parameters():
        for key, value in optimizer.state[parameter].items():
            own = resumed.state[parameter][key]
            assert own == value if key == "step" else own.dtype == value.dtype and torch.equal(own, value), key
    with pytest.raises(Refused, match=r"bitsandbytes.*8-bit"):
        ckptfix.load_optimizer(torch.optim.AdamW(model.parameters()), tmp_path / "c.pth", model=model)


def grouped(net: nn.Module, kind: str) -> list[dict[str, Any]]:
    """Return the parameters of a model in the groups `kind`."""
    rows = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if kind == "one":
        return [{"params": rows}]
    flat, wide = ([row for row in rows if (row.dim() < 2) == small] for small in (True, False))
    pair = [{"params": wide, "weight_decay": 0.01}, {"params": flat, "weight_decay": 0.0}]
    return pair[::-1] if kind == "turned" else pair


@pytest.mark.parametrize(("before", "after"), [("decay", "one"), ("one", "decay"), ("decay", "frozen")])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_numbered_groups_that_changed_follow_by_shape(
    tmp_path: Path, before: str, after: str, order: tuple[str, ...]
) -> None:
    old = Net()
    optimizer = torch.optim.AdamW(grouped(old, before), lr=0.1)
    for index, parameter in enumerate(old.parameters()):
        parameter.grad = torch.full_like(parameter, index + 1.0)
    optimizer.step()
    torch.save({"model": old.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    new = Net(order)
    if after == "frozen":
        new.a.requires_grad_(False)
    other = torch.optim.AdamW(grouped(new, "decay" if after == "frozen" else after), lr=0.2)
    with pytest.raises(Refused):
        ckptfix.load_optimizer(other, tmp_path / "run.pth")
    report = ckptfix.load_optimizer(other, tmp_path / "run.pth", model=new, strict=False)
    assert report.by == "model order" and len(report.frozen) == (2 if after == "frozen" else 0)
    saved = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[saved[name]]["exp_avg"])


def test_groups_that_fit_in_two_ways_are_refused(tmp_path: Path) -> None:
    net = Net()
    rows = list(net.parameters())
    optimizer = torch.optim.AdamW([{"params": rows[:2]}, {"params": rows[2:]}], lr=0.1)
    for parameter in rows:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    with pytest.raises(Refused, match="groups of"):
        ckptfix.load_optimizer(torch.optim.AdamW(rows, lr=0.1), tmp_path / "run.pth", model=net, strict=False)

"""The trainer wraps, learns the same however it is wrapped, repeats itself, and runs where it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from unit.trainer.conftest import trained

from ckptfix.errors import Refused
from ckptfix.trainer import TASKS, WRAPPERS, TrainingJob, devices, inner, outputs, run, wrap
from ckptfix.trainer.devices import TrainingDevice
from ckptfix.trainer.parallel import check
from ckptfix.trainer.replicas import Replicas
from ckptfix.trainer.train import built, loss_of, shared

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def logged(**job: Any) -> list[str]:
    lines: list[str] = []
    run(TrainingJob(log=lines.append, **job))
    return lines


@pytest.mark.parametrize("model", ["demo", "mlp"])
def test_the_loss_falls(model: str) -> None:
    losses = trained(model=model, epochs=6).losses
    assert len(losses) == 6
    assert losses[-1] < 0.25 * losses[0], losses


@pytest.mark.parametrize("model", ["demo", "vgg", "bert-tied"])
def test_a_seed_gives_the_same_model_and_another_another(model: str) -> None:
    first, second, other = (trained(model=model, epochs=1, seed=seed).model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_each_epoch_is_logged() -> None:
    assert [line.split("  ")[0] for line in logged(epochs=3)] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


STACKS: list[tuple[str, ...]] = [
    (), ("dp",), ("compile",), ("checkpoint",), ("compile", "dp"), ("dp", "compile"), ("checkpoint", "compile", "dp")
]  # fmt: skip


@pytest.mark.parametrize("stack", STACKS, ids="+".join)
def test_keys_carry_the_wrappers_outermost_first(stack: tuple[str, ...]) -> None:
    model = TASKS["demo"].model()
    wrapped = wrap(model, stack)
    prefix = "".join(f"{WRAPPERS[name].attribute}." for name in reversed(stack) if WRAPPERS[name].attribute)
    assert list(wrapped.state_dict()) == [f"{prefix}fc.weight", f"{prefix}fc.bias"]
    assert inner(wrapped) is model


def test_wrappers_are_the_real_ones() -> None:
    model = TASKS["demo"].model()
    assert type(wrap(model, ["dp"])) is nn.DataParallel
    assert type(wrap(model, ["compile"])).__module__ == "torch._dynamo.eval_frame"
    assert type(wrap(model, ["dp"], TrainingDevice(torch.device("cpu"), replicas=2))) is Replicas
    assert type(wrap(model, ["checkpoint"]).fc).__name__ == "CheckpointWrapper"


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (("dp", "ddp"), "dp and ddp each distribute the work"),
        (("fsdp2", "compile", "dp"), "fsdp2 and dp each"),
        (("compile", "compile"), "compile is named twice"),
        (("compile", "checkpoint"), "name it first, before compile"),
    ],
)
def test_a_stack_that_torch_does_not_run_is_refused(stack: tuple[str, ...], words: str) -> None:
    with pytest.raises(Refused, match=words):
        check(stack)
    for fine in STACKS:
        check(fine)


def test_a_wrapped_model_learns_what_a_plain_one_does() -> None:
    plain = trained(model="mlp", epochs=1)
    for stack in (("dp",), ("compile",), ("checkpoint", "compile", "dp")):
        state = inner(trained(model="mlp", parallel=stack, epochs=1).model).state_dict()
        torch.testing.assert_close(state, inner(plain.model).state_dict())


def test_outputs_are_those_of_the_saved_model(tmp_path: Path) -> None:
    trained(model="vgg", epochs=1, save=tmp_path / "vgg.pth", outputs=tmp_path / "outputs.pt")
    model = TASKS["vgg"].model()
    before = outputs(model, TASKS["vgg"])
    model.load_state_dict(torch.load(tmp_path / "vgg.pth", weights_only=True))
    kept = torch.load(tmp_path / "outputs.pt", weights_only=True)
    torch.testing.assert_close(outputs(model, TASKS["vgg"]), kept)
    assert not torch.allclose(before, kept)


@pytest.mark.parametrize(
    ("replicas", "splits"),
    [(2, ["15 15", "5 5"]), (3, ["10 10 10", "4 4 2"]), (8, ["4 4 4 4 4 4 4 2", "2 2 2 2 2"])],
)
def test_the_tutorial_s_batches_are_split_as_published(replicas: int, splits: list[str]) -> None:
    """100 samples by 30: three whole batches and one of ten."""
    lines = logged(model="tutorial", parallel=("dp",), replicas=replicas, log_steps=True, epochs=2)
    scattered = [line.removeprefix("scatter: ") for line in lines if line.startswith("scatter")]
    assert scattered == [f"30 -> {splits[0]}"] * 3 + [f"10 -> {splits[1]}"]
    assert [line for line in lines if line.startswith("gathered")][-1] == "gathered: input [10, 5] -> output [10, 2]"


def test_replicas_of_all_batches_are_logged_on_request() -> None:
    few, all_of_them = (
        sum(line.startswith("gathered") for line in logged(parallel=("dp",), replicas=2, log_replicas=every, epochs=2))
        for every in (False, True)
    )
    assert (few, all_of_them) == (4, 2 * 16)


def test_a_loss_of_each_replica_is_averaged() -> None:
    """Gathering makes a vector of them (A7); training on it goes on all the same, and the loss falls."""
    task = TASKS["bert"]
    torch.manual_seed(0)
    model = wrap(task.model(), ["dp"], TrainingDevice(torch.device("cpu"), replicas=2)).eval()
    inputs, targets = task.data(torch.Generator().manual_seed(0), 8)
    with pytest.warns(UserWarning, match="gather along dimension 0"):
        each = model(*inputs, targets)[0]
        mean = loss_of(model, task, inputs, targets)
    assert each.shape == (2,) and mean.shape == ()
    assert torch.equal(mean, each.mean())


@pytest.mark.filterwarnings("ignore:Was asked to gather")
@pytest.mark.parametrize("model", ["bert", "tagger"])
def test_replicas_of_a_model_of_words_learn(model: str) -> None:
    losses = trained(model=model, parallel=("dp",), replicas=3, epochs=3).losses
    assert losses[-1] < losses[0]


def test_autocast_and_its_scaler_train() -> None:
    plain, mixed = trained(model="mlp", epochs=3), trained(model="mlp", epochs=3, amp=True)
    assert mixed.losses[-1] < 0.25 * mixed.losses[0]
    assert mixed.losses != plain.losses
    assert mixed.scaler.is_enabled() and not plain.scaler.is_enabled()


def test_the_learning_rate_can_be_given() -> None:
    assert trained(epochs=0).optimizer.param_groups[0]["lr"] == TASKS["demo"].rate
    training = trained(epochs=2, rate=0.5)
    assert training.optimizer.param_groups[0]["lr"] == 0.25
    assert training.losses != trained(epochs=2).losses


@pytest.mark.parametrize("number", [1, 5, 10, 32])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_processes_share_each_batch_equally_and_leave_nothing_out(number: int, processes: int) -> None:
    chosen = torch.arange(100, 100 + number)
    parts = [shared(chosen, rank, processes) for rank in range(processes)]
    assert len({len(part) for part in parts}) == 1
    assert set(torch.cat(parts).tolist()) == set(chosen.tolist())
    if number % processes == 0:
        assert sum(map(len, parts)) == number


def test_a_full_size_is_for_models_that_have_one() -> None:
    with pytest.raises(Refused, match=r"only one size; --full-size is for vgg, vgg19, vgg-named"):
        trained(model="demo", full_size=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_trains_on_the_cpu() -> None:
    lines = logged(epochs=1, parallel=("dp",), gpus=(1, 0), output_device=0)
    assert lines[0] == "this machine has no GPU: training on the CPU, without --gpu_ids 1,0 and --output-device 0"
    assert lines[1].startswith("epoch 1/1")


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this look like a machine with so many GPUs, and this process like one that torchrun started or not."""

    def build(gpus: int, **environment: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return build


def cuda(number: int, *ids: int, output: int | None = None) -> TrainingDevice:
    return TrainingDevice(torch.device("cuda", number), ids, output)


def test_the_first_id_is_the_main_device(machine: Machine) -> None:
    machine(4)
    assert devices.choose() == cuda(0, 0, 1, 2, 3)
    assert devices.choose((2, 0)) == cuda(2, 2, 0)
    assert devices.choose((1,)) == cuda(1, 1)
    assert devices.choose((0, 1), output=1) == cuda(0, 0, 1, output=1)
    for gpus, output in (((0, 4), None), ((), 4)):
        with pytest.raises(Refused, match="there is no GPU 4: 4 visible"):
            devices.choose(gpus, output)
    machine(0)
    assert devices.choose((0, 1)) == devices.CPU


def test_each_process_has_a_gpu_of_its_own_or_none_has(machine: Machine) -> None:
    machine(2, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert devices.choose() == cuda(1, 1)
    assert devices.choose((1, 0)) == cuda(0, 0)
    machine(1, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    assert devices.choose() == devices.CPU
    assert list(devices.notes(devices.CPU, (0,))) == [
        "there are fewer GPUs than processes: training on the CPU, without --gpu_ids 0"
    ]


@pytest.mark.parametrize(
    ("gpus", "ids", "environment", "chosen"),
    [
        (4, (), {"LOCAL_RANK": "0"}, ("ddp",)),
        (0, (), {"LOCAL_RANK": "0"}, ("ddp",)),
        (4, (), {}, ("dp",)),
        (4, (2,), {}, ()),
        (4, (0, 2), {}, ("dp",)),
        (1, (), {}, ()),
        (0, (), {}, ()),
        (0, (0, 1), {}, ()),
    ],
)
def test_the_automatic_choice(
    gpus: int, ids: tuple[int, ...], environment: dict[str, str], chosen: tuple[str, ...], machine: Machine
) -> None:
    machine(gpus, **environment)
    assert devices.automatic(ids) == chosen


def test_the_log_tells_how_visible_gpus_are_numbered(machine: Machine) -> None:
    machine(2, CUDA_VISIBLE_DEVICES="3,5")
    assert list(devices.notes(devices.choose((1,)), (1,))) == [
        "CUDA_VISIBLE_DEVICES=3,5 renumbers: GPU 5 is visible as 1, and tensors will be tagged cuda:1"
    ]
    machine(0, CUDA_VISIBLE_DEVICES="3")
    assert list(devices.notes(devices.CPU)) == [
        "CUDA_VISIBLE_DEVICES=3, but training runs on the CPU: tensors will be tagged cpu"
    ]
    machine(2)
    assert list(devices.notes(devices.choose())) == []


def test_an_optimizer_in_data_parallel_does_not_work() -> None:
    """What --help says about it: the old habit of optimizer.module.step() has no place any more."""
    model: Any = TASKS["demo"].model()
    model(torch.ones(1, 3)).sum().backward()
    optimizer = Adam(model.parameters())
    wrapped: Any = nn.DataParallel(optimizer)
    with pytest.raises(AttributeError, match="step"):
        wrapped.step()
    wrapped.zero_grad()
    assert model.fc.weight.grad is not None
    assert not wrapped.state_dict()
    with pytest.raises(TypeError, match="DataParallel is not an Optimizer"):
        StepLR(wrapped, 2)
    parallel = wrap(model, ["dp"])
    right = Adam(parallel.parameters())
    StepLR(right, 2)
    right.step()
    assert len(right.state_dict()["state"]) == 2


def test_the_full_size_trains_at_its_own_rate() -> None:
    with torch.device("meta"):
        task, model = built(TrainingJob(model="vgg", full_size=True))
    assert task.rate == TASKS["vgg"].full_rate
    assert sum(parameter.numel() for parameter in model.parameters()) == 138_357_544

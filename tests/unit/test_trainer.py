"""The trainer learns, repeats itself, and saves what each wrapper saves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckptfix.errors import Unsupported
from ckptfix.trainer import FORMATS, TASKS, WRAPPERS, Job, Training, fit, inner, outputs, run, save, wrap
from ckptfix.trainer.__main__ import main, wrappers


def quiet(line: str) -> None:
    pass


def trained(**job: object) -> Training:
    return run(Job(log=quiet, **job))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", TASKS)
def test_the_loss_falls(model: str) -> None:
    losses = trained(model=model, epochs=6).losses
    assert len(losses) == 6
    assert losses[-1] < 0.25 * losses[0], losses


@pytest.mark.parametrize("model", TASKS)
def test_a_seed_gives_the_same_model_and_another_another(model: str) -> None:
    first, second, other = (trained(model=model, epochs=1, seed=seed).model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_each_epoch_is_logged() -> None:
    lines: list[str] = []
    run(Job(epochs=3, log=lines.append))
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


@pytest.mark.parametrize("stack", [(), ("dp",), ("compile",), ("compile", "dp"), ("dp", "compile")], ids="+".join)
def test_keys_carry_the_wrappers_outermost_first(stack: tuple[str, ...]) -> None:
    model = TASKS["demo"].model()
    wrapped = wrap(model, stack)
    prefix = "".join(f"{WRAPPERS[name].attribute}." for name in reversed(stack))
    assert list(wrapped.state_dict()) == [f"{prefix}fc.weight", f"{prefix}fc.bias"]
    assert inner(wrapped) is model


def test_wrappers_are_the_real_ones() -> None:
    model = TASKS["demo"].model()
    assert type(wrap(model, ["dp"])) is nn.DataParallel
    assert type(wrap(model, ["compile"])).__module__ == "torch._dynamo.eval_frame"


def test_a_wrapped_model_learns_what_a_plain_one_does() -> None:
    task = TASKS["mlp"]
    states = []
    for stack in ((), ("dp",), ("compile",)):
        torch.manual_seed(0)
        training = fit(wrap(task.model(), stack), task, epochs=1)
        states.append(inner(training.model).state_dict())
    for state in states[1:]:
        torch.testing.assert_close(state, states[0])


@pytest.mark.parametrize("container", FORMATS)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_bare_state_dict_in_every_container(container: str, wrapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    training = trained(model="mlp", parallel=("dp",), epochs=1)
    save(training, path, wrapped=wrapped, container=container)
    found = load_file(path) if container == "safetensors" else torch.load(path, weights_only=True)
    wanted = (training.model if wrapped else inner(training.model)).state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert path.read_bytes().startswith(b"PK") == (container == "zip")


def test_a_nested_checkpoint_has_what_resuming_needs(tmp_path: Path) -> None:
    path = tmp_path / "nested.pth"
    training = trained(model="vgg", parallel=("dp",), epochs=2, save=path, nested=True)
    found = torch.load(path, weights_only=True)
    assert found["epoch"] == 2
    assert found["loss"] == training.losses[-1]
    assert next(iter(found["model_state_dict"])) == "module.features.0.weight"
    assert len(found["optimizer_state_dict"]["state"]) == len(list(training.model.parameters()))
    assert found["scheduler_state_dict"]["last_epoch"] == 2


def test_safetensors_takes_no_nested_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "nested.safetensors"
    with pytest.raises(Unsupported, match="bare"):
        save(trained(epochs=1), path, nested=True, container="safetensors")
    assert not path.exists()


def test_outputs_are_those_of_the_saved_model(tmp_path: Path) -> None:
    trained(model="vgg", epochs=1, save=tmp_path / "vgg.pth", outputs=tmp_path / "outputs.pt")
    model = TASKS["vgg"].model()
    before = outputs(model, TASKS["vgg"])
    model.load_state_dict(torch.load(tmp_path / "vgg.pth", weights_only=True))
    kept = torch.load(tmp_path / "outputs.pt", weights_only=True)
    torch.testing.assert_close(outputs(model, TASKS["vgg"]), kept)
    assert not torch.allclose(before, kept)


@pytest.mark.parametrize("how", ["own", "torchrun"])
def test_ddp_in_two_processes(how: str, tmp_path: Path) -> None:
    """Gradients are averaged: two processes with half a batch each learn what one learns with whole batches."""
    path = tmp_path / "ddp.pth"
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if how == "torchrun" else []
    arguments = ["-m", "ckptfix.trainer", "--parallel", "ddp", "--epochs", "1", "--save", str(path)]
    done = subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1/1") == 1
    state = torch.load(path, weights_only=True, map_location="cpu")
    alone = trained(epochs=1).model.state_dict()
    torch.testing.assert_close(state, {f"module.{key}": value.cpu() for key, value in alone.items()})


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dp.pth"
    assert main(["--parallel", "dp", "--unwrapped", "--format", "legacy", "--epochs", "1", "--save", str(path)]) == 0
    assert "epoch 1/1" in capsys.readouterr().out
    assert list(torch.load(path, weights_only=True)) == ["fc.weight", "fc.bias"]
    assert not path.read_bytes().startswith(b"PK")


def test_the_command_line_refuses_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--parallel", "dpp"], "'dpp' is none of none, dp, ddp, compile"),
        (["--nested", "--format", "safetensors"], "leave out --nested"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--save", str(tmp_path / "never")])
        assert stop.value.code == 2
        said = capsys.readouterr()
        assert words in said.err
        assert "epoch" not in said.out
    assert not list(tmp_path.iterdir())


def test_wrappers_are_read_innermost_first() -> None:
    assert wrappers("none") == ()
    assert wrappers("compile,ddp") == ("compile", "ddp")

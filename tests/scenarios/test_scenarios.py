"""The scenarios that the project exists for, a test each: the trainer makes it, ckptfix fixes it, torch alone loads it.

A rows are about making a checkpoint, B rows about fixing one. What a row shows in detail has tests of its own
elsewhere; here it works from end to end, through the command lines that a person would type.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import names as locations
from click.testing import CliRunner
from forks import TORCHRUN, Forks
from torch import Tensor, nn

import ckptfix
from ckptfix.cli import commands
from ckptfix.trainer import TASKS, outputs
from ckptfix.trainer.__main__ import main as trainer

pytestmark = pytest.mark.slow

Train = Callable[..., str]
Cli = Callable[..., str]

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")


@pytest.fixture(autouse=True)
def threads() -> Any:
    """The trainer sets torch to one thread; other tests get back what they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str]) -> Train:
    """``python -m ckptfix.trainer ...`` in this process; what it printed."""

    def run(line: str, *paths: object) -> str:
        capsys.readouterr()
        words = line.split()
        assert trainer([str(paths[int(word[1:])]) if word.startswith("@") else word for word in words]) == 0
        return capsys.readouterr().out

    return run


def fix(*arguments: object, code: int = 0) -> str:
    """``ckptfix ...``; its output."""
    done = CliRunner().invoke(commands, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


def read(path: Path) -> Any:
    """What torch itself loads, without running anything."""
    return torch.load(path, weights_only=True)


def plain(model: str, state: Mapping[str, Any]) -> Tensor:
    """What a new, unwrapped model puts out after a strict load by torch."""
    made = TASKS[model].model()
    made.load_state_dict(state)
    return outputs(made, TASKS[model])


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def losses(text: str) -> list[str]:
    """The loss of each epoch, as printed."""
    return [line.split("loss")[1].split()[0] for line in text.splitlines() if line.startswith("epoch ")]


@NO_GPU
def test_a1_gpu_ids_fall_back_to_the_cpu_with_the_same_keys(train: Train, tmp_path: Path) -> None:
    several, one = tmp_path / "several.pth", tmp_path / "one.pth"
    said = train("--gpu_ids 0,1,2,3 --epochs 1 --save @0", several)
    assert "CPU" in said
    train("--gpu_ids 2 --epochs 1 --save @0", one)
    assert list(read(several)) == ["module.fc.weight", "module.fc.bias"]
    assert list(read(one)) == ["fc.weight", "fc.bias"]


def test_a2_wrapped_and_clean_keys_hold_the_same_weights(train: Train, tmp_path: Path) -> None:
    wrapped, clean, stripped = tmp_path / "wrapped.pth", tmp_path / "clean.pth", tmp_path / "stripped.pth"
    train("--model mlp --parallel dp --epochs 1 --save @0", wrapped)
    train("--model mlp --parallel dp --epochs 1 --unwrapped --save @0", clean)
    assert all(name.startswith("module.") for name in read(wrapped))
    fix("strip-module", wrapped, stripped)
    assert "Same" in fix("diff", stripped, clean)


def test_a3_a_training_checkpoint_and_a_bare_state_dict(train: Train, tmp_path: Path) -> None:
    nested, bare = tmp_path / "nested.pth", tmp_path / "bare.pth"
    train("--model mlp --nested --epochs 1 --save @0", nested)
    train("--model mlp --epochs 1 --save @0", bare)
    found = read(nested)
    assert {"epoch", "model_state_dict", "optimizer_state_dict"} <= set(found) and found["epoch"] == 1
    same(plain("mlp", found["model_state_dict"]), plain("mlp", read(bare)))


@pytest.mark.parametrize(
    ("replicas", "full", "last"),
    [(2, "15 15", "5 5"), (3, "10 10 10", "4 4 2"), (8, "4 4 4 4 4 4 4 2", "2 2 2 2 2")],
)
def test_a4_the_tutorial_splits_as_published(train: Train, replicas: int, full: str, last: str) -> None:
    said = train(f"--model tutorial --epochs 1 --replicas {replicas} --log-replicas --log-steps")
    splits = [line.split("->")[1].strip() for line in said.splitlines() if "scatter" in line]
    assert splits == [full, full, full, last]


def test_a4_the_demo_net_learns(train: Train, tmp_path: Path) -> None:
    said = train("--model demo --epochs 3 --save @0", tmp_path / "demo.pth")
    first, *_, final = map(float, losses(said))
    assert final < first / 2
    assert {name: tuple(value.shape) for name, value in read(tmp_path / "demo.pth").items()} == {
        "fc.weight": (5, 3),
        "fc.bias": (5,),
    }


@pytest.mark.parametrize("by", ["position", "structure"])
def test_a5_b3_another_vgg_receives_the_weights(train: Train, tmp_path: Path, by: str) -> None:
    source, target, out = tmp_path / "vgg.pth", tmp_path / "named.pth", tmp_path / "out.pth"
    train("--model vgg --parallel dp --epochs 1 --save @0 --outputs @1", source, tmp_path / "trained.pt")
    train("--model vgg-named --epochs 1 --seed 7 --save @0", target)
    assert not set(read(source)) & set(read(target))
    fix("match", source, out, "--like", target, "--by", by)
    same(plain("vgg-named", read(out)), read(tmp_path / "trained.pt"))


def test_a6_packed_sequences_in_replicas(train: Train, tmp_path: Path) -> None:
    saved, out = tmp_path / "tagger.pth", tmp_path / "plain.pth"
    said = train("--model tagger --replicas 3 --epochs 2 --save @0 --outputs @1", saved, tmp_path / "trained.pt")
    first, last = map(float, losses(said))
    assert last < first
    fix("strip-module", saved, out)
    same(plain("tagger", read(out)), read(tmp_path / "trained.pt"))


def test_a7_a_loss_for_each_replica_is_averaged(train: Train, tmp_path: Path) -> None:
    saved, out = tmp_path / "bert.pth", tmp_path / "plain.pth"
    said = train("--model bert --replicas 2 --epochs 2 --save @0", saved)
    first, last = map(float, losses(said))
    assert last < first
    fix("strip-module", saved, out)
    model = TASKS["bert"].model()
    model.load_state_dict(read(out))
    assert any(tuple(value.shape) == (35,) for value in model.state_dict().values())


@NO_GPU
def test_a8_auto_takes_what_is_there(train: Train, tmp_path: Path) -> None:
    saved = tmp_path / "auto.pth"
    assert "--parallel auto: none" in train("--parallel auto --epochs 1 --save @0", saved)
    assert list(read(saved)) == ["fc.weight", "fc.bias"]


@NO_GPU
@pytest.mark.campaign
def test_a8_auto_takes_the_processes_that_are_there(launcher: Forks, tmp_path: Path) -> None:
    saved = tmp_path / "auto.pth"
    words = ["--nproc-per-node", "2", "--standalone"]
    words += ["-m", "ckptfix.trainer", "--parallel", "auto", "--epochs", "1", "--save", str(saved)]
    done = launcher(TORCHRUN, words, environment={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done.stderr
    assert "--parallel auto: ddp" in done.stdout
    assert list(read(saved)) == ["module.fc.weight", "module.fc.bias"]


def test_a9_the_four_steps_are_logged(train: Train) -> None:
    said = train("--model tutorial --epochs 1 --replicas 2 --log-steps")
    places = [said.index(step) for step in ("scatter", "replicate", "parallel_apply", "gather")]
    assert places == sorted(places)


def test_a10_resuming_restores_optimizer_epoch_and_rate(train: Train, tmp_path: Path) -> None:
    whole, half = tmp_path / "whole.pth", tmp_path / "half.pth"
    straight = losses(train("--model mlp --parallel dp --epochs 4 --nested --save @0", whole))
    train("--model mlp --parallel dp --epochs 2 --nested --save @0", half)
    resumed = losses(train("--resume @0 --epochs 4 --nested --save @1", half, tmp_path / "resumed.pth"))
    assert resumed == straight[2:]
    assert read(tmp_path / "resumed.pth")["epoch"] == 4
    train("--resume @0 --epochs 3 --rate 0.0001 --nested --save @1", half, tmp_path / "slower.pth")
    assert read(tmp_path / "slower.pth")["optimizer_state_dict"]["param_groups"][0]["lr"] <= 0.0001


def test_a10_an_optimizer_in_data_parallel_has_no_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        wrapped: Any = nn.DataParallel(optimizer)
    except (TypeError, AttributeError):
        return
    with pytest.raises(AttributeError):
        wrapped.step()


@pytest.mark.campaign
def test_a11_visible_devices_renumber(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptfix.trainer", "--epochs", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "CUDA_VISIBLE_DEVICES": "3"}
    )
    assert done.returncode == 0, done.stderr
    tag = "cuda:0" if "cuda:0" in done.stdout else "tagged cpu"  # the CPU, where GPU 3 is not there
    assert "CUDA_VISIBLE_DEVICES=3" in done.stdout and tag in done.stdout


def test_b1_only_whole_components_are_stripped(tmp_path: Path) -> None:
    state = {"module.submodule.weight": torch.ones(2), "module.head.module.weight": torch.zeros(2)}
    torch.save(state, tmp_path / "in.pth")
    fix("strip-module", tmp_path / "in.pth", tmp_path / "out.pth")
    assert list(read(tmp_path / "out.pth")) == ["submodule.weight", "head.module.weight"]
    torch.save({"module.a": torch.ones(2), "features.b": torch.ones(2)}, tmp_path / "mixed.pth")
    assert "features.b" in fix("strip-module", tmp_path / "mixed.pth", tmp_path / "no.pth", code=2)
    assert not (tmp_path / "no.pth").exists()


def test_b2_a_plain_checkpoint_loads_into_data_parallel(train: Train, tmp_path: Path) -> None:
    train("--model mlp --epochs 1 --save @0", tmp_path / "plain.pth")
    fix("add-module", tmp_path / "plain.pth", tmp_path / "wrapped.pth")
    nn.DataParallel(TASKS["mlp"].model()).load_state_dict(read(tmp_path / "wrapped.pth"))


def test_b3_unequal_models_are_refused_where_they_part(train: Train, tmp_path: Path) -> None:
    train("--model vgg --epochs 1 --save @0", tmp_path / "vgg.pth")
    train("--model vgg19 --epochs 1 --save @0", tmp_path / "vgg19.pth")
    said = fix("match", tmp_path / "vgg.pth", tmp_path / "o.pth", "--like", tmp_path / "vgg19.pth", "--by", "position",
               code=2)  # fmt: skip
    assert "features." in said
    assert not (tmp_path / "o.pth").exists()


def test_b4_devices_in_the_file_and_in_the_loader(train: Train, tmp_path: Path) -> None:
    saved, away, back = tmp_path / "cpu.pth", tmp_path / "gpu.pth", tmp_path / "back.pth"
    train("--model mlp --nested --epochs 1 --save @0", saved)
    fix("map-location", saved, away, "cuda:1")
    assert set(locations(away).values()) >= {"cuda:1"}
    fix("map-location", away, tmp_path / "moved.pth", "cuda:1=cuda:0")
    assert "cuda:1" not in locations(tmp_path / "moved.pth").values()
    fix("to-cpu", away, back)
    same(plain("mlp", read(back)["model_state_dict"]), plain("mlp", read(saved)["model_state_dict"]))
    forms: tuple[Any, ...] = ("cpu", torch.device("cpu"), {"cuda:1": "cpu"}, lambda storage, location: storage)
    for form in forms:
        state = ckptfix.load_state_dict(away, at="model_state_dict", map_location=form)
        assert all(value.device.type == "cpu" for value in state.values())
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="cuda:1"):
            ckptfix.load_state_dict(away, at="model_state_dict")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("saved", ["none", "dp", "compile", "compile,dp"])
@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel, torch.compile], ids=["plain", "dp", "compile"])
def test_b5_one_call_whichever_side_is_wrapped(
    train: Train, tmp_path: Path, saved: str, wrap: Callable[[nn.Module], Any]
) -> None:
    path, trained = tmp_path / "saved.pth", tmp_path / "trained.pt"
    train(f"--model mlp --parallel {saved} --epochs 1 --nested --save @0 --outputs @1", path, trained)
    model = TASKS["mlp"].model()
    report = ckptfix.load_into(wrap(model), path)
    assert report.complete
    same(outputs(model, TASKS["mlp"]), read(trained))


@pytest.mark.parametrize("key", ["model_state_dict", "state_dict", "model", "net", None])
def test_b6_wherever_the_state_dict_is(tmp_path: Path, key: str | None) -> None:
    model = TASKS["mlp"].model()
    wrapped = nn.DataParallel(model).state_dict()
    saved = wrapped if key is None else {"epoch": 3, key: wrapped}
    torch.save(saved, tmp_path / "in.pth")
    fix("strip-module", tmp_path / "in.pth", tmp_path / "out.pth")
    found = read(tmp_path / "out.pth")
    TASKS["mlp"].model().load_state_dict(found if key is None else found[key])
    assert ckptfix.load_into(TASKS["mlp"].model(), tmp_path / "in.pth").complete


def test_b7_diff_says_same_renamed_changed_missing(train: Train, tmp_path: Path) -> None:
    one, other = tmp_path / "one.pth", tmp_path / "other.pth"
    train("--model mlp --epochs 1 --save @0", one)
    assert "Same" in fix("diff", one, one)
    state = read(one)
    state["head.weight"] = state["head.weight"] + 1
    del state["head.bias"]
    torch.save({f"module.{name}": value for name, value in state.items()}, other)
    result = json.loads(fix("diff", one, other, "--json", code=1))
    text = json.dumps(result)
    assert "head.bias" in text and "head.weight" in text and "module" in text

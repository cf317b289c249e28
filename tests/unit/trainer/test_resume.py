"""A resumed run goes on as if it had never stopped: the same losses and weights, to the last bit."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from unit.trainer.conftest import trained

from ckptfix.errors import BadPickle, CkptfixError, DamagedFile, LoadMismatch, Refused, UnknownFormat
from ckptfix.trainer import CONTAINERS, TASKS, Training, inner
from ckptfix.trainer.dcp import METADATA
from ckptfix.trainer.resume import read

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NESTED = [name for name, container in CONTAINERS.items() if container.nested]


def same_weights(one: Training, other: Training) -> bool:
    first, second = inner(one.model).state_dict(), inner(other.model).state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.sampled(2, test_all=4)
@pytest.mark.parametrize("model", TASKS)
def test_every_model_goes_on_exactly(model: str, tmp_path: Path) -> None:
    """Dropout draws the masks, BatchNorm has the averages and Adam the moments that they would have had."""
    path = tmp_path / "half.pth"
    whole = trained(model=model, epochs=2)
    trained(model=model, epochs=1, save=path, nested=True)
    resumed = trained(resume=path, epochs=2)
    assert resumed.losses == whole.losses
    assert same_weights(resumed, whole)


@pytest.mark.sampled(1, test_all=3)
@pytest.mark.parametrize("container", NESTED)
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "unwrapped"])
def test_every_container_and_both_kinds_of_keys(container: str, wrapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "half"
    whole = trained(model="vgg", epochs=2)
    trained(
        model="vgg", parallel=("dp",), epochs=1, save=path, nested=True, container=container, wrapped=wrapped
    )
    resumed = trained(resume=path, epochs=2)
    assert resumed.losses == whole.losses
    assert same_weights(resumed, whole)


@pytest.mark.parametrize(
    "into", [("dp",), ("compile",), ("checkpoint",), ("compile", "dp"), ("dp", "compile")], ids="+".join
)
def test_into_another_wrapper(into: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "half.pth"
    whole = trained(model="mlp", epochs=3)
    trained(model="mlp", parallel=("checkpoint", "compile"), epochs=1, save=path, nested=True)
    assert trained(resume=path, parallel=into, epochs=3).losses == pytest.approx(whole.losses, rel=1e-5)
    assert trained(resume=path, parallel=("dp",), epochs=3).losses == whole.losses


def test_scaler_averages_and_scheduler_come_back(tmp_path: Path) -> None:
    path = tmp_path / "half.pth"
    how: Any = {"model": "mlp", "amp": True, "averaged": True}
    whole = trained(epochs=4, **how)
    trained(epochs=3, save=path, nested=True, **how)
    lines: list[str] = []
    resumed = trained(resume=path, epochs=4, log=lines.append)
    assert "optimizer, scheduler, gradient scaler, averages and RNG state" in lines[0]
    assert resumed.losses == whole.losses
    assert resumed.scaler.is_enabled() and resumed.scaler.state_dict() == whole.scaler.state_dict()
    assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
    assert whole.averaged is not None and resumed.averaged is not None
    assert int(resumed.averaged.n_averaged) == int(whole.averaged.n_averaged) == 4 * 16
    first, second = whole.averaged.state_dict(), resumed.averaged.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_new_learning_rate_holds_from_there_on_and_is_saved(tmp_path: Path) -> None:
    first, second = tmp_path / "first.pth", tmp_path / "second.pth"
    trained(epochs=2, save=first, nested=True)
    saved = torch.load(first, weights_only=True)
    assert saved["optimizer_state_dict"]["param_groups"][0]["lr"] == TASKS["demo"].rate / 2
    slower = trained(resume=first, epochs=3, rate=0.001, save=second, nested=True)
    assert slower.optimizer.param_groups[0]["lr"] == 0.001
    again = trained(resume=second, epochs=4)
    assert again.optimizer.param_groups[0]["lr"] == 0.0005
    assert again.losses == trained(resume=first, epochs=4, rate=0.001).losses
    assert again.losses != trained(resume=first, epochs=4).losses


def test_it_remembers_model_seed_and_losses(tmp_path: Path) -> None:
    path = tmp_path / "half.pth"
    before = trained(model="mlp", seed=7, epochs=1, save=path, nested=True)
    lines: list[str] = []
    resumed = trained(resume=path, epochs=1, log=lines.append)
    assert resumed.losses == before.losses
    assert same_weights(resumed, before)
    assert lines[-1] == "nothing to train: 1 epochs are done, and --epochs is 1"
    for job in ({"model": "vgg"}, {"seed": 8}):
        with pytest.raises(Refused, match="it was trained with"):
            trained(resume=path, **job)


BARE = [
    ("zip", ("dp",)), ("legacy", ("compile", "dp")), ("safetensors", ("dp",)), ("dcp", ("compile",)),
    ("module", ()), ("module", ("dp",)), ("module", ("compile",)), ("module", ("dp", "compile")),
    ("module", ("compile", "dp")), ("module", ("checkpoint", "dp")),
]  # fmt: skip


@pytest.mark.parametrize(("container", "stack"), BARE)
def test_a_bare_one_brings_back_weights_and_says_so(container: str, stack: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "bare"
    before = trained(model="mlp", parallel=stack, epochs=1, save=path, container=container)
    lines: list[str] = []
    resumed = trained(model="mlp", resume=path, epochs=0, log=lines.append)
    assert same_weights(resumed, before)
    assert "only the weights" in lines[0]
    assert resumed.losses == [] and not resumed.optimizer.state


@pytest.mark.parametrize("model", TASKS)
def test_a_whole_module_of_every_model_is_read_without_running_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "module.pth"
    before = trained(model=model, parallel=("dp",), epochs=0, save=path, container="module")
    monkeypatch.setattr(torch, "load", None)
    weights = read(path).weights
    wanted = inner(before.model).state_dict()
    assert weights.keys() >= wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_averaged_weights_are_weights_too(tmp_path: Path) -> None:
    path = tmp_path / "averaged.pth"
    before = trained(averaged=True, epochs=1, save=path)
    assert list(torch.load(path, weights_only=True)) == ["n_averaged", "module.fc.weight", "module.fc.bias"]
    resumed = trained(resume=path, epochs=0)
    assert before.averaged is not None
    assert torch.equal(inner(resumed.model).state_dict()["fc.weight"], before.averaged.module.state_dict()["fc.weight"])


def test_what_it_does_not_know_is_refused(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return (print, ("it ran",))

    state = TASKS["demo"].model().state_dict()
    complete = trained(epochs=1, save=tmp_path / "own.pth", nested=True)
    own = torch.load(tmp_path / "own.pth", weights_only=True)
    fewer = {**own, "optimizer_state_dict": {**own["optimizer_state_dict"], "param_groups": []}}
    assert complete.losses
    cases: list[tuple[object, type[CkptfixError], str]] = [
        ({"model": state}, Refused, "no model_state_dict"),
        ({"model_state_dict": state, "epoch": 3}, Refused, "it lacks args, losses"),
        ({**own, "extra": Hostile()}, Refused, "weights_only=True"),
        ({**own, "args": {"model": "gpt"}}, Refused, "'gpt'"),
        (fewer, LoadMismatch, "does not fit"),
        ({**own, "rng_state": {"torch": [3], "cuda": []}}, LoadMismatch, "does not fit"),
        ({**own, "args": "none"}, Refused, "its args are not a dict"),
        ({"fc.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(5), "x": torch.zeros(1)}, LoadMismatch,
         r"1 unexpected \(x\); 1 of a different shape \(fc.weight\)"),
        (TASKS["vgg"].model().state_dict(), LoadMismatch, "2 missing"),
    ]  # fmt: skip
    for number, (value, kind, words) in enumerate(cases):
        path = tmp_path / f"{number}.pth"
        torch.save(value, path)
        with pytest.raises(kind, match=words):
            trained(resume=path)


def test_files_that_are_no_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, empty = tmp_path / "notes.txt", tmp_path / "folder"
    text.write_text("some notes")
    empty.mkdir()
    with pytest.raises(UnknownFormat):
        trained(resume=text)
    with pytest.raises(DamagedFile, match="not a checkpoint directory"):
        trained(resume=empty)
    with pytest.raises(CkptfixError, match="no such file"):
        trained(resume=tmp_path / "absent.pth")
    assert capsys.readouterr() == ("", "")


def test_a_hostile_directory_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dcp"
    trained(epochs=0, save=path, container="dcp")
    (path / METADATA).write_bytes(pickle.dumps(Running("it ran")))
    with pytest.raises(BadPickle, match=r"it names builtins\.print"):
        trained(resume=path)
    (path / METADATA).write_bytes(pickle.dumps([1]))
    with pytest.raises(DamagedFile, match="does not hold metadata"):
        trained(resume=path)
    assert "it ran" not in capsys.readouterr().out


class Running:
    """Prints when it is unpickled."""

    def __init__(self, said: str) -> None:
        self.said = said

    def __reduce__(self) -> Any:
        return (print, (self.said,))


def test_a_damaged_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dcp"
    trained(epochs=1, save=path, container="dcp", nested=True)
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:500])
    with pytest.raises(DamagedFile, match="torch cannot read it"):
        trained(resume=path)


GROUP = """
import json, sys
from pathlib import Path
import torch
from ckptfix.trainer import TrainingJob, launch, run
from ckptfix.trainer.processes import rank

CASES = {
    "ddp": ("vgg", ("ddp",), "zip"),
    "compile+ddp": ("mlp", ("compile", "ddp"), "dcp"),
    "ddp+compile": ("mlp", ("ddp", "compile"), "legacy"),
    "checkpoint+ddp": ("vgg", ("checkpoint", "ddp"), "zip"),
    "fsdp2": ("bert-tied", ("fsdp2",), "zip"),
    "fsdp2-dcp": ("vgg", ("fsdp2",), "dcp"),
    "fsdp2+compile": ("demo", ("fsdp2", "compile"), "zip"),
    "compile+fsdp2": ("demo", ("compile", "fsdp2"), "zip"),
    "checkpoint+fsdp2": ("tagger", ("checkpoint", "fsdp2"), "zip"),
}

def silent(line):
    pass

def work(folder):
    found = {}
    for name, (model, stack, container) in CASES.items():
        path = folder / name
        how = {"model": model, "parallel": stack, "log": silent}
        whole = run(TrainingJob(epochs=2, **how))
        first = run(TrainingJob(epochs=1, save=path, nested=True, container=container, **how))
        found[name] = [whole.losses, run(TrainingJob(epochs=2, resume=path, **how)).losses]
        torch._dynamo.reset()
    # From one way of sharing to another: by the numbers of parameters, and by their names.
    for source, stack in (("ddp", ("fsdp2",)), ("fsdp2-dcp", ("ddp",))):
        other = run(TrainingJob(epochs=2, resume=folder / source, parallel=stack, log=silent)).losses
        found[f"{source} into {stack[0]}"] = [found[source][0], other]
    run(TrainingJob(model="mlp", parallel=("ddp",), epochs=1, save=folder / "module", container="module", log=silent))
    if rank() == 0:
        (folder / "losses.json").write_text(json.dumps(found))

if __name__ == "__main__":
    sys.exit(launch(work, Path(sys.argv[1]), 2))
"""
"""All that needs a group of two processes, in one group: starting one costs seconds."""

TOGETHER = pytest.mark.xdist_group("processes of the trainer")


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the group wrote: losses.json and checkpoints."""
    folder = tmp_path_factory.mktemp("group")
    script = folder / "group.py"
    script.write_text(GROUP)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.campaign
@TOGETHER
def test_processes_go_on_exactly(group: Path) -> None:
    losses = json.loads((group / "losses.json").read_text())
    assert len(losses) == 11
    for name, (whole, resumed) in losses.items():
        # Another way of sharing adds up gradients in another order.
        wanted = pytest.approx(whole, rel=1e-4) if " into " in name else whole
        assert len(whole) == 2 and resumed == wanted, name


@pytest.mark.campaign
@TOGETHER
def test_from_processes_into_one(group: Path) -> None:
    """Averaged gradients equal the whole batch's: without dropout, one process learns the same."""
    losses = json.loads((group / "losses.json").read_text())
    for name in ("fsdp2+compile", "compile+fsdp2", "compile+ddp"):
        resumed = trained(resume=group / name, epochs=2)
        assert resumed.losses[0] == losses[name][0][0]
        # BatchNorm takes the average of each process's half, and of the whole batch here.
        assert resumed.losses[1] == pytest.approx(losses[name][0][1], rel=0.2 if name == "compile+ddp" else 1e-4)
    for name in ("ddp", "fsdp2-dcp"):
        lines: list[str] = []
        assert len(trained(resume=group / name, epochs=2, log=lines.append).losses) == 2
        assert lines[1].startswith("RNG state is from 2 processes, and this run has 1")


@pytest.mark.campaign
@TOGETHER
def test_keys_of_processes(group: Path) -> None:
    def first(name: str) -> str:
        found: str = next(iter(torch.load(group / name, weights_only=True)["model_state_dict"]))
        return found

    assert first("ddp") == "module.features.0.weight"
    assert first("ddp+compile") == "_orig_mod.module.body.0.weight"
    assert first("fsdp2") == "bert.embeddings.position_ids"
    assert first("compile+fsdp2") == first("fsdp2+compile") == "fc.weight"
    assert first("checkpoint+ddp") == "module.features.0.weight"
    sharded = torch.load(group / "fsdp2", weights_only=True)
    names = list(dict(inner(TASKS["bert-tied"].model()).named_parameters()))
    assert sharded["optimizer_state_dict"]["param_groups"][0]["params"] == names
    assert len(sharded["rng_state"]["torch"]) == 2
    assert not torch.equal(*sharded["rng_state"]["torch"])
    assert all(not isinstance(value, nn.Parameter) for value in sharded["model_state_dict"].values())


@pytest.mark.campaign
@TOGETHER
def test_a_module_from_ddp_is_read(group: Path) -> None:
    wanted = TASKS["mlp"].model().state_dict()
    assert read(group / "module").weights.keys() == wanted.keys()


@pytest.mark.campaign
@TOGETHER
def test_shards_of_both_processes_are_read(group: Path) -> None:
    assert len(list((group / "fsdp2-dcp").glob("*.distcp"))) == 2
    assert read(group / "fsdp2-dcp").weights.keys() == TASKS["vgg"].model().state_dict().keys()

"""The trainer saves what each wrapper saves, in every container, complete or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from unit.trainer.conftest import trained

from ckptfix import load_state_dict, open_checkpoint
from ckptfix.errors import CkptfixError, Unsupported, WouldOverwrite, WriteFailed
from ckptfix.trainer import CONTAINERS, TASKS, Training, inner
from ckptfix.trainer.dcp import read as read_folder
from ckptfix.trainer.save import check, complete, contents, save

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def data_parallel() -> Training:
    return trained(model="mlp", parallel=("dp",), epochs=1)


def loaded(path: Path, container: str) -> Any:
    """What is in the container, as its own library reads it."""
    if container == "safetensors":
        return load_file(path)
    if container == "dcp":
        return read_folder(path)
    found = torch.load(path, weights_only=container != "module")
    return found.state_dict() if container == "module" else found


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "unwrapped"])
def test_a_state_dict_in_every_container(
    container: str, wrapped: bool, data_parallel: Training, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    save(data_parallel, path, wrapped=wrapped, container=container)
    found = loaded(path, container)
    wanted = (data_parallel.model if wrapped else inner(data_parallel.model)).state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    assert path.is_dir() == CONTAINERS[container].folder
    if path.is_file():
        assert open_checkpoint(path).format == {"module": "zip"}.get(container, container)


def test_a_whole_module_is_of_the_wrapper_or_of_the_model(data_parallel: Training, tmp_path: Path) -> None:
    for wrapped, kind in ((True, nn.DataParallel), (False, type(inner(data_parallel.model)))):
        save(data_parallel, tmp_path / "module.pth", wrapped=wrapped, container="module")
        assert type(torch.load(tmp_path / "module.pth", weights_only=False)) is kind


def test_a_training_checkpoint_has_what_resuming_needs(tmp_path: Path) -> None:
    path = tmp_path / "nested.pth"
    training = trained(
        model="vgg", parallel=("dp",), epochs=2, save=path, nested=True, amp=True, averaged=True, param_names=True
    )
    found = torch.load(path, weights_only=True)
    names = [name for name, _ in training.model.named_parameters()]
    assert found["epoch"] == 2
    assert found["loss"] == training.losses[-1] and found["losses"] == training.losses
    assert next(iter(found["model_state_dict"])) == "module.features.0.weight"
    assert len(found["optimizer_state_dict"]["state"]) == len(names)
    assert found["optimizer_state_dict"]["param_groups"][0]["param_names"] == names
    assert found["scheduler_state_dict"]["last_epoch"] == 2
    assert found["scaler_state_dict"]["scale"] > 0
    assert next(iter(found["averaged_state_dict"])) == "n_averaged"
    assert torch.equal(found["rng_state"]["torch"][0], torch.get_rng_state())
    assert found["args"] == {
        "model": "vgg", "seed": 0, "amp": True, "averaged": True, "full_size": False, "parallel": "dp"
    }  # fmt: skip


def test_averages_follow_the_weights() -> None:
    """After one step the average is the model; later it lags."""
    training = trained(averaged=True, epochs=3)
    assert training.averaged is not None
    average, last = training.averaged.module.state_dict(), inner(training.model).state_dict()
    assert not torch.equal(average["fc.weight"], last["fc.weight"])
    wrapped, clean = (list(contents(training, wrapped=wrapped, nested=False)) for wrapped in (True, False))
    assert wrapped == ["n_averaged", "module.fc.weight", "module.fc.bias"]
    assert clean == ["fc.weight", "fc.bias"]


def test_activation_checkpointing_shows_in_parameter_names_and_metadata_only() -> None:
    training = trained(parallel=("checkpoint",), epochs=1, param_names=True)
    state = training.model.state_dict()
    assert list(state) == ["fc.weight", "fc.bias"]
    assert "fc._checkpoint_wrapped_module" in state._metadata  # type: ignore[attr-defined]
    names = training.optimizer.state_dict()["param_groups"][0]["param_names"]
    assert names == ["fc._checkpoint_wrapped_module.weight", "fc._checkpoint_wrapped_module.bias"]


def test_tied_tensors_in_safetensors_are_written_once_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "tied.safetensors"
    training = trained(model="bert-tied", epochs=0, save=path, container="safetensors")
    wanted = training.model.state_dict()
    with safe_open(path, "pt") as file:
        assert len(list(file.keys())) == len(wanted) - 1
        assert file.metadata()["decoder.weight"] == "bert.embeddings.word_embeddings.weight"
    found = load_state_dict(path)
    assert found.keys() == wanted.keys()
    assert found["decoder.weight"].data_ptr() == found["bert.embeddings.word_embeddings.weight"].data_ptr()


@pytest.mark.parametrize("container", ["safetensors", "module"])
def test_what_holds_no_training_checkpoint_says_so(container: str, data_parallel: Training, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=f"{container} cannot hold a training checkpoint"):
        save(data_parallel, tmp_path / "never", nested=True, container=container)
    assert not list(tmp_path.iterdir())


def test_a_sharded_module_is_not_pickled_whole(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="only this process's part"):
        check(tmp_path / "never", "module", sharded=True)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_checkpoint_is_replaced_and_nothing_is_left_beside_it(
    container: str, data_parallel: Training, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    other = trained(epochs=0)
    save(other, path, container=container)
    save(data_parallel, path, container=container)
    assert set(loaded(path, container)) == set(data_parallel.model.state_dict())
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_failure_leaves_what_was_there(folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    if folder:
        path.mkdir()
    kept = path / "part" if folder else path
    kept.write_text("before")
    with pytest.raises(WriteFailed, match="No space left"), complete(path) as beside:
        if folder:
            beside.mkdir()
        (beside / "part" if folder else beside).write_text("half")
        raise OSError(28, "No space left on device")
    assert kept.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_a_path_that_can_not_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("x")
    cases: list[tuple[str, str, type[CkptfixError], str]] = [
        ("absent/saved", "zip", WriteFailed, "does not exist"),
        ("folder", "zip", Unsupported, "folder|directory"),
        ("file", "dcp", Unsupported, "is a file"),
        ("folder", "dcp", WouldOverwrite, "other files in it"),
        ("absent/saved", "dcp", WriteFailed, "does not exist"),
    ]
    for name, container, kind, words in cases:
        with pytest.raises(kind, match=words):
            check(tmp_path / name, container)
    check(tmp_path / "file", "legacy")
    check(tmp_path / "new", "dcp")


def test_the_same_training_saves_the_same_bytes(tmp_path: Path) -> None:
    for container in ("zip", "safetensors"):
        for name in ("first", "second.pth"):
            trained(model="mlp", epochs=1, save=tmp_path / name, container=container)
        assert (tmp_path / "first").read_bytes() == (tmp_path / "second.pth").read_bytes()


def test_cuda_checkpoints_are_tagged_and_have_its_generators(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    path = tmp_path / "cuda.pth"
    whole = trained(model="vgg", epochs=2)
    trained(model="vgg", epochs=1, save=path, nested=True)
    assert {entry.location for entry in open_checkpoint(path).entries if entry.at == "model_state_dict"} == {"cuda:0"}
    assert len(torch.load(path, weights_only=True)["rng_state"]["cuda"][0]) == torch.cuda.device_count()
    assert trained(resume=path, epochs=2).losses == pytest.approx(whole.losses, rel=1e-6)


def test_tasks_of_all_kinds_are_saved_wrapped(tmp_path: Path) -> None:
    for name, task in TASKS.items():
        trained(model=name, parallel=("compile", "dp"), epochs=0, save=tmp_path / "saved")
        found = torch.load(tmp_path / "saved", weights_only=True)
        assert list(found) == [f"module._orig_mod.{key}" for key in task.model().state_dict()]

"""Every folder that a trainer leaves, by every verb: the weights are what was saved, and nothing beside them is taken.

Made with torch's own writers, laid out as accelerate 1.15 (accelerator.py ``save_state``, utils/fsdp_utils.py),
transformers 5 (trainer.py ``_save_checkpoint``), PEFT 0.21 and verl (fsdp_checkpoint_manager.py) lay them out.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch_versions import ALONE

import ckptfix
from ckptfix.errors import UnknownFormat
from ckptfix.formats import located
from ckptfix.formats.members import kind_of

State = dict[str, torch.Tensor]


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """The same tensors by name; their order is the format's."""
    assert_same(dict(sorted(one.items())), dict(sorted(other.items())))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def as_dcp(state: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder, **ALONE)


def as_safetensors(state: State, path: Path) -> None:
    save_file(state, path, metadata={"format": "pt"})


MODELS: dict[str, tuple[str, Callable[[State, Path], None]]] = {
    "accelerate": ("model.safetensors", as_safetensors),
    "pickled": ("pytorch_model.bin", torch.save),
    "FSDP, full": ("pytorch_model_fsdp.bin", torch.save),
    "FSDP, sharded": ("pytorch_model_fsdp_0", lambda state, path: as_dcp({"model": state}, path)),
    "FSDP, local": ("pytorch_model_fsdp_rank0.bin", torch.save),
    "PEFT": ("adapter_model.safetensors", as_safetensors),
    "verl": ("model_world_size_1_rank_0.pt", torch.save),
    "any name": ("best-weights.pth", torch.save),
    "any folder": ("weights", lambda state, path: as_dcp({"model": state}, path)),
}
"""Name of the model in the folder, and what writes it."""


def training() -> tuple[Any, Any]:
    """The state of an optimizer and of a scheduler, after a step."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return optimizer.state_dict(), scheduler.state_dict()


OPTIMIZER, SCHEDULER = training()
GENERATORS = {"python": (3, (1, 2, 3), None), "cpu": torch.get_rng_state()}

BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scheduler alone": {"scheduler.bin": SCHEDULER},
    "accelerate": {
        "optimizer.bin": OPTIMIZER, "scheduler.bin": SCHEDULER, "random_states_0.pkl": GENERATORS,
        "random_states_1.pkl": GENERATORS, "sampler.bin": {"epoch": 2, "seed": torch.arange(4)},
        "custom_checkpoint_0.pkl": {"average": torch.ones(3)},
    },
    "accelerate, FSDP": {"optimizer_0/": {"optimizer": OPTIMIZER}, "scheduler.bin": SCHEDULER},
    "Trainer": {
        "optimizer.pt": OPTIMIZER, "scheduler.pt": SCHEDULER, "rng_state.pth": GENERATORS, "scaler.pt": {"scale": 1.0},
        "training_args.bin": {"learning_rate": 1e-3}, "trainer_state.json": {"epoch": 1.0},
    },
    "Trainer, FSDP": {
        "optimizer_0/": {"optimizer": OPTIMIZER}, "scheduler.pt": SCHEDULER, "rng_state_0.pth": GENERATORS,
        "rng_state_1.pth": GENERATORS, "training_args.bin": {"learning_rate": 1e-3},
        "trainer_state.json": {"epoch": 1.0},
    },
    "verl": {
        "optim_world_size_1_rank_0.pt": OPTIMIZER, "fsdp_config.json": {"world_size": 1},
        "extra_state_world_size_1_rank_0.pt": {"lr_scheduler": SCHEDULER, "rng": GENERATORS},
    },
}  # fmt: skip
"""Name -> what a trainer saves there; a name that ends with a slash is a distributed checkpoint."""

FOLDERS = list(itertools.product(MODELS, BESIDE))


def made(tmp_path: Path, model: str, beside: str) -> tuple[Path, State]:
    """The folder, and the weights in it."""
    folder = tmp_path / "run" / "step 7"
    folder.mkdir(parents=True)
    state = {name: value.clone() for name, value in net(7).state_dict().items()}
    name, write = MODELS[model]
    write(state, folder / name)
    if model == "PEFT":
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    for other, value in BESIDE[beside].items():
        if other.endswith("/"):
            as_dcp(value, folder / other)
        elif other.endswith(".json"):
            (folder / other).write_text(json.dumps(value))
        else:
            torch.save(value, folder / other)
    return folder, state


@pytest.mark.slow
@pytest.mark.sampled(14)
@pytest.mark.parametrize(("model", "beside"), FOLDERS)
def test_the_weights_are_taken(model: str, beside: str, tmp_path: Path) -> None:
    folder, state = made(tmp_path, model, beside)
    assert located(folder) == str(folder / MODELS[model][0])
    same(state, dict(ckptfix.load_state_dict(folder)))
    ckptfix.convert(folder, tmp_path / "o.safetensors")
    same(state, load_file(tmp_path / "o.safetensors"))
    ckptfix.extract(folder, tmp_path / "e.pth")
    same(state, torch.load(tmp_path / "e.pth", weights_only=True))
    ckptfix.cast(folder, tmp_path / "c", to="bfloat16")
    same({name: value.bfloat16() for name, value in state.items()}, dict(ckptfix.load_state_dict(tmp_path / "c")))
    ckptfix.add_module(folder, tmp_path / "m")
    wrapped = {f"module.{name}": value for name, value in state.items()}
    same(wrapped, dict(ckptfix.load_state_dict(tmp_path / "m", strip=None)))
    ckptfix.strip_module(tmp_path / "m", tmp_path / "s")
    same(state, dict(ckptfix.load_state_dict(tmp_path / "s", strip=None)))
    found = net(1)
    ckptfix.load_into(found, folder)
    same(state, dict(found.state_dict()))
    held = ckptfix.inspect(folder)
    assert held.tensors == len(state)
    assert {row.name for row in held.members} == {path.name for path in folder.iterdir()}
    assert sorted(row.name.rpartition("/")[2] for row in ckptfix.digest(folder).entries) == sorted(state)


@pytest.mark.sampled(5, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("model", ["accelerate", "FSDP, sharded"])
def test_doctor_looks_at_the_model_and_at_all_beside_it(model: str, beside: str, tmp_path: Path) -> None:
    folder, _ = made(tmp_path, model, beside)
    done = ckptfix.doctor(folder)
    assert done.exit_code() == 0, str(done)
    assert done.looked_at[0].startswith(f"{MODELS[model][0]}, the model")
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".json", ".safetensors")]
    for path in files:
        name = path.relative_to(folder).parts[0]
        if name == MODELS[model][0] or path.name == ".metadata":
            continue
        kept = path.read_bytes()
        for data in (b"", kept[: len(kept) * 6 // 10]):
            path.write_bytes(data)
            done = ckptfix.doctor(folder, fast=True)
            wrong = [row for row in done.findings if row.severity == "error"]
            assert wrong and {row.where.partition(":")[0] for row in wrong} == {name}, (path, str(done))
            assert done.exit_code() == 1 and not done.fixes
        path.write_bytes(kept)


@pytest.mark.parametrize("beside", [name for name, rows in BESIDE.items() if len(rows) > 1])
def test_a_model_that_is_damaged_is_the_model(beside: str, tmp_path: Path) -> None:
    folder, _ = made(tmp_path, "FSDP, sharded", beside)
    (folder / "pytorch_model_fsdp_0" / ".metadata").unlink()
    with pytest.raises(UnknownFormat) as raised:
        ckptfix.convert(folder, tmp_path / "o.pth")
    assert raised.value.hint is not None and "pytorch_model_fsdp_0" in raised.value.hint
    assert not (tmp_path / "o.pth").exists() and ckptfix.doctor(folder).exit_code() == 1


@pytest.mark.parametrize("beside", [name for name, rows in BESIDE.items() if len(rows) > 1])
def test_without_a_model_nothing_is_taken(beside: str, tmp_path: Path) -> None:
    folder, _ = made(tmp_path, "verl", beside)
    (folder / MODELS["verl"][0]).unlink()
    with pytest.raises(UnknownFormat, match="a folder without a model; it holds"):
        ckptfix.convert(folder, tmp_path / "o.pth")
    assert not (tmp_path / "o.pth").exists()


def test_a_data_loader_of_another_name_is_not_the_model(tmp_path: Path) -> None:
    """What is in a file says what its name does not, where a checkpoint stands beside it."""
    state = net(3).state_dict()
    as_dcp({"model": dict(state)}, tmp_path / "run" / "actor")
    torch.save({"position": 3, "seed": torch.tensor(7), "generator": torch.get_rng_state()}, tmp_path / "run" / "d.pt")
    same(dict(state), dict(ckptfix.load_state_dict(tmp_path / "run")))
    torch.save(state, tmp_path / "run" / "d.pt")
    assert located(tmp_path / "run") == str(tmp_path / "run" / "d.pt")


@pytest.mark.parametrize(
    "message",
    [
        "OSError: Error no file named pytorch_model.bin, model.safetensors, tf_model.h5, model.ckpt.index or "
        "flax_model.msgpack found in directory run.",
        "OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory run.",
    ],
)
@pytest.mark.parametrize(("model", "id"), [("PEFT", "peft-adapter"), ("FSDP, sharded", "dcp-folder")])
def test_the_message_about_no_model_file(model: str, id: str, message: str, tmp_path: Path) -> None:
    folder, _ = made(tmp_path, model, "Trainer")
    done = ckptfix.doctor(folder, error=message)
    assert done.message is not None and id in done.message.explained
    assert done.cause is not None and done.cause.id == id and done.exit_code() == 0
    if id == "peft-adapter":
        name = "adapter_model.safetensors"
        assert done.sentence == f"{name} is a PEFT adapter of org/base, not a whole model"
        assert done.advice is not None and "PeftModel.from_pretrained" in done.advice
        assert ckptfix.doctor(folder / name, error=message).sentence == done.sentence


@pytest.mark.parametrize("text", ["", "[]", '{"base_model_name_or_path": 3}', "{" * 100_000, '{"base_model'])
def test_an_adapter_whose_configuration_says_nothing(text: str, tmp_path: Path) -> None:
    folder, _ = made(tmp_path, "PEFT", "nothing")
    (folder / "adapter_config.json").write_text(text)
    (row,) = [row for row in ckptfix.doctor(folder).findings if row.id == "peft-adapter"]
    assert row.message == "adapter_model.safetensors is a PEFT adapter, not a whole model"


def test_doctor_names_the_folders_that_it_did_not_look_at(tmp_path: Path) -> None:
    folder, state = made(tmp_path, "accelerate", "Trainer")
    (folder / "optimizer.pt").write_bytes(b"")
    as_safetensors(state, folder.parent / "step 7.fixed.safetensors")
    (folder.parent / "logs").mkdir()
    done = ckptfix.doctor(folder.parent)
    assert [(row.id, row.where, row.severity) for row in done.findings if row.severity != "info"] == [
        ("other-model", "step 7", "warning")
    ]
    assert "was not checked" in done.sentence


def test_names_of_no_trainer_say_nothing() -> None:
    for name in ("scheduler_notes.pt", "my_optimizer.pt", "model.pt", "data.pt", "rank_0.pt", "optimal.pt"):
        assert kind_of(name).role == "other", name

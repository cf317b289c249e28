"""Folders of files as trainers leave them: what each file is, and which one is the model."""

from __future__ import annotations

import json
from pathlib import Path

import builders
import pytest

import ckptfix
from ckptfix.errors import UnknownFormat
from ckptfix.formats import located
from ckptfix.formats.members import members

DATA = bytes(24)


def safetensors(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    builders.written(path, builders.safetensors([("module.fc.weight", "F32", (2, 3), DATA)], metadata={"format": "pt"}))


def folder(tmp_path: Path, names: str) -> str:
    for name in names.split():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
            safetensors(path)
        else:
            path.write_bytes(b"{}")
    return str(tmp_path / "run")


@pytest.mark.parametrize(
    ("names", "model"),
    [
        ("model.safetensors optimizer.pt scheduler.pt rng_state.pth training_args.bin", "model.safetensors"),
        ("model.safetensors optimizer.bin scheduler.bin random_states_0.pkl random_states_1.pkl", "model.safetensors"),
        ("pytorch_model.bin optimizer.bin optimizer_1.bin scaler.pt", "pytorch_model.bin"),
        ("pytorch_model.bin model.safetensors config.json", "model.safetensors"),
        ("adapter_model.safetensors adapter_config.json README.md", "adapter_model.safetensors"),
        ("diffusion_pytorch_model.safetensors config.json", "diffusion_pytorch_model.safetensors"),
        ("model.safetensors 1_Pooling/config.json 2_Dense/model.safetensors modules.json", "model.safetensors"),
        ("pytorch_model_fsdp.bin optimizer.bin", "pytorch_model_fsdp.bin"),
        ("weights-final.pth notes.txt", "weights-final.pth"),
        ("model.safetensors other.pth", "model.safetensors"),
        ("optimizer.pt", "optimizer.pt"),
        ("a.pth b.pth", None),
        ("model.safetensors model.fp16.safetensors", None),
        ("unet/diffusion_pytorch_model.safetensors vae/diffusion_pytorch_model.safetensors model_index.json", None),
        ("optimizer.pt scheduler.pt", None),
        ("notes.txt", None),
    ],
)  # fmt: skip
def test_which_file_is_the_model(tmp_path: Path, names: str, model: str | None) -> None:
    path = folder(tmp_path, names)
    assert located(path) == (path if model is None else str(Path(path, model)))


def test_commands_take_the_model_and_say_so(tmp_path: Path) -> None:
    path = folder(tmp_path, "model.safetensors optimizer.pt trainer_state.json")
    result = ckptfix.strip_module(path, tmp_path / "out.safetensors")
    assert result.lines[0] == f"read model.safetensors in {path}"
    assert [entry.key for entry in ckptfix.inspect(tmp_path / "out.safetensors").entries] == ["fc.weight"]
    assert list(ckptfix.load_state_dict(path, strip=None)) == ["module.fc.weight"]
    assert "model.safetensors, the model among the files of the folder" in ckptfix.doctor(path).looked_at[0]


def test_inspect_lists_the_files_beside_the_model(tmp_path: Path) -> None:
    path = folder(tmp_path, "model.safetensors optimizer.pt trainer_state.json odd.dat .hidden")
    found = ckptfix.inspect(path)
    assert [(member.name, member.role) for member in found.members] == [
        ("model.safetensors", "model"),
        ("odd.dat", "other"),
        ("optimizer.pt", "optimizer"),
        ("trainer_state.json", "beside"),
    ]
    assert found.tensors == 1
    assert "optimizer.pt: the optimizer's state" in str(found)
    json.dumps(found.as_dict())


def test_inspect_lists_a_folder_of_several_models(tmp_path: Path) -> None:
    path = folder(
        tmp_path, "unet/diffusion_pytorch_model.safetensors vae/diffusion_pytorch_model.safetensors a.pth b.pth"
    )
    found = ckptfix.inspect(path)
    assert found.format == "folder"
    assert [member.name for member in found.members if member.folder] == ["unet", "vae"]
    assert "name one of them" in str(found)


@pytest.mark.parametrize("verb", [ckptfix.strip_module, ckptfix.convert, ckptfix.to_cpu])
def test_several_models_are_asked_about(tmp_path: Path, verb: object) -> None:
    path = folder(tmp_path, "a.pth b.pth")
    with pytest.raises(UnknownFormat, match=r"a\.pth, b\.pth"):
        verb(path, tmp_path / "out.safetensors")  # type: ignore[operator]
    assert not (tmp_path / "out.safetensors").exists()


def test_a_folder_of_folders_names_one(tmp_path: Path) -> None:
    path = folder(tmp_path, "checkpoint-3/model.safetensors checkpoint-6/model.safetensors")
    with pytest.raises(UnknownFormat, match="checkpoint-3, checkpoint-6") as raised:
        ckptfix.convert(path, tmp_path / "out.pth")
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(f"name one of its folders: {path}/checkpoint-3; -r selects all of them")


def test_an_empty_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert members(str(tmp_path / "empty")) == ()
    with pytest.raises(UnknownFormat, match="an empty folder"):
        ckptfix.inspect(tmp_path / "empty")

"""Conversions between the three formats, read by torch and by safetensors."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from builders import torch_zip
from compare import assert_same, names_of, tensor_bytes
from kinds import CONTAINERS, DTYPES, KINDS, Kind, Net, cases, of_dtype, tensor
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix import errors

pytestmark = pytest.mark.slow

OTHER = {"zip": "legacy", "legacy": "zip"}


def load(path: Path, kind: Kind) -> Any:
    return torch.load(path, weights_only=kind.safe, map_location="cpu" if kind.tag else None)


def _both(kind: Kind) -> bool:
    return kind.name != "gone-classes" and kind.containers == CONTAINERS


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("kind", "container"), cases(_both))
def test_zip_and_legacy_hold_the_same_object(kind: Kind, container: Any, tmp_path: Path) -> None:
    source = kind.save(tmp_path / "in", container)
    there, back = tmp_path / "there", tmp_path / "back"
    ckptfix.convert(source, there, to=cast(Any, OTHER[container]))
    assert zipfile.is_zipfile(there) == (container == "legacy")
    assert_same(kind.make(), load(there, kind))
    ckptfix.convert(there, back, to=container)
    assert zipfile.is_zipfile(back) == (container == "zip")
    assert_same(kind.make(), load(back, kind))


@pytest.mark.parametrize("container", CONTAINERS)
def test_objects_of_classes_that_are_gone_are_kept(container: Any, tmp_path: Path) -> None:
    source = KINDS["gone-classes"].save(tmp_path / "in", container)
    ckptfix.convert(source, tmp_path / "there", to=cast(Any, OTHER[container]))
    ckptfix.convert(tmp_path / "there", tmp_path / "back", to=container)
    for name in ("there", "back"):
        before, after = ckptfix.open_checkpoint(source), ckptfix.open_checkpoint(tmp_path / name)
        assert [(entry.name, entry.shape) for entry in before.entries] == [
            (entry.name, entry.shape) for entry in after.entries
        ]
        assert list(before.values()) == list(after.values())
        assert ckptfix.diff(source, tmp_path / name).same


def _dense(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not (value.is_quantized or value.is_meta or value.is_nested)
        and value.layout == torch.strided
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.dtype not in (torch.complex128, torch.complex32)
    )


def _state_dicts(value: Any) -> list[dict[str, Any]]:
    found = []
    if isinstance(value, dict):
        if names_of(value):
            found.append(value)
        for key, item in value.items():
            found += [] if "optim" in str(key) else _state_dicts(item)
    if isinstance(value, list):
        found += [state for item in value for state in _state_dicts(item)]
    return found


def _one_plain_state_dict(kind: Kind) -> bool:
    return kind.name in {
        "bare", "state-dict", "data-parallel", "compiled", "nested", "sgd", "param-names", "optimizer-by-name",
        "parameters", "tied", "views", "small-view-of-large", "grad", "empty", "torch-values", "cuda", "conjugate",
        "one-tag-for-all", "mixed-devices", "no-checksums", "protocol-3", "protocol-4", "protocol-5", "many-frames",
    }  # fmt: skip


@pytest.mark.sampled(26)
@pytest.mark.parametrize(("kind", "container"), cases(_one_plain_state_dict))
def test_to_safetensors_and_back(kind: Kind, container: str, tmp_path: Path) -> None:
    source = kind.save(tmp_path / "in", container)
    (state,) = [one for one in _state_dicts(kind.make()) if all(map(_dense, one.values()))] or [
        {name: value for name, value in _state_dicts(kind.make())[0].items() if _dense(value)}
    ]
    middle, back = tmp_path / "m.safetensors", tmp_path / "back.pth"
    result = ckptfix.convert(source, middle)
    assert result.tensors == len(state) and not result.lost
    with safe_open(middle, "pt") as file:
        assert file.metadata()["format"] == "pt"
    held = load_file(middle)
    for name, value in state.items():
        if name in held:
            assert held[name].dtype == value.dtype and held[name].shape == value.shape, name
            assert tensor_bytes(held[name]) == tensor_bytes(value), name
    ckptfix.convert(middle, back)
    got = torch.load(back, weights_only=True, mmap=True)
    assert set(got) == set(state)
    for name, value in state.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert tensor_bytes(got[name]) == tensor_bytes(value), name
    for one in state:
        for two in state:
            tied = state[one].data_ptr() == state[two].data_ptr() != 0 and state[one].numel() == state[two].numel()
            if tied and state[one].is_contiguous() and state[two].is_contiguous():
                assert got[one].data_ptr() == got[two].data_ptr(), (one, two)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["quantized", "sparse", "meta"])
def test_what_safetensors_cannot_hold_is_refused_or_named(name: str, container: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    source = kind.save(tmp_path / "in", container)
    with pytest.raises(errors.WouldLoseData):
        ckptfix.convert(source, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    result = ckptfix.convert(source, tmp_path / "out.safetensors", drop_unsupported=True)
    odd = {key for key, value in kind.make().items() if not _dense(value)}
    assert result.exit_code == 3 and set(result.lost) == odd
    assert set(load_file(tmp_path / "out.safetensors")) == set(kind.make()) - odd


def test_every_dtype_that_safetensors_has(tmp_path: Path) -> None:
    source = KINDS["dtypes"].save(tmp_path / "in")
    result = ckptfix.convert(source, tmp_path / "out.safetensors", drop_unsupported=True)
    assert set(result.lost) == {"module.complex128", "module.complex32"}
    held = load_file(tmp_path / "out.safetensors")
    for name in DTYPES:
        if f"module.{name}" not in result.lost:
            assert held[f"module.{name}"].dtype == getattr(torch, name)
            assert tensor_bytes(held[f"module.{name}"]) == tensor_bytes(of_dtype(name)), name
    ckptfix.convert(tmp_path / "out.safetensors", tmp_path / "back.pth")
    for name, value in torch.load(tmp_path / "back.pth", weights_only=True).items():
        assert value.dtype == held[name].dtype and tensor_bytes(value) == tensor_bytes(held[name]), name


def test_a_dtype_that_torch_cannot_load_from_legacy_is_refused(tmp_path: Path) -> None:
    """torch.load of 2.13 fails on a legacy file with an untyped storage, as its own torch.save writes it."""
    source = KINDS["dtypes"].save(tmp_path / "in")
    with pytest.raises(errors.CkptfixError):
        ckptfix.convert(source, tmp_path / "out", to="legacy")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", CONTAINERS)
def test_from_a_file_of_safetensors_itself(to: Any, tmp_path: Path) -> None:
    state = {name: value.contiguous() for name, value in Net().state_dict().items()}
    save_file(state, tmp_path / "in.safetensors", metadata={"note": "kept", "format": "pt"})
    ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out", to=to)
    got = torch.load(tmp_path / "out", weights_only=True)
    assert {name: tensor_bytes(value) for name, value in got.items()} == {
        name: tensor_bytes(value) for name, value in state.items()
    }
    ckptfix.convert(tmp_path / "out", tmp_path / "back.safetensors")
    assert set(load_file(tmp_path / "back.safetensors")) == set(state)


def test_several_state_dicts_ask_for_at(tmp_path: Path) -> None:
    obj = {"generator": {"w": tensor(2)}, "critic": {"w": tensor(3)}}
    source = KINDS["bare"].save(tmp_path / "in", "zip", obj)
    with pytest.raises(errors.Refused):
        ckptfix.convert(source, tmp_path / "out.safetensors")
    result = ckptfix.convert(source, tmp_path / "out.safetensors", at="critic")
    assert load_file(tmp_path / "out.safetensors")["w"].shape == (3,)
    assert any("generator" in address for address in result.left)


def big_endian(path: Path, out: Path) -> Path:
    """The file `path` of storage-class-dtypes, as a big-endian machine would have saved it."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        swapped = {}
        for index, name in enumerate(DTYPES[:12]):
            item = getattr(torch, name).itemsize // (2 if name.startswith("complex") else 1)
            raw = archive.read(f"{root}/data/{index}")
            swapped[str(index)] = b"".join(raw[at : at + item][::-1] for at in range(0, len(raw), item))
        out.write_bytes(torch_zip(archive.read(f"{root}/data.pkl"), swapped, byteorder="big"))
    return out


def test_a_big_endian_file(tmp_path: Path) -> None:
    kind = KINDS["storage-class-dtypes"]
    source = big_endian(kind.save(tmp_path / "little"), tmp_path / "big")
    assert_same(kind.make(), torch.load(source, weights_only=True))
    ckptfix.strip_module(source, tmp_path / "stripped")
    got = torch.load(tmp_path / "stripped", weights_only=True)
    assert_same(kind.make(), got, rename=lambda key: key.removeprefix("module."))
    ckptfix.convert(source, tmp_path / "legacy", to="legacy")
    assert_same(kind.make(), torch.load(tmp_path / "legacy", weights_only=True))
    ckptfix.convert(source, tmp_path / "out.safetensors", drop_unsupported=True)
    for name, value in load_file(tmp_path / "out.safetensors").items():
        assert tensor_bytes(value) == tensor_bytes(kind.make()[name]), name
    assert ckptfix.diff(source, tmp_path / "little").same
    assert_same(kind.make(), dict(ckptfix.load_state_dict(source, strip=None)))


def test_a_raw_storage_is_kept_as_a_row_of_elements(tmp_path: Path) -> None:
    source = KINDS["raw-storage"].save(tmp_path / "in")
    ckptfix.convert(source, tmp_path / "out.safetensors")
    held = load_file(tmp_path / "out.safetensors")
    assert set(held) == {"module.w", "storage"}
    assert torch.equal(held["storage"], tensor(3))

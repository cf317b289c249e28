"""`ckptfix.load_state_dict` against torch.load, and single or multi saved x single or multi loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from kinds import CONTAINERS, KINDS, Kind, Net, cases, tensor
from torch import nn

import ckptfix

pytestmark = pytest.mark.slow


def _flat(kind: Kind) -> bool:
    return kind.name in {
        "bare", "state-dict", "data-parallel", "compiled", "parameters", "tied", "views", "grad", "empty",
        "dtypes", "storage-class-dtypes", "quantized", "sparse", "conjugate", "small-view-of-large", "cuda",
        "mixed-devices", "no-checksums", "data-parallel-of-module",
    }  # fmt: skip


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(("kind", "container"), cases(_flat))
def test_it_reads_what_torch_reads(kind: Kind, container: str, tmp_path: Path) -> None:
    source = kind.save(tmp_path / "in", container)
    wanted = torch.load(source, weights_only=True, map_location="cpu")
    got = ckptfix.load_state_dict(source, strip=None, map_location="cpu")
    for value in wanted.values():
        vars(value).clear()  # attributes of tensors are left out, as Module.load_state_dict ignores them
    assert_same(dict(wanted), dict(got))
    assert getattr(got, "_metadata", None) == getattr(wanted, "_metadata", None)


@pytest.mark.parametrize("container", [*CONTAINERS, "safetensors"])
@pytest.mark.parametrize("nested", [False, True], ids=["bare", "nested"])
@pytest.mark.parametrize("saved", ["single", "multi", "compiled"])
@pytest.mark.parametrize("loaded", ["single", "multi"])
def test_single_and_multi(saved: str, loaded: str, nested: bool, container: str, tmp_path: Path) -> None:
    wrap: dict[str, Any] = {"single": lambda model: model, "multi": nn.DataParallel, "compiled": torch.compile}
    state = wrap[saved](Net()).state_dict()
    obj = {"epoch": 1, "model_state_dict": state} if nested else state
    path = KINDS["bare"].save(tmp_path / "in.pth", "legacy" if container == "legacy" else "zip", obj)
    if container == "safetensors":
        ckptfix.convert(path, tmp_path / "in.safetensors")
        path = tmp_path / "in.safetensors"
    target = Net()
    for parameter in target.parameters():
        nn.init.zeros_(parameter)
    model = wrap[loaded](target)
    getattr(model, "module", model).load_state_dict(ckptfix.load_state_dict(path, map_location="cpu"), strict=True)
    for (name, value), wanted in zip(target.state_dict().items(), Net().state_dict().values(), strict=True):
        assert torch.equal(value, wanted), name


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_form_of_map_location(container: str, tmp_path: Path) -> None:
    source = KINDS["cuda"].save(tmp_path / "in", container)
    wanted = Net().state_dict()
    forms: list[Any] = ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, location: storage]
    for form in forms:
        got = ckptfix.load_state_dict(source, map_location=form)
        assert list(got) == list(wanted)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted), form


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_it_gives_is_private(container: str, tmp_path: Path) -> None:
    """Writing to a loaded tensor does not write to the file."""
    source = KINDS["bare"].save(tmp_path / "in", container)
    before = source.read_bytes()
    got = ckptfix.load_state_dict(source)
    got["w"].zero_()
    assert source.read_bytes() == before
    assert torch.equal(ckptfix.load_state_dict(source)["w"], tensor(3, 2))


@pytest.mark.parametrize("container", CONTAINERS)
def test_gone_classes_do_not_matter(container: str, tmp_path: Path) -> None:
    source = KINDS["gone-classes"].save(tmp_path / "in", container)
    got = ckptfix.load_state_dict(source)
    assert list(got) == ["w", "b"] and torch.equal(got["w"], tensor(2))

"""load_into: what torch cannot copy or assign, and damage, is found before anything is changed, and named."""

from __future__ import annotations

import errno
import threading
import weakref
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import tensor
from torch import nn

import ckptfix
from ckptfix import platform
from ckptfix.errors import CkptfixError, DamagedFile, LoadMismatch


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def holding(**values: torch.Tensor) -> Any:
    model: Any = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, value)
    return model


def quantized(dtype: torch.dtype = torch.qint8, channels: bool = False) -> torch.Tensor:
    if channels:
        return torch.quantize_per_channel(tensor(4, 4), torch.ones(4), torch.zeros(4), 0, dtype)
    return torch.quantize_per_tensor(tensor(4, 4), 0.5, 1, dtype)


EYE = torch.eye(4)
CASES: dict[str, tuple[Any, Any, str]] = {
    "compressed, other values": (torch.ones(4, 4).to_sparse_csr(), EYE.to_sparse_csr(), r"shape \[16\] in the file"),
    "compressed, from pairs": (EYE.to_sparse(), EYE.to_sparse_csr(), "sparse_coo in the file, sparse_csr in the model"),
    "pairs, from dense": (EYE, EYE.to_sparse(), "dense in the file, sparse_coo in the model"),
    "compressed, from dense": (EYE, EYE.to_sparse_csr(), "dense in the file, sparse_csr in the model"),
    "quantized, other dtype": (quantized(torch.quint8), quantized(), "quantized as quint8"),
    "quantized, other scheme": (quantized(channels=True), quantized(), "per_channel_affine in the file"),
    "quantized, from half": (tensor(4, 4).half(), quantized(), "where torch copies only float32"),
    "bits": (torch.zeros(4, dtype=torch.uint8).view(torch.bits8), torch.zeros(4), "bits8 in the file, float32 in"),
    "into bits": (torch.zeros(4), torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "float32 in the file, bits8 in"),
    "zeros without memory": (tensor(4), torch._efficientzerotensor(4), "a tensor of zeros without memory"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*deprecated")
@pytest.mark.parametrize("case", CASES)
def test_what_torch_cannot_copy(tmp_path: Path, case: str) -> None:
    given, held, why = CASES[case]
    path = saved(tmp_path / "a.pth", {"a": tensor(3), "b": given})
    model = holding(a=torch.zeros(3), b=held.clone() if "zeros" not in case else held)
    with pytest.raises(LoadMismatch, match=f"mismatched 1: b: .*{why}") as caught:
        ckptfix.load_into(model, path)
    assert caught.value.report is not None and not model.a.any()
    assert ckptfix.load_into(model, path, strict=False).loaded == ("a",)
    with pytest.raises(RuntimeError):
        model.load_state_dict(torch.load(path, weights_only=False))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_a_parameter_that_requires_gradients_takes_no_integers(tmp_path: Path, dtype: torch.dtype) -> None:
    path = saved(tmp_path / "a.pth", {"weight": torch.ones(2, 2, dtype=dtype), "bias": tensor(2)})
    model = nn.Linear(2, 2)
    with pytest.raises(LoadMismatch, match=r"weight: u?(int8|bool) in the file, a parameter that requires gradients"):
        ckptfix.load_into(model, path, assign=True)
    assert ckptfix.load_into(model.requires_grad_(False), path, assign=True).complete
    assert model.weight.dtype is dtype


def deflated(path: Path, record: str) -> Path:
    """`path` in deflated records, with a wrong checksum for one."""
    packed = path.with_name("packed.pth")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        row = next(row for row in new.infolist() if row.filename.endswith(f"data/{record}"))
    content = packed.read_bytes().replace(row.CRC.to_bytes(4, "little"), (row.CRC ^ 1).to_bytes(4, "little"))
    packed.write_bytes(content)
    return packed


@pytest.mark.parametrize("assign", [False, True])
def test_a_wrong_checksum_matters_only_if_it_is_compared(tmp_path: Path, assign: bool) -> None:
    trained, model = nn.Linear(40, 30), nn.Linear(40, 30)
    path = deflated(saved(tmp_path / "a.pth", trained.state_dict()), "1")
    with pytest.raises(DamagedFile, match="its checksum is"):
        ckptfix.load_into(model, path, assign=assign)
    ckptfix.load_into(model, path, assign=assign, verify=False)
    assert torch.equal(model.bias, trained.bias)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("assign", [False, True])
def test_a_damaged_copy_is_not_a_different_value(tmp_path: Path, assign: bool) -> None:
    value = tensor(3, 3)
    path = saved(tmp_path / "a.pth", {"a.weight": value, "b.weight": value.clone()})
    assert ckptfix.load_into(Tied(), path, assign=assign).complete
    content = path.read_bytes()
    raw = bytes(value.view(torch.uint8).numpy())
    at = content.rindex(raw)
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(DamagedFile, match=r"b\.weight"):
        ckptfix.load_into(Tied(), path, assign=assign)


def test_equal_copies_are_compared_without_memory_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = tensor(3, 3)
    path = saved(tmp_path / "a.pth", {"a.weight": value, "b.weight": value.clone()})
    made: list[str] = []
    once = ckptfix.loaders.tensors.TensorMaker.once

    def counted(self: Any, entry: Any) -> Any:
        made.append(entry.name)
        return once(self, entry)

    monkeypatch.setattr("ckptfix.loaders.tensors.TensorMaker.once", counted)
    ckptfix.load_into(Tied(), path)
    assert not made


def test_one_converted_tensor_is_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.pth", nn.Linear(5, 4).state_dict())
    held: list[weakref.ref[torch.Tensor]] = []
    once = ckptfix.loaders.tensors.TensorMaker.once

    def watched(self: Any, entry: Any) -> Any:
        assert not any(one() is not None for one in held)
        made = once(self, entry)
        held.append(weakref.ref(made))
        return made

    monkeypatch.setattr("ckptfix.loaders.tensors.TensorMaker.once", watched)
    ckptfix.load_into(nn.Linear(5, 4).double(), path)
    assert len(held) == 2


@pytest.mark.parametrize(
    ("weight", "why"), [(EYE.to_sparse(), "sparse in the file, a parameter without a shape"), (EYE * 1j, "complex in")]
)
def test_a_parameter_without_a_shape_takes_plain_real_tensors(tmp_path: Path, weight: torch.Tensor, why: str) -> None:
    path = saved(tmp_path / "a.pth", {"weight": weight, "bias": tensor(4)})
    model = nn.LazyLinear(4)
    with pytest.raises(LoadMismatch, match=why):
        ckptfix.load_into(model, path)
    assert nn.parameter.is_lazy(model.weight)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_unreadable_disk_names_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool, dtype: torch.dtype
) -> None:
    path = saved(tmp_path / "a.pth", nn.Linear(50, 40).state_dict())
    content = path.read_bytes()
    bias = content.index(bytes(torch.load(path)["bias"].view(torch.uint8).numpy()))
    fill = platform.fill_at

    def failing(fd: int, view: memoryview, offset: int) -> Any:
        if offset <= bias < offset + len(view) and len(view) < len(content) // 2:
            raise OSError(errno.EIO, "Input/output error")
        return fill(fd, view, offset)

    monkeypatch.setattr(platform, "fill_at", failing)
    with pytest.raises(CkptfixError, match="Input/output error") as caught:
        ckptfix.load_into(nn.Linear(50, 40, dtype=dtype), path, verify=verify)
    assert caught.value.where == "bias"


def test_a_failed_check_leaves_no_threads(tmp_path: Path) -> None:
    model: Any = nn.Sequential(*(nn.Linear(30, 30) for _ in range(30)))
    path = saved(tmp_path / "a.pth", model.state_dict())
    content = path.read_bytes()
    raw = bytes(model[0].weight.detach().view(torch.uint8).numpy())
    at = content.index(raw)
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    before = set(threading.enumerate())
    with pytest.raises(DamagedFile) as caught:
        ckptfix.load_into(model, path)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()
    assert caught.value.where == "0.weight"


def test_sparse_tensors_keep_their_device_beside_another_default(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"a": EYE.to_sparse(), "b": EYE.to_sparse_csr()})
    with torch.device("meta"):
        state = ckptfix.load_state_dict(path)
    assert all(torch.equal(value.to_dense(), EYE) for value in state.values())

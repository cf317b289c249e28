"""A rules file run forwards and backwards gives the file that it was, byte for byte."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptfix

LAYERS = [f"layers.{layer}.{part}" for layer in range(3) for part in ("norm", "q", "k", "v", "o")]


def drawn(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name.replace("_", "."): torch.randn(shape) for name, shape in shapes.items()}


def layers() -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.randn(4, 4) for name in LAYERS}


STATES = {
    "names": (layers, "layers.{n}.{*} -> h.{n}.{*}"),
    "concat": (layers, "layers.{n}.{q,k,v}.{*} -> layers.{n}.qkv.{*} | concat"),
    "names, concat, transpose": (
        layers,
        "layers.{n}.{q,k,v}.weight -> h.{n}.qkv.weight | concat | transpose\nlayers.{n}.{*} -> h.{n}.{*}",
    ),
    "split": (lambda: drawn(a_w=(3, 2), b_qkv=(12, 4), c_w=(2,)), "b.qkv -> b.{q,k,v} | split"),
    "stack": (lambda: drawn(e_0_w=(4, 3), e_1_w=(4, 3), e_2_w=(4, 3), z=(2,)), "e.{e}.w -> e.w | stack"),
    "unstack": (lambda: drawn(a=(1,), e_w=(3, 4, 3), z=(2,)), "e.w -> e.{e}.w | unstack"),
    "transpose": (lambda: drawn(a=(1,), w=(3, 4), z=(2,)), "w -> w.weight | transpose"),
    "permute": (lambda: drawn(a=(1,), w=(3, 4, 5), z=(2,)), "w -> w | permute dims=2,0,1"),
    "rope": (lambda: drawn(a=(1,), w=(8, 4), z=(2,)), "w -> x | rope heads=2 to=half"),
    "order": (lambda: drawn(a=(1,), w=(4, 6), z=(2,)), "w -> x | order dim=1 to=2,0,1"),
    "interleave": (lambda: drawn(q=(4, 3), k=(4, 3), v=(4, 3)), "{q,k,v} -> qkv | interleave groups=2"),
}


def there_and_back(tmp_path: Path, rules: str, suffix: str) -> bool:
    (tmp_path / "a.rules").write_text(f"{rules}\n")
    one, two, three = (tmp_path / f"{name}{suffix}" for name in ("mine", "between", "back"))
    ckptfix.rename(one, two, rules=tmp_path / "a.rules")
    assert one.read_bytes() != two.read_bytes()
    ckptfix.rename(two, three, rules=tmp_path / "a.rules", reverse=True)
    return one.read_bytes() == three.read_bytes()


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_state_dicts(tmp_path: Path, name: str, suffix: str) -> None:
    make, rules = STATES[name]
    save: Any = torch.save if suffix == ".pth" else save_file
    save(make(), tmp_path / f"mine{suffix}")
    assert there_and_back(tmp_path, rules, suffix)


def test_modules_with_numbers_and_their_optimizer(tmp_path: Path) -> None:
    """Their names are equal to the numbers of storages, and no memo entry of these."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.Linear(12, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "mine.pth")
    rules = "0.weight -> {q,k,v}.weight | split\n0.bias -> {q,k,v}.bias | split\n1.weight -> o.weight | transpose"
    assert there_and_back(tmp_path, rules, ".pth")


def test_tied_tensors_and_views(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    torch.save({"a": weight, "b": torch.randn(9, 4), "head": weight, "view": weight[:3]}, tmp_path / "mine.pth")
    assert there_and_back(tmp_path, "b -> b.{q,k,v} | split", ".pth")


@pytest.mark.parametrize("pairs", [None, {"format": "pt"}, {"zan": "1", "format": "pt", "author": "x"}])
def test_metadata_of_safetensors_stays_as_it_is(tmp_path: Path, pairs: dict[str, str] | None) -> None:
    save_file(drawn(b=(9, 4), a=(2,)), tmp_path / "mine.safetensors", pairs)
    assert there_and_back(tmp_path, "b -> b.{q,k,v} | split", ".safetensors")
    with (tmp_path / "between.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header.get("__metadata__") == pairs


def test_an_archive_of_an_old_torch_has_no_records_more(tmp_path: Path) -> None:
    """Before 2.1 there were no byteorder and no .format_version."""
    torch.save(drawn(b=(9, 4), a=(2,)), tmp_path / "new.pth")
    with zipfile.ZipFile(tmp_path / "new.pth") as new, zipfile.ZipFile(tmp_path / "mine.pth", "w") as old:
        for name in new.namelist():
            if name.partition("/")[2] in ("data.pkl", "version") or "/data/" in name:
                old.writestr(name.replace("new/", "archive/"), new.read(name))
    (tmp_path / "a.rules").write_text("b -> b.{q,k,v} | split\n")
    ckptfix.rename(tmp_path / "mine.pth", tmp_path / "out.pth", rules=tmp_path / "a.rules")
    with zipfile.ZipFile(tmp_path / "out.pth") as out:
        assert {name.partition("/")[2] for name in out.namelist() if "/data/" not in name} == {"data.pkl", "version"}
    assert sorted(torch.load(tmp_path / "out.pth", weights_only=True)) == ["a", "b.k", "b.q", "b.v"]

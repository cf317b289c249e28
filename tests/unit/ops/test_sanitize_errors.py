"""Rows of the catalogue of errors: torch fails with the row's message, and loads what sanitize or slim wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from builders import Op, Tensor, assemble, legacy, push, tensor_ops, torch_zip, written

from ckptfix.ops.sanitize import sanitize
from ckptfix.ops.slim import slim

RAW = bytes(8)


@pytest.fixture(params=["zip", "legacy"])
def container(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(path: Path, container: str, *items: Op) -> Path:
    """A file of a dict with one tensor ``w`` and what `items` push, keys and values by turns."""
    tensor = Tensor("0", (2,), 2, legacy=container == "legacy")
    ops: list[Op] = ["EMPTY_DICT", "MARK", *push("w"), *tensor_ops(tensor), *items, "SETITEMS", "STOP"]
    pickle = assemble(("PROTO", 2), *ops)
    return written(path, torch_zip(pickle, [RAW]) if container == "zip" else legacy(pickle, [("0", 2, RAW)]))


def plain(path: Path, **options: Any) -> Any:
    """What torch loads with weights_only=True after sanitize, which had no loss to name."""
    result = sanitize(path, path.with_name("out.pt"), **options)
    assert result.exit_code == 0
    found = torch.load(path.with_name("out.pt"), weights_only=True)
    assert found["w"].tolist() == [0.0, 0.0]
    return found


@pytest.mark.parametrize("name", ["numpy._core", "numpy.core"])
def test_row_3_unsupported_globals(tmp_path: Path, container: str, name: str) -> None:
    dtype: list[Op] = [("GLOBAL", "numpy", "dtype"), *push(("f8", False, True)), "REDUCE"]
    dtype += [*push((3, "<", None, None, None, -1, -1, 0)), "BUILD"]
    raw: list[Op] = [("GLOBAL", "_codecs", "encode"), *push(("\0" * 6 + "\xe0?", "latin1")), "REDUCE"]
    scalar: list[Op] = [("GLOBAL", f"{name}.multiarray", "scalar"), "MARK", *dtype, *raw, "TUPLE", "REDUCE"]
    path = made(tmp_path / "in.pt", container, *push("best"), *scalar)
    with pytest.raises(Exception, match=r"Weights only load failed(.|\n)*Unsupported global"):
        torch.load(path, weights_only=True)
    assert plain(path)["best"] == 0.5


def test_row_12_a_package_that_only_hyperparameters_need(tmp_path: Path, container: str) -> None:
    ops: list[Op] = [("GLOBAL", "pytorch_lightning.utilities.parsing", "AttributeDict"), "EMPTY_TUPLE", "NEWOBJ"]
    ops += ["MARK", *push("lr"), *push(0.1), *push("layers"), *push([1, 2]), "SETITEMS"]
    path = made(tmp_path / "in.pt", container, *push("hyper_parameters"), *ops)
    with pytest.raises(ModuleNotFoundError, match="No module named 'pytorch_lightning'"):
        torch.load(path, weights_only=False)
    assert plain(path)["hyper_parameters"] == {"lr": 0.1, "layers": [1, 2]}


def test_row_20_strings_of_python_2(tmp_path: Path, container: str) -> None:
    key: Op = ("SHORT_BINSTRING", "größe".encode("latin-1"))
    path = made(tmp_path / "in.pt", container, key, *push(3))
    with pytest.raises(UnicodeDecodeError, match="'ascii' codec can't decode"):
        torch.load(path, weights_only=False, encoding="ascii")
    assert plain(path)["größe"] == 3


@pytest.mark.parametrize("parts", [("C:\\", "runs", "a"), ("runs", "a")])
def test_row_25_paths_of_another_system(tmp_path: Path, container: str, parts: tuple[str, ...]) -> None:
    name = "PosixPath" if sys.platform == "win32" else "WindowsPath"
    ops: list[Op] = [("GLOBAL", "pathlib", name), *push(parts), "REDUCE"]
    path = made(tmp_path / "in.pt", container, *push("dir"), *ops)
    with pytest.raises(Exception, match=f"cannot instantiate '{name}'"):
        torch.load(path, weights_only=False)
    assert plain(path)["dir"] == ("C:\\runs\\a" if len(parts) == 3 else "runs\\a")


def test_row_30_a_view_drags_its_storage_along(tmp_path: Path, container: str) -> None:
    view = torch.zeros(100_000)[:2]
    path = tmp_path / "in.pt"
    torch.save({"w": view}, path, _use_new_zipfile_serialization=container == "zip")
    assert path.stat().st_size > 400_000
    slim(path, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").stat().st_size < 3_000
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["w"], view)


def test_row_29_the_optimizer_fills_the_memory(tmp_path: Path, container: str) -> None:
    model = torch.nn.Linear(50, 50)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 50)).sum().backward()
    optimizer.step()
    path = tmp_path / "in.pt"
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(held, path, _use_new_zipfile_serialization=container == "zip")
    slim(path, tmp_path / "out.pt", no_optimizer=True)
    assert (tmp_path / "out.pt").stat().st_size < path.stat().st_size / 2
    torch.nn.Linear(50, 50).load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True)["model"])


def test_row_39_calls_that_an_older_torch_lacks(
    tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "in.pt", tmp_path / "out.pt"
    held = {"w": torch.nn.Parameter(torch.arange(3.0)), "b": torch.ones(2)}
    held["w"].note = "an attribute"  # type: ignore[attr-defined]
    torch.save(held, path, _use_new_zipfile_serialization=container == "zip")
    for name in ("_rebuild_parameter_with_state", "_rebuild_tensor_v3"):
        monkeypatch.delattr(torch._utils, name)
    with pytest.raises(AttributeError, match="attribute '_rebuild_"):
        torch.load(path, weights_only=False)
    assert sanitize(path, out, torch="1.5").format == "legacy"
    found = torch.load(out, weights_only=False)
    assert found["w"].tolist() == [0, 1, 2] and found["b"].tolist() == [1, 1]


@pytest.mark.skipif(numpy.__version__ < "2", reason="NumPy 1 writes the old name")
def test_row_45_numpy_core_by_its_new_name(
    tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.pt"
    held = {"w": torch.zeros(2), "a": numpy.arange(3.0)}
    torch.save(held, path, _use_new_zipfile_serialization=container == "zip")
    for name in [name for name in sys.modules if name.startswith("numpy._core")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"numpy\._core"):
        torch.load(path, weights_only=False)
    assert plain(path)["a"].tolist() == [0, 1, 2]

"""Files as libraries write them whose weights are in no state dict of plain tensors: what doctor prints for them works.

Each command after ``Fix:`` is run as it is printed. It ends with 0 or 3, and torch.load(weights_only=True) reads what
it wrote.
"""

from __future__ import annotations

import shlex
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn
from torch.nn.utils import spectral_norm

import ckptfix
from ckptfix.cli import commands

FILES: dict[str, Callable[[Path], tuple[dict[str, Any], int]]] = {}
"""Name -> what writes the file and returns the tensors that its Fix has to keep, and how doctor exits."""


def file(write: Callable[[Path], tuple[dict[str, Any], int]]) -> Callable[[Path], tuple[dict[str, Any], int]]:
    FILES[write.__name__] = write
    return write


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).eval()


def weights() -> dict[str, Any]:
    return dict(net().state_dict())


def arrays(protocol: int = 2, dtype: str = "f4") -> dict[str, Any]:
    return {name: value.numpy().astype(dtype) for name, value in weights().items()}


@file
def arrays_at_a_key(path: Path) -> tuple[dict[str, Any], int]:
    torch.save({"model": arrays(), "__author__": "Caffe2"}, path)
    return weights(), 1


@file
def arrays_at_the_root(path: Path) -> tuple[dict[str, Any], int]:
    torch.save(arrays(dtype=">f8"), path, pickle_protocol=5)
    return {name: value.double() for name, value in weights().items()}, 1


@file
def arrays_beside_states_of_generators(path: Path) -> tuple[dict[str, Any], int]:
    torch.save({"blobs": arrays(), "iteration": np.int64(3), "rng": np.random.get_state()}, path)
    return weights(), 1


@file
def states_of_generators_alone(path: Path) -> tuple[dict[str, Any], int]:
    torch.save({"rng": np.random.get_state(), "lr": np.float64(0.1)}, path)
    return {}, 0


@file
def a_frozen_program(path: Path) -> tuple[dict[str, Any], int]:
    torch.jit.save(torch.jit.freeze(torch.jit.script(net())), path)
    return weights(), 0


@file
def a_program_without_tensors(path: Path) -> tuple[dict[str, Any], int]:
    torch.jit.save(torch.jit.script(Doubled()), path)
    return {}, 0


@file
def a_traced_module(path: Path) -> tuple[dict[str, Any], int]:
    torch.save(torch.fx.symbolic_trace(net()), path)
    return weights(), 1


@file
def a_traced_module_in_a_checkpoint(path: Path) -> tuple[dict[str, Any], int]:
    torch.save({"epoch": 3, "net": torch.fx.symbolic_trace(net())}, path)
    return weights(), 1


@file
def a_traced_module_without_tensors(path: Path) -> tuple[dict[str, Any], int]:
    torch.save(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())), path)
    return {}, 1


@file
def a_module_without_tensors(path: Path) -> tuple[dict[str, Any], int]:
    torch.save(nn.ReLU(), path)
    return {}, 1


def lazy() -> nn.Module:
    made = net()
    made.append(nn.LazyBatchNorm1d())
    return made


@file
def lazy_parameters(path: Path) -> tuple[dict[str, Any], int]:
    torch.save(lazy().state_dict(), path)
    return weights(), 1


@file
def a_lazy_module(path: Path) -> tuple[dict[str, Any], int]:
    torch.save(lazy(), path)
    return weights(), 1


@file
def a_lazy_module_and_nothing_else(path: Path) -> tuple[dict[str, Any], int]:
    torch.save(nn.LazyLinear(3), path)
    return {}, 1


def jagged() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    _ = made._max_seqlen, made._min_seqlen  # type: ignore[attr-defined]
    return made


def run(line: str) -> Result:
    return CliRunner().invoke(commands, shlex.split(line)[1:])


def plain(obj: Any) -> list[torch.Tensor]:
    """The tensors in what torch.load gives, in order."""
    if isinstance(obj, torch.Tensor):
        return [obj]
    parts = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, list | tuple) else ()
    return [tensor for part in parts for tensor in plain(part)]


@pytest.mark.parametrize("name", FILES)
def test_the_fix_that_doctor_prints_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept, code = FILES[name](Path("in.pth"))
    said = run("ckptfix doctor in.pth")
    assert said.exit_code == code, said.output
    fixes = [line.removeprefix("Fix: ") for line in said.output.splitlines() if line.startswith("Fix: ckptfix")]
    assert bool(fixes) or not kept
    for fix in fixes:
        done = run(fix)
        assert done.exit_code in (0, 3), f"{fix}: {done.output}"
    if kept:
        out = torch.load(Path(shlex.split(fixes[-1])[3]), weights_only=True)
        found = plain(out)
        for value in kept.values():
            assert any(torch.equal(value, one) for one in found if one.dtype == value.dtype), name


@pytest.mark.parametrize("name", FILES)
def test_what_was_fixed_is_found_well(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept, _ = FILES[name](Path("in.pth"))
    done = run("ckptfix fix in.pth out.pth")
    assert done.exit_code in ((0, 3) if kept else (0, 2, 3)), done.output
    if done.exit_code != 2 and Path("out.pth").exists() and kept:
        assert run("ckptfix doctor out.pth").exit_code == 0


def test_no_lazy_parameter_becomes_a_value_of_another_kind(tmp_path: Path) -> None:
    torch.save({"sd": lazy().state_dict(), "args": ckptfix_like()}, tmp_path / "in.pth")
    done = ckptfix.sanitize(tmp_path / "in.pth", tmp_path / "out.pth")
    assert done.exit_code == 3
    out = torch.load(tmp_path / "out.pth", weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in out["sd"].values())
    named = {finding.where for finding in done.findings}
    gone = lazy().state_dict().keys() - out["sd"].keys()
    assert gone and {f"sd/{name}" for name in gone} <= named


def ckptfix_like() -> Any:
    """Something else that weights_only=True refuses."""
    return np.float64(0.5)


def test_one_nested_tensor_does_not_stop_a_cast(tmp_path: Path) -> None:
    torch.save({"state_dict": {"n": jagged(), **weights()}}, tmp_path / "in.pth")
    done = ckptfix.cast(tmp_path / "in.pth", tmp_path / "out.pth", to="bfloat16")
    assert done.exit_code == 0
    assert "state_dict/n" in "\n".join(done.lines)
    found = torch.load(tmp_path / "out.pth", weights_only=False)["state_dict"]
    assert found["n"].dtype == torch.float32 and torch.equal(found["n"].values(), jagged().values())
    assert all(found[name].dtype == torch.bfloat16 for name in weights())


VERSIONS: tuple[Any, ...] = (
    {"version": 1, "spectral_norm": {"weight.version": 1}},
    {"version": 2, "list": [1, "a", None], "tuple": (1, (2.5, True)), "deep": {"a": {"b": {3: {"c": [{}]}}}}},
    {"version": 1, "set": {1, 2}, "bytes": b"\x00\xff", "empty": {}, "order": OrderedDict(b=1, a=2)},
    {},
)


@pytest.mark.parametrize("own", VERSIONS, ids=range(len(VERSIONS)))
@pytest.mark.parametrize("to", ["zip", "legacy"])
@pytest.mark.parametrize("at", [None, "model"])
def test_what_a_module_states_of_itself_keeps_its_structure(own: Any, to: str, at: str | None, tmp_path: Path) -> None:
    state: Any = OrderedDict(weights())
    state._metadata = OrderedDict([("", {"version": 1}), ("0", own)])
    source, out = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save(state if at is None else {at: state, "epoch": 3}, source)
    assert ckptfix.load_state_dict(source)._metadata == state._metadata  # type: ignore[attr-defined]
    ckptfix.extract(source, out, to=to)  # type: ignore[arg-type]
    assert torch.load(out, weights_only=False)._metadata == state._metadata
    ckptfix.convert(source, tmp_path / "whole.pth", to="legacy" if to == "legacy" else "zip")
    whole = torch.load(tmp_path / "whole.pth", weights_only=False)
    assert (whole if at is None else whole[at])._metadata == state._metadata


def load_by_torch(fresh: nn.Module, file: Path) -> None:
    fresh.load_state_dict(ckptfix.load_state_dict(file))


@pytest.mark.parametrize("to", ["zip", "legacy", "safetensors", "hf", "dcp"])
def test_a_model_with_a_spectral_norm_is_loaded_from_every_format(to: Any, tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(4, 5)), spectral_norm(nn.Conv2d(1, 2, 3), name="weight"))

    source, out = tmp_path / "in.pth", tmp_path / ("out.safetensors" if to == "safetensors" else "out")
    saved = model()
    torch.save(saved.state_dict(), source)
    ckptfix.convert(source, out, to=to)
    for file in (source, out):
        for load in (ckptfix.load_into, load_by_torch):
            fresh = model()
            load(fresh, file)
            for name, value in saved.state_dict().items():
                assert torch.equal(fresh.state_dict()[name], value), (to, name)


def test_the_prefix_of_a_lightning_module_is_named_beside_a_loss(tmp_path: Path) -> None:
    state = {"model.a.weight": torch.ones(2, 2), "model.a.bias": torch.ones(2), "criterion.weight": torch.ones(2)}
    run = {"pytorch-lightning_version": "2.0", "epoch": 1, "global_step": 1, "loops": {}, "state_dict": state}
    torch.save(run, tmp_path / "a.ckpt")
    said = CliRunner().invoke(commands, ["doctor", str(tmp_path / "a.ckpt")]).output
    options = "--strip-prefix model. --drop 'criterion.*'"
    assert f"2 of their 3 keys begin with model.; convert {options} removes it" in said
    out = tmp_path / "a.safetensors"
    done = CliRunner().invoke(commands, ["convert", str(tmp_path / "a.ckpt"), str(out), *shlex.split(options)])
    assert done.exit_code == 0
    assert {entry.key for entry in ckptfix.open_checkpoint(out).entries} == {"a.weight", "a.bias"}

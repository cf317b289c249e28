"""What every command does with a tensor of any kind: those of torch, and one that only the tests have (`toy_kind`)."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_kind
from click.testing import CliRunner

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import CkptfixError, Refused, WouldLoseData
from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch.tensors import KINDS


def values() -> torch.Tensor:
    return torch.arange(1.0, 7.0).reshape(2, 3)


MAKERS: dict[str, Callable[[float], Any]] = {
    "dense": lambda by: values() * by,
    "meta": lambda by: torch.empty(2, int(by), device="meta"),
    "nested": lambda by: torch.nested.nested_tensor([values()[0] * by, values()[1, :2]]),
    "quantized": lambda by: torch.quantize_per_tensor(values() * by, 0.5, 3, torch.qint8),
    "scaled": lambda by: toy_kind.Scaled(values(), by),
    "sparse": lambda by: (values() * by).to_sparse(),
}
"""Kind -> a tensor of it, other than that of another number."""

pytestmark = pytest.mark.parametrize("kind", MAKERS)


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    toy_kind.offer(monkeypatch)


def saved(path: Path, tensor: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"module.odd": tensor, "module.plain": values()}, path)
    return path


@pytest.fixture
def source(kind: str, tmp_path: Path) -> Path:
    return saved(tmp_path / "in.pth", MAKERS[kind](2.0))


def said(*words: object) -> tuple[int, Any]:
    """The exit code of a command and its JSON; fails for an error that is not one of ours."""
    done = CliRunner().invoke(commands, [*map(str, words), "--json"])
    assert "a bug in ckptfix" not in done.output, (words, done.output)
    return done.exit_code, json.loads(done.stdout.partition("\n")[0] or "null")


def test_it_is_listed_and_compared(kind: str, source: Path, tmp_path: Path) -> None:
    entry = open_checkpoint(source).entries[0]
    assert entry.kind == kind and KINDS[kind].name == kind
    (row,) = [row for row in said("inspect", source)[1]["entries"] if row["name"] == "module.odd"]
    assert row["kind"] == kind
    assert said("ls", source)[1]["tensors"] == 2
    assert not [row for row in said("doctor", source)[1]["findings"] if row["id"] in ("bad-tensor", "bad-call")]
    assert said("diff", source, source)[0] == (0 if entry.has_data else 1)
    assert said("diff", source, saved(tmp_path / "other.pth", MAKERS[kind](3.0)))[0] == 1
    listed = [said("digest", path)[1]["entries"] for path in tmp_path.iterdir()]
    digests = [{row["name"]: row["digest"] for row in rows} for rows in listed]
    if entry.has_data:
        assert len({rows["module.odd"] for rows in digests}) == 2
    assert len({rows["module.plain"] for rows in digests}) == 1
    assert said("stats", source)[0] in (0, 1)


def test_it_stays_itself_under_edits(kind: str, source: Path, tmp_path: Path) -> None:
    done = ckptfix.strip_module(source, tmp_path / "out.pth")
    assert (done.exit_code, done.account.lost) == (0, ())
    has_data = open_checkpoint(source).entries[0].has_data
    assert ckptfix.diff(source, tmp_path / "out.pth", strip=["module"]).same == has_data
    kept = ckptfix.select(source, tmp_path / "one.pth", keep=["module.odd"])
    assert kept.account.lost == () and open_checkpoint(tmp_path / "one.pth").entries[0].kind == kind
    assert ckptfix.repair(source, tmp_path / "saved.pth").kept == ("module.odd", "module.plain")
    assert ckptfix.diff(source, tmp_path / "saved.pth").same == has_data


def test_it_is_converted_or_refused_and_named(kind: str, source: Path, tmp_path: Path) -> None:
    if kind == "dense":
        assert ckptfix.convert(source, tmp_path / "out.safetensors").exit_code == 0
        return
    with pytest.raises(WouldLoseData, match=kind):
        ckptfix.convert(source, tmp_path / "out.safetensors")
    done = ckptfix.convert(source, tmp_path / "out.safetensors", drop_unsupported=True)
    assert (done.exit_code, done.lost) == (3, ("module.odd",))
    computed = KINDS[kind].computed
    try:
        ckptfix.convert(source, tmp_path / "out.pth", to="legacy")
    except CkptfixError as error:
        assert computed and computed in str(error)
    else:
        assert not computed and open_checkpoint(tmp_path / "out.pth").entries[0].kind == kind
    if KINDS[kind].codes:
        with pytest.raises(Refused):
            ckptfix.average([source, source], tmp_path / "mean.pth")


def test_it_is_loaded_or_refused(kind: str, source: Path) -> None:
    if KINDS[kind].load is None:
        with pytest.raises(CkptfixError, match="only its own library"):
            ckptfix.load_state_dict(source)
        return
    found, wanted = ckptfix.load_state_dict(source)["odd"], torch.load(source, weights_only=False)["module.odd"]
    assert found.layout == wanted.layout and found.dtype == wanted.dtype and found.shape == wanted.shape
    if kind != "meta":
        both = [value.dequantize() if value.is_quantized else value.to_dense() for value in (found, wanted)]
        assert torch.equal(*both)


def test_what_torch_cannot_build_is_found(kind: str, tmp_path: Path) -> None:
    if kind != "scaled":
        return  # for those of torch, see tests/unit/formats/test_failing_calls.py
    path = saved(tmp_path / "in.pth", MAKERS[kind](math.inf))
    assert "bad-call" in {row["id"] for row in said("doctor", path)[1]["findings"]}
    model = torch.nn.ParameterDict({"odd": torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.int8), False)})
    with pytest.raises(CkptfixError, match="integers in the model"):
        ckptfix.load_into(model, path, strict=False)

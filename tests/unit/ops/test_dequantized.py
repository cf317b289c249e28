"""--dequantized: diff, digest and stats of a quantized file by the plain weights that its codes stand for."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from quantized_files import BESIDE, FP8, fixtures, written

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import Refused
from ckptfix.formats import open_checkpoint
from ckptfix.ops.dequantize.table import DECODERS, REASONS
from ckptfix.ops.dequantize.view import as_plain

State = dict[str, torch.Tensor]


def saved(state: State, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    safetensors.torch.save_file(state, path, {"format": "pt"})
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, State]:
    """A model, the same model in fp8, and the weights that the fp8 stands for."""
    torch.manual_seed(0)
    plain: State = {"layers.0.norm.weight": torch.ones(32), "layers.1.norm.weight": torch.ones(32)}
    codes, made = dict(plain), dict(plain)
    for name in ("layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight"):
        weight = plain[name] = torch.randn(64, 32)
        scale = codes[f"{name}_scale"] = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
        codes[name] = (weight / scale.float()).to(FP8)
        made[name] = (codes[name].float() * scale.float()).bfloat16()
    return saved(plain, tmp_path / "plain.safetensors"), saved(codes, tmp_path / "fp8.safetensors"), made


def test_a_quantized_file_is_compared_with_its_original(pair: tuple[Path, Path, State]) -> None:
    plain, codes, made = pair
    found = ckptfix.diff(plain, codes, dequantized=True)
    assert not (found.only_a or found.only_b or found.renamed or found.notes)
    weights = safetensors.torch.load_file(plain)
    assert {row.name_a for row in found.changed} == {name for name in weights if "norm" not in name}
    for row in found.changed:
        apart = weights[row.name_a].double() - made[row.name_b].double()
        assert row.values is not None and row.values.max_abs == apart.abs().max().item()
        assert row.values.rel_l2 == pytest.approx((apart.norm() / made[row.name_b].double().norm()).item())
        assert [one.what for one in row.differences] == ["dtype"]


def test_digests_and_statistics_are_those_of_the_dequantized_file(pair: tuple[Path, Path, State]) -> None:
    _, codes, made = pair
    whole = codes.with_name("whole.safetensors")
    ckptfix.convert(codes, whole, dequantize=True)
    assert ckptfix.diff(codes, whole, dequantized=True).same
    done = ckptfix.digest(codes, check=whole, dequantized=True)
    assert done.check is not None and done.check.verified
    assert {row.name: row.digest for row in done.entries} == {
        row.name: row.digest for row in ckptfix.digest(whole).entries
    }
    manifest = codes.with_name("sums")
    ckptfix.digest(codes, manifest=manifest, dequantized=True)
    checked = ckptfix.digest(whole, check=manifest).check
    assert checked is not None and checked.verified
    found = {row.name: row.as_dict() for row in ckptfix.stats(codes, dequantized=True).rows}
    assert found == {row.name: row.as_dict() for row in ckptfix.stats(whole).rows}
    assert found["layers.0.q.weight"]["max"] == made["layers.0.q.weight"].max().item()
    (note,) = (row for row in ckptfix.stats(codes).findings if row.id == "quantized")
    assert " bits, " in note.message and " parameters)" in note.message


def test_both_files_may_be_quantized(pair: tuple[Path, Path, State]) -> None:
    _, codes, _ = pair
    other = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(codes).items()}
    other["layers.1.q.weight"][3, 4] = 448
    changed = saved(other, codes.with_name("other.safetensors"))
    (row,) = ckptfix.diff(codes, changed, dequantized=True).changed
    assert row.values is not None and (row.name_a, row.values.differing) == ("layers.1.q.weight", 1)
    assert row.values.max_abs is not None and row.values.max_abs > 0


def test_what_is_not_quantized_is_refused(pair: tuple[Path, Path, State]) -> None:
    plain, _, _ = pair
    for call in (
        lambda: ckptfix.diff(plain, plain, dequantized=True),
        lambda: ckptfix.stats(plain, dequantized=True),
        lambda: ckptfix.digest(plain, dequantized=True),
        lambda: ckptfix.digest(plain, whole_files=True, dequantized=True),
    ):
        with pytest.raises(Refused) as error:
            call()
        assert "--dequantized" in str(error.value.hint)


@pytest.mark.parametrize("row", fixtures(), ids=lambda row: row.scheme)
def test_every_scheme_is_computed_or_refused_by_name(tmp_path: Path, row: object) -> None:
    path = written({**row.tensors, **BESIDE}, tmp_path, "folder", row.method)  # type: ignore[attr-defined]
    try:
        (seen,) = as_plain(open_checkpoint(path / "model.safetensors"))
    except Refused as error:
        assert error.where in row.tensors  # type: ignore[attr-defined]
        known = REASONS.get(row.scheme)  # type: ignore[attr-defined]
        assert known is None or known in error.message
        return
    assert row.scheme in DECODERS  # type: ignore[attr-defined]
    assert all(entry.dtype in ("float32", "bfloat16", "float16") for entry in seen.entries)


def test_torchs_own_tensors(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 3, torch.quint8)
    torch.save({"fc.weight": tensor}, tmp_path / "q.pth")
    torch.save({"fc.weight": tensor.dequantize()}, tmp_path / "p.pth")
    assert ckptfix.diff(tmp_path / "q.pth", tmp_path / "p.pth", dequantized=True).same


def test_the_command_line(pair: tuple[Path, Path, State]) -> None:
    plain, codes, _ = map(str, pair)
    run = CliRunner().invoke(commands, ["diff", plain, codes, "--dequantized", "--by-layer"])
    assert run.exit_code == 1 and "layers.0 " in run.stdout and "norm.weight" not in run.stdout
    run = CliRunner().invoke(commands, ["diff", plain, codes, "--dequantized", "--json"])
    assert len(json.loads(run.stdout)["changed"]) == 3
    for verb in ("stats", "digest"):
        run = CliRunner().invoke(commands, [verb, codes, "--dequantized"])
        assert run.exit_code == 0 and "layers.0.q.weight" in run.stdout and "weight_scale" not in run.stdout
    run = CliRunner().invoke(commands, ["stats", codes])
    assert "--dequantized" in run.stderr


@pytest.mark.slow
def test_memory_does_not_grow_with_the_weight(tmp_path: Path) -> None:
    rows = 16384
    codes = torch.randint(0, 100, (rows, 2048), dtype=torch.uint8).view(FP8)
    path = saved({"l.weight": codes, "l.weight_scale": torch.rand(rows, 1)}, tmp_path / "m.safetensors")
    ckptfix.stats(path, dequantized=True)
    tracemalloc.start()
    ckptfix.stats(path, dequantized=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20  # the plain weight has 64 MiB

"""Codes of quantized weights: recognised in every format, kept as they are, and never computed with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from quantized_files import BESIDE, FP8, KINDS, ODD, PLAIN, Fixture, fixtures, written

import ckptfix
from ckptfix.browse.model.contents import read as read_contents
from ckptfix.browse.model.summary import summarise
from ckptfix.checkpoint import TensorEntry
from ckptfix.checkpoint.quantization import SCHEMES, UNKNOWN
from ckptfix.checkpoint.quantization_signs import FLOATS, has_signs
from ckptfix.errors import LoadMismatch, Refused
from ckptfix.formats import open_checkpoint
from ckptfix.git.text import text as git_text
from ckptfix.ops.histogram import distributions
from ckptfix.ops.quantized import codes_of, quantization_of

FIXTURES = fixtures()
IDS = [f"{number}-{row.scheme}" for number, row in enumerate(FIXTURES)]
TITLES = {scheme.id: scheme.title for scheme in SCHEMES}


def test_every_scheme_has_a_fixture() -> None:
    assert {row.scheme for row in FIXTURES} == set(TITLES)


def output(source: Path, folder: Path, name: str) -> Path:
    return folder / (name + source.suffix)


@pytest.mark.sampled(66)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", FIXTURES, ids=IDS)
def test_codes_are_said_and_not_computed_with(tmp_path: Path, row: Fixture, kind: str) -> None:
    title = TITLES[row.scheme]
    source = written({**row.tensors, **BESIDE}, tmp_path / "in", kind, row.method)
    (weight,) = quantization_of(open_checkpoint(ckptfix.formats.located(source))).weights
    assert (weight.scheme.id, weight.codes) == (row.scheme, row.codes)
    assert set(weight.names) == set(row.tensors)
    assert ckptfix.inspect(source).quantization == {title: 1}
    notes = [finding for finding in ckptfix.doctor(source).findings if finding.id == "quantized"]
    assert [(note.severity, note.where) for note in notes] == [("info", row.codes)] and title in notes[0].message

    for options in ({}, {"ema": 0.5}, {"weights": [1, 3]}):
        with pytest.raises(Refused) as average:
            ckptfix.average([source, source], output(source, tmp_path, "mean"), **options)
        assert average.value.where == row.codes and title in average.value.message

    for name in row.tensors:
        with pytest.raises(Refused) as cast:
            ckptfix.cast(source, output(source, tmp_path, "cast"), "float16", only=[name])
        assert cast.value.where == name and title in cast.value.message
    with pytest.raises(Refused) as cast:
        ckptfix.cast(source, output(source, tmp_path, "cast"), "float16")
    assert cast.value.where == row.codes and "leaves" in str(cast.value.hint)
    assert not output(source, tmp_path, "cast").exists() and not output(source, tmp_path, "mean").exists()

    done = ckptfix.cast(source, output(source, tmp_path, "cast"), "float16", keep=list(row.tensors))
    found = ckptfix.load_state_dict(done.dest)
    assert all(torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
               for name, tensor in row.tensors.items() if tensor.dim())  # fmt: skip
    assert {found[name].dtype for name in BESIDE} == {torch.float16}


@pytest.mark.parametrize("make", [
    lambda: torch.quantize_per_tensor(torch.rand(4, 4), 0.1, 0, torch.qint8),
    lambda: torch.quantize_per_channel(torch.rand(4, 4), torch.rand(4), torch.zeros(4), 0, torch.quint8),
])  # fmt: skip
def test_torchs_own_quantized_tensors_have_no_mean(tmp_path: Path, make: Any) -> None:
    source = written({"fc.weight": make(), **BESIDE}, tmp_path, "zip")
    with pytest.raises(Refused, match="quantized tensor") as refused:
        ckptfix.average([source, source], tmp_path / "mean.pth")
    assert refused.value.where == "fc.weight" and not (tmp_path / "mean.pth").exists()


@pytest.mark.parametrize("row", FIXTURES, ids=IDS)
def test_codes_have_no_statistics_and_no_distance(tmp_path: Path, row: Fixture) -> None:
    source = written({**row.tensors, **BESIDE}, tmp_path / "a", "folder", row.method)
    path, codes = source / "model.safetensors", row.tensors[row.codes]
    rows = {found.name: found for found in ckptfix.stats(source).rows}
    assert rows[row.codes].moments is None and TITLES[row.scheme] in str(rows[row.codes].reason)
    assert all(rows[name].moments is not None for name in BESIDE)
    packed = [name for name in row.tensors if name.endswith(("qzeros", "_packed", "_zero_point")) or name == row.codes]
    floats = {torch.float16, torch.bfloat16, torch.float32, FP8}
    assert all(rows[name].moments is None for name in packed if row.tensors[name].dtype not in floats)

    contents = read_contents(str(path))
    (entry,) = (item.entry for item in contents.items if item.name == row.codes)
    assert entry is not None
    assert TITLES[row.scheme] in str(summarise(contents, entry, lambda done, total: None).reason)
    (line,) = (line for line in git_text(str(path)).splitlines() if line.startswith(f"{row.codes}  "))
    assert "mean" not in line and "sha256" in line
    (drawn,) = distributions([(entry, None)], ("little", "little"), (codes_of(contents.checkpoint), {}))
    assert drawn.a is None and TITLES[row.scheme] in str(drawn.reason)

    other = codes.clone()
    other.view(torch.uint8).reshape(-1)[0] ^= 1
    changed = written({**row.tensors, row.codes: other, **BESIDE}, tmp_path / "b", "folder", row.method)
    (change,) = ckptfix.diff(source, changed).changed
    assert change.values is not None
    assert (change.values.differing, change.values.max_abs, change.values.cosine) == (1, None, None)
    assert row.codes in ckptfix.diff(source, changed).to_html()
    plain = written({row.codes: torch.rand(codes.shape), **BESIDE}, tmp_path / "c", "safetensors")
    (change,) = (found for found in ckptfix.diff(plain, source).changed if found.name_b == row.codes)
    assert change.values is not None
    assert TITLES[row.scheme] in str(change.values.reason) and change.values.max_abs is None


def test_statistics_stay_where_nothing_is_quantized(tmp_path: Path) -> None:
    for number, make in enumerate(PLAIN.values()):
        source = written({**make(), **BESIDE}, tmp_path / str(number), "safetensors")
        assert [found.name for found in ckptfix.stats(source).rows if found.moments is None and found.reason] == []


@pytest.mark.parametrize("row", FIXTURES, ids=IDS)
def test_the_hint_of_cast_works_as_printed(tmp_path: Path, row: Fixture) -> None:
    source = written({**row.tensors, **BESIDE}, tmp_path, "safetensors")
    with pytest.raises(Refused) as refused:
        ckptfix.cast(source, tmp_path / "out.safetensors", "float16")
    check_hint(source, refused.value)


def check_hint(source: Path, refused: Refused) -> None:
    """The options in a hint of cast cast what is beside the quantized weights."""
    options = shlex.split(str(refused.hint).partition(" leaves")[0])
    assert options and {*options[::2]} <= {"--keep", "--only"}
    globs: dict[str, Any] = {"keep": [], "only": []}
    for option, glob in zip(options[::2], options[1::2], strict=True):
        globs[option.removeprefix("--")].append(glob)
    done = ckptfix.cast(source, source.with_name("hinted" + source.suffix), "float16", **globs)
    assert set(done.cast) == set(BESIDE)


def test_the_hint_of_a_whole_model_is_short(tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = dict(BESIDE)
    for layer in range(3):
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            state[f"model.layers.{layer}.{name}_proj.weight"] = torch.rand(8, 8).to(FP8)
            state[f"model.layers.{layer}.{name}_proj.weight_scale"] = torch.rand(8, 1)
    source = written(state, tmp_path, "safetensors")
    with pytest.raises(Refused) as refused:
        ckptfix.cast(source, tmp_path / "out.safetensors", "float16")
    assert "42 such tensors" in refused.value.message
    check_hint(source, refused.value)


@pytest.mark.sampled(66)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", FIXTURES, ids=IDS)
def test_what_moves_stays_as_it_is(tmp_path: Path, row: Fixture, kind: str) -> None:
    source = written({**row.tensors, **BESIDE}, tmp_path / "in", kind, row.method)
    renamed = ckptfix.add_module(source, output(source, tmp_path, "renamed"), prefix="module")
    whole = {f"module.{name}": tensor for name, tensor in {**row.tensors, **BESIDE}.items()}
    check = ckptfix.digest(renamed.dest, check=source).check
    assert check is not None and len(check.moved) == len(whole) and check.verified
    one = ckptfix.select(source, output(source, tmp_path, "codes"), keep=[row.codes])
    assert list(ckptfix.load_state_dict(one.dest)) == [row.codes]
    there = ckptfix.convert(source, tmp_path / "there.pth")
    assert ckptfix.diff(source, there.dest).exit_code == 0
    assert not ckptfix.inspect(there.dest).quantization or ckptfix.inspect(there.dest).quantization == {
        TITLES[row.scheme]: 1
    }


def has_names_below_tensors(state: dict[str, torch.Tensor]) -> bool:
    """Tell whether a key begins with another one, as ``l.weight.SCB`` and ``l.weight``: no module has both."""
    return any(name.startswith(f"{other}.") for name in state for other in state)


class Holder(torch.nn.Module):
    """A model with one parameter or buffer of any name below a module."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            *path, leaf = name.split(".")
            inside: torch.nn.Module = self
            for part in path:
                if part not in dict(inside.named_children()):
                    inside.add_module(part, torch.nn.Module())
                inside = inside.get_submodule(part)
            inside.register_buffer(leaf, tensor)


@pytest.mark.sampled(66)
@pytest.mark.parametrize("row", FIXTURES, ids=IDS)
@pytest.mark.parametrize("kind", ["zip", "safetensors"])
def test_codes_are_loaded_as_codes_or_not_at_all(tmp_path: Path, row: Fixture, kind: str) -> None:
    if has_names_below_tensors(row.tensors):
        pytest.skip("no module has a tensor and a module of one name")
    source = written({**row.tensors, **BESIDE}, tmp_path, kind)
    quantized = Holder({name: torch.zeros_like(tensor) for name, tensor in {**row.tensors, **BESIDE}.items()})
    ckptfix.load_into(quantized, source)
    for name, tensor in row.tensors.items():
        found = quantized.get_buffer(name)
        assert found.dtype is tensor.dtype and torch.equal(found.to(torch.float64), tensor.to(torch.float64))
    shape = row.tensors[row.codes].shape
    for options in ({"strict": False}, {"strict": True}, {"strict": False, "assign": True}, {"allow_empty": True}):
        plain = Holder({row.codes: torch.full(shape, 7.0), **{name: torch.zeros(16) for name in BESIDE}})
        with pytest.raises(LoadMismatch) as error:
            ckptfix.load_into(plain, source, **options)  # type: ignore[arg-type]
        assert row.codes in error.value.message and TITLES[row.scheme] in error.value.message
        assert bool((plain.get_buffer(row.codes) == 7).all())


@pytest.mark.sampled(30)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLAIN)
def test_what_only_looks_like_codes(tmp_path: Path, name: str, kind: str) -> None:
    state = PLAIN[name]()
    source = written({**state, **BESIDE}, tmp_path / "in", kind)
    assert not ckptfix.inspect(source).quantization
    assert not [finding for finding in ckptfix.doctor(source).findings if finding.id == "quantized"]
    floating = {key for key, tensor in state.items() if tensor.is_floating_point()}
    stays = {key for key in floating if key.endswith(("running_mean", "running_var"))}
    done = ckptfix.cast(source, output(source, tmp_path, "cast"), "bfloat16")
    assert set(done.cast) == (floating - stays) | set(BESIDE)
    mean = ckptfix.average([source, source], output(source, tmp_path, "mean"))
    assert set(mean.averaged) == floating | set(BESIDE)
    if has_names_below_tensors(state):
        return
    other = Holder({key: torch.zeros(tensor.shape) for key, tensor in {**state, **BESIDE}.items()})
    assert ckptfix.load_into(other, source).done


@pytest.mark.parametrize("kind", ["zip", "safetensors"])
@pytest.mark.parametrize("name", ODD)
def test_codes_in_an_unknown_layout_are_not_computed_with(tmp_path: Path, name: str, kind: str) -> None:
    state = ODD[name]()
    source = written({**state, **BESIDE}, tmp_path / "in", kind)
    assert ckptfix.inspect(source).quantization == {UNKNOWN.title: 1}
    with pytest.raises(Refused) as average:
        ckptfix.average([source, source], output(source, tmp_path, "mean"))
    assert average.value.where == "l.weight" and UNKNOWN.title in average.value.message
    for key in state:
        with pytest.raises(Refused) as cast:
            ckptfix.cast(source, output(source, tmp_path, "cast"), "float16", only=[key])
        assert cast.value.where == key and UNKNOWN.title in cast.value.message
    plain = Holder({"l.weight": torch.full((8, 8), 7.0), **{key: torch.zeros(16) for key in BESIDE}})
    with pytest.raises(LoadMismatch) as error:
        ckptfix.load_into(plain, source, strict=False)
    assert "l.weight" in error.value.message and UNKNOWN.title in error.value.message
    assert bool((plain.get_buffer("l.weight") == 7).all())
    if has_names_below_tensors(state):
        return
    same = Holder({key: torch.zeros_like(tensor) for key, tensor in {**state, **BESIDE}.items()})
    assert ckptfix.load_into(same, source).done


def test_the_quantization_key_of_mlx(tmp_path: Path) -> None:
    """The scales of a shard are in another one."""
    codes = {"l.weight": torch.ones(8, 4, dtype=torch.int32).view(torch.uint32), "l.bias": torch.rand(8)}
    scales = {"l.scales": torch.rand(8, 2), "l.bias": torch.rand(8)}
    for number, state in enumerate((codes, scales)):
        for config in ({}, {"quantization": {"group_size": 64, "bits": 4}}, {"quantization": {"group_size": 64}}):
            folder = written(state, tmp_path / f"{number}{len(str(config))}", "folder")
            (folder / "config.json").write_text(json.dumps(config))
            roles = quantization_of(open_checkpoint(folder / "model.safetensors")).roles
            assert set(roles) == ({next(iter(state))} if "bits" in str(config) else set())


def test_a_config_says_what_names_alone_do_not(tmp_path: Path) -> None:
    """One shard of several has the codes, or the scales."""
    halves: dict[str, Any] = {
        "codes": {"l.weight": torch.rand(8, 8).to(FP8), "l.bias": torch.rand(8)},
        "scales": {"l.weight_scale_inv": torch.rand(1, 1), "l.bias": torch.rand(8)},
    }
    for name, state in halves.items():
        for method in (None, "fp8"):
            path = written(state, tmp_path / f"{name}{method}", "folder", method) / "model.safetensors"
            roles = quantization_of(open_checkpoint(path)).roles
            assert set(roles) == ({next(iter(state))} if method else set())


def test_a_broken_config_is_no_fault_of_the_weights(tmp_path: Path) -> None:
    state = {"l.weight": torch.rand(4, 4)}
    for text in ("{", "[]", '{"quantization_config": 3}', '{"quantization_config": {"quant_method": ["fp8"]}}', "\xff"):
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        assert not ckptfix.inspect(tmp_path / "model.safetensors").quantization


def test_codes_are_not_fused_without_their_scales(tmp_path: Path) -> None:
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    rest = {"layers.0.norm.weight": torch.rand(128), "layers.0.self_attn.o_proj.weight": torch.rand(128, 128)}
    target = {"layers.0.self_attn.qkv_proj.weight": torch.rand(384, 128), **rest}
    torch.save(target, tmp_path / "target.pth")
    plain = {name: torch.rand(128, 128) for name in names}
    torch.save({**plain, **rest}, tmp_path / "plain.pth")
    ckptfix.match(tmp_path / "plain.pth", tmp_path / "fused.pth", tmp_path / "target.pth", partial=True)
    assert "layers.0.self_attn.qkv_proj.weight" in torch.load(tmp_path / "fused.pth")
    codes = {name: tensor.to(FP8) for name, tensor in plain.items()}
    scales = {f"{name}_scale": torch.rand(1) for name in names}
    torch.save({**codes, **scales, **rest}, tmp_path / "codes.pth")
    with pytest.raises(Refused) as error:
        ckptfix.match(tmp_path / "codes.pth", tmp_path / "out.pth", tmp_path / "target.pth", partial=True)
    assert error.value.where in names and TITLES["fp8-scale"] in error.value.message
    rules = tmp_path / "rules.txt"
    rules.write_text("layers.{n}.self_attn.{q,k,v}_proj.weight -> layers.{n}.self_attn.qkv_proj.weight concat\n")
    assert not (tmp_path / "out.pth").exists()


def test_json_of_inspect_has_the_schemes(tmp_path: Path) -> None:
    row = FIXTURES[0]
    made = ckptfix.inspect(written(row.tensors, tmp_path, "safetensors")).as_dict()
    assert json.loads(json.dumps(made))["quantization"] == {TITLES[row.scheme]: 1}


def sharded(halves: list[dict[str, torch.Tensor]], folder: Path, kind: str, absent: int | None = None) -> list[Path]:
    """Shards with an index beside them, without a config.json; of the shard `absent` only the index knows."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    paths = [folder / f"{stem}-{at + 1:05}-of-{len(halves):05}.{suffix}" for at in range(len(halves))]
    for at, (state, path) in enumerate(zip(halves, paths, strict=True)):
        if at == absent:
            continue
        if kind == "safetensors":
            safetensors.torch.save_file({name: row.contiguous() for name, row in state.items()}, path)
        else:
            torch.save(state, path)
    names = {name: path.name for state, path in zip(halves, paths, strict=True) for name in state}
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return paths


@pytest.mark.sampled(66)
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("row", FIXTURES, ids=IDS)
def test_the_index_says_what_a_lone_shard_does_not(tmp_path: Path, row: Fixture, kind: str, absent: bool) -> None:
    """The scales are in another shard, which the index beside the file lists; that shard need not be there."""
    codes = {row.codes: row.tensors[row.codes], **BESIDE}
    scales = {name: tensor for name, tensor in row.tensors.items() if name != row.codes}
    shard, _ = sharded([codes, scales], tmp_path / "in", kind, absent=1 if absent else None)
    (weight,) = quantization_of(open_checkpoint(shard)).weights
    assert weight.codes == row.codes
    out = tmp_path / f"out.{kind}"
    with pytest.raises(Refused, match="quantized weight") as refused:
        ckptfix.average([shard, shard], out)
    assert refused.value.where == row.codes
    with pytest.raises(Refused, match="quantized weight"):
        ckptfix.cast(shard, out, "bfloat16")
    ckptfix.cast(shard, out, "bfloat16", keep=[row.codes])
    shape = row.tensors[row.codes].shape
    plain = Holder({row.codes: torch.full(shape, 7.0), **{name: torch.zeros(16) for name in BESIDE}})
    with pytest.raises(LoadMismatch, match="quantized weight"):
        ckptfix.load_into(plain, shard, strict=False)
    assert bool((plain.get_buffer(row.codes) == 7).all())


@pytest.mark.sampled(33)
@pytest.mark.parametrize("row", FIXTURES, ids=IDS)
def test_scales_in_a_lone_shard_belong_to_codes_in_another(tmp_path: Path, row: Fixture) -> None:
    codes = {row.codes: row.tensors[row.codes]}
    scales = {name: tensor for name, tensor in row.tensors.items() if name != row.codes}
    _, shard = sharded([codes, {**scales, **BESIDE}], tmp_path / "in", "safetensors")
    (weight,) = quantization_of(open_checkpoint(shard)).weights
    assert weight.codes is None and weight.names and set(weight.names) <= set(scales)
    with pytest.raises(Refused, match=TITLES[row.scheme].partition(" ")[0]):
        ckptfix.cast(shard, tmp_path / "out.safetensors", "float64", only=[weight.names[0]])
    ckptfix.cast(shard, tmp_path / "out.safetensors", "float64", keep=list(scales))


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_an_index_makes_no_codes_of_what_only_looks_like_them(tmp_path: Path, name: str, absent: bool) -> None:
    state = PLAIN[name]()
    for number, key in enumerate(state):
        halves = [{key: state[key]}, {other: state[other] for other in state if other != key}]
        shard, _ = sharded(halves, tmp_path / str(number), "safetensors", absent=1 if absent else None)
        assert not quantization_of(open_checkpoint(shard))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"l.weight": "../x"}}'])
def test_a_broken_index_is_no_fault_of_a_lone_shard(tmp_path: Path, text: str) -> None:
    shard, _ = sharded([{"l.weight": torch.rand(8, 8).to(FP8)}, {"l.weight_scale": torch.rand(1)}], tmp_path, "bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    assert not quantization_of(open_checkpoint(shard))


def test_a_shard_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    halves = [{"l.weight_scale": torch.rand(1)}, {"l.weight": torch.rand(8, 8).to(FP8)}]
    shard, other = sharded(halves, tmp_path / "in", "safetensors")
    assert quantization_of(open_checkpoint(shard))
    other.rename(tmp_path / "other.safetensors")
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(other.name, "../other.safetensors"))
    with patch("ckptfix.ops.quantized.open_checkpoint") as opened:
        assert not quantization_of(open_checkpoint(shard))
    assert not opened.called


def _nf4() -> dict[str, torch.Tensor]:
    about = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [16, 16]}
    return {
        "l.weight": torch.randint(0, 255, (128, 1), dtype=torch.uint8), "l.weight.absmax": torch.rand(4),
        "l.weight.quant_map": torch.linspace(-1, 1, 16),
        "l.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8),
    }  # fmt: skip


HEAD = "RuntimeError: Error(s) in loading state_dict for Net:\n\t"
UNEXPECTED = f'{HEAD}Unexpected key(s) in state_dict: "l.weight_scale_inv". '
MISMATCH = (f"{HEAD}size mismatch for l.weight: copying a param with shape torch.Size([128, 1]) from checkpoint, "
            "the shape in current model is torch.Size([16, 16]).")  # fmt: skip


ACCELERATE = ('ValueError: Trying to set a tensor of shape torch.Size([128, 1]) in "weight" (which has shape '
              "torch.Size([16, 16])), this looks incorrect.")  # fmt: skip


@pytest.mark.parametrize(("state", "error", "method", "library"), [
    ({"l.weight": torch.ones(8, 8).to(FP8), "l.weight_scale_inv": torch.ones(1, 1)}, UNEXPECTED, "fp8", "fp8"),
    (_nf4(), MISMATCH, "bitsandbytes", "bitsandbytes"),
    (_nf4(), ACCELERATE, "bitsandbytes", "bitsandbytes"),
])  # fmt: skip
def test_doctor_prints_the_command_that_helps_a_loader_without_the_scheme(
    tmp_path: Path, state: dict[str, torch.Tensor], error: str, method: str, library: str
) -> None:
    source = written({**state, **BESIDE}, tmp_path / "in", "safetensors")
    done = ckptfix.doctor(source, error=error)
    (row,) = (finding for finding in done.findings if finding.id == "quantized-keys")
    assert library in row.message and "config.json" in row.message and row.severity == "info"
    assert done.fix is not None and "--dequantize" in done.fix
    ckptfix.convert(source, tmp_path / "out.safetensors", dequantize=True)
    found = ckptfix.load_state_dict(tmp_path / "out.safetensors")
    assert found["l.weight"].shape == ((8, 8) if error == UNEXPECTED else (16, 16))
    assert set(found) == {"l.weight", *BESIDE}
    (source.parent / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    (row,) = (one for one in ckptfix.doctor(source, error=error).findings if one.id == "quantized-keys")
    assert f"names {method}" in row.message


def test_doctor_prints_no_command_that_would_be_refused(tmp_path: Path) -> None:
    (row,) = (row for row in FIXTURES if row.scheme == "eetq")
    source = written({**row.tensors, **BESIDE}, tmp_path, "safetensors")
    name = next(name for name in row.tensors if name.endswith("weight_scales"))
    done = ckptfix.doctor(source, error=UNEXPECTED.replace("l.weight_scale_inv", name))
    (finding,) = (one for one in done.findings if one.id == "quantized-keys")
    assert "eetq" in finding.message and done.fix is None


def a_tensor(key: str, dtype: str) -> TensorEntry:
    return TensorEntry(key, "", None, dtype, (2, 2), (2, 1))


def test_every_scheme_has_a_sign() -> None:
    for scheme in SCHEMES:
        stem = "a.b." if scheme.suffix else "a.b.weight"
        needed = [companion.name(stem) for companion in scheme.companions if companion.needed]
        assert any(has_signs([a_tensor(name, "float32")]) for name in needed), scheme.id
        # An index may list the companions in another shard, so codes that are no floats are signs too.
        for dtype in scheme.dtypes - FLOATS:
            names = [f"a.b.{name}" for name in scheme.last] or ["a.b.weight"]
            assert all(has_signs([a_tensor(name, dtype)]) for name in names), (scheme.id, dtype)


def test_an_ordinary_model_has_no_signs() -> None:
    assert not has_signs(a_tensor(key, dtype) for key, dtype in (
        ("layer1.0.conv1.weight", "float32"), ("layer1.0.bn1.num_batches_tracked", "int64"), ("h.0.attn.bias", "bool"),
        ("blocks.0.ls1.gamma", "bfloat16"), ("embeddings.position_ids", "int64"), ("relative_position_index", "int64"),
    ))  # fmt: skip

"""Views of every kind, through every format and chains of them: each verb has the values that torch has."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import safetensors.torch
import torch
from kinds import tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save as save_folder
from torch_versions import ALONE, SATURATES, is_saved

import ckptfix
from ckptfix.elements.arrays import TARGETS
from ckptfix.io.elements import NEGATED, Resolve

Tensors = dict[str, torch.Tensor]
View = Callable[[torch.Tensor], torch.Tensor]

SHAPES: dict[str, View] = {
    "whole": lambda base: base,
    "slice": lambda base: base[1:4],
    "step": lambda base: base[::3],
    "column": lambda base: base[:, 1],
    "transpose": lambda base: base.t(),
    "expand": lambda base: base[2].expand(3, 4),
    "flat": lambda base: base.view(-1),
    "reshape": lambda base: base.view(2, 3, 4),
    "permute": lambda base: base.view(2, 3, 4).permute(2, 0, 1),
    "scalar": lambda base: base[2, 1],
    "empty": lambda base: base[:0],
    "window": lambda base: base[1:5].as_strided((3, 4), (4, 1), 5),
}
LAZY: dict[str, View] = {
    "": lambda view: view,
    "neg": torch._neg_view,
    "conj": torch.conj,
    "conj neg": lambda view: torch._neg_view(view.conj()),
}


def views_of(base: torch.Tensor) -> Tensors:
    """Every view of one tensor with every mark that its dtype can have."""
    return {
        f"{shape} {lazy}".strip(): mark(view(base))
        for lazy, mark in LAZY.items()
        for shape, view in SHAPES.items()
        if base.is_complex() or "conj" not in lazy
    }


def bases() -> Iterator[tuple[str, Tensors]]:
    real, imaginary = tensor(6, 4), tensor(6, 4, seed=1)
    number = torch.complex(real, imaginary)
    yield "float32", views_of(real)
    yield "bfloat16", views_of(real.bfloat16())
    yield "float16", views_of(real.half())
    yield "int64", views_of(torch.arange(-12, 12).view(6, 4))
    yield "uint8", views_of(torch.arange(24, dtype=torch.uint8).view(6, 4))
    yield "complex64", views_of(number)
    # The imaginary part of a conjugate is how the negative bit comes about without anybody asking for it.
    yield "imaginary", {"whole": number.conj().imag, "slice": number.conj().imag[1:3], "t": number.mH.imag}
    yield "odd values", views_of(torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45] * 4).view(6, 4))


STATES = dict(bases())
FORMATS = ("zip", "legacy", "safetensors", "hf", "dcp")
CHAINS = [*permutations(FORMATS, 2), *permutations(FORMATS, 3)]
WRITTEN_AS = {"zip": "dcp", "legacy": "zip", "safetensors": "legacy", "hf": "dcp", "dcp": "zip"}
"""Where a chain begins -> what torch writes before it."""
Format = Literal["zip", "legacy", "safetensors", "hf", "dcp"]


def values(value: torch.Tensor) -> torch.Tensor:
    """What torch says that a tensor holds."""
    return value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def raw(value: torch.Tensor) -> bytes:
    return values(value).reshape(-1).view(torch.uint8).numpy().tobytes()


def digest_of(value: torch.Tensor) -> str:
    """The digest as the documentation defines it, computed without ckptfix."""
    sizes = ",".join(map(str, value.shape))
    head = f"ckptfix-tensor-1 {str(value.dtype).removeprefix('torch.')} {sizes}\n"
    return hashlib.sha256(head.encode() + raw(value)).hexdigest()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape, raw(one)) == (other.dtype, other.shape, raw(other))


def place(value: torch.Tensor) -> object:
    """Equal for names of one tensor."""
    where = value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride()
    return (*where, value.is_conj(), value.is_neg())


def save(path: Path, state: Tensors, source: str) -> Path:
    if source == "dcp":
        save_folder(cast(Any, state), checkpoint_id=path, **ALONE)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=source == "zip")
    return path


def read_by_torch(path: Path, format: str, spare: Path) -> Tensors:
    """The tensors as the library of a format reads them; without second names, of formats that have none."""
    if format == "safetensors":
        return safetensors.torch.load_file(path)
    if format == "hf":
        parts = [safetensors.torch.load_file(file) for file in path.glob("*.safetensors")]
        return {name: value for part in parts for name, value in part.items()}
    if format == "dcp":
        dcp_to_torch_save(path, spare)
        path = spare
    return cast(Tensors, torch.load(path))


def check(path: Path, format: str, state: Tensors, spare: Path) -> None:
    """Ask everybody who reads elements."""
    loaded = read_by_torch(path, format, spare)
    if format not in ("safetensors", "hf"):
        assert sorted(loaded) == sorted(state)  # shards do not state an order
    assert all(equal(value, state[name]) for name, value in loaded.items())
    own = ckptfix.load_state_dict(path)
    assert sorted(own) == sorted(state)
    assert all(equal(own[name], value) for name, value in state.items())
    digests = {row.name: row.digest for row in ckptfix.digest(path).entries}
    assert digests == {name: digest_of(value) for name, value in state.items()}
    for row in ckptfix.stats(path).rows:
        truth = values(state[row.name])
        assert row.moments is not None
        finite = truth[torch.isfinite(truth)].to(torch.complex128 if truth.is_complex() else torch.float64)
        counts = row.moments.elements, row.moments.nan, row.moments.finite
        assert counts == (truth.numel(), int(truth.isnan().sum()), finite.numel())
        if finite.numel():
            assert row.moments.mean_value == pytest.approx(finite.mean().item(), rel=1e-6, abs=1e-9)
        if finite.numel() and not truth.is_complex():
            assert (row.moments.low, row.moments.high) == (finite.min().item(), finite.max().item())


@pytest.mark.slow
@pytest.mark.parametrize("source", ["zip", "legacy", "dcp"])
@pytest.mark.parametrize("name", STATES)
def test_what_torch_wrote(name: str, source: str, tmp_path: Path) -> None:
    check(save(tmp_path / "in", STATES[name], source), source, STATES[name], tmp_path / "spare")


class Conversions:
    """A state saved by torch, converted along chains; a beginning that several chains share is done once.

    Args:
        folder: an empty one.
        state: the state, in which a tensor has a second name.
    """

    def __init__(self, folder: Path, state: Tensors) -> None:
        self.folder = folder
        self.state = {**state, "second name": state["slice"]}
        self.made: dict[tuple[str, ...], Path] = {}

    def first(self, source: str) -> Path:
        if (source,) not in self.made:
            self.made[source,] = save(self.folder / source, self.state, source)
        return self.made[source,]

    def last(self, source: str, *chain: Format) -> Path:
        if not chain:
            return self.first(source)
        if (source, *chain) not in self.made:
            *before, format = chain
            suffix = {"safetensors": ".safetensors", "zip": ".pth", "legacy": ".pth"}.get(format, "")
            dest = self.folder / f"{'-'.join((source, *chain))}{suffix}"
            # Views and what they are views of stand in several files.
            size = 300 if format == "hf" else None
            result = ckptfix.convert(self.last(source, *before), dest, to=format, shard_size=size)
            assert (result.exit_code, result.lost, result.left) == (0, (), ()), result
            self.made[source, *chain] = dest
        return self.made[source, *chain]


@pytest.fixture(scope="module")
def conversions(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversions]:
    """Those of the state `name`."""
    folder = tmp_path_factory.mktemp("conversions")
    yield Conversions(folder, STATES[name])
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.sampled(24, test_all=80)
@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
@pytest.mark.parametrize("name", STATES, scope="module")
def test_chains_of_conversions_lose_nothing_and_keep_all_values(
    name: str, chain: tuple[Format, ...], conversions: Conversions, tmp_path: Path
) -> None:
    source = WRITTEN_AS[chain[0]]
    first, path = conversions.first(source), conversions.last(source, *chain)
    digest = ckptfix.digest(path, check=first)
    assert digest.check is not None and digest.check.verified, digest
    assert all(change.values is None for change in ckptfix.diff(first, path).changed)
    check(path, chain[-1], conversions.state, tmp_path / "spare")


def in_big_endian(path: Path, made: Path, unit: int) -> Path:
    """The zip of torch at `path` as a machine of the other byte order writes it."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(made, "w") as out:
        for info in source.infolist():
            data = source.read(info)
            if info.filename.endswith("/byteorder"):
                data = b"big"
            elif "/data/" in info.filename:
                data = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, unit).flip(1).numpy().tobytes()
            out.writestr(info.filename, data)
    return made


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", STATES)
def test_big_endian_files(name: str, format: Format, tmp_path: Path) -> None:
    state = STATES[name]
    value = state["whole"]
    unit = value.element_size() // (1 + value.is_complex())
    first = in_big_endian(save(tmp_path / "little", state, "zip"), tmp_path / "in.pth", unit)
    check(first, "zip", state, tmp_path / "spare")
    if format == "zip":
        return  # it is one, and is copied as it is
    dest = tmp_path / f"out{'.safetensors' if format == 'safetensors' else ''}"
    result = ckptfix.convert(first, dest, to=format)
    assert (result.exit_code, result.lost, result.left) == (0, (), ())
    check(dest, format, state, tmp_path / "spare")


@pytest.mark.sampled(3, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_other_values_are_seen_whatever_the_bytes_are(name: str, tmp_path: Path) -> None:
    """Each view against itself with other marks, whose bytes are the same and whose values are not."""
    path, other = tmp_path / "a.pth", tmp_path / "b.pth"
    state = STATES[name]
    torch.save(state, path)
    for key, value in state.items():
        wrong = value.conj() if value.is_complex() and not value.is_neg() else torch._neg_view(value)
        same = equal(wrong, value)
        torch.save({**state, key: wrong}, other)
        digest = ckptfix.digest(other, check=path).check
        assert digest is not None
        assert digest.verified == same
        if not same:
            assert key in {*digest.changed, *digest.missing, *(row.new for row in digest.moved)}
        changed = [row.name_a for row in ckptfix.diff(path, other).changed if row.values is not None]
        assert changed == ([] if torch.equal(values(wrong).nan_to_num(), values(value).nan_to_num()) else [key])


@pytest.mark.parametrize("name", STATES)
def test_names_of_one_tensor_are_those_with_its_values(name: str, tmp_path: Path) -> None:
    state = {**STATES[name], "second name of whole": STATES[name]["whole"]}
    path = tmp_path / "a.pth"
    torch.save(state, path)
    tied = [row.message for row in ckptfix.doctor(path).findings if row.id == "tied-tensors"]
    pairs = {
        frozenset(pair) for pair in combinations(state, 2)
        if state[pair[0]].numel() and place(state[pair[0]]) == place(state[pair[1]])
    }  # fmt: skip
    assert pairs == {frozenset(("whole", "second name of whole"))}
    (message,) = tied
    names = message.partition(": ")[2].split(" = ")
    assert frozenset(names) in pairs


@pytest.mark.sampled(5, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STATES if STATES[name]["whole"].is_floating_point()] + ["complex64"])
@pytest.mark.parametrize("alike", [True, False], ids=["same views", "resolved in one"])
def test_a_mean_is_of_values(name: str, alike: bool, tmp_path: Path) -> None:
    one = STATES[name]
    scaled = {key: value if alike else values(value) for key, value in one.items()}
    torch.save(one, tmp_path / "a.pth")
    torch.save(scaled, tmp_path / "b.pth")
    third = {key: values(value) * 3 for key, value in one.items()}
    torch.save(third, tmp_path / "c.pth")
    for files in (("a", "b"), ("b", "a"), ("a", "b", "c"), ("c", "b", "a")):
        made = tmp_path / f"{'-'.join(files)}.pth"
        result = ckptfix.average([tmp_path / f"{file}.pth" for file in files], made)
        assert result.exit_code == 0
        wide = torch.complex128 if one["whole"].is_complex() else torch.float64
        states = {"a": one, "b": scaled, "c": third}
        for key, value in torch.load(made).items():
            truth = sum(values(states[file][key]).to(wide) for file in files) / len(files)
            expected = cast(torch.Tensor, truth).to(value.dtype)
            assert torch.allclose(values(value), expected, rtol=1e-7, atol=0, equal_nan=True), (key, files)


@pytest.mark.sampled(1_000)
@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "odd values"])
def test_a_cast_is_of_values(name: str, to: str, tmp_path: Path) -> None:
    if not is_saved(to) or ("fn" in to and not SATURATES):
        pytest.skip("this torch rounds to fp8 in another way than torch 2.13, or not at all")
    state = STATES[name]
    torch.save(state, tmp_path / "a.pth")
    result = ckptfix.cast(tmp_path / "a.pth", tmp_path / "b.pth", to)
    assert result.exit_code == 0
    for key, value in torch.load(tmp_path / "b.pth").items():
        wanted = values(state[key]).to(getattr(torch, to))
        assert torch.equal(wanted.float().isnan(), values(value).float().isnan()), key
        assert torch.equal(wanted.float().nan_to_num(), values(value).float().nan_to_num()), key


@pytest.mark.parametrize("name", STATES)
def test_doctors_fix_of_views_that_overlap_runs_as_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"a": STATES[name]["whole"], "b": torch._neg_view(STATES[name]["whole"])}
    torch.save(state, "a.pth")
    shared = [row for row in ckptfix.doctor("a.pth").findings if row.id == "shared-memory"]
    assert shared
    assert ckptfix.convert("a.pth", "a.safetensors").exit_code == 0
    loaded = safetensors.torch.load_file("a.safetensors")
    assert all(equal(value, state[key]) for key, value in loaded.items())
    assert sorted(loaded) == ["a", "b"]
    assert "ckptfix.views" not in json.dumps(ckptfix.inspect("a.safetensors").as_dict())


@pytest.mark.parametrize("byteorder", ["little", "big"])
@pytest.mark.parametrize("dtype", [*sorted(NEGATED), "complex64", "complex128"])
def test_marks_are_resolved_as_torch_does(dtype: str, byteorder: str) -> None:
    from ckptfix.checkpoint import dtypes

    row = dtypes.by_name(dtype)
    value = torch.randint(0, 256, (64 * row.itemsize,), dtype=torch.uint8).view(getattr(torch, dtype))

    def turned(data: bytes) -> bytes:
        units = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, row.unit)
        return (units.flip(1) if byteorder == "big" else units).contiguous().numpy().tobytes()

    for lazy, mark in LAZY.items():
        if lazy and (value.is_complex() or "conj" not in lazy):
            made = Resolve(row, tuple(lazy.split()), byteorder)(turned(raw(value)))
            got = torch.frombuffer(bytearray(turned(made)), dtype=value.dtype)
            # torch goes through float32 for a half, which makes another NaN of a NaN.
            assert torch.equal(values(mark(value)).isnan(), got.isnan())
            keep = ~got.isnan()
            assert raw(values(mark(value))[keep]) == raw(got[keep])

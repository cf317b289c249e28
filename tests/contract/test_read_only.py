"""What every format must do that is read, and neither edited nor written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import tensor_bytes
from contract.samples import SAMPLES
from contract.test_contract import _bytes_read, made, state_of
from kinds import tensor
from ranges import read_exact

import ckptfix
from ckptfix import errors
from ckptfix.checkpoint import ByteRange
from ckptfix.formats import FORMATS, detect, open_checkpoint
from ckptfix.formats.target import target_format

NAMES = [name for name in SAMPLES if not FORMATS[name].writes]
WRITTEN = [name for name in SAMPLES if FORMATS[name].writes]

pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".txt", ".zip", ""])
def test_it_is_found_by_content(name: str, suffix: str, tmp_path: Path) -> None:
    path = made(name, tmp_path).rename(tmp_path / f"other{suffix}")
    assert name == detect(path).name
    head = path.read_bytes()[:4096]
    assert [one for one, format in FORMATS.items() if format.score(str(path), head, path.stat().st_size)] == [name]


def test_entries_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    wanted = SAMPLES[name].load(path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == name and checkpoint.size == path.stat().st_size
    assert [entry.key for entry in checkpoint.entries] == list(wanted)
    for entry in checkpoint.entries:
        value = wanted[entry.key]
        assert (entry.at, entry.dtype, entry.kind) == ("", str(value.dtype).removeprefix("torch."), "dense")
        assert (entry.shape, entry.stride, entry.offset) == (
            tuple(value.shape), value.stride(), value.storage_offset()
        )  # fmt: skip
        assert entry.requires_grad == value.requires_grad and entry.location == "cpu"
        assert entry.storage is not None and entry.storage.nbytes == value.untyped_storage().nbytes()
        assert isinstance(entry.storage.data, ByteRange) and entry.storage.data.path == str(path)
        if entry.is_contiguous:
            assert read_exact(entry.data) == tensor_bytes(value), entry.key


@pytest.mark.parametrize("to", WRITTEN)
def test_a_conversion_has_the_same_values(name: str, to: Any, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    out = tmp_path / f"out{SAMPLES[to].suffix}"
    result = ckptfix.convert(path, out, to=to)
    wanted, got = SAMPLES[name].load(path), SAMPLES[to].load(out)
    assert result.exit_code == 0 and not result.account.lost and set(got) == set(wanted)
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype and got[key].shape == value.shape
        assert tensor_bytes(got[key]) == tensor_bytes(value), key
    assert ckptfix.diff(path, out).exit_code == 0


def test_it_is_loaded_like_the_converted_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    path = made(name, tmp_path, dict(model.state_dict()))
    other = torch.nn.Linear(4, 3)
    ckptfix.load_into(other, path)
    loaded = ckptfix.load_state_dict(path)
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value) and torch.equal(loaded[key], value)
    ckptfix.extract(path, tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["weight"], model.weight)


def test_listing_reads_no_tensor_bytes(name: str, tmp_path: Path) -> None:
    for count in (2, 5_000_000):  # the first run imports what is imported lazily
        path = made(name, tmp_path, {"module.w": torch.zeros(count), "module.v": torch.zeros(count)})
        before = _bytes_read()
        checkpoint = open_checkpoint(path)
        assert len(checkpoint.entries) == 2 and list(checkpoint.values()) == []
        list(FORMATS[name].check(str(path)))
        read = _bytes_read() - before
    assert read < SAMPLES[name].ahead


def test_a_conversion_copies_ranges(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path, {"w": torch.zeros(100_000), "v": torch.zeros(100_000)})
    (file,) = ckptfix.convert(path, tmp_path / "out.pth", dry_run=True).plan.files
    assert sum(segment.length for segment in file.segments if isinstance(segment, ByteRange)) == 800_000
    assert sum(len(segment) for segment in file.segments if isinstance(segment, bytes)) < 10_000


EDITS: dict[str, Callable[..., Any]] = {
    "strip_module": ckptfix.strip_module,
    "add_module": ckptfix.add_module,
    "unwrap": ckptfix.unwrap,
    "to_cpu": ckptfix.to_cpu,
    "slim": ckptfix.slim,
    "rename": lambda path, out: ckptfix.rename(path, out, subs=[("module", "m")]),
    "map_location": lambda path, out: ckptfix.map_location(path, out, "cuda:1"),
    "match": lambda path, out: ckptfix.match(path, out, like=path),
}


@pytest.mark.parametrize("verb", EDITS)
@pytest.mark.parametrize("out", ["out.pth", "out.data"])
def test_an_edit_of_it_is_a_torch_zip(name: str, verb: str, out: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    before = path.read_bytes()
    result = EDITS[verb](path, tmp_path / out)
    assert result.format == detect(tmp_path / out).name == "zip"
    assert f"input: {FORMATS[name].title}; output: PyTorch zip" in result.lines
    assert len(torch.load(tmp_path / out, "cpu", weights_only=True)) == len(SAMPLES[name].load(path))
    assert path.read_bytes() == before and set(tmp_path.iterdir()) == {path, tmp_path / out}


def test_it_is_not_edited_in_place(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    before = path.read_bytes()
    with pytest.raises(errors.Unsupported, match="does not write it") as caught:
        ckptfix.strip_module(path, in_place=True)
    assert caught.value.path == str(path) and "name an output" in str(caught.value.hint)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_it_is_not_written(name: Any, tmp_path: Path) -> None:
    path = made("zip", tmp_path)
    with pytest.raises(errors.Unsupported, match=f"ckptfix reads the format {name}, but does not write it") as caught:
        ckptfix.convert(path, tmp_path / "out", to=name)
    assert caught.value.hint == f"formats are {', '.join(one for one, format in FORMATS.items() if format.writes)}"
    with pytest.raises(errors.Unsupported, match="read but not written"):
        FORMATS[name].plan_write(open_checkpoint(path).entries, str(tmp_path / "out"))
    assert all(target_format("in", f"out{suffix}", None) != name for suffix in (".pth", ".pt", ".tar", ".bin"))


def test_doctor_says_what_it_is_and_its_fix_works(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    found = ckptfix.doctor(path)
    assert found.format == name and [row.id for row in found.findings if row.severity == "error"] == [
        row.id for row in FORMATS[name].notes(open_checkpoint(path))
    ][:1]
    (strip,) = found.fixes
    assert strip[:3] == ("ckptfix", "strip-module", str(path))
    ckptfix.strip_module(strip[2], strip[3])
    assert {f"module.{key}" for key in torch.load(strip[3])} == set(state_of(name))


def test_sanitize_and_repair_write_a_zip(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    wanted = SAMPLES[name].load(path)
    ckptfix.sanitize(path, tmp_path / "plain.pth")
    ckptfix.repair(path, tmp_path / "repaired.pth")
    for out in ("plain.pth", "repaired.pth"):
        got = torch.load(tmp_path / out, weights_only=True)
        assert {key: tensor_bytes(value) for key, value in got.items()} == {
            key: tensor_bytes(value) for key, value in wanted.items()
        }


def test_a_clean_file_has_no_findings(name: str, tmp_path: Path) -> None:
    assert list(FORMATS[name].check(str(made(name, tmp_path)))) == []


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_a_truncated_file_says_so(name: str, keep: float, tmp_path: Path) -> None:
    path = made(name, tmp_path, {f"module.{index}": torch.full((20_000,), float(index)) for index in range(10)})
    os.truncate(path, int(path.stat().st_size * keep))
    try:
        checkpoint = open_checkpoint(path)
        assert len(checkpoint.entries) < 10 or checkpoint.findings
        with pytest.raises(errors.CkptfixError):
            ckptfix.convert(path, tmp_path / "out.pth")
    except errors.CkptfixError as error:
        assert error.path == str(path)
    assert list(tmp_path.iterdir()) == [path]


def test_other_objects_are_values(name: str, tmp_path: Path) -> None:
    path = tmp_path / "in"
    SAMPLES[name].save({"epoch": 3, "model": {"w": tensor(2)}}, path)  # type: ignore[dict-item]
    checkpoint = open_checkpoint(path)
    assert [entry.at for entry in checkpoint.entries] == ["model"] and dict(checkpoint.values()) == {"epoch": 3}

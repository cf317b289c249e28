"""Shards written: which tensor is in which, the index, and what it all reads back as."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sharded import State, index_of, load, nbytes, parted, same, state, write

import ckptfix
from ckptfix.checkpoint import ByteRange, Storage, TensorEntry
from ckptfix.cli import commands
from ckptfix.errors import Refused, WouldLoseData
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.formats.shards.write import split
from ckptfix.formats.target import parse_size

FRAMEWORKS = ROOT.parent / "shared" / "frameworks"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


def entry(name: str, size: int, storage: str | None = None) -> TensorEntry:
    data = ByteRange(f"/{storage or name}", 0, size)
    return TensorEntry(name, "", Storage(storage or name, "uint8", size, "cpu", data), "uint8", (size,), (1,))


@pytest.mark.parametrize(
    ("sizes", "most", "wanted"),
    [
        # What split_state_dict_into_shards_factory of huggingface_hub 0.35 makes of these.
        ([6, 6, 2, 6, 2, 2], 10, [[0], [1, 2], [3, 4, 5]]),
        ([1, 20, 1], 10, [[1], [0, 2]]),
        ([5, 5, 1], 10, [[0, 1], [2]]),
        ([20, 20], 10, [[0], [1]]),
        ([1, 9, 30, 1, 9, 1], 10, [[2], [0, 1], [3, 4], [5]]),
        ([3], 10, [[0]]),
        ([], 10, [[]]),
        ([0, 0, 10, 0], 10, [[0, 1, 2, 3]]),
    ],
)
def test_tensors_fill_the_shards_as_the_hub_fills_them(sizes: list[int], most: int, wanted: list[list[int]]) -> None:
    made = split([entry(str(number), size) for number, size in enumerate(sizes)], {}, most)
    assert [[int(one.key) for one in shard] for shard in made] == wanted


def test_tensors_of_one_storage_are_in_one_shard() -> None:
    rows = [entry("a", 8), entry("b", 8), entry("c", 8, "a"), entry("view", 2)]
    assert [[one.key for one in shard] for shard in split(rows, {"view": "b"}, 10)] == [["a", "c"], ["b", "view"]]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2 << 30), ("1.5kb", 1500), (" 7 ", 7), ("10B", 10), (12, 12),
     ("1M", 10**6), ("2g", 2 * 10**9), ("1T", 10**12), ("64KiB", 1 << 16), ("0.1 MiB", 104857)],
)  # fmt: skip
def test_sizes(text: int | str, wanted: int) -> None:
    assert parse_size(text) == wanted


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1", "0", 0, -5, "1e9", "5 G B", "9" * 400, "\u0665GB"])
def test_what_is_no_size_is_refused(text: int | str) -> None:
    with pytest.raises(Refused, match="is not a shard size"):
        parse_size(text)


def test_a_file_becomes_shards_and_their_index(tmp_path: Path) -> None:
    rows = state(8)
    torch.save(rows, tmp_path / "in.pth")
    done = ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="hf", shard_size=200)
    assert (done.exit_code, done.account.lost, done.format) == (0, (), "hf")
    assert same(load(tmp_path / "out"), rows)
    index = index_of(tmp_path / "out")
    assert list(index["weight_map"]) == list(rows)
    assert index["metadata"] == {"total_size": nbytes(rows)}
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 3
    assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*files, "model.safetensors.index.json"]
    assert all(nbytes(load_file(tmp_path / "out" / file)) <= 200 for file in files)
    assert {row.id for row in ckptfix.doctor(tmp_path / "out").findings} <= {"no-checksums"}
    ckptfix.convert(tmp_path / "out", tmp_path / "back.pth")
    assert same(torch.load(tmp_path / "back.pth"), rows)


def test_what_fits_in_one_shard_is_one_file_without_an_index(tmp_path: Path) -> None:
    torch.save(state(2), tmp_path / "in.pth")
    ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="hf")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert same(ckptfix.load_state_dict(tmp_path / "out"), state(2))


def test_ties_and_views_come_back(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    rows: State = {"a": torch.ones(30), "embed": base, "b": torch.ones(30), "head": base, "part": base[1:3]}
    torch.save(rows, tmp_path / "in.pth")
    done = ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="hf", shard_size=150)
    assert len(done.plan.files) == 4 and "1 key tied to another" in str(done)
    assert "head" not in index_of(tmp_path / "out")["weight_map"]
    found = ckptfix.load_state_dict(tmp_path / "out")
    assert same(found, rows)
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert found["part"].untyped_storage().data_ptr() == found["embed"].untyped_storage().data_ptr()
    ckptfix.add_module(tmp_path / "out", tmp_path / "added")
    again = ckptfix.load_state_dict(tmp_path / "added", strip=None)
    assert same(again, {f"module.{name}": value for name, value in rows.items()})
    assert again["module.part"].untyped_storage().data_ptr() == again["module.embed"].untyped_storage().data_ptr()


def test_shards_are_made_smaller_or_larger(tmp_path: Path) -> None:
    rows = state(8)
    folder = write(tmp_path / "in", parted(rows, 3))
    for size in ("100B", "1MB"):
        dest = tmp_path / size
        done = ckptfix.convert(folder, dest, to="hf", shard_size=size)
        assert done.exit_code == 0 and same(ckptfix.load_state_dict(dest), rows)
    copied = ckptfix.convert(folder, tmp_path / "same", to="hf")
    assert "nothing to do" in str(copied)
    torch_shards = write(tmp_path / "bin", parted(rows, 3), kind="bin")
    done = ckptfix.convert(torch_shards, tmp_path / "st", to="hf", shard_size=300)
    assert done.exit_code == 0 and same(load(tmp_path / "st"), rows)
    assert (tmp_path / "st" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert not list((tmp_path / "st").glob("*.bin*"))


def test_metadata_goes_along(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(state(3), tmp_path / "in.safetensors", metadata={"format": "pt", "who": "me"})
    ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out", to="hf", shard_size=50)
    assert {open_checkpoint(path).metadata["who"] for path in (tmp_path / "out").glob("*.safetensors")} == {"me"}
    ckptfix.convert(tmp_path / "out", tmp_path / "back.safetensors")
    assert open_checkpoint(tmp_path / "back.safetensors").metadata == {"format": "pt", "who": "me"}


def test_what_shards_cannot_hold_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "q": torch.ones(2).to_sparse()}, tmp_path / "in.pth")
    with pytest.raises(WouldLoseData, match="hf cannot hold 1 of 2 tensors: q"):
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="hf")
    done = ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="hf", drop_unsupported=True)
    assert (done.exit_code, done.lost) == (3, ("q",))


@pytest.mark.slow
def test_other_formats_have_no_shards(tmp_path: Path) -> None:
    torch.save(state(2), tmp_path / "in.pth")
    with pytest.raises(Refused, match="is one file, without shards"):
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out.safetensors", shard_size="1GB")
    with pytest.raises(Refused, match=r"20,000 shards of 4 bytes are too many; the limit is 10,000"):
        FORMATS["hf"].sized(4)([entry(str(number), 4) for number in range(20_000)], str(tmp_path / "o"))  # type: ignore[misc]


@pytest.mark.parametrize("to", ["hf-bin", "hf-dcp"])
def test_kinds_that_are_only_read_are_no_targets(tmp_path: Path, to: Any) -> None:
    torch.save(state(2), tmp_path / "in.pth")
    with pytest.raises(ckptfix.CkptfixError, match=f"ckptfix reads the format {to}, but does not write it") as caught:
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to=to)
    assert caught.value.hint == "formats are zip, legacy, safetensors, dcp, megatron, meta, hf"


def test_the_command(tmp_path: Path) -> None:
    torch.save(state(8), tmp_path / "in.pth")
    done = CliRunner().invoke(
        commands, ["convert", str(tmp_path / "in.pth"), str(tmp_path / "out"), "--to", "hf", "--shard-size", "0.2kB"]
    )
    assert done.exit_code == 0 and "converted 16 tensors: PyTorch zip -> Hugging Face shards, " in done.output
    assert same(load(tmp_path / "out"), state(8))
    bad = CliRunner().invoke(
        commands, ["convert", str(tmp_path / "in.pth"), str(tmp_path / "no"), "--to", "hf", "--shard-size", "big"]
    )
    assert bad.exit_code == 2 and "'big' is not a shard size" in bad.output
    taken = ckptfix.extract(tmp_path / "in.pth", tmp_path / "taken", to="hf")
    assert taken.exit_code == 0 and same(load_file(tmp_path / "taken" / "model.safetensors"), state(8))


@st.composite
def states(draw: st.DrawFn) -> State:
    rows: State = {}
    for number in range(draw(st.integers(1, 12))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        raw = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
        name = draw(st.text("ab.\u00fc\u4e2d_", min_size=1, max_size=6)) + str(number)
        rows[name] = raw.view(dtype).reshape(shape)
        if len(rows) < 12 and draw(st.integers(0, 1)):
            rows[f"{name}.tied"] = rows[draw(st.sampled_from(list(rows)))]
    return rows


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rows=states(), size=st.integers(1, 400), legacy=st.booleans())
def test_split_and_joined_is_the_same_bit_for_bit(rows: State, size: int, legacy: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(rows, folder / "in.pth", _use_new_zipfile_serialization=not legacy)
        done = ckptfix.convert(folder / "in.pth", folder / "hf", to="hf", shard_size=size)
        back = ckptfix.convert(folder / "hf", folder / "out.pth")
        assert (done.exit_code, back.exit_code) == (0, 0)
        found = torch.load(folder / "out.pth", weights_only=True)
        assert same(found, rows)
        for one in rows:
            for other in rows:
                tied = rows[one].numel() > 0 and rows[one].data_ptr() == rows[other].data_ptr()
                assert not tied or found[one].data_ptr() == found[other].data_ptr()
        files = list((folder / "hf").glob("*.safetensors"))
        names = [name for file in files for name in load_file(file)]
        assert len(names) == len(set(names))


def test_a_trained_model_in_shards_is_what_transformers_would_have_written(tmp_path: Path) -> None:
    if not (FRAMEWORKS / "hf" / "gpt2_sharded").is_dir():
        pytest.skip("no shared/frameworks here")
    given = FRAMEWORKS / "hf" / "gpt2_sharded"
    ckptfix.convert(given, tmp_path / "whole.safetensors")
    ckptfix.convert(tmp_path / "whole.safetensors", tmp_path / "out", to="hf", shard_size="100kB")
    assert same(load(tmp_path / "out"), load(given))
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == index_of(given)["metadata"]["total_size"]

"""Edits on file systems that share blocks: what is new on the disk is the header, and nothing of the tensors."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
import torch
from disks import KINDS, Unavailable, mounted, mounted_image, own, snapshot, used
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix.checkpoint import ByteRange, OutputFile, Plan
from ckptfix.errors import WriteFailed
from ckptfix.io.system import free_space
from ckptfix.io.write import write_plan

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("file systems")]  # each is mounted once

State = dict[str, torch.Tensor]
MB = 1 << 20
FORMATS = {"zip": ".pth", "legacy": ".pt", "safetensors": ".safetensors"}
SMALL_BLOCKS = [kind for kind in KINDS if "16" not in kind]


def state(layers: int = 3) -> State:
    """Of some 4 MB each, with odd ones between them; wrapped."""
    torch.manual_seed(layers)
    rows: State = {}
    for layer in range(layers):
        rows[f"module.{layer}.weight"] = torch.randn(1024, 1031)
        rows[f"module.{layer}.bias"] = torch.randn(1031)
    return rows


def stripped(rows: State) -> State:
    return {name.removeprefix("module."): value for name, value in rows.items()}


def save(rows: State, path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(rows, path)
    else:
        torch.save(rows, path, _use_new_zipfile_serialization=path.suffix == ".pth")
    return path


def load(path: Path) -> State:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def on_disk(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


@pytest.fixture(scope="module", params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    try:
        with mounted(request.param, tmp_path_factory.mktemp("blocks")) as place:
            yield place
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(disk: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    made = disk / "work"
    made.mkdir()
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("format", FORMATS)
def test_an_edit_of_names_takes_no_blocks_for_tensors(folder: Path, format: str) -> None:
    rows = state()
    source = save(rows, folder / f"in{FORMATS[format]}")
    on_disk(folder)
    before = used(folder)
    longer = folder / f"longer{FORMATS[format]}"
    ckptfix.add_module(source, longer)
    dest = folder / f"out{FORMATS[format]}"
    ckptfix.strip_module(longer, dest, all_levels=True)
    # What a file system notes down of the blocks that it shares is no part of a file.
    assert used(folder) - before < 1 * MB
    for path in (longer, dest):
        assert own(path) < 0.01 * path.stat().st_size + 2 * os.statvfs(folder).f_frsize
    assert same(load(dest), stripped(rows))


def test_devices_too(folder: Path) -> None:
    rows = state()
    source = save(rows, folder / "in.pth")
    on_disk(folder)
    ckptfix.map_location(source, folder / "cuda.pth", {"cpu": "cuda:1"})
    ckptfix.to_cpu(folder / "cuda.pth", folder / "out.pth")
    assert own(folder / "cuda.pth") + own(folder / "out.pth") < 0.01 * source.stat().st_size + 65536
    assert same(load(folder / "out.pth"), rows)


def test_a_folder_of_shards_and_a_distributed_one(folder: Path) -> None:
    import sharded

    rows = state(4)
    shards = folder / "shards"
    sharded.write(shards, sharded.parted(rows, 2))
    ckptfix.convert(save(rows, folder / "in.pth"), folder / "dcp", to="dcp")
    on_disk(folder)
    for name in ("shards", "dcp"):
        dest = folder / f"{name}-out"
        ckptfix.strip_module(folder / name, dest)
        files = [path for path in dest.rglob("*") if path.stat().st_size > MB]
        assert files
        for path in files:
            assert own(path) < 0.01 * path.stat().st_size + 32768, path
    assert same(sharded.load(folder / "shards-out"), stripped(rows))


CONVERSIONS: dict[str, tuple[str, float, Callable[[Path, Path], object]]] = {
    "slim": (".pth", 0.02, lambda source, dest: ckptfix.slim(source, dest, no_optimizer=True)),
    "extract": (".pth", 0.02, lambda source, dest: ckptfix.extract(source, dest, at="model")),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_new_layout_lies_in_its_blocks_as_the_old_one_did(folder: Path, name: str) -> None:
    if os.statvfs(folder).f_frsize > 4096:
        pytest.skip("a record of an archive is padded by less than a page")
    suffix, most, make = CONVERSIONS[name]
    rows = state(4)
    moments = {number: {"exp_avg": torch.randn(700, 999)} for number in range(2)}
    whole = {"model": rows, "optimizer": {"state": moments, "param_groups": [{"params": [0, 1]}]}}
    source = folder / f"in{suffix}"
    torch.save(whole, source, _use_new_zipfile_serialization=suffix == ".pth")
    on_disk(folder)
    dest = folder / f"out{suffix}"
    make(source, dest)
    assert own(dest) < most * dest.stat().st_size
    found = torch.load(dest, weights_only=True)
    assert same(found.get("model", found), rows)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
@pytest.mark.parametrize("to", ["zip", "safetensors", "legacy"])
def test_a_conversion_is_right_however_much_it_shares(
    folder: Path, suffix: str, to: Literal["zip", "safetensors", "legacy"]
) -> None:
    rows = state(2)
    source = save(rows, folder / f"in{suffix}")
    dest = folder / f"out{FORMATS[to]}"
    ckptfix.convert(source, dest, to=to)
    assert same(load(dest), rows)


def test_one_large_tensor_is_shared_by_any_conversion(folder: Path) -> None:
    rows = {"weight": torch.randn(2048, 1024)}
    source = save(rows, folder / "in.pth")
    on_disk(folder)
    ckptfix.convert(source, folder / "out.safetensors")
    ckptfix.convert(source, folder / "out.pt", to="legacy")
    for name in ("out.safetensors", "out.pt"):
        assert own(folder / name) < 3 * max(4096, os.statvfs(folder).f_frsize)
        assert same(load(folder / name), rows)


def test_a_nearly_full_disk_takes_what_is_shared(folder: Path) -> None:
    rows = state(8)
    source = save(rows, folder / "in.safetensors")
    on_disk(folder)
    with open(folder / "rest", "wb") as file:
        size = 0
        with suppress(OSError):  # btrfs has less room for data than it says
            while free_space(str(folder)) > 16 * MB:  # type: ignore[operator]
                os.posix_fallocate(file.fileno(), size, 4 * MB)
                size += 4 * MB
        file.truncate(size - 4 * MB)
    on_disk(folder)
    assert source.stat().st_size > 32 * MB
    ckptfix.strip_module(source, folder / "out.safetensors")
    assert same(load(folder / "out.safetensors"), stripped(rows))
    with pytest.raises(WriteFailed, match="No space left"):
        plan = Plan((OutputFile.of(folder / "shifted", (b"x", ByteRange(str(source), 0, source.stat().st_size))),))
        write_plan(plan)
    assert not (folder / "shifted").exists()


def test_a_source_on_another_disk_is_copied(folder: Path, tmp_path: Path) -> None:
    rows = state()
    source = save(rows, tmp_path / "in.safetensors")
    ckptfix.strip_module(source, folder / "out.safetensors")
    assert same(load(folder / "out.safetensors"), stripped(rows))


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
@pytest.mark.parametrize("synced", [True, False], ids=["synced", "dirty"])
def test_after_a_power_cut_the_output_is_whole_or_absent(tmp_path: Path, kind: str, synced: bool) -> None:
    """The image is copied as it is at each step, and mounted when all is over: the log of each is played back."""
    rows = state()
    copies: list[Path] = []

    def cut() -> None:
        copies.append(tmp_path / f"copy{len(copies)}")
        snapshot(tmp_path / "image", copies[-1])

    try:
        with mounted(kind, tmp_path) as place:
            source, dest = place / "in.pth", place / "out.pth"
            save(rows, source)
            if synced:
                on_disk(place)
            cut()
            ckptfix.strip_module(source, dest, progress=lambda done, total: cut())
            cut()
            digest = hashlib.sha256(dest.read_bytes()).digest()
    except Unavailable as error:
        pytest.skip(str(error))
    assert len(copies) > 3
    there = []
    for copy in copies:
        with mounted_image(copy, tmp_path / "after") as place:
            found = place / "out.pth"
            there.append(found.exists())
            assert not found.exists() or hashlib.sha256(found.read_bytes()).digest() == digest
            assert not synced or same(load(place / "in.pth"), rows)
        copy.unlink()
    assert there == [False] * (len(copies) - 1) + [True]

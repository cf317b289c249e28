"""What the input does not hold as it describes it: refused, or named with exit code 3, by every verb that writes.

An output with exit code 0 is one that torch.load takes, or safetensors.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import sharded
import torch
from torch import serialization

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.ops.writing import Result

VERBS: dict[str, Callable[[Path, Path], Result]] = {
    "strip-module": ckptfix.strip_module,
    "add-module": ckptfix.add_module,
    "unwrap": ckptfix.unwrap,
    "rename": lambda source, dest: ckptfix.rename(source, dest, subs=[("^module", "model")]),
    "to-cpu": ckptfix.to_cpu,
    "map-location": lambda source, dest: ckptfix.map_location(source, dest, "cuda:0"),
    "convert": ckptfix.convert,
    "slim": ckptfix.slim,
    "sanitize": ckptfix.sanitize,
    "repair": ckptfix.repair,
    "fix": ckptfix.fix,
    "legacy": lambda source, dest: ckptfix.convert(source, dest, to="legacy"),
    "zip": lambda source, dest: ckptfix.convert(source, dest, to="zip"),
    "cast": lambda source, dest: ckptfix.cast(source, dest, to="bfloat16"),
    "average": lambda source, dest: ckptfix.average([source, source], dest),
    "select": lambda source, dest: ckptfix.select(source, dest, keep=["*"]),
    "match": lambda source, dest: ckptfix.match(source, dest, source),
}

WEIGHTS = {"module.a": torch.arange(6.0), "module.b": torch.ones(4, 4), "module.c": torch.zeros(5)}


@contextmanager
def meta(nbytes: int) -> Iterator[None]:
    """Storages of so many bytes are saved as if they were on the meta device, with their bytes."""
    tag = serialization.location_tag
    serialization.location_tag = lambda storage: "meta" if storage.nbytes() == nbytes else tag(storage)
    try:
        yield
    finally:
        serialization.location_tag = tag


def torch_zip(folder: Path, size: int | None, *, on_meta: bool) -> Path:
    """A file whose first storage has so many of its 24 bytes; its record is not there with None."""
    whole, path = folder / "whole.pth", folder / "model.pth"
    with meta(24 if on_meta else -1):
        torch.save(WEIGHTS, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if len(data) == 24 and "/data/" in name:
                if size is None:
                    continue
                data = data[:size]
            new.writestr(name, data)
    return path


def torch_legacy(folder: Path, cut: int, *, on_meta: bool) -> Path:
    path = folder / "model.pth"
    with meta(24 if on_meta else -1):
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    return path


def named(folder: Path) -> Path:
    path = folder / "model.safetensors"
    safetensors.torch.save_file(WEIGHTS, path, metadata={"format": "pt"})
    path.write_bytes(path.read_bytes()[:-10])
    return path


def shards(folder: Path, kind: str) -> Path:
    parts = sharded.parted(sharded.state(4, "module."), 3)
    made = sharded.write(folder / "shards", parts, kind=kind)
    second = sorted(made.glob(f"*-00002-of-*.{kind}"))[0]
    if kind == "bin":
        torch.save(parts[1], second, _use_new_zipfile_serialization=False)
    second.write_bytes(second.read_bytes()[:-10])
    return made


INPUTS: dict[str, Callable[[Path], Path]] = {
    "no record": lambda folder: torch_zip(folder, None, on_meta=False),
    "short record": lambda folder: torch_zip(folder, 4, on_meta=False),
    "empty record": lambda folder: torch_zip(folder, 0, on_meta=False),
    "whole, on meta": lambda folder: torch_zip(folder, 24, on_meta=True),
    "no record, on meta": lambda folder: torch_zip(folder, None, on_meta=True),
    "short record, on meta": lambda folder: torch_zip(folder, 4, on_meta=True),
    "empty record, on meta": lambda folder: torch_zip(folder, 0, on_meta=True),
    "legacy, on meta": lambda folder: torch_legacy(folder, 0, on_meta=True),
    "legacy, cut": lambda folder: torch_legacy(folder, 10, on_meta=False),
    "safetensors, cut": named,
    "a cut shard": lambda folder: shards(folder, "safetensors"),
    "a cut torch shard": lambda folder: shards(folder, "bin"),
}


def loaded(path: Path) -> int:
    """How many tensors there are; raises where torch or safetensors does not take the file."""
    if path.is_dir():
        return sum(loaded(file) for file in path.iterdir() if file.suffix != ".json")
    if path.suffix == ".safetensors":
        return len(safetensors.torch.load_file(path))
    return len(torch.load(path, weights_only=True))


@pytest.mark.sampled(50)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", INPUTS)
def test_no_loss_is_silent(tmp_path: Path, kind: str, verb: str) -> None:
    source = INPUTS[kind](tmp_path)
    dest = tmp_path / f"out{source.suffix}"
    try:
        done = VERBS[verb](source, dest)
    except CkptfixError as error:
        assert not dest.exists()
        assert error.message
        return
    if done.exit_code:
        assert done.exit_code == 3
        assert [finding for finding in done.findings if finding.severity != "info" and finding.where]
        return
    if verb == "map-location":
        # Other tests look at what it writes; torch loads none of it here.
        assert not done.account.damaged
        return
    assert loaded(dest) >= len(WEIGHTS)


@pytest.mark.parametrize("kind", ["no record", "short record", "no record, on meta", "short record, on meta"])
def test_repair_keeps_the_others(tmp_path: Path, kind: str) -> None:
    done = ckptfix.repair(INPUTS[kind](tmp_path), tmp_path / "out.pth")
    assert done.exit_code == 3
    assert [loss.name for loss in done.losses] == ["module.a"]
    assert list(torch.load(tmp_path / "out.pth")) == ["module.b", "module.c"]


def test_a_tensor_on_meta_stays_one(tmp_path: Path) -> None:
    source = INPUTS["whole, on meta"](tmp_path)
    for verb in ("repair", "zip", "legacy"):
        VERBS[verb](source, tmp_path / f"{verb}.pth")
        value = next(iter(torch.load(tmp_path / f"{verb}.pth").values()))
        assert (value.device.type, value.shape) == ("meta", (6,))
    with pytest.raises(CkptfixError, match="no data"):
        VERBS["fix"](source, tmp_path / "fix.pth")


def test_doctor_sees_what_torch_load_fails_on(tmp_path: Path) -> None:
    """A tensor on the meta device loads, and its values do not exist: that is the only error then."""
    for kind, make in INPUTS.items():
        folder = tmp_path / kind.replace(" ", "-")
        folder.mkdir()
        intact = kind in ("whole, on meta", "legacy, on meta")
        errors = {row.id for row in ckptfix.doctor(make(folder)).findings if row.severity == "error"}
        assert bool(errors) and (errors == {"no-data"}) is intact if "meta" in kind else bool(errors), kind


@pytest.mark.parametrize("verb", ["cast", "average", "legacy", "match"])
def test_a_tensor_that_cannot_be_read_is_named_before_anything_is_made(tmp_path: Path, verb: str) -> None:
    """Findings of tensors are made when they are listed, which a verb may do after it has asked for findings."""
    path = torch_zip(tmp_path, 24, on_meta=False)
    with zipfile.ZipFile(path) as old:
        rows = {name: old.read(name) for name in old.namelist()}
    pickle = next(name for name in rows if name.endswith("data.pkl"))
    assert rows[pickle].count(b"storage") == 1  # the others fetch it from the memo
    rows[pickle] = rows[pickle].replace(b"storage", b"starage")
    with zipfile.ZipFile(path, "w") as new:
        for name, data in rows.items():
            new.writestr(name, data)
    with pytest.raises(CkptfixError, match="not a storage"):
        VERBS[verb](path, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_select_leaves_a_damaged_tensor_out_and_takes_none(tmp_path: Path) -> None:
    path = torch_zip(tmp_path, 20, on_meta=False)
    with pytest.raises(CkptfixError, match=r"module\.a"):
        ckptfix.select(path, tmp_path / "out.pth", keep=["*a", "*b"])
    done = ckptfix.select(path, tmp_path / "out.pth", drop=["*a"])
    assert done.exit_code == 0
    assert sorted(torch.load(tmp_path / "out.pth")) == ["module.b", "module.c"]

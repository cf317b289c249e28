"""How a comparison reads its files: what it does not read, how much at once, and what it makes of damage."""

from __future__ import annotations

import gc
import json
import math
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Tensor, assemble, state_dict_ops, torch_zip, written
from kinds import tensor

from ckptfix.elements import reader as diff_sources
from ckptfix.errors import Truncated
from ckptfix.ops.diff import bytes as diff_bytes
from ckptfix.ops.diff.compare import DiffResult
from ckptfix.ops.diff.result import NamePair

Compare = Callable[..., DiffResult]
Save = Callable[..., Path]


def test_quick_trusts_the_checksum(tmp_path: Path, compare: Compare) -> None:
    a = tmp_path / "a.pth"
    torch.save({"w": torch.arange(64.0), "v": torch.arange(9.0)[2:5]}, a)
    data = bytearray(a.read_bytes())
    place = data.index(torch.arange(64.0).numpy().tobytes())
    data[place + 5] ^= 1
    b = written(tmp_path / "b.pth", bytes(data))
    assert not compare(a, b).same
    result = compare(a, b, quick=True)
    assert result.same
    assert result.counts.trusted == 1  # the view is read
    assert "1 tensor not read" in " ".join(result.lines)
    other = tmp_path / "c.pth"
    torch.save({"w": torch.arange(64.0) + 1, "v": torch.arange(9.0)[2:5]}, other)
    assert [row.name_a for row in compare(a, other, quick=True).changed] == ["w"]


def test_quick_renames_by_checksum(compare: Compare) -> None:
    assert compare({"old": tensor(9)}, {"new": tensor(9)}, quick=True).renamed == (NamePair("old", "new"),)


def test_keys_only_reads_no_tensor(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("ckptfix.elements.reader.Readers.__getitem__", refuse)
    a, b = {"w": tensor(3), "x": tensor(2), "n": 1}, {"w": tensor(3) + 1, "x": tensor(4), "n": 2}
    result = compare(a, b, keys_only=True)
    assert [(row.name_a, row.values) for row in result.changed] == [("x", None)]
    assert (result.values, result.keys_only) == ((), True)
    assert compare({"w": tensor(3)}, {"w": tensor(3) + 1}, keys_only=True).same
    with pytest.raises(AssertionError):
        compare(a, b)


def test_big_endian_files(tmp_path: Path, compare: Compare) -> None:
    values = torch.tensor([1.0, -2.5, 1e-30])
    ops = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("0", (3,), 3)}), "STOP")
    data = values.numpy().astype(">f4").tobytes()
    big = written(tmp_path / "big", torch_zip(ops, [data], byteorder="big"))
    assert compare({"w": values}, big).same
    assert compare(big, big).same
    (row,) = compare({"w": values + torch.tensor([0, 1, 0])}, big).changed
    assert row.values is not None
    assert (row.values.differing, row.values.max_abs) == (1, 1.0)
    assert compare({"other": values}, big).renamed == (NamePair("other", "w"),)


@pytest.mark.slow
def test_deflated_records(tmp_path: Path, compare: Compare) -> None:
    from dataclasses import replace

    from builders import build_zip, torch_records

    values = torch.arange(600_000.0)
    ops = assemble(
        ("PROTO", 2),
        *state_dict_ops({"w": Tensor("0", (600_000,), 600_000), "part": Tensor("0", (10,), 600_000, offset=500_000)}),
        "STOP",
    )
    records = torch_records(ops, [values.numpy().tobytes()])
    packed = [replace(record, method=8) if "/data/" in record.name else record for record in records]
    path = written(tmp_path / "packed.pth", build_zip(packed))
    plain = {"w": values, "part": values[500_000:500_010]}
    assert compare(path, plain).same
    changed = values.clone()
    changed[500_005] += 1
    result = compare(path, {"w": changed, "part": changed[500_000:500_010]})
    assert [(row.name_a, row.values.differing, row.values.max_abs) for row in result.changed if row.values] == [
        ("w", 1, 1.0),
        ("part", 1, 1.0),
    ]
    reference = (values.double() - changed.double()).norm() / changed.double().norm()
    assert result.changed[0].values is not None
    assert result.changed[0].values.rel_l2 == pytest.approx(reference.item(), rel=1e-12)


def test_a_cut_file_is_an_error(tmp_path: Path, compare: Compare, as_safetensors: Save) -> None:
    whole = as_safetensors(tmp_path / "a.safetensors", {"w": tensor(1000)})
    cut = written(tmp_path / "b.safetensors", whole.read_bytes()[:-100])
    with pytest.raises(Truncated) as caught:
        compare(whole, cut)
    assert caught.value.path == str(cut)


def test_what_could_not_be_read_is_not_the_same(tmp_path: Path, compare: Compare) -> None:
    ops = state_dict_ops({"good": Tensor("0", (2,), 2), "bad": Tensor("0", (3,), 2)})
    path = written(tmp_path / "a", torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [b"\0" * 8]))
    result = compare(path, path)
    assert [finding.where for finding in result.unread] == ["bad", "bad"]
    assert (result.same, result.counts.matched) == (False, 1)
    assert compare(path, path, filter="good").same


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few hundred bytes take many chunks and many tasks."""
    monkeypatch.setattr(diff_sources, "CHUNK", 64)
    monkeypatch.setattr(diff_bytes, "CHUNK", 64)
    monkeypatch.setattr(diff_bytes, "PIECE", 256)
    monkeypatch.setattr(diff_bytes, "OVERHEAD", 16)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("places", [[0], [999], [500, 999], [3, 70, 71, 640], [15, 16]])
@pytest.mark.parametrize("strided", [False, True])
def test_totals_do_not_depend_on_where_the_difference_is(places: list[int], strided: bool, compare: Compare) -> None:
    a = tensor(1000).double()
    b = a.clone()
    b[places] += torch.arange(1.0, len(places) + 1).double()
    a[7] = b[7] = math.nan

    def saved(value: torch.Tensor) -> torch.Tensor:
        return torch.stack([value, torch.zeros(1000)], dim=1)[:, 0] if strided else value

    (row,) = compare({"w": saved(a), "x": tensor(100)}, {"w": saved(b), "x": tensor(100)}).changed
    found = row.values
    assert found is not None
    x, y = a.nan_to_num(0), b.nan_to_num(0)
    assert (found.elements, found.differing, found.nan_a, found.nan_b) == (1000, len(places), 0, 0)
    assert found.max_abs == (x - y).abs().max().item()
    assert found.mean_abs == pytest.approx((x - y).abs().sum().item() / 999, rel=1e-12)
    assert found.rel_l2 == pytest.approx(((x - y).norm() / y.norm()).item(), rel=1e-12)
    assert found.cosine == pytest.approx((x @ y / (x.norm() * y.norm())).item(), rel=1e-12)


@pytest.mark.usefixtures("small_pieces")
def test_progress_counts_every_byte_once(compare: Compare) -> None:
    base = tensor(50, 4)
    a = {"w": tensor(1000), "b": tensor(3), "v": base[:, 1], "e": torch.empty(0)}
    b = {"w": tensor(1000) + 1, "b": tensor(3), "v": base[:, 1], "e": torch.empty(0)}
    seen: list[tuple[int, int]] = []
    compare(a, b, progress=lambda done, total: seen.append((done, total)))
    total = 4000 + 12 + 200
    assert {whole for _, whole in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    assert len(seen) > 10


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
def test_an_interrupt_ends_the_threads(compare: Compare) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        compare({"w": tensor(100_000)}, {"w": tensor(100_000)}, progress=interrupt)
    gc.collect()
    for _ in range(1200):  # they end when they find that nobody waits for them
        if threading.active_count() <= before:  # what another test has left may end as well
            break
        time.sleep(0.05)
    assert threading.active_count() <= before


MEASURED = """
import json, pathlib, sys
from ckptfix import formats
from ckptfix.ops.diff.compare import diff
result = diff(*map(formats.open_checkpoint, sys.argv[1:3]))
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))
print(json.dumps({"peak": peak, "modules": sorted(sys.modules), "result": result.as_dict()}))
"""


def sparse_file(path: Path, code: str, count: int, itemsize: int, changes: dict[int, bytes]) -> Path:
    """A safetensors file of one tensor of zeros, which takes no room on the disk, with some bytes changed."""
    nbytes = count * itemsize
    header = json.dumps({"w": {"dtype": code, "shape": [count], "data_offsets": [0, nbytes]}}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        start = file.tell()
        file.truncate(start + nbytes)
        for place, data in changes.items():
            file.seek(start + place)
            file.write(data)
    return path


def measured(a: Path, b: Path) -> dict[str, Any]:
    """The result, the peak memory in MiB and the loaded modules of a process that compares two files.

    Not by getrusage: its peak is the parent's, when that was larger before exec.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    done = subprocess.run([sys.executable, "-c", MEASURED, a, b], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_equal_files_of_a_gigabyte_take_little_memory_and_no_numpy(tmp_path: Path) -> None:
    count = 1 << 28
    one = np.float32(1).tobytes()
    a, b = (sparse_file(tmp_path / name, "F32", count, 4, {4 * count - 4: one}) for name in "ab")
    found = measured(a, b)
    assert found["result"]["same"] is True
    assert found["peak"] < 60
    assert {"numpy", "torch", "ml_dtypes"}.isdisjoint(found["modules"])


@pytest.mark.slow
@pytest.mark.parametrize(("code", "itemsize", "dtype"), [("F32", 4, "<f4"), ("F8_E5M2", 1, None)])
def test_different_files_take_little_memory(code: str, itemsize: int, dtype: str | None, tmp_path: Path) -> None:
    count = (1 << 27) // itemsize
    one = np.array([1], dtype).tobytes() if dtype else b"\x3c"
    last = (count - 1) * itemsize
    a = sparse_file(tmp_path / "a", code, count, itemsize, {0: one, last: one})
    b = sparse_file(tmp_path / "b", code, count, itemsize, {0: one})
    found = measured(a, b)
    values = found["result"]["changed"][0]["values"]
    assert (values["differing"], values["max_abs"], values["mean_abs"]) == (1, 1.0, 1 / count)
    assert (values["rel_l2"], values["cosine"]) == (1.0, pytest.approx(math.sqrt(0.5)))
    assert found["peak"] < 100
    assert "torch" not in found["modules"]

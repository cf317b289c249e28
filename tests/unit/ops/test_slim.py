"""slim: what is saved, and that nothing else changes."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Tensor, assemble, flip, legacy, push, safetensors, state_dict_ops, tensor_ops, torch_zip, written
from conftest import RealFile

import ckptfix
from ckptfix.errors import CkptfixError, Refused, Unsupported
from ckptfix.ops.slim import SlimResult, slim


@pytest.fixture(params=["zip", "legacy"])
def container(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save(value: Any, path: Path, container: str, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=container == "zip")
    return path


def slimmed(path: Path, **options: Any) -> tuple[SlimResult, Any]:
    result = slim(path, path.with_name("out.pt"), force=True, **options)
    assert (result.written, path.with_name("out.pt").stat().st_size) == (True, result.plan.nbytes)
    return result, torch.load(path.with_name("out.pt"), weights_only=True)


def stored(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


LARGE = torch.arange(10_000.0).reshape(100, 100)

VIEWS: dict[str, tuple[torch.Tensor, int]] = {
    "rows": (LARGE[3:5], 800),
    "one element": (LARGE[7, 9], 4),
    "a column": (LARGE[:, 5], 39_604),
    "every other": (LARGE[10, ::2], 396),
    "a block": (LARGE[2:4, 10:20], 440),
    "transposed rows": (LARGE[50:60].t(), 4000),
    "expanded": (LARGE[9, 9].expand(5, 5), 4),
    "overlapping": (LARGE.as_strided((3, 4), (2, 1), 77), 32),
    "empty": (LARGE[5:5], 0),
    "double": (torch.arange(1000, dtype=torch.float64)[3:6], 24),
    "bytes": (torch.arange(200, dtype=torch.uint8)[7:12], 5),
    "complex": (torch.ones(50, dtype=torch.complex64)[4:5], 8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_keeps_its_values_and_only_its_bytes(tmp_path: Path, container: str, name: str) -> None:
    view, left = VIEWS[name]
    for protocol in (2, 4):
        path = save({"v": view, "n": 1}, tmp_path / "in.pt", container, protocol)
        result, found = slimmed(path)
        assert torch.equal(found["v"], view) and found["v"].shape == view.shape and found["n"] == 1
        assert stored(found["v"]) == left
        assert result.saved["unused storage"] == stored(view) - left
        assert ckptfix.diff(path, tmp_path / "out.pt").same


GAPS: dict[str, tuple[torch.Tensor, int]] = {
    "a column": (LARGE[:, 5], 400),
    "every other": (LARGE[10, ::2], 200),
    "a block": (LARGE[2:4, 10:20], 80),
    "columns": (LARGE[:, 5:7].t(), 800),
    "overlapping": VIEWS["overlapping"],
    "no gaps": VIEWS["transposed rows"],
}


@pytest.mark.parametrize("name", GAPS)
def test_gaps_are_closed_when_asked(tmp_path: Path, container: str, name: str) -> None:
    view, left = GAPS[name]
    _, found = slimmed(save({"v": view, "tied": view}, tmp_path / "in.pt", container), contiguous=True)
    assert torch.equal(found["v"], view) and stored(found["v"]) == left
    assert found["tied"].data_ptr() == found["v"].data_ptr()
    assert found["v"].is_contiguous() == (name not in ("no gaps", "overlapping"))


def test_what_overlaps_stays_shared_and_what_is_apart_parts(tmp_path: Path, container: str) -> None:
    value = {"a": LARGE[3:5], "b": LARGE[4:6], "same": LARGE[3:5], "far": torch.nn.Parameter(LARGE[90])}
    result, found = slimmed(save(value, tmp_path / "in.pt", container))
    assert all(torch.equal(found[name], value[name]) for name in value)
    assert stored(found["a"]) == 1200 and stored(found["far"]) == 400 and result.compacted == 1
    found["a"][1, 0] = -1
    assert found["b"][0, 0] == -1 and found["same"][1, 0] == -1
    assert type(found["far"]) is torch.nn.Parameter and found["far"].requires_grad


def test_a_storage_by_itself_keeps_all_its_bytes(tmp_path: Path, container: str) -> None:
    value = {"v": LARGE[3:5], "storage": LARGE.storage()}  # type: ignore[no-untyped-call]
    path = save(value, tmp_path / "in.pt", container)
    result = slim(path, tmp_path / "out.pt")
    assert not result.saved and (tmp_path / "out.pt").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["sparse", "quantized", "conj", "attribute"])
def test_other_kinds_of_tensors_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    made: torch.Tensor
    if kind == "sparse":
        made = torch.eye(4).to_sparse()
    elif kind == "quantized":
        made = torch.quantize_per_tensor(LARGE, 0.1, 0, torch.qint8)[2:3]
    elif kind == "conj":
        made = torch.ones(100, dtype=torch.complex64)[5:9].conj()
    else:
        made = LARGE[8:9].detach()
        made.note = "x"  # type: ignore[attr-defined]
    path = save({"t": made, "v": LARGE[3:5].clone()}, tmp_path / "in.pt", "zip")
    slim(path, tmp_path / "out.pt")
    before, after = torch.load(path), torch.load(tmp_path / "out.pt")
    same = (before["t"].to_dense(), after["t"].to_dense()) if kind == "sparse" else (before["t"], after["t"])
    assert torch.equal(*same) and getattr(after["t"], "note", None) == getattr(made, "note", None)
    assert after["t"].is_conj() == made.is_conj()


def training(**extra: Any) -> dict[str, Any]:
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, **extra}


def test_the_optimizer_goes_with_all_that_only_it_needs(tmp_path: Path, container: str) -> None:
    value = training(optimizer_states=[torch.optim.SGD([torch.ones(2)], lr=0.1).state_dict()])
    result, found = slimmed(save(value, tmp_path / "in.pt", container), no_optimizer=True)
    assert set(found) == {"model", "epoch"} and set(result.dropped) == {"optimizer", "optimizer_states"}
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in value["model"].items())
    states = value["optimizer"]["state"].values()
    assert result.saved["optimizer"] == sum(stored(tensor) for state in states for tensor in state.values())
    assert result.exit_code == 0


def test_without_being_asked_the_optimizer_stays(tmp_path: Path, container: str) -> None:
    result, found = slimmed(save(training(), tmp_path / "in.pt", container))
    assert "optimizer" in found and "identical" in result.lines[0]


def test_an_optimizer_alone_is_not_emptied(tmp_path: Path, container: str) -> None:
    path = save(training()["optimizer"], tmp_path / "in.pt", container)
    with pytest.raises(Refused):
        slim(path, tmp_path / "out.pt", no_optimizer=True)


def test_equal_bytes_become_one_storage_only_when_asked(tmp_path: Path, container: str) -> None:
    ones = torch.ones(500)
    value = {"a": ones, "b": ones.clone(), "c": torch.zeros(500), "d": torch.zeros(500, dtype=torch.int32)}
    path = save(value, tmp_path / "in.pt", container)
    assert "identical" in slim(path, tmp_path / "whole.pt").lines[0]
    result, found = slimmed(path, dedupe=True)
    assert result.saved["duplicates"] == 2000 and result.tied == 1
    assert found["a"].data_ptr() == found["b"].data_ptr() != found["c"].data_ptr()
    assert all(torch.equal(found[name], value[name]) and found[name].dtype == value[name].dtype for name in value)


def test_a_view_of_a_legacy_storage_view(tmp_path: Path) -> None:
    """torch 0.x wrote views of storages: (key, first, count) beside the storage that they view."""
    data = struct.pack("<100f", *range(100))
    view = Tensor("0", (4,), 100, view=("v", 10, 20), offset=2, legacy=True)
    same = Tensor("0", (2,), 100, offset=14, legacy=True)
    pickle = assemble(("PROTO", 2), *state_dict_ops({"view": view, "same": same}), "STOP")
    path = written(tmp_path / "in.pt", legacy(pickle, [("0", 100, data)]))
    result, found = slimmed(path)
    assert found["view"].tolist() == [12, 13, 14, 15] and found["same"].tolist() == [14, 15]
    assert stored(found["view"]) == 16 and result.saved["unused storage"] == 384
    found["view"][2] = -1
    assert found["same"][0] == -1


def test_holes_and_hidden_bytes_of_a_safetensors_file_go(tmp_path: Path) -> None:
    a, b = struct.pack("<2f", 1, 2), struct.pack("<2f", 3, 4)
    header = {
        "__metadata__": {"format": "pt", "note": "x"},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [108, 116]},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    raw = safetensors(header=header, tail=a + b"hidden" * 16 + b"1234" + b + b"tail")
    path = written(tmp_path / "in.safetensors", raw)
    out = tmp_path / "out.safetensors"
    result = slim(path, out)
    assert result.saved["unused storage"] == 104
    from safetensors import safe_open

    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "x"}
        assert file.get_tensor("a").tolist() == [1, 2] and file.get_tensor("b").tolist() == [3, 4]
    assert b"hidden" not in out.read_bytes()
    again = slim(out, tmp_path / "again.safetensors")
    assert "identical" in again.lines[0] and (tmp_path / "again.safetensors").read_bytes() == out.read_bytes()
    with pytest.raises(Unsupported, match="its own bytes"):
        slim(out, tmp_path / "x.safetensors", dedupe=True)


def test_every_file_of_the_corpus_is_the_same_afterwards(real_file: RealFile, tmp_path: Path) -> None:
    if real_file.container not in ("zip", "legacy", "safetensors"):
        pytest.skip("not a format of ours")
    out = tmp_path / f"out.{real_file.container}"
    result = ckptfix.slim(real_file.path, out)
    told = ckptfix.diff(real_file.path, out)
    assert not told.only_a and not told.only_b and not told.changed and not told.values
    assert sum(result.saved.values()) == real_file.path.stat().st_size - out.stat().st_size


@pytest.mark.slow
def test_flipped_bits_give_our_errors_or_the_same_tensors(tmp_path: Path) -> None:
    path = save({"v": LARGE[3:5, :10], "n": 1}, tmp_path / "in.pt", "zip")
    data = path.read_bytes()
    end = data.index(b"byteorder")
    for bit in range(0, 8 * end, 37):
        broken = written(tmp_path / "broken.pt", flip(data, bit))
        try:
            result = slim(broken, tmp_path / "out.pt", force=True, no_optimizer=True, dedupe=True)
        except CkptfixError:
            continue
        if not result.saved:
            assert (tmp_path / "out.pt").read_bytes() == broken.read_bytes()
            continue
        assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["v"], LARGE[3:5, :10])


def test_a_shared_reference_of_two_views(tmp_path: Path) -> None:
    tensors = {name: Tensor("0", (2,), 50, offset=offset) for name, offset in (("a", 10), ("b", 40))}
    pickle = assemble(("PROTO", 2), *state_dict_ops(tensors), "STOP")
    path = written(tmp_path / "in.pt", torch_zip(pickle, [bytes(200)]))
    result, found = slimmed(path)
    assert result.saved["unused storage"] == 184 and stored(found["a"]) == stored(found["b"]) == 8


def test_the_storages_of_a_tensor_that_torch_refuses_stay_whole(tmp_path: Path) -> None:
    values = tensor_ops(Tensor("0", (2,), 8))
    sparse = [("GLOBAL", "torch._utils", "_rebuild_sparse_tensor"), *push("no layout"), *values, "TUPLE1", "TUPLE2"]
    items = {"bad": [*sparse, "REDUCE"], "part": tensor_ops(Tensor("1", (2,), 8))}
    pickle = assemble(("PROTO", 2), *state_dict_ops(items), "STOP")
    path = tmp_path / "in.pth"
    path.write_bytes(torch_zip(pickle, [bytes(range(32)), bytes(range(32, 64))]))
    result = ckptfix.slim(path, tmp_path / "out.pth")
    assert result.exit_code == 0
    assert result.account is not None and not result.account.lost
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert archive.read("archive/data/0") == bytes(range(32))
        assert archive.read("archive/data/1") == bytes(range(32, 40))

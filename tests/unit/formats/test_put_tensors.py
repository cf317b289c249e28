"""Put on real files: torch reads the new shape or the new tensor, and everything else as it was."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Op, assemble, framed, push, torch_zip, written
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix.checkpoint import Derived, Edit, Put, Rename, Storage, TensorEntry, reshaped
from ckptfix.errors import CkptfixError, NoSuchTensor, Unsupported, WouldLoseData
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.io import write as io_write
from ckptfix.ops.audit.promise import listed

ZIP = [True, False]
Shapes = dict[str, tuple[int, ...]]


def edited(path: Path, *edits: Edit) -> Path:
    checkpoint = open_checkpoint(path)
    out = path.with_name(f"out{path.suffix}")
    io_write.write_plan(FORMATS[checkpoint.format].plan_edit(checkpoint, edits, str(out)))
    return out


def reshape(path: Path, shapes: Shapes, at: str = "") -> Path:
    return edited(path, put(path, shapes, at))


def put(path: Path, shapes: Shapes, at: str = "") -> Put:
    """The edit that gives tensors of `path` other shapes."""
    entries = {entry.key: entry for entry in listed(open_checkpoint(path)) if entry.at == at}
    missing = shapes.keys() - entries.keys()
    if missing:
        return Put(at, dict.fromkeys(missing, next(iter(entries.values()))))
    return Put(at, {name: reshaped(entries[name], shape) for name, shape in shapes.items()})


def saved(path: Path, value: Any, *, zipped: bool = True, protocol: int = 2) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    return path


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)


@pytest.mark.parametrize("zipped", ZIP)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((4, 6, 1, 1), (4, 6)),
        ((4, 6), (24,)),
        ((24,), (2, 3, 4)),
        ((1,), ()),
        ((), (1, 1)),
        ((0, 3), (0,)),
        ((300, 2), (2, 1, 300)),
        ((70000, 1), (1, 70000)),
        ((2, 3), (2, 3)),
    ],
)
def test_torch_reads_the_new_shape(
    tmp_path: Path, zipped: bool, protocol: int, old: tuple[int, ...], new: tuple[int, ...]
) -> None:
    state = OrderedDict([("a", numbers(*old)), ("b.weight", numbers(*old)), ("c", numbers(5, 2))])
    out = reshape(saved(tmp_path / "a.pth", state, zipped=zipped, protocol=protocol), {"b.weight": new})
    found = torch.load(out, weights_only=protocol == 2)
    assert list(found) == ["a", "b.weight", "c"]
    assert found["b.weight"].shape == new
    assert found["b.weight"].is_contiguous()
    assert torch.equal(found["b.weight"], state["b.weight"].reshape(new))
    assert torch.equal(found["a"], state["a"])
    assert torch.equal(found["c"], state["c"])
    if old == new:
        assert out.read_bytes() == (tmp_path / "a.pth").read_bytes()
    assert open_checkpoint(out).entries[1].shape == new


def tensor_ops(key: str, size: Sequence[Op], stride: Sequence[Op]) -> list[Op]:
    """A float32 tensor of two elements, its size and stride pushed by these opcodes."""
    return [
        ("GLOBAL", "torch._utils", "_rebuild_tensor_v2"), "MARK",
        "MARK", *push("storage"), ("GLOBAL", "torch", "FloatStorage"), *push(key), *push("cpu"), *push(2), "TUPLE",
        "BINPERSID", *push(0), *size, *stride, "NEWFALSE",
        ("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE", "TUPLE", "REDUCE",
    ]  # fmt: skip


def shared_tuples(put: Sequence[Op], get: Sequence[Op], protocol: int) -> bytes:
    """Three tensors [2, 1]: the first stores its size, and a stride of its own; the others fetch the size.

    A tuple (2, 1) stands outside of the tensors too. The stride (1, 1) is written out by each.
    """
    size: list[Op] = [*push(2), *push(1), "TUPLE2"]
    stride: list[Op] = [*push(1), *push(1), "TUPLE2"]
    ops: list[Op] = ["EMPTY_DICT", "MARK"]
    for index, name in enumerate("abc"):
        ops += [*push(name), *tensor_ops(str(index), get if index else [*size, *put], stride)]
    ops += [*push("outside"), *get, "SETITEMS"]
    stream = framed(*ops, protocol=protocol) if protocol >= 4 else assemble(("PROTO", protocol), *ops, "STOP")
    return torch_zip(stream, [struct.pack("<2f", index, index + 0.5) for index in range(3)])


@pytest.mark.parametrize(
    ("put", "get", "protocol"),
    [
        ([("BINPUT", 90)], [("BINGET", 90)], 2),
        ([("LONG_BINPUT", 70000)], [("LONG_BINGET", 70000)], 2),
        (["MEMOIZE"], [("BINGET", 0)], 4),
    ],
)
@pytest.mark.parametrize("names", ["a", "b", "ac", "bc", "abc"])
def test_a_shared_tuple_changes_only_where_it_should(
    tmp_path: Path, put: list[Op], get: list[Op], protocol: int, names: str
) -> None:
    path = written(tmp_path / "a.pth", shared_tuples(put, get, protocol))
    before = torch.load(path, weights_only=False)
    found = torch.load(reshape(path, dict.fromkeys(names, (2,))), weights_only=False)
    assert {name: tuple(found[name].shape) for name in "abc"} == {
        name: (2,) if name in names else (2, 1) for name in "abc"
    }
    assert found["outside"] == (2, 1)
    assert all(torch.equal(found[name].flatten(), before[name].flatten()) for name in "abc")


def test_size_and_stride_may_be_one_entry(tmp_path: Path) -> None:
    ones: list[Op] = [*push(1), "TUPLE1", ("BINPUT", 7)]
    one = tensor_ops("0", ones, [("BINGET", 7)])
    ops: list[Op] = ["EMPTY_DICT", "MARK", *push("a"), *one, *push("b"), ("BINGET", 7), "SETITEMS", "STOP"]
    stream = assemble(("PROTO", 2), *ops)
    path = written(tmp_path / "a.pth", torch_zip(stream, [struct.pack("<2f", 5, 6)]))
    found = load(reshape(path, {"a": (1, 1, 1)}))
    assert found["a"].shape == (1, 1, 1)
    assert found["b"] == (1,)


def test_parameters_and_their_wrappers(tmp_path: Path) -> None:
    state = {"a": torch.nn.Parameter(numbers(2, 3)), "b": torch.nn.Parameter(numbers(4), requires_grad=False)}
    state["b"].note = "kept"  # type: ignore[attr-defined]
    path = saved(tmp_path / "a.pth", state)
    found = torch.load(reshape(path, {"a": (6,), "b": (2, 2)}), weights_only=False)
    assert {name: (tuple(value.shape), value.requires_grad) for name, value in found.items()} == {
        "a": ((6,), True),
        "b": ((2, 2), False),
    }
    assert isinstance(found["a"], torch.nn.Parameter)
    assert found["b"].note == "kept"


def test_a_tensor_that_carries_attributes(tmp_path: Path) -> None:
    tensor = numbers(2, 3)
    tensor.note = "kept"  # type: ignore[attr-defined]
    found = torch.load(reshape(saved(tmp_path / "a.pth", {"a": tensor}), {"a": (3, 2)}), weights_only=False)
    assert (tuple(found["a"].shape), found["a"].note) == ((3, 2), "kept")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bfloat16, torch.bool, torch.complex64])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    path = saved(tmp_path / "a.pth", {"a": numbers(6, dtype=dtype), "b": numbers(2)})
    found = load(reshape(path, {"a": (2, 3)}))["a"]
    assert (found.dtype, found.shape) == (dtype, (2, 3))
    assert torch.equal(found.flatten().view(torch.uint8), load(path)["a"].view(torch.uint8))


def test_tied_names_stay_tied(tmp_path: Path) -> None:
    weight = numbers(2, 3)
    path = saved(tmp_path / "a.pth", {"a.w": weight, "b.w": weight, "c.w": weight.detach()})
    found = load(reshape(path, {"a.w": (6,)}))
    assert [tuple(found[name].shape) for name in found] == [(6,), (6,), (2, 3)]
    assert len({tensor.data_ptr() for tensor in found.values()}) == 1
    with pytest.raises(Unsupported, match="two shapes"):
        reshape(path, {"a.w": (6,), "b.w": (3, 2)})


def test_a_part_of_a_storage_is_contiguous_too(tmp_path: Path) -> None:
    whole = numbers(12)
    path = saved(tmp_path / "a.pth", {"a.w": whole[4:10], "b.w": whole})
    assert torch.equal(load(reshape(path, {"a.w": (2, 3)}))["a.w"], whole[4:10].reshape(2, 3))


def test_only_the_mapping_that_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"model": {"w": numbers(4)}, "ema": {"w": numbers(4)}, "epoch": 3})
    found = load(reshape(path, {"w": (2, 2)}, "ema"))
    assert found["ema"]["w"].shape == (2, 2)
    assert found["model"]["w"].shape == (4,)
    assert found["epoch"] == 3


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_together_with_new_names(tmp_path: Path, suffix: str) -> None:
    state = {"a.w": numbers(2, 3), "b.w": numbers(5)}
    path = tmp_path / f"a.{suffix}"
    if suffix == "pth":
        saved(path, state)
    else:
        save_file(state, path)
    out = edited(path, put(path, {"a.w": (6,)}), Rename("", "state_dict", {"a.w": "b.w", "b.w": "a.w"}))
    found = load(out) if suffix == "pth" else load_file(out)
    assert {name: tuple(value.shape) for name, value in found.items()} == {"b.w": (6,), "a.w": (5,)}


@pytest.mark.parametrize("zipped", ZIP)
@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("strided", (6,), "strided view"),
        ("sparse", (4,), "only a dense tensor"),
        ("quantized", (4,), "only a dense tensor"),
        ("dense", (5,), r"cannot be reshaped to \[5\]: its shape is \[2, 3\]"),
        ("epoch", (1,), "no such tensor"),
        ("missing", (1,), "no such tensor"),
    ],
)
def test_what_has_no_other_shape(tmp_path: Path, zipped: bool, name: str, shape: tuple[int, ...], says: str) -> None:
    state = {
        "strided": numbers(2, 3).T,
        "sparse": torch.eye(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(numbers(2, 2), 0.5, 0, torch.qint8),
        "dense": numbers(2, 3),
        "epoch": 3,
    }
    path = saved(tmp_path / "a.pth", state, zipped=zipped)
    with pytest.raises(CkptfixError, match=says):
        reshape(path, {name: shape})
    assert not (tmp_path / "out.pth").exists()


def test_safetensors(tmp_path: Path) -> None:
    state = {"a": numbers(2, 3), "b": numbers(4, dtype=torch.bfloat16), "c": numbers(1)}
    path = tmp_path / "a.safetensors"
    save_file(state, path, metadata={"format": "pt", "note": "[2,3]"})
    out = reshape(path, {"a": (3, 1, 2), "b": (2, 2), "c": ()})
    found = load_file(out)
    assert {name: tuple(value.shape) for name, value in found.items()} == {"a": (3, 1, 2), "b": (2, 2), "c": ()}
    assert all(torch.equal(found[name].flatten(), state[name].flatten()) for name in state)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "[2,3]"}


def test_safetensors_with_ties_and_views(tmp_path: Path) -> None:
    whole = numbers(12)
    torch_file = saved(tmp_path / "t.pth", {"a.w": whole, "b.w": whole, "part.w": whole[:4]})
    path = tmp_path / "a.safetensors"
    ckptfix.convert(torch_file, path)
    back = reshape(path, {"b.w": (3, 4)})
    ckptfix.convert(back, tmp_path / "back.pth")
    found = load(tmp_path / "back.pth")
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "a.w": (3, 4), "b.w": (3, 4), "part.w": (4,)
    }  # fmt: skip
    assert len({tensor.data_ptr() for tensor in found.values()}) == 1
    with pytest.raises(Unsupported, match="view of another"):
        reshape(path, {"part.w": (2, 2)})
    with pytest.raises(Unsupported, match="two shapes"):
        reshape(path, {"a.w": (2, 6), "b.w": (3, 4)})


@pytest.mark.parametrize(("name", "shape", "error"), [("a", (5,), Unsupported), ("x", (1,), NoSuchTensor)])
def test_safetensors_refuses(tmp_path: Path, name: str, shape: tuple[int, ...], error: type[CkptfixError]) -> None:
    save_file({"a": numbers(2, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(error):
        reshape(tmp_path / "a.safetensors", {name: shape})


def other(*shape: int, dtype: torch.dtype = torch.int32) -> TensorEntry:
    """A tensor of ones, as bytes in memory."""
    value = torch.ones(shape, dtype=dtype)
    content = value.numpy().tobytes()
    name = str(dtype).removeprefix("torch.")
    storage = Storage("new", name, len(content), "cpu", Derived(len(content), lambda: (content,), "test"))
    return TensorEntry("x", "", storage, name, shape, value.stride())


@pytest.mark.parametrize("zipped", ZIP)
@pytest.mark.parametrize("protocol", [2, 4])
def test_another_tensor_wherever_one_stands(tmp_path: Path, zipped: bool, protocol: int) -> None:
    weight, moment = numbers(2, 3), numbers(6)
    state = {
        "model": OrderedDict([("w", weight), ("tied", weight), ("b", numbers(2))]),
        "list": [numbers(3), numbers(3), "text"],
        "optimizer": {"state": {0: {"step": 3, "m": moment}}, "pair": (moment, 1)},
        "epoch": 5,
    }
    path = saved(tmp_path / "a.pth", state, zipped=zipped, protocol=protocol)
    out = edited(
        path,
        Put("model", {"w": other(4)}),
        Put("list", {"1": other(2, 2)}),
        Put("optimizer/state/0", {"m": other()}),
        Put("optimizer/pair", {"0": other(1, dtype=torch.uint8)}),
    )
    found = torch.load(out, weights_only=protocol == 2)
    assert list(found) == list(state) and list(found["model"]) == ["w", "tied", "b"]
    assert torch.equal(found["model"]["w"], torch.ones(4, dtype=torch.int32))
    assert torch.equal(found["model"]["tied"], weight) and torch.equal(found["model"]["b"], numbers(2))
    assert torch.equal(found["list"][0], numbers(3)) and found["list"][2] == "text"
    assert torch.equal(found["list"][1], torch.ones(2, 2, dtype=torch.int32))
    assert found["optimizer"]["state"][0]["m"] == 1 and found["optimizer"]["state"][0]["step"] == 3
    assert torch.equal(found["optimizer"]["pair"][0], torch.ones(1, dtype=torch.uint8))
    assert found["optimizer"]["pair"][1] == 1 and found["epoch"] == 5


@pytest.mark.parametrize("zipped", ZIP)
def test_a_tensor_of_any_kind_gives_way_to_a_dense_one(tmp_path: Path, zipped: bool) -> None:
    state = {
        "strided": numbers(2, 3).T,
        "sparse": torch.eye(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(numbers(2, 2), 0.5, 0, torch.qint8),
        "parameter": torch.nn.Parameter(numbers(2)),
        "last": numbers(3),
    }
    path = saved(tmp_path / "a.pth", state, zipped=zipped)
    found = load(edited(path, Put("", {name: other(2) for name in state if name != "last"})))
    assert all(torch.equal(found[name], torch.ones(2, dtype=torch.int32)) for name in state if name != "last")
    assert not found["parameter"].requires_grad and torch.equal(found["last"], numbers(3))


def test_legacy_refuses_what_torch_does_not_load_from_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"a": numbers(2)}, zipped=False)
    with pytest.raises(WouldLoseData, match="uint16"):
        edited(path, Put("", {"a": other(2, dtype=torch.uint16)}))

"""What torch.load fails on whatever weights_only=True accepts: found by doctor, and said by sanitize."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Op, Tensor, assemble, push, replace, state_dict_ops, tensor_ops, torch_zip

import ckptfix
from ckptfix.checkpoint import TensorEntry
from ckptfix.formats.torch.failing_calls import of_tensors

DATA = b"\0\0\x80\x3f\0\0\0\x40"
WEIGHT = Tensor("0", (2,), 2)


def called(module: str, name: str, *arguments: Op) -> list[Op]:
    return [("GLOBAL", module, name), *arguments, "REDUCE"]


def written(path: Path, value: Tensor | list[Op]) -> Path:
    ops = state_dict_ops({"w": WEIGHT, "x": value})
    path.write_bytes(torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [DATA, DATA]))
    return path


FLOAT: list[Op] = [("GLOBAL", "torch", "float32")]
HOOKS = called("collections", "OrderedDict", "EMPTY_TUPLE")


def parameter(*arguments: Op) -> list[Op]:
    return called("torch._utils", "_rebuild_parameter", "MARK", *tensor_ops(WEIGHT), *arguments, "TUPLE")


def with_state(state: object) -> list[Op]:
    name = "_rebuild_parameter_with_state"
    rest = [*push(True), *HOOKS, *push(state)]
    return called("torch._utils", name, "MARK", *tensor_ops(WEIGHT), *rest, "TUPLE")


BAD: dict[str, tuple[str, Tensor | list[Op]]] = {
    "bytearray": ("memory-bomb", called("builtins", "bytearray", *push((2**40,)))),
    **{f"bytearray of {kind}": ("bad-call", called("builtins", "bytearray", *push((value,))))
       for kind, value in [("text", "a"), ("a fraction", 1.5), ("nothing", None), ("less than nothing", -1),
                           ("a large number", [256])]},
    "stride 0": ("memory-bomb", replace(WEIGHT, shape=(2**62,), stride=(0,))),
    "windows": ("memory-bomb", replace(WEIGHT, shape=(2**20, 2**20), stride=(0, 0))),
    "numel": ("bad-tensor", replace(WEIGHT, key="1", numel=2**40)),
    "beyond": ("bad-tensor", replace(WEIGHT, shape=(9,))),
    "OrderedDict": ("bad-call", called("collections", "OrderedDict", *push(5))),
    "Counter": ("bad-call", called("collections", "Counter", *push((5,)))),
    "set": ("bad-call", called("builtins", "set", *push((5,)))),
    "device": ("bad-call", called("torch", "device", *push(("a:b:c",)))),
    "encode": ("bad-call", called("_codecs", "encode", *push(("\u4e2d", "latin1")))),
    "gradient": ("bad-call", replace(WEIGHT, key="1", storage_class="IntStorage", requires_grad=True)),
    "device of a number": ("bad-call", called("torch", "device", *push((2**40,)))),
    "device of no name": ("bad-call", called("torch", "device", *push(("gpu:0",)))),
    "device of no index": ("bad-call", called("torch", "device", *push(("cuda", -1)))),
    "list as key": ("bad-call", [*push({}), "EMPTY_LIST", "NONE", "SETITEM"]),
    "dict in a tuple as key": ("bad-call", [*push({}), "EMPTY_DICT", "TUPLE1", "NONE", "SETITEM"]),
    "OrderedDict as key": (
        "bad-call",
        [*push({}), *called("collections", "OrderedDict", "EMPTY_TUPLE"), "NONE", "SETITEM"],
    ),
    "set of lists": ("bad-call", called("builtins", "set", *push(([[]],)))),
    "storage class": ("bad-call", called("torch", "FloatStorage", *push((3,)))),
    "state of a Size": ("bad-call", [*called("torch", "Size", *push(((1,),))), *push({"a": 1}), "BUILD"]),
    "array": (
        "bad-call",
        called("torch._utils", "_rebuild_device_tensor_from_numpy", "MARK", *push("x"), *FLOAT, *push("cpu"),
               *push(False), "TUPLE"),
    ),
    "class": (
        "bad-call",
        called("torch._utils", "_rebuild_wrapper_subclass", "MARK", *push(None), *FLOAT, *push((2,)), *push((1,)),
               *push(0), *called("torch.serialization", "_get_layout", *push(("torch.strided",))), *push("cpu"),
               *push(False), "TUPLE"),
    ),
    "requires_grad": ("bad-call", parameter(*push(5), *HOOKS)),
    "too few": ("bad-call", parameter(*push(True))),
    "too many": ("bad-call", parameter(*push(True), *HOOKS, *push(1))),
    "data": ("bad-call", with_state({"data": 5})),
    "grad": ("bad-call", with_state({"grad": 5})),
    "requires_grad among attributes": ("bad-call", with_state({"requires_grad": 7})),
    "shape": ("bad-call", with_state({"shape": 5})),
    "state": ("bad-call", with_state(5)),
    "state of a tensor": ("bad-call", [*tensor_ops(WEIGHT), *push((5,)), "BUILD"]),
}  # fmt: skip
GOOD: dict[str, Tensor | list[Op]] = {
    "bytearray": called("builtins", "bytearray", *push((8,))),
    "bytes": called("_codecs", "encode", *push(("\xff", "latin1"))),
    "OrderedDict": called("collections", "OrderedDict", "EMPTY_TUPLE"),
    "pairs": called("collections", "OrderedDict", *push(([["a", 1]],))),
    "Counter": called("collections", "Counter", *push(({"a": 1},))),
    "set": called("builtins", "set", *push(([1, 2],))),
    "Size": called("torch", "Size", *push(((2, 3),))),
    "device": called("torch", "device", *push(("cpu", 0))),
    "complex": called("builtins", "complex", *push((1.0, 2.0))),
    "expanded": replace(WEIGHT, shape=(4096, 4096), stride=(0, 0)),
    "gradient": replace(WEIGHT, requires_grad=True),
    "cuda:0": called("torch", "device", *push(("cuda:0",))),
    "tuple as key": [*push({}), *push((1, "a")), "NONE", "SETITEM"],
    "parameter": parameter(*push(True), *HOOKS),
    "attributes": with_state({"tag": 5, "grad": None}),
    "slots": with_state((None, {"tag": 5})),
}


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("name", BAD)
def test_doctor_has_a_finding_and_sanitize_exits_3(name: str, tmp_path: Path) -> None:
    id, value = BAD[name]
    path = written(tmp_path / "in.pth", value)
    diagnosis = ckptfix.doctor(path)
    assert diagnosis.exit_code() == 1
    assert [finding.severity for finding in diagnosis.findings if finding.id == id] == ["error"]
    result = ckptfix.sanitize(path, tmp_path / "out.pth")
    assert result.exit_code == 3 and "nothing to do" not in " ".join(result.lines)
    assert {finding.id for finding in result.findings} in ({"unloadable"}, {"dropped"})
    assert json.dumps(result.as_dict())


@pytest.mark.parametrize("name", [name for name, (id, _) in BAD.items() if id != "memory-bomb"])
def test_torch_does_fail(name: str, tmp_path: Path) -> None:
    if name == "device of a number" and torch.version.cuda:
        pytest.skip("a build for CUDA takes any number for a device")
    path = written(tmp_path / "in.pth", BAD[name][1])
    with pytest.raises((RuntimeError, TypeError, ValueError, AttributeError)):
        torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", GOOD)
def test_what_torch_takes_has_no_finding(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "in.pth", GOOD[name])
    torch.load(path, weights_only=True)
    ids = {finding.id for finding in ckptfix.doctor(path).findings}
    assert not ids & {"memory-bomb", "bad-call", "bad-tensor"}
    assert ckptfix.sanitize(path, tmp_path / "out.pth").exit_code == 0


def test_what_was_left_out_is_not_reported(tmp_path: Path) -> None:
    bad = ["EMPTY_LIST", *tensor_ops(replace(WEIGHT, shape=(9,))), "APPEND"]
    ops = state_dict_ops({"state_dict": state_dict_ops({"a.weight": WEIGHT}), "x": bad})
    path = tmp_path / "in.pth"
    path.write_bytes(torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [DATA]))
    assert ckptfix.sanitize(path, tmp_path / "all.pth").exit_code == 3
    assert ckptfix.sanitize(path, tmp_path / "weights.pth", keep_only="weights").exit_code == 0
    assert torch.load(tmp_path / "weights.pth", weights_only=True)["state_dict"]["a.weight"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("point", "good"),
    [(0, True), ((1 << 63) - 1, True), (1 << 63, False), (-(1 << 63), True), (-(1 << 63) - 1, False)],
)
def test_a_zero_point_is_a_number_of_64_bits(point: int, good: bool) -> None:
    detail = f"per_tensor_affine, 0.5, {point}"
    entry = TensorEntry("w", "", None, "qint8", (2,), (1,), 0, kind="quantized", detail=detail)
    assert [row.id for row in of_tensors([entry])] == ([] if good else ["bad-call"])


@pytest.mark.parametrize(("marks", "detail"), [
    ({}, ""), ({"conj": True}, "conj"), ({"conj": False, "neg": True}, "neg"), ({"other": True, "conj": 1}, ""),
])  # fmt: skip
def test_marks_of_a_tensor_are_those_that_torch_knows(marks: dict[str, Any], detail: str, tmp_path: Path) -> None:
    ops = tensor_ops(replace(WEIGHT, key="1", shape=(1,), numel=1, storage_class="ComplexFloatStorage"))
    assert ops[-2:] == ["TUPLE", "REDUCE"]
    path = written(tmp_path / "in.pth", [*ops[:-2], *push(marks), *ops[-2:]])
    (entry,) = [one for one in ckptfix.open_checkpoint(path).entries if one.key == "x"]
    assert entry.detail == detail

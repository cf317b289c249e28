"""Two files, compared: which tensors, properties and elements differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from builders import Tensor, assemble, state_dict_ops, torch_zip, written
from conftest import RealFile
from kinds import KINDS, Kind, cases, tensor
from torch import nn

from ckptfix import formats
from ckptfix.errors import CkptfixError
from ckptfix.ops.diff.compare import DiffResult, diff
from ckptfix.ops.diff.result import Difference, Sharing

Compare = Callable[..., DiffResult]
Save = Callable[..., Path]


@pytest.mark.slow
@pytest.mark.sampled(42)
@pytest.mark.parametrize(("kind", "container"), cases())
def test_an_object_saved_twice_is_the_same(kind: Kind, container: str, tmp_path: Path, compare: Compare) -> None:
    a, b = kind.save(tmp_path / "1.pth", container), kind.save(tmp_path / "2.pth", container)
    result = compare(a, b)
    if kind.name == "meta":
        assert not result.same and "no data on both sides" in str(result)
        return
    assert result.same, result
    assert result.counts.matched == result.counts.equal == len(formats.open_checkpoint(a).entries)


# The legacy format keeps the source code of whole modules, the zip format does not.
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [one for one in KINDS.values() if len(one.containers) == 2 and one.name not in ("whole-module", "meta")],
    ids=lambda one: one.name,
)
def test_both_torch_formats_hold_the_same(kind: Kind, tmp_path: Path, compare: Compare) -> None:
    result = compare(kind.save(tmp_path / "1.pth", "zip"), kind.save(tmp_path / "2.pth", "legacy"))
    assert result.same, result


def test_a_real_file_is_the_same_as_itself(real_file: RealFile) -> None:
    try:
        checkpoint = formats.open_checkpoint(real_file.path)
    except CkptfixError as error:
        pytest.skip(str(error))
    result = diff(checkpoint, formats.open_checkpoint(real_file.path))
    assert result.same, result.lines


def test_all_formats_hold_the_same(tmp_path: Path, compare: Compare, as_safetensors: Save) -> None:
    tensors = {"fc.weight": tensor(5, 3), "fc.bias": tensor(5).bfloat16(), "steps": torch.tensor(7)}
    files = [tmp_path / "a.pth", tmp_path / "b.pth", as_safetensors(tmp_path / "c.safetensors", tensors)]
    torch.save(tensors, files[0])
    torch.save(tensors, files[1], _use_new_zipfile_serialization=False)
    for a in files:
        for b in files:
            assert compare(a, b).same
    assert compare(files[0], files[2]).format_b == "safetensors"


def test_what_safetensors_leaves_unsaid_is_not_compared(tmp_path: Path, compare: Compare, as_safetensors: Save) -> None:
    weight = nn.Parameter(tensor(3, 4))
    other = as_safetensors(tmp_path / "b.safetensors", {"w": weight.detach(), "v": weight.detach().clone()})
    assert compare({"w": weight, "v": weight}, other).same
    view = as_safetensors(tmp_path / "c.safetensors", {"w": tensor(4, 3)})
    assert compare({"w": tensor(4, 3).t().contiguous().t()}, view).same


def test_names_that_safetensors_only_ties(tmp_path: Path, compare: Compare) -> None:
    path = tmp_path / "b.safetensors"
    safetensors.torch.save_file({"embed": tensor(3)}, path, {"head": "embed"})
    assert compare({"embed": tensor(3), "head": tensor(3)}, path).same
    assert compare({"embed": tensor(3), "head": tensor(3) + 1}, path).changed[0].name_b == "head"


def test_conjugate_bits_are_not_the_same_as_plain_ones(tmp_path: Path, compare: Compare, as_safetensors: Save) -> None:
    value = torch.complex(tensor(3), tensor(3, seed=1))
    result = compare({"z": value.conj()}, as_safetensors(tmp_path / "b.safetensors", {"z": value}))
    found = result.changed[0].values
    assert found is not None
    assert found.differing == 3
    assert found.max_abs == pytest.approx(2 * value.imag.abs().max().item())
    assert compare({"z": value.conj()}, as_safetensors(tmp_path / "b.safetensors", {"z": value.conj() + 0})).same


def test_shape_and_dtype(compare: Compare) -> None:
    result = compare(
        {"a": tensor(2, 3), "b": torch.tensor([1.0, 2.5])}, {"a": tensor(3, 2), "b": torch.tensor([1.0, 2.0]).half()}
    )
    a, b = result.changed
    assert a.differences == (Difference("shape", (2, 3), (3, 2)),)
    assert a.values is None
    assert b.differences == (Difference("dtype", "float32", "float16"),)
    assert b.values is not None
    assert (b.values.differing, b.values.max_abs) == (1, 0.5)


def test_dtypes_of_equal_values(compare: Compare) -> None:
    (row,) = compare({"a": torch.ones(3)}, {"a": torch.ones(3).bfloat16()}).changed
    assert ([found.what for found in row.differences], row.values) == (["dtype"], None)


def test_device(tmp_path: Path, compare: Compare) -> None:
    def on(location: str) -> Path:
        ops = state_dict_ops({"w": Tensor("0", (2,), 2, location=location)})
        pickle = assemble(("PROTO", 2), *ops, "STOP")
        return written(tmp_path / location.replace(":", ""), torch_zip(pickle, [b"\0" * 8]))

    (row,) = compare(on("cpu"), on("cuda:1")).changed
    assert row.differences == (Difference("device", "cpu", "cuda:1"),)
    assert row.values is None


def test_requires_grad_parameter_and_stride(compare: Compare) -> None:
    square = tensor(3, 4)
    result = compare(
        {"p": nn.Parameter(tensor(2)), "g": tensor(2), "t": square.t().contiguous()},
        {"p": tensor(2), "g": tensor(2).requires_grad_(), "t": square.t()},
    )
    found = {row.name_a: {d.what: (d.a, d.b) for d in row.differences} for row in result.changed}
    assert found == {
        "p": {"requires_grad": (True, False), "parameter": (True, False)},
        "g": {"requires_grad": (False, True)},
        "t": {"stride": ((3, 1), (1, 4))},
    }
    assert all(row.values is None for row in result.changed)


def test_strides_without_a_step_do_not_differ(compare: Compare) -> None:
    assert compare({"w": torch.ones(3).as_strided((3, 1), (1, 7))}, {"w": torch.ones(3, 1)}).same


def test_shared_storage(compare: Compare) -> None:
    w = tensor(3)
    result = compare({"embed": w, "head": w, "x": tensor(2)}, {"embed": w, "head": w.clone(), "x": tensor(2)})
    assert result.sharing == (Sharing("a", ("embed", "head")),)
    assert (result.changed, result.same) == ((), False)
    assert compare({"embed": w, "head": w}, {"embed": w, "head": w}).same


def test_values(compare: Compare) -> None:
    (row,) = compare({"w": torch.tensor([1.0, 2.0, math.nan])}, {"w": torch.tensor([1.0, 4.0, math.nan])}).changed
    assert (row.match, row.differences) == ("name", ())
    assert row.values is not None
    assert (row.values.elements, row.values.differing, row.values.max_abs, row.values.mean_abs) == (3, 1, 2.0, 1.0)
    assert row.values.rel_l2 == pytest.approx(2 / math.sqrt(17))


def test_tolerance(compare: Compare) -> None:
    a, b = {"w": torch.tensor([1.0, 100.0]), "lr": 0.1}, {"w": torch.tensor([1.0, 101.0]), "lr": 0.1 + 1e-12}
    assert not compare(a, b).same
    result = compare(a, b, atol=1.0)
    assert result.same
    assert [row.values.max_abs for row in result.close if row.values] == [1.0]
    assert compare(a, b, rtol=0.01).same
    assert not compare(a, b, rtol=0.0099).same
    assert compare(a, b, rtol=0.01).counts.equal == 1


@pytest.mark.parametrize("bad", [{"rtol": -1.0}, {"atol": math.nan}])
def test_a_tolerance_must_be_a_number(bad: dict[str, float], compare: Compare) -> None:
    with pytest.raises(ValueError, match="tolerance"):
        compare({"w": tensor(2)}, {"w": tensor(2)}, **bad)


def test_equal_values_of_other_bytes_are_named(compare: Compare) -> None:
    result = compare({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])})
    assert result.same
    assert [row.name_a for row in result.close] == ["w"]
    assert "1 tensor with different bytes" in " ".join(result.lines)


def changed_parts(result: DiffResult) -> list[str]:
    return [row.name_a for row in result.changed if row.values is not None]


def test_sparse_tensors_by_their_parts(compare: Compare) -> None:
    def sparse(value: float, place: int = 1) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[0, place]]), torch.tensor([3.0, value]), (4,)).coalesce()

    assert compare({"s": sparse(1)}, {"s": sparse(1)}).same
    assert changed_parts(compare({"s": sparse(1)}, {"s": sparse(2)})) == ["s.values"]
    assert changed_parts(compare({"s": sparse(1)}, {"s": sparse(1, 2)})) == ["s.indices"]
    (row,) = compare({"s": sparse(1).to_dense()}, {"s": sparse(1)}).changed
    assert "kind" in [found.what for found in row.differences]


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors(compare: Compare) -> None:
    def quantized(scale: float, values: list[float]) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.tensor(values).float(), scale, 0, torch.qint8)

    assert compare({"q": quantized(0.5, [1, 2])}, {"q": quantized(0.5, [1, 2])}).same
    (row,) = compare({"q": quantized(0.5, [1, 2])}, {"q": quantized(0.5, [1, 3])}).changed
    assert row.values is not None
    assert (row.values.differing, row.values.max_abs) == (1, None)
    (row,) = compare({"q": quantized(0.5, [1, 2])}, {"q": quantized(0.25, [0.5, 1])}).changed
    assert ([found.what for found in row.differences], row.values) == (["detail"], None)


def test_strided_views(compare: Compare) -> None:
    base = tensor(20, 30)
    other = base.clone()
    other[3, 4] += 1
    assert compare({"v": base[:, ::2]}, {"v": base[:, ::2]}).same
    assert compare({"v": base[:, 1::2]}, {"v": other[:, 1::2]}).same  # what differs lies between
    (row,) = compare({"v": base[:, ::2]}, {"v": other[:, ::2]}).changed
    assert row.values is not None
    assert (row.values.elements, row.values.differing) == (300, 1)
    dense = compare({"v": base.t()}, {"v": base.t().contiguous()})
    assert [row.values for row in dense.changed] == [None]


def test_tied_tensors_are_compared_once_and_reported_for_each(compare: Compare) -> None:
    w, other = tensor(1000), tensor(1000) + 1
    read: list[tuple[int, int]] = []
    result = compare(
        {"a": w, "b": w}, {"a": other, "b": other}, progress=lambda done, total: read.append((done, total))
    )
    assert changed_parts(result) == ["a", "b"]
    assert read[-1] == (4000, 4000)


def test_a_view_without_end_is_not_read(tmp_path: Path, compare: Compare) -> None:
    def endless(value: bytes) -> Path:
        ops = state_dict_ops({"w": Tensor("0", (1 << 40, 1 << 20), 1, stride=(0, 0))})
        return written(tmp_path / value.hex(), torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [value]))

    assert compare(endless(b"\0\0\0\0"), endless(b"\0\0\0\0")).same
    (row,) = compare(endless(b"\0\0\0\0"), endless(b"\0\0\0\1")).changed
    assert row.values is not None
    assert "repeats its storage" in str(row.values.reason)

"""The quantizers of a tensor: those that torch rebuilds, and names that it has or may have and does not rebuild."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import push
from property.impossible import DENSE, GOOD, beside, called, tuple_of

import ckptfix
from ckptfix.formats.torch.tensors import QUANTIZERS

OTHERS = [
    ("torch", "per_tensor_symmetric"), ("torch", "per_channel_symmetric"), ("torch", "per_block_affine"),
    ("torch", "load"), ("torch", "float32"), ("torch.hub", "per_tensor_affine"), ("os", "per_tensor_affine"),
    ("os", "system"), ("torch", "per_tensor_affine.x"),
]  # fmt: skip


def file_with(module: str, name: str, *parameters: object) -> bytes:
    pushed = [part if isinstance(part, list) else push(part) for part in parameters]
    row = GOOD["torch._utils._rebuild_qtensor"]
    scheme = tuple_of([("GLOBAL", module, name)], *pushed)
    return beside(called("torch._utils._rebuild_qtensor", tuple_of(*row[:4], scheme, *row[5:])))


def test_the_table_has_every_quantizer_that_torch_rebuilds() -> None:
    known = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.qscheme)}
    assert known - set(QUANTIZERS) == {"per_tensor_symmetric", "per_channel_symmetric"}
    assert set(QUANTIZERS) <= known


@pytest.mark.parametrize(("module", "name"), OTHERS)
@pytest.mark.parametrize("parameters", [(0.5, 1), (DENSE, DENSE, 0), ()])
def test_any_other_scheme_is_an_error_and_repair_leaves_the_tensor_out(
    tmp_path: Path, module: str, name: str, parameters: tuple[object, ...]
) -> None:
    """A name under torch that ckptfix does not know is no quantizer of a later torch either."""
    path = tmp_path / "in.pth"
    path.write_bytes(file_with(module, name, *parameters))
    wrong = [row for row in ckptfix.doctor(path).findings if row.id == "bad-tensor"]
    assert wrong and wrong[0].severity == "error" and f"{module}.{name}" in wrong[0].message
    with pytest.raises(Exception):  # noqa: B017 (torch has many)
        torch.load(path, weights_only=False, map_location="cpu")
    ckptfix.repair(path, tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True, map_location="cpu")
    assert list(found) == ["module.w"]


@pytest.mark.parametrize("parameters", [(), (0.5,), (0.5, 1, 2)])
def test_another_number_of_parameters_is_an_error(tmp_path: Path, parameters: tuple[object, ...]) -> None:
    path = tmp_path / "in.pth"
    path.write_bytes(file_with("torch", "per_tensor_affine", *parameters))
    wrong = [row.message for row in ckptfix.doctor(path).findings if row.id == "bad-tensor"]
    assert wrong and "parameters instead of 2" in wrong[0]

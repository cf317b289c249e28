"""A kind of tensor that only the tests have: a dense tensor and a number, by which it is multiplied.

It is all that a new kind needs: the row of its rebuild call, and the row of the kind.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ckptfix.checkpoint import TensorEntry
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.calls import Args, RebuildCall, StorageOf, TensorKind
from ckptfix.formats.torch.tensors import KINDS, BadTensor, is_tensor, tensor_entry

NAME = "_rebuild_scaled_tensor"


def rebuild(values: torch.Tensor, scale: float) -> torch.Tensor:
    """What torch would call."""
    return values * scale


class Scaled:
    """What the tests save."""

    def __init__(self, values: torch.Tensor, scale: float) -> None:
        self.arguments = values, scale

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_scaled_tensor, self.arguments  # type: ignore[attr-defined]


def read(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    values, scale = args
    if not is_tensor(values) or type(scale) is not float:
        raise BadTensor("a scaled tensor is a tensor and a number")
    part = tensor_entry(values, f"{key}.values", at, storage_of)
    return TensorEntry(
        key, at, None, part.dtype, part.shape, part.stride, kind="scaled", parts=(part,), detail=repr(scale)
    )


def refused(entry: TensorEntry) -> str:
    return "" if math.isfinite(float(entry.detail)) else f"the scale {entry.detail} is not finite"


def misfit(entry: TensorEntry, tensor: torch.Tensor) -> str | None:
    return None if tensor.is_floating_point() else "scaled in the file, integers in the model"


CALL = RebuildCall("torch._utils", NAME, "scaled", (99, 0), "it exists only in tests")
KIND = TensorKind(
    "scaled",
    read,
    load=lambda maker, entry: maker(entry.parts[0]) * float(entry.detail),
    misfit=misfit,
    refused=refused,
    from_tensors=True,
    codes=True,
)


def offer(patch: pytest.MonkeyPatch) -> None:
    """Add the kind to the tables, and its function to torch, for pickle."""
    rebuild.__module__, rebuild.__qualname__ = "torch._utils", NAME
    patch.setattr(torch._utils, NAME, rebuild, raising=False)
    patch.setitem(calls.BY_NAME, (CALL.module, CALL.name), CALL)
    patch.setitem(KINDS, KIND.name, KIND)

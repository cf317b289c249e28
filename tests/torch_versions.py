"""Differences between versions of torch, for tests that run on several of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from io import BytesIO
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch import nn, optim
from torch.distributed.checkpoint.state_dict_saver import save

ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in signature(save).parameters else {}
"""Arguments of DCP's save and load in a process without a process group; older versions find out by themselves."""

_distribute: Any = getattr(torch.distributed.tensor, "distribute_tensor", None)
NOT_SENT: dict[str, Any] = (
    {"src_data_rank": None} if _distribute and "src_data_rank" in signature(_distribute).parameters else {}
)
"""Arguments of distribute_tensor (torch 2.7 and later) with which each rank takes its part of its own tensor."""

ADAMW_IS_ADAM = "decoupled_weight_decay" in optim.Adam([torch.zeros(1, requires_grad=True)]).defaults
"""Since torch 2.7; before, nothing in a file tells Adam's state from AdamW's."""

SATURATES = not bool(torch.full((1,), 1e6).to(torch.float8_e4m3fn).float().isnan())
"""Whether numbers beyond the range of fp8 become its largest, as in torch 2.13; in torch 2.9 they become NaN."""


def is_saved(dtype: str) -> bool:
    """Whether torch has a dtype and saves tensors of it: uint16 to uint64 since torch 2.5, E8M0 since 2.7."""
    if not hasattr(torch, dtype):
        return False
    try:
        torch.save(torch.empty(1, dtype=getattr(torch, dtype)), BytesIO())
    except (KeyError, RuntimeError, NotImplementedError):
        return False
    return True


def add_pre_hook(module: nn.Module) -> None:
    """Give a module a hook that runs before its state dict is loaded, which does nothing."""
    name = "register_load_state_dict_pre_hook"  # private before torch 2.5
    getattr(module, name if hasattr(module, name) else f"_{name}")(lambda *_: None)


def need_named_parameters() -> None:
    """Skip the test where no optimizer keeps the names of its parameters."""
    try:
        optim.SGD(nn.Linear(1, 1).named_parameters())
    except TypeError:
        pytest.skip("optimizers take named parameters since torch 2.6")


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a model with their names, for an optimizer that keeps them."""
    need_named_parameters()
    return model.named_parameters()


def need_dtensor() -> None:
    """Skip the test where DTensor is not public."""
    if _distribute is None:
        pytest.skip("torch.distributed.tensor is public since torch 2.5")


def is_safe(value: object) -> bool:
    """Whether ``torch.load(weights_only=True)`` takes a value: sets since torch 2.5, nested tensors before 2.15."""
    data = BytesIO()
    torch.save(value, data)
    data.seek(0)
    try:
        torch.load(data, weights_only=True)
    except UnpicklingError:
        return False
    return True


@contextmanager
def checksums(computed: bool) -> Iterator[None]:
    """Save zips with or without CRC-32; torch before 2.5 always computes them."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        if not computed:
            pytest.skip("torch before 2.5 always computes checksums")
        yield
        return
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(computed)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)

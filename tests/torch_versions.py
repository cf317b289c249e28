"""Differences between versions of torch, for tests that run on several of them."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import optim
from torch.distributed.checkpoint import save
from torch.distributed.tensor import distribute_tensor

ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in signature(save).parameters else {}
"""Arguments of DCP's save and load in a process without a process group; older versions find out by themselves."""

NOT_SENT: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in signature(distribute_tensor).parameters else {}
"""Arguments of distribute_tensor (torch 2.7 and later) with which each rank takes its part of its own tensor."""

ADAMW_IS_ADAM = "decoupled_weight_decay" in optim.Adam([torch.zeros(1, requires_grad=True)]).defaults
"""Since torch 2.7; before, nothing in a file tells Adam's state from AdamW's."""

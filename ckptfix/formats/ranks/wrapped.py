"""The forms in which a rank's file has a part of a tensor: what tells it from a whole one.

Every file is asked for them, so that this needs less than reading the part does (`ranks.shards`).
"""

from __future__ import annotations

import re

from ckptfix.checkpoint.tree import Item
from ckptfix.formats.torch.state import state_rows
from ckptfix.formats.torch.tensors import is_wrapper
from ckptfix.formats.torch.tree import like, node_of
from ckptfix.pickles import Call, Global
from ckptfix.pickles.graph import Node


def wrapped(node: Node) -> tuple[str, list[tuple[str, Node]]]:
    """Return (class, state) of a wrapper subclass, also of one inside a parameter."""
    depth = 0
    while type(node) is Call and type(node.args) is tuple and node.args and type(node.args[0]) is Call and depth < 8:
        node, depth = node.args[0], depth + 1
    if type(node) is Call and type(node.args) is tuple and len(node.args) >= 4 and type(node.args[1]) is Global:
        func, cls, _, state = node.args[:4]
        if type(cls) is Global and is_wrapper(func):
            return cls.full, state_rows(cls, state)
    return "", []


def wrapped_of(item: Item) -> tuple[str, dict[str, Item]]:
    """Return the same of an item of the tree of values."""
    cls, state = wrapped(node_of(item))
    return cls, {name: like(item, node) for name, node in state}


def is_dtensor(name: str) -> bool:
    return name.rpartition(".")[2] == "DTensor"


_FLAT = re.compile(r"_flat_param\w*|flat_param(_\d+)?", re.ASCII)


def is_flat(key: str) -> bool:
    """Return whether `key` is the name of the flattened parameters of an FSDP unit.

    torch 2 calls them ``_flat_param``, torch 1.12 and 1.13 ``flat_param``, and fairscale ``flat_param_0``
    (torch/distributed/fsdp, fairscale/nn/misc/flatten_params_wrapper.py).
    """
    return _FLAT.fullmatch(key.rpartition(".")[2]) is not None


FLAT = (
    "load each file into the same FSDP model on as many ranks, as a LOCAL_STATE_DICT, and save its "
    "FULL_STATE_DICT: the lines are in `ckptfix help recipes`, under flat parameters"
)
"""Advice that joins flat parameters: only torch can cut them into those of a model."""

FAIRSCALE = (
    "fairscale joins them: FullyShardedDataParallel.consolidate_shard_weights, with the state dicts of all ranks and "
    "their shard_metadata (local_metadata_dict() of the wrapped model)"
)
"""The same for fairscale, whose names count from ``flat_param_0``."""


def flat_way(key: str) -> str:
    """Return the advice that joins flat parameters with this key."""
    return FAIRSCALE if re.fullmatch(r"(.*\.)?flat_param_\d+", key) else FLAT

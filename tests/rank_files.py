"""What each rank of a job saves, made on one process: the group is torch's fake one, which talks to no other process.

``zero3`` is put together to DeepSpeed's layout (deepspeed/runtime/engine.py, ``_save_checkpoint``), without DeepSpeed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch_versions import NOT_SENT, need_dtensor

WORLD = 2


@contextmanager
def group(rank: int = 0, world: int = WORLD) -> Iterator[None]:
    """As rank `rank` of `world`. A group of other tests of this process ends; they begin one when they need it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def dtensors(path: Path, rank: int = 0, buffers: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """A state dict of DTensors: one split over both ranks, one replicated; what lies on this rank is given back.

    Args:
        buffers: plain tensors beside them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    need_dtensor()
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local = {"fc.weight": torch.arange(6.0).view(2, 3) + rank, "fc.bias": torch.tensor([1.0, 2.0, 3.0])}
    with group(rank):
        mesh: Any = init_device_mesh("cpu", (WORLD,))
        whole = torch.Size([4, 3])
        state: dict[str, Any] = {
            "fc.weight": DTensor.from_local(local["fc.weight"], mesh, [Shard(0)], shape=whole, stride=(3, 1)),
            "fc.bias": DTensor.from_local(local["fc.bias"], mesh, [Replicate()]),
        }
        mesh._hash = None  # differs from run to run, as hashes of text do
        for value in state.values():
            value._spec._hash = None
        torch.save(OrderedDict(state, **(buffers or {})), path)
    return local


Placed = tuple[torch.Tensor, tuple[str, ...]]
"""A tensor, and how each dimension of the mesh cuts it: ``"0"`` along dimension 0, ``"s0"`` strided, ``"*"`` not."""


def distributed(path: Path, rank: int, mesh: tuple[int, ...], tensors: dict[str, Placed], **plain: Any) -> None:
    """A state dict of DTensors on a mesh, each cut by torch itself, as `rank` has it; `plain` values beside them."""
    from torch.distributed.device_mesh import init_device_mesh
    need_dtensor()
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    with group(rank, math.prod(mesh)):
        on: Any = init_device_mesh("cpu", mesh, mesh_dim_names=tuple("abcd"[: len(mesh)]))
        state: dict[str, Any] = {}
        done: dict[int, Any] = {}
        for name, (whole, how) in tensors.items():
            if id(whole) not in done:
                if how[0].startswith("s"):
                    # FSDP over tensor parallelism: the last dimension of the mesh cuts first.
                    dim = int(how[0][1:])
                    inner = whole.tensor_split(mesh[1], dim)[on.get_local_rank(1)]
                    local = inner.tensor_split(mesh[0], dim)[on.get_local_rank(0)].clone()
                    placements: list[Any] = [_StridedShard(dim, split_factor=mesh[1]), Shard(dim)]
                    done[id(whole)] = DTensor.from_local(
                        local, on, placements, run_check=False, shape=whole.shape, stride=whole.stride()
                    )
                else:
                    placements = [Replicate() if word == "*" else Shard(int(word)) for word in how]
                    done[id(whole)] = _part(whole, on, placements)
            state[name] = done[id(whole)]
        torch.save({**state, **plain}, path)


def _part(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> torch.Tensor:
    """This rank's part of a tensor that each rank has, without communication."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if NOT_SENT:
        return distribute_tensor(whole, mesh, placements, **NOT_SENT)
    local = whole
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            pieces, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False, contiguous=True)
            local = pieces[mesh.get_local_rank(axis)]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def sharded(path: Path, rank: int = 0, *, elsewhere: bool = False) -> dict[str, torch.Tensor]:
    """A state dict with a ShardedTensor, as FSDP's SHARDED_STATE_DICT; what lies on this rank is given back.

    With `elsewhere` there is one more, ``scale``, all of which lies on another rank.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard

    local = {"fc.weight": torch.arange(6.0).view(2, 3) + rank, "fc.bias": torch.tensor([1.0, 2.0, 3.0])}
    with group(rank):
        rows = [ShardMetadata([2 * row, 0], [2, 3], f"rank:{row}/cpu") for row in range(WORLD)]
        about = ShardedTensorMetadata(rows, torch.Size([4, 3]), TensorProperties(torch.float32))
        made = ShardedTensor._init_from_local_shards_and_global_metadata([Shard(local["fc.weight"], rows[rank])], about)
        state: dict[str, Any] = {"fc.weight": made, "fc.bias": local["fc.bias"]}
        if elsewhere:
            there = [ShardMetadata([0], [1], f"rank:{WORLD - 1 - rank}/cpu")]
            about = ShardedTensorMetadata(there, torch.Size([1]), TensorProperties(torch.float32))
            state["scale"] = ShardedTensor._init_from_local_shards_and_global_metadata([], about)
        torch.save(OrderedDict(state), path)
    return local


def flat(path: Path, rank: int = 0, key: str = "_flat_param", *, original: bool = False) -> None:
    """A state dict of two FSDP1 units as LOCAL_STATE_DICT saves it (torch/distributed/fsdp/_state_dict_utils.py).

    Each unit is a ShardedTensor in one row. With `original`, as of use_orig_params, this rank's part of the row is
    there under the names of the parameters too, as views of its memory.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard

    state: dict[str, Any] = {}
    with group(rank):
        for unit, size in (("", 10), ("blocks.0.", 6)):
            rows = [ShardMetadata([size * one], [size], f"rank:{one}/cpu") for one in range(WORLD)]
            about = ShardedTensorMetadata(rows, torch.Size([size * WORLD]), TensorProperties(torch.float32))
            local = torch.arange(float(size)) + rank
            shards = [Shard(local, rows[rank])]
            state[f"{unit}{key}"] = ShardedTensor._init_from_local_shards_and_global_metadata(shards, about)
            if original:
                state |= {f"{unit}fc.weight": local[: size - 2], f"{unit}fc.bias": local[size - 2 :]}
        torch.save(OrderedDict(state), path)


def zero3(path: Path) -> dict[str, torch.Tensor]:
    """The model states of a rank: shapes in ``param_shapes``, and empty tensors in ``module``."""
    shapes = OrderedDict({"fc.weight": torch.Size([4, 3]), "fc.bias": torch.Size([4])})
    module = OrderedDict((name, torch.empty(0)) for name in shapes)
    module["steps"] = torch.tensor(3)
    states = {
        "module": module, "buffer_names": ["steps"], "optimizer": None, "param_shapes": [shapes],
        "frozen_param_shapes": None, "dp_world_size": WORLD, "mp_world_size": 1, "ds_version": "0.19.8",
    }  # fmt: skip
    torch.save(states, path)
    return dict(module)


def distcp(path: Path) -> dict[str, torch.Tensor]:
    """A file of ``torch.distributed.checkpoint`` of two tensors: torch archives end to end."""
    tensors = {"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.tensor([1.0, 2.0, 3.0])}
    with path.open("wb") as file:
        for tensor in tensors.values():
            torch.save(tensor, file)
    return tensors

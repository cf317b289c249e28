"""Runs a function of this module on several ranks of gloo, forked from one interpreter that has imported torch.

::

    python dcp_ranks.py save FOLDER           the folders of `SAVES`, by torch itself, and what it makes of each
    python dcp_ranks.py load WORLD IN OUT     IN is loaded into models on WORLD ranks; what they then hold goes to OUT
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_folder
from torch.distributed.checkpoint.state_dict_saver import save as save_folder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_versions import ALONE


class Net(nn.Module):
    """Odd sizes: parts of three ranks differ, and of the smallest some are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.body = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])
        self.norm = nn.BatchNorm1d(5)
        self.few = nn.Parameter(torch.randn(2, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embed(tokens)
        for layer in self.body:
            found = torch.tanh(layer(found))
        total: torch.Tensor = self.norm(found).sum() * self.few.sum()
        return total


def trained(shard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two steps; by FSDP2 over all ranks, or the same on each."""
    torch.manual_seed(0)
    model: Any = Net()
    if shard:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.tensor([1, 2, 3])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fsdp(folder: Path, **how: Any) -> None:
    model, optimizer = trained(shard=True)
    weights, state = get_state_dict(model, optimizer)
    whole = {"model": weights, "optim": state, "epoch": 3, "seen": {"best": 0.5, "names": ["a", "b"], "none": None}}
    save_folder(whole, checkpoint_id=folder, **how)


def fsdp_in_safetensors(folder: Path) -> None:
    kind = SerializationFormat.SAFETENSORS
    fsdp(folder, storage_writer=FileSystemWriter(folder, serialization_format=kind, thread_count=2))


def mesh(folder: Path) -> None:
    """Tensors over two by two ranks, and over all in one dimension."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    wide, tall, deep = torch.randn(7, 6), torch.randn(5, 3), torch.randn(3, 5, 4)
    save_folder(
        {
            "blocks.weight": distribute_tensor(wide, both, [Shard(0), Shard(1)]),
            "columns.weight": distribute_tensor(wide, both, [Replicate(), Shard(1)]),
            "rows.weight": distribute_tensor(tall, both, [Shard(0), Replicate()]),
            "deep.weight": distribute_tensor(deep.bfloat16(), both, [Shard(2), Shard(1)]),
            "same.weight": distribute_tensor(tall, both, [Replicate(), Replicate()]),
            "plain.weight": tall + 1,
        },
        checkpoint_id=folder,
    )


def odd(folder: Path) -> None:
    """What one process saves: scalars, nothing, ties, views, tensors in lists and tuples, values of all kinds."""
    torch.manual_seed(0)
    tied = torch.randn(4, 3)
    save_folder(
        {
            "scalar": torch.tensor(1.5),
            "nothing": torch.empty(0, 3),
            "tied": {"a.weight": tied, "b.weight": tied},
            "turned": torch.randn(4, 6).t(),
            "view": torch.randn(10)[2:5],
            "kinds": {str(kind): torch.ones(3).to(kind) for kind in (torch.int8, torch.bool, torch.complex64)},
            "small": torch.randn(6).to(torch.float8_e4m3fn),
            "list": [torch.randn(2), {"deep": [1, torch.randn(3)]}],
            "tuple": (torch.randn(2), "text"),
            "values": {"bytes": b"raw", "big": 1 << 70, "set": {1, 2}, "plain": [1, 2.5, None]},
        },
        checkpoint_id=folder,
        **ALONE,
    )


def flat(folder: Path) -> None:
    """Without flattening: a nested dict is one value, with tensors in it. An item a file."""
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    state = {"top.weight": torch.randn(3, 2), "inner": {"module.weight": torch.randn(2, 2), "step": 4}}
    save_folder(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False), **ALONE)


def own(folder: Path) -> None:
    """What each rank saves for itself, some of it the same."""
    rank = distributed.get_rank()
    state = {"same": torch.ones(3), "own": torch.ones(3) * rank, f"only{rank}": torch.ones(2), "epoch": rank}
    save_folder(state, checkpoint_id=folder, use_collectives=False)


SAVES: dict[str, tuple[int, Callable[[Path], None]]] = {
    "fsdp": (3, fsdp), "mesh": (4, mesh), "odd": (1, odd), "flat": (1, flat),
}  # fmt: skip

VARIANTS: dict[str, tuple[int, Callable[[Path], None]]] = {
    "fsdp-ranks": (3, partial(fsdp, use_collectives=False)), "fsdp-safetensors": (3, fsdp_in_safetensors),
}  # fmt: skip
"""What ``fsdp`` saves, written in other ways, of which torch makes no one file."""

def small(folder: Path) -> None:
    """A training run of two ranks in as little as it takes: ``tests/recorded/dcp`` is one, written by torch 2.13."""
    both = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    weight, rest = torch.randn(3, 2), torch.randn(2).half()
    state = {
        "model": {"module.w": distribute_tensor(weight, both, [Shard(0)]), "module.b": rest, "module.tied": rest},
        "optim": {"state": {"module.w": {"exp_avg": distribute_tensor(weight, both, [Shard(1)]), "step": rest[0]}}},
        "groups": [{"lr": 0.5, "params": ["module.w"]}],
        "epoch": 3,
    }
    save_folder(state, checkpoint_id=folder)


OTHERS: dict[str, tuple[int, Callable[[Path], None]]] = {"own": (2, own), "small": (2, small)}


def merged(folder: Path, tmp_path: Path) -> Any:
    """What torch makes of a folder."""
    dcp_to_torch_save(folder, tmp_path / "merged.pt")
    return torch.load(tmp_path / "merged.pt", weights_only=False)


def load(source: Path, out: Path) -> None:
    """Load the model and the optimizer, sharded and not, and save what they hold."""
    found: dict[str, Any] = {}
    for kind in ("fsdp", "plain"):
        torch.manual_seed(1)
        model: Any = Net()
        if kind == "fsdp":
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        weights, state = get_state_dict(model, optimizer)
        wanted: dict[str, Any] = {"model": weights, "optim": state, "epoch": 0}
        load_folder(wanted, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"])
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, state = get_state_dict(model, optimizer, options=options)
        found[kind] = {"model": weights, "optim": state, "epoch": wanted["epoch"]}
    if distributed.get_rank() == 0:
        torch.save(found, out)


def on_ranks(world: int, port_file: Path, work: Callable[[], None]) -> None:
    """Run `work` on `world` ranks, each a fork of this process.

    Raises:
        SystemExit: a rank failed.
    """
    for name in ("fsspec.core", "torch._dynamo"):  # what each rank would import as it begins
        import_module(name)

    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            code = 1
            try:
                store = torch._C._distributed_c10d.FileStore(str(port_file), world)
                distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
                work()
                distributed.barrier()
                distributed.destroy_process_group()
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(1)


def main(verb: str, *arguments: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if verb == "load":
        ranks, source, out = arguments
        on_ranks(int(ranks), Path(f"{out}.store"), partial(load, Path(source), Path(out)))
        return
    (folder,) = map(Path, arguments)
    for name, (world, save) in (SAVES | VARIANTS | OTHERS).items():
        on_ranks(world, folder / f"{name}.store", partial(save, folder / name))
        if name in SAVES:
            dcp_to_torch_save(folder / name, folder / f"{name}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Saving a checkpoint in the usual ways: wrapped or not, bare or nested, in five containers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Unsupported, WouldOverwrite, WriteFailed
from ckptfix.io.write import check_destination
from ckptfix.trainer import dcp
from ckptfix.trainer.parallel import inner, is_sharded
from ckptfix.trainer.processes import rank, world

if TYPE_CHECKING:
    from ckptfix.trainer.job import Training


@dataclass(frozen=True, slots=True)
class Container:
    """A file format for checkpoints.

    Attributes:
        about: one line for the help.
        write: function that writes contents to a path that nothing else uses.
        nested: whether it can hold more than tensors by name.
        module: whether it holds the module itself instead of its state dict.
        folder: whether it is a folder, to which each process writes its own shards.
    """

    about: str
    write: Callable[[Any, Path], None]
    nested: bool = True
    module: bool = False
    folder: bool = False


def torch_zip(contents: Any, path: Path) -> None:
    # Given an open file, torch has no name for the folder inside the zip, so the same training gives the same bytes.
    with open(path, "wb") as file:
        torch.save(contents, file)


def torch_legacy(contents: Any, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(contents, file, _use_new_zipfile_serialization=False)


def safetensors(contents: dict[str, Tensor], path: Path) -> None:
    """Write shared tensors once; the metadata lists their other names, as with safetensors' save_model."""
    first: dict[tuple[object, ...], str] = {}
    metadata = {"format": "pt"}
    kept = {}
    for name, value in contents.items():
        same = first.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), name)
        if same == name or not value.numel():
            kept[name] = value.contiguous()
        else:
            metadata[name] = same
    save_file(kept, path, metadata)


CONTAINERS: dict[str, Container] = {
    "zip": Container("torch.save since torch 1.6", torch_zip),
    "legacy": Container("torch.save before torch 1.6", torch_legacy),
    "safetensors": Container("safetensors.torch.save_file, tensors by name only", safetensors, nested=False),
    "dcp": Container("torch.distributed.checkpoint, a folder that all processes write to", dcp.write, folder=True),
    "module": Container("torch.save(model), the whole pickled module", torch_zip, nested=False, module=True),
}


def state_dict(model: nn.Module, *, gather: bool = True) -> dict[str, Any]:
    """Return the state dict of `model`, with sharded parameters gathered to rank 0, or left as DTensors."""
    if not is_sharded(model):
        found: dict[str, Any] = model.state_dict()
        return found
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=gather, cpu_offload=gather))


def optimizer_state_dict(training: Training, *, gather: bool = True) -> dict[str, Any]:
    """Return the optimizer's state dict: by parameter number, or by parameter name if they are sharded."""
    if not is_sharded(training.model):
        return training.optimizer.state_dict()
    options = StateDictOptions(full_state_dict=gather, cpu_offload=gather)
    return get_optimizer_state_dict(training.model, training.optimizer, options=options)


def rng_state() -> dict[str, list[Any]]:
    """Return the state of torch's generators in every process: of the CPU, and of each GPU that it sees."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    mine = (torch.get_rng_state(), cuda)
    states: list[Any] = [mine]
    if distributed.is_initialized():
        states = [None] * world()
        distributed.all_gather_object(states, mine)
    return {"torch": [state[0] for state in states], "cuda": [state[1] for state in states]}


def contents(training: Training, *, wrapped: bool, nested: bool, gather: bool = True) -> dict[str, Any]:
    """Return what to save: only a state dict, or everything that resuming needs. Every process must call this.

    A bare state dict is the averaged model's if there is one: `n_averaged`, and keys with `module.`; unwrapped, it is
    that of the model inside.

    Args:
        wrapped: use the wrappers' keys, such as ``module.fc.weight``; False uses those of the model inside.
        gather: gather whole tensors on rank 0 instead of DTensors.
    """
    chosen = training.averaged if training.averaged is not None and not nested else training.model
    if not wrapped:
        chosen = chosen.module if chosen is training.averaged else inner(training.model)
    state = state_dict(chosen, gather=gather)
    if not nested:
        return state
    found: dict[str, Any] = {
        "epoch": len(training.losses),
        "model_state_dict": state,
        "optimizer_state_dict": optimizer_state_dict(training, gather=gather),
        "scheduler_state_dict": training.scheduler.state_dict(),
        "rng_state": rng_state(),
        "loss": training.losses[-1] if training.losses else None,
        "losses": list(training.losses),
        "args": dict(training.args),
    }
    if training.scaler.is_enabled():
        found["scaler_state_dict"] = training.scaler.state_dict()
    if training.averaged is not None:
        found["averaged_state_dict"] = training.averaged.state_dict()
    return found


def check(path: Path, container: str, *, nested: bool = False, sharded: bool = False) -> None:
    """Refuse, before any training, everything that `save` could not write.

    Raises:
        Unsupported: the container cannot hold it, or there is a file in place of a folder, or a folder in place of a
        file. WouldOverwrite: a folder that is not a checkpoint is at `path`. WriteFailed: the parent folder of `path`
        does not exist or cannot be written to.
    """
    kind = CONTAINERS[container]
    if nested and not kind.nested:
        raise Unsupported(
            f"{container} cannot hold a training checkpoint: leave out --nested, or choose another container", path=path
        )
    if sharded and kind.module:
        raise Unsupported("a sharded module has only this process's part of each parameter: save its state dict")
    if not kind.folder:
        check_destination(path, overwrite=True)
    elif path.is_dir():
        if any(path.iterdir()) and not (path / dcp.METADATA).exists():
            raise WouldOverwrite("is a folder with other files in it", path=path, hint="choose a different name")
        if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
            raise WriteFailed("its folder cannot be written to", path=path)
    elif path.exists():
        raise Unsupported("is a file, but the checkpoint directory must be written there", path=path)
    else:
        check_destination(path, overwrite=False)


def save(training: Training, path: Path, *, wrapped: bool = True, nested: bool = False, container: str = "zip") -> None:
    """Write a checkpoint of `training` in a container of `CONTAINERS`. In a group, every process must call this.

    It is written beside `path` and renamed once complete, so an existing checkpoint is replaced only at the end.

    Raises:
        Unsupported, WouldOverwrite: as for `check`.
        WriteFailed: the disk is full, or the machine has another fault.
    """
    kind = CONTAINERS[container]
    check(path, container, nested=nested, sharded=is_sharded(training.model))
    saved: Any
    if kind.module:
        saved = training.model if training.averaged is None else training.averaged
        if not wrapped:
            saved = inner(training.model) if training.averaged is None else training.averaged.module
    else:
        saved = contents(training, wrapped=wrapped, nested=nested, gather=not kind.folder)
    if kind.folder:
        with complete(path, together=True) as beside:
            kind.write(saved, beside)
    elif rank() == 0:
        with complete(path) as beside:
            kind.write(saved, beside)
    wait()


def wait() -> None:
    """Wait until every process of the group has called this."""
    if distributed.is_initialized():
        distributed.barrier()


@contextmanager
def complete(path: Path, *, together: bool = False) -> Iterator[Path]:
    """Yield a path beside `path`. It is renamed to `path` at the end, or removed after an error.

    Args:
        together: every process of the group writes there, and rank 0 renames it when all are done.
    """
    number = [os.getpid()]
    if together and distributed.is_initialized():
        distributed.broadcast_object_list(number)
    beside = path.with_name(f".{path.name}.{number[0]}.part")
    try:
        yield beside
        if together:
            wait()
        if not together or rank() == 0:
            replace(beside, path)
    except OSError as error:
        if isinstance(error, CkptfixError):
            raise
        raise WriteFailed(f"could not be written: {error.strerror or error}", path=path) from error
    finally:
        if not together or rank() == 0:
            remove(beside)


def replace(beside: Path, path: Path) -> None:
    """Put the complete `beside` in the place of `path`, durably."""
    parts = sorted(beside.iterdir()) if beside.is_dir() else [beside]
    for part in parts:
        with open(part, "rb") as file:
            os.fsync(file.fileno())
    if path.is_dir() and beside.is_dir():
        # A folder cannot be replaced in one step: for a moment there is no folder at `path`, but never a partial one.
        before = beside.with_suffix(".old")
        path.rename(before)
        beside.rename(path)
        shutil.rmtree(before)
    else:
        beside.replace(path)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

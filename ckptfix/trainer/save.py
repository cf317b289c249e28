"""Writing a checkpoint the ways people do: wrapped or not, bare or nested, in three containers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckptfix.errors import Unsupported
from ckptfix.trainer.parallel import inner

if TYPE_CHECKING:
    from ckptfix.trainer.train import Training

FORMATS: dict[str, str] = {
    "zip": "torch.save as of torch 1.6",
    "legacy": "torch.save as before it",
    "safetensors": "safetensors.torch.save_file",
}


def contents(training: Training, *, wrapped: bool, nested: bool) -> dict[str, Any]:
    """What is saved: the keys of the wrapper or of the model inside, alone or with all that resuming needs."""
    model = training.model if wrapped else inner(training.model)
    state: dict[str, Any] = model.state_dict()
    if not nested:
        return state
    return {
        "epoch": len(training.losses),
        "model_state_dict": state,
        "optimizer_state_dict": training.optimizer.state_dict(),
        "scheduler_state_dict": training.scheduler.state_dict(),
        "loss": training.losses[-1],
    }


def save(training: Training, path: Path, *, wrapped: bool = True, nested: bool = False, container: str = "zip") -> None:
    """Write a checkpoint of `training` in a container of `FORMATS`.

    Raises:
        Unsupported: safetensors is to hold a nested checkpoint.
    """
    if container == "safetensors":
        from safetensors.torch import save_file

        if nested:
            raise Unsupported("safetensors holds tensors by name and nothing else: save a bare state dict", path=path)
        save_file(contents(training, wrapped=wrapped, nested=False), path, {"format": "pt"})
        return
    saved = contents(training, wrapped=wrapped, nested=nested)
    torch.save(saved, path, _use_new_zipfile_serialization=container == "zip")

"""Run folders in the layout of each library, with tiny models: `LAYOUTS` has a builder for each.

Each is written with torch, torch.distributed.checkpoint and safetensors, under the names that the library uses.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

STEPS = (100, 200)


def trained(step: int) -> tuple[torch.nn.Module, Any, Any]:
    """A model, its optimizer and its scheduler after one update that is called step `step`."""
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    scheduler.last_epoch = step
    return model, optimizer, scheduler


def generators() -> dict[str, Any]:
    return {"python": (3, (1, 2, 3), None), "cpu": torch.get_rng_state()}


def trainer(run: Path, step: int) -> None:
    place = run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    model, optimizer, scheduler = trained(step)
    save_file(model.state_dict(), place / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), place / "optimizer.pt")
    torch.save(scheduler.state_dict(), place / "scheduler.pt")
    for rank in range(2):
        torch.save(generators(), place / f"rng_state_{rank}.pth")
    history = [{"loss": 2.5, "step": step // 2}, {"loss": 1.25, "step": step}]
    state = {"global_step": step, "epoch": step / 100, "log_history": history}
    (place / "trainer_state.json").write_text(json.dumps(state))
    (place / "config.json").write_text("{}")


def accelerate(run: Path, step: int) -> None:
    place = run / f"checkpoint_{step // 100}"
    place.mkdir(parents=True)
    model, optimizer, scheduler = trained(step)
    save_file(model.state_dict(), place / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), place / "optimizer.bin")
    torch.save(scheduler.state_dict(), place / "scheduler.bin")
    torch.save({"batches": step}, place / "custom_checkpoint_0.pkl")
    for rank in range(2):
        torch.save({"step": step, "torch_manual_seed": torch.get_rng_state()}, place / f"random_states_{rank}.pkl")


def lightning(run: Path, step: int) -> None:
    run.mkdir(parents=True, exist_ok=True)
    model, optimizer, scheduler = trained(step)
    saved = {
        "epoch": step // 100, "global_step": step, "pytorch-lightning_version": "2.6.0",
        "state_dict": model.state_dict(), "loops": {"fit_loop": {"state_dict": {}}}, "callbacks": {},
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()],
    }  # fmt: skip
    torch.save(saved, run / f"epoch={step // 100}-step={step}.ckpt")


def plain(run: Path, step: int) -> None:
    run.mkdir(parents=True, exist_ok=True)
    model, optimizer, scheduler = trained(step)
    saved = {
        "epoch": step // 100, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(), "loss": 1.25,
    }  # fmt: skip
    torch.save(saved, run / f"epoch_{step // 100}.pth")


def deepspeed(run: Path, step: int) -> None:
    place = run / f"global_step{step}"
    place.mkdir(parents=True)
    model, _, _ = trained(step)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    count = sum(shape.numel() for shape in shapes.values())
    half = -(-count // 2)
    model_states = {
        "module": {name: value.half() for name, value in model.state_dict().items()}, "param_shapes": [shapes],
        "buffer_names": [], "shared_params": {}, "frozen_param_shapes": None, "frozen_param_fragments": None,
        "global_steps": step, "dp_world_size": 2, "mp_world_size": 1, "ds_version": "0.19.0", "ds_config": {},
        "optimizer": None, "lr_scheduler": None,
    }  # fmt: skip
    torch.save(model_states, place / "mp_rank_00_model_states.pt")
    for rank in range(2):
        flat = torch.arange(half, dtype=torch.float32) + rank * half
        state = {
            "zero_stage": 2, "partition_count": [2], "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {"state": {0: {"step": step, "exp_avg": flat, "exp_avg_sq": flat}},
                                     "param_groups": [{"lr": 1e-3, "params": [0]}]},
            "group_paddings": [2 * half - count if rank else 0], "ds_version": "0.19.0",
        }  # fmt: skip
        saved = {"optimizer_state_dict": state, "ds_version": "0.19.0", "ds_config": {}}
        torch.save(saved, place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (run / "latest").write_text(place.name)


def megatron(run: Path, step: int) -> None:
    for rank in range(2):
        place = run / f"iter_{step:07d}" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        model, optimizer, _ = trained(step)
        saved = {"iteration": step, "checkpoint_version": 3.0, "model": model.state_dict(), "rng_state": []}
        torch.save(saved, place / "model_optim_rng.pt")
        torch.save(optimizer.state_dict(), place / "distrib_optim.pt")
    (run / "latest_checkpointed_iteration.txt").write_text(str(step))


def distributed(place: Path, values: dict[str, Any]) -> None:
    dcp.state_dict_saver.save(values, checkpoint_id=place, no_dist=True)


def torchtitan(run: Path, step: int) -> None:
    model, optimizer, scheduler = trained(step)
    values = {
        **model.state_dict(), "optimizer": {"state": {"weight": optimizer.state_dict()["state"][0]}},
        "lr_scheduler": scheduler.state_dict() | {"lr_lambdas": None}, "train_state": {"step": torch.tensor(step)},
    }  # fmt: skip
    distributed(run / f"step-{step}", values)


def plain_dcp(run: Path, step: int) -> None:
    model, optimizer, _ = trained(step)
    state = {"state": {"weight": optimizer.state_dict()["state"][0]}}
    distributed(run / f"ckpt_{step}", {"model": model.state_dict(), "optimizer": state})


def nemo_name(step: int) -> str:
    return f"gpt--val_loss=1.25-step={step}-consumed_samples={step * 8}.0{'-last' * (step == STEPS[-1])}"


def nemo(run: Path, step: int) -> None:
    place = run / nemo_name(step)
    model, optimizer, _ = trained(step)
    state = {"state": {"weight": optimizer.state_dict()["state"][0]}}
    distributed(place / "weights", {"module": model.state_dict(), "optimizer": state})
    torch.save({"global_step": step, "epoch": 0}, place / "weights" / "common.pt")
    (place / "context").mkdir()
    (place / "context" / "model.yaml").write_text("a: 1\n")


@dataclass(frozen=True)
class RunSample:
    """A layout: how a checkpoint is built, and where its parts are.

    Attributes:
        build: (run, step) writes one checkpoint.
        name: the name of the checkpoint of a step.
        optimizer: the file that holds the optimizer, in the checkpoint; empty for the file itself.
        rank: a file of rank 1; None where a save has one file.
        latest: the file that names the newest checkpoint; None if there is none.
        mixed: (run) puts something of step 100 into step 200; None where nothing states the step twice.
    """

    build: Callable[[Path, int], None]
    name: Callable[[int], str]
    optimizer: str
    rank: str | None = None
    latest: str | None = None
    mixed: Callable[[Path], object] | None = None


def copied(old: str, new: str) -> Callable[[Path], object]:
    return lambda run: shutil.copy(run / old, run / new)


LAYOUTS: dict[str, RunSample] = {
    "trainer": RunSample(
        trainer, "checkpoint-{}".format, "optimizer.pt", "rng_state_1.pth",
        mixed=copied("checkpoint-100/trainer_state.json", "checkpoint-200/trainer_state.json"),
    ),
    "accelerate": RunSample(
        accelerate, lambda step: f"checkpoint_{step // 100}", "optimizer.bin", "random_states_1.pkl",
        mixed=copied("checkpoint_1/random_states_1.pkl", "checkpoint_2/random_states_1.pkl"),
    ),
    "lightning": RunSample(
        lightning, lambda step: f"epoch={step // 100}-step={step}.ckpt", "", latest="last.ckpt",
        mixed=copied("epoch=1-step=100.ckpt", "epoch=2-step=200.ckpt"),
    ),
    "deepspeed": RunSample(
        deepspeed, "global_step{}".format, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "latest",
        copied("global_step100/mp_rank_00_model_states.pt", "global_step200/mp_rank_00_model_states.pt"),
    ),
    "megatron": RunSample(
        megatron, "iter_{:07d}".format, "mp_rank_00/distrib_optim.pt", "mp_rank_01/model_optim_rng.pt",
        "latest_checkpointed_iteration.txt",
        copied("iter_0000100/mp_rank_01/model_optim_rng.pt", "iter_0000200/mp_rank_01/model_optim_rng.pt"),
    ),
    "torchtitan": RunSample(torchtitan, "step-{}".format, "__0_0.distcp", "__0_0.distcp"),
    "nemo": RunSample(nemo, nemo_name, "weights/__0_0.distcp", "weights/__0_0.distcp"),
    "torch": RunSample(plain, lambda step: f"epoch_{step // 100}.pth", ""),
    "dcp": RunSample(plain_dcp, "ckpt_{}".format, "__0_0.distcp", "__0_0.distcp"),
}  # fmt: skip


def built(layout: str, run: Path) -> Path:
    """Write a run of the layout with a checkpoint for each of `STEPS`."""
    for step in STEPS:
        LAYOUTS[layout].build(run, step)
    return run


def cut(path: Path, percent: int) -> None:
    os.truncate(path, path.stat().st_size * percent // 100)

"""What DeepSpeed writes for any number of ranks, without DeepSpeed: its files' names, objects, storages and padding.

Laid out after deepspeed/runtime/zero/stage_1_and_2.py (``state_dict``, ``_get_groups_without_padding``), stage3.py
(``_rigid_state_dict``), engine.py (``_save_checkpoint``) and checkpoint/ds_to_universal.py of 0.19.
"""

from __future__ import annotations

import enum
import io
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

State = dict[str, torch.Tensor]
TAG = "global_step3"


@contextmanager
def stand_ins() -> Iterator[tuple[Any, Any, Any]]:
    """Its classes that stand in the files, under their names; gone afterwards."""

    class ZeroStageEnum(int, enum.Enum):
        optimizer_states = 1
        gradients = 2
        weights = 3

    class LossScaler:
        def __init__(self) -> None:
            self.cur_scale, self.dynamic = 1.0, False

    @dataclass
    class fragment_address:  # noqa: N801 (DeepSpeed's own name)
        numel: int
        start: int

    places = {
        ZeroStageEnum: "deepspeed.runtime.zero.config", LossScaler: "deepspeed.runtime.fp16.loss_scaler",
        fragment_address: "deepspeed.utils.tensor_fragment",
    }  # fmt: skip
    made: dict[str, ModuleType] = {}
    for cls, module in places.items():
        cls.__module__, cls.__qualname__ = module, cls.__name__
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            made.setdefault(name, ModuleType(name))
        setattr(made[module], cls.__name__, cls)
    sys.modules.update(made)
    try:
        yield ZeroStageEnum, LossScaler, fragment_address
    finally:
        for name in made:
            del sys.modules[name]


@dataclass
class Run:
    """A model in training, as its ranks hold it together.

    Attributes:
        groups: the fp32 weights of each group of the optimizer; their moments are made from them.
        half: the dtype that the model computes in.
        frozen, buffers: in the dtype that they have.
        shared: name -> the parameter that it is another name of.
        subgroups: with stage 3, the optimizer's groups that each of `groups` belongs to.
        keys: what the optimizer keeps of each weight.
    """

    groups: Sequence[State]
    ranks: int
    stage: int
    half: torch.dtype = torch.float32
    frozen: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    subgroups: Sequence[int] | None = None
    step: int = 3
    keys: Sequence[str] = ("exp_avg", "exp_avg_sq")

    @property
    def weights(self) -> State:
        """The whole state dict: fp32, and what has a dtype of its own."""
        own = {name: value for group in self.groups for name, value in group.items()}
        rows = {**self.buffers, **own, **self.frozen}
        return rows | {name: rows[base] for name, base in self.shared.items()}

    @property
    def model(self) -> State:
        """The same as the model computed with it."""
        own = {name: value.to(self.half) for group in self.groups for name, value in group.items()}
        rows = {**self.buffers, **own, **self.frozen}
        return rows | {name: rows[base] for name, base in self.shared.items()}

    def moment(self, name: str, key: str) -> torch.Tensor:
        """What the optimizer keeps of a parameter."""
        value = self.weights[name]
        return value * 2 + 1 if key == "exp_avg" else value**2

    def save(self, folder: Path, tag: str = TAG) -> Path:
        """Write the files of all ranks, and ``latest``; the folder of the save."""
        inner = folder / tag
        inner.mkdir(parents=True)
        (folder / "latest").write_text(tag)
        with stand_ins() as classes:
            if self.stage == 3:
                self._stage_3(inner, classes)
            elif self.stage:
                self._stages_1_2(inner, classes)
            else:
                torch.save(self._model_states(self._module(self.model)), inner / "mp_rank_00_model_states.pt")
        return inner

    @property
    def _prefix(self) -> str:
        return "bf16_" if self.half is torch.bfloat16 else ""

    def _optim(self, inner: Path, rank: int, states: dict[str, Any]) -> None:
        name = f"{self._prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        whole = {"optimizer_state_dict": states, "ds_config": {"zero_optimization": {"stage": self.stage}}}
        torch.save({**whole, "ds_version": "0.19.8"}, inner / name)

    def _module(self, rows: State) -> OrderedDict[str, torch.Tensor]:
        module = OrderedDict(rows)
        module._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
        return module

    def _model_states(self, module: State, fragments: State | None = None, rank: int = 0) -> dict[str, Any]:
        shapes = [OrderedDict((name, value.shape) for name, value in group.items()) for group in self.groups]
        zero = self.stage > 0
        return {
            "module": module, "buffer_names": list(self.buffers),
            "optimizer": None if zero else self._plain_optimizer(),
            "param_shapes": shapes if zero else None,
            "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in self.frozen.items()),
            # Stage 3 lists them on rank 0 alone.
            "shared_params": dict(self.shared) if zero and (self.stage < 3 or not rank) else {},
            "frozen_param_fragments": OrderedDict(fragments or self.frozen),
            "lr_scheduler": None, "skipped_steps": 0, "global_steps": self.step, "global_samples": 8 * self.step,
            "dp_world_size": self.ranks, "mp_world_size": 1, "ds_config": {"zero_optimization": {"stage": self.stage}},
            "ds_version": "0.19.8",
        }  # fmt: skip

    def _options(self) -> list[dict[str, Any]]:
        groups = list(range(len(self.groups)))
        owners = groups if self.subgroups is None else list(self.subgroups)
        return [
            {"lr": 0.1 * (owner + 1), "betas": (0.9, 0.999), "params": [at for at in groups if owners[at] == owner]}
            for owner in sorted(set(owners))
        ]

    def _plain_optimizer(self) -> dict[str, Any]:
        names = [name for group in self.groups for name in group]
        state = {
            at: {"step": torch.tensor(float(self.step)), **{key: self.moment(name, key) for key in self.keys}}
            for at, name in enumerate(names)
        }
        return {"state": state, "param_groups": [{"lr": 0.1, "params": list(range(len(names)))}]}

    def _stages_1_2(self, inner: Path, classes: tuple[Any, Any, Any]) -> None:
        stage, scaler, address = classes
        align = 2 * self.ranks
        rows: dict[str, torch.Tensor] = {}
        flats: list[dict[str, torch.Tensor]] = []
        paddings = []
        for group in self.groups:
            needed = sum(value.numel() for value in group.values())
            padding = -needed % align
            paddings.append(padding)
            flat = {"fp32": _row(list(group.values()), padding)}
            flat |= {key: _row([self.moment(name, key) for name in group], padding) for key in self.keys}
            flats.append(flat)
            half, first = flat["fp32"].to(self.half), 0
            for name, value in group.items():
                rows[name] = half[first : first + value.numel()].view(value.shape)
                first += value.numel()
        rows = {**self.buffers, **rows, **self.frozen}
        rows |= {name: rows[base] for name, base in self.shared.items()}
        torch.save(self._model_states(self._module(rows)), inner / "mp_rank_00_model_states.pt")
        for rank in range(self.ranks):
            last = rank == self.ranks - 1
            lean = [padding if last else 0 for padding in paddings]
            own = [{key: _part(value, rank, self.ranks) for key, value in flat.items()} for flat in flats]
            state = {
                at: {"step": torch.tensor(float(self.step)), **{key: parts[key] for key in self.keys}}
                for at, parts in enumerate(own)
            }
            self._optim(inner, rank, {
                "loss_scaler": scaler(), "dynamic_loss_scale": False, "overflow": False, "clip_grad": 1.0,
                "base_optimizer_state": {"state": state, "param_groups": self._options()},
                "single_partition_of_fp32_groups": [
                    parts["fp32"][: parts["fp32"].numel() - cut] for parts, cut in zip(own, lean, strict=True)
                ],
                "zero_stage": stage(self.stage), "group_paddings": lean, "partition_count": [self.ranks] * len(own),
                "ds_version": "0.19.8",
                "param_slice_mappings": [OrderedDict(x=address(1, 0)) for _ in own],
            })  # fmt: skip

    def _stage_3(self, inner: Path, classes: tuple[Any, Any, Any]) -> None:
        stage, scaler, _ = classes
        for rank in range(self.ranks):
            emptied = {
                name: torch.empty(0, dtype=value.dtype if name in self.frozen else self.half)
                for name, value in self.weights.items()
                if name not in self.buffers and name not in self.shared
            }
            rows = self.buffers | emptied
            rows |= {name: rows[base] for name, base in self.shared.items()}
            fragments = {name: _share(value, rank, self.ranks) for name, value in self.frozen.items()}
            states = self._model_states(self._module(rows), fragments, rank)
            torch.save(states, inner / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            flats = []
            state = {}
            for at, group in enumerate(self.groups):
                flat = torch.cat([torch.empty(0), *(_share(value, rank, self.ranks) for value in group.values())])
                flat.requires_grad_()
                flat.ds_id = f"{at}"  # type: ignore[attr-defined]
                flats.append(flat)
                state[at] = {"step": torch.tensor(float(self.step))} | {
                    key: torch.cat(
                        [torch.empty(0), *(_share(self.moment(name, key), rank, self.ranks) for name in group)]
                    )
                    for key in self.keys
                }
            self._optim(inner, rank, {
                "zero_stage": stage(3), "loss_scaler": scaler(), "dynamic_loss_scale": False, "overflow": False,
                "partition_count": self.ranks,
                "optimizer_state_dict": {"state": state, "param_groups": self._options()},
                "fp32_flat_groups": flats,
            })  # fmt: skip

    def universal(self, folder: Path) -> Path:
        """What ds_to_universal.py makes of the save: a folder of the same name and ``_universal``."""
        inner = self.save(folder, f"{TAG}_universal")
        (folder / "latest").rename(folder / "latest_universal")
        for path in inner.glob("*_optim_states.pt"):
            path.unlink()
        for group in self.groups:
            for name, value in group.items():
                place = inner / "zero" / name
                place.mkdir(parents=True)
                for key in ("fp32", *self.keys):
                    tensor = value if key == "fp32" else self.moment(name, key)
                    row: Any = tensor.flatten() if self.stage == 3 else {"cat_dim": 0, "param": tensor}
                    torch.save(row, place / f"{key}.pt")
                if self.stage < 3:
                    torch.save(torch.tensor(float(self.step)), place / "step.pt")
        with stand_ins() as (stage, _, _):
            state = {at: {"step": torch.tensor(float(self.step))} for at in range(len(self.groups))}
            settings = {"zero_stage": stage(self.stage), "param_groups": self._options()}
            if self.stage == 3:
                settings["optimizer_state_dict"] = {"state": state, "param_groups": self._options()}
            torch.save(settings, inner / "zero" / "optimizer_state.pt")
        return inner


KEYS = ("exp_avg", "exp_avg_sq")


def _row(values: Sequence[torch.Tensor], padding: int) -> torch.Tensor:
    return torch.cat([*(value.flatten() for value in values), torch.zeros(padding)])


def _part(flat: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = flat.numel() // ranks
    return flat[rank * size : (rank + 1) * size].clone()


def _share(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's share of a parameter in stage 3, padded."""
    size = math.ceil(value.numel() / ranks)
    padded = torch.cat([value.flatten(), torch.zeros(size * ranks - value.numel(), dtype=value.dtype)])
    return padded[rank * size : (rank + 1) * size].clone()


def from_buffers(inner: Path) -> None:
    """Write the files of a save anew as an engine does that saves to a buffer: their records are in ``archive``."""
    with stand_ins():
        for path in inner.glob("*_states.pt"):
            made = io.BytesIO()
            torch.save(torch.load(path, weights_only=False), made)
            path.write_bytes(made.getvalue())


def example(ranks: int, stage: int, half: torch.dtype = torch.float32) -> Run:
    """A model with everything: several groups, a tie, frozen ones, buffers; a scalar, an empty, an uneven parameter."""
    torch.manual_seed(0)
    first = {"emb.weight": torch.randn(7, 5), "scale": torch.randn(()), "none.weight": torch.empty(0, 3)}
    second = {"fc.weight": torch.randn(3, 5, 2), "fc.bias": torch.randn(3)}
    return Run(
        [first, second, {"last.bias": torch.randn(1)}], ranks, stage, half,
        frozen={"frozen.weight": torch.randn(4, 3).to(half), "frozen.bias": torch.randn(()).to(half)},
        buffers={"steps": torch.tensor(7), "bn.mean": torch.randn(3, dtype=torch.float64)},
        shared={"head.weight": "emb.weight"},
    )  # fmt: skip

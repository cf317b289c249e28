"""What ds_to_universal.py joins of several model-parallel ranks: the parameters are whole, the model states are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same

import ckptfix
from ckptfix.errors import Unsupported, WouldLoseData

WEIGHTS = {"column.weight": torch.randn(4, 3), "row.weight": torch.randn(3, 4), "norm.weight": torch.randn(3)}
DIMS = {"column.weight": 0, "row.weight": 1}
PATTERNS = {"parameter_with_row_parallelism_patterns": ["row"], "tp_replicated_parameter_patterns": ["norm"]}


def joined(folder: Path, info: dict[str, Any] | None) -> Path:
    """The universal folder of two ranks; laid out as ds_to_universal.py of DeepSpeed 0.19.8 did it."""
    inner = folder / "global_step7_universal"
    for rank in range(2):
        parts = {name: own.chunk(2, DIMS[name])[rank] if name in DIMS else own for name, own in WEIGHTS.items()}
        state: dict[str, Any] = {
            "module": {name: part.half() for name, part in parts.items()},
            "param_shapes": [{name: part.shape for name, part in parts.items()}],
            "ds_version": "0.19.8", "dp_world_size": 1, "mp_world_size": 2, "iteration": 7,
        }  # fmt: skip
        if info is not None:
            state["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2, **info}
        inner.mkdir(parents=True, exist_ok=True)
        torch.save(state, inner / f"mp_rank_0{rank}_model_states.pt")
    for name, own in WEIGHTS.items():
        place = inner / "zero" / name
        place.mkdir(parents=True)
        for key, value in (("fp32", own), ("exp_avg", own * 2), ("exp_avg_sq", own**2)):
            torch.save({"param": value, "cat_dim": DIMS.get(name, 0)}, place / f"{key}.pt")
        torch.save(7, place / "step.pt")
    settings = {"optimizer_state_dict": {}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    torch.save(settings, inner / "zero" / "optimizer_state.pt")
    return inner


@pytest.mark.parametrize("other", [1.0, 2.0])
def test_buffers_are_of_the_first_rank_and_compared(other: float, tmp_path: Path) -> None:
    """What no rank's folder of a parameter holds is not joined: another rank may have had another value, or a slice."""
    folder = joined(tmp_path, PATTERNS)
    for rank, value in enumerate((1.0, other)):
        path = folder / f"mp_rank_0{rank}_model_states.pt"
        state = torch.load(path)
        state["module"]["mean"] = torch.full((3,), value)
        torch.save({**state, "buffer_names": ["mean"]}, path)
    done = ckptfix.convert(folder, tmp_path / "out.pth")
    assert [row.where for row in done.findings if row.id == "ranks-differ"] == ["module/mean"] * (other != 1.0)
    assert_same({**WEIGHTS, "mean": torch.ones(3)}, dict(ckptfix.load_state_dict(done.dest)))


def test_it_is_read(tmp_path: Path) -> None:
    folder = joined(tmp_path, PATTERNS)
    assert_same(WEIGHTS, dict(ckptfix.load_state_dict(folder)))
    whole = ckptfix.load_checkpoint(folder)
    assert torch.equal(whole["optimizer"]["state"]["row.weight"]["exp_avg"], WEIGHTS["row.weight"] * 2)
    assert "module_16bit" not in whole  # the first rank's, which is half a model
    ckptfix.convert(folder, tmp_path / "out.pth")
    assert_same(WEIGHTS, dict(ckptfix.load_state_dict(tmp_path / "out.pth")))


@pytest.mark.parametrize("info", [None, {}])
def test_what_was_joined_without_knowing_how_is_refused(info: dict[str, Any] | None, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="how its parameters are cut"):
        ckptfix.convert(joined(tmp_path, info), tmp_path / "out.pth")


@pytest.mark.parametrize("shape", [(4, 4), (3, 4, 1), (12,)])
def test_another_shape_than_slices_make_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = joined(tmp_path, PATTERNS)
    torch.save({"param": torch.ones(shape)}, folder / "zero" / "row.weight" / "fp32.pt")
    with pytest.raises(WouldLoseData, match="the model states say"):
        ckptfix.convert(folder, tmp_path / "out.pth")

"""``repair`` of what several ranks wrote: what is intact comes out, the rest is named with its rows, or filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from zero_files import Run

import ckptfix
from ckptfix.errors import DamagedFile


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def rows(stage: int, ranks: int = 4) -> Run:
    """Two groups, so that the second one is on other bytes of each rank's file."""
    torch.manual_seed(0)
    groups = [{"a.weight": torch.randn(10, 4), "b.weight": torch.randn(6, 4)}, {"a.bias": torch.randn(3)}]
    return Run(groups, ranks, stage)


def of_rank(folder: Path, rank: int) -> Path:
    (found,) = folder.rglob(f"*pp_rank_{rank}_*optim_states.pt")
    return found


def flip(path: Path, data: bytes) -> None:
    """Change one bit of these bytes in a file."""
    content = bytearray(path.read_bytes())
    content[content.index(data)] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_intact_folder_of_deepspeed_is_all_kept(stage: int, tmp_path: Path) -> None:
    rows(stage).save(tmp_path / "in")
    done = ckptfix.repair(tmp_path / "in", tmp_path / "out.pth")
    assert done.exit_code == 0 and not done.losses
    ckptfix.convert(tmp_path / "in", tmp_path / "all.pth", optimizer=True)
    made, wanted = load(tmp_path / "out.pth"), load(tmp_path / "all.pth")
    assert_same(dict(wanted["module"]), dict(made["module"]))
    assert_same(wanted["optimizer"], made["optimizer"])


def test_what_a_missing_rank_held_is_named_and_the_rest_kept(tmp_path: Path) -> None:
    run = rows(2)
    run.save(tmp_path / "in")
    of_rank(tmp_path / "in", 3).unlink()
    done = ckptfix.repair(tmp_path / "in", tmp_path / "out.pth")
    assert done.exit_code == 3
    reasons = {loss.name: loss.reason for loss in done.losses}
    assert reasons["module/b.weight"].endswith("it is missing; it holds rows 2 to 5 of b.weight")
    assert "module/a.weight" not in reasons and "optimizer/state/b.weight/exp_avg" in reasons
    made = load(tmp_path / "out.pth")
    assert_same(run.groups[0]["a.weight"], made["module"]["a.weight"])
    assert "b.weight" not in made["module"]


@pytest.mark.parametrize("stage", [2, 3])
def test_damaged_bytes_cost_what_their_checksum_covers(stage: int, tmp_path: Path) -> None:
    run = rows(stage, 1)
    run.save(tmp_path / "in")
    flip(of_rank(tmp_path / "in", 0), run.groups[1]["a.bias"].numpy().tobytes()[:8])
    done = ckptfix.repair(tmp_path / "in", tmp_path / "out.pth")
    assert {loss.name for loss in done.losses} == {"module/a.bias"} and "CRC-32" in done.losses[0].reason
    assert_same(run.groups[0]["b.weight"], load(tmp_path / "out.pth")["module"]["b.weight"])


def test_the_weights_of_an_older_file_stand_in(tmp_path: Path) -> None:
    run = rows(3)
    run.save(tmp_path / "in")
    of_rank(tmp_path / "in", 1).unlink()
    older = {name: value + 1 for group in run.groups for name, value in group.items()}
    torch.save(older, tmp_path / "older.pth")
    done = ckptfix.repair(tmp_path / "in", tmp_path / "out.pth", fill_from=tmp_path / "older.pth", fill="nan")
    assert done.exit_code == 3
    made = load(tmp_path / "out.pth")
    assert_same(older, dict(made["module"]))
    assert made["optimizer"]["state"]["a.weight"]["exp_avg"].isnan().all()


def test_what_is_beyond_measure_is_not_made_up(tmp_path: Path) -> None:
    run = rows(3)
    run.save(tmp_path / "in")
    of_rank(tmp_path / "in", 1).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptfix.ops.repair.fill.MOST_FILLED", -1 << 40)
        with pytest.raises(ckptfix.CkptfixError, match="generates at most"):
            ckptfix.repair(tmp_path / "in", tmp_path / "out.pth", fill="zeros")


def test_nothing_is_left_of_a_save_whose_ranks_are_all_gone(tmp_path: Path) -> None:
    rows(3).save(tmp_path / "in")
    for path in (tmp_path / "in").rglob("*states.pt"):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DamagedFile):
        ckptfix.repair(tmp_path / "in", tmp_path / "out.pth")


NESTED: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "bare": lambda rows: rows,
    "wrapped": lambda rows: {f"module.{name}": value for name, value in rows.items()},
    "nested": lambda rows: {"model": rows, "epoch": 3},
}


@pytest.mark.parametrize("donor", NESTED)
@pytest.mark.parametrize("own", ["bare", "nested"])
def test_a_bare_state_dict_and_a_nested_one_go_together(own: str, donor: str, tmp_path: Path) -> None:
    state = {"fc.weight": torch.randn(20, 30), "fc.bias": torch.randn(20)}
    torch.save(NESTED[own](state), tmp_path / "in.pth")
    torch.save(NESTED[donor](state), tmp_path / "older.pth")
    flip(tmp_path / "in.pth", state["fc.weight"].numpy().tobytes()[:64])
    ckptfix.repair(tmp_path / "in.pth", tmp_path / "out.pth", fill_from=tmp_path / "older.pth")
    assert_same(NESTED[own](state), load(tmp_path / "out.pth"))


def test_averaged_weights_do_not_stand_in_for_the_models(tmp_path: Path) -> None:
    state = {"fc.weight": torch.randn(20, 30)}
    torch.save(state, tmp_path / "in.pth")
    flip(tmp_path / "in.pth", state["fc.weight"].numpy().tobytes()[:64])
    torch.save({"model_ema": state, "epoch": 3}, tmp_path / "older.pth")
    with pytest.raises(DamagedFile):
        ckptfix.repair(tmp_path / "in.pth", tmp_path / "out.pth", fill_from=tmp_path / "older.pth")

"""Files of DeepSpeed's ranks that were exchanged, copied, lost, or are of another step: a slice of the campaign."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from campaigns import swapped_ranks
from zero_files import Run, from_buffers, stand_ins

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.ops.doctor import doctor


@pytest.mark.campaign
def test_values_are_right_or_refused_and_doctor_names_a_file(tmp_path: Path) -> None:
    ends, wrong = swapped_ranks.run(tmp_path, 25)
    assert not wrong, wrong[:3]
    assert ends["swapped: refused"] and ends["swapped: doctor names it"]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("half", [torch.float32, torch.bfloat16])
def test_two_ranks_that_were_exchanged(tmp_path: Path, stage: int, half: torch.dtype) -> None:
    run = Run([{"a.weight": torch.randn(10, 4)}], 2, stage, half)
    first, second = sorted(run.save(tmp_path / "in").glob("*_optim_states.pt"))
    aside = first.rename(tmp_path / "aside")
    second.rename(first)
    aside.rename(second)
    found = [row for row in doctor(tmp_path / "in").findings if row.id == "other-save"]
    assert [(row.where, row.message) for row in found] == [
        (str(first), "it was saved as the file of rank 1"),
        (str(second), "it was saved as the file of rank 0"),
    ]
    with pytest.raises(DamagedFile, match="it was saved as the file of rank 1"):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")


def of_rank(inner: Path, rank: int) -> Path:
    (found,) = inner.glob(f"*pp_rank_{rank}_*optim_states.pt")
    return found


def exchange(inner: Path, one: int, other: int) -> None:
    first, second = of_rank(inner, one), of_rank(inner, other)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


@pytest.mark.sampled(6, quick=1)
@pytest.mark.parametrize("half", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("ranks", "one", "other"), [(2, 0, 1), (4, 0, 2), (4, 1, 3)])
def test_exchanged_ranks_are_found_by_what_they_hold(
    ranks: int, one: int, other: int, stage: int, half: torch.dtype, tmp_path: Path
) -> None:
    """The records are called archive: the padding and the weights show what the name does not."""
    torch.manual_seed(1)
    group = {"a.weight": torch.randn(40, 4), "norm.weight": torch.ones(32), "b.weight": torch.randn(61)}
    for number, rows in enumerate(([group], [{"a.weight": torch.randn(64, 4)}], [group, {"c.weight": torch.ones(64)}])):
        inner = Run(rows, ranks, stage, half).save(tmp_path / f"in{number}")
        from_buffers(inner)
        sound = {row.id for row in doctor(inner).findings}
        assert not {"other-save", "ranks-unverified"} & sound
        exchange(inner, one, other)
        found = [row for row in doctor(inner).findings if row.id == "other-save"]
        assert found and {row.where for row in found} <= {str(of_rank(inner, rank)) for rank in (one, other)}
        assert "its part is padded" in found[0].message or "that the model states have for rank" in found[0].message
        for write in (
            lambda inner=inner: ckptfix.convert(inner, tmp_path / "out.pth"),
            lambda inner=inner: ckptfix.load_state_dict(inner),
        ):
            with pytest.raises(CkptfixError, match="rank"):
                write()
        assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_nothing_verifies_are_noted(stage: int, tmp_path: Path) -> None:
    """Stage 3 leaves no weights in the module; neither do weights that are all the same show anything."""
    rows: list[dict[str, torch.Tensor]] = [{"a.weight": torch.randn(16, 4)}] if stage == 3 else [{"a": torch.ones(64)}]
    inner = Run(rows, 2, stage).save(tmp_path / "in")
    assert "ranks-unverified" not in {row.id for row in doctor(inner).findings}
    from_buffers(inner)
    (note,) = [row for row in doctor(inner).findings if row.id == "ranks-unverified"]
    assert note.severity == "info" and note.message.endswith("2 ranks shows which rank wrote each: 0, 1")
    made = ckptfix.load_state_dict(ckptfix.convert(inner, tmp_path / "out.pth").dest)
    assert all(torch.equal(made[name], value) for name, value in rows[0].items())


def test_masters_that_the_module_does_not_have_are_no_exchange(tmp_path: Path) -> None:
    """Training that went on without the optimizer's states leaves other weights in the module."""
    run = Run([{"a.weight": torch.randn(64, 4)}], 4, 2)
    inner = run.save(tmp_path / "in")
    from_buffers(inner)
    path = inner / "mp_rank_00_model_states.pt"
    with stand_ins():
        state = torch.load(path, weights_only=False)
        state["module"]["a.weight"] = state["module"]["a.weight"] + 1
        torch.save(state, path)
    found = {row.id for row in doctor(inner).findings}
    assert "other-save" not in found and "ranks-unverified" in found

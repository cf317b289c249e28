"""Ranks whose files are missing, cut or of another save are named, with what they hold; nothing is written in half."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zero_files import Run, example, stand_ins

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported
from ckptfix.formats import detect, open_checkpoint
from ckptfix.formats.torch import object as torch_object
from ckptfix.formats.torch.object import TorchObject, walk
from ckptfix.ops.doctor import doctor
from ckptfix.pickles import Graph

Spoil = Callable[[Path], object]


def rows(ranks: int, stage: int) -> Run:
    return Run([{"a.weight": torch.randn(10, 4), "b.weight": torch.randn(6, 4)}], ranks, stage)


def of_rank(inner: Path, rank: int, kind: str = "optim") -> Path:
    (found,) = inner.glob(f"*pp_rank_{rank}_*{kind}_states.pt")
    return found


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:700])


SPOIL: dict[str, tuple[Spoil, str]] = {
    "missing": (Path.unlink, "is missing"), "cut": (cut, "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "page": (lambda path: path.write_text("<html>login</html>"), "cannot be read"),
}  # fmt: skip

HELD = {
    (2, 0): "a.weight (rows 0 to 3)",
    (2, 1): "a.weight (rows 4 to 7)",
    (2, 3): "b.weight (rows 2 to 5)",
    (3, 0): "a.weight (rows 0 to 2), b.weight (rows 0 to 1)",
    (3, 3): "a.weight (rows 7 to 9), b.weight (rows 4 to 5)",
}


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOIL)
@pytest.mark.parametrize(("stage", "rank"), HELD)
def test_a_rank_that_is_missing_is_named_with_its_rows(stage: int, rank: int, spoil: str, tmp_path: Path) -> None:
    run = rows(4, stage)
    lost = of_rank(run.save(tmp_path / "in"), rank)
    SPOIL[spoil][0](lost)
    (found,) = [row for row in doctor(tmp_path / "in").findings if row.id == "missing-rank"]
    assert found.severity == "error" and found.where == str(lost)
    assert found.message.startswith(f"rank {rank} of 4: {lost.name} {SPOIL[spoil][1]}")
    assert found.message.endswith(f"it holds {HELD[stage, rank]}")
    assert {entry.key: entry.shape for entry in open_checkpoint(tmp_path / "in").entries if entry.at == "module"} == {
        name: value.shape for name, value in run.weights.items()
    }
    for write in (
        lambda: ckptfix.convert(tmp_path / "in", tmp_path / "out.pth"),
        lambda: ckptfix.convert(tmp_path / "in", tmp_path / "out.safetensors"),
        lambda: ckptfix.convert(tmp_path / "in", tmp_path / "out.pth", optimizer=True),
        lambda: ckptfix.extract(tmp_path / "in", tmp_path / "out.pth"),
        lambda: ckptfix.slim(tmp_path / "in", tmp_path / "out.pth"),
        lambda: ckptfix.load_state_dict(tmp_path / "in"),
    ):
        with pytest.raises(CkptfixError, match=lost.name):
            write()
    assert not list(tmp_path.glob("out*"))


def test_the_weights_of_the_model_need_no_ranks(tmp_path: Path) -> None:
    run = example(3, 2, torch.bfloat16)
    of_rank(run.save(tmp_path / "in"), 1).unlink()
    ckptfix.convert(tmp_path / "in", tmp_path / "out.pth", weights="model")
    assert torch.equal(torch.load(tmp_path / "out.pth")["emb.weight"], run.model["emb.weight"])


def test_frozen_parameters_need_the_model_states_of_every_rank(tmp_path: Path) -> None:
    run = example(3, 3)
    lost = of_rank(run.save(tmp_path / "in"), 2, "model")
    lost.unlink()
    (found,) = [row for row in doctor(tmp_path / "in").findings if row.id == "missing-rank"]
    assert found.where == str(lost) and "frozen.weight (rows 2 to 3)" in found.message


@pytest.mark.parametrize("stage", [1, 3])
def test_all_but_one_rank_are_missing(stage: int, tmp_path: Path) -> None:
    inner = rows(4, stage).save(tmp_path / "in")
    for rank in range(3):
        of_rank(inner, rank).unlink()
    lost = [row for row in doctor(tmp_path / "in").findings if row.id == "missing-rank"]
    assert len(lost) == 3


def test_without_model_states_nothing_is_known(tmp_path: Path) -> None:
    inner = rows(2, 2).save(tmp_path / "in")
    (inner / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(DamagedFile, match="no model states"):
        open_checkpoint(tmp_path / "in")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_of_another_step_is_found_before_a_byte_is_written(stage: int, tmp_path: Path) -> None:
    run = rows(3, stage)
    inner, other = run.save(tmp_path / "in"), replace(run, step=9).save(tmp_path / "other")
    of_rank(other, 1).replace(of_rank(inner, 1))
    found = {row.id: row for row in doctor(tmp_path / "in").findings}
    assert "step 9, the other ranks' at 3" in found["other-save"].message
    assert found["other-save"].where == str(of_rank(inner, 1))
    for out in ("out.pth", "out.safetensors"):
        with pytest.raises(CkptfixError, match="a different save"):
            ckptfix.convert(tmp_path / "in", tmp_path / out)
        assert not (tmp_path / out).exists()
    with pytest.raises(CkptfixError, match="a different save"):
        ckptfix.load_state_dict(tmp_path / "in")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_copy_of_another_rank_is_found(stage: int, tmp_path: Path) -> None:
    inner = rows(3, stage).save(tmp_path / "in")
    of_rank(inner, 1).write_bytes(of_rank(inner, 0).read_bytes())
    assert "the same weights as" in {row.id: row for row in doctor(tmp_path / "in").findings}["other-save"].message
    with pytest.raises(CkptfixError, match="the same weights as"):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_pickle_that_is_not_as_it_was_written_is_no_rank(kind: str, tmp_path: Path) -> None:
    inner = rows(2, 2).save(tmp_path / "in")
    path = inner / "mp_rank_00_model_states.pt" if kind == "model" else of_rank(inner, 0)
    raw = path.read_bytes()
    assert b"ds_version" in raw
    path.write_bytes(raw.replace(b"ds_version", b"ds_versiom"))
    with pytest.raises(CkptfixError, match="CRC-32"):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")


def test_model_states_of_another_step_are_refused(tmp_path: Path) -> None:
    run = rows(3, 3)
    inner, other = run.save(tmp_path / "in"), replace(run, step=9).save(tmp_path / "other")
    of_rank(other, 2, "model").replace(of_rank(inner, 2, "model"))
    with pytest.raises(DamagedFile, match="at step 9, the other ranks' at 3") as caught:
        open_checkpoint(tmp_path / "in")
    assert caught.value.path == str(of_rank(inner, 2, "model"))


def test_files_of_more_ranks_than_there_were(tmp_path: Path) -> None:
    inner, other = rows(2, 2).save(tmp_path / "in"), rows(4, 2).save(tmp_path / "other")
    of_rank(other, 3).replace(inner / of_rank(other, 3).name)
    with pytest.raises(DamagedFile, match="from a save of 4 ranks, and other files from one of 2"):
        open_checkpoint(tmp_path / "in")


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    inner = rows(2, 2).save(tmp_path / "in")
    (inner / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(of_rank(inner, 1).read_bytes())
    with pytest.raises(DamagedFile, match="rank 1 has two files"):
        open_checkpoint(tmp_path / "in")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mp_rank_01_model_states.pt", "several model-parallel ranks"),
        ("layer_03-model_00-model_states.pt", "pipeline stages"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts"),
    ],
)
def test_what_only_its_program_can_join_is_refused(name: str, words: str, tmp_path: Path) -> None:
    inner = rows(2, 2).save(tmp_path / "in")
    (inner / name).write_bytes(b"")
    with pytest.raises(Unsupported, match=words) as caught:
        open_checkpoint(tmp_path / "in")
    assert "ds_to_universal" in str(caught.value.hint)
    assert ("python -m deepspeed" in str(caught.value.hint)) is (words != "experts")


@pytest.mark.parametrize("tag", ["../elsewhere", "/etc", "a\\b", "nul\0", "nowhere", "", "x" * 5000])
def test_latest_leads_nowhere_else(tag: str, tmp_path: Path) -> None:
    run = rows(2, 2)
    run.save(tmp_path / "elsewhere", tag="s")
    run.save(tmp_path / "in", tag="one")
    run.save(tmp_path / "in", tag="two")
    (tmp_path / "in" / "latest").write_text(tag)
    with pytest.raises(CkptfixError) as caught:
        detect(tmp_path / "in")
    assert "ckptfix convert" in str(caught.value.hint)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    inner = rows(2, 2).save(tmp_path / "in")
    of_rank(inner, 1).rename(tmp_path / "elsewhere.pt")
    (inner / "zero_pp_rank_1_mp_rank_00_optim_states.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(DamagedFile, match="leads out of its folder"):
        open_checkpoint(tmp_path / "in")


def test_damaged_bytes_are_found_by_the_checksums_of_the_ranks(tmp_path: Path) -> None:
    run = rows(2, 2)
    path = of_rank(run.save(tmp_path / "in"), 1)
    data = bytearray(path.read_bytes())
    where = bytes(run.groups[0]["b.weight"].numpy().tobytes())[-16:]
    data[data.index(where)] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match="CRC-32") as caught:
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert caught.value.path == str(path)
    assert not (tmp_path / "out.pth").exists()
    (found,) = [row for row in doctor(tmp_path / "in").findings if row.id == "bad-crc"]
    assert path.name in found.where


def test_a_rank_of_many_groups_is_refused_and_no_file_is_walked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a rank is parsed; the names in it are looked for once, in the object of the whole."""
    walked: list[Graph] = []

    def counted(graph: Graph) -> TorchObject:
        walked.append(graph)
        return walk(graph)

    monkeypatch.setattr(torch_object, "walk", counted)
    run = rows(4, 2)
    run.save(tmp_path / "in")
    open_checkpoint(tmp_path / "in")
    assert len(walked) == 1
    path = of_rank(next(path for path in (tmp_path / "in").iterdir() if path.is_dir()), 2)
    with stand_ins():
        states = torch.load(path, weights_only=False)
        base = states["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"] = [{"lr": 1.0, "params": [number]} for number in range(10_000)]
        torch.save(states, path)
    (found,) = [row for row in doctor(tmp_path / "in").findings if row.id == "missing-rank"]
    assert "10,000 groups of options, but 1 flat groups of weights" in found.message


def test_a_universal_folder_with_a_damaged_parameter(tmp_path: Path) -> None:
    """It is named, everything else is kept, and no command takes the folder for whole."""
    run = rows(2, 2)
    inner = run.universal(tmp_path / "universal")
    names = sorted(path.name for path in (inner / "zero").iterdir() if path.is_dir())
    cut(inner / "zero" / names[0] / "fp32.pt")
    with pytest.raises(CkptfixError, match=names[0]):
        ckptfix.convert(tmp_path / "universal", tmp_path / "out.pth")
    found = doctor(tmp_path / "universal").cause
    assert found is not None and names[0] in str(found.where)
    done = ckptfix.repair(tmp_path / "universal", tmp_path / "kept.pth")
    assert [loss.name for loss in done.losses] == [f"module/{names[0]}"] and len(done.kept) > 1


@pytest.mark.parametrize(("skipped", "told"), [(0, True), (2, False)])
def test_model_states_of_another_step_are_told(skipped: int, told: bool, tmp_path: Path) -> None:
    """Weights and moments are all of one step, buffers of another: a warning. Steps that were skipped are no steps."""
    run = rows(2, 2)
    model = run.save(tmp_path / "in") / "mp_rank_00_model_states.pt"
    with stand_ins():
        state = torch.load(model, weights_only=False)
        torch.save({**state, "global_steps": run.step + 2, "skipped_steps": skipped}, model)
    found = [row for row in doctor(tmp_path / "in").findings if row.id == "model-steps"]
    assert bool(found) is told and all(row.severity == "warning" for row in found)
    done = ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert any(row.id == "model-steps" for row in done.findings) is told
    assert all(torch.equal(value, run.groups[0][name]) for name, value in ckptfix.load_state_dict(done.dest).items())


def test_buffers_that_the_ranks_do_not_have_alike_are_told(tmp_path: Path) -> None:
    """Nothing keeps running means equal: those of the first rank are taken, with a warning."""
    run = example(3, 3)
    inner = run.save(tmp_path / "in")
    assert not [row for row in doctor(tmp_path / "in").findings if row.id == "ranks-differ"]
    path = of_rank(inner, 2, "model")
    with stand_ins():
        state = torch.load(path, weights_only=False)
        state["module"]["bn.mean"] = state["module"]["bn.mean"] + 1
        torch.save(state, path)
    (row,) = [row for row in doctor(tmp_path / "in").findings if row.id == "ranks-differ"]
    assert (row.severity, row.where) == ("warning", "module/bn.mean")
    done = ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert [row.where for row in done.findings if row.id == "ranks-differ"] == ["module/bn.mean"]
    assert torch.equal(ckptfix.load_state_dict(done.dest)["bn.mean"], run.buffers["bn.mean"])


def test_a_frozen_parameter_that_no_file_holds_is_named(tmp_path: Path) -> None:
    model = rows(2, 2).save(tmp_path / "in") / "mp_rank_00_model_states.pt"
    with stand_ins():
        state = torch.load(model, weights_only=False)
        torch.save({**state, "frozen_param_shapes": {"gone.weight": torch.Size((3, 3))}}, model)
    assert "module/gone.weight" in {row.where for row in doctor(tmp_path / "in").findings if row.id == "missing-rank"}
    with pytest.raises(CkptfixError, match="no file holds it"):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")


def test_a_universal_folder_whose_moments_are_of_another_shape(tmp_path: Path) -> None:
    inner = rows(2, 2).universal(tmp_path / "in")
    torch.save(torch.zeros(3), inner / "zero" / "a.weight" / "exp_avg.pt")
    (found,) = [row for row in doctor(tmp_path / "in").findings if row.id == "bad-tensor"]
    assert found.where == "optimizer/state/a.weight/exp_avg"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_missing_folder_of_a_universal_one_held_is_lost(dtype: torch.dtype, tmp_path: Path) -> None:
    """The model's copy is the weight only where it has the bits of one; the moments are lost in any case."""
    run = replace(rows(2, 2), half=dtype)
    inner = run.universal(tmp_path / "in")
    shutil.rmtree(inner / "zero" / "a.weight")
    done = ckptfix.repair(tmp_path / "in", tmp_path / "out.pth")
    assert done.exit_code == 3 and any("a.weight" in line for line in done.lines)
    kept = ckptfix.load_checkpoint(tmp_path / "out.pth")["module"]
    assert ("a.weight" in kept) is (dtype is torch.float32)
    assert torch.equal(kept["b.weight"], run.groups[0]["b.weight"])

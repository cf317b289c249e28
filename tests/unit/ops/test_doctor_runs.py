"""doctor RUN: every checkpoint of a training run is examined, and the one to resume from is named."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_folders import LAYOUTS, STEPS, built, cut, distributed, trained

import ckptfix
from ckptfix.errors import Refused
from ckptfix.formats.runs import LAYOUTS as ROWS
from ckptfix.ops.doctor import runs
from ckptfix.ops.doctor.report import Diagnosis

OLD, NEW = STEPS
Run = Callable[[str], Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Builds a run of a layout, once."""
    folder = tmp_path_factory.mktemp("runs")
    made: dict[str, Path] = {}

    def make(layout: str) -> Path:
        if layout not in made:
            made[layout] = built(layout, folder / layout)
        return made[layout]

    return make


@pytest.fixture
def run(whole: Run, tmp_path: Path) -> Run:
    """A copy of that run, to be damaged."""
    return lambda layout: Path(shutil.copytree(whole(layout), tmp_path / layout))


def examined(path: Path) -> tuple[Diagnosis, set[str]]:
    done = ckptfix.doctor(path)
    assert done.run is not None
    return done, {finding.id for finding in done.findings}


def name_of(layout: str, step: int) -> str:
    return LAYOUTS[layout].name(step)


def resumed(done: Diagnosis) -> str | None:
    assert done.run is not None
    return None if done.run.resume is None else done.run.resume.name


def states(done: Diagnosis) -> list[str]:
    assert done.run is not None
    return [one.state for one in done.run.checkpoints]


def test_each_layout_has_a_builder() -> None:
    assert {row.name for row in ROWS} == set(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_run_is_resumed_from_its_newest_checkpoint(whole: Run, layout: str) -> None:
    done, ids = examined(whole(layout))
    assert done.run is not None and done.run.layout == layout and not ids and done.exit_code() == 0
    assert resumed(done) == name_of(layout, NEW) and states(done) == ["whole", "whole"]
    assert done.sentence.startswith(f"resume from {name_of(layout, NEW)}")
    assert done.advice is not None and str(NEW if "step" in done.advice else name_of(layout, NEW)) in done.advice


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cut_optimizer_leads_to_the_older_checkpoint(run: Run, layout: str) -> None:
    path, row = run(layout), LAYOUTS[layout]
    cut(path / name_of(layout, NEW) / row.optimizer if row.optimizer else path / name_of(layout, NEW), 60)
    done, ids = examined(path)
    assert "run-damaged" in ids and done.exit_code() == 1
    assert resumed(done) == name_of(layout, OLD) and states(done) == ["whole", "broken"]
    assert "cut at 60 %" in done.sentence and name_of(layout, NEW) in done.sentence
    assert ("run-latest" in ids) == (row.latest is not None and layout != "lightning"), "it names the broken one"


@pytest.mark.parametrize("layout", [name for name, row in LAYOUTS.items() if row.rank])
def test_the_file_of_a_rank_is_missing(run: Run, layout: str) -> None:
    path, row = run(layout), LAYOUTS[layout]
    (path / name_of(layout, NEW) / str(row.rank)).unlink()
    done, ids = examined(path)
    only_random = layout in ("trainer", "accelerate")
    assert "run-rank" in ids
    assert resumed(done) == name_of(layout, NEW if only_random else OLD), "other random numbers do not stop a resume"
    assert states(done)[1] == ("usable" if only_random else "broken")
    assert done.exit_code() == (0 if only_random else 1)


@pytest.mark.parametrize("layout", [name for name, row in LAYOUTS.items() if row.mixed])
def test_steps_disagree(run: Run, layout: str) -> None:
    path, row = run(layout), LAYOUTS[layout]
    assert row.mixed is not None
    row.mixed(path)
    done, ids = examined(path)
    assert "run-steps" in ids
    (finding,) = (one for one in done.findings if one.id == "run-steps")
    assert "100" in finding.message and "200" in finding.message
    if layout != "lightning":  # a user chooses the name of the file
        assert finding.severity == "error" and resumed(done) == name_of(layout, OLD)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("layout", [name for name, row in LAYOUTS.items() if row.latest])
@pytest.mark.parametrize("text", ["300", "", "../elsewhere", "\x00\xff"])
def test_latest_names_nothing_and_the_printed_command_mends_it(run: Run, layout: str, text: str) -> None:
    path, row = run(layout), LAYOUTS[layout]
    latest = path / str(row.latest)
    if layout == "lightning":
        latest.symlink_to("epoch=3-step=300.ckpt")
    else:
        latest.write_text(f"global_step{text}" if text == "300" and layout == "deepspeed" else text)
    done, ids = examined(path)
    assert ids == {"run-latest"} and done.exit_code() == 1 and resumed(done) == name_of(layout, NEW)
    (finding,) = done.findings
    assert finding.fix is not None
    subprocess.run(["bash", "-c", finding.fix], check=True)
    assert not examined(path)[1]


def test_latest_that_names_an_older_checkpoint_is_a_warning(run: Run) -> None:
    path = run("deepspeed")
    (path / "latest").write_text(name_of("deepspeed", OLD))
    done, _ = examined(path)
    assert [(row.id, row.severity) for row in done.findings] == [("run-latest", "warning")]
    assert done.exit_code() == 0 and done.exit_code("warning") == 1


@pytest.mark.parametrize("layout", ["torchtitan", "dcp", "nemo"])
def test_a_folder_without_metadata_is_unfinished(run: Run, layout: str) -> None:
    path = run(layout)
    next((path / name_of(layout, NEW)).rglob(".metadata")).unlink()
    done, ids = examined(path)
    assert ids == {"run-unfinished"} and states(done) == ["whole", "unfinished"]
    assert resumed(done) == name_of(layout, OLD) and "was not saved completely" in done.sentence


def test_other_signs_of_an_unfinished_save(run: Run) -> None:
    nemo, trainer = run("nemo"), run("trainer")
    (nemo / f"{name_of('nemo', NEW)}-unfinished").touch()
    (trainer / "checkpoint-300").mkdir()
    (trainer / "checkpoint-200").rename(trainer / "tmp-checkpoint-200")
    assert examined(nemo)[1] == {"run-unfinished"} and resumed(ckptfix.doctor(nemo)) == name_of("nemo", OLD)
    done, ids = examined(trainer)
    assert ids == {"run-unfinished"} and states(done) == ["whole", "unfinished", "unfinished"]


def test_a_missing_optimizer(run: Run) -> None:
    path = run("trainer")
    (path / "checkpoint-200" / "optimizer.pt").unlink()
    done, ids = examined(path)
    assert ids == {"run-incomplete"} and resumed(done) == "checkpoint-100" and done.exit_code() == 1
    assert "checkpoint-200 lacks its optimizer" in done.sentence
    (path / "checkpoint-100" / "optimizer.pt").unlink()
    for step in STEPS:
        (path / f"checkpoint-{step}" / "scheduler.pt").unlink()
    done, _ = examined(path)
    assert states(done) == ["weights", "weights"] and done.exit_code() == 0, "saved with save_only_model"
    assert resumed(done) == "checkpoint-200" and "only weights" in done.sentence


def test_an_older_checkpoint_without_optimizer_was_slimmed(run: Run) -> None:
    path = run("trainer")
    (path / "checkpoint-100" / "optimizer.pt").unlink()
    done, _ = examined(path)
    assert resumed(done) == "checkpoint-200" and done.exit_code() == 0
    assert [(row.id, row.severity) for row in done.findings] == [("run-incomplete", "warning")]


def test_no_checkpoint_is_left(run: Run) -> None:
    path = run("trainer")
    for step in STEPS:
        cut(path / f"checkpoint-{step}" / "model.safetensors", 50)
    done, ids = examined(path)
    assert "run-lost" in ids and resumed(done) is None and done.exit_code() == 1
    assert done.sentence.startswith("no checkpoint can be resumed from; checkpoint-200 ")


def test_parts_in_other_forms(run: Run, whole: Run) -> None:
    """Shards with an index, an adapter, and what FSDP and DeepSpeed write into the folders of Trainer."""
    path = run("trainer")
    for step in STEPS:
        place = path / f"checkpoint-{step}"
        (place / "optimizer.pt").unlink()
        shutil.copytree(whole("deepspeed") / f"global_step{step}", place / f"global_step{step}")
        (place / "latest").write_text(f"global_step{step}")
    assert states(examined(path)[0]) == ["whole", "whole"]
    (path / "checkpoint-200" / "latest").write_text("global_step900")
    done, ids = examined(path)
    assert ids == {"run-latest"} and resumed(done) == "checkpoint-100"
    fix = done.findings[0].fix
    assert fix is not None and shlex.split(fix)[2] == "global_step200"
    (path / "checkpoint-200" / "latest").write_text("global_step200")
    (path / "checkpoint-200" / "model.safetensors").unlink()
    assert states(examined(path)[0]) == ["whole", "whole"], "the model is in the states of DeepSpeed"
    cut(path / "checkpoint-200/global_step200/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 60)
    done, ids = examined(path)
    assert ids == {"run-damaged"} and "lacks its optimizer (cut at 60 %)" in done.sentence

    index = {"weight_map": {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}}
    shards = run("accelerate")
    for number in (1, 2):
        place = shards / f"checkpoint_{number}"
        (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    done, ids = examined(shards)
    assert states(done) == ["broken", "broken"] and "model-00002-of-00002.safetensors" in str(done)


def test_the_folders_of_fsdp(run: Run) -> None:
    """The sharded state dicts of FSDP in the folders of Trainer and accelerate."""
    for layout, optimizer in (("trainer", "optimizer.pt"), ("accelerate", "optimizer.bin")):
        path = run(layout)
        for step in STEPS:
            place = path / name_of(layout, step)
            (place / optimizer).unlink()
            (place / "model.safetensors").unlink()
            model, state, _ = trained(step)
            distributed(place / "pytorch_model_fsdp_0", {"model": model.state_dict()})
            distributed(place / "optimizer_0", {"optimizer": {"state": {"weight": state.state_dict()["state"][0]}}})
        assert states(examined(path)[0]) == ["whole", "whole"]
        cut(path / name_of(layout, NEW) / "optimizer_0" / "__0_0.distcp", 60)
        done, ids = examined(path)
        assert ids == {"run-damaged"} and "lacks its optimizer (cut at 60 %)" in done.sentence
        (path / name_of(layout, OLD) / "pytorch_model_fsdp_0" / ".metadata").unlink()
        assert states(examined(path)[0]) == ["unfinished", "broken"]


def test_the_checkpoints_may_be_in_a_folder_of_the_run(whole: Run, tmp_path: Path) -> None:
    for version in (0, 2, 10):
        shutil.copytree(whole("lightning"), tmp_path / "lightning_logs" / f"version_{version}" / "checkpoints")
    done, _ = examined(tmp_path)
    assert done.run is not None and done.run.folder == str(tmp_path / "lightning_logs/version_10/checkpoints")


def test_versions_of_one_name_and_the_copy_called_last(run: Run) -> None:
    path = run("lightning")
    newest = path / name_of("lightning", NEW)
    shutil.copy(newest, path / "epoch=2-step=200-v1.ckpt")
    assert resumed(examined(path)[0]) == "epoch=2-step=200-v1.ckpt"
    shutil.copy(newest, path / "last.ckpt")
    cut(path / "last.ckpt", 50)
    done, ids = examined(path)
    assert ids == {"run-damaged"} and resumed(done) == "epoch=2-step=200-v1.ckpt"


def test_weights_of_lightning_are_no_damage(run: Run) -> None:
    path = run("lightning")
    model, _, _ = trained(300)
    weights = {"state_dict": model.state_dict(), "global_step": 300, "epoch": 3, "pytorch-lightning_version": "2.6.0"}
    torch.save(weights, path / "epoch=3-step=300.ckpt")
    done, _ = examined(path)
    assert states(done) == ["whole", "whole", "weights"] and done.exit_code() == 0
    assert resumed(done) == name_of("lightning", NEW), "a checkpoint with an optimizer is preferred"


def test_progress_is_read(whole: Run) -> None:
    done, _ = examined(whole("trainer"))
    assert done.run is not None
    assert [(one.step, one.epoch, one.loss) for one in done.run.checkpoints] == [(100, 1, 1.25), (200, 2, 1.25)]
    done, _ = examined(whole("deepspeed"))
    assert done.run is not None and [one.step for one in done.run.checkpoints] == [100, 200]


def test_what_is_no_run_is_examined_as_before(whole: Run, tmp_path: Path) -> None:
    model, _, _ = trained(1)
    for name in ("epoch_1.ckpt", "epoch_2.ckpt"):
        torch.save(model.state_dict(), tmp_path / name)
    assert ckptfix.doctor(tmp_path).run is None, "files that are not Lightning's"
    out = Path(shutil.copytree(whole("trainer"), tmp_path / "out"))
    shutil.copy(out / "checkpoint-200" / "model.safetensors", out / "model.safetensors")
    assert ckptfix.doctor(out).run is None, "the trained model is beside its checkpoints"
    assert ckptfix.doctor(whole("trainer") / "checkpoint-200").run is None
    assert ckptfix.doctor(whole("trainer"), error="Missing key(s) in state_dict").run is None
    one = tmp_path / "one"
    shutil.copytree(whole("deepspeed") / "global_step100", one / "global_step100")
    (one / "latest").write_text("global_step100")
    assert ckptfix.doctor(one).run is None, "a single save of DeepSpeed is a checkpoint"
    (one / "latest").write_text("global_step200")
    assert examined(one)[1] == {"run-latest"}
    (tmp_path / "empty").mkdir()
    assert ckptfix.doctor(tmp_path / "empty").run is None


def test_one_checkpoint_of_trainer_is_a_run(run: Run) -> None:
    path = run("trainer")
    shutil.rmtree(path / "checkpoint-100")
    done, ids = examined(path)
    assert not ids and resumed(done) == "checkpoint-200"


def test_hostile_folders(run: Run, tmp_path: Path) -> None:
    """Names, links, pipes and contents that are made to break a reader: findings, and no traceback."""
    path = run("trainer")
    (path / f"checkpoint-{'9' * 200}").mkdir()
    (path / "checkpoint-300").symlink_to(path)
    (path / "checkpoint-400").symlink_to("checkpoint-400")
    (path / "checkpoint-\u0661").mkdir()
    place = path / "checkpoint-200"
    (place / "trainer_state.json").write_bytes(b"[" * 100_000)
    (place / "scheduler.pt").unlink()
    os.mkfifo(place / "scheduler.pt")
    (place / "optimizer.pt").write_bytes(b"")
    (place / "rng_state_99999999999999999999.pth").write_bytes(b"x")
    (place / "model.safetensors").unlink()
    (place / "model.safetensors").symlink_to("/dev/zero")
    done, ids = examined(path)
    assert "run-damaged" in ids and resumed(done) == "checkpoint-100"
    assert "\n" not in done.sentence and str(done) and done.to_html()
    json.dumps(done.as_dict())
    deepspeed = run("deepspeed")
    (deepspeed / "latest").unlink()
    os.mkfifo(deepspeed / "latest")
    assert resumed(examined(deepspeed)[0]) == "global_step200"
    (deepspeed / "latest").unlink()
    (deepspeed / "latest").write_bytes(b"\x1b[31m" + b"x" * 10_000_000)
    done, ids = examined(deepspeed)
    assert ids == {"run-latest"} and "\x1b" not in str(done)


def test_only_the_tensors_of_the_checkpoint_to_resume_from_are_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run("trainer")
    model = path / "checkpoint-200" / "optimizer.pt"
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    done, ids = examined(path)
    assert ids == {"run-damaged"} and resumed(done) == "checkpoint-100"
    assert "tensor data of checkpoint-200, checkpoint-100" in str(done)
    done = ckptfix.doctor(path, fast=True)
    assert not done.findings and "no tensor data" in str(done)
    monkeypatch.setattr(runs, "MOST_DATA", 1000)
    assert not examined(path)[1]


def test_a_run_that_diverged_is_resumed_from_before(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        model, optimizer, _ = trained(epoch)
        state = {name: value * (torch.nan if epoch > 1 else 1) for name, value in model.state_dict().items()}
        row = {"epoch": epoch, "model": state, "optimizer": optimizer.state_dict()}
        torch.save(row, tmp_path / f"epoch_{epoch}.pth")
    done, ids = examined(tmp_path)
    assert ids == {"nan-values"} and resumed(done) == "epoch_1.pth" and done.exit_code() == 0
    assert "epoch_3.pth has NaN in its weights" in done.sentence
    with pytest.raises(Refused, match=r"resume from epoch_1\.pth"):
        ckptfix.fix(tmp_path, tmp_path / "out.pth")


def test_files_of_torch_save_are_ordered_by_what_they_hold(run: Run) -> None:
    """last.pth is newer than epoch_2.pth only if it says so; best.pth may have weights alone."""
    path = run("torch")
    saved = torch.load(path / "epoch_2.pth", weights_only=True)
    torch.save({**saved, "epoch": 3}, path / "last.pth")
    torch.save({"epoch": 1, "model": saved["model"]}, path / "best.pth")
    done, _ = examined(path)
    assert done.run is not None and resumed(done) == "last.pth" and "epoch 3" in done.sentence
    assert [one.name for one in done.run.checkpoints] == ["best.pth", "epoch_1.pth", "epoch_2.pth", "last.pth"]
    assert states(done)[0] == "weights" and done.exit_code() == 0
    cut(path / "last.pth", 60)
    assert resumed(examined(path)[0]) == "epoch_2.pth"


def test_files_without_an_optimizer_are_no_run(tmp_path: Path) -> None:
    for epoch in (1, 2):
        torch.save(trained(100)[0].state_dict(), tmp_path / f"epoch_{epoch}.pth")
    done = ckptfix.doctor(tmp_path)
    assert done.run is None and done.cause is not None and done.cause.id == "no-checkpoint"


def test_an_optimizer_without_tensors_counts(tmp_path: Path) -> None:
    """SGD without momentum has only numbers."""
    model = torch.nn.Linear(3, 3)
    for epoch in (1, 2):
        state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
        torch.save({"net": model.state_dict(), "optim": state, "epoch": epoch}, tmp_path / f"ckpt_{epoch}.pt")
    assert resumed(examined(tmp_path)[0]) == "ckpt_2.pt"


@pytest.mark.parametrize("layout", ["torch", "trainer", "torchtitan", "megatron"])
def test_fix_of_a_run_names_the_checkpoint_to_resume_from(run: Run, layout: str, tmp_path: Path) -> None:
    path = run(layout)
    with pytest.raises(Refused, match="a run with 2 checkpoints") as raised:
        ckptfix.fix(path, tmp_path / "out")
    assert raised.value.hint is not None
    words = shlex.split(raised.value.hint.strip("`"))
    assert words[:2] == ["ckptfix", "fix"] and Path(words[2]) == path / name_of(layout, NEW)

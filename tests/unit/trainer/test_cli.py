"""The trainer's command line: its examples run, and what is wrong gets one line and exit status 2."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from forks import TORCHRUN, Forks

from ckptfix.cli import commands
from ckptfix.trainer.__main__ import EPILOG, START, gpu_ids, main, wrappers

pytestmark = pytest.mark.slow

EXAMPLES = re.findall(r"^    (python -m ckptfix\.trainer.*|torchrun .*)$", EPILOG, re.MULTILINE)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_the_examples_of_the_help_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In their order: later ones resume what earlier ones saved. Those in processes have tests of their own."""
    alone = [line for line in EXAMPLES if "torchrun" not in line and "ddp" not in line]
    assert len(EXAMPLES) >= 12 and len(alone) >= 8
    for line in alone:
        assert main(shlex.split(line)[3:]) == 0, line
    said = capsys.readouterr()
    assert said.err == ""
    assert "resumed dp.pth: after epoch 2, with optimizer, scheduler and RNG state" in said.out
    for name, start in (("dp.pth", "module.body"), ("clean.pth", "body")):
        assert next(iter(torch.load(name, weights_only=True)["model_state_dict"])).startswith(start)
    assert len(torch.load("slower.pth", weights_only=True)["losses"]) == 6


def test_without_arguments_it_says_what_to_try_and_that_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown, err = capsys.readouterr()
    assert (shown, err) == (f"{START}\n", "") and not list(here.iterdir())
    assert max(map(len, shown.splitlines())) <= 120
    lines = re.findall(r"^  ((?:python|ckptfix) .*?)(?: +#.*)?$", shown, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        program, *words = shlex.split(line)
        if program == "python":
            assert main(words[2:]) == 0, line
        else:
            done = CliRunner().invoke(commands, words)
            assert done.exit_code == int(words[0] == "diff"), (line, done.output)
    assert not next(iter(torch.load("fixed.pth", weights_only=True)["model_state_dict"])).startswith("module.")
    assert len(torch.load("longer.pth", weights_only=True)["losses"]) == 4


@pytest.mark.campaign
def test_torchrun(here: Path, launcher: Forks) -> None:
    """The example with DDP, and in one more run FSDP2 that saves a folder, with half the samples in each process."""
    for name, saved in (("ddp.pth", ["module.fc.weight", "module.fc.bias"]), ("sharded", None)):
        line = next(line for line in EXAMPLES if line.startswith("torchrun") and line.endswith(name))
        done = launcher(TORCHRUN, ["--standalone", *shlex.split(line)[1:], "--epochs", "1"])
        assert done.code == 0, done.stderr
        assert done.stdout.count("epoch 1/1") == 1 and done.stdout.count(f"saved {name}") == 1
        if saved:
            state = torch.load(name, weights_only=True)
            assert list(state) == saved
    assert main(["--epochs", "1", "--save", "alone.pth"]) == 0
    alone = torch.load("alone.pth", weights_only=True)
    torch.testing.assert_close(state, {f"module.{key}": value for key, value in alone.items()})
    assert main(["--resume", "sharded", "--epochs", "1", "--save", "gathered.pth"]) == 0
    torch.testing.assert_close(torch.load("gathered.pth", weights_only=True), alone)


WRONG = [
    ("--parallel dpp", "'dpp' is unknown; use none, auto, dp, ddp, fsdp2, compile, checkpoint"),
    ("--parallel dp,ddp", "dp and ddp each distribute the work"),
    ("--parallel compile,checkpoint", "name it first"),
    ("--nested --format safetensors", "leave out --nested"),
    ("--parallel fsdp2 --format module", "sharded module"),
    ("--parallel fsdp2 --averaged", "cannot be copied"),
    ("--gpu_ids 0,x", "'0,x' is not a list"),
    ("--gpu_ids 0,0", "'0,0' is not a list"),
    ("--replicas 0", "'0' is not an integer of at least 1"),
    ("--replicas 3 --gpu_ids 0,1", "contradict"),
    ("--replicas 2 --parallel ddp", "--replicas requires DataParallel"),
    ("--output-device 1", "--output-device requires DataParallel"),
    ("--log-steps", "--replicas N"),
    ("--epochs -1", "'-1' is not an integer of at least 0"),
    ("--output-device x --parallel dp", "'x' is not an integer of at least 0"),
    ("--rate -1", "'-1' is not a learning rate"),
    ("--model bert --full-size", "only one size"),
    ("--resume text.txt", "text.txt: a text file"),
    ("--resume foreign.pth", "foreign.pth: this trainer did not write it"),
    ("--resume foreign.pth --parallel ddp", "foreign.pth: this trainer did not write it"),
    ("--resume vgg.pth", "its tensors do not fit this model"),
    ("--resume absent.pth", "no such file"),
    ("--save absent/dp.pth", "its folder does not exist"),
    ("--outputs absent/o.pt", "its folder does not exist"),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_what_is_wrong_is_said_before_training(
    line: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("some notes")
    torch.save({"state_dict": {"fc.weight": torch.zeros(5, 3)}, "epoch": 1}, "foreign.pth")
    torch.save({"features.0.weight": torch.zeros(8, 3, 3, 3)}, "vgg.pth")
    before = sorted(here.iterdir())
    arguments = shlex.split(line) + ([] if "--save" in line else ["--save", "never"])
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    said = capsys.readouterr()
    assert words in said.err
    errors = [row for row in said.err.splitlines() if "error: " in row]
    assert len(errors) == 1
    assert "Traceback" not in said.err and "epoch" not in said.out
    assert sorted(here.iterdir()) == before


@pytest.mark.campaign
def test_a_mistake_in_a_process_is_one_line_too(here: Path) -> None:
    """A folder that disappears during training cannot be foreseen; each process that sees it says so."""
    script = here / "late.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from ckptfix.trainer import TrainingJob, launch, run\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(launch(run, TrainingJob(parallel=('ddp',), epochs=0, save=Path('absent/x.pth')), 2))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "error: absent/x.pth: its folder does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_training_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(contents: object, file: Any, **how: object) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    assert main(["--epochs", "0", "--save", "never"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_several_processes_must_be_made_use_of(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--parallel", "dp"]) == 2
    assert "add --parallel ddp or fsdp2" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpu_ids(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DataParallel's keys come with two ids or more, and not with one, whether GPUs are here or not."""
    for option, key in (("--gpu_ids 0,1", "module.fc.weight"), ("--gpu-ids 0", "fc.weight")):
        assert main([*option.split(), "--epochs", "0", "--save", "saved.pth"]) == 0
        said = capsys.readouterr().out
        assert f"this machine has no GPU: training on the CPU, without {option.replace('-ids', '_ids')}\n" in said
        assert next(iter(torch.load("saved.pth", weights_only=True))) == key


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_visible_devices_are_told_of(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert main(["--epochs", "0", "--parallel", "auto"]) == 0
    said = capsys.readouterr().out
    assert "--parallel auto: none" in said
    assert "CUDA_VISIBLE_DEVICES=3, but training runs on the CPU: tensors will be tagged cpu" in said


def test_the_help_shows_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for words in (
        "--gpu_ids", "--unwrapped", "--nested", "--replicas 3 --log-steps", "--model bert", "--parallel auto",
        "torchrun", "fsdp2", "--resume dp.pth", "--rate 0.001", "optimizer.step()", "CUDA_VISIBLE_DEVICES",
        "vgg-named", "--output-device", "tagger",
    ):  # fmt: skip
        assert words in said, words


def test_wrappers_are_read_innermost_first() -> None:
    assert wrappers("none") == ()
    assert wrappers("auto") is None
    assert wrappers("compile,ddp") == ("compile", "ddp")
    assert gpu_ids("2, 0") == (2, 0)


@pytest.mark.sampled(0, test_all=1)
def test_a_reader_that_goes_away_is_no_traceback() -> None:
    line = f"{sys.executable} -m ckptfix.trainer --model tutorial --replicas 3 --log-replicas --log-steps --epochs 300"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line} | head -n 1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 141
    assert done.stderr == ""

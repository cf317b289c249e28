"""Twenty-eight tasks of a newcomer, each by the line that a person types first; three lines are answered by another.

What a command does in detail has tests of its own. Here each line leads to its end, or to the line that does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_source
import pytest
import torch
from cli.conftest import shell_words
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ckptfix
from ckptfix.cli import commands

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("first typed")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)


class Net(nn.Module):
    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, bias=False)
        self.layer1 = nn.Sequential(Block(), Block())
        self.layer2 = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(8, classes)


class Runs:
    """Has an effect where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch ran",)


MESSAGE = """RuntimeError: Error(s) in loading state_dict for Net:
\tsize mismatch for fc.weight: copying a param with shape torch.Size([10, 8]) from checkpoint, the shape in current \
model is torch.Size([100, 8]).
"""

CLEAN = Net().state_dict()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files of all tasks."""
    folder = tmp_path_factory.mktemp("first")
    net = Net()
    net.load_state_dict(CLEAN)
    optimizer = torch.optim.AdamW(net.parameters())
    torch.autograd.backward([(one**2).sum() for one in net.parameters()])
    optimizer.step()
    net.load_state_dict(CLEAN)
    wrapped = {f"module.{name}": value for name, value in CLEAN.items()}
    renamed = {name.replace("layer", "stage").replace("conv", "c"): value for name, value in CLEAN.items()}
    training = {"epoch": 90, "arch": "net", "state_dict": wrapped, "optimizer": optimizer.state_dict()}
    lightning = {
        "epoch": 9, "global_step": 100, "pytorch-lightning_version": "2.4.0", "optimizer_states": [],
        "state_dict": {f"model.{name}": value for name, value in CLEAN.items()}, "hyper_parameters": {"lr": 0.1},
    }  # fmt: skip
    for name, value in {
        "clean.pth": CLEAN, "ddp.pth": wrapped, "training.pth.tar": training, "lit.ckpt": lightning,
        "renamed.pth": renamed, "renamed10.pth": {**renamed, "fc.weight": torch.ones(10, 8), "fc.bias": torch.ones(10)},
        "head10.pth": Net(10).state_dict(), "args.pth": {**training, "args": argparse.Namespace(lr=0.1)},
        "whole.pth": net, "evil.pth": {"w": torch.ones(2), "x": Runs()},
    }.items():  # fmt: skip
        torch.save(value, folder / name)
    save_file(CLEAN, folder / "clean.safetensors", {"format": "pt"})
    (folder / "run").mkdir()
    for epoch in range(5):
        state = Net().state_dict()
        if epoch == 4:
            state["fc.bias"][0] = float("nan")
        torch.save({"epoch": epoch, "loss": 1 / (epoch + 1), "model": state}, folder / f"run/epoch_{epoch}.pth")
    (folder / "err.txt").write_text(MESSAGE)
    whole = (folder / "training.pth.tar").read_bytes()
    (folder / "cut.pth").write_bytes(whole[: len(whole) * 7 // 10])
    header = bytearray((folder / "clean.safetensors").read_bytes())
    at = header.index(b'"dtype"') + 4
    header[at : at + 1] = b"{"
    (folder / "header.safetensors").write_bytes(header)
    (folder / "packed.pth.gz").write_bytes(gzip.compress((folder / "clean.pth").read_bytes()))
    (folder / "lora").mkdir()
    names = [f"base_model.model.layers.0.q_proj.lora_{side}.weight" for side in "AB"]
    save_file({names[0]: torch.ones(4, 8), names[1]: torch.ones(8, 4)}, folder / "lora/adapter_model.safetensors")
    (folder / "lora/adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    for kind in ("deepspeed", "dcp"):
        (folder / kind).mkdir()
        every_source.SOURCES[kind](folder / kind)
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def typed(line: str, code: int = 0) -> str:
    """The output of a command line."""
    words = shell_words(line)
    assert words[0] == "ckptfix"
    done: Result = CliRunner().invoke(commands, words[1:])
    assert done.exit_code == code, done.output
    return done.output


def state(name: str) -> dict[str, Tensor]:
    loaded: Any = load_file(name) if name.endswith(".safetensors") else torch.load(name, weights_only=True)
    return dict(loaded.get("state_dict", loaded))


def is_clean(name: str, dtype: torch.dtype | None = None) -> bool:
    """Whether the model takes the state dict in the file, which is `CLEAN`, cast where it is cast."""
    found = state(name)
    if dtype is not None:
        assert found["fc.weight"].dtype == dtype
        return set(found) == set(CLEAN)
    return set(found) == set(CLEAN) and all(torch.equal(found[key], value) for key, value in CLEAN.items())


def test_1_a_traceback() -> None:
    said = typed("ckptfix doctor head10.pth --error err.txt", 1)
    assert "fc.weight is [10, 8] here, [100, 8] in the model" in said and "matches your error message" in said


def test_2_two_epochs() -> None:
    assert "Different: " in typed("ckptfix diff run/epoch_0.pth run/epoch_1.pth", 1)


def test_3_the_average_of_the_last_epochs() -> None:
    said = typed("ckptfix average run/epoch_2.pth run/epoch_3.pth run/epoch_4.pth")
    assert "output: run/epoch_4.averaged.pth" in said and "1 NaN value" in said
    Path("run/epoch_4.averaged.pth").unlink()
    line = re.search(r"`(ckptfix .*?)`", typed("ckptfix average run/epoch_0.pth run/epoch_1.pth mean.pth", 2))
    assert line is not None and line[1] == "ckptfix average run/epoch_0.pth ... -o mean.pth"
    typed(line[1].replace("...", "run/epoch_1.pth"))
    assert Path("mean.pth").is_file()


@pytest.mark.parametrize("kind", ["deepspeed", "dcp"])
def test_4_and_5_folders_of_ranks_for_deployment(kind: str) -> None:
    (source,) = Path(kind).iterdir()
    typed(f"ckptfix convert {source} {kind}.safetensors --dtype fp16")
    assert {value.dtype for value in load_file(f"{kind}.safetensors").values()} == {torch.float16}


def test_6_lightning_for_deployment() -> None:
    assert "convert --strip-prefix model." in typed("ckptfix doctor lit.ckpt")
    typed("ckptfix convert lit.ckpt lit.safetensors --dtype fp16 --strip-prefix model.")
    assert is_clean("lit.safetensors", torch.float16)


def test_7_a_regular_expression() -> None:
    typed(r"ckptfix rename renamed.pth 7.pth --sub 'stage(\d)=layer\1' --sub '\bc1=conv1'")
    assert is_clean("7.pth")


def test_8_without_the_head() -> None:
    typed("ckptfix select clean.pth 8.pth --drop 'fc.*'")
    assert set(state("8.pth")) == set(CLEAN) - {"fc.weight", "fc.bias"}
    assert "did you mean 'fc.*'?" in typed("ckptfix select clean.pth 8c.pth --drop fc", 2)
    line = re.search(r"`(ckptfix .*?)`", typed("ckptfix drop clean.pth 8b.pth 'fc.*'", 2))
    assert line is not None
    typed(line[1])
    assert Path("8b.pth").read_bytes() == Path("8.pth").read_bytes()


def test_9_a_training_checkpoint_without_the_head_needs_the_prefix() -> None:
    said = typed("ckptfix select training.pth.tar 9.pth.tar --drop 'fc.*'", 2)
    assert "did you mean 'module.fc.*'?" in said and not Path("9.pth.tar").exists()
    typed("ckptfix select training.pth.tar 9.pth.tar --drop 'module.fc.*'")
    assert not [name for name in state("9.pth.tar") if "fc" in name]


def test_10_another_implementation() -> None:
    typed("ckptfix match renamed.pth 10.pth --like clean.pth")
    assert is_clean("10.pth")


def test_11_another_implementation_with_another_head_needs_a_decision() -> None:
    said = typed("ckptfix match renamed10.pth 11.pth --like clean.pth", 2)
    assert "--partial" in said and "--drop-unexpected" in said
    typed("ckptfix match renamed10.pth 11.pth --like clean.pth --partial --drop-unexpected", 1)
    assert set(state("11.pth")) == set(CLEAN) - {"fc.weight", "fc.bias"}


def test_12_in_python() -> None:
    net = Net()
    with pytest.warns(UserWarning, match="structure"):
        report = ckptfix.load_into(net, "renamed.pth")
    assert "structure" in str(report)
    assert all(torch.equal(value, CLEAN[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("command", ["strip-module", "fix"])
def test_13_and_14_in_place_and_back(command: str) -> None:
    before = Path("ddp.pth").read_bytes()
    typed(f"ckptfix {command} ddp.pth --in-place")
    assert is_clean("ddp.pth")
    assert "byte for byte as before" in typed("ckptfix undo ddp.pth")
    assert Path("ddp.pth").read_bytes() == before


def test_15_a_look_without_a_terminal_is_told() -> None:
    pytest.importorskip("textual", reason="pip install 'ckptfix[browse]'")
    assert "terminal" in typed("ckptfix browse clean.pth", 2)


def test_16_a_page() -> None:
    typed("ckptfix diff clean.pth ddp.pth --html", 1)
    assert Path("clean.pth-ddp.pth.diff.html").read_text().startswith("<!DOCTYPE html>")


def test_17_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not in a git repository" in typed("ckptfix git", 2)


def test_18_json() -> None:
    found = json.loads(typed("ckptfix doctor ddp.pth --json"))
    assert found["fixes"][0][:2] == ["ckptfix", "strip-module"]


def test_19_a_loop_of_a_shell() -> None:
    codes = {name: CliRunner().invoke(commands, ["doctor", "-q", name]).exit_code for name in ("clean.pth", "evil.pth")}
    assert codes == {"clean.pth": 0, "evil.pth": 1}


def test_20_which_epoch_has_nan() -> None:
    said = typed("ckptfix doctor run")
    assert [line.split()[2] for line in said.splitlines() if "nan-values" in line] == ["run/epoch_4.pth"]
    assert re.search(r"epoch +loss", typed("ckptfix ls run"))


def test_22_resume_on_other_gpus_is_found() -> None:
    assert "Resume on other GPUs" in typed("ckptfix help resume")


def test_23_a_malicious_file() -> None:
    for line in ("ckptfix evil.pth", "ckptfix doctor evil.pth"):
        assert re.search(r"loading this file runs (os|posix)\.system\('touch ran'\)", typed(line, 1))
    assert not Path("ran").exists()


def test_24_a_copy_is_verified() -> None:
    typed("ckptfix convert clean.pth 24.safetensors")
    assert typed("ckptfix diff clean.pth 24.safetensors").startswith("Same")
    assert typed("ckptfix digest 24.safetensors --check clean.pth").startswith("verified")


def test_25_cut_short() -> None:
    assert "all 27 model weights are intact; " in typed("ckptfix cut.pth", 1)
    typed("ckptfix fix cut.pth 25.pth", 3)
    assert is_clean("25.pth")


def test_26_a_bad_header() -> None:
    assert "kept 26 of 27 tensors" in typed("ckptfix repair header.safetensors 26.safetensors", 3)
    assert len(load_file("26.safetensors")) == 26


def test_27_words_that_are_wrong() -> None:
    for line, answer in {
        "ckptfix fix ddp.pht": "did you mean ddp.pth?",
        "ckptfix ddp.pht": "did you mean ddp.pth?",
        "ckptfix convert clean.pth x --to fp16": "`ckptfix cast IN OUT --to fp16`",
        "ckptfix rename clean.pth x.pth s/layer/stage/": "--sub layer=stage",
        "ckptfix strip-modul ddp.pth": "Did you mean strip-module",
    }.items():
        assert answer in typed(line, 2), line


def test_28_a_whole_model_a_packed_file_and_an_adapter() -> None:
    typed("ckptfix fix whole.pth 28.pth")
    typed("ckptfix fix packed.pth.gz 28b.pth")
    assert is_clean("28.pth") and is_clean("28b.pth")
    typed("ckptfix fix lora 28")
    assert sorted(path.name for path in Path("28").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]

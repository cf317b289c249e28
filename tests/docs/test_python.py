"""The Python blocks of a page run, in order, in one folder, on files as the libraries that they speak of make them."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_files
from docs.pages import PAGES, page_of
from torch import nn

import ckptfix

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.fc(inputs))
        return outputs


class OtherNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.classifier = nn.Linear(4, 5)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.fc = nn.Linear(3, 4)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = Base()
        self.head = nn.Linear(4, 2)


LIBRARIES = ("lightning", "timm", "torchvision")
"""Libraries whose blocks run only where they are installed; such a block begins with their import."""


def blocks(page: Path) -> Iterator[str]:
    yield from re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def library(block: str) -> str | None:
    """The library that a block needs, beside torch."""
    first = re.match(r"import (\w+)$", block, re.MULTILINE)
    return first[1] if first and first[1] in LIBRARIES else None


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A DataParallel model after a step, so that its optimizer has a state."""
    model = nn.DataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.manual_seed(0)
    model, optimizer = trained()
    training = {"epoch": 3, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save(training, tmp_path / "training.pth")
    ckptfix.map_location(tmp_path / "training.pth", tmp_path / "multi_gpu.pth", "cuda:0")
    torch.save(Net().state_dict(), tmp_path / "plain.pth")
    torch.save(Net(10).state_dict(), tmp_path / "ten_classes.pth")
    torch.save(Base().state_dict(), tmp_path / "pytorch_model.bin")
    gone = types.ModuleType("their_package")
    settings = type("Settings", (), {"__module__": "their_package", "__qualname__": "Settings"})
    gone.Settings = settings  # type: ignore[attr-defined]
    sys.modules["their_package"] = gone
    names = {f"model.{name}": value for name, value in Net().state_dict().items()}
    lightning = {"state_dict": names, "hyper_parameters": settings(), "pytorch-lightning_version": "2.4.0"}
    torch.save(lightning, tmp_path / "lightning.ckpt")
    del sys.modules["their_package"]
    zero_files.Run([dict(Net().state_dict())], 2, 3, torch.bfloat16).save(tmp_path / "zero_run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(page: Path) -> dict[str, Any]:
    """The names that the blocks of `page` leave behind."""
    model = Net()
    space: dict[str, Any] = {
        "torch": torch,
        "ckptfix": ckptfix,
        "Net": Net,
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "classifier": Classifier(),
        "twenty_classes": Net(20),
        "other_names": OtherNames(),
    }
    for block in blocks(page):
        if library(block):
            continue
        exec(compile(block, page.name, "exec"), space)
    return space


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_runs(page: Path, folder: Path) -> None:
    run(page)


def test_there_are_blocks_to_run() -> None:
    assert sum(len(list(blocks(page))) for page in PAGES) >= 8


def test_the_recipes_do_what_they_say(folder: Path) -> None:
    space = run(page_of("recipes"))
    assert space["epoch"] == 3 and space["start"] == 4
    assert space["optimizer"].param_groups[0]["lr"] == 0.01
    assert space["settings"].name == "Settings"
    assert torch.equal(space["other_names"].hidden.weight, torch.load("plain.pth", weights_only=True)["fc.weight"])


def of_lightning() -> tuple[type[nn.Module], nn.Module]:
    """A module of Lightning, and one that its Trainer has saved as lit.ckpt."""
    import lightning

    class LitNet(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int, settings: argparse.Namespace) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(3, width)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).sum()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.settings.lr)

    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    module = LitNet(4, argparse.Namespace(lr=0.1))
    trainer.fit(module, torch.utils.data.DataLoader([torch.ones(3)] * 2))  # type: ignore[arg-type]
    trainer.save_checkpoint("lit.ckpt")
    return LitNet, module


def of_timm() -> nn.Module:
    """A model of timm, saved by the class that timm's training script uses."""
    import timm.utils

    net: nn.Module = timm.create_model("test_resnet", num_classes=10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averaged = timm.utils.ModelEmaV2(net, decay=0.9)
    args = argparse.Namespace(model="test_resnet")
    saver = timm.utils.CheckpointSaver(nn.DataParallel(net), optimizer, args, model_ema=averaged, recovery_dir=".")
    saver.save_recovery(1, 2)
    (path,) = Path().glob("recovery-*")
    path.rename("timm.pth.tar")
    smooth: nn.Module = averaged.module
    return smooth


def of_torchvision() -> nn.Module:
    """A model of torchvision, saved as references/classification/train.py does."""
    import torchvision

    net: nn.Module = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save({**state, "args": argparse.Namespace(lr=0.1)}, "torchvision.pth")
    return net


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_recipe_replaces_the_loading_code_of_a_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # one that is built for another torch fails in many ways
        pytest.skip(f"needs {name}, which cannot be imported here: {error}")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"ckptfix": ckptfix}
    if name == "lightning":
        space["LitNet"], saved = of_lightning()
    else:
        saved = of_timm() if name == "timm" else of_torchvision()
    (block,) = (text for text in blocks(page_of("recipes")) if library(text) == name)
    exec(compile(block, name, "exec"), space)
    loaded, expected = space["net"].state_dict(), saved.state_dict()
    assert loaded.keys() == expected.keys()
    own = {"fc.weight", "fc.bias"} if name == "torchvision" else set()
    for key in loaded.keys() - own:
        assert torch.equal(loaded[key], expected[key]), key
    if name == "lightning":
        assert space["net"].hparams.width == 4 and space["net"].hparams.settings.lr == 0.1

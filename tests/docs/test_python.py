"""The Python blocks of a page run, in order, in one folder, on files as the libraries that they speak of make them."""

from __future__ import annotations

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


def blocks(page: Path) -> Iterator[str]:
    yield from re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


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
        exec(compile(block, page.name, "exec"), space)
    return space


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_runs(page: Path, folder: Path) -> None:
    run(page)


def test_there_are_blocks_to_run() -> None:
    assert sum(len(list(blocks(page))) for page in PAGES) >= 8


def test_the_recipes_do_what_they_say(folder: Path) -> None:
    space = run(page_of("recipes"))
    assert space["epoch"] == 3
    assert space["optimizer"].param_groups[0]["lr"] == 0.01
    assert space["settings"].name == "Settings"
    assert torch.equal(space["other_names"].hidden.weight, torch.load("plain.pth", weights_only=True)["fc.weight"])

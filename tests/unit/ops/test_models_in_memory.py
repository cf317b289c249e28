"""like= and diff() take a model or a state dict in memory; the verdict is in a repr, and numbers are readable."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.arguments import LIVE
from ckptfix.errors import WrongType


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.fc = nn.Linear(5, classes)


@pytest.fixture
def wrapped(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "ddp.pth"
    torch.save({"model": {f"module.{name}": value for name, value in Net().state_dict().items()}}, path)
    return path


@pytest.mark.parametrize("kind", [Net, lambda: Net().state_dict()])
def test_doctor_match_and_fix_take_one(wrapped: Path, tmp_path: Path, kind: type) -> None:
    model = kind()
    done = ckptfix.doctor(wrapped, like=model)
    assert [finding.id for finding in done.findings if finding.severity != "info"]
    ckptfix.match(wrapped, tmp_path / "matched.pth", model)
    ckptfix.fix(wrapped, tmp_path / "fixed.pth", like=model)
    for name in ("matched", "fixed"):
        found = ckptfix.load_state_dict(tmp_path / f"{name}.pth", strip=None)
        assert list(found) == list(Net().state_dict())
    assert not LIVE


def test_a_command_that_needs_the_model_is_a_call(tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    names = {"body": "trunk", "fc": "head"}
    parts = ((*name.split("."), value) for name, value in Net().state_dict().items())
    torch.save({f"{names[module]}.{leaf}": value for module, leaf, value in parts}, path)
    done = ckptfix.doctor(path, like=Net())
    assert done.exit_code() == 1
    assert not [words for words in done.fixes if "--like" in words]
    assert "like=model" in str(done) and "<Net>" not in " ".join(str(words) for words in done.fixes)


def test_what_is_no_model(wrapped: Path) -> None:
    with pytest.raises(WrongType, match="a model or a state dict"):
        ckptfix.doctor(wrapped, like=3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_diff_takes_one(wrapped: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    ckptfix.strip_module(wrapped, tmp_path / "plain.pth")
    assert ckptfix.diff(model, ckptfix.load_state_dict(wrapped)).same
    with torch.no_grad():
        model.fc.bias.add_(1)
    done = ckptfix.diff(model, wrapped)
    assert [row.name_a for row in done.changed if row.values is not None] == ["fc.bias"]
    assert (done.path_a, done.path_b) == ("<Net>", str(wrapped))
    assert "fc.bias" in done.to_html(), "the temporary file lives as long as the result"
    (folder,) = {Path(file.path).parent for file in done.tensors.files if file.path != str(wrapped)}
    assert folder.exists()
    del done
    gc.collect()
    assert not folder.exists()


def test_the_verdict_is_in_the_repr(wrapped: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "path": Path("x")}, tmp_path / "refused.pth")
    assert "1 error (foreign-global)" in repr(ckptfix.doctor(tmp_path / "refused.pth"))
    assert "1 warning (wrapped-names)" in repr(ckptfix.doctor(wrapped))
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pth")
    assert "error" not in repr(ckptfix.doctor(tmp_path / "good.pth"))
    made = repr(ckptfix.open_checkpoint(wrapped))
    assert made.startswith(f"<Checkpoint {str(wrapped)!r}: zip, ") and len(made) < 150 + len(str(wrapped))


def test_numbers_in_a_notebook_are_readable(wrapped: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.full((2000,), 1 / 3)}, tmp_path / "a.pth")
    torch.save({"w": torch.full((2000,), 0.7)}, tmp_path / "b.pth")
    table = ckptfix.diff(tmp_path / "a.pth", tmp_path / "b.pth")._repr_html_()
    assert "<td>0.3667</td>" in table and "<td>2,000</td>" in table

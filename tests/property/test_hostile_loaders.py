"""The loaders on hostile files: a result or one of our errors, nothing called, nothing changed by a refusal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import in_turn
from property.hostile import gadgets, pickles
from property.hostile_files import hostile_files
from torch import nn

import ckptfix
from ckptfix.errors import CkptfixError

pytestmark = pytest.mark.campaign


def hostile() -> dict[str, bytes]:
    """Every hostile file by its name."""
    return {
        **{f"gadget {module} {name}": data for module, name, data in gadgets()},
        **dict(pickles()),
        **hostile_files(),
    }


def load_checkpoint(path: Path) -> None:
    ckptfix.load_checkpoint(path, map_location="meta")


def load_into(path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    before = [value.clone() for value in model.state_dict().values()]
    try:
        ckptfix.load_into(model, path)
    except CkptfixError:
        after = model.state_dict().values()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        raise


def load_optimizer(path: Path) -> None:
    model = nn.Linear(2, 1)
    ckptfix.load_optimizer(torch.optim.Adam(model.parameters()), path, model=model)


LOADERS: list[Callable[[Path], None]] = [load_checkpoint, load_into, load_optimizer]


@pytest.mark.parametrize("load", LOADERS)
def test_only_our_errors_come_out(load: Callable[[Path], None], tmp_path: Path) -> None:
    """Each loader on every file in a long run; else on every third, another than the others."""
    files = in_turn([*hostile().items()], LOADERS.index(load), len(LOADERS))
    refused = 0
    for index, (name, data) in enumerate(files):
        path = tmp_path / str(index)
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load(path)
            except CkptfixError as error:
                refused += 1
                assert error.message
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        path.unlink(missing_ok=True)
    assert refused > 20 and len(files) > 100
    assert not list(tmp_path.iterdir())

"""Tensors inside objects: all are listed, and sanitize keeps each or says that it does not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from nestings import covered, found_in, key_of, nestings, referenced, tensors_of

import ckptfix
from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch.common import maybe_pickled_object

pytestmark = pytest.mark.slow

Made = tuple[dict[str, Any], dict[str, list[torch.Tensor]]]


def saved(obj: object, folder: str) -> Path:
    path = Path(folder, "in.pt")
    torch.save(obj, path)
    return path


@given(nestings())
def test_every_tensor_of_an_object_is_listed(made: Made) -> None:
    obj, _ = made
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(saved(obj, folder))
        assert covered(checkpoint.entries) == referenced(checkpoint)
        assert not [row for row in checkpoint.findings if row.id == "bad-tensor"]
        names = [entry.name for entry in checkpoint.entries]
        assert len(set(names)) == len(names)


@given(nestings())
def test_a_file_is_the_same_as_itself(made: Made) -> None:
    obj, _ = made
    with tempfile.TemporaryDirectory() as folder:
        path = saved(obj, folder)
        assert ckptfix.diff(path, path).same


@given(nestings())
def test_sanitize_keeps_every_tensor_or_names_it(made: Made) -> None:
    obj, inside = made
    with tempfile.TemporaryDirectory() as folder:
        path, plain = saved(obj, folder), Path(folder, "plain.pt")
        done = ckptfix.sanitize(path, plain)
        if plain.read_bytes() == path.read_bytes():
            return  # torch takes it as it is, and may set two attributes under one name
        loaded = torch.load(plain, weights_only=True)
        lost = {loss.where.partition("/")[0] for loss in done.dropped if not loss.asked}
        for key, tensors in inside.items():
            missing = tensors_of(tensors) - tensors_of(found_in(loaded.get(key)))
            elsewhere = {key_of(tensor) for tensor in found_in(loaded)}
            assert not set(missing) - elsewhere or key in lost, (key, done.dropped)


FILES = [path for path in sorted((ROOT / "fixtures").iterdir()) if path.suffix in (".pth", ".pt")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_storage_of_a_fixture_is_listed(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert maybe_pickled_object(checkpoint) is not None
    assert covered(checkpoint.entries) == referenced(checkpoint)

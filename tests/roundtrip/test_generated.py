"""Generated checkpoints: every operation, read by torch."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from compare import assert_same, names_of
from hypothesis import given
from kinds import DTYPES
from strategies import Saved, checkpoints

import ckptfix
from ckptfix import errors

pytestmark = pytest.mark.slow


@contextmanager
def saved(case: Saved) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "in"
        torch.save(
            case.obj, path, pickle_protocol=case.protocol, _use_new_zipfile_serialization=case.container == "zip"
        )
        yield path


def load(path: Path, case: Saved) -> Any:
    """As torch reads it; protocols 4 and 5, of this test's own making, are beyond its weights_only reader."""
    return torch.load(path, weights_only=case.protocol < 4)


def stripped(value: Any, prefix: str) -> Any:
    if isinstance(value, dict) and names_of(value):
        new: Any = type(value)((key.removeprefix(prefix), item) for key, item in value.items())
        if hasattr(value, "_metadata"):
            new._metadata = value._metadata
        return new
    if isinstance(value, dict):
        return type(value)((key, stripped(item, prefix)) for key, item in value.items())
    return value


def without_metadata(value: Any) -> Any:
    for item in [value, *(value.values() if isinstance(value, dict) else [])]:
        if hasattr(item, "_metadata"):
            del item._metadata
    return value


@given(checkpoints())
def test_a_no_op_is_byte_identical(case: Saved) -> None:
    with saved(case) as path:
        out = path.with_name("out")
        ckptfix.rename(path, out, mapping={"no such key, surely": "x"}, allow_unmatched=True)
        assert out.read_bytes() == path.read_bytes()


@given(checkpoints())
def test_add_then_strip_loads_the_same(case: Saved) -> None:
    with saved(case) as path:
        added, out = path.with_name("added"), path.with_name("out")
        result = ckptfix.add_module(path, added, prefix="wrapped")
        ckptfix.strip_module(added, out, prefix="wrapped")
        assert_same(load(path, case), load(out, case))
        if result.changes:
            names = {change.new for change in result.changes}
            entries = {entry.key for entry in ckptfix.open_checkpoint(added).entries}
            assert names & entries and all(name.startswith("wrapped.") for name in names)


@given(checkpoints())
def test_strip_gives_the_stripped_object_or_a_refusal(case: Saved) -> None:
    with saved(case) as path:
        out = path.with_name("out")
        try:
            ckptfix.strip_module(path, out, partial=True)
        except errors.KeyConflict:
            mappings = [case.obj, *case.obj.values()]
            states = [one for one in mappings if isinstance(one, dict) and names_of(one)]
            assert any(key.removeprefix("module.") in one for one in states for key in one if key[:7] == "module.")
            assert not out.exists()
            return
        wanted = stripped(without_metadata(load(path, case)), "module.")
        assert_same(wanted, without_metadata(load(out, case)))


@given(checkpoints())
def test_devices_there_and_back(case: Saved) -> None:
    with saved(case) as path:
        there, back = path.with_name("there"), path.with_name("back")
        ckptfix.map_location(path, there, "cuda:1")
        assert_same(case.obj, torch.load(there, weights_only=case.protocol < 4, map_location="cpu"))
        ckptfix.map_location(there, back, "cpu")
        assert_same(case.obj, load(back, case))


@given(checkpoints(DTYPES[:12]))
def test_zip_and_legacy(case: Saved) -> None:
    """The dtypes that torch.load takes from both."""
    with saved(case) as path:
        there, back = path.with_name("there"), path.with_name("back")
        ckptfix.convert(path, there, to="legacy" if case.container == "zip" else "zip")
        ckptfix.convert(there, back, to=cast(Any, case.container))
        assert_same(case.obj, load(there, case))
        assert_same(case.obj, load(back, case))
        assert ckptfix.diff(path, there).same

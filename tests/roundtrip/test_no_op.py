"""An edit that changes nothing gives the same bytes, and an edit undone gives them back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from kinds import KINDS, Kind, cases

import ckptfix

pytestmark = pytest.mark.slow

NO_OPS: dict[str, Callable[[Path, Path], Any]] = {
    "rename": lambda source, dest: ckptfix.rename(source, dest, mapping={"no such key": "other"}, allow_unmatched=True),
    "sub": lambda source, dest: ckptfix.rename(source, dest, subs=[("no such key", "other")], allow_unmatched=True),
    "strip": lambda source, dest: ckptfix.strip_module(source, dest, prefix="nobody"),
    "move": lambda source, dest: ckptfix.map_location(source, dest, {"xla:7": "cpu"}),
}


def _has_names(kind: Kind) -> bool:
    """Not a whole pickled module, whose names no edit reaches: `test_a_whole_module` looks at that."""
    return kind.name != "whole-module"


@pytest.mark.sampled(42)
@pytest.mark.parametrize(("kind", "container"), cases(_has_names))
def test_an_edit_of_nothing_is_byte_identical(kind: Kind, container: str, tmp_path: Path) -> None:
    source = kind.save(tmp_path / "in", container)
    for name, edit in NO_OPS.items():
        result = edit(source, tmp_path / name)
        assert (tmp_path / name).read_bytes() == source.read_bytes(), name
        assert result.exit_code == 0 and "nothing to" in result.lines[0], result.lines


def _reversible(kind: Kind) -> bool:
    """Not raw-storage, whose key is the very string of its persistent id; nor a file without checksums, whose
    pickle has one afterwards. `test_a_name_shared_with_another_value` and `test_traps` look at those."""
    return kind.name not in ("raw-storage", "no-checksums") and _has_names(kind)


@pytest.mark.sampled(42)
@pytest.mark.parametrize(("kind", "container"), cases(_reversible))
def test_add_then_strip_is_byte_identical(kind: Kind, container: str, tmp_path: Path) -> None:
    source = kind.save(tmp_path / "in", container)
    added = ckptfix.add_module(source, tmp_path / "added")
    ckptfix.strip_module(tmp_path / "added", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == source.read_bytes()
    assert ((tmp_path / "added").read_bytes() == source.read_bytes()) == (not added.changes and not added.references)


@pytest.mark.parametrize(("kind", "container"), cases(lambda kind: not _reversible(kind) and _has_names(kind)))
def test_add_then_strip_loads_the_same(kind: Kind, container: str, tmp_path: Path) -> None:
    source = kind.save(tmp_path / "in", container)
    ckptfix.add_module(source, tmp_path / "added")
    ckptfix.strip_module(tmp_path / "added", tmp_path / "out")
    assert (tmp_path / "added").read_bytes() != source.read_bytes()
    assert_same(torch.load(source, weights_only=True), torch.load(tmp_path / "out", weights_only=True))


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_a_whole_module(container: str, tmp_path: Path) -> None:
    source = KINDS["whole-module"].save(tmp_path / "in", container)
    NO_OPS["move"](source, tmp_path / "moved")
    assert (tmp_path / "moved").read_bytes() == source.read_bytes()
    ckptfix.extract(source, tmp_path / "extracted.pth")
    wanted = torch.load(tmp_path / "extracted.pth", weights_only=True)
    for name in ("rename", "sub", "strip"):
        result = NO_OPS[name](source, tmp_path / name)
        assert any(line.startswith("input: a whole module") for line in result.lines)
        assert_same(torch.load(tmp_path / name, weights_only=True), wanted)


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_the_input_is_not_touched(container: str, tmp_path: Path) -> None:
    source = KINDS["nested"].save(tmp_path / "in", container)
    before = (source.read_bytes(), source.stat().st_mtime_ns)
    ckptfix.strip_module(source, tmp_path / "a")
    ckptfix.map_location(source, tmp_path / "b", "cuda:1")
    ckptfix.convert(source, tmp_path / "c", to="safetensors")
    assert (source.read_bytes(), source.stat().st_mtime_ns) == before


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_a_dry_run_writes_nothing_and_promises_the_size(container: str, tmp_path: Path) -> None:
    source = KINDS["nested"].save(tmp_path / "in", container)
    dry = ckptfix.strip_module(source, tmp_path / "out", dry_run=True)
    assert not dry.written and list(tmp_path.iterdir()) == [source]
    wet = ckptfix.strip_module(source, tmp_path / "out")
    assert wet.written and dry.plan.nbytes == wet.plan.nbytes == (tmp_path / "out").stat().st_size

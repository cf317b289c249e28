"""Globals that run code are named wherever they hide, before anything is proposed; nothing is imported or run."""

from __future__ import annotations

from pathlib import Path

import hidden
import pytest

from ckptfix.ops.doctor import examine as doctor
from ckptfix.ops.doctor.report import Diagnosis

HOW = [*hidden.PAYLOADS, hidden.SIBLING]
NAME = {how: name for how, (name, _) in hidden.PAYLOADS.items()} | {hidden.SIBLING: "posix.system"}


def dangers(done: Diagnosis) -> str:
    ids = ("dangerous-global", "nested-pickle", "hidden-pickle", "stacked-pickles")
    return "\n".join(f"{row.where}: {row.message}" for row in done.findings if row.id in ids)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layer", [*hidden.LAYERS, "folder"])
def test_what_runs_code_is_named_before_anything_is_proposed(layer: str, how: str, tmp_path: Path) -> None:
    path = hidden.wrapped(tmp_path, layer, how)
    done = doctor.examine(path)
    assert NAME[how] in dangers(done), done
    assert done.exit_code() == 1
    assert NAME[how] in done.sentence or done.findings[0].id == "dangerous-global"


@pytest.mark.parametrize("layer", [*hidden.LAYERS, "folder"])
def test_a_harmless_one_is_not_called_dangerous(layer: str, tmp_path: Path) -> None:
    done = doctor.examine(hidden.wrapped(tmp_path, layer, ""))
    assert not dangers(done)
    assert done.cause is not None and (done.cause.fix or "").startswith("ckptfix repair ")


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layer", [*hidden.LAYERS, "folder"])
def test_no_repair_is_proposed_for_a_file_without_a_tensor(layer: str, how: str, tmp_path: Path) -> None:
    done = doctor.examine(hidden.wrapped(tmp_path, layer, how, tensor=False))
    assert NAME[how] in dangers(done)
    assert not [row.fix for row in done.findings if row.fix and "repair" in row.fix]

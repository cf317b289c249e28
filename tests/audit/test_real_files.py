"""The weight audit: every writing command on every real file, and torch counts what is left.

Whatever was in the file is in the output, or is listed as left out by request, or is named and the exit code is 3.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from audit.judge import BY_AT, COMMANDS, TO_TRUTH, Command, breaches
from conftest import LONG, in_turn
from real.files import fixture_files, name_of, real_files, real_folders, truth_beside, truth_of

import ckptfix
from ckptfix import errors

pytestmark = pytest.mark.campaign

MOST_ADDRESSES = 1000 if LONG else 2


def commands(path: Path, paths: Sequence[Path]) -> Sequence[Command]:
    """Every command for a file of the repository and in a long run; a quarter of them for one of others', in turn."""
    return COMMANDS if path in fixture_files() else in_turn(COMMANDS, paths.index(path), 4)


def jobs(path: Path) -> list[tuple[Command, str]]:
    """The commands for a file, with what ends its line."""
    found = [(command, "") for command in commands(path, real_files())]
    try:
        states = ckptfix.open_checkpoint(path).state_dicts
    except (errors.CkptfixError, OSError):
        states = ()
    found += [(command, state.at) for state in states[:MOST_ADDRESSES] for command in BY_AT]
    like = truth_beside(path)
    return found + ([(TO_TRUTH, str(like))] if like is not None else [])


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts, and thousands of small files are written."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


absent = pytest.mark.skipif(not real_files(), reason="the real files are not here (../shared)")


@pytest.mark.parametrize("path", [*fixture_files(), *real_files()], ids=name_of)
def test_no_command_loses_a_weight_of_a_file(path: Path, tmp_path: Path) -> None:
    found = [
        f"{command} {last}: {breach}"
        for command, last in jobs(path)
        for breach in breaches(command, path, tmp_path, lambda: truth_of(path), last)
    ]
    assert not found, "\n".join(found)


@absent
@pytest.mark.parametrize("path", [path for path in real_folders() if not list(path.glob("latest*"))], ids=name_of)
def test_no_command_loses_a_weight_of_a_folder(path: Path, tmp_path: Path) -> None:
    found = [
        f"{command}: {breach}"
        for command in commands(path, real_folders())
        for breach in breaches(command, path, tmp_path, lambda: truth_of(path))
    ]
    assert not found, "\n".join(found)

"""The law of weights: every writing command on every real file, and torch counts what is left.

Whatever was in the file is in the output, or is listed as left out by request, or is named and the exit code is 3.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from conftest import LONG
from real.files import name_of, real_files, real_folders, truth_beside, truth_of
from real.law import BY_AT, COMMANDS, TO_TRUTH, Command, breaches

import ckptfix
from ckptfix import errors

MOST_ADDRESSES = 1000 if LONG else 3

SHARDED = "sanitize empties a ShardedTensor"
BUFFERS = "buffers that no state dict has are not listed as left behind"
DISTCP = "a part of a distributed checkpoint is taken for its first tensor"

KNOWN: tuple[tuple[str, str, str], ...] = (
    (r"dist/fsdp1_\w+_(sharded|local)_rank\d\.pt", r"sanitize.*", SHARDED),
    (r"hf/llama_whole\.pt", r"extract --to (zip|legacy|safetensors --drop-unsupported)", BUFFERS),
    (r".*\.distcp", r"repair", DISTCP),
    (
        r"accelerate/realfsdp\d_sharded/(optimizer_0/__0|pytorch_model_fsdp_0/__\d)_0\.distcp",
        r"map-location .*|convert --to legacy|sanitize --torch .*",
        DISTCP,
    ),
    (
        r"dist/((fsdp1_\w+|fsdp2|tp)_dcp/__0|fsdp2_(async|dcp_flat)/__\d)_0\.distcp",
        r"map-location .*|convert --to legacy|sanitize --torch .*",
        DISTCP,
    ),
)
"""(pattern of files below frameworks/, pattern of commands, fault) that break the law today.

Each is an expected failure: one that passes is to be taken out.
"""


def jobs(path: Path) -> list[tuple[Command, str]]:
    """Every command for a file, with what ends its line."""
    found = [(command, "") for command in COMMANDS]
    try:
        states = ckptfix.open_checkpoint(path).state_dicts
    except (errors.CkptfixError, OSError):
        states = ()
    found += [(command, state.at) for state in states[:MOST_ADDRESSES] for command in BY_AT]
    like = truth_beside(path)
    return found + ([(TO_TRUTH, str(like))] if like is not None else [])


def known(path: Path, command: Command) -> str:
    """The fault that is known of this command on this file; '' for none."""
    name = name_of(path).removeprefix("frameworks/")
    rows = (why for files, lines, why in KNOWN if re.fullmatch(files, name) and re.fullmatch(lines, str(command)))
    return next(rows, "")


def known_jobs() -> list[object]:
    files = [*real_files(), *real_folders()]
    return [
        pytest.param(path, command, id=f"{name_of(path)}: {command}", marks=pytest.mark.xfail(strict=True, reason=why))
        for path in files
        for command in COMMANDS
        if (why := known(path, command))
    ]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts, and thousands of small files are written."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


absent = pytest.mark.skipif(not real_files(), reason="the real files are not here (../shared)")


@absent
@pytest.mark.parametrize("path", real_files(), ids=name_of)
def test_no_command_loses_a_weight_of_a_file(path: Path, tmp_path: Path) -> None:
    found = [
        f"{command} {last}: {breach}"
        for command, last in jobs(path)
        if not known(path, command)
        for breach in breaches(command, path, tmp_path, lambda: truth_of(path), last)
    ]
    assert not found, "\n".join(found)


@absent
@pytest.mark.parametrize("path", real_folders(), ids=name_of)
def test_no_command_loses_a_weight_of_a_folder(path: Path, tmp_path: Path) -> None:
    found = [
        f"{command}: {breach}"
        for command in COMMANDS
        if not known(path, command)
        for breach in breaches(command, path, tmp_path, lambda: truth_of(path))
    ]
    assert not found, "\n".join(found)


@absent
@pytest.mark.parametrize(("path", "command"), known_jobs())
def test_known_faults(path: Path, command: Command, tmp_path: Path) -> None:
    assert not breaches(command, path, tmp_path, lambda: truth_of(path))

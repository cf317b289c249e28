"""Every command that doctor prints runs as printed, and the finding is gone after it: on real files and fixtures."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from real.files import FIXTURES, name_of, real_files

from ckptfix.cli import commands

TAR = "a legacy file called *.pth.tar: the output has the same suffix, and is refused for it"

KNOWN: tuple[tuple[str, str, str], ...] = (
    (r"corpus/.*\.pth\.tar", "foreign-global", TAR),
    (r"corpus/.*\.pth\.tar", "device-tags", TAR),
)
"""(pattern of files, pattern of finding ids, fault): expected failures; one that passes is to be taken out."""


def checkpoints() -> list[Path]:
    return [*sorted(path for path in FIXTURES.iterdir() if path.suffix in (".pth", ".safetensors")), *real_files()]


def known(path: Path, finding: str) -> str:
    rows = (why for files, ids, why in KNOWN if re.fullmatch(files, name_of(path)) and re.fullmatch(ids, finding))
    return next(rows, "")


def copied(path: Path, folder: Path) -> Path:
    """The file in a folder of its own; with what lies beside it, where it is only a part."""
    if path.suffix == ".distcp":
        shutil.copytree(path.parent, folder / path.parent.name, copy_function=shutil.copyfile)
        return folder / path.parent.name / path.name
    return Path(shutil.copyfile(path, folder / path.name))


def run(*words: object) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(commands, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    try:
        return result.exit_code, json.loads(result.stdout), result.stderr
    except ValueError:
        return result.exit_code, {}, result.stderr


def printed(path: Path) -> Iterator[tuple[str, str]]:
    """(id, command) of each finding that doctor prints a command for: the mere notes' are not."""
    seen = set()
    for finding in run("doctor", "--json", path)[1].get("findings", ()):
        fix = finding["fix"]
        if finding["severity"] != "info" and fix and fix.startswith("ckptfix ") and fix not in seen:
            seen.add(fix)
            yield finding["id"], fix


def faults(path: Path, folder: Path) -> list[tuple[str, str]]:
    """(id of the finding, what is wrong with the command that is printed for it)."""
    found = []
    for number, (finding, _) in enumerate(list(printed(path))):
        own = folder / str(number)
        own.mkdir()
        copy = copied(path, own)
        line = [fix for _, fix in printed(copy)][number]
        for step in line.split(" && "):
            before = set(own.rglob("*"))
            code, _, said = run(*shlex.split(step)[1:])
            made = sorted(set(own.rglob("*")) - before)
        if code not in (0, 3):
            found.append((finding, f"`{line}` exits with {code}: {said.strip()}"))
        elif len(made) != 1:
            found.append((finding, f"`{line}` made {[made.name for made in made]}"))
        elif finding in {row["id"] for row in run("doctor", "--json", made[0])[1]["findings"]}:
            found.append((finding, f"`{line}`: doctor finds {finding} again"))
        shutil.rmtree(own)
    return found


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("path", checkpoints(), ids=name_of)
def test_the_commands_run_as_printed(path: Path, tmp_path: Path) -> None:
    found = [f"{finding}: {what}" for finding, what in faults(path, tmp_path) if not known(path, finding)]
    assert not found, "\n".join(found)


def known_faults() -> list[Any]:
    return [
        pytest.param(path, row, marks=pytest.mark.xfail(strict=True, reason=row[2]), id=f"{name_of(path)}: {row[1]}")
        for path in checkpoints()
        for row in KNOWN
        if re.fullmatch(row[0], name_of(path))
    ]


@pytest.mark.parametrize(("path", "row"), known_faults())
def test_known_faults(path: Path, row: tuple[str, str, str], tmp_path: Path) -> None:
    assert not [what for finding, what in faults(path, tmp_path) if re.fullmatch(row[1], finding)]

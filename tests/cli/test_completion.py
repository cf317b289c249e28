from __future__ import annotations

import shutil
import subprocess

import pytest
from cli.conftest import Cli
from forks import MAIN, Forks

from ckptfix.cli import COMMANDS, COMPLETE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_reads(cli: Cli, shell: str) -> None:
    result = cli("completion", shell)
    assert result.exit_code == 0
    assert COMPLETE in result.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=result.stdout, text=True, check=True)


def test_another_shell_is_wrong_usage(cli: Cli) -> None:
    assert cli("completion", "tcsh").exit_code == 2


@pytest.mark.parametrize(
    ("words", "number", "expected"),
    [
        ("ckptfix ", "1", set(COMMANDS)),
        ("ckptfix str", "1", {"strip-module"}),
        ("ckptfix convert --dr", "2", {"--drop-unsupported", "--dry-run"}),
    ],
)
def test_what_bash_is_given(program: Forks, words: str, number: str, expected: set[str]) -> None:
    environment = {COMPLETE: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
    shown = program(f"import sys; sys.argv = ['ckptfix']; {MAIN}", environment=environment).stdout
    assert {line.partition(",")[2] for line in shown.splitlines()} == expected

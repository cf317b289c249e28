"""git, run as a program: the repository around the current folder, and its configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

from ckptfix.errors import Refused

Scope = Literal["local", "global"]


def git(*words: str, fails: bool = True) -> str | None:
    """What ``git WORDS`` prints, without the last newline; None where it fails.

    Args:
        fails: a failure is an error.

    Raises:
        Refused: git is not installed; or it failed, with what it said.
    """
    try:
        done = subprocess.run(["git", *words], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise Refused("git is not installed, or not on PATH") from None
    if not done.returncode:
        return os.fsdecode(done.stdout).removesuffix("\n")
    if not fails:
        return None
    said = os.fsdecode(done.stderr).strip().removeprefix("fatal: ")
    raise Refused(f"git {words[0]}: {said}" if said else f"git {words[0]} ended with exit code {done.returncode}")


def refuse_outside() -> None:
    """Raises Refused where the current folder is in no git repository."""
    if git("rev-parse", "--git-dir", fails=False) is None:
        said = _why_not()
        hint = "run it in a repository, or use --global for all of yours"
        raise Refused(said, path=str(Path.cwd()), hint=hint)


def _why_not() -> str:
    """What git says where it finds no repository: that there is none, or that it belongs to somebody else."""
    try:
        git("rev-parse", "--git-dir")
    except Refused as error:
        if "not a git repository" not in error.message:
            return error.message
    return "not in a git repository"


def config(scope: Scope, key: str) -> str | None:
    """The value of `key` in the configuration of one scope; None where it has none."""
    return git("config", f"--{scope}", "--get", key, fails=False)


def set_config(scope: Scope, key: str, value: str | None) -> None:
    """Give `key` a value, or take it away."""
    if value is not None:
        git("config", f"--{scope}", "--replace-all", key, value)
    elif config(scope, key) is not None:
        git("config", f"--{scope}", "--unset-all", key)


def remove_empty_section(scope: Scope, section: str) -> None:
    """Remove what git leaves behind of a section whose last key was taken away."""
    if git("config", f"--{scope}", "--get-regexp", f"^{section.replace('.', '[.]')}[.]", fails=False) is None:
        git("config", f"--{scope}", "--remove-section", section, fails=False)


def attributes_file(scope: Scope, *, shared: bool) -> str:
    """The file whose attributes count: of this clone alone, of everybody who clones it, or of this user.

    Raises:
        Refused: `shared`, in a repository without a work tree.
    """
    if scope == "global":
        named = git("config", "--global", "--type=path", "--get", "core.attributesFile", fails=False)
        base = os.environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
        return named or str(Path(base, "git", "attributes"))
    if not shared:
        return str(Path.cwd() / str(git("rev-parse", "--git-path", "info/attributes")))
    top = git("rev-parse", "--show-toplevel", fails=False)
    if not top:
        raise Refused("a repository without a work tree has no .gitattributes", hint="leave out --shared")
    return str(Path(top, ".gitattributes"))


def effective(path: str) -> str:
    """The diff driver that git uses for `path`, whatever file says so; ``unspecified`` for none."""
    found = git("check-attr", "-z", "diff", "--", path, fails=False)
    return found.split("\0")[2] if found and found.count("\0") >= 2 else "unspecified"

"""Running git: the repository around the current folder, and its configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

from ckptfix.errors import Refused

Scope = Literal["local", "global"]


def git(*words: str, fails: bool = True) -> str | None:
    """Return the output of ``git WORDS``, without the last newline; None if it fails.

    Args:
        fails: treat a failure as an error.

    Raises:
        Refused: git is not installed, or it failed; the message includes git's own.
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
    """Raise Refused if the current folder is not in a git repository."""
    if git("rev-parse", "--git-dir", fails=False) is None:
        said = _why_not()
        hint = "run it in a repository, or use --global for all of yours"
        raise Refused(said, path=str(Path.cwd()), hint=hint)


def _why_not() -> str:
    """Return git's reason for finding no repository: there is no repository, or it belongs to a different user."""
    try:
        git("rev-parse", "--git-dir")
    except Refused as error:
        if "not a git repository" not in error.message:
            return error.message
    return "not in a git repository"


def config(scope: Scope, key: str) -> str | None:
    """Return the value of `key` in the configuration of one scope; None if it is not set."""
    return git("config", f"--{scope}", "--get", key, fails=False)


def set_config(scope: Scope, key: str, value: str | None) -> None:
    """Set the value of `key`, or unset it."""
    if value is not None:
        git("config", f"--{scope}", "--replace-all", key, value)
    elif config(scope, key) is not None:
        git("config", f"--{scope}", "--unset-all", key)


def remove_empty_section(scope: Scope, section: str) -> None:
    """Remove the empty section that git leaves behind when its last key is unset."""
    if git("config", f"--{scope}", "--get-regexp", f"^{section.replace('.', '[.]')}[.]", fails=False) is None:
        git("config", f"--{scope}", "--remove-section", section, fails=False)


def attributes_file(scope: Scope, *, shared: bool) -> str:
    """Return the attributes file for this clone alone, for everybody who clones it, or for this user.

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
    """Return the diff driver that git uses for `path`, from any file; ``unspecified`` without one."""
    found = git("check-attr", "-z", "diff", "--", path, fails=False)
    return found.split("\0")[2] if found and found.count("\0") >= 2 else "unspecified"

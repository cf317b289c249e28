"""``ckptfix git enable``, ``disable`` and ``status``: the driver in git's configuration, and the paths that use it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptfix.checkpoint import OutputFile, Plan
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.git import attributes, repository
from ckptfix.git.attributes import DRIVER
from ckptfix.git.repository import Scope, attributes_file, config, git
from ckptfix.git.text import FORM
from ckptfix.io.source import found_as, open_source
from ckptfix.io.write import write_plan

CACHE = f"refs/notes/textconv/{DRIVER}"
"""The ref under which git caches the texts, by blob id."""

TOOLS = (DRIVER, f"{DRIVER}-html")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The setup of git, or a change of it.

    Attributes:
        action: ``"enable"``, ``"disable"`` or ``"status"``.
        scope: ``"local"`` for this repository; ``"global"`` for all repositories of this user.
        enabled: whether both the driver and its paths are set.
        written: whether anything was changed.
        attributes: the file that lists the paths.
        config: key -> value of the driver and the tools.
        lines: the same in sentences.
    """

    action: str
    scope: Scope
    enabled: bool
    written: bool
    attributes: str
    config: dict[str, str]
    lines: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "action": self.action,
            "scope": self.scope,
            "enabled": self.enabled,
            "written": self.written,
            "attributes": self.attributes,
            "config": [{"key": key, "value": value} for key, value in self.config.items()],
            "text": None,
            "summary": list(self.lines),
        }


def commands() -> dict[str, str]:
    """Return the keys and values for git's configuration.

    They name this interpreter, as ``ckptfix`` may not be on PATH. git runs them in a shell, in the folder of the
    repository: ``-P`` prevents importing modules from that folder.
    """
    run = f"{shlex.quote(sys.executable)} -P -m ckptfix" if sys.executable else "ckptfix"
    page = '"$(git rev-parse --absolute-git-dir)/ckptfix-$(basename -- "$MERGED").html"'
    return {
        f"diff.{DRIVER}.textconv": f"{run} git textconv --form {FORM} --",
        f"diff.{DRIVER}.cachetextconv": "true",
        f"diff.{DRIVER}.binary": "true",
        f"difftool.{TOOLS[0]}.cmd": f'{run} git difftool -- "$LOCAL" "$REMOTE"',
        f"difftool.{TOOLS[1]}.cmd": f'{run} git difftool --html {page} -- "$LOCAL" "$REMOTE"',
    }


def enable(scope: Scope, *, shared: bool = False, dry_run: bool = False) -> Setup:
    """Set the driver, and assign it to the paths of checkpoints.

    Args:
        shared: list the paths in ``.gitattributes``, which is committed, and not in the clone's own file.

    Raises:
        Refused: the current folder is not in a repository, or git fails.
        WriteFailed: the attributes file cannot be written.
    """
    return _change("enable", scope, shared=shared, dry_run=dry_run)


def disable(scope: Scope, *, dry_run: bool = False) -> Setup:
    """Undo `enable`, with or without `shared`, and nothing else. Raise like `enable`."""
    return _change("disable", scope, shared=False, dry_run=dry_run)


def _change(action: str, scope: Scope, *, shared: bool, dry_run: bool) -> Setup:
    if scope == "local":
        repository.refuse_outside()
    on = action == "enable"
    wanted = {key: value if on else None for key, value in commands().items()}
    before = {key: config(scope, key) for key in wanted}
    changed = {key: value for key, value in wanted.items() if before[key] != value}
    said = (f"{key} = {value}" if value else f"removed {key}" for key, value in changed.items())
    lines = [f"{scope} config: {what}" for what in said]
    files = []
    for path in _files(scope, shared=shared, all_of_them=not on):
        old = _content(path)
        new = attributes.with_block(old or b"") if on else attributes.without_block(old or b"")
        if new != (old or b""):
            files.append((path, old, new))
            what = f"{'added' if on else 'removed'} diff={DRIVER} for {len(attributes.PATTERNS)} patterns"
            lines.append(f"{path}: {what}")
            less = attributes.overridden(new) if on else ()
            lines += [f"{path}: the new lines override this diff= line: {line}" for line in less]
    cached = scope == "local" and _has_cache()
    if cached:
        lines.append("deleted the texts that git cached")
    if not dry_run:
        for key, value in changed.items():
            repository.set_config(scope, key, value)
        for section in () if on else (f"diff.{DRIVER}", *(f"difftool.{tool}" for tool in TOOLS)):
            repository.remove_empty_section(scope, section)
        for path, old, new in files:
            _write(path, old, new)
        if cached:
            git("update-ref", "-d", CACHE)
    done = bool(lines)
    what = f"git diff, git log -p and git show print a line for each tensor of a checkpoint, {_where(scope)}"
    lines.append(what if on else f"git shows checkpoints as before, {_where(scope)}")
    if not done:
        lines = [f"nothing to do: {lines[-1]}"]
    lines += _hints(scope, shared=shared) if on and not dry_run else []
    now = {key: value for key in wanted if (value := wanted[key] if dry_run else config(scope, key)) is not None}
    main = attributes_file(scope, shared=shared)
    return Setup(
        action=action, scope=scope, enabled=on, written=done and not dry_run, attributes=main, config=now,
        lines=tuple(lines),
    )  # fmt: skip


def status(scope: Scope) -> Setup:
    """Return the current setup. Raise Refused outside a repository if `scope` is local."""
    if scope == "local":
        repository.refuse_outside()
    found = {key: value for key in commands() if (value := config(scope, key)) is not None}
    looked_at = _files(scope, shared=False, all_of_them=True)
    files = [path for path in looked_at if attributes.enabled(_content(path) or b"")]
    enabled = bool(files) and f"diff.{DRIVER}.textconv" in found
    turned_on = "ckptfix git enable" + (" --global" if scope == "global" else "")
    lines = [f"enabled {_where(scope)}" if enabled else f"not enabled {_where(scope)}: `{turned_on}` does it"]
    lines += [f"paths: {path}" for path in files]
    lines += [f"{key} = {value}" for key, value in found.items()]
    if found and found != commands():
        lines.append("the driver belongs to a different ckptfix or Python; run `ckptfix git enable` to set this one")
    lines += _hints(scope, shared=False) if enabled else []
    return Setup(
        action="status", scope=scope, enabled=enabled, written=False, attributes=(files or [""])[0], config=found,
        lines=tuple(lines),
    )  # fmt: skip


def _where(scope: Scope) -> str:
    return "in this repository" if scope == "local" else "in all your repositories"


def _files(scope: Scope, *, shared: bool, all_of_them: bool) -> Iterator[str]:
    """Yield the attributes files to look at."""
    yield attributes_file(scope, shared=shared)
    if all_of_them and scope == "local" and git("rev-parse", "--show-toplevel", fails=False):
        yield attributes_file(scope, shared=True)


def _hints(scope: Scope, *, shared: bool) -> Iterator[str]:
    """Yield further hints: who else must enable it, and which setting overrides it."""
    if shared:
        yield "commit .gitattributes; in each clone, run `ckptfix git enable`, as git runs no program from a repository"
    if git("rev-parse", "--git-dir", fails=False) is None:
        return
    for pattern in ("x.pth", "x.safetensors"):
        found = repository.effective(pattern)
        if found not in (DRIVER, "unspecified"):
            yield (
                f"in this repository .gitattributes sets {pattern.replace('x.', '*.')} diff={found} (as git-lfs does), "
                "which overrides this: run `ckptfix git enable` without --global"
            )
            return


def _has_cache() -> bool:
    return git("rev-parse", "--verify", "--quiet", CACHE, fails=False) is not None


def _content(path: str) -> bytes | None:
    if found_as(path) != "file":
        return None
    with open_source(path) as source:
        return source.read(0, source.size)


def _write(path: str, old: bytes | None, new: bytes) -> None:
    """Replace an attributes file atomically; delete one of ours that is empty again."""
    place = Path(path).resolve()  # a link remains a link
    if not new and old is not None:
        place.unlink()
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CkptfixError(f"cannot create it: {error.strerror}", path=str(place.parent)) from error
    write_plan(Plan((OutputFile.of(str(place), [new]),)), overwrite=True)

"""ckptfix git."""

from __future__ import annotations

import os
from typing import Any

import click

from ckptfix.cli.shared.common import reads
from ckptfix.cli.shared.console import Console
from ckptfix.errors import printable

ACTIONS = ("enable", "disable", "status", "textconv", "difftool")


@reads(
    "git",
    click.Argument(
        ["action"], type=click.Choice(ACTIONS), metavar="[enable|disable|status]", required=False, default="status"
    ),
    click.Argument(["files"], nargs=-1, required=False, metavar="[FILE]...", type=click.Path()),
    click.Option(["--global", "everywhere"], is_flag=True, help="Apply to all your repositories, not only this one."),
    click.Option(
        ["--shared"], is_flag=True,
        help="List the paths in .gitattributes, which is committed, instead of .git/info/attributes.",
    ),
    click.Option(["-n", "--dry-run"], is_flag=True, help="Show what would change, and change nothing."),
    click.Option(["--html"], metavar="OUT", type=click.Path(), help="difftool: also write an HTML page.", hidden=True),
    click.Option(["--form"], type=int, hidden=True, help="Version of the text: git caches texts by command line."),
)
def command(
    console: Console,
    *,
    action: str,
    files: tuple[str, ...],
    everywhere: bool,
    shared: bool,
    dry_run: bool,
    html: str | None,
    form: int | None,
) -> int:
    """Let git show what changed in checkpoints.

    After `ckptfix git enable`, git diff, git log -p and git show print a line for each tensor of *.pth, *.pt, *.ckpt
    and *.safetensors: key, dtype, shape, statistics and digest. git difftool -t ckptfix runs `ckptfix diff`, and
    -t ckptfix-html writes its HTML page. `disable` removes the setup; `status`, or no word, shows it.

    git runs `ckptfix git textconv FILE`, and caches the text of each version. A git-lfs file is shown if this clone has
    its content; otherwise only its digest and size are.
    """
    if action == "textconv":
        return _textconv(console, _named(files, 1, "textconv FILE")[0])
    if action == "difftool":
        local, remote = _named(files, 2, "difftool LOCAL REMOTE")
        return _difftool(console, local, remote, html)
    _named(files, 0, action)
    if shared and (everywhere or action != "enable"):
        raise click.UsageError("--shared goes with `enable`, and not with --global.")
    from ckptfix.git import driver

    scope: Any = "global" if everywhere else "local"
    if action == "enable":
        done = driver.enable(scope, shared=shared, dry_run=dry_run)
    else:
        done = driver.disable(scope, dry_run=dry_run) if action == "disable" else driver.status(scope)
    if console.json:
        console.emit(done.as_dict(), 0)
    else:
        console.done(list(map(printable, done.lines)))
    return 0


def _named(files: tuple[str, ...], count: int, usage: str) -> tuple[str, ...]:
    if len(files) != count:
        raise click.UsageError(f"Usage: ckptfix git {usage}")
    return files


def _textconv(console: Console, path: str) -> int:
    from ckptfix.git.text import text

    found = text(path)
    if console.json:
        nothing = dict.fromkeys(("scope", "enabled", "written", "attributes"))
        console.emit({"action": "textconv", **nothing, "config": [], "text": found, "summary": []}, 0)
    else:
        console.data(found)
    return 0


def _difftool(console: Console, local: str, remote: str, html: str | None) -> int:
    """Compare the two files that git passes; a file that exists on one side only has /dev/null on the other."""
    from ckptfix.git import lfs

    places = []
    for path in (local, remote):
        found = lfs.pointer(path) if path != os.devnull else None
        places.append(path if found is None else lfs.stored(found) or path)
    name = "diff"
    if os.devnull in places:
        from ckptfix.cli.inspect import command as inspect

        (path,) = (place for place in places if place != os.devnull)
        console.prose(f"{'only on the right' if places[0] == os.devnull else 'only on the left'}:")
        name, words = "inspect", [path]
        verb: click.Command = inspect
    else:
        from ckptfix.cli.diff import command as diff

        verb, words = diff, places
    console.command = name
    console.arguments = [name, *words]
    options = [] if html is None else ["--html", html, "--force"]
    with verb.make_context(name, [*words, *options], obj=console) as ctx:
        code: int = verb.invoke(ctx)
    return code

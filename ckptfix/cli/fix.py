"""ckptfix fix."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import FileName, MessageType, Written, writes
from ckptfix.cli.shared.options import at_option, drop_unexpected_option, in_place_option, like_at_option
from ckptfix.ops import fix
from ckptfix.ops.writing import WriteOptions


@writes(
    "fix",
    click.Option(
        ["--like"], metavar="TARGET", type=FileName(), help="The model: a checkpoint, keys.json, or module:factory."
    ),
    like_at_option(),
    drop_unexpected_option(),
    click.Option(
        ["--error"], metavar="TEXT", type=MessageType(),
        help="The error message you saw, or a file with it (- for stdin): also do what follows from its keys.",
    ),
    click.Option(["--allow-import"], is_flag=True, help="Allow importing module:factory, which runs its code."),
    at_option(),
    in_place_option(),
    phases=("checking", "writing", "checking"),
)
def command(
    source: str,
    dest: str | None,
    how: WriteOptions,
    *,
    like: str | None,
    like_at: str | None,
    drop_unexpected: bool,
    error: str | None,
    allow_import: bool,
    at: str | None,
) -> Written:
    """Fix everything that keeps IN from loading.

    OUT loads with torch.load(weights_only=True) on a CPU, under plain keys. This command runs every step that
    `ckptfix doctor` proposes, in order, and examines the result again until nothing is left; with --like, until it
    fits that model. The bytes are copied once. The output names each step as the command that does it alone. Without
    OUT, the output is IN.fixed.SUFFIX, next to IN; a file without problems gives an identical copy. If a problem
    remains that no command fixes, nothing is written, and the message names it.
    """

    return fix.fix(
        *(source, dest),
        like=like,
        like_at=like_at,
        drop_unexpected=drop_unexpected,
        error=error,
        allow_import=allow_import,
        at=at,
        **how.keywords(),
    )

"""``ckptfix FILE``: `ckptfix doctor --fast` with a shorter answer."""

from __future__ import annotations

import click

from ckptfix.cli.doctor import command as doctor
from ckptfix.cli.shared.common import Verb


class _Look(Verb):
    """`doctor`, limited to the structure of the file, and shorter."""

    def invoke(self, ctx: click.Context) -> int:
        ctx.params |= {"brief": True, "fast": True}
        return super().invoke(ctx)


look = _Look(
    "doctor",
    examples=doctor.examples,
    operands=doctor.operands,
    params=doctor.params,
    callback=doctor.callback,
    help=doctor.help,
)

"""ckptfix sanitize."""

from __future__ import annotations

from typing import Literal

import click

from ckptfix.cli.shared.common import Written, writes
from ckptfix.ops import sanitize
from ckptfix.ops.writing import WriteOptions


@writes(
    "sanitize",
    click.Option(["--keep-only"], type=click.Choice(["weights"]), help="Keep the state dicts and nothing else."),
    click.Option(
        ["--encoding"], metavar="CODEC", help="Encoding of the strings in a Python 2 file, such as latin-1."
    ),
    click.Option(["--torch"], metavar="VERSION", help="Write a file that this torch version can read (1.5 or later)."),
    click.Option(
        ["--parts"], is_flag=True,
        help="Write tensor subclasses as dicts of their parts. Those of torchao, tensordict and torch.nested.",
    ),
)
def command(
    source: str,
    dest: str,
    how: WriteOptions,
    *,
    keep_only: Literal["weights"] | None,
    encoding: str | None,
    torch: str | None,
    parts: bool,
) -> Written:
    """Replace everything that torch.load(weights_only=True) refuses with plain values.

    numpy scalars become numbers, arrays tensors, and paths strings. A Namespace, an OmegaConf or an unknown class
    becomes its state, as a dict, list or value. Functions, classes and whole modules are left out, each is named, and
    the exit code is 3. Nothing is imported, and tensors keep their bytes. --torch also rewrites the calls that rebuild
    tensors for that version. Tensors of torchao, tensordict and torch.nested are refused without --parts: torch.load
    accepts them once their library is imported.
    """

    return sanitize.sanitize(
        source, dest, keep_only=keep_only, encoding=encoding, torch=torch, parts=parts, **how.keywords()
    )

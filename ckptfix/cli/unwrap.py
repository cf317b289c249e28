"""ckptfix unwrap."""

from __future__ import annotations

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import at_option, in_place_option, link_option
from ckptfix.ops import rename
from ckptfix.ops.writing import How


@writes("unwrap", at_option(), in_place_option(), link_option(), example="ckptfix unwrap fsdp_compiled.pt plain.pt")
def command(source: str, dest: str | None, how: How, *, at: str | None) -> Written:
    """Write OUT: IN without the prefix of any known wrapper, in any order and at any depth.

    Names that only wrappers give (`_orig_mod`, `_fsdp_wrapped_module`, `_checkpoint_wrapped_module` ...) are removed
    at any place; `module`, which a model may have itself, only from the front and only if every name begins with it.
    """

    return rename.unwrap(source, dest, at=at, **how.keywords())

"""ckptfix unwrap."""

from __future__ import annotations

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import at_option, in_place_option, link_option
from ckptfix.ops import rename
from ckptfix.ops.writing import WriteOptions


@writes("unwrap", at_option(), in_place_option(), link_option(), example="ckptfix unwrap fsdp_compiled.pt plain.pt")
def command(source: str, dest: str | None, how: WriteOptions, *, at: str | None) -> Written:
    """Remove the prefixes of all known wrappers, in any order and at any depth.

    Components that only wrappers add (`_orig_mod`, `_fsdp_wrapped_module`, `_checkpoint_wrapped_module` ...) are
    removed anywhere in a key. `module`, which a model may have itself, is removed only from the front, and only if
    every key begins with it.
    """

    return rename.unwrap(source, dest, at=at, **how.keywords())

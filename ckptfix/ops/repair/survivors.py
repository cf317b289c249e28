"""The tensors that a damaged file still holds, in one sentence.

``all 122 model weights are intact; 40 of 186 optimizer tensors are lost``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.formats.repairs import Repair
from ckptfix.io.source import found_as, is_local, stamp
from ckptfix.names import kinds
from ckptfix.ops.repair.open import repair
from ckptfix.words import plural

QUICK = 64 << 20
"""Bytes of a file whose sums are compared even where only the structure is asked for: a tenth of a second."""

_NOUNS = {None: "model weight", "average": "averaged weight", "optimizer": "optimizer tensor"}
"""Kind of the state that holds a tensor -> the noun; other kinds share one."""

_OTHER = "other tensor"


def survivors(found: Repair) -> str:
    """Return how many model weights, optimizer tensors and others are intact, and how many are lost."""
    kept = [entry.name for entry in found.kept]
    lost = [loss.name for loss in found.losses if not loss.taken]
    flat = kinds.optimizer_names([*kept, *lost])
    here, gone = _counted(kept, flat), _counted(lost, flat)
    state = "intact" if found.compared else "whole inside the file"
    whole = (f"is {state}", f"are {state}")
    nouns = [noun for noun in (*_NOUNS.values(), _OTHER) if here[noun] + gone[noun]]
    return "; ".join(_said(noun, here[noun], gone[noun], whole, alone=len(nouns) == 1) for noun in nouns)


def _said(noun: str, kept: int, lost: int, whole: tuple[str, str], *, alone: bool) -> str:
    total = kept + lost
    if not lost:
        return f"the {noun} {whole[0]}" if total == 1 else f"all {plural(total, noun)} {whole[1]}"
    if not kept:
        return f"the {noun} is lost" if total == 1 else f"all {plural(total, noun)} are lost"
    text = f"{lost:,} of {plural(total, noun)} {'is' if lost == 1 else 'are'} lost"
    return f"{text}; the other {kept:,} {whole[kept > 1]}" if alone and kept > 1 else text


def _counted(names: Iterable[str], flat: frozenset[str]) -> Counter[str]:
    return Counter(_noun(name, flat) for name in names)


def _noun(name: str, flat: frozenset[str]) -> str:
    """Return the noun for a tensor by the keys above it: ``optimizer/state/0/exp_avg``."""
    above, _, key = name.rpartition("/")
    if name in flat or key in flat:
        return _NOUNS["optimizer"]
    return _NOUNS.get(kinds.of(above, (key,)), _OTHER)


def survivors_of(path: str, *, fast: bool = False) -> str:
    """Return the sentence of `survivors` for a damaged local file; empty where nothing can be said.

    Args:
        fast: read the data of small files only.
    """
    if found_as(path) != "file" or not is_local(path) or (fast and stamp(path).size > QUICK):
        return ""
    try:
        return survivors(repair(path, _no_folder))
    except (CkptfixError, OSError):
        return ""


def _no_folder() -> str:
    raise Unsupported("a compressed file is not unpacked for a diagnosis")

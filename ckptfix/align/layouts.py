"""The order of rows in fused tensors and of rotary pairs: what names reveal, and what the user must be asked.

Tensors of equal shapes may hold equal numbers in different places. Only names reveal this.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.align.result import Matching
from ckptfix.names.operations import HALF, INTERLEAVED
from ckptfix.names.slots import Slot
from ckptfix.names.spellings import (
    ADAPTER_OF_TORCHTUNE,
    FUSED_QKV,
    HEAD_BY_HEAD,
    NEIGHBOURS,
    NEIGHBOURS_OF_TORCHTUNE,
    OWN_ORDER,
    UNTOLD,
)


def module_of(name: str) -> tuple[str, str, str]:
    """Return the path before a module, the module's own name, and the parameter; also for ``in_proj_weight``."""
    module, _, leaf = name.rpartition(".")
    if leaf.startswith("in_proj_"):
        return (f"{module}." if module else ""), "in_proj", leaf.removeprefix("in_proj_")
    parent, _, last = module.rpartition(".")
    return (f"{parent}." if parent else ""), last, leaf


def orders(source: Sequence[Slot], target: Sequence[Slot], matching: Matching) -> str | None:
    """Return a question about two paired fused tensors whose rows may have different orders, or None."""
    fused = [
        pair
        for pair in matching.pairs
        if not pair.operation and None not in (order_of_rows(pair.source, False), order_of_rows(pair.target, False))
    ]
    if fused:
        own = [any(OWN_ORDER.search(slot.name) for slot in side) for side in (source, target)]
        for pair in fused:
            if order_of_rows(pair.source, own[0]) != order_of_rows(pair.target, own[1]):
                return (
                    f"{pair.source} and {pair.target} hold query, key and value in different orders: "
                    "state it in a rules file (`ckptfix help rules`, rows in another order)"
                )
    return None


IN_HEADS, IN_ROW = "head by head", "one after another"


def order_of_rows(name: str, own: bool) -> str | None:
    """Return the order in which a fused tensor holds its rows; None if it is not fused.

    Args:
        own: whether names beside it show an order of the model's own.
    """
    last = module_of(name)[1]
    if last in HEAD_BY_HEAD:
        return IN_HEADS
    if last not in (*FUSED_QKV, *UNTOLD):
        return None
    return "own" if own or last in UNTOLD else IN_ROW


def rotary(source: Sequence[Slot], target: Sequence[Slot]) -> str | None:
    """Return the new layout for the rotary pairs of queries and keys, ``half`` or ``interleaved``; None to keep it.

    Meta's LLaMA, Mistral's own files and torchtune rotate neighbors. Most others rotate the two halves of a head, and
    conversion scripts permute the rows. Names tell which side is which.
    """
    near = [bool(neighbours(side)) for side in (source, target)]
    if near[0] == near[1]:
        return None
    return HALF if near[0] else INTERLEAVED


def neighbours(slots: Sequence[Slot]) -> frozenset[str]:
    """Return the queries and keys of a model that rotates neighbors."""
    torchtune = any("tok_embeddings" in slot.name or ADAPTER_OF_TORCHTUNE.search(slot.name) for slot in slots)
    return frozenset(
        slot.name
        for slot in slots
        if (NEIGHBOURS.search(slot.name) or (torchtune and NEIGHBOURS_OF_TORCHTUNE.search(slot.name)))
        and ".lora_a." not in slot.name.lower()
    )


def is_glm(slots: Sequence[Slot]) -> bool:
    """Return whether a model is GLM's, by its transformers names: gate and up are fused, query and key are not."""
    names = [slot.name for slot in slots]
    return any(".mlp.gate_up_proj." in name for name in names) and any(".self_attn.q_proj." in name for name in names)


def of_experts(slot: Slot) -> str | None:
    """Return the rest of the name after the word for experts, for a tensor of all experts; None for any other."""
    _, mark, behind = slot.name.rpartition("experts.")
    return behind if mark and len(slot.shape) == 3 else None

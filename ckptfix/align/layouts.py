"""The order of rows in fused tensors and of rotary pairs: what names reveal, and what the user must be asked.

Tensors of equal shapes may hold equal numbers in different places. Only names reveal this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckptfix.align.result import Matching
from ckptfix.dataclass import dataclass
from ckptfix.names.operations import HALF, INTERLEAVED
from ckptfix.names.slots import Slot
from ckptfix.names.spellings import (
    ADAPTER_OF_TORCHTUNE,
    FUSED_QKV,
    HEAD_BY_HEAD,
    NEIGHBOURS,
    NEIGHBOURS_OF_TORCHTUNE,
    OWN_ORDER,
    REORDERED_QKV,
    UNTOLD,
)


def module_of(name: str) -> tuple[str, str, str]:
    """Return the path before a module, the module's own name, and the parameter; also for ``in_proj_weight``."""
    module, _, leaf = name.rpartition(".")
    if leaf.startswith("in_proj_"):
        return (f"{module}." if module else ""), "in_proj", leaf.removeprefix("in_proj_")
    parent, _, last = module.rpartition(".")
    return (f"{parent}." if parent else ""), last, leaf


IN_HEADS, IN_ROW, OWN, EITHER = "head by head", "one after another", "own", "either"


@dataclass(frozen=True, slots=True)
class RowOrders:
    """The orders in which the fused tensors of one side hold query, key and value.

    Attributes:
        own: whether names beside them show an order of the model's own.
        c_attn: the order in ``c_attn``.
    """

    own: bool = False
    c_attn: str = IN_ROW

    def of(self, name: str) -> str | None:
        """Return the order of the rows of a tensor; None if it is not fused."""
        last = module_of(name)[1]
        if last in HEAD_BY_HEAD:
            return IN_HEADS
        if last not in (*FUSED_QKV, *REORDERED_QKV, *UNTOLD):
            return None
        if self.own or last in UNTOLD:
            return OWN
        if last in REORDERED_QKV:
            return str(REORDERED_QKV[last])
        return self.c_attn if last == "c_attn" else IN_ROW


_OF_BIGCODE = "attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias", "ln_1.weight", "ln_2.weight"
"""Names in each block of GPTBigCode, beside ``attn.c_attn``."""


def row_orders(slots: Sequence[Slot], config: Mapping[str, object], by_head: bool) -> RowOrders:
    """Return the orders of one side.

    GPTBigCode without ``multi_query`` holds ``c_attn`` head by head, and nanoGPT one after another, with the same
    names and shapes. nanoGPT may lack biases, and has a causal mask in some versions; otherwise config.json must tell.

    Args:
        config: the settings in config.json beside the file, if it exists.
        by_head: the user has given the number of heads, for tensors whose order does not show.
    """
    shapes = {slot.name: slot.shape for slot in slots}
    found = RowOrders(any(map(OWN_ORDER.search, shapes)))
    for name, shape in shapes.items():
        front = name.removesuffix("attn.c_attn.weight")
        linear = len(shape) == 2 and shape[0] == 3 * shape[1]
        if front == name or not linear or f"{front}attn.c_attn.bias" not in shapes:
            continue
        if f"{front}attn.bias" in shapes or not all(front + other in shapes for other in _OF_BIGCODE):
            continue
        if isinstance(config.get("model_type"), str):
            heads = config["model_type"] == "gpt_bigcode" and config.get("multi_query") is False
            return RowOrders(found.own, IN_HEADS if heads else IN_ROW)
        return RowOrders(found.own, IN_HEADS if by_head else EITHER)
    return found


def orders(matching: Matching, rows: tuple[RowOrders, RowOrders]) -> str | None:
    """Return a question about two paired fused tensors whose rows may have different orders, or None."""
    for pair in matching.pairs:
        if pair.operation not in ("", "transpose"):
            continue
        kinds = [side.of(name) for side, name in zip(rows, (pair.source, pair.target), strict=True)]
        if None in kinds or kinds[0] == kinds[1]:
            continue
        if EITHER in kinds:
            return either(pair.source if kinds[0] == EITHER else pair.target)
        return (
            f"{pair.source} and {pair.target} hold query, key and value in different orders: "
            "state it in a rules file (`ckptfix help rules`, rows in another order)"
        )
    return None


def either(name: str) -> str:
    """Return the question about a tensor whose rows have either of two orders."""
    return (
        f"{any_number(name)} holds query, key and value one after another in nanoGPT, and head by head in GPTBigCode "
        "without multi_query: pass --heads N if it is head by head"
    )


def any_number(name: str) -> str:
    """Return a name without its numbers, so that a question about all layers is asked once."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{n}", name)


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

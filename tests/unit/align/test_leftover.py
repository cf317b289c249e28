"""A parameter that is left over beside certain siblings goes to the one left over beside their counterparts."""

from __future__ import annotations

import pytest

from ckptfix.align.match import match
from ckptfix.names.slots import Slot


def model(front: str, query: str, gate: str, more: dict[str, int]) -> list[Slot]:
    rows: list[Slot] = []
    for n in range(2):
        rows += [Slot(f"{front}.{n}.{query}.weight", (8, 8)), Slot(f"{front}.{n}.{gate}.weight", (4, 8))]
        rows += [Slot(f"{front}.{n}.{name}", (size,)) for name, size in more.items()]
    return rows


@pytest.mark.parametrize(
    ("ours", "theirs", "complete"),
    [
        ({"ffn.gate.bias": 4}, {"mlp.gate.e_score_correction_bias": 4}, True),
        ({"ffn.gate.bias": 4}, {"mlp.gate.scale": 4}, False),  # one is added, the other multiplies
        ({"ffn.gate.bias": 4}, {"mlp.gate.e_score_correction_bias": 5}, False),
        ({"ffn.gate.bias": 4, "ffn.gate.extra": 4}, {"mlp.gate.one": 4, "mlp.gate.other": 4}, False),
        ({"ffn.gate.bias": 4}, {"mlp.gate.correction_bias": 4, "mlp.gate.more": 3}, False),
    ],
)
def test_one_left_over_is_paired(ours: dict[str, int], theirs: dict[str, int], complete: bool) -> None:
    one, other = model("layers", "attn.wq", "ffn.gate", ours), model("h", "attn.q", "mlp.gate", theirs)
    found = match(one, other)
    assert found.complete is complete
    if complete:
        (pair,) = [pair for pair in found.pairs if pair.source == "layers.1.ffn.gate.bias"]
        assert pair.target == "h.1.mlp.gate.e_score_correction_bias" and pair.confidence < 1


@pytest.mark.parametrize(("size", "complete"), [(20, True), (21, False)])
def test_what_is_left_over_under_one_name_needs_no_sibling(size: int, complete: bool) -> None:
    """The head of ESM-2: a Linear in fairseq, and in transformers a bias beside a module with the weight."""
    one, other = model("layers", "attn.wq", "ffn.gate", {}), model("h", "attn.q", "mlp.gate", {})
    one += [Slot("lm_head.weight", (20, 8)), Slot("lm_head.bias", (20,))]
    other += [Slot("lm_head.decoder.weight", (20, 8)), Slot("lm_head.bias", (size,))]
    found = match(one, other)
    assert found.complete is complete
    assert (("lm_head.bias", "lm_head.bias") in found.names.items()) is complete

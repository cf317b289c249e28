"""Tied tensors are sets of names: whichever is defined first, equal names stay, and no name is left behind unsaid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.align.match import match
from ckptfix.names.slots import Slot

V, D = 6, 4


def slots(**ties: str | None) -> list[Slot]:
    """Matrices of one shape; a value is the name that one is tied to."""
    return [Slot(name.replace("__", "."), (V, D), "float32", tied and tied.replace("__", "."))
            for name, tied in ties.items()]  # fmt: skip


@pytest.mark.parametrize("swapped", [False, True])
def test_equal_names_stay_in_either_order(tmp_path: Path, swapped: bool) -> None:
    one, bias = torch.randn(V, D), torch.randn(V)
    files = [{"emb.weight": one, "dec.weight": one, "dec.bias": bias},
             {"dec.weight": one, "dec.bias": bias, "emb.weight": one}]  # fmt: skip
    paths = [tmp_path / "a.pth", tmp_path / "b.pth"]
    for path, state in zip(paths, reversed(files) if swapped else files, strict=True):
        torch.save(state, path)
    done = ckptfix.match(paths[0], tmp_path / "o.pth", paths[1])
    assert done.exit_code == 0 and not done.names and not done.rules


def test_two_tied_names_are_told_by_their_words() -> None:
    """lm_head and wte are defined in other orders, and a file in which they are not tied must not be exchanged."""
    source = slots(model__embed_tokens__weight=None, lm_head__weight="model__embed_tokens__weight")
    target = slots(lm_head__weight=None, transformer__wte__weight="lm_head__weight")
    found = match(source, target)
    assert found.complete
    assert found.names["lm_head.weight"] == "lm_head.weight"


def test_names_of_one_tensor_are_never_ambiguous() -> None:
    tied = slots(a__weight=None, b__weight="a__weight")
    assert match(tied, slots(x__weight=None, y__weight="x__weight")).complete
    assert match(tied, slots(x__weight=None, y__weight=None)).complete
    assert not match(slots(a__weight=None, b__weight=None), slots(x__weight=None, y__weight="x__weight")).complete


def test_a_second_name_that_the_target_lacks_is_left_out(tmp_path: Path) -> None:
    shared = torch.randn(V, D)
    torch.save({"model.embed.weight": shared, "norm.weight": torch.ones(D), "lm_head.weight": shared}, tmp_path / "a")
    like = {"embedder.weight": torch.randn(V, D), "final_norm.weight": torch.ones(D)}
    torch.save(like, tmp_path / "like.pth")
    done = ckptfix.match(tmp_path / "a", tmp_path / "o.pth", tmp_path / "like.pth")
    made = torch.load(done.dest, weights_only=True)
    assert done.exit_code == 0 and set(made) == set(like)
    assert torch.equal(made["embedder.weight"], shared)
    assert [row.where for row in done.findings if row.id == "left-behind"] == ["lm_head.weight"]
    assert [rule.operations[0].name for rule in done.rules if hasattr(rule, "operations")] == ["untie"]

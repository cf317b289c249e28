"""``match --blocks``: the user says which blocks of a deeper stack to keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.align import depths
from ckptfix.errors import NoMatch, Refused
from ckptfix.names.slots import Slot
from ckptfix.ops.match import find, write_rules

D = 4


def fused(depth: int, front: str = "blocks.") -> dict[str, torch.Tensor]:
    made = {"embed.weight": torch.rand(9, D)}
    for n in range(depth):
        made |= {f"{front}{n}.qkv.weight": torch.full((3 * D, D), float(n)), f"{front}{n}.fc.weight": torch.rand(7, D)}
    return made


def apart(depth: int) -> dict[str, torch.Tensor]:
    made = {"tokens.weight": torch.rand(9, D)}
    for n in range(depth):
        made |= {f"enc.layer.{n}.attn.{part}.weight": torch.rand(D, D) for part in ("query", "key", "value")}
        made[f"enc.layer.{n}.dense.weight"] = torch.rand(7, D)
    return made


@pytest.fixture
def files(tmp_path: Path) -> Path:
    torch.save(fused(6), tmp_path / "in.pth")
    torch.save(apart(3), tmp_path / "apart.pth")
    torch.save(fused(3), tmp_path / "same.pth")
    return tmp_path


@pytest.mark.parametrize("like", ["apart.pth", "same.pth"])
def test_more_blocks_are_asked_about(files: Path, like: str) -> None:
    """Every way that the refusal names works."""
    with pytest.raises(NoMatch, match="IN has 6 blocks in blocks, and TARGET 3 in ") as caught:
        ckptfix.match(files / "in.pth", files / "o.pth", files / like)
    ways = [part.split()[0] for part in (caught.value.hint or "").split("--blocks ")[1:]]
    for way in (one.rstrip(",") for one in ways):
        done = ckptfix.match(files / "in.pth", files / "o.pth", files / like, blocks=way, force=True)
        assert done.exit_code == 0 and any(row.id == "left-behind" for row in done.findings)
        made, wanted = (torch.load(path, weights_only=True) for path in (done.dest, files / like))
        assert {name: one.shape for name, one in made.items()} == {name: one.shape for name, one in wanted.items()}
    assert len(ways) == 4


@pytest.mark.parametrize(
    ("blocks", "kept"), [("first", (0, 1, 2)), ("last", (3, 4, 5)), ("every-other", (0, 2, 4)), ("1,2,5", (1, 2, 5))]
)
def test_the_chosen_blocks_are_kept(files: Path, blocks: str, kept: tuple[int, ...]) -> None:
    found = find(files / "in.pth", files / "apart.pth", blocks=blocks)
    done = ckptfix.match(files / "in.pth", files / "o.pth", files / "apart.pth", blocks=blocks)
    made = torch.load(done.dest, weights_only=True)
    assert tuple(int(made[f"enc.layer.{n}.attn.key.weight"][0, 0]) for n in range(3)) == kept
    write_rules(found, files / "x.rules")
    ckptfix.rename(files / "in.pth", files / "again.pth", rules=files / "x.rules")
    again = torch.load(files / "again.pth", weights_only=True)
    assert again.keys() == made.keys() and all(torch.equal(again[name], made[name]) for name in made)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [("middle", "'middle'"), ("0,1", "2 blocks"), ("0,1,9", "not in IN"), ("2,1,0", "out of order"), ("", "no blocks")],
)
def test_other_blocks_are_refused(files: Path, blocks: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        ckptfix.match(files / "in.pth", files / "o.pth", files / "apart.pth", blocks=blocks)


def test_blocks_need_a_deeper_stack(files: Path) -> None:
    with pytest.raises(Refused, match="no stack"):
        ckptfix.match(files / "same.pth", files / "o.pth", files / "apart.pth", blocks="first")
    with pytest.raises(Refused, match="verified"):
        find(files / "in.pth", "some:model", blocks="first", verify=True, source_model="some:model")


def _slots(tensors: dict[str, torch.Tensor]) -> list[Slot]:
    return [Slot(name, tuple(one.shape)) for name, one in tensors.items()]


def test_stacks_of_equal_blocks_are_told_apart_by_depth() -> None:
    """Of two stacks that shrink by different amounts, nothing says which became which."""
    both = _slots({**fused(6), **fused(6, "decoder.")})
    assert len(depths.deeper(both, _slots({**fused(3), **fused(3, "decoder.")}))) == 2
    assert depths.deeper(both, _slots({**fused(3), **fused(2, "decoder.")})) == ()
    assert [one.source for one in depths.deeper(both, _slots({**fused(6), **fused(3, "decoder.")}))] == []
    assert depths.deeper(_slots(fused(3)), _slots(fused(6))) == ()

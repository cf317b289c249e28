"""Matching by structure over random models in random naming styles, where the right answer is known.

`property.named_models` makes them: no table of counterparts, but both names of a tensor come from one thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import LONG
from property.named_models import Key, pair

from ckptfix.align.match import match
from ckptfix.align.result import Matching
from ckptfix.names.learn import learn
from ckptfix.names.rules import renamed
from ckptfix.names.slots import Slot

SEEDS = range(8000 if LONG else 300)
STEP = 20


def slots(rows: Sequence[tuple[Slot, object]]) -> list[Slot]:
    return [slot for slot, _ in rows]


def wrong(one: Sequence[tuple[Slot, Key]], other: Sequence[tuple[Slot, Key]], found: Matching) -> list[tuple[str, str]]:
    """The pairs that the matching stands by, and that are not of one tensor."""
    ours = {slot.name: key for slot, key in one}
    theirs = {slot.name: key for slot, key in other}
    return [
        (row.source, row.target) for row in found.pairs if not row.instead and ours[row.source] != theirs[row.target]
    ]


def distinct(rows: Sequence[tuple[Slot, object]]) -> bool:
    return len({slot.name for slot, _ in rows}) == len(rows)


@pytest.mark.campaign
@pytest.mark.parametrize("start", range(SEEDS.start, SEEDS.stop, STEP))
def test_what_is_complete_is_right_and_its_rules_say_so(start: int) -> None:
    for seed in range(start, start + STEP):
        one, other = pair(seed)
        if not (distinct(one) and distinct(other)):
            continue
        found = match(slots(one), slots(other))
        if found.complete or not LONG:
            assert not wrong(one, other, found), seed
        names = [slot.name for slot, _ in one]
        made = renamed(names, found.rules)
        assert {name: made.get(name, name) for name in found.names} == found.names, seed
        assert {row.source for row in found.pairs} | set(found.left) == set(names), seed
        assert {row.target for row in found.pairs} | set(found.missing) == {slot.name for slot, _ in other}, seed


@pytest.mark.campaign
def test_many_are_complete() -> None:
    """So that refusing all would not do."""
    found = Counter(match(slots(one), slots(other)).complete for one, other in map(pair, range(200)))
    assert found[True] >= 65, found


@pytest.mark.campaign
@pytest.mark.parametrize("start", range(0, 100, STEP))
def test_the_way_back_is_right_too(start: int) -> None:
    for seed in range(start, start + STEP):
        one, other = pair(seed)
        if not (distinct(one) and distinct(other)):
            continue
        there, back = match(slots(one), slots(other)), match(slots(other), slots(one))
        assert not wrong(other, one, back), seed
        if there.complete and back.complete:
            assert {new: old for old, new in there.names.items()} == back.names, seed


SCRIPT = """
from property.named_models import pair
from ckptfix.align.match import match
for seed in range(12):
    one, other = pair(seed)
    print(match([slot for slot, _ in one], [slot for slot, _ in other]))
"""


@pytest.mark.slow
def test_the_answer_is_the_same_in_every_run() -> None:
    """Nothing may hang on the order of a set."""
    told = set()
    for seed in ("0", "1", "2"):
        paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
        told.add(done.stdout)
    assert len(told) == 1
    assert len(told.pop().splitlines()) == 12


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (["é.weight", "ü.weight", "日本.1.weight"], (3, 3)),
        (["", ".", "..", "a..b"], (2,)),
        (["0", "1", "00", "01"], (2,)),
        (["x" * 1000 + f".{index}" for index in range(4)], (0,)),
        ([f"{'a.' * 400}{index}.weight" for index in range(3)], ()),
        (["9" * 5000 + ".weight", "²³.weight", "٣.weight"], (4,)),
        (["a.{n}", "a.{*}.b", "a{}.0", "{n+1}.weight"], (1,)),
        (["line\nbreak.weight", "tab\t.1.weight"], (2, 0)),
    ],
    ids=["unicode", "empty", "digits", "long, no elements", "deep scalars", "big numbers", "braces", "space"],
)
def test_odd_names(names: list[str], shape: tuple[int, ...]) -> None:
    """Equal ones go together, and beside others of the same shape nothing is lost, claimed twice or raised."""
    same = [Slot(name, shape, "float32") for name in names]
    found = match(same, same)
    assert found.complete and found.names == {name: name for name in names}
    others = [Slot(f"other.{chr(97 + index)}x", shape, "float32") for index in range(len(names))]
    found = match(same, others)
    assert {pair.source for pair in found.pairs} | set(found.left) == set(names)
    assert len({pair.target for pair in found.pairs}) == len(found.pairs)
    assert not found.complete


def test_learned_rules_of_names_that_look_like_rules_are_no_rules() -> None:
    names = {"a.{n}": "b.{n}", "c.0": "d.{m}", "e.0": "f.0"}
    assert renamed(names, learn(names, list(names))) == {"e.0": "f.0"}


@pytest.mark.sampled(2, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [
    *((kind, 2000) for kind in ("words", "numbers", "moved", "experts")),
    ("equal shapes", 700),
    *([("equal shapes", 2000)] if LONG else []),  # each key is compared with each: ten seconds
])  # fmt: skip
def test_thousands_of_keys(kind: str, count: int) -> None:
    """Irregular and regular names in number: every key is accounted for, and what can be known is."""
    spread = [index * 7919 % count for index in range(count)]
    letters = ["".join(chr(97 + place // 26**power % 26) for power in range(4)) for place in spread]
    shapes: list[tuple[int, ...]] = [(index + 1,) for index in range(count)]
    if kind == "equal shapes":
        shapes = [(3,)] * count
    elif kind == "experts":
        shapes = [(5, index % 3 + 1) for index in range(count)]
    named = {
        "words": ([f"{word}.weight" for word in letters], [f"x.{word[::-1]}.weight" for word in letters]),
        "equal shapes": ([f"{word}.weight" for word in letters], [f"x.{word[::-1]}q.weight" for word in letters]),
        "numbers": ([f"a.{index}.weight" for index in range(count)], [f"b.{index}.weight" for index in spread]),
        "moved": ([f"a.{index}.weight" for index in range(count)], [f"b.{index + 3}.weight" for index in range(count)]),
        "experts": (
            [f"layers.{index // 60}.experts.{index // 3 % 20}.w{index % 3}.weight" for index in range(count)],
            [f"h.{index // 60}.moe.{'xyz'[index % 3]}q.{index // 3 % 20}.weight" for index in range(count)],
        ),
    }[kind]
    source, target = (
        [Slot(name, size, "float32") for name, size in zip(names, shapes, strict=True)] for names in named
    )
    found = match(source, target)
    assert len(found.pairs) == count
    if kind == "equal shapes":
        assert len(found.ambiguous) == count
    else:
        assert found.complete
        assert found.names == dict(zip(*named, strict=True))
        assert len(found.rules) == (count if kind in ("words", "numbers") else 1 if kind == "moved" else 3)

"""Names as a tree: every item once, at its full name, and only similar numbered siblings in one run."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from ckptfix.names.outline import KeyNode, follows, label_of, outline

WORDS = st.sampled_from(["a", "layers", "0", "1", "2", "10", "", "w", "x/y"])
NAMES = st.lists(st.tuples(st.sampled_from(["", "m", "o/0", "o/1"]), st.lists(WORDS, min_size=1).map(".".join)))


def addresses(node: KeyNode[str], before: str = "") -> Iterator[tuple[str, str]]:
    """(the names of the nodes above and of its own, the item) of each leaf."""
    if node.item is not None:
        yield before + node.name, node.item
    for child in node.children.values():
        yield from addresses(child, before + node.name)


@given(NAMES, st.integers(1, 5))
def test_every_item_is_at_its_name(names: list[tuple[str, str]], depth: int) -> None:
    items = [(at, key, None, f"{at}/{key}" if at else key) for at, key in names]
    root = outline(items, depth)
    found = list(addresses(root))
    assert sorted(item for _, item in found) == sorted(item for _, _, _, item in items) == sorted(root.items())
    assert all(name == item for name, item in found)


def test_runs_are_similar_and_count_up() -> None:
    rows = [("", f"l.{index}.w", "small" if index == 3 else "large", index) for index in (0, 1, 2, 3, 4, 5, 7, 8)]
    (layers,) = outline(rows, 9).children.values()
    assert [label_of(run) for run in layers.runs(lambda _: True)] == ["0-2.", "3.", "4-5.", "7-8."]
    assert [label_of(run) for run in layers.runs(lambda node: node.word != "1")][:3] == ["0.", "1.", "2."]


def test_a_leaf_and_a_module_of_one_name_are_two_nodes() -> None:
    root = outline([("", "a", 0, "leaf"), ("", "a.b", 0, "inside"), ("", "a", 0, "again")], 9)
    assert [(node.name, list(node.items())) for node in root.children.values()] == [
        ("a", ["leaf"]),
        ("a.", ["inside"]),
        ("a", ["again"]),
    ]


def test_numbers_that_follow() -> None:
    assert follows("9", "10") and not follows("1", "3") and not follows("a", "1") and not follows("01", "1")
    assert not follows("999999999", "1000000000")

"""Tables of names: which of them may have a line for a key."""

from __future__ import annotations

import re

import pytest

from ckptfix.names import tables
from ckptfix.names.tables import NameConversion

WAYS = [way for one in tables.shipped() for way in one.ways]


def keys_of(way: NameConversion) -> list[str]:
    """A key for each name on the left of the lines, with a number or text in place of each placeholder."""
    rules = way.rules()
    names = [*rules.names, *(name for rule in rules.tensors for name in rule.old.names)]
    made = [re.sub(r"\{[a-z][^}]*\}", "3", name.replace("{*}", "x.y")) for name in names]
    return [key for key in made if not rules.unmatched([key])[0]]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_key_that_a_line_matches_is_not_ruled_out(way: NameConversion) -> None:
    keys = keys_of(way)
    assert keys and all(map(way.may_match, keys))


def test_most_tables_are_ruled_out_by_one_key() -> None:
    likely = [way for way in WAYS if way.may_match("gpt_neox.layers.0.attention.dense.weight")]
    assert 0 < len(likely) < len(WAYS) / 4

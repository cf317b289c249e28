"""Counts and lists in sentences."""

from __future__ import annotations

import pytest

from ckptfix.words import plural, several, some, where_else


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "tensor", "0 tensors"), (1, "tensor", "1 tensor"), (2000, "tensor", "2,000 tensors"),
     (1, "address", "1 address"), (2, "address", "2 addresses"), (3, "prefix", "3 prefixes"),
     (2, "entry", "2 entries")],
)  # fmt: skip
def test_one_is_one_and_more_are_many(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


def test_a_plural_of_its_own() -> None:
    assert plural(2, "tensor is", "tensors are") == "2 tensors are"


@pytest.mark.parametrize(
    ("what", "text"),
    [("numpy array of float32", "2 numpy arrays of float32"), ("frozenset in a key", "2 frozensets in a key"),
     ("argparse.Namespace", "2 argparse.Namespace"), ("_rebuild_qtensor", "2 _rebuild_qtensor")],
)  # fmt: skip
def test_the_noun_of_a_phrase_and_no_class_becomes_plural(what: str, text: str) -> None:
    assert several(2, what) == text


def test_names_beyond_the_most_are_counted() -> None:
    assert some(["a", "b"], 2) == "a, b"
    assert some(["a", "b", "c"], 2) == "a, b and 1 more"


def test_where_it_is_instead() -> None:
    assert where_else(["model"]) == "there is one at model"
    assert where_else([""]) == "there is one at the top level ('')"
    assert where_else(["model", "ema"]) == "there are 2, at model, ema"

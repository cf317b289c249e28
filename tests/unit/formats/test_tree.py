"""The tree of values: what each kind of value is, whatever format it comes from."""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.checkpoint import Checkpoint
from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.tree import (
    ListValue,
    MapValue,
    NameValue,
    ObjectValue,
    StorageValue,
    TensorValue,
    every_value,
    named,
    pairs_of,
)
from ckptfix.errors import NoSuchTensor
from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch.common import pickled_object
from ckptfix.pickles.folded import Phrases


def tree(path: Path, value: Any) -> Checkpoint:
    torch.save(value, path)
    return open_checkpoint(path)


def test_each_value_is_of_one_kind(tmp_path: Path) -> None:
    shared = [1, 2]
    value = {
        "map": {1: "a", "b": None},
        "list": shared,
        "again": shared,
        "tuple": (1.5, b"x"),
        "set": {3},
        "tensor": torch.ones(2, 3),
        "storage": torch.arange(4).untyped_storage(),
        "name": torch.float16,
        "object": Fraction(1, 2),
        "ordered": OrderedDict(a=1),
    }
    root = tree(tmp_path / "a.pth", value).tree.root
    found = named(root)
    assert isinstance(root, MapValue) and [key for key, _ in root.pairs] == list(value)
    for name, kind in (("map", MapValue), ("list", ListValue), ("tuple", ListValue), ("tensor", TensorValue)):
        assert isinstance(found[name], kind)
    assert isinstance(found["storage"], StorageValue) and found["storage"].untyped
    assert isinstance(found["name"], NameValue) and found["name"].full == "torch.float16"
    assert found["list"] == found["again"] and found["list"] != found["tuple"]
    assert [key for key, _ in pairs_of(found["map"]) or ()] == [1, "b"]
    one, two = found["object"], found["ordered"]
    assert isinstance(one, ObjectValue) and one.cls is not None and one.cls.canonical == "fractions.Fraction"
    assert one.pairs is None and list(one.arguments) in ([1, 2], ["1/2"])  # newer Python writes numbers
    assert isinstance(two, ObjectValue) and list(two.pairs or ()) == [("a", 1)]
    tensor = found["tensor"]
    assert isinstance(tensor, TensorValue) and tensor.by_torch and not tensor.attributes
    assert tensor.entry("tensor", "").shape == (2, 3)


def test_an_address_leads_to_one_item(tmp_path: Path) -> None:
    values = tree(tmp_path / "a.pth", {"a": {"b": [10, 20]}, "a/b": "text"}).tree
    assert values.at("") == values.root
    assert values.at(join(join(join("", "a"), "b"), "1")) == 20
    with pytest.raises(NoSuchTensor):
        values.at("a/c")


def test_a_cycle_is_walked_once(tmp_path: Path) -> None:
    value: dict[str, Any] = {"x": torch.ones(1)}
    value["self"] = value
    root = tree(tmp_path / "a.pth", value).tree.root
    assert sum(isinstance(item, MapValue) for item in every_value(root)) == 1


def test_looking_at_tensors_unfolds_none_of_their_calls(tmp_path: Path) -> None:
    checkpoint = tree(tmp_path / "a.pth", {f"layer.{n}.weight": torch.ones(2) for n in range(64)})
    for item in named(checkpoint.tree.root).values():
        assert isinstance(item, TensorValue)
        assert item.by_torch and not item.attributes and item.entry("x", "").shape == (2,)
    phrases = pickled_object(checkpoint).graph.phrases
    assert isinstance(phrases, Phrases) and len(phrases.starts) > 20
    assert all(call.folded is not None for call in phrases.calls())


def test_a_format_without_an_object_has_a_tree_too(tmp_path: Path) -> None:
    save_file({"a.b": torch.ones(2), "c": torch.zeros(3)}, tmp_path / "a.safetensors", {"epoch": "3"})
    values = open_checkpoint(tmp_path / "a.safetensors").tree
    assert isinstance(values.root, ObjectValue) and list(named(values.root)) == ["a.b", "c"]
    assert named(dict(values.root.attributes)["metadata"]) == {"epoch": "3"}
    tensor = values.at("c")
    assert isinstance(tensor, TensorValue) and tensor.entry("c", "").shape == (3,)
    assert ckptfix.load_checkpoint(tmp_path / "a.safetensors")["c"].shape == (3,)

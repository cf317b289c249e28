"""What torch.load reads after names have changed, against what torch itself makes of the same names."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same, names_of
from kinds import CONTAINERS, KINDS, Kind, Net, cases, tensor
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import ckptfix

pytestmark = pytest.mark.slow


def strip(name: str) -> str:
    return "" if name == "module" else name.removeprefix("module.")


def loadable(kind: Kind) -> bool:
    return kind.name != "gone-classes"


def load(path: Path, kind: Kind) -> Any:
    """`path` as torch reads it. weights_only is off only for files that this test made itself."""
    return torch.load(path, weights_only=kind.safe, map_location="cpu" if kind.tag else None)


def stripped(value: Any) -> Any:
    """The oracle: every state dict in `value` treated by torch's own function (which also takes a partial prefix)."""
    if isinstance(value, dict):
        for key in value:
            value[key] = stripped(value[key])
        if names_of(value):
            order = [strip(key) if isinstance(key, str) else key for key in value]
            consume_prefix_in_state_dict_if_present(value, "module.")
            for key in order:  # torch moves what it renames to the end
                value[key] = value.pop(key)
    if isinstance(value, list):
        value[:] = map(stripped, value)
    return value


def _consumable(kind: Kind) -> bool:
    return loadable(kind) and kind.name not in ("param-names", "optimizer-by-name", "whole-module", "one-tag-for-all")


@pytest.mark.parametrize(("kind", "container"), cases(_consumable))
def test_strip_does_what_torch_does(kind: Kind, container: str, tmp_path: Path) -> None:
    source = kind.save(tmp_path / "in", container)
    ckptfix.strip_module(source, tmp_path / "out", partial=True)
    assert_same(stripped(load(source, kind)), load(tmp_path / "out", kind))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["nested", "sgd", "param-names", "optimizer-by-name", "protocol-4", "protocol-5"])
def test_strip_renames_whatever_refers_to_a_name(name: str, container: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    source = kind.save(tmp_path / "in", container)
    ckptfix.strip_module(source, tmp_path / "out")
    before, after = load(source, kind), load(tmp_path / "out", kind)
    for value in before.values():
        if hasattr(value, "_metadata") and "module" in value._metadata:
            del value._metadata[""]  # DataParallel's own version gives way to the model's
    assert_same(before, after, rename=strip)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "parallel"])
def test_add_gives_what_data_parallel_saves(wrapped: bool, container: str, tmp_path: Path) -> None:
    model: nn.Module = nn.DataParallel(Net()) if wrapped else Net()
    source = KINDS["bare"].save(tmp_path / "in", container, model.state_dict())
    ckptfix.add_module(source, tmp_path / "out")
    got = torch.load(tmp_path / "out", weights_only=True)
    wanted: Any = nn.DataParallel(model).state_dict()
    assert list(got) == list(wanted)
    assert {name: value for name, value in got._metadata.items() if name} == {
        name: value for name, value in wanted._metadata.items() if name
    }
    nn.DataParallel(model).load_state_dict(got, strict=True)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["state-dict", "sgd", "optimizer-by-name", "param-names", "tied", "views", "sparse"])
def test_add_renames_the_model_and_not_the_optimizer(name: str, container: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    source = kind.save(tmp_path / "in", container)
    ckptfix.add_module(source, tmp_path / "out")
    before, after = load(source, kind), load(tmp_path / "out", kind)
    for one in (before, after):
        for value in [one, *one.values()]:
            vars(value).pop("_metadata", None) if hasattr(value, "_metadata") else None
    assert_same(before, after, rename=lambda key: f"module.{key}")


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["compiled", "compiled-data-parallel", "data-parallel", "cuda", "state-dict"])
def test_unwrap_gives_what_the_plain_model_saves(name: str, container: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    source = kind.save(tmp_path / "in", container)
    ckptfix.unwrap(source, tmp_path / "out")
    got = load(tmp_path / "out", kind)
    assert list(got) == list(Net().state_dict())
    Net().load_state_dict(got, strict=True)
    metadata = Net().state_dict()._metadata  # type: ignore[attr-defined]
    assert {name: got._metadata[name] for name in metadata} == metadata


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    ("wrapped", "clean"),
    [
        ("module._orig_mod.fc.weight", "fc.weight"),
        ("_orig_mod.module.fc.weight", "fc.weight"),
        ("model._orig_mod.layer.weight", "model.layer.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w", "layers.0.w"),
        ("layers.0._checkpoint_wrapped_module.w", "layers.0.w"),
        ("_forward_module.module._fpw_module.w", "w"),
        ("encoder._module.w", "encoder._module.w"),
        ("submodule.w", "submodule.w"),
    ],
)
def test_unwrap_at_any_depth(wrapped: str, clean: str, container: str, tmp_path: Path) -> None:
    other = wrapped.rpartition(".")[0] + ".bias"
    source = KINDS["bare"].save(tmp_path / "in", container, OrderedDict({wrapped: tensor(2), other: tensor(3)}))
    ckptfix.unwrap(source, tmp_path / "out")
    assert list(torch.load(tmp_path / "out", weights_only=True)) == [clean, clean.rpartition(".")[0] + ".bias"
                                                                    if "." in clean else "bias"]  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS)
def test_strip_all_levels(container: str, tmp_path: Path) -> None:
    source = KINDS["data-parallel-of-module"].save(tmp_path / "in", container)
    ckptfix.strip_module(source, tmp_path / "once")
    ckptfix.strip_module(source, tmp_path / "all", all_levels=True)
    once, plain = (torch.load(tmp_path / name, weights_only=True) for name in ("once", "all"))
    assert list(once) == [f"module.{name}" for name in Net().state_dict()]
    assert list(plain) == list(Net().state_dict())


@pytest.mark.parametrize("container", CONTAINERS)
def test_another_prefix(container: str, tmp_path: Path) -> None:
    source = KINDS["state-dict"].save(tmp_path / "in", container)
    ckptfix.add_module(source, tmp_path / "added", prefix="backbone.net")
    added = torch.load(tmp_path / "added", weights_only=True)
    assert list(added) == [f"backbone.net.{name}" for name in Net().state_dict()]
    ckptfix.strip_module(tmp_path / "added", tmp_path / "out", prefix="backbone.net.")
    assert (tmp_path / "out").read_bytes() == source.read_bytes()


RENAMES: list[tuple[dict[str, Any], Callable[[str], str]]] = [
    ({"subs": [(r"^module\.fc\.", "head.")]}, lambda key: re.sub(r"^module\.fc\.", "head.", key)),
    ({"subs": [(r"(\d)", r"\1\1"), ("weight", "w")]}, lambda key: re.sub(r"(\d)", r"\1\1", key).replace("weight", "w")),
    ({"mapping": {"module.steps": "é \U0001f600"}}, lambda key: "é \U0001f600" if key == "module.steps" else key),
    ({"mapping": {"module.steps": "x" * 70_000}}, lambda key: "x" * 70_000 if key == "module.steps" else key),
]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(("rules", "oracle"), RENAMES, ids=["sub", "subs", "map", "long"])
@pytest.mark.parametrize("name", ["data-parallel", "protocol-4", "protocol-5", "no-checksums"])
def test_rename(name: str, rules: dict[str, Any], oracle: Callable[[str], str], container: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    source = kind.save(tmp_path / "in", container)
    ckptfix.rename(source, tmp_path / "out", **rules)
    before, after = load(source, kind), load(tmp_path / "out", kind)
    for one in (before, after):
        for value in [one, *one.values()]:
            if hasattr(value, "_metadata"):
                del value._metadata
    assert_same(before, after, rename=oracle)
    if kind.crc32:
        ckptfix_reads = [entry.key for entry in ckptfix.open_checkpoint(tmp_path / "out").entries]
        assert len(ckptfix_reads) == len([1 for _ in ckptfix.open_checkpoint(source).entries])


@pytest.mark.parametrize("container", CONTAINERS)
def test_at_limits_the_change(container: str, tmp_path: Path) -> None:
    obj = {"a": {"module.w": tensor(2)}, "b": {"module.w": tensor(2, seed=1)}}
    source = KINDS["bare"].save(tmp_path / "in", container, obj)
    ckptfix.strip_module(source, tmp_path / "out", at="b")
    got = torch.load(tmp_path / "out", weights_only=True)
    assert list(got["a"]) == ["module.w"] and list(got["b"]) == ["w"]

"""Devices: what a file says after they have been moved, read by torch's own map_location callback."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from kinds import CONTAINERS, KINDS, Kind, cases, location_tags, tensor

import ckptfix

pytestmark = pytest.mark.slow


def loadable(kind: Kind) -> bool:
    return kind.name != "gone-classes"


def tags(path: Path, *, safe: bool = True) -> list[str]:
    """The location tag of every storage, in the order in which torch meets them."""
    seen: list[str] = []

    def note(storage: Any, tag: str) -> Any:
        seen.append(tag)
        return storage

    torch.load(path, map_location=note, weights_only=safe)
    return seen


@pytest.mark.sampled(42)
@pytest.mark.parametrize(("kind", "container"), cases(loadable))
def test_to_cpu_loads_without_map_location(kind: Kind, container: str, tmp_path: Path) -> None:
    source = kind.save(tmp_path / "in", container)
    ckptfix.map_location(source, tmp_path / "out", "cpu")
    assert_same(kind.make(), torch.load(tmp_path / "out", weights_only=kind.safe))
    if kind.name != "dtensor":  # torch takes no callback for a wrapper subclass
        assert set(tags(tmp_path / "out", safe=kind.safe)) <= {"cpu"}


def _places_only(kind: Kind) -> bool:
    """Not torch-values and dtensor, which hold a device that is a value, and would no longer be equal."""
    return loadable(kind) and kind.name not in ("torch-values", "dtensor", "rng-state")


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("kind", "container"), cases(_places_only))
def test_to_a_gpu_that_is_not_here(kind: Kind, container: str, tmp_path: Path) -> None:
    source = kind.save(tmp_path / "in", container)
    ckptfix.map_location(source, tmp_path / "out", "cuda:11")
    assert set(tags(tmp_path / "out", safe=kind.safe)) <= {"cuda:11"}
    assert_same(kind.make(), torch.load(tmp_path / "out", weights_only=kind.safe, map_location="cpu"))


@pytest.mark.parametrize("container", CONTAINERS)
def test_several_at_once_and_a_swap(container: str, tmp_path: Path) -> None:
    kind = KINDS["mixed-devices"]
    source = kind.save(tmp_path / "in", container)
    moves = {"cuda:0": "cuda:1", "cuda:1": "cuda:0", "cuda:3": "cpu"}
    result = ckptfix.map_location(source, tmp_path / "out", moves)
    before = tags(source)
    assert set(before) == {"cpu", "cuda:0", "cuda:1", "cuda:3"}
    assert tags(tmp_path / "out") == [moves.get(tag, tag) for tag in before]
    assert result.moved == {pair: before.count(pair[0]) for pair in moves.items()}
    assert dict(result.kept) == {"cpu": before.count("cpu")}


@pytest.mark.parametrize("container", CONTAINERS)
def test_there_and_back_is_byte_identical(container: str, tmp_path: Path) -> None:
    source = KINDS["cuda"].save(tmp_path / "in", container)
    ckptfix.map_location(source, tmp_path / "there", {"cuda:0": "cuda:101"})
    ckptfix.map_location(tmp_path / "there", tmp_path / "back", {"cuda:101": "cuda:0"})
    assert set(tags(tmp_path / "there")) == {"cuda:101"}
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_device_values_move_too(protocol: int, container: str, tmp_path: Path) -> None:
    obj = {
        "module.w": tensor(2),
        "one": torch.device("cuda", 1),
        "any": torch.device("cuda"),
        "cpu": torch.device("cpu"),
        "text": "cuda:1",
        "nested": [{"device": torch.device("cuda:1")}],
    }
    with location_tags(lambda _: "cuda:1"):
        torch.save(obj, tmp_path / "in", pickle_protocol=protocol, _use_new_zipfile_serialization=container == "zip")
    ckptfix.map_location(tmp_path / "in", tmp_path / "out", {"cuda:1": "cuda:0"})
    got = torch.load(tmp_path / "out", weights_only=protocol < 4, map_location="cpu")
    assert got["one"] == got["nested"][0]["device"] == torch.device("cuda:0")
    assert got["cpu"] == torch.device("cpu") and got["text"] == "cuda:1"
    assert tags(tmp_path / "out", safe=protocol < 4) == ["cuda:0"]
    ckptfix.map_location(tmp_path / "in", tmp_path / "all", "cpu")
    got = torch.load(tmp_path / "all", weights_only=protocol < 4)
    assert got["one"] == got["any"] == got["nested"][0]["device"] == torch.device("cpu")


@pytest.mark.parametrize("container", CONTAINERS)
def test_meta_tensors_have_no_device_to_move(container: str, tmp_path: Path) -> None:
    source = KINDS["meta"].save(tmp_path / "in", container)
    ckptfix.map_location(source, tmp_path / "out", "cuda:0")
    got = torch.load(tmp_path / "out", weights_only=True, map_location="cpu")
    assert got["module.shape"].is_meta and not got["module.real"].is_meta


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("tag", ["mps", "xpu:2", "hpu", "privateuseone:0"])
def test_other_accelerators(tag: str, container: str, tmp_path: Path) -> None:
    with location_tags(lambda _: tag):
        KINDS["bare"].save(tmp_path / "in", container)
    assert tags(tmp_path / "in") == [tag, tag]
    ckptfix.map_location(tmp_path / "in", tmp_path / "out", "cpu")
    assert_same(KINDS["bare"].make(), torch.load(tmp_path / "out", weights_only=True))


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_storage_shared_by_two_tensors_moves_once(container: str, tmp_path: Path) -> None:
    base = tensor(4)
    with location_tags(lambda _: "cuda:2"):
        KINDS["bare"].save(tmp_path / "in", container, OrderedDict(a=base, b=base[1:], c=base))
    ckptfix.map_location(tmp_path / "in", tmp_path / "out", "cpu")
    assert_same(OrderedDict(a=base, b=base[1:], c=base), torch.load(tmp_path / "out", weights_only=True))

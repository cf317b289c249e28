"""Devices: every place where one stands, moved at once; the rest is reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import Refused


@contextmanager
def tagged(*tags: str) -> Iterator[None]:
    """torch.save writes these location tags, in turn."""
    original = torch.serialization.location_tag
    rest = iter(tags)
    torch.serialization.location_tag = lambda storage: next(rest)
    try:
        yield
    finally:
        torch.serialization.location_tag = original


def seen(path: Path) -> list[str]:
    """The tags that torch meets when it loads the file."""
    found: list[str] = []

    def note(storage: Any, location: str) -> Any:
        found.append(location)
        return storage

    torch.load(path, map_location=note, weights_only=True)
    return found


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "a.pth"
    value = {name: torch.ones(2) for name in "abcd"} | {"note": "cuda:1"}
    with tagged("cuda:0", "cuda:1", "cpu", "cuda:1"):
        torch.save(value, path, _use_new_zipfile_serialization=request.param)
    return path


def test_all_to_one(source: Path, tmp_path: Path) -> None:
    result = ckptfix.map_location(source, tmp_path / "b.pth", "cpu")
    assert seen(tmp_path / "b.pth") == ["cpu"] * 4
    assert result.moved == {("cuda:0", "cpu"): 1, ("cuda:1", "cpu"): 2}
    assert result.kept == {"cpu": 1}
    assert torch.load(tmp_path / "b.pth", weights_only=True)["note"] == "cuda:1"


def test_a_swap_is_simultaneous(source: Path, tmp_path: Path) -> None:
    ckptfix.map_location(source, tmp_path / "b.pth", {"cuda:0": "cuda:1", "cuda:1": "cuda:0"})
    assert seen(tmp_path / "b.pth") == ["cuda:1", "cuda:0", "cpu", "cuda:0"]
    ckptfix.map_location(tmp_path / "b.pth", tmp_path / "c.pth", {"cuda:0": "cuda:1", "cuda:1": "cuda:0"})
    assert seen(tmp_path / "c.pth") == seen(source)


@pytest.mark.slow
def test_one_memoised_tag_for_a_thousand_storages_and_a_value(tmp_path: Path) -> None:
    tag = "cuda:3"
    value: dict[str, Any] = {"before": tag, **{str(index): torch.ones(1) for index in range(1000)}, "after": [tag, tag]}
    path = tmp_path / "a.pth"
    with tagged(*[tag] * 1000):
        torch.save(value, path)
    ckptfix.map_location(path, tmp_path / "b.pth", "cpu")
    loaded = torch.load(tmp_path / "b.pth", weights_only=True)
    assert (loaded["before"], loaded["after"]) == (tag, [tag, tag])
    assert seen(tmp_path / "b.pth") == ["cpu"] * 1000


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("device", "target", "expected"),
    [
        ("cuda:1", "cpu", "cpu"),
        ("cuda:1", "cuda:0", "cuda:0"),
        ("cuda", "cuda:2", "cuda:2"),
        ("cpu", "cuda:3", "cuda:3"),
        ("cuda:2", "mps", "mps"),
    ],
)
def test_torch_device_values(tmp_path: Path, protocol: int, device: str, target: str, expected: str) -> None:
    path = tmp_path / "a.pth"
    value = [torch.device(device), torch.device(device), "cuda", torch.ones(1)]
    torch.save(value, path, pickle_protocol=protocol)
    ckptfix.map_location(path, tmp_path / "b.pth", target)
    loaded = torch.load(tmp_path / "b.pth", weights_only=False, map_location=lambda storage, tag: storage)
    assert loaded[:3] == [torch.device(expected), torch.device(expected), "cuda"]


def test_sources_that_are_not_there_are_reported(source: Path, tmp_path: Path) -> None:
    result = ckptfix.map_location(source, tmp_path / "b.pth", {"cuda:7": "cpu"})
    assert (tmp_path / "b.pth").read_bytes() == source.read_bytes()
    assert [finding.id for finding in result.findings] == ["no-such-location"]
    assert "cuda:0" in result.findings[0].message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cud:0", "cuda:0"),
        ("gpu", "cuda"),
        ("GPU:3", "cuda:3"),
        ("cuda1", "cuda:1"),
        ("cuda:", "cuda"),
        ("cuda:x", "cuda"),
        ("CPU", "cpu"),
        ("", "devices are"),
        ("cuda:0:1", "cuda:0"),
        ("cuda:99999", "cuda"),
        ("\n", "devices are"),
    ],
)
def test_devices_that_do_not_exist(source: Path, tmp_path: Path, name: str, meant: str) -> None:
    with pytest.raises(Refused, match="no such device") as caught:
        ckptfix.map_location(source, tmp_path / "b.pth", name)
    assert meant in (caught.value.hint or "")


def test_cpu_has_no_index(source: Path, tmp_path: Path) -> None:
    ckptfix.map_location(source, tmp_path / "b.pth", "cpu:0")
    assert set(seen(tmp_path / "b.pth")) == {"cpu"}


def test_what_no_edit_reaches_is_listed(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    path = tmp_path / "a.pth"
    mesh = DeviceMesh.__new__(DeviceMesh)
    mesh.__dict__["_device_type"] = "cuda"
    torch.save({"mesh": mesh, "a": torch.ones(1)}, path)
    result = ckptfix.map_location(path, tmp_path / "b.pth", "cuda:0")
    assert [finding.id for finding in result.findings] == ["fixed-device"]
    assert "DeviceMesh of cuda" in result.findings[0].message


def test_to_cpu_is_a_function_too(tmp_path: Path) -> None:
    source, out = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save({"w": torch.ones(2, device="meta"), "v": torch.ones(2)}, source)
    assert ckptfix.to_cpu(source, out, dry_run=True).written is False
    assert not out.exists()
    assert ckptfix.to_cpu(source, out).moved == ckptfix.map_location(source, out, "cpu", force=True).moved

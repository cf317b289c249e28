"""Checkpoints on a hub, by ranges, against its endpoints on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from property.verbs import run_command
from stores import Hub

import ckptfix
from ckptfix.errors import NoSuchFile, Refused, Unsupported
from ckptfix.io.remote.hub import RepoEntry, placed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("stores")


@pytest.fixture
def model(hub: Hub, tmp_path: Path) -> Path:
    """A file of 2 MB, which is in the repository ``org/model``, where large files redirect."""
    torch.save({"module.w": torch.arange(1 << 18)}, tmp_path / "model.pth")
    hub.repo["org/model/sub/model.pth"] = (tmp_path / "model.pth").read_bytes()
    hub.large.add("org/model/sub/model.pth")
    return tmp_path / "model.pth"


@pytest.mark.parametrize("rev", ["", "@main"])
def test_a_header_is_some_ranges_of_one_commit(hub: Hub, model: Path, rev: str) -> None:
    url = f"hf://org/model{rev}/sub/model.pth"
    seen = ckptfix.inspect(url)
    assert (seen.path, seen.tensors) == (url, 1)
    assert hub.traffic.down < 300_000
    paths = [path for _, path, _, _ in hub.traffic.calls]
    assert sum("/resolve/" in path for path in paths) == 1  # what follows goes to where it was redirected
    ranges = [row for row in hub.seen if "Range" in row]
    assert [row.get("Authorization") for row in ranges] == ["Bearer hf_t0ken", *([None] * (len(ranges) - 1))]


def test_an_address_that_expires_is_asked_for_again(hub: Hub, model: Path) -> None:
    url = "hf://org/model/sub/model.pth"
    checkpoint = ckptfix.diff(url, model)
    assert checkpoint.same
    hub.traffic.clear()
    before = hub.answer

    def expire(handler: object, path: str) -> bool:
        if path.startswith("/cdn/") and hub.traffic.requests > 2:  # the first range has come
            hub.expired = 2  # the address of the diff before, and that of this one
        return before(handler, path)  # type: ignore[arg-type]

    hub.fault = expire
    assert ckptfix.diff(url, model).same
    again = [path for _, path, _, _ in hub.traffic.calls if "/resolve/" in path]
    assert again  # as many again as ranges were on their way
    assert all(f"/resolve/{hub.COMMIT}/" in path for path in again[1:])


def test_a_whole_repository_is_a_folder(hub: Hub, tmp_path: Path) -> None:
    torch.save({f"layer{number}": torch.full((300,), float(number)) for number in range(4)}, tmp_path / "x.pth")
    ckptfix.convert(tmp_path / "x.pth", tmp_path / "shards", to="hf", shard_size=3000)
    for path in (tmp_path / "shards").iterdir():
        hub.repo[f"org/shards/{path.name}"] = path.read_bytes()
    hub.repo["org/shards/README.md"] = b"# Hi"
    assert ckptfix.inspect("hf://org/shards").tensors == 4
    assert len([path for _, path, _, _ in hub.traffic.calls if "/tree/" in path]) == 1
    assert ckptfix.diff("hf://org/shards@main", tmp_path / "shards").same
    ckptfix.add_module("hf://org/shards", tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_bytes() == b"# Hi"
    hub.repo["org/data/m/x.pth"] = (tmp_path / "x.pth").read_bytes()
    assert ckptfix.inspect("hf://datasets/org/data/m").tensors == 4


def test_what_is_not_there(hub: Hub, model: Path) -> None:
    for url in ("hf://org/model/none.pth", "hf://org/none", "hf://org/model@nowhere/sub/model.pth"):
        with pytest.raises(NoSuchFile) as raised:
            ckptfix.inspect(url)
        assert raised.value.path == url
    with pytest.raises(Unsupported, match="names no repository"):
        ckptfix.inspect("hf://org.pth")
    with pytest.raises(Refused, match="read-only"):
        ckptfix.strip_module(model, "hf://org/model/out.pth")
    outcome = run_command(("inspect", "hf://org/model/none.pth"))
    assert outcome.code == 2 and "t0ken" not in outcome.stderr + outcome.stdout


def test_names() -> None:
    assert placed("hf://o/r/a/b.pth") == RepoEntry("model", "o/r", "main", "a/b.pth")
    assert placed("hf://datasets/o/r@v1.0/b") == RepoEntry("dataset", "o/r", "v1.0", "b")
    assert placed("hf://o/r@refs/pr/3/b/c") == RepoEntry("model", "o/r", "refs/pr/3", "b/c")
    assert placed("hf://spaces/o/r") == RepoEntry("space", "o/r", "main", "")

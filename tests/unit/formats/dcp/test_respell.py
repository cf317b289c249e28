"""Names changed in the text of a `.metadata`: what torch unpickles is what an edit of all of its nodes would give."""

from __future__ import annotations

import pickle
import random
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from dcp_pickles import PATHS, as_saved, named, random_keys
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckptfix.checkpoint import Rename
from ckptfix.formats.dcp import metadata as dcp_metadata
from ckptfix.formats.dcp import pickled
from ckptfix.formats.dcp.edit import edited
from ckptfix.formats.dcp.metadata import StorageInfo
from ckptfix.formats.dcp.pickled import EditedKey, rewritten
from ckptfix.formats.dcp.respell import Moves, respelled


def both(data: bytes, rows: list[EditedKey], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What torch reads after an edit of the text, and after one of the nodes."""
    names = {row.saved.fqn: (row.fqn(True), row.path) for row in rows if row.path != row.saved.path}
    made = respelled(data, names, Moves({row.saved.fqn: row.place for row in rows if row.place}, {}))
    assert made is not None
    monkeypatch.setattr(pickled, "respelled", lambda *args: None)
    return pickle.loads(made), pickle.loads(rewritten(dcp_metadata.understood(data, "x"), rows, {}))


def stripped(data: bytes) -> list[EditedKey]:
    said = dcp_metadata.understood(data, "x")
    rows = [EditedKey(saved, saved.path) for saved in said.saved]
    for row in rows:
        row.path = tuple(key.removeprefix("module.") if isinstance(key, str) else key for key in row.path)
    return rows


@pytest.mark.slow
def test_names_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    data = as_saved({named(path): path for path in PATHS})
    rows = stripped(data)
    for number, row in enumerate(rows[-3:]):
        row.place = StorageInfo("__2_0.distcp", 3_000_000_000 * number, 70_000)
    one, other = both(data, rows, monkeypatch)
    assert one == other and list(one.planner_data) == list(other.planner_data)
    assert "model.blocks.7.weight" in one.state_dict_metadata and "step" in one.planner_data
    assert one.storage_data[MetadataIndex("step")] == _StorageInfo("__2_0.distcp", 6_000_000_000, 70_000)


@pytest.mark.parametrize("first", range(2))
def test_the_first_item_that_moves_is_pushed_otherwise(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[tuple[str | int, ...]] = [("a",), ("b",), ("c",)]
    data = as_saved({named(path): path for path in paths})
    rows = stripped(data)
    rows[first].place = StorageInfo("new", 5, 6)
    one, other = both(data, rows, monkeypatch)
    assert one == other and one.storage_data[MetadataIndex("abc"[first])] == _StorageInfo("new", 5, 6)


def test_one_string_in_two_roles_is_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is one object in memory is pushed once, and fetched where another name has a part that is the same."""
    shared = "module.weight"
    paths: dict[str, tuple[str | int, ...]] = {
        shared: (shared,),
        "model." + shared: ("model", shared),
        **{f"more.{number}.{shared}": ("more", number, shared) for number in range(40)},
    }
    data = as_saved(paths, values=0)
    said = dcp_metadata.understood(data, "x")
    rows = edited(said, [Rename("model", "state_dict", {shared: "weight"})])
    one, other = both(data, rows, monkeypatch)
    assert one == other
    assert one.planner_data["model.weight"] == ("model", "weight")
    assert one.planner_data[shared] == (shared,) and one.planner_data[f"more.9.{shared}"] == ("more", 9, shared)


ATTRIBUTES = ["size", "chunks", "properties", "fqn", "offset", "index", "relative_path", "length", "sizes", "offsets"]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_name_that_an_attribute_has_too_is_left_to_the_nodes(name: str) -> None:
    """The string is one object for pickle: the attribute is fetched from where the name was pushed."""
    paths: dict[str, tuple[str | int, ...]] = {name: (name,), **{f"k{number}": (f"k{number}",) for number in range(40)}}
    data = as_saved(paths, values=1)
    said = dcp_metadata.understood(data, "x")
    made = pickle.loads(rewritten(said, edited(said, [Rename("", "state_dict", {name: "other"})]), {}))
    wanted = pickle.loads(as_saved({"other" if key == name else key: path for key, path in paths.items()}, values=1))
    wanted.planner_data["other"] = ("other",)
    assert made == wanted


def test_what_folders_of_torch_have(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = 0
    for path in saved.rglob(".metadata"):
        data = path.read_bytes()
        said = dcp_metadata.understood(data, "x")
        if not said.nested:
            continue
        rows = [EditedKey(row, (*row.path[:-1], f"{row.path[-1]}.x")) for row in said.saved]
        if any(isinstance(row.path[-1], int) for row in said.saved):
            assert respelled(data, {row.saved.fqn: (row.fqn(True), row.path) for row in rows}, Moves({}, {})) is None
            continue
        found += 1
        with monkeypatch.context() as patch:
            one, other = both(data, rows, patch)
        assert one == other
    assert found > 2


def renamed(key: str | int, old: str) -> str | int:
    return key if isinstance(key, int) else key.replace(old, "new")


@pytest.mark.slow
def test_random_keys_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place or not: what comes out is the same, and most is done in place."""
    rng = random.Random(7)
    done: list[bool] = []

    def counted(*args: Any) -> bytes | None:
        made = respelled(*args)
        done.append(made is not None)
        return made

    for _ in range(80):
        data = as_saved(random_keys(rng), values=rng.randint(0, 2))
        old = rng.choice("amsx")
        results = []
        for way in (counted, lambda *args: None):
            monkeypatch.setattr(pickled, "respelled", way)
            said = dcp_metadata.understood(data, "x")
            rows = [EditedKey(saved, tuple(map(renamed, saved.path, repeat(old)))) for saved in said.saved]
            if len({row.fqn(True) for row in rows}) < len(rows):
                break
            results.append(pickle.loads(rewritten(said, rows, {})))
        if results:
            assert results[0] == results[1]
    assert len(done) > 40 and sum(done) > 0.6 * len(done)

"""Keys left out of the text of a `.metadata`: what torch unpickles is what it was, without them."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_pickles import PATHS, as_saved, named, random_keys
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from torch_versions import ALONE

import ckptfix
from ckptfix.checkpoint import ByteRange, Drop, OutputFile, Plan
from ckptfix.formats import open_checkpoint
from ckptfix.formats.dcp import pickled
from ckptfix.formats.dcp.cut import without
from ckptfix.formats.dcp.edit import keeps_all, plan_edit
from ckptfix.formats.dcp.skim import Skimmer, opcodes_of


def left(data: bytes, gone: Collection[str]) -> Any:
    """What there is without these keys."""
    said = pickle.loads(data)
    for rows in (said.state_dict_metadata, said.planner_data or {}):
        for name in gone & rows.keys():
            del rows[name]
    said.storage_data = {index: info for index, info in said.storage_data.items() if index.fqn not in gone}
    return said


def assert_without(data: bytes, gone: Collection[str]) -> None:
    made = without(data, gone)
    assert made is not None
    found, wanted = pickle.loads(made), left(data, gone)
    assert found == wanted
    for rows in ("state_dict_metadata", "planner_data", "storage_data"):
        assert list(getattr(found, rows) or ()) == list(getattr(wanted, rows) or ())
    # What an edit of names needs of it is there, too.
    assert gone == set(left(data, ()).state_dict_metadata) or without(made, {next(iter(found.state_dict_metadata))})


@pytest.mark.slow
@pytest.mark.sampled(1, test_all=3)
@pytest.mark.parametrize("step", (2, 3, 50))
@pytest.mark.parametrize("first", range(2))
def test_some_of_many_keys(step: int, first: int) -> None:
    data = as_saved({named(path): path for path in PATHS})
    assert_without(data, {named(path) for path in PATHS[first::step]})
    assert_without(data, {named(path) for path in PATHS} - {named(path) for path in PATHS[first::step]})


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("nested", (True, False))
def test_whole_batches_and_all(nested: bool) -> None:
    """A pickle sets 1,000 entries at a time, and a last one by itself."""
    names = [f"a.{number}" for number in range(2001)]
    data = as_saved({name: (name,) for name in names}, values=0, nested=nested)
    for gone in ({*names[:1000]}, {names[-1]}, {*names}):
        assert_without(data, gone)


def test_random_keys() -> None:
    rng = random.Random(5)
    for _ in range(60):
        keys = random_keys(rng)
        data = as_saved(keys, values=rng.randint(0, 2), nested=rng.random() < 0.9)
        assert_without(data, {name for name in keys if rng.random() < 0.5} or {next(iter(keys))})


def test_what_was_one_object_is_one() -> None:
    """What the first of several keys made, and others have too, is made where it is fetched first."""
    said = pickle.loads(as_saved({name: (name,) for name in "abcdefgh"}, values=0))
    keys = said.state_dict_metadata
    for first, *others in (("b", "e", "g"), ("f", "h")):
        for name in others:
            keys[name].properties = keys[first].properties
            keys[name].size = keys[first].size
            keys[name].chunks[1].offsets = keys[first].chunks[1].offsets
    data = pickle.dumps(said)
    made = without(data, {"a", "b", "f"})
    assert made is not None
    found = pickle.loads(made).state_dict_metadata
    assert found == left(data, {"a", "b", "f"}).state_dict_metadata
    for attribute in ("properties", "size"):
        one, other, third = (getattr(found[name], attribute) for name in "egh")
        assert one is other and one is not third
    assert found["e"].chunks[1].offsets is found["g"].chunks[1].offsets


@pytest.mark.slow
def test_a_key_of_many_chunks() -> None:
    """More opcodes in an entry than are copied as one, and numbers that the memo gives behind 256 and 65,536."""
    said = pickle.loads(as_saved({name: (name,) for name in "abc"}, values=0))
    for name in "abc":
        entry = said.state_dict_metadata[name]
        entry.chunks = [type(entry.chunks[0])(torch.Size((row, 0)), torch.Size((1, 5))) for row in range(1500)]
    data = pickle.dumps(said)
    assert_without(data, {"a", "c"})


def test_what_is_written_otherwise_is_left_to_the_nodes() -> None:
    data = as_saved({"a": ("a",), "b": ("b",), "c": ("c",)}, values=0)
    said = pickle.loads(data)
    assert without(data[:-9], {"a"}) is None
    assert without(pickle.dumps(said, 2), {"a"}) is None
    said.state_dict_metadata["c"] = said.state_dict_metadata["b"]
    assert without(pickle.dumps(said), {"a"}) is None


def test_the_machine_that_reads_is_gone_when_it_is_done() -> None:
    """The collector rests while folders are read: what holds itself would stay."""
    opcodes = opcodes_of(as_saved({"a": ("a",)}))
    assert opcodes is not None
    gc.disable()
    try:
        reader = Skimmer(*opcodes)
        reader.run()
        ref = weakref.ref(reader)
        del reader
        assert ref() is None
    finally:
        gc.enable()


def folder_of(path: Path) -> Path:
    """A folder of ten tensors and a value in one file, in which one item is of no key."""
    tensors = {f"a.{number}": torch.full((4,), float(number)) for number in range(10)}
    state = {**tensors, "step": 3, "lost": torch.ones(2)}
    save({"model": state}, checkpoint_id=path, **ALONE)
    said: Metadata = pickle.loads((path / ".metadata").read_bytes())
    del said.state_dict_metadata["model.lost"]
    assert said.planner_data is not None
    del said.planner_data["model.lost"]
    (path / ".metadata").write_bytes(pickle.dumps(said))
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", (True, False))
def test_items_move_up(text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an item that belongs to no key too; the same in the text and in the nodes."""
    source = folder_of(tmp_path / "in")
    edited = pickled._edited_text
    done: list[bytes | None] = []

    def counted(*args: Any) -> bytes | None:
        done.append(edited(*args))
        return done[-1] if text else None

    monkeypatch.setattr(pickled, "_edited_text", counted)
    ckptfix.select(source, tmp_path / "out", drop=["a.[02468]"])
    assert all(made is not None for made in done) and done
    old = (source / "__0_0.distcp").read_bytes()
    new = (tmp_path / "out/__0_0.distcp").read_bytes()
    items = pickle.loads((source / ".metadata").read_bytes()).storage_data
    moved = pickle.loads((tmp_path / "out/.metadata").read_bytes()).storage_data
    assert {index.fqn for index in items if index not in moved} == {f"model.a.{number}" for number in range(0, 10, 2)}
    assert MetadataIndex("model.lost", [0]) in moved and len(new) < len(old)
    for index, info in moved.items():
        was: _StorageInfo = items[index]
        assert new[info.offset : info.offset + info.length] == old[was.offset : was.offset + was.length]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", [((0, 0), (4,)), ((0,), (4, 1)), ((), ()), ((0, 0), (2, 2))])
def test_an_edit_names_a_chunk_of_other_dimensions(
    wrong: tuple[tuple[int, ...], tuple[int, ...]], tmp_path: Path
) -> None:
    said: Metadata = pickle.loads((folder_of(tmp_path / "in") / ".metadata").read_bytes())
    entry: Any = said.state_dict_metadata["model.a.3"]
    entry.chunks[0].offsets, entry.chunks[0].sizes = map(torch.Size, wrong)
    (tmp_path / "in/.metadata").write_bytes(pickle.dumps(said))
    done = ckptfix.add_module(tmp_path / "in", tmp_path / "out")
    assert done.exit_code == 3 and "model/a.3" in str(done)


def test_the_law_looks_where_each_item_comes_from(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_of(tmp_path / "in"))
    plan = plan_edit(checkpoint, [Drop("model", ("a.0", "a.3"))], str(tmp_path / "out"))
    assert keeps_all(checkpoint, plan, {"model/a.0", "model/a.3"})
    assert not keeps_all(checkpoint, plan, {"model/a.0"}) and not keeps_all(checkpoint, plan)
    data, *others = plan.files
    first, second, *rest = data.segments
    assert isinstance(first, ByteRange) and isinstance(second, ByteRange)
    shifted = ByteRange(first.path, first.offset + 64, first.length)
    for wrong in ([shifted, second], [b"x" * first.length, second], [second, first]):
        changed = OutputFile.of(data.path, [*wrong, *rest])
        assert changed.nbytes == data.nbytes
        assert not keeps_all(checkpoint, Plan((changed, *others)), {"model/a.0", "model/a.3"})

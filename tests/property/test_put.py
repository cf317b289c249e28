"""Put over random state dicts: exactly the tensors that were asked for, and all else as it was."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import tensor_bytes
from contract.samples import SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import DTYPES
from strategies import SHAPES

from ckptfix.checkpoint import Derived, Put, Storage, TensorEntry, reshaped
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.io import write as io_write
from ckptfix.ops.audit import audit
from ckptfix.ops.audit.promise import Promise

NAMES = ("a.weight", "a.bias", "b.weight", "c", "d.0.w")
BOTH = tuple(name for name in DTYPES[:12] if name != "complex128")
"""Dtypes that every format holds."""

COMPLEX = ("complex128", "complex64")


def filled(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bits."""
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (count * kind.itemsize,), generator=torch.Generator().manual_seed(seed))
    raw = bits.to(torch.uint8)
    return ((raw > 127) if dtype == "bool" else raw.view(kind)).reshape(shape)


def entry_of(value: torch.Tensor) -> TensorEntry:
    """The tensor as bytes in memory, somewhere in a larger storage."""
    raw = tensor_bytes(value)
    dtype = str(value.dtype).removeprefix("torch.")
    before = 2 * value.dtype.itemsize
    content = bytes(before) + raw + bytes(value.dtype.itemsize)
    data = Derived(len(content), lambda: (content,), "test")
    storage = Storage("new", dtype, len(content), "cpu", data)
    return TensorEntry("x", "", storage, dtype, tuple(value.shape), value.stride(), offset=2)


def groups(state: Mapping[str, torch.Tensor], names: set[str]) -> set[frozenset[str]]:
    """The names that share memory, of these."""
    found: dict[int, set[str]] = {}
    for name in names:
        if state[name].numel():
            found.setdefault(state[name].untyped_storage().data_ptr(), set()).add(name)
    return {frozenset(group) for group in found.values()}


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, ...], views: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state dict, and name -> what to put there: a tensor, or a new shape."""
    state: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))):
        if views and state and draw(st.booleans()):
            base = state[draw(st.sampled_from(sorted(state)))]
            state[name] = base if draw(st.booleans()) or not base.ndim else base[1:]
        else:
            state[name] = filled(draw(st.sampled_from(dtypes)), draw(SHAPES), seed)
    puts: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(sorted(state)), min_size=1, unique=True)):
        value = state[name]
        alone = sum(other is value for other in state.values()) == 1
        how = draw(st.sampled_from(["shape", "bytes", "any"]))
        if how == "shape" and alone and value.is_contiguous():
            puts[name] = (value.numel(), 1)
        else:
            dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
            if how == "any":
                dtype, shape = draw(st.sampled_from(dtypes)), draw(SHAPES)
            puts[name] = filled(dtype, shape, draw(st.integers(100, 10_000)))
    return state, puts


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SAMPLES if FORMATS[name].edits])
@settings(max_examples=60)
@given(data=st.data())
def test_a_file_holds_what_was_put_and_all_else(name: str, data: st.DataObject) -> None:
    sample = SAMPLES[name]
    state, puts = data.draw(cases(BOTH if name == "safetensors" else (*BOTH, *COMPLEX), name != "safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, f"in{sample.suffix}"), Path(folder, f"out{sample.suffix}")
        sample.save(state, path)
        before = sample.load(path)
        checkpoint = open_checkpoint(path)
        entries = {entry.key: entry for entry in checkpoint.entries}
        tensors = {
            key: reshaped(entries[key], new) if isinstance(new, tuple) else entry_of(new) for key, new in puts.items()
        }
        plan = FORMATS[name].plan_edit(checkpoint, [Put("", tensors)], str(out))
        promise = Promise(names_stay=False, edited=checkpoint, puts=tensors)
        plan, account = audit(promise, plan, name)
        io_write.write_plan(plan)
        assert account.lost == () and account.left == ()
        after = sample.load(out)
        assert set(after) == set(before)
        for key, new in puts.items():
            wanted = before[key].reshape(new) if isinstance(new, tuple) else new
            assert (after[key].dtype, after[key].shape) == (wanted.dtype, wanted.shape)
            assert tensor_bytes(after[key]) == tensor_bytes(wanted)
        others = set(before) - set(puts)
        for key in others:
            assert (after[key].dtype, after[key].shape) == (before[key].dtype, before[key].shape)
            assert after[key].stride() == before[key].stride()
            assert tensor_bytes(after[key]) == tensor_bytes(before[key])
        assert groups(after, others) == groups(before, others)
        assert list(FORMATS[name].check(str(out))) == []


@pytest.mark.parametrize("name", [name for name in SAMPLES if FORMATS[name].edits])
def test_the_law_names_what_was_not_put(name: str, tmp_path: Path) -> None:
    """The plan puts a tensor; the promise is of another dtype, of another name, or of nothing."""
    path = tmp_path / "in"
    SAMPLES[name].save({"a": torch.zeros(2), "b": torch.ones(4)}, path)
    checkpoint = open_checkpoint(path)
    entry = entry_of(torch.arange(5.0))
    other = entry_of(torch.arange(5).to(torch.int32))
    for put, promised, lost in (
        ({"a": entry}, {"a": entry}, ()),
        ({"a": entry}, {"a": other}, ("a",)),
        ({"a": entry}, {"b": entry}, ("a",)),
        ({"a": entry}, {}, ("a",)),
        ({"a": entry, "b": other}, {"a": entry, "b": entry}, ("b",)),
    ):
        plan = FORMATS[name].plan_edit(checkpoint, [Put("", put)], str(tmp_path / "out"))
        _, account = audit(Promise(names_stay=False, edited=checkpoint, puts=promised), plan, name)
        assert account.lost == lost


@pytest.mark.parametrize("name", ["zip", "legacy"])
def test_entries_on_one_storage_are_tied(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    tied = torch.arange(3)
    sample.save({"a": torch.zeros(2), "b": torch.ones(4), "c": tied, "d": tied, "e": tied[1:]}, path)
    checkpoint = open_checkpoint(path)
    entry = entry_of(torch.arange(5.0))
    of_file = next(entry for entry in checkpoint.entries if entry.key == "c")
    edit = Put("", {"a": entry, "b": entry, "d": of_file, "e": of_file})
    plan = FORMATS[name].plan_edit(checkpoint, [edit], str(out))
    io_write.write_plan(plan)
    found = sample.load(out)
    assert torch.equal(found["a"], torch.arange(5.0)) and torch.equal(found["e"], tied)
    assert groups(found, set(found)) == {frozenset("ab"), frozenset("cde")}


def test_what_is_tied_in_the_metadata_changes_with_it_or_not_at_all(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    import ckptfix
    from ckptfix.errors import Unsupported

    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"a": torch.zeros(2), "c": torch.ones(3)}, path, metadata={"format": "pt", "b": "a"})
    entry = entry_of(torch.arange(5.0))
    for name in "ab":
        with pytest.raises(Unsupported, match="is tied to"):
            FORMATS["safetensors"].plan_edit(open_checkpoint(path), [Put("", {name: entry})], str(out))
    plan = FORMATS["safetensors"].plan_edit(open_checkpoint(path), [Put("", {"a": entry, "b": entry})], str(out))
    io_write.write_plan(plan)
    assert torch.equal(load_file(out)["a"], torch.arange(5.0)) and torch.equal(load_file(out)["c"], torch.ones(3))
    state = ckptfix.load_state_dict(out)
    assert torch.equal(state["b"], torch.arange(5.0)) and state["b"].data_ptr() == state["a"].data_ptr()

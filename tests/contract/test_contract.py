"""What every format that is written must do; a format has no tests of its own before it passes these.

Those that are only read have `test_read_only`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from compare import tensor_bytes
from contract.samples import SAMPLES
from kinds import DTYPES, of_dtype, tensor
from ranges import read_exact

from ckptfix import errors
from ckptfix.checkpoint import (
    ByteRange,
    Derived,
    Drop,
    Edit,
    OutputFile,
    Plan,
    Put,
    Rename,
    SetLocation,
    Storage,
    TensorEntry,
    reshaped,
)
from ckptfix.formats import FORMATS, detect, open_checkpoint
from ckptfix.formats.base import Aspect
from ckptfix.io import write as io_write

pytestmark = pytest.mark.parametrize("name", [name for name in SAMPLES if FORMATS[name].writes])


def states(name: str, *aspects: Aspect) -> bool:
    return FORMATS[name].states.issuperset(aspects)


def state_of(name: str) -> dict[str, torch.Tensor]:
    """A little of everything that all formats can hold."""
    state = {f"module.{dtype}": of_dtype(dtype) for dtype in DTYPES[:10]}
    state |= {"module.scalar": torch.tensor(1.5), "module.empty": torch.empty(0, 3), "module.é": tensor(2)}
    if states(name, "sharing", "stride", "requires_grad"):
        base = tensor(4, 6)
        state |= {"module.base": base, "module.part": base[1:, ::2], "module.grad": tensor(2).requires_grad_()}
    return state


def made(name: str, folder: Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    sample = SAMPLES[name]
    path = folder / f"in{sample.suffix}"
    sample.save(state_of(name) if state is None else state, path)
    return path


def write(plan: Plan) -> Path:
    io_write.write_plan(plan)
    return Path(plan.files[-1].path)


def edited(name: str, path: Path, *edits: Edit) -> Path:
    checkpoint = open_checkpoint(path)
    return write(FORMATS[name].plan_edit(checkpoint, edits, str(path.with_name("out"))))


def test_every_format_has_a_sample(name: str) -> None:
    # An archive is no state dict by itself: test_archives and test_parallel have such files, test_programs programs.
    # test_arrays has those of other frameworks' files, which have no objects.
    programs = {one for one, format in FORMATS.items() if format.program}
    arrays = {one for one in FORMATS if not (FORMATS[one].writes or FORMATS[one].folder or states(one, "objects"))}
    files = {one for one, format in FORMATS.items() if not format.folder}
    assert files == {*SAMPLES, "archive", "nemo-archive", *programs, *arrays}
    assert len(programs) == 2
    format = FORMATS[name]
    assert name == format.name and format.title and all(suffix[0] == "." for suffix in format.suffixes)


def test_it_states_what_it_says(name: str, tmp_path: Path) -> None:
    """Of tensors that have all that a format may state, a file keeps what its `states` lists, no less and no more."""
    base = tensor(4, 6)
    state = {"v": base, "u": base[1:, ::2], "t": torch.nn.Parameter(tensor(2)), "s": tensor(2).requires_grad_()}
    path = made(name, tmp_path, state)
    checkpoint = open_checkpoint(path)
    found = {entry.key: entry for entry in checkpoint.entries}
    storages = {key: entry.storage for key, entry in found.items() if entry.storage is not None}
    moved = open_checkpoint(edited(name, path, SetLocation({"cpu": "cuda:3"})))
    kept: dict[Aspect, bool] = {
        "device": moved.entries[0].location == "cuda:3",
        "requires_grad": found["s"].requires_grad,
        "parameter": found["t"].parameter,
        "stride": not found["u"].is_contiguous,
        "sharing": storages["v"].identity == storages["u"].identity,
        "order": list(found) == list(state),
        "metadata": bool(checkpoint.metadata),
        "checksums": all(storage.crc32 is not None for storage in storages.values()),
    }
    assert {aspect for aspect, held in kept.items() if held} == FORMATS[name].states - {"objects", "detail"}
    if states(name, "objects"):
        torch_file = tmp_path / "object"
        SAMPLES[name].save({"epoch": 3, "model": state}, torch_file)  # type: ignore[dict-item]
        assert [entry.at for entry in open_checkpoint(torch_file).entries] == ["model"] * 4
        assert dict(open_checkpoint(torch_file).values()) == {"epoch": 3}


def test_what_it_refuses_it_does_not_write(name: str, tmp_path: Path) -> None:
    path = made("zip", tmp_path, {"dense": tensor(2), "sparse": torch.eye(3).to_sparse()})
    entries = {entry.key: entry for entry in open_checkpoint(path).entries}
    format = FORMATS[name]
    assert format.refuses(entries["dense"]) is None
    if (why := format.refuses(entries["sparse"])) is not None:
        assert "sparse" in why
        with pytest.raises(errors.WouldLoseData):
            format.plan_write([*entries.values()], str(tmp_path / "out"))


def test_weights_are_the_tensors_with_their_ties(name: str, tmp_path: Path) -> None:
    """A fresh file of tied tensors and views gives them back, in their order."""
    base = tensor(4, 6)
    state = {"v": base, "u": base[1:3], "t": base, "s": tensor(2)}
    entries = open_checkpoint(made("zip", tmp_path, state)).entries
    format = FORMATS[name]
    kept, metadata, _ = format.split_ties(entries)
    checkpoint = open_checkpoint(write(format.plan_write(kept, str(tmp_path / "out"), metadata=metadata)))
    for at in (None, ""):
        found = {entry.key: entry for entry in format.weights(checkpoint, at)}
        assert list(found) == list(state)
        assert found["t"] == dataclasses.replace(found["v"], key="t")
        assert found["u"].storage == found["v"].storage and found["u"].offset == 6
    assert format.weights(checkpoint, "elsewhere") == ()
    names = {entry.key for entry in format.weights(checkpoint, views=False)}
    assert names == set(state) == {entry.key for entry in checkpoint.entries} | set(format.ties(checkpoint))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".txt", ".zip", ""])
def test_it_is_found_by_content(name: str, suffix: str, tmp_path: Path) -> None:
    path = made(name, tmp_path).rename(tmp_path / f"other{suffix}")
    assert name == detect(path).name
    head = path.read_bytes()[:4096]
    assert [one for one, format in FORMATS.items() if format.score(str(path), head, path.stat().st_size)] == [name]


def test_entries_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    wanted = SAMPLES[name].load(path)
    entries = {entry.key: entry for entry in open_checkpoint(path).entries}
    assert set(entries) == set(wanted)
    assert not states(name, "order") or list(entries) == list(wanted)
    for key, value in wanted.items():
        entry = entries[key]
        assert (entry.at, entry.dtype, entry.kind) == ("", str(value.dtype).removeprefix("torch."), "dense"), key
        assert (entry.shape, entry.stride) == (tuple(value.shape), value.stride()), key
        assert entry.requires_grad == value.requires_grad and entry.location == "cpu"
        assert entry.offset == value.storage_offset() and entry.storage is not None
        assert not states(name, "sharing") or entry.storage.nbytes == value.untyped_storage().nbytes()


def test_data_are_the_bytes_of_the_tensor(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    wanted = SAMPLES[name].load(path)
    for entry in open_checkpoint(path).entries:
        if entry.is_contiguous:
            assert read_exact(entry.data) == tensor_bytes(wanted[entry.key]), entry.key
        else:
            with pytest.raises(errors.Unsupported):
                _ = entry.data


def test_ties_are_one_storage(name: str, tmp_path: Path) -> None:
    if not states(name, "sharing"):
        pytest.skip("the format has no shared storages")
    base = tensor(4)
    entries = open_checkpoint(made(name, tmp_path, {"a": base, "b": base[1:], "c": tensor(4)})).entries
    one, two, other = (entry.storage for entry in entries)
    assert one is not None and two is not None and other is not None
    assert one.key == two.key != other.key and one.data == two.data


def _bytes_read() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar:"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count the bytes read")
def test_listing_reads_no_tensor_bytes(name: str, tmp_path: Path) -> None:
    """Names, shapes and a plan of a 40 MB file: the process reads next to nothing of it."""
    small = {"module.w": tensor(2), "module.v": tensor(2)}
    large = {"module.w": torch.zeros(5_000_000), "module.v": torch.zeros(5_000_000)}
    for state in (small, large):  # the first run imports what is imported lazily
        path = made(name, tmp_path, state)
        before = _bytes_read()
        checkpoint = open_checkpoint(path)
        assert len(checkpoint.entries) == 2 and list(checkpoint.values()) == []
        rename = Rename("", "state_dict", {"module.w": "w"})
        FORMATS[name].plan_edit(checkpoint, [rename], str(tmp_path / "out"))
        list(FORMATS[name].check(str(path)))
        read = _bytes_read() - before
        path.unlink()
    assert read < SAMPLES[name].ahead


def test_the_plan_refers_to_tensor_bytes(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path, {"module.w": torch.zeros(100_000), "module.v": torch.zeros(100_000)})
    edits = [Rename("", "state_dict", {"module.w": "w"})]
    (file,) = FORMATS[name].plan_edit(open_checkpoint(path), edits, str(tmp_path / "out")).files
    literal = sum(len(segment) for segment in file.segments if isinstance(segment, bytes))
    copied = sum(segment.length for segment in file.segments if isinstance(segment, ByteRange))
    assert literal < 10_000 and copied >= 800_000 and literal + copied == file.nbytes


def test_no_edit_is_the_same_file(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    assert edited(name, path).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("new", ["w", "a much longer name.weight", "é\U0001f600\x1b", "x" * 500])
def test_rename(name: str, new: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    wanted = SAMPLES[name].load(path)
    out = edited(name, path, Rename("", "state_dict", {"module.float32": new}))
    got = SAMPLES[name].load(out)
    names = {key: new if key == "module.float32" else key for key in wanted}
    assert set(got) == set(names.values())
    for old, key in names.items():
        assert tensor_bytes(got[key]) == tensor_bytes(wanted[old])
        assert got[key].stride() == wanted[old].stride()
    assert [entry.key for entry in open_checkpoint(out).entries if entry.key == new] == [new]
    assert list(FORMATS[name].check(str(out))) == []


def test_rename_there_and_back_is_the_same_file(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    there = edited(name, path, Rename("", "state_dict", {"module.float32": "something else"}))
    there = there.rename(tmp_path / "there")
    back = edited(name, there, Rename("", "state_dict", {"something else": "module.float32"}))
    assert back.read_bytes() == path.read_bytes()


def test_drop_where_it_is_offered(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    before = path.read_bytes()
    try:
        out = edited(name, path, Drop("", ("module.float32", "module.bool")))
    except errors.Unsupported:
        assert path.read_bytes() == before and not (tmp_path / "out").exists()
        pytest.skip("the format does not offer it")
    wanted, got = SAMPLES[name].load(path), SAMPLES[name].load(out)
    assert set(wanted) - set(got) == {"module.float32", "module.bool"}
    assert all(tensor_bytes(got[key]) == tensor_bytes(wanted[key]) for key in got)
    assert list(FORMATS[name].check(str(out))) == []


def literal(dtype: str, shape: tuple[int, ...], content: bytes) -> TensorEntry:
    """A contiguous tensor of these bytes."""
    data = Derived(len(content), lambda: (content,), "test")
    stride = torch.empty(shape).stride()
    return TensorEntry("any", "", Storage("any", dtype, len(content), "cpu", data), dtype, shape, stride)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", (2, 3)), ("float32", (6,)), ("int32", (3, 2)), ("uint8", (5,)), ("float64", ()), ("int16", (0, 3))],
)
def test_put_other_bytes(name: str, dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = made(name, tmp_path)
    wanted = SAMPLES[name].load(path)
    new = torch.arange(1, torch.Size(shape).numel() + 1).to(getattr(torch, dtype)).reshape(shape)
    got = SAMPLES[name].load(edited(name, path, Put("", {"module.float32": literal(dtype, shape, tensor_bytes(new))})))
    assert set(got) == set(wanted)
    assert got["module.float32"].dtype == new.dtype and torch.equal(got["module.float32"], new)
    for key in set(wanted) - {"module.float32"}:
        assert tensor_bytes(got[key]) == tensor_bytes(wanted[key]) and got[key].shape == wanted[key].shape
        assert got[key].stride() == wanted[key].stride() and got[key].requires_grad == wanted[key].requires_grad
    assert list(FORMATS[name].check(str(path.with_name("out")))) == []


def test_put_another_shape_moves_no_bytes(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path, {"module.w": torch.arange(100_000.0), "module.v": torch.zeros(100_000)})
    checkpoint = open_checkpoint(path)
    entry = next(entry for entry in checkpoint.entries if entry.key == "module.w")
    plan = FORMATS[name].plan_edit(
        checkpoint, [Put("", {"module.w": reshaped(entry, (50, 2000))})], str(tmp_path / "out")
    )
    assert sum(segment.length for segment in plan.files[0].segments if isinstance(segment, ByteRange)) >= 800_000
    got = SAMPLES[name].load(write(plan))
    assert torch.equal(got["module.w"], torch.arange(100_000.0).reshape(50, 2000))
    assert torch.equal(got["module.v"], torch.zeros(100_000))


def test_put_a_tensor_of_another_file_after_new_names(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = made(name, tmp_path / "other", {"x": torch.arange(7).to(torch.int16)})
    path = made(name, tmp_path, {"module.w": tensor(3), "module.v": tensor(2)})
    wanted = SAMPLES[name].load(path)
    (entry,) = open_checkpoint(other).entries
    edits = (Rename("", "state_dict", {"module.w": "w"}), Put("", {"w": entry}), Drop("", ("module.v",)))
    got = SAMPLES[name].load(edited(name, path, *edits[:2]).rename(tmp_path / "first"))
    assert set(got) == {"w", "module.v"} and torch.equal(got["w"], torch.arange(7).to(torch.int16))
    assert torch.equal(got["module.v"], wanted["module.v"])
    got = SAMPLES[name].load(edited(name, path, *edits))
    assert set(got) == {"w"} and torch.equal(got["w"], torch.arange(7).to(torch.int16))


def test_what_cannot_be_put(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path, {"module.w": tensor(3)})
    bad = literal("float32", (4,), bytes(8))
    meta = dataclasses.replace(bad, storage=None, kind="meta")
    for edit, error in (
        (Put("", {"module.w": bad}), errors.DamagedFile),
        (Put("", {"module.w": meta}), errors.Unsupported),
        (Put("", {"absent": literal("float32", (2,), bytes(8))}), errors.NoSuchTensor),
        (Put("deeper", {"module.w": literal("float32", (2,), bytes(8))}), errors.NoSuchTensor),
    ):
        with pytest.raises(error):
            edited(name, path, edit)
    assert not (tmp_path / "out").exists()


def test_move(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    out = edited(name, path, SetLocation({"cpu": "cuda:3"}))
    locations = {entry.location for entry in open_checkpoint(out).entries}
    if not states(name, "device"):  # a format without devices stays as it is
        assert locations == {"cpu"} and out.read_bytes() == path.read_bytes()
    else:
        assert locations == {"cuda:3"}


def test_a_clean_file_has_no_findings(name: str, tmp_path: Path) -> None:
    assert list(FORMATS[name].check(str(made(name, tmp_path)))) == []


def test_a_fresh_file(name: str, tmp_path: Path) -> None:
    """`plan_write` of the entries of every format, read by the library of this one."""
    for source in SAMPLES:
        folder = tmp_path / source
        folder.mkdir()
        path = made(source, folder, {f"module.{dtype}": of_dtype(dtype) for dtype in DTYPES[:10]})
        wanted = SAMPLES[source].load(path)
        entries = open_checkpoint(path).entries
        out = write(FORMATS[name].plan_write(entries, str(folder / "out")))
        got = SAMPLES[name].load(out)
        assert {key: tensor_bytes(value) for key, value in got.items()} == {
            key: tensor_bytes(value) for key, value in wanted.items()
        }
        assert list(FORMATS[name].check(str(out))) == []


def test_sizes_are_promised(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    plan = FORMATS[name].plan_edit(
        open_checkpoint(path), [Rename("", "state_dict", {"module.bool": "b"})], str(tmp_path / "out")
    )
    assert write(plan).stat().st_size == plan.nbytes == sum(file.nbytes for file in plan.files)


def test_nouns_are_frozen(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(made(name, tmp_path))
    with pytest.raises(dataclasses.FrozenInstanceError):
        checkpoint.path = "other"  # type: ignore[misc]
    assert checkpoint.format == name and checkpoint.size == Path(checkpoint.path).stat().st_size


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_a_truncated_file_says_so(name: str, keep: float, tmp_path: Path) -> None:
    """It is listed with findings, or it is an error with the path; the tensors that are gone are not readable."""
    path = made(name, tmp_path, {f"module.{index}": torch.full((1000,), float(index)) for index in range(10)})
    os.truncate(path, int(path.stat().st_size * keep))
    try:
        checkpoint = open_checkpoint(path)
        entries = checkpoint.entries
        assert checkpoint.findings or list(FORMATS[name].check(str(path)))
        lost = 0
        for entry in entries:
            try:
                assert len(read_exact(entry.data)) == 4000
            except errors.CkptfixError:
                lost += 1
        assert len(entries) < 10 or lost
    except errors.CkptfixError as error:
        assert error.path == str(path)


def test_a_range_behind_the_end_is_truncated(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path)
    size = path.stat().st_size
    plan = Plan((OutputFile.of(tmp_path / "out", [ByteRange(str(path), size - 1, 2)]),))
    with pytest.raises(errors.Truncated):
        io_write.write_plan(plan)
    assert sorted(tmp_path.iterdir()) == [path]

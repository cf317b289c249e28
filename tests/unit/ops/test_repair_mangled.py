"""Files that were mangled on their way: what torch says about each, and that it loads after repair."""

from __future__ import annotations

import gzip
import io
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import Record, Tensor, assemble, build_zip, legacy, state_dict_ops, torch_records, torch_zip, written
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ckptfix.errors import DamagedFile, NoMatch, Refused, UnknownFormat, Unsupported
from ckptfix.ops import repair
from ckptfix.ops.repair import RepairResult

VALUE = {"epoch": 3, "model": {"fc.weight": torch.arange(600.0).reshape(30, 20), "fc.bias": torch.ones(30)}}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    torch.save(VALUE, tmp_path / "good.pth")
    return tmp_path / "good.pth"


def same(path: Path, **how: bool) -> bool:
    value = torch.load(path, **how)  # type: ignore[arg-type]
    return (
        value["epoch"] == 3
        and list(value) == list(VALUE)
        and all(torch.equal(value["model"][name], one) for name, one in VALUE["model"].items())  # type: ignore[attr-defined]
    )


def rezipped(
    good: Path, rename: Callable[[str], str], method: int = zipfile.ZIP_STORED, *extra: tuple[str, bytes]
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(out, "w", method) as new:
        for name, data in extra:
            new.writestr(name, data)
        for info in old.infolist():
            new.writestr(rename(info.filename), old.read(info))
    return out.getvalue()


def _crlf(good: Path) -> bytes:
    return good.read_bytes().replace(b"\n", b"\r\n")


def _as_is(name: str) -> str:
    return name


def _outer(inner: bytes, method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("__MACOSX/._good.pth", b"\0" * 20)
        archive.writestr("model/good.pth", inner)
    return out.getvalue()


MANGLED: dict[str, tuple[Callable[[Path], bytes], str, str]] = {
    "no root": (lambda good: rezipped(good, lambda name: name.partition("/")[2]), "subdirectory|version", "wrong-root"),
    "extra level": (
        lambda good: rezipped(good, lambda name: f"Downloads/{name}"), "version|subdirectory", "wrong-root",
    ),
    "macosx": (
        lambda good: rezipped(good, _as_is, zipfile.ZIP_STORED, ("__MACOSX/._good", b"\0"), ("good/.DS_Store", b"x")),
        "version|subdirectory|not in", "",
    ),
    "backslashes": (lambda good: rezipped(good, lambda name: name.replace("/", "\\")), "subdirectory|version", ""),
    "gzip": (lambda good: gzip.compress(good.read_bytes()), "Weights only load failed|invalid load key", "gzip"),
    "zip in zip": (lambda good: _outer(good.read_bytes(), zipfile.ZIP_STORED), "version|subdirectory", "zip-in-zip"),
    "deflated zip in zip": (
        lambda good: _outer(good.read_bytes(), zipfile.ZIP_DEFLATED), "version|subdirectory", "zip-in-zip",
    ),
    "gzip in zip": (
        lambda good: _outer(gzip.compress(good.read_bytes()), zipfile.ZIP_STORED), "version|subdirectory", "gzip",
    ),
    "text mode": (_crlf, "central directory|corrupted|PytorchStreamReader", "text-mode"),
    "junk before": (
        lambda good: b"HTTP/1.1 200 OK\r\n\r\n" + good.read_bytes(), "Weights only load failed", "leading-bytes",
    ),
    "junk after": (lambda good: good.read_bytes() + b"\0" * 70_000, "central directory", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MANGLED)
def test_what_torch_does_not_load_loads_after_repair(good: Path, tmp_path: Path, name: str) -> None:
    make, message, finding = MANGLED[name]
    path = written(tmp_path / "bad.pth", make(good))
    if message:
        with pytest.raises(Exception, match=message):
            torch.load(path)
    result = repair.repair(path, tmp_path / "out.pth")
    assert result.exit_code == 0, result.findings
    assert same(tmp_path / "out.pth")
    assert not finding or finding in {row.id for row in result.findings}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad.pth", "good.pth", "out.pth"], "nothing else is left"


def test_a_deflated_archive_can_be_mapped_afterwards(good: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "bad.pth", rezipped(good, _as_is, zipfile.ZIP_DEFLATED))
    with pytest.raises(Exception, match=r"mmap|compress|range|offset|storage"):
        same(path, mmap=True)
    assert repair.repair(path, tmp_path / "out.pth").exit_code == 0
    assert same(tmp_path / "out.pth", mmap=True)


@pytest.mark.parametrize("below", ["", "one/two"])
def test_an_unzipped_folder(good: Path, tmp_path: Path, below: str) -> None:
    folder = tmp_path / "folder"
    with zipfile.ZipFile(good) as archive:
        archive.extractall(folder / below)
    written(folder / ".DS_Store", b"x")
    with pytest.raises(IsADirectoryError):
        torch.load(folder)
    result = repair.repair(folder, tmp_path / "out.pth")
    assert result.exit_code == 0 and same(tmp_path / "out.pth")
    assert "checksums" in " ".join(result.lines)


def test_a_file_missing_from_the_folder_is_named(good: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(good) as archive:
        archive.extractall(tmp_path / "folder")
    (tmp_path / "folder" / "good" / "data" / "1").unlink()
    result = repair.repair(tmp_path / "folder", tmp_path / "out.pth")
    assert [loss.name for loss in result.losses] == ["model/fc.bias"] and result.exit_code == 3
    shutil.rmtree(tmp_path / "folder" / "good" / "data")
    with pytest.raises(DamagedFile, match="none of its 2 tensors"):
        repair.repair(tmp_path / "folder", tmp_path / "none.pth")
    (tmp_path / "folder" / "good" / "data.pkl").unlink()
    with pytest.raises(DamagedFile, match=r"no data\.pkl"):
        repair.repair(tmp_path / "folder", tmp_path / "none.pth")


def test_a_legacy_file_that_was_cut_short(tmp_path: Path) -> None:
    torch.save(VALUE, tmp_path / "in.pth", _use_new_zipfile_serialization=False)
    path = written(tmp_path / "bad.pth", (tmp_path / "in.pth").read_bytes()[:-50])
    with pytest.raises(RuntimeError, match="unexpected EOF"):
        torch.load(path)
    result = repair.repair(path, tmp_path / "out.pth")
    assert len(result.losses) == 1 and result.exit_code == 3
    (lost,) = (loss.name for loss in result.losses)
    again = torch.load(tmp_path / "out.pth")
    assert again["epoch"] == 3 and set(again["model"]) | {lost.removeprefix("model/")} == {"fc.weight", "fc.bias"}
    repair.repair(path, tmp_path / "full.pth", fill_from=tmp_path / "in.pth")
    assert same(tmp_path / "full.pth")


def test_the_root_is_what_checkers_look_for(good: Path, tmp_path: Path) -> None:
    """Loaders that unpickle ``archive/data.pkl`` alone call any other root malicious."""
    with zipfile.ZipFile(good) as archive:
        assert "good/data.pkl" in archive.namelist()
    repair.repair(good, tmp_path / "out.pth")
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert archive.namelist()[0] == "archive/data.pkl" and archive.testzip() is None


def test_a_text_mode_legacy_file_is_reported_and_not_guessed_at(tmp_path: Path) -> None:
    torch.save(VALUE, tmp_path / "in.pth", _use_new_zipfile_serialization=False)
    path = written(tmp_path / "bad.pth", _crlf(tmp_path / "in.pth"))
    with pytest.raises(DamagedFile, match="transferred as text"):
        repair.repair(path, tmp_path / "out.pth")


def test_junk_before_a_legacy_file(tmp_path: Path) -> None:
    torch.save(VALUE, tmp_path / "in.pth", _use_new_zipfile_serialization=False)
    path = written(tmp_path / "bad.pth", b"junk\n" * 50 + (tmp_path / "in.pth").read_bytes() + b"more")
    result = repair.repair(path, tmp_path / "out.pth")
    assert result.exit_code == 0 and same(tmp_path / "out.pth")
    assert {row.id for row in result.findings} == {"leading-bytes", "trailing-bytes"}


def test_safetensors_that_are_too_long_or_too_short(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.int64), "c": torch.zeros(2, dtype=torch.int8)}
    save_file(tensors, tmp_path / "in.safetensors", metadata={"note": "x"})
    whole = (tmp_path / "in.safetensors").read_bytes()
    long = written(tmp_path / "long.safetensors", whole + b"tail")
    with pytest.raises(SafetensorError, match=r"(?i)incomplete"):
        load_file(long)
    assert repair.repair(long, tmp_path / "out.safetensors").exit_code == 0
    assert (tmp_path / "out.safetensors").read_bytes() == whole
    short = written(tmp_path / "short.safetensors", whole[:-10])
    result = repair.repair(short, tmp_path / "short.out.safetensors")
    assert [loss.name for loss in result.losses] == ["a", "c"]
    again = load_file(tmp_path / "short.out.safetensors")
    assert list(again) == ["b"] and torch.equal(again["b"], tensors["b"])
    filled = repair.repair(short, tmp_path / "nan.safetensors", fill="nan")
    again = load_file(tmp_path / "nan.safetensors")
    assert filled.exit_code == 3 and again["a"].isnan().all() and again["c"].tolist() == [0, 0]
    repair.repair(short, tmp_path / "from.safetensors", fill_from=long.with_name("in.safetensors"))
    assert torch.equal(load_file(tmp_path / "from.safetensors")["a"], tensors["a"])
    with pytest.raises(DamagedFile):
        repair.repair(written(tmp_path / "header.safetensors", whole[:40]), tmp_path / "none")


def damaged(tmp_path: Path, good: Path, change: Callable[[bytearray], None]) -> RepairResult:
    data = bytearray(good.read_bytes())
    change(data)
    return repair.repair(written(tmp_path / "bad.pth", bytes(data)), tmp_path / "out.pth")


def test_without_its_directory(good: Path, tmp_path: Path) -> None:
    def cut(data: bytearray) -> None:
        del data[data.index(b"PK\x01\x02") :]

    assert damaged(tmp_path, good, cut).exit_code == 0
    with pytest.raises(Exception, match=r"central directory|Invalid argument"):
        torch.load(tmp_path / "bad.pth")
    assert same(tmp_path / "out.pth")


def test_with_local_headers_destroyed(good: Path, tmp_path: Path) -> None:
    """The directory says what the headers said; the padding after them is 64 bytes to the next multiple."""

    def wipe(data: bytearray) -> None:
        with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
            for info in archive.infolist():
                data[info.header_offset : info.header_offset + 30] = b"\xee" * 30

    assert damaged(tmp_path, good, wipe).exit_code == 0
    with pytest.raises(Exception, match=r"corrupted|invalid|Weights only"):
        torch.load(tmp_path / "bad.pth")
    assert same(tmp_path / "out.pth")


def test_a_changed_byte_is_found_where_torch_finds_none(good: Path, tmp_path: Path) -> None:
    def change(data: bytearray) -> None:
        data[data.index(torch.ones(30).numpy().tobytes())] ^= 1

    result = damaged(tmp_path, good, change)
    torch.load(tmp_path / "bad.pth")
    assert [(loss.name, loss.shape, loss.dtype) for loss in result.losses] == [("model/fc.bias", (30,), "float32")]
    assert "CRC-32" in result.losses[0].reason and "torn-write" in {row.id for row in result.findings}
    assert list(torch.load(tmp_path / "out.pth")["model"]) == ["fc.weight"]


def test_two_ranks_that_wrote_one_file(tmp_path: Path) -> None:
    """Rank 1 began while rank 0 was writing: stretches of the file are the other's."""
    names = [f"layer{index}" for index in range(8)]
    for rank in (0, 1):
        torch.save({name: torch.full((5000,), float(rank)) for name in names}, tmp_path / "rank.pth")
        shutil.move(tmp_path / "rank.pth", tmp_path / f"rank{rank}")
    one, two = ((tmp_path / f"rank{rank}").read_bytes() for rank in (0, 1))
    assert len(one) == len(two)
    torn = bytearray(one)
    for start in range(30_000, len(one) - 30_000, 50_000):
        torn[start : start + 25_000] = two[start : start + 25_000]
    path = written(tmp_path / "torn.pth", bytes(torn))
    mixed = {name for name, value in torch.load(path).items() if len(set(value.tolist())) > 1}
    result = repair.repair(path, tmp_path / "out.pth")
    assert mixed and mixed <= {loss.name for loss in result.losses} < set(names)
    assert any(row.id == "torn-write" and "two processes" in row.message for row in result.findings)
    again = torch.load(tmp_path / "out.pth")
    assert set(again) == set(result.kept) and all(len(set(value.tolist())) == 1 for value in again.values())


def test_without_checksums_sizes_are_what_is_known(tmp_path: Path) -> None:
    pickle = assemble(("PROTO", 2), *state_dict_ops({"x": Tensor("0", (2,), 2), "y": Tensor("1", (2,), 2)}), "STOP")
    records = [Record(one.name, one.data, crc=0) for one in torch_records(pickle, [b"\1" * 8, b"\2" * 8])]
    result = repair.repair(written(tmp_path / "in.pth", build_zip(records)), tmp_path / "out.pth")
    assert result.exit_code == 0 and result.kept == ("x", "y")
    assert "unverifiable" in {row.id for row in result.findings if row.severity == "warning"}
    torch.load(tmp_path / "out.pth")


@pytest.mark.slow
def test_tensor_bytes_that_look_like_records_do_not_fool_it(tmp_path: Path) -> None:
    """A tensor that holds a whole checkpoint with records of the same names; then the file is cut inside of it."""
    inner_pickle = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("1", (4,), 4)}), "STOP")
    inner = torch_zip(inner_pickle, {"1": b"EVIL" * 4, "2": b"EVIL" * 2, "3": b"no"})
    pickle = assemble(("PROTO", 2), *state_dict_ops({
        "first": Tensor("0", (2,), 2), "bytes": Tensor("9", (len(inner),), len(inner), "ByteStorage"),
        "second": Tensor("1", (4,), 4), "third": Tensor("2", (2,), 2),
    }), "STOP")  # fmt: skip
    good = torch_zip(pickle, {"0": b"\1" * 8, "9": inner, "1": b"\2" * 16, "2": b"\3" * 8})
    result = repair.repair(written(tmp_path / "in.pth", good), tmp_path / "out.pth")
    assert result.exit_code == 0
    assert bytes(torch.load(tmp_path / "out.pth")["second"].untyped_storage()) == b"\2" * 16
    start = good.index(inner)
    for cut in range(start, start + len(inner) + 17, 7):
        result = repair.repair(written(tmp_path / "cut.pth", good[:cut]), tmp_path / "cut.out.pth", force=True)
        assert result.kept == (("first",) if cut < start + len(inner) + 16 else ("first", "bytes"))
    no_directory = good[: good.rindex(b"PK\x01\x02archive/data.pkl"[:4])]
    assert repair.repair(written(tmp_path / "cut.pth", no_directory), tmp_path / "o.pth").exit_code == 0


def pickle_lost(tmp_path: Path, value: dict[str, torch.Tensor]) -> Path:
    torch.save(value, tmp_path / "in.pth")
    data = bytearray((tmp_path / "in.pth").read_bytes())
    data[data.index(b"_rebuild_tensor_v2")] ^= 1
    return written(tmp_path / "bad.pth", bytes(data))


MODEL = {
    "a.weight": torch.randn(4, 3), "a.bias": torch.randn(4), "b.weight": torch.randn(4, 3).half(),
    "n": torch.tensor(7),
}  # fmt: skip


def test_a_lost_pickle_gives_numbered_storages(tmp_path: Path) -> None:
    result = repair.repair(pickle_lost(tmp_path, MODEL), tmp_path / "out.pth")
    again = torch.load(tmp_path / "out.pth")
    assert list(again) == ["storage_0", "storage_1", "storage_2", "storage_3"] and result.exit_code == 3
    for raw, value in zip(again.values(), MODEL.values(), strict=True):
        assert raw.dtype == torch.uint8 and torch.equal(raw.view(value.dtype).reshape(value.shape), value)
    assert "pickle-lost" in {row.id for row in result.findings}


def test_a_lost_pickle_and_the_model_it_was_of(tmp_path: Path) -> None:
    like = {name: torch.zeros_like(value) for name, value in MODEL.items()}
    torch.save(like, tmp_path / "like.pth")
    path = pickle_lost(tmp_path, MODEL)
    assert repair.repair(path, tmp_path / "out.pth", like=tmp_path / "like.pth").exit_code == 3
    again = torch.load(tmp_path / "out.pth")
    assert list(again) == list(MODEL)
    assert all(again[name].dtype == value.dtype and torch.equal(again[name], value) for name, value in MODEL.items())


def test_a_model_that_fits_twice_or_nowhere_is_refused(tmp_path: Path) -> None:
    path = pickle_lost(tmp_path, {f"layer{index}": torch.zeros(3) for index in range(4)})
    torch.save({"x": torch.zeros(3), "y": torch.zeros(3)}, tmp_path / "like.pth")
    with pytest.raises(NoMatch, match="begin at storage 0, 1, 2") as caught:
        repair.repair(path, tmp_path / "out.pth", like=tmp_path / "like.pth")
    assert "storage 0: 12 bytes" in caught.value.lines
    torch.save({"x": torch.zeros(5)}, tmp_path / "like.pth")
    with pytest.raises(NoMatch, match="do not match the"):
        repair.repair(path, tmp_path / "out.pth", like=tmp_path / "like.pth")


def test_tied_and_partly_lost_storages(tmp_path: Path) -> None:
    """All tensors of a lost storage are lost, and in a list they leave None, so that the others keep their places."""
    shared = torch.arange(8.0)
    value = {"kept": torch.ones(4), "w": shared, "part": shared[2:4], "list": [1, shared, 2]}
    torch.save(value, tmp_path / "in.pth")
    data = bytearray((tmp_path / "in.pth").read_bytes())
    data[data.index(shared.numpy().tobytes()) + 9] ^= 4
    bad = written(tmp_path / "bad.pth", bytes(data))
    result = repair.repair(bad, tmp_path / "out.pth")
    assert {loss.name for loss in result.losses} == {"w", "part", "list/1"}
    again = torch.load(tmp_path / "out.pth")
    assert list(again) == ["kept", "list"] and again["list"] == [1, None, 2]
    older = {"kept": torch.zeros(4), "w": shared + 1, "part": torch.zeros(2), "list": [1, shared + 1, 2]}
    torch.save(older, tmp_path / "older.pth")
    result = repair.repair(bad, tmp_path / "filled.pth", fill_from=tmp_path / "older.pth")
    again = torch.load(tmp_path / "filled.pth")
    assert all(loss.filled for loss in result.losses) and result.exit_code == 3
    assert torch.equal(again["w"], shared + 1) and again["part"].data_ptr() == again["w"].data_ptr() + 8


def test_filling_from_a_file_of_another_shape_fills_nothing(tmp_path: Path, good: Path) -> None:
    other = {"epoch": 1, "model": {"fc.weight": torch.zeros(30, 20), "fc.bias": torch.zeros(31)}}
    torch.save(other, tmp_path / "o.pth")
    data = good.read_bytes()
    bad = written(tmp_path / "bad.pth", data[: data.index(torch.ones(30).numpy().tobytes()) + 3])
    result = repair.repair(bad, tmp_path / "out.pth", fill_from=tmp_path / "o.pth")
    assert "the other file has [31] float32" in result.losses[0].reason and not result.losses[0].filled
    repair.repair(bad, tmp_path / "both.pth", fill_from=tmp_path / "o.pth", fill="zeros")
    assert torch.load(tmp_path / "both.pth")["model"]["fc.bias"].tolist() == [0.0] * 30


def test_a_legacy_view_of_a_storage_is_kept(tmp_path: Path) -> None:
    tensor = Tensor("7", (2,), 6, legacy=True, view=("v", 2, 2))
    pickle = assemble(("PROTO", 2), *state_dict_ops({"x": tensor}), "STOP")
    data = legacy(pickle, [("7", 6, struct.pack("<6f", *range(6)))])
    assert repair.repair(written(tmp_path / "in.pth", data + b"x"), tmp_path / "out.pth").exit_code == 0
    assert torch.load(tmp_path / "out.pth")["x"].tolist() == torch.load(tmp_path / "in.pth")["x"].tolist()


def test_archives_of_several_checkpoints_are_refused(good: Path, tmp_path: Path) -> None:
    data = rezipped(good, lambda name: f"one/{name}", zipfile.ZIP_STORED, ("two/x/data.pkl", b"\x80\x02}."))
    with pytest.raises(Refused, match="2 checkpoints"):
        repair.repair(written(tmp_path / "in.pth", data), tmp_path / "out.pth")


def test_what_unfolds_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.ops.layers.MAX_UNPACKED", 1 << 16)
    path = written(tmp_path / "in.pth", gzip.compress(b"\0" * (1 << 24)))
    with pytest.raises(Unsupported, match="unfold"):
        repair.repair(path, tmp_path / "out.pth")
    assert [one.name for one in tmp_path.iterdir()] == ["in.pth"]


def test_truncated_gzip_gives_what_came_out(tmp_path: Path) -> None:
    tensors = {f"w{index}": torch.randn(3000) for index in range(6)}
    torch.save(tensors, tmp_path / "in.pth")
    packed = gzip.compress((tmp_path / "in.pth").read_bytes())
    path = written(tmp_path / "bad.pth.gz", packed[: len(packed) // 2])
    result = repair.repair(path, tmp_path / "out.pth")
    again = torch.load(tmp_path / "out.pth")
    assert 1 <= len(again) < 6 and all(torch.equal(tensors[name], value) for name, value in again.items())
    assert len(again) + len(result.losses) == 6


def test_zips_that_are_no_checkpoints_are_told_apart(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("notes.txt", b"hello" * 100)
    with pytest.raises(UnknownFormat):
        repair.repair(written(tmp_path / "in.zip", out.getvalue()), tmp_path / "out.pth")

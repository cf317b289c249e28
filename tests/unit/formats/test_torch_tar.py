"""torch.save before 0.1.10, as torch itself still loads it."""

from __future__ import annotations

import io
import pickle
import random
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from kinds import tensor
from other_pickles import tar_of, torch_tar
from watch import watched

import ckptfix
from ckptfix.checkpoint import ByteRange
from ckptfix.errors import CkptfixError, UnknownFormat
from ckptfix.formats import open_checkpoint


def files_of(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def object_of(value: Any) -> bytes:
    """An object whose persistent ids are its strings that begin with ``#``, and its tuples that begin with a class."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> Any:
            if isinstance(part, str) and part.startswith("#"):
                return part[1:]
            return part if isinstance(part, tuple) and len(part) == 3 and isinstance(part[0], type) else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(value)
    return buffer.getvalue()


def test_ties_and_views_are_those_of_torch(tmp_path: Path) -> None:
    path, out = tmp_path / "model.pth.tar", tmp_path / "out.pth"
    base = torch.arange(24.0).reshape(4, 6)
    value = {"epoch": 3, "state_dict": {"w": base, "v": base[1:, ::2], "same": base}, "n": [torch.ones(2).long()]}
    path.write_bytes(torch_tar(value))
    wanted = torch.load(path, weights_only=False)
    assert_same(value, wanted)
    entries = {entry.name: entry for entry in open_checkpoint(path).entries}
    assert list(entries) == ["state_dict/w", "state_dict/v", "state_dict/same", "n/0"]
    assert entries["state_dict/w"].storage == entries["state_dict/v"].storage
    assert entries["n/0"].data.path == str(path)
    for to in ("zip", "legacy"):
        ckptfix.convert(path, out, to=to, force=True)
        assert_same(wanted, torch.load(out))
    ckptfix.extract(path, out, force=True)
    assert torch.equal(torch.load(out)["v"], base[1:, ::2])


def by_hand(**files: bytes) -> bytes:
    """One storage of 6 floats, number 10; 11 is a view of its elements 2 to 5. Tensor 20 is on 10, and 21 on 11."""
    view = pickle.dumps([(11, 10, 2, 4)], 2)
    storages = pickle.dumps(1, 2) + pickle.dumps((10, "cuda:1", torch.FloatStorage), 2)
    storages += struct.pack("<q6f", 6, *range(6))
    rows = pickle.dumps(2, 2)
    for number, storage, size in ((20, 10, 6), (21, 11, 3)):
        rows += pickle.dumps((number, storage, torch.FloatTensor), 2) + struct.pack("<i4xqqq", 1, size, 1, 0)
    root = object_of({"w": "#20", "v": "#21", "whole": "#10", "part": "#11", "class": (dict, "a.py", "source")})
    return tar_of({"sys_info": pickle.dumps({}), "pickle": root, "tensors": rows, "storages": storages + view, **files})


def test_views_of_storages_and_sources_of_classes(tmp_path: Path) -> None:
    path, out = tmp_path / "in.tar", tmp_path / "out.pth"
    path.write_bytes(by_hand())
    entries = {entry.key: entry for entry in open_checkpoint(path).entries}
    assert {entry.location for entry in entries.values()} == {"cuda:1"}
    assert (entries["v"].offset, entries["v"].shape) == (2, (3,)) and entries["v"].storage == entries["w"].storage
    assert (entries["whole"].shape, entries["part"].shape) == ((6,), (4,))
    data = {key: path.read_bytes()[entry.data.offset : entry.data.end] for key, entry in entries.items()}
    assert struct.unpack("<3f", data["v"]) == (2, 3, 4) and struct.unpack("<4f", data["part"]) == (2, 3, 4, 5)
    ckptfix.convert(path, out)
    wanted = torch.load(path, weights_only=False, map_location="cpu")
    got = torch.load(out, weights_only=False, map_location="cpu")
    assert got["class"] is wanted["class"] is dict
    assert got["w"].tolist() == wanted["w"].tolist() and got["v"].tolist() == wanted["v"].tolist()
    assert got["w"].untyped_storage().data_ptr() == got["v"].untyped_storage().data_ptr()
    assert list(got["part"]) == list(wanted["part"]) and list(got["whole"]) == list(wanted["whole"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tensors": pickle.dumps("many", 2)}, "the row count is not a number"),
        ({"tensors": pickle.dumps(1, 2) + pickle.dumps((20, 10), 2)}, "a row does not have three values"),
        ({"tensors": pickle.dumps(1, 2) + pickle.dumps((2, 10, 0), 2) + struct.pack("<iq", 99, 0)}, "99 dimensions"),
        ({"storages": pickle.dumps(1, 2) + pickle.dumps((1, "cpu", 3), 2) + bytes(8)}, "unknown storage class"),
        ({"storages": pickle.dumps(0, 2) + pickle.dumps([(1, 10, 0, 4)], 2)}, "is not inside it"),
        ({"storages": pickle.dumps(1 << 60, 2)}, ""),
        ({"pickle": b"\x80\x02K\x01"}, "ends without STOP"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_offset(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.tar"
    path.write_bytes(by_hand(**files))
    if not message:
        assert [row.id for row in open_checkpoint(path).findings][:1] == ["truncated"]
        with pytest.raises(CkptfixError):
            ckptfix.convert(path, tmp_path / "out.pth")
        return
    with pytest.raises(CkptfixError, match=message) as caught:
        open_checkpoint(path)
    assert caught.value.path == str(path) and caught.value.where in files and caught.value.offset


def test_a_tensor_that_is_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "in.tar"
    path.write_bytes(by_hand(pickle=object_of({"w": "#20", "x": "#99", "y": "#zz"})))
    checkpoint = open_checkpoint(path)
    assert [entry.key for entry in checkpoint.entries] == ["w"]
    assert [row.id for row in checkpoint.findings] == ["bad-tensor", "bad-tensor"]
    with pytest.raises(CkptfixError):
        ckptfix.convert(path, tmp_path / "out.pth")


class Runs:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch ran",)


@pytest.mark.parametrize("member", ["pickle", "tensors", "storages"])
def test_nothing_is_run(member: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in.tar"
    files = files_of(by_hand())
    if member == "pickle":
        files[member] = object_of({"w": "#20", "run": Runs()})
    else:
        # The third value of a row is a class that nothing looks at.
        old = b"ctorch\nFloatTensor\n" if member == "tensors" else b"ctorch\nFloatStorage\n"
        files[member] = files[member].replace(old, b"cos\nsystem\nX\x04\x00\x00\x00true\x85R0" + old, 1)
    path.write_bytes(tar_of(files))
    with watched("pickle.find_class", "os.system", "subprocess.Popen") as seen:
        found = ckptfix.doctor(path)
        ckptfix.convert(path, tmp_path / "out.pth")
    assert seen == [] and not (tmp_path / "ran").exists()
    assert any(row.id == "dangerous-global" and row.offset for row in found.findings)


def test_a_tar_without_one_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "in.tar"
    files = files_of(by_hand())
    del files["tensors"]
    path.write_bytes(tar_of(files))
    with pytest.raises(UnknownFormat, match="without its file 'tensors'"):
        open_checkpoint(path)


@pytest.mark.slow
def test_mutants_are_errors_and_never_tracebacks(tmp_path: Path) -> None:
    path, out = tmp_path / "in.tar", tmp_path / "out.pth"
    data = torch_tar({"state_dict": {"w": tensor(3, 4), "b": tensor(2).half()}, "epoch": 3})
    rng = random.Random(0)
    changed = [data[:end] for end in range(0, len(data), 97 * 3)]
    for _ in range(100):
        mutant = bytearray(data)
        mutant[rng.randrange(4096)] ^= 1 << rng.randrange(8)
        changed.append(bytes(mutant))
    failed = 0
    for mutant_ in changed:
        path.write_bytes(mutant_)
        for look in (
            lambda: (open_checkpoint(path).entries, list(open_checkpoint(path).values())),
            lambda: ckptfix.doctor(path),
            lambda: ckptfix.convert(path, out, dry_run=True),
            lambda: ckptfix.repair(path, out, dry_run=True),
        ):
            try:
                look()
            except CkptfixError as error:
                failed += 1
                assert error.path == str(path)
    assert failed > 100


def test_ranges_of_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "in.tar"
    path.write_bytes(torch_tar({"w": torch.arange(5000.0)}))
    (entry,) = open_checkpoint(path).entries
    assert isinstance(entry.data, ByteRange)
    assert path.read_bytes()[entry.data.offset : entry.data.end] == struct.pack("<5000f", *range(5000))



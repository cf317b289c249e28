"""pickle.dump and joblib.dump of tensors: read where they lie, and never run."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from compare import assert_same, tensor_bytes
from conftest import LONG
from kinds import KINDS, tensor
from other_pickles import joblib_dump
from watch import watched

import ckptfix
from ckptfix.checkpoint import ByteRange, Derived
from ckptfix.errors import CkptfixError, DamagedFile, UnknownFormat, Unsupported, WouldLoseData
from ckptfix.formats import open_checkpoint

EVENTS = ("pickle.find_class", "os.system", "os.exec", "subprocess.Popen")

NOT_PICKLED = {
    "dtypes": "pickle.load fails on what pickle.dump wrote of an untyped storage",
    "no-tensors": "nothing in it is torch's",
    "gone-classes": "it makes its file itself",
}


@pytest.mark.slow
@pytest.mark.sampled(39)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5] if LONG else [2, 5])
@pytest.mark.parametrize("name", [name for name in KINDS if name not in NOT_PICKLED])
def test_every_kind_of_object_is_what_pickle_loads(name: str, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "in.pkl"
    path.write_bytes(pickle.dumps(KINDS[name].make(), protocol=protocol))
    wanted = pickle.loads(path.read_bytes())
    ckptfix.convert(path, tmp_path / "out.pth")
    assert_same(wanted, torch.load(tmp_path / "out.pth", weights_only=False))


def test_what_has_no_storage_is_still_a_plain_pickle(tmp_path: Path) -> None:
    path = tmp_path / "in.pkl"
    for value in (KINDS["no-tensors"].make(), {"torch": torch.float32}, {"x": numpy.array([{}])}):
        path.write_bytes(pickle.dumps(value))
        with pytest.raises(UnknownFormat, match="a plain pickle") as caught:
            open_checkpoint(path)
        assert caught.value.kind == "plain-pickle"


def test_the_function_may_be_named_far_behind_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "in.pkl"
    path.write_bytes(pickle.dumps({"log": ["a line of text"] * 2 + [str(n) for n in range(5000)], "w": tensor(3)}))
    assert b"_load_from_bytes" not in path.read_bytes()[:4096]
    assert [entry.key for entry in open_checkpoint(path).entries] == ["w"]


def test_a_stream_may_be_a_zip(tmp_path: Path) -> None:
    """Whatever torch.save wrote may be inside, as torch.load takes it; deflated records too."""

    class Zipped:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __reduce__(self) -> Any:
            buffer = io.BytesIO()
            torch.save(self.value, buffer)
            return torch.storage._load_from_bytes, (buffer.getvalue(),)

    path = tmp_path / "in.pkl"
    value = {"w": tensor(30), "names": ["é", "b"], 7: {"v": tensor(2, 3)}}
    path.write_bytes(pickle.dumps({"a": Zipped(value), "b": Zipped([tensor(2)]), "c": tensor(4)}))
    wanted = pickle.loads(path.read_bytes())
    checkpoint = open_checkpoint(path)
    assert [entry.name for entry in checkpoint.entries] == ["a/w", "a/7/v", "b/0", "c"]
    assert all(isinstance(entry.data, ByteRange) and entry.data.path == str(path) for entry in checkpoint.entries)
    ckptfix.convert(path, tmp_path / "out.pth")
    assert_same(wanted, torch.load(tmp_path / "out.pth"))


def test_two_storages_of_one_key_are_two(tmp_path: Path) -> None:
    """The keys in the streams are addresses of memory, which the next storage may get again."""
    path = tmp_path / "in.pkl"
    path.write_bytes(pickle.dumps([torch.full((4,), 1.0), torch.full((4,), 2.0)]))
    first, second = keys_of(path)
    path.write_bytes(path.read_bytes().replace(second, first.rjust(len(second), b"0")[-len(second) :]))
    assert len(set(keys_of(path))) == 1
    one, two = open_checkpoint(path).entries
    assert one.storage is not None and two.storage is not None and one.storage.key != two.storage.key
    assert read(one) != read(two)


def keys_of(path: Path) -> list[bytes]:
    """The key in each stream of a storage."""
    return re.findall(rb"FloatStorage\nq\x01X(?:.{4})(\d+)", path.read_bytes(), re.DOTALL)


def read(entry: Any) -> bytes:
    return Path(entry.data.path).read_bytes()[entry.data.offset : entry.data.end]


def test_bytes_as_text_are_streams(tmp_path: Path) -> None:
    """Protocol 2 writes bytes as text: no range of the file is the tensor."""
    path = tmp_path / "in.pkl"
    state = {"w": torch.arange(-300, 300).to(torch.int16), "v": torch.rand(1000)}
    path.write_bytes(pickle.dumps(state, protocol=2))
    entries = open_checkpoint(path).entries
    assert all(entry.storage is not None and isinstance(entry.storage.data, Derived) for entry in entries)
    for to in ("zip", "safetensors"):
        out = tmp_path / f"out.{to}"
        ckptfix.convert(path, out, to=to)
        assert ckptfix.diff(path, out).exit_code == 0
    assert_same(state, torch.load(tmp_path / "out.zip"))
    assert_same(state, dict(ckptfix.load_state_dict(path)))


def test_a_module(tmp_path: Path) -> None:
    path = tmp_path / "in.pkl"
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    path.write_bytes(pickle.dumps(model))
    assert ckptfix.extract(path, tmp_path / "out.pth").classes == ()
    assert_same(dict(model.state_dict()), dict(torch.load(tmp_path / "out.pth")))
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    ckptfix.load_into(other, path)
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    found = ckptfix.doctor(path)
    assert {"plain-pickle", "whole-module"} <= {row.id for row in found.findings}
    assert found.fixes[0][:2] == ("ckptfix", "extract")


class Runs:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch ran",)


def stream_of(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


class Hidden:
    """A storage whose stream runs something."""

    def __reduce__(self) -> Any:
        return torch.storage._load_from_bytes, (stream_of([torch.ones(2), Runs()]),)


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in.pkl"
    path.write_bytes(pickle.dumps({"w": tensor(2), "a": Hidden(), "b": Runs()}))
    with watched(*EVENTS) as seen:
        checkpoint = open_checkpoint(path)
        list(checkpoint.values())
        found = ckptfix.doctor(path)
        ckptfix.convert(path, tmp_path / "out.pth")
        repaired = ckptfix.repair(path, tmp_path / "repaired.pth")
    assert seen == [] and not (tmp_path / "ran").exists()
    offset = path.read_bytes().index(b"posix\nsystem\n") - 1
    rows = [row for row in found.findings if row.id == "dangerous-global"]
    assert rows[0].offset == offset and "posix.system" in rows[0].message
    assert [entry.name for entry in checkpoint.entries] == ["w", "a/0"]
    assert repaired.exit_code == 3 and set(torch.load(tmp_path / "repaired.pth")) == {"w", "a"}


def test_what_is_thrown_away_is_reported(tmp_path: Path) -> None:
    """A call that the object does not hold is run by an unpickler all the same."""
    path = tmp_path / "in.pkl"
    body = pickle.dumps({"w": tensor(2)}, protocol=3)
    path.write_bytes(body[:2] + b"cos\nsystem\nX\x04\x00\x00\x00true\x85R0" + body[2:])
    found = ckptfix.doctor(path)
    assert [(row.id, row.offset) for row in found.findings if "os.system" in row.message] == [("dangerous-global", 2)]


def test_numpy_arrays_are_values(tmp_path: Path) -> None:
    path = tmp_path / "in.pkl"
    path.write_bytes(pickle.dumps({"a": numpy.arange(100.0), "w": tensor(2)}))
    checkpoint = open_checkpoint(path)
    assert [entry.key for entry in checkpoint.entries] == ["w"]
    assert "a" in dict(checkpoint.values())
    ckptfix.sanitize(path, tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["a"], torch.arange(100.0, dtype=torch.float64))


def arrays() -> dict[str, Any]:
    return {
        "epoch": 3,
        "rows": numpy.arange(5000.0).reshape(50, 100),
        "columns": numpy.asfortranarray(numpy.arange(6, dtype="<i2").reshape(2, 3)),
        "text": numpy.array(["ab", "c"]),
        "objects": numpy.array([None, {"a": torch.ones(2)}], dtype=object),
        "fields": numpy.array([(1.5, 2)], dtype=[("x", "f4"), ("y", "i8")]),
        "empty": numpy.zeros((0, 3)),
        "single": numpy.array(3.5),
        "bool": numpy.array([True]),
        "model": {"w": tensor(3, 4), "b": tensor(4)},
    }


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_joblib(protocol: int, aligned: bool, tmp_path: Path) -> None:
    path = tmp_path / "in.joblib"
    joblib_dump(arrays(), path, protocol=protocol, aligned=aligned)
    checkpoint = open_checkpoint(path)
    assert [entry.name for entry in checkpoint.entries if entry.at == "model"] == ["model/w", "model/b"]
    assert all(isinstance(entry.data, ByteRange) for entry in checkpoint.entries)
    ckptfix.convert(path, tmp_path / "out.pth")
    got, wanted = torch.load(tmp_path / "out.pth", weights_only=False), arrays()
    assert got["columns"].flags.f_contiguous
    assert got.pop("objects")[1]["a"].tolist() == wanted.pop("objects")[1]["a"].tolist()
    assert_same(wanted, got)


@pytest.mark.parametrize(
    "pack", [gzip.compress, zlib.compress, bz2.compress, lzma.compress], ids=["gzip", "zlib", "bz2", "xz"]
)
@pytest.mark.parametrize("dump", [joblib_dump, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_compressed_one_is_unpacked_by_repair(
    pack: Callable[[bytes], bytes], dump: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "in"
    state = {"w": tensor(30, 40), "b": tensor(4)}
    dump(state, path)
    path.write_bytes(pack(path.read_bytes()))
    (fix,) = ckptfix.doctor(path).fixes
    assert fix[:3] == ("ckptfix", "repair", str(path))
    result = ckptfix.repair(path, tmp_path / "out.pth")
    assert result.exit_code == 0 and "plain-pickle" in {row.id for row in result.findings}
    assert_same(state, torch.load(tmp_path / "out.pth"))


@pytest.mark.parametrize("state", ["shape", "dtype"])
def test_an_array_that_does_not_say_what_it_is(state: str, tmp_path: Path) -> None:
    path = tmp_path / "in.joblib"
    joblib_dump({"w": tensor(2), "a": numpy.arange(3)}, path)
    path.write_bytes(path.read_bytes().replace(state.encode(), b"x" * len(state), 1))
    with pytest.raises((DamagedFile, Unsupported), match="a joblib array") as caught:
        open_checkpoint(path)
    assert caught.value.path == str(path)


def test_a_damaged_stream_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "in.pkl"
    path.write_bytes(pickle.dumps({"w": tensor(200), "v": tensor(3)}))
    data = bytearray(path.read_bytes())
    at = data.index(b"FloatStorage")
    start = data.rindex(b"\x80\x02\x8a\n", 0, at)
    data[data.index(b"M\xe9\x03.", start)] = 0x4E
    path.write_bytes(data)
    checkpoint = open_checkpoint(path)
    assert [entry.key for entry in checkpoint.entries] == ["v"]
    findings = {row.id: row for row in checkpoint.findings}
    assert findings["bad-storage"].where == "_load_from_bytes" and (findings["bad-storage"].offset or 0) >= start
    assert findings["bad-tensor"].where == "w"
    with pytest.raises(WouldLoseData):
        ckptfix.convert(path, tmp_path / "out.pth")
    with pytest.raises(DamagedFile):
        ckptfix.repair(path, tmp_path / "out.pth")


def mutants(data: bytes, count: int) -> list[bytes]:
    """Cut at every 97th byte, and with flipped bits."""
    found = [data[:end] for end in range(0, len(data), 97)]
    rng = random.Random(0)
    for _ in range(count):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        found.append(bytes(changed))
    return found


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("made", ["pickle", "protocol 2", "joblib"])
def test_mutants_are_errors_and_never_tracebacks(made: str, tmp_path: Path) -> None:
    path, out = tmp_path / "in", tmp_path / "out.pth"
    value = {"w": tensor(3, 4), "b": tensor(2).half(), "a": numpy.arange(20.0), "p": torch.nn.Parameter(tensor(2))}
    if made == "joblib":
        joblib_dump(value, path)
    else:
        path.write_bytes(pickle.dumps(value, protocol=2 if made == "protocol 2" else 4))
    failed = 0
    for data in mutants(path.read_bytes(), 60):
        path.write_bytes(data)
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


def test_tensor_bytes_of_a_large_file_are_a_range(tmp_path: Path) -> None:
    path = tmp_path / "in.pkl"
    value = torch.arange(100_000)
    path.write_bytes(pickle.dumps({"w": value}))
    (entry,) = open_checkpoint(path).entries
    assert read(entry) == tensor_bytes(value)

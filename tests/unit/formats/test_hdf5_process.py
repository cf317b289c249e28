"""The process in which HDF5 is parsed: a library that loops, crashes or takes all memory ends that process alone."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import numpy as np
import pytest
from array_files import hdf5

import ckptfix
from ckptfix import errors
from ckptfix.formats import open_checkpoint
from ckptfix.formats.arrays import hdf5 as format
from ckptfix.formats.arrays import hdf5_child

h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.slow

STUB = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("child", {file!r})
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
child.CALL_SECONDS = child.LIST_SECONDS = 1
def bad(*args):
    {bad}
child.{where} = bad
child.main()
"""
"""The process, with a library that misbehaves at a place."""

BAD: dict[str, tuple[str, str]] = {
    "loop": ("while True: pass", "did not finish"),
    "crash": ("os.kill(os.getpid(), 11)", "ended its process"),
    "exit": ("os._exit(3)", "ended its process"),
    "memory": ("return bytearray(1 << 40)", "cannot read it"),
}
"""What the library does -> a word of the message."""


def with_library(folder: Path, bad: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = folder / "stub.py"
    stub.write_text(STUB.format(file=hdf5_child.__file__, bad=bad, where=where))
    monkeypatch.setattr(hdf5_child, "__file__", str(stub))


def chunked(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    value = np.arange(3_000_000, dtype="f4").reshape(3000, 1000)
    with h5py.File(path, "w") as file:
        file.create_dataset("m/w", data=value, chunks=(100, 100), compression="gzip", compression_opts=1)
        file.create_dataset("m/zero", data=np.float32(7))
        file.create_dataset("m/none", shape=(0, 4), maxshape=(None, 4), dtype="f4")
    return value


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("bad", BAD)
def test_a_structure_that_ends_the_process_is_refused(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hdf5({"w": np.ones(3, "f4")}, tmp_path / "in.h5")
    with_library(tmp_path, BAD[bad][0], "dataset", monkeypatch)
    if bad == "memory":
        (row,) = open_checkpoint(tmp_path / "in.h5").findings
        assert BAD[bad][1] in row.message and row.where == "w"
    else:
        with pytest.raises(errors.DamagedFile, match=BAD[bad][1]) as caught:
            open_checkpoint(tmp_path / "in.h5")
        assert caught.value.path == str(tmp_path / "in.h5")


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.parametrize("bad", ["loop", "crash"])
def test_data_that_ends_the_process_is_refused(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked(tmp_path / "in.h5")
    checkpoint = open_checkpoint(tmp_path / "in.h5")
    assert {entry.key for entry in checkpoint.entries} == {"m.w", "m.zero", "m.none"}
    with_library(tmp_path, BAD[bad][0], "block", monkeypatch)
    with pytest.raises(errors.CkptfixError, match=BAD[bad][1]):
        ckptfix.convert(tmp_path / "in.h5", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_blocks_of_datasets_are_those_in_the_file(tmp_path: Path) -> None:
    value = chunked(tmp_path / "in.h5")
    ckptfix.convert(tmp_path / "in.h5", tmp_path / "out.safetensors")
    made = ckptfix.load_state_dict(tmp_path / "out.safetensors")
    assert np.array_equal(made["m.w"].numpy(), value)
    assert made["m.zero"].item() == 7 and tuple(made["m.none"].shape) == (0, 4)


def test_a_file_in_an_archive_is_read_over_the_pipe(tmp_path: Path) -> None:
    """The process opens no file: it gets the bytes of a member of a zip, too."""
    import zipfile

    value = chunked(tmp_path / "model.weights.h5")
    with zipfile.ZipFile(tmp_path / "in.keras", "w") as archive:
        archive.write(tmp_path / "model.weights.h5", "model.weights.h5")
    ckptfix.convert(tmp_path / "in.keras", tmp_path / "out.safetensors")
    assert np.array_equal(ckptfix.load_state_dict(tmp_path / "out.safetensors")["m.w"].numpy(), value)


def test_the_process_ends_with_its_reader(tmp_path: Path) -> None:
    chunked(tmp_path / "in.h5")
    size = (tmp_path / "in.h5").stat().st_size
    reader = format.Hdf5Process(str(tmp_path / "in.h5"), 0, size)
    assert len(reader.block("/m/w", 0, 1)) == 4000
    child = reader._child
    assert child is not None and child.poll() is None
    del reader
    gc.collect()
    assert child.poll() is not None


def test_the_protocol_serves_a_file_that_only_the_parent_has(tmp_path: Path) -> None:
    """The server by itself: its answers to ranges that are asked for in advance."""
    answers = io.BytesIO()
    served = hdf5_child.Served(io.BytesIO(hdf5_child.LENGTH.pack(3) + b"abc"), answers, 10)
    assert served.seek(-4, 2) == 6 and served.read(3) == b"abc" and served.tell() == 9
    head, place = answers.getvalue()[: hdf5_child.HEAD.size], answers.getvalue()[hdf5_child.HEAD.size :]
    assert hdf5_child.HEAD.unpack(head) == (b"R", 16) and hdf5_child.RANGE.unpack(place) == (6, 3)


def test_what_hdf5_cannot_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(200))
    with pytest.raises(errors.DamagedFile, match="HDF5 cannot open it"):
        open_checkpoint(tmp_path / "in.h5")

"""Other frameworks' files: one suite over all readers, files of the real libraries, and hostile files."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from array_files import (
    WRITERS,
    Arrays,
    gguf,
    msgpack,
    npz,
    onnx_model,
    onnx_tensor,
    orbax,
    packed_npz,
    proto,
    tensorflow,
    varint,
)
from click.testing import CliRunner

import ckptfix
from ckptfix import errors
from ckptfix.cli import commands
from ckptfix.findings.load_errors import LoadError
from ckptfix.findings.table import errors_of
from ckptfix.formats import FORMATS, detect, open_checkpoint
from ckptfix.formats.arrays import gguf as gguf_format
from ckptfix.formats.torch.readonly.common import refuse_edit
from ckptfix.io.read import read_chunks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def need(name: str) -> bool:
    """Whether a library reads the format; the test is skipped where it is not installed."""
    if name in ("hdf5", "keras", "orbax"):
        pytest.importorskip("tensorstore" if name == "orbax" else "h5py")
        return True
    return False


def arrays_for(name: str) -> dict[str, np.ndarray[Any, Any]]:
    made: dict[str, np.ndarray[Any, Any]] = {
        f"m.{dtype}": (np.arange(6) % 2).reshape(2, 3).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        for dtype in sorted(WRITERS[name].dtypes)
    }
    return made | {"m.é": np.full(2, 1.5, "f4"), "n.w": np.arange(24, dtype="f4").reshape(2, 3, 4)}


def made(name: str, folder: Path, arrays: Arrays | None = None) -> Path:
    need(name)
    path = folder / f"in{WRITERS[name].suffix}"
    WRITERS[name].save(arrays_for(name) if arrays is None else arrays, path)
    return path


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else value.numpy().tobytes()


every = pytest.mark.parametrize("name", WRITERS)


def test_every_reader_has_a_writer() -> None:
    """A format that states no property of a torch object is one of these; NumPy's single array has its own tests."""
    rows = {name: format for name, format in FORMATS.items() if not format.writes and format.plan_edit is refuse_edit}
    assert {name for name, format in rows.items() if "objects" not in format.states} == {*WRITERS, "npy"}


@pytest.mark.sampled(quick=2)
@every
def test_tensors_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    wanted = arrays_for(name)
    path = made(name, tmp_path)
    checkpoint = open_checkpoint(path)
    keys = [entry.key for entry in checkpoint.entries]
    assert checkpoint.format == name and (keys if WRITERS[name].order else sorted(keys)) == (
        list(wanted) if WRITERS[name].order else sorted(wanted)
    )
    for entry in checkpoint.entries:
        value = wanted[entry.key]
        assert (entry.at, entry.dtype, entry.shape) == ("", value.dtype.name, value.shape)
        assert entry.storage is not None and entry.storage.data is not None
        assert b"".join(read_chunks(entry.storage.data)) == value.tobytes(), entry.key
    assert not [row for row in ckptfix.doctor(path).findings if row.severity == "error"][1:]


@every
@pytest.mark.parametrize("suffix", [".pth", ""])
def test_it_is_found_by_content(name: str, suffix: str, tmp_path: Path) -> None:
    if name == "tensorflow":
        suffix = ".index"  # the data is in files named like the index
    assert detect(made(name, tmp_path).rename(tmp_path / f"x{suffix}")).name == name


@pytest.mark.sampled(quick=3)
@every
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_conversion_has_the_same_values(name: str, suffix: str, tmp_path: Path) -> None:
    wanted, path, out = arrays_for(name), made(name, tmp_path), tmp_path / f"out{suffix}"
    assert ckptfix.convert(path, out).exit_code == 0
    got = ckptfix.load_state_dict(out)
    assert {key: raw(value) for key, value in got.items()} == {key: value.tobytes() for key, value in wanted.items()}
    assert ckptfix.diff(path, out).exit_code == 0


@every
def test_a_model_loads_from_it(name: str, tmp_path: Path) -> None:
    arrays = {"weight": np.arange(12, dtype="f4").reshape(3, 4), "bias": np.ones(3, "f4")}
    model = torch.nn.Linear(4, 3)
    ckptfix.load_into(model, made(name, tmp_path, arrays))
    assert torch.equal(model.weight, torch.arange(12.0).reshape(3, 4)) and torch.equal(model.bias, torch.ones(3))


@pytest.mark.sampled(quick=2)
@every
def test_the_fix_of_doctor_works(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path, {"module.w": np.ones((2, 2), "f4")})
    found = ckptfix.doctor(path)
    assert [row.id for row in found.findings if row.severity == "error"]
    lines = found.fixes
    for words in lines:
        done = CliRunner().invoke(commands, list(words[1:]))
        assert done.exit_code == 0, done.output
    assert torch.equal(ckptfix.load_state_dict(lines[-1][3])["w"], torch.ones(2, 2))


@pytest.mark.slow
@pytest.mark.sampled(4, test_all=10_000)
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "orbax"])
def test_a_cut_file_is_refused_or_named(name: str, tmp_path: Path) -> None:
    path = made(name, tmp_path, {"a.w": np.ones((40, 50), "f4"), "b.w": np.ones(8, "f4")})
    whole = path.read_bytes()
    parts = 4 if name == "hdf5" else 12  # each opening of HDF5 starts a process
    for cut in sorted({1, 7, 30, *(len(whole) * part // parts for part in range(1, parts)), len(whole) - 1}):
        path.write_bytes(whole[:cut])
        assert [row for row in ckptfix.doctor(path).findings if row.severity == "error"], cut
        with pytest.raises(errors.CkptfixError):
            ckptfix.convert(path, tmp_path / "out.pth")
        assert not (tmp_path / "out.pth").exists()


@pytest.mark.sampled(1_000)
@pytest.mark.slow
@every
def test_no_damage_is_a_crash(name: str, tmp_path: Path) -> None:
    """Bytes of the structure are changed at random: an error, a finding, or other values, and never a traceback."""
    path = made(name, tmp_path, {"a.w": np.ones((2, 3), "f4"), "b.w": np.ones(3, "f4")})
    draw = random.Random(name)
    files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
    for file, whole in [(file, file.read_bytes()) for file in files] * (8 if need(name) else 60):
        bad = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(len(bad))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        file.write_bytes(bad)
        done = CliRunner().invoke(commands, ["inspect", str(path)])
        assert done.exit_code in (0, 2), done.output
        assert "bug in ckptfix" not in done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        file.write_bytes(whole)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_model_zoos(protocol: int, tmp_path: Path) -> None:
    """Detectron2's form, in each protocol, arrays from few bytes to many."""
    arrays: dict[str, Any] = {"w": np.arange(400, dtype="f4").reshape(20, 20), "b": np.full(2, 200, "u1")}
    arrays["c"] = np.ones((2, 3), order="F")
    path, out = tmp_path / "in.pkl", tmp_path / "out.safetensors"
    path.write_bytes(pickle.dumps({"model": arrays, "__author__": "x"}, protocol=protocol))
    assert {(entry.at, entry.key) for entry in open_checkpoint(path).entries} == {("model", key) for key in arrays}
    result = ckptfix.convert(path, out)
    assert not result.account.lost and list(result.left) == ["__author__"]
    assert {key: raw(value) for key, value in ckptfix.load_state_dict(out).items()} == {
        key: value.tobytes() for key, value in arrays.items()
    }


class OfPaddle:
    """A tensor of Paddle, which paddle.save reduces to a tuple of its name and an array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (("linear_0.w_0", self.array),)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("nested", [False, True])
def test_bfloat16_of_paddle(protocol: int, nested: bool, tmp_path: Path) -> None:
    """Paddle stores bfloat16 as uint16, which it has no type for."""
    bits = np.array([[1.5, -2.0]], ml_dtypes.bfloat16).view("u2")
    value: dict[str, Any] = {"model": {"w": OfPaddle(bits)}, "epoch": 3} if nested else {"w": bits}
    if not nested:
        value["StructuredToParameterName@@"] = {"w": "linear_0.w_0"}
    (tmp_path / "m.pdparams").write_bytes(pickle.dumps(value, protocol))
    ckptfix.convert(tmp_path / "m.pdparams", tmp_path / "out.safetensors")
    (made,) = ckptfix.load_state_dict(tmp_path / "out.safetensors").values()
    assert made.dtype == torch.bfloat16 and made.tolist() == [[1.5, -2.0]]


def test_other_pickles_keep_uint16(tmp_path: Path) -> None:
    value = {"w": np.array([1, 2], "u2"), "pair": ("name", np.array([3, 4], "u2"))}
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(value))
    dtypes = {entry.key: entry.dtype for entry in open_checkpoint(tmp_path / "m.pkl").entries}
    assert dtypes == {"w": "uint16", "pair": "uint16"}


def test_slices_of_paddle_are_one_array(tmp_path: Path) -> None:
    flat = np.arange(12, dtype="f4")
    parts = {"OriginShape": (4, 3), "slices": ["w@@.0", "w@@.1"]}
    value = {"b": np.ones(3, "f4"), "w@@.0": flat[:8], "w@@.1": flat[8:], "UnpackBigParamInfor@@": {"w": parts}}
    path = tmp_path / "m.pdparams"
    path.write_bytes(pickle.dumps(value, 2))
    ckptfix.convert(path, tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth")
    assert list(made) == ["b", "w"] and made["w"].tolist() == flat.reshape(4, 3).tolist()
    del value["w@@.1"]
    path.write_bytes(pickle.dumps(value, 2))
    with pytest.raises(errors.DamagedFile, match=r"'w@@.1' of 'w' is missing"):
        ckptfix.convert(path, tmp_path / "no.pth")


def test_a_pickle_of_python_2(tmp_path: Path) -> None:
    """Names and data are a str there, and a str is bytes of any value."""

    def text(data: bytes) -> bytes:
        return b"U" + bytes([len(data)]) + data

    data = struct.pack("<4f", 1, 2, 3, 250)
    path = tmp_path / "in.pkl"
    path.write_bytes(
        b"\x80\x02}" + text(b"blobs") + b"}" + text(b"conv1_w")
        + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
        + b"\x87R(K\x01K\x02K\x02\x86cnumpy\ndtype\n" + text(b"f4") + b"K\x00K\x01\x87R(K\x03" + text(b"<")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + text(data) + b"tbss."
    )  # fmt: skip
    assert ckptfix.load_state_dict(path)["conv1_w"].tolist() == [[1, 2], [3, 250]]


def test_a_pickle_that_would_run_code_is_no_source(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.system, ("touch ran",))

    path = tmp_path / "in.pkl"
    path.write_bytes(pickle.dumps({"model": {"w": np.ones(400)}, "x": Evil()}))
    with pytest.raises(errors.UnknownFormat):
        open_checkpoint(path)
    found = ckptfix.doctor(path)
    assert any("system" in row.message + row.about for row in found.findings if row.severity == "error")


def test_numpy_arrays_of_every_layout(tmp_path: Path) -> None:
    base = np.arange(12, dtype="f4").reshape(3, 4)
    arrays: dict[str, Any] = {
        "columns": np.asfortranarray(base), "big": base.astype(">f4"), "half": np.arange(3).astype(ml_dtypes.bfloat16),
        "zero": np.float64(3), "none": np.zeros((0, 3)), "complex": np.ones((2, 2), ">c8"),
    }  # fmt: skip
    for save in (npz, packed_npz):
        save(arrays, tmp_path / "in.npz")
        got = ckptfix.load_state_dict(tmp_path / "in.npz")
        assert torch.equal(got["columns"], torch.from_numpy(base)) and torch.equal(got["big"], torch.from_numpy(base))
        assert got["half"].dtype == torch.bfloat16 and got["half"].tolist() == [0, 1, 2]
        assert (got["zero"].item(), tuple(got["none"].shape), got["complex"].tolist()) == (3, (0, 3), [[1, 1], [1, 1]])
    np.save(tmp_path / "one.npy", base)
    assert torch.equal(ckptfix.load_state_dict(tmp_path / "one.npy")["array"], torch.from_numpy(base))


def test_what_is_no_tensor_is_named_and_no_pickle_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    arrays = {"w": np.ones(2, "f4"), "o": np.array([Evil(), 1], dtype=object), "s": np.array(["a"])}
    npz(arrays, tmp_path / "in.npz")
    result = ckptfix.convert(tmp_path / "in.npz", tmp_path / "out.pth")
    named = {row.where: row.message for row in open_checkpoint(tmp_path / "in.npz").findings if row.id == "not-taken"}
    assert "pickle" in named["o"] and "text" in named["s"] and not (tmp_path / "ran").exists()
    assert result.tensors == 1


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_arrays_that_torch_has_no_type_for_do_not_keep_the_others_back(suffix: str, tmp_path: Path) -> None:
    path, out = tmp_path / "m.npz", tmp_path / f"out{suffix}"
    npz({"w": np.ones((2, 3), "f4"), "odd": np.ones(2, np.longdouble)}, path)
    with pytest.raises(errors.WouldLoseData, match="torch has no type") as caught:
        ckptfix.convert(path, out)
    assert "ckptfix repair" in str(caught.value.hint)
    result = ckptfix.repair(path, out)
    assert (result.exit_code, result.kept, [loss.name for loss in result.losses]) == (3, ("w",), ["odd"])
    assert {key: value.tolist() for key, value in ckptfix.load_state_dict(out).items()} == {"w": [[1.0] * 3] * 2}
    assert "repair" in [words[1] for line in ckptfix.doctor(path).chain if (words := line.argv())]


def test_of_arrays_with_one_name_none_is_kept(tmp_path: Path) -> None:
    value = {"a": {"b": np.ones(2, "f4")}, "a.b": np.zeros(2, "f4"), "c": np.ones(2, "f4")}
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(value))
    result = ckptfix.repair(tmp_path / "m.pkl", tmp_path / "out.pth")
    assert (result.exit_code, result.kept, [loss.name for loss in result.losses]) == (3, ("c",), ["a.b"])


def test_blocks_of_gguf_are_not_repaired(tmp_path: Path) -> None:
    data, width = blocks_of(2)
    gguf({"b": data, "w": np.ones((2, 3), "f4")}, tmp_path / "m.gguf", blocks={"b": (2, width)})
    cut = (tmp_path / "m.gguf").read_bytes()[:-32]
    (tmp_path / "m.gguf").write_bytes(cut)
    with pytest.raises(errors.CkptfixError):
        ckptfix.repair(tmp_path / "m.gguf", tmp_path / "out.pth")


@pytest.mark.parametrize("save", [npz, packed_npz])
def test_doctor_says_what_an_array_of_objects_would_run(save: Any, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.system, ("touch ran",))

    save({"w": np.ones(2, "f4"), "o": np.array([Evil(), 1], dtype=object)}, tmp_path / "in.npz")
    found = ckptfix.doctor(tmp_path / "in.npz").findings
    assert ["system" in row.message for row in found if row.id == "dangerous-global"] == [True]


def test_flax_states_of_training_and_chunks(tmp_path: Path) -> None:
    whole = np.arange(10, dtype="f4").reshape(2, 5)
    chunked = {
        "__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 5},
        "chunks": {"0": whole.reshape(-1)[:7], "1": whole.reshape(-1)[7:]},
    }  # fmt: skip
    state = {"step": 3, "params": {"d": {"kernel": chunked}}, "opt_state": {"0": {"mu": {"kernel": whole}}, "1": {}}}
    path = tmp_path / "in.msgpack"
    path.write_bytes(msgpack(state))
    checkpoint = open_checkpoint(path)
    assert [(entry.at, entry.key) for entry in checkpoint.entries] == [
        ("", "params.d.kernel"), ("opt_state", "0.mu.kernel")
    ]  # fmt: skip
    assert [row.at for row in checkpoint.state_dicts if row.optimizer] == ["opt_state"]
    for out in (tmp_path / "out.pth", tmp_path / "out.safetensors"):
        result = ckptfix.convert(path, out)
        assert set(result.left) == {"opt_state", "step"} and not result.account.lost
        assert torch.equal(ckptfix.load_state_dict(out)["params.d.kernel"], torch.from_numpy(whole))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_flax_types_that_torch_has_too(name: str, tmp_path: Path) -> None:
    value = np.array([[1.5, -2.0]], getattr(ml_dtypes, name))
    (tmp_path / "f.msgpack").write_bytes(msgpack({"params": {"w": value}}))
    (entry,) = open_checkpoint(tmp_path / "f.msgpack").entries
    assert (entry.dtype, entry.shape) == (name, (1, 2))


@pytest.mark.parametrize("order", ["<", ">"])
def test_gguf_of_both_byte_orders(order: str, tmp_path: Path) -> None:
    gguf({"w": np.arange(6, dtype="f4").reshape(2, 3)}, tmp_path / "in.gguf", order=order)
    checkpoint = open_checkpoint(tmp_path / "in.gguf")
    assert checkpoint.metadata == {"general.architecture": "llama", "tokens": "2 items"}
    assert ckptfix.load_state_dict(tmp_path / "in.gguf")["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


HALVES = {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 10: (80, 82), 11: (108,), 12: (0, 2), 13: (0, 2), 14: (208,),
          15: (), 16: (0,), 17: (0,), 18: (0,), 19: (0,), 20: (0,), 21: (0,), 22: (0,), 23: (0,), 29: (), 34: (52,),
          35: (64,), 39: (), 40: ()}  # fmt: skip
"""Number of a type that is computed -> places of the half-precision scales in its blocks."""


def blocks_of(number: int, rows: int = 4) -> tuple[np.ndarray[Any, Any], int]:
    """Return random blocks with finite scales, and the weights in a row."""
    kind = gguf_format.TYPES[number]
    count = 512 // kind.weights
    data = np.random.default_rng(number).integers(0, 256, (rows, count, kind.nbytes), dtype=np.uint8)
    for at in HALVES[number]:
        data[:, :, at : at + 2] = np.frombuffer(struct.pack("<e", 0.0123 + at / 100), np.uint8)
    if number == 15:
        data[:, :, :4] = np.frombuffer(struct.pack("<f", 0.0123), np.uint8)
    if number == 29:
        data[:, :, 55] &= 0x3F  # the upper bits of a scale in four parts
    if number == 39:
        data[:, :, 0] = 120
    return data.reshape(rows, -1), 512


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("number", HALVES)
def test_gguf_blocks_are_those_of_the_reference(number: int, tmp_path: Path) -> None:
    reference = pytest.importorskip("gguf")
    data, width = blocks_of(number)
    kind = reference.GGMLQuantizationType(number)
    path, out = tmp_path / "in.gguf", tmp_path / "out.safetensors"
    gguf({"w": data}, path, blocks={"w": (number, width)})
    try:
        wanted = reference.dequantize(data, kind)
    except NotImplementedError:  # Q8_K is for computing, and gguf has no code for it
        scale, codes = data.reshape(-1, 292)[:, :4].copy().view("<f4"), data.reshape(-1, 292)[:, 4:260].view("i1")
        wanted = (codes * scale).reshape(4, 512)
    with pytest.raises(errors.Refused, match="other formats cannot name"):
        ckptfix.convert(path, out)
    ckptfix.convert(path, out, dequantize=True)
    assert raw(ckptfix.load_state_dict(out)["w"]) == wanted.astype("f4").tobytes()
    report = ckptfix.inspect(path)
    assert report.plain_parameters == 4 * 512 and list(report.quantization) == [f"GGUF {kind.name}"]


def split_gguf(folder: Path, count: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    """Write a model in several files as llama.cpp's gguf-split does, and return its tensors."""
    arrays = {f"t{part}.weight": np.full((2, 3), part, "f4") for part in range(count)}
    for part in range(count):
        numbers = {"split.no": part, "split.count": count, "llama.attention.head_count": 4}
        gguf({f"t{part}.weight": arrays[f"t{part}.weight"]},
             folder / f"m-{part + 1:05d}-of-{count:05d}.gguf", numbers=numbers)  # fmt: skip
    return arrays


def test_gguf_in_several_files_is_one_model(tmp_path: Path) -> None:
    arrays = split_gguf(tmp_path)
    first = tmp_path / "m-00001-of-00003.gguf"
    ckptfix.convert(first, tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth")
    assert {key: value.numpy().tolist() for key, value in made.items()} == {
        key: value.tolist() for key, value in arrays.items()
    }
    assert not [key for key in open_checkpoint(first).metadata if key.startswith("split.")]


def test_the_files_of_a_gguf_model_count_once_in_a_folder(tmp_path: Path) -> None:
    from ckptfix.runner.inputs import expanded

    (tmp_path / "in").mkdir()
    split_gguf(tmp_path / "in")
    first = str(tmp_path / "in" / "m-00001-of-00003.gguf")
    assert [input.path for input in expanded([str(tmp_path / "in")], recursive=True)] == [first]
    missed = Path(first).rename(tmp_path / "first.gguf")
    assert missed.exists() and len(expanded([str(tmp_path / "in")], recursive=True)) == 2


def missing(folder: Path) -> Path:
    (folder / "m-00002-of-00003.gguf").unlink()
    return folder / "m-00001-of-00003.gguf"


def second(folder: Path) -> Path:
    return folder / "m-00002-of-00003.gguf"


def renamed(folder: Path) -> Path:
    return (folder / "m-00001-of-00003.gguf").rename(folder / "model.gguf")


def exchanged(folder: Path) -> Path:
    (folder / "m-00003-of-00003.gguf").replace(folder / "m-00002-of-00003.gguf")
    gguf({"t": np.ones(2, "f4")}, folder / "m-00003-of-00003.gguf")
    return folder / "m-00001-of-00003.gguf"


@pytest.mark.parametrize("change", [missing, second, renamed, exchanged])
def test_a_part_of_gguf_is_not_a_model(change: Callable[[Path], Path], tmp_path: Path) -> None:
    split_gguf(tmp_path)
    path = change(tmp_path)
    assert [row.id for row in open_checkpoint(path).findings if row.severity == "error"][:1] == ["missing-shard"]
    with pytest.raises(errors.WouldLoseData, match="part"):
        ckptfix.convert(path, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(("change", "error"), [
    (second, "illegal split file idx: 1 (file: m-00002-of-00003.gguf), model must be loaded with the first split"),
    (renamed, "invalid split file name: model.gguf"),
    (missing, "llama_model_load: error loading model: failed to load GGUF split from m-00002-of-00003.gguf"),
])  # fmt: skip
def test_errors_of_llama_cpp_about_parts_are_known(
    change: Callable[[Path], Path], error: str, tmp_path: Path
) -> None:
    split_gguf(tmp_path)
    diagnosis = ckptfix.doctor(change(tmp_path), error=error)
    assert diagnosis.message is not None and diagnosis.findings[0].id == "missing-shard"
    assert LoadError.SHARD_MISSING in errors_of(diagnosis.findings[0])


def test_gguf_types_without_a_formula_are_named(tmp_path: Path) -> None:
    gguf({"w": np.zeros((2, 36), np.uint8)}, tmp_path / "in.gguf", blocks={"w": (9, 32)})
    with pytest.raises(errors.Refused, match="Q8_1") as caught:
        ckptfix.convert(tmp_path / "in.gguf", tmp_path / "out.safetensors", dequantize=True)
    assert caught.value.where == "w" and not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("number", [2, 29])
def test_gguf_scales_that_are_not_finite_are_refused(tmp_path: Path, number: int) -> None:
    data, width = blocks_of(number)
    if number == 2:
        data[1, :2] = np.frombuffer(struct.pack("<e", float("inf")), np.uint8)
    else:
        data[1, 48:56] = 0xFF  # the parts of the scale
    gguf({"w": data}, tmp_path / "in.gguf", blocks={"w": (number, width)})
    with pytest.raises(errors.Refused, match="not finite"):
        ckptfix.convert(tmp_path / "in.gguf", tmp_path / "out.safetensors", dequantize=True)
    assert not (tmp_path / "out.safetensors").exists()


def test_onnx_numbers_in_typed_fields_and_outside_files(tmp_path: Path) -> None:
    path = tmp_path / "in.onnx"
    signed = np.array([-1, 2, 1 << 40], "i8")
    packed = b"".join(varint_of(int(number)) for number in signed)
    halves = np.array([1.5, -2], "f2")
    stated = b"".join(varint_of(int(number)) for number in halves.view("u2"))
    outside = np.arange(4, dtype="f4")
    (tmp_path / "data.bin").write_bytes(b"skip" + outside.tobytes())
    pairs = ((b"location", b"data.bin"), (b"offset", b"4"), (b"length", b"16"))
    external = [(13, proto((1, key), (2, value))) for key, value in pairs]
    path.write_bytes(
        onnx_model(
            onnx_tensor("floats", np.ones(2, "f4"), (4, struct.pack("<2f", 1, 2))),
            onnx_tensor("longs", signed, (7, packed)),
            onnx_tensor("halves", halves, (5, stated)),
            onnx_tensor("outside", outside, *external, (14, 1)),
        )
    )
    got = ckptfix.load_state_dict(path)
    assert {key: value.tolist() for key, value in got.items()} == {
        "floats": [1, 2], "longs": signed.tolist(), "halves": [1.5, -2], "outside": [0, 1, 2, 3]
    }  # fmt: skip
    assert ckptfix.convert(path, tmp_path / "out.pth").exit_code == 0


def test_onnx_numbers_in_several_pieces(tmp_path: Path) -> None:
    """Packed and single numbers may follow each other, and two numbers of four bits share one."""
    packed = b"".join(varint(number) for number in (1, 2))
    mixed = onnx_tensor("mixed", np.zeros(4, "i4"), (5, packed), (5, 3), (5, varint(4)))
    half = proto((1, 3), (2, 22), (8, b"half"), (5, varint(0xF1) + varint(0x02)))
    (tmp_path / "m.onnx").write_bytes(onnx_model(mixed, half))
    checkpoint = open_checkpoint(tmp_path / "m.onnx")
    data = {}
    for entry in checkpoint.entries:
        assert entry.storage is not None and entry.storage.data is not None
        data[entry.key] = b"".join(read_chunks(entry.storage.data))
    assert data["mixed"] == np.array([1, 2, 3, 4], "<i4").tobytes()
    assert data["half"] == b"\xf1\x02"
    assert [row.message for row in checkpoint.findings if row.where == "half"] == [
        "torch has no type for INT4 [3]; read as 2 raw bytes"
    ]


def varint_of(number: int) -> bytes:
    return varint(number % (1 << 64))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link"])
def test_onnx_data_outside_the_folder_is_never_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    pair = proto((1, b"location"), (2, name.encode()))
    (folder / "in.onnx").write_bytes(onnx_model(onnx_tensor("w", np.ones(4, "f4"), (13, pair), (14, 1))))
    checkpoint = open_checkpoint(folder / "in.onnx")
    assert [(row.id, row.where) for row in checkpoint.findings] == [("bad-tensor", "w")] and not checkpoint.entries
    assert "leads out of" in checkpoint.findings[0].message


def test_tensorflow_shards_and_a_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt-7.index"
    tensorflow({"a/w": np.ones(3, "f4"), "b/w": np.full((2, 2), 2, "i4")}, path, shards=2)
    assert {key: value.sum().item() for key, value in ckptfix.load_state_dict(path).items()} == {"a/w": 3, "b/w": 8}
    (tmp_path / "model.ckpt-7.data-00001-of-00002").unlink()
    with pytest.raises(errors.Truncated, match=r"data-00001-of-00002 is missing \(1 of 2\)"):
        open_checkpoint(path)


def test_hdf5_links_and_compressed_data(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "outside.bin").write_bytes(bytes(64))
    path = tmp_path / "in.h5"
    value = np.arange(6000, dtype="f4").reshape(1000, 6)
    with h5py.File(path, "w") as file:
        file.create_dataset("layer/w", data=value, compression="gzip")
        file["text"], file["soft"], file["away"] = "hello", h5py.SoftLink("/layer/w"), h5py.ExternalLink("x.h5", "/w")
        file.create_dataset("bomb", shape=(1 << 40,), dtype="u1", chunks=(1 << 20,), compression="gzip")
        file.create_dataset("out", (3,), "f4", external=[(str(tmp_path / "outside.bin"), 0, h5py.h5f.UNLIMITED)])
    checkpoint = open_checkpoint(path)
    assert {row.where: row.id for row in checkpoint.findings} == {
        "soft": "bad-tensor", "away": "bad-tensor", "bomb": "bad-tensor", "out": "bad-tensor",
        "text": "not-taken",
    }
    (entry,) = checkpoint.entries
    assert entry.storage is not None and entry.storage.data is not None
    assert b"".join(read_chunks(entry.storage.data)) == value.tobytes()


def test_hdf5_second_names_of_a_group_are_named(tmp_path: Path) -> None:
    """A hard link may lead back into the group, so only its first name is followed, and no array is lost silently."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["a/kernel"] = np.ones((2, 3), "f4")
        file["b"] = file["a"]
        file["c/kernel"] = file["a/kernel"]
    checkpoint = open_checkpoint(tmp_path / "m.h5")
    assert [entry.key for entry in checkpoint.entries] == ["a.kernel", "c.kernel"]
    with pytest.raises(errors.WouldLoseData, match="second name of a group"):
        ckptfix.convert(tmp_path / "m.h5", tmp_path / "out.pth")


@pytest.mark.parametrize("fill", [b"\0", b"\xff"])
def test_hdf5_attributes_are_not_read(fill: bytes, tmp_path: Path) -> None:
    """A damaged heap of texts keeps the library busy for ever, and no weight is in it."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as file:
        file["w"], file.attrs["keras_version"] = np.arange(6, dtype="f4"), "3.15"
    whole = path.read_bytes()
    at = whole.index(b"GCOL") + 8
    path.write_bytes(whole[:at] + fill * 64 + whole[at + 64 :])
    assert ckptfix.load_state_dict(path)["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_without_h5py_the_file_is_said_for_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(1000))
    monkeypatch.setattr("ckptfix.formats.arrays.hdf5.available", lambda: False)
    (row,) = [row for row in ckptfix.doctor(path).findings if row.severity == "error"]
    assert row.id == "other-framework" and "HDF5" in row.message
    done = CliRunner().invoke(commands, ["doctor", str(path), "--json"])
    assert "ckptfix[hdf5]" in json.dumps(json.loads(done.output))


@pytest.mark.slow
@pytest.mark.parametrize("zarr3", [False, True])
def test_orbax_folders_of_arrays(zarr3: bool, tmp_path: Path) -> None:
    need("orbax")
    arrays = {"params.w": np.arange(30, dtype="f4").reshape(5, 6), "opt_state.mu": np.ones(3, "f4")}
    path = tmp_path / "in"
    orbax(arrays, path, ocdbt=False, zarr3=zarr3)
    checkpoint = open_checkpoint(path)
    assert {(entry.at, entry.key) for entry in checkpoint.entries} == {("", "params.w"), ("opt_state", "mu")}
    assert [row.at for row in checkpoint.state_dicts if row.optimizer] == ["opt_state"]
    for file in [file for file in sorted(path.rglob("*")) if file.is_file()]:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        assert [row for row in ckptfix.doctor(path).findings if row.severity == "error"], file.name
        file.write_bytes(whole)
    ckptfix.convert(path, tmp_path / "out.safetensors")
    assert ckptfix.load_state_dict(tmp_path / "out.safetensors")["params.w"].tolist() == arrays["params.w"].tolist()


def test_orbax_steps_have_items(tmp_path: Path) -> None:
    need("orbax")
    step = tmp_path / "100"
    step.mkdir()
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    orbax({"w": np.ones(2, "f4")}, step / "params")
    assert [entry.name for entry in open_checkpoint(step).entries] == ["w"]
    orbax({"w": np.zeros(2, "f4")}, step / "ema")
    assert [entry.name for entry in open_checkpoint(step).entries] == ["ema/w", "params/w"]
    assert ckptfix.load_state_dict(step, at="params")["w"].tolist() == [1, 1]


@pytest.mark.parametrize("key", ["../w", "/etc/passwd", ".."])
def test_orbax_names_stay_in_the_folder(key: str, tmp_path: Path) -> None:
    need("orbax")
    orbax({"w": np.ones(2, "f4"), "x": np.ones(2, "f4")}, tmp_path / "in", ocdbt=False)
    tree = tmp_path / "in" / "_METADATA"
    tree.write_text(tree.read_text().replace('"key": "w"', f'"key": "{key}"'))
    checkpoint = open_checkpoint(tmp_path / "in")
    assert [entry.key for entry in checkpoint.entries] == ["x"]
    (row,) = checkpoint.findings
    assert row.id == "bad-tensor" and "out of the folder" in row.message


def test_orbax_links_are_not_followed(tmp_path: Path) -> None:
    need("orbax")
    orbax({"w": np.ones(2, "f4")}, tmp_path / "in", ocdbt=False)
    (tmp_path / "in" / "w").rename(tmp_path / "w")
    (tmp_path / "in" / "w").symlink_to(tmp_path / "w")
    with pytest.raises(errors.DamagedFile, match="link"):
        open_checkpoint(tmp_path / "in")
    (tmp_path / "in" / "w").unlink()
    (tmp_path / "w").rename(tmp_path / "in" / "w")
    (tmp_path / "in" / "w" / "0").rename(tmp_path / "0")
    (tmp_path / "in" / "w" / "0").symlink_to(tmp_path / "0")
    with pytest.raises(errors.DamagedFile, match="link"):
        open_checkpoint(tmp_path / "in")


def test_without_tensorstore_the_folder_is_said_for_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_METADATA").write_text("{}")
    monkeypatch.setattr("ckptfix.formats.arrays.orbax.available", lambda: False)
    done = CliRunner().invoke(commands, ["convert", str(tmp_path), str(tmp_path / "out.pth")])
    assert done.exit_code == 2 and "orbax" in done.output and "ckptfix[orbax]" in done.output


def bomb_npz(path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }\n"
        archive.writestr("w.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)


def deep_msgpack(path: Path) -> None:
    path.write_bytes(b"\x81\xa1a" * 100_000 + b"\xc0")


def long_msgpack(path: Path) -> None:
    path.write_bytes(b"\x81\xa1a\xdd\xff\xff\xff\xff" + b"\xc0" * 1000)


def wide_gguf(path: Path) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0))


def huge_gguf(path: Path) -> None:
    gguf({"w": np.zeros((1, 4), "f4")}, path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(struct.pack("<QQ", 4, 1), struct.pack("<QQ", 1 << 40, 1 << 40), 1))


def huge_onnx(path: Path) -> None:
    path.write_bytes(onnx_model(proto((1, 1 << 40), (1, 1 << 40), (2, 1), (8, b"w"), (9, b"1234"))))


@pytest.mark.parametrize("make", [bomb_npz, deep_msgpack, long_msgpack, wide_gguf, huge_gguf, huge_onnx])
def test_hostile_sizes_are_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "in.bin"
    make(path)
    try:
        checkpoint = open_checkpoint(path)
    except errors.CkptfixError:
        return
    assert [row for row in checkpoint.findings if row.id in ("bad-tensor", "truncated")] and not checkpoint.entries


def test_a_file_of_flax_in_a_real_zlib_stream_is_not_flax(tmp_path: Path) -> None:
    """MessagePack has no magic number: what only begins like it is not taken for it."""
    for content in (b"\x81\xa5hello" + zlib.compress(b"x" * 1000), b"\x82\xa1a\x01\xa1b\x02"):
        path = tmp_path / "in.bin"
        path.write_bytes(content)
        with pytest.raises(errors.UnknownFormat):
            detect(path)


def test_the_real_libraries_files_are_read(tmp_path: Path) -> None:
    """Those that are installed here."""
    library = pytest.importorskip("onnx")
    tensor = library.numpy_helper.from_array(np.ones((64, 64), "f4"), "w")
    graph = library.helper.make_graph([], "g", [], [], [tensor])
    model = library.helper.make_model(graph)
    library.save(model, str(tmp_path / "a.onnx"))
    library.save(
        model, str(tmp_path / "b.onnx"), save_as_external_data=True, location="b.bin", size_threshold=10
    )
    for name in ("a.onnx", "b.onnx"):
        assert torch.equal(ckptfix.load_state_dict(tmp_path / name)["w"], torch.ones(64, 64))

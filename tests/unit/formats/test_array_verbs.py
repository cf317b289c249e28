"""Each kind of file of other frameworks, with each command that reads one, alone and in a folder."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from array_files import WRITERS, msgpack
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import ckptfix
from ckptfix.browse.model.contents import read
from ckptfix.cli import commands
from ckptfix.formats import open_checkpoint

ARRAYS = {"weight": np.arange(12, dtype="f4").reshape(3, 4), "bias": np.ones(3, "f4")}
DATA = ("arrays", "npz")
"""Kinds that a search leaves out, because most of their files hold data and no model."""

VERBS: dict[str, tuple[str, ...]] = {
    "inspect": (), "ls": (), "doctor": (), "digest": (), "stats": (), "diff": ("IN",), "match": ("--like", "LIKE"),
    "convert": ("OUT.safetensors",), "convert to torch": ("OUT.pth",), "convert to hf": ("OUT", "--to", "hf"),
    "extract": ("OUT.pth",), "select": ("OUT.pth", "--keep", "weight"), "cast": ("OUT.pth", "--to", "bfloat16"),
    "rename": ("OUT.pth", "--sub", "^=m."),
}  # fmt: skip
"""Command -> its arguments; a second word only tells two of one command apart."""

every = pytest.mark.parametrize("kind", WRITERS)


def made(kind: str, folder: Path) -> Path:
    if kind in ("hdf5", "keras", "orbax"):
        pytest.importorskip("tensorstore" if kind == "orbax" else "h5py")
    path = folder / f"in{WRITERS[kind].suffix}"
    WRITERS[kind].save(ARRAYS, path)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(commands, [str(word) for word in words])


REFUSED: dict[str, tuple[str, ...]] = {
    "rename": ("--sub", "none=x"), "select": ("--drop", "none*"), "cast": ("--to", "bfloat16", "--only", "none*"),
    "convert": ("--names", "meta:hf"), "lora merge": (),
}  # fmt: skip
"""Command -> options with which it refuses the arrays."""


@pytest.mark.parametrize("verb", REFUSED)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_errors_name_the_input_and_not_the_output(verb: str, suffix: str, tmp_path: Path) -> None:
    """The steps of a command read planned files, and one of these has the name of the output."""
    path, out = made("npz", tmp_path), tmp_path / f"out{suffix}"
    done = run(*verb.split(), path, "-o", out, *REFUSED[verb])
    assert done.exit_code == 2 and str(path) in done.stderr and str(out) not in done.stderr


@every
@pytest.mark.parametrize("verb", VERBS)
def test_every_command_takes_every_kind(kind: str, verb: str, tmp_path: Path) -> None:
    path, like, out = made(kind, tmp_path), tmp_path / "like.pth", str(tmp_path / "out")
    torch.save(torch.nn.Linear(4, 3).state_dict(), like)
    words = [word.replace("OUT", out).replace("IN", str(path)).replace("LIKE", str(like)) for word in VERBS[verb]]
    done = run(verb.split()[0], path, *words)
    assert done.exit_code == (verb == "doctor"), done.output
    assert "bug in ckptfix" not in done.output
    written = [Path(word) for word in words if word.startswith(out)]
    for one in written:
        state = ckptfix.load_state_dict(one)
        weight = state["m.weight" if verb == "rename" else "weight"]
        assert np.array_equal(weight.float().numpy(), ARRAYS["weight"])


@every
def test_the_browser_opens_every_kind(kind: str, tmp_path: Path) -> None:
    assert {item.name for item in read(str(made(kind, tmp_path))).items} >= {"weight", "bias"}


@pytest.mark.sampled(quick=3)
@every
def test_a_search_of_a_folder_finds_models_and_leaves_data_out(kind: str, tmp_path: Path) -> None:
    path = made(kind, tmp_path)
    (tmp_path / "notes.txt").write_text("a model")
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pth")
    done = run("ls", "-r", tmp_path, "--json")
    assert (str(path) in done.output) == (kind not in DATA), done.output


def test_tensors_of_paddle_are_arrays_with_names(tmp_path: Path) -> None:
    table = {"fc.weight": "linear_0.w_0"}
    plain = {"fc.weight": ARRAYS["weight"], "StructuredToParameterName@@": table}
    for obj in (plain, {"fc.weight": ("linear_0.w_0", ARRAYS["weight"])}):
        (tmp_path / "m.pdparams").write_bytes(pickle.dumps(obj, protocol=4))
        state = ckptfix.load_state_dict(tmp_path / "m.pdparams")
        assert [*state] == ["fc.weight"] and np.array_equal(state["fc.weight"].numpy(), ARRAYS["weight"])


def test_codes_of_mlx_in_an_archive_are_those_in_safetensors(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 1 << 32, (8, 16), dtype=np.uint64).astype("u4")
    rest = {name: draw.normal(size=(8, 2)).astype("f2") for name in ("fc.scales", "fc.biases")}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"group_size": 64, "bits": 4}}))
    save_file({"fc.weight": codes, **rest}, tmp_path / "a.safetensors")
    with (tmp_path / "b.npz").open("wb") as file:
        np.savez(file, **{"fc.weight": codes, **rest})  # type: ignore[arg-type]
    states = []
    for name in ("a.safetensors", "b.npz"):
        ckptfix.convert(tmp_path / name, tmp_path / f"{name}.out.safetensors", dequantize=True)
        states.append(ckptfix.load_state_dict(tmp_path / f"{name}.out.safetensors"))
    assert [*states[0]] == [*states[1]] == ["fc.weight"] and states[0]["fc.weight"].shape == (8, 128)
    assert torch.equal(states[0]["fc.weight"], states[1]["fc.weight"])


NAMED: dict[str, tuple[str, str]] = {
    "m.params": ("MXNet parameters", "mxnet.nd.load"), "m.xml": ("an OpenVINO model", "read_model"),
    "m.bin": ("the weights of an OpenVINO model", "read_model"),
    "saved": ("a TensorFlow SavedModel", "variables.index"),
    "old": ("an orbax checkpoint (JAX) of before 2024", "file checkpoint"),
}  # fmt: skip
"""File -> what it is, and a word of what reads it."""


@pytest.mark.parametrize("name", NAMED)
def test_what_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.params").write_bytes(struct.pack("<QQ", 0x112, 0) + bytes(64))
    (tmp_path / "m.xml").write_text('<?xml version="1.0"?>\n<net name="Model0" version="11">\n</net>')
    (tmp_path / "m.bin").write_bytes(np.ones(100, "f4").tobytes())
    for folder in ("saved", "old"):
        (tmp_path / folder).mkdir()
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"\x08\x01")
    (tmp_path / "old" / "checkpoint").write_bytes(msgpack({"params": {"w": ARRAYS["weight"], "v": "PLACEHOLDER://v"}}))
    done = run("inspect", tmp_path / name)
    assert done.exit_code == 2 and all(word in done.output for word in NAMED[name]), done.output


def older_orbax(folder: Path, *, ocdbt: bool) -> Path:
    """A tree whose array v is stored beside it, as orbax did until 2023."""
    from array_files import orbax

    orbax({"params.v": ARRAYS["weight"]}, folder / "in", ocdbt=ocdbt)
    (folder / "in" / "_METADATA").unlink()
    tree = {"params": {"w": ARRAYS["bias"], "v": "PLACEHOLDER://params.v"}}
    (folder / "in" / "checkpoint").write_bytes(msgpack(tree))
    return folder / "in" / "checkpoint"


@pytest.mark.parametrize("ocdbt", [False, True])
def test_arrays_beside_the_tree_of_an_older_orbax_are_read(ocdbt: bool, tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    path = older_orbax(tmp_path, ocdbt=ocdbt)
    ckptfix.convert(path, tmp_path / "out.safetensors")
    state = ckptfix.load_state_dict(tmp_path / "out.safetensors")
    assert np.array_equal(state["params.v"].numpy(), ARRAYS["weight"])
    assert np.array_equal(state["params.w"].numpy(), ARRAYS["bias"])


@pytest.mark.parametrize("name", ["params.v", "../params.v", "", ".."])
def test_a_tree_of_an_older_orbax_names_the_arrays_that_are_not_there(name: str, tmp_path: Path) -> None:
    tree = {"params": {"w": ARRAYS["weight"], "v": f"PLACEHOLDER://{name}"}}
    (tmp_path / "checkpoint").write_bytes(msgpack(tree))
    checkpoint = open_checkpoint(tmp_path / "checkpoint")
    assert [entry.key for entry in checkpoint.entries] == ["params.w"]
    assert [(row.id, row.where) for row in checkpoint.findings] == [("bad-tensor", "params.v")]


def test_a_folder_of_an_array_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    path = older_orbax(tmp_path, ocdbt=False)
    (path.parent / "params.v").rename(tmp_path / "elsewhere")
    (path.parent / "params.v").symlink_to(tmp_path / "elsewhere")
    checkpoint = open_checkpoint(path)
    assert [entry.key for entry in checkpoint.entries] == ["params.w"] and len(checkpoint.findings) == 1


OBJECTS: dict[str, tuple[str, str]] = {
    "sklearn": ("sklearn.linear_model._logistic", "LogisticRegression"),
    "StyleGAN": ("dnnlib.tflib.network", "Network"),
}
"""Whose pickle -> the module and the class of the object in it."""


@pytest.mark.parametrize("what", OBJECTS)
def test_pickles_of_objects_with_arrays_are_said_for_what_they_are(what: str, tmp_path: Path) -> None:
    """Nothing of them is read: the object may do anything with its arrays. Its class is named."""
    module, name = OBJECTS[what]
    state = pickle.dumps({"coef_": ARRAYS["weight"]}, protocol=3)[2:-1]
    text = [bytes([0x8C, len(word)]) + word.encode() for word in (module, name)]
    (tmp_path / "in.pkl").write_bytes(b"\x80\x04" + text[0] + text[1] + b"\x93)\x81" + state + b"b.")
    done = run("inspect", tmp_path / "in.pkl")
    assert done.exit_code == 2 and "a plain pickle" in done.output and "of NumPy arrays" in done.output, done.output
    done = run("doctor", tmp_path / "in.pkl")
    assert done.exit_code == 1 and f"{module}.{name}" in done.output, done.output
    assert run("convert", tmp_path / "in.pkl", tmp_path / "out.pth").exit_code == 2
    assert not (tmp_path / "out.pth").exists()


def in_flax(folder: Path, *, layer: str = "Dense_0") -> tuple[Path, Path]:
    """A file of Flax, and a model with other names, for which its kernel must be turned."""
    arrays = {f"params.{layer}.kernel": ARRAYS["weight"].T.copy(), f"params.{layer}.bias": ARRAYS["bias"]}
    WRITERS["flax"].save(arrays, folder / "net.msgpack")
    torch.save(torch.nn.Sequential(torch.nn.Linear(4, 3)).state_dict(), folder / "model.pth")
    return folder / "net.msgpack", folder / "model.pth"


def test_fix_matches_a_file_whose_kernels_must_be_turned(tmp_path: Path) -> None:
    path, like = in_flax(tmp_path)
    done = run("fix", path, tmp_path / "out.pth", "--like", like)
    assert done.exit_code == 0, done.output
    state = ckptfix.load_state_dict(tmp_path / "out.pth")
    assert np.array_equal(state["0.weight"].numpy(), ARRAYS["weight"]) and [*state] == ["0.weight", "0.bias"]


def test_doctor_names_match_for_it(tmp_path: Path) -> None:
    path, like = in_flax(tmp_path)
    found = ckptfix.doctor(path, like=like)
    assert "match" in [words[1] for words in found.fixes]
    assert "no renaming" not in run("doctor", path, "--like", like).output


def test_doctor_says_why_no_command_matches_a_layer(tmp_path: Path) -> None:
    path, like = in_flax(tmp_path, layer="ConvTranspose_0")
    done = run("doctor", path, "--like", like)
    assert done.exit_code == 1 and "mirrored" in done.output and "ConvTranspose_0.kernel" in done.output

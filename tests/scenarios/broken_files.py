"""A broken file for every load error of the catalogue: how it is built, how a loader fails at it, what fixes it.

Each builder writes into a folder and returns the file; its row says which `LoadError` it is, by number,
the id of the finding that explains it, and the message that users paste. Where the loader here gives the message
itself, `fails` calls it.
"""

from __future__ import annotations

import collections
import gzip
import io
import json
import pickle
import shutil
import sys
import types
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import builders
import numpy
import torch
from builders import Tensor, assemble, push, state_dict_ops
from safetensors.torch import load_file, save_file
from torch import nn

import ckptfix

Build = Callable[[Path], Path]
Use = Callable[[Path], Any]

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 1340616616\n".encode()


@dataclass(frozen=True)
class Case:
    """A load error.

    Attributes:
        row: its number.
        id: the finding that explains it.
        message: as users paste it.
        build: makes the file in a folder.
        fails: what fails, and a part of what it says; None where no loader here says it.
        loads: what works on the fixed file.
        like: makes the model's side.
        words: a part of the remedy, where it is an instruction and no command.
        code: exit code of the fixing command.
    """

    name: str
    row: int
    id: str
    message: str
    build: Build
    fails: tuple[Use, str] | None = None
    loads: Use | None = None
    like: Build | None = None
    words: str = ""
    code: int = 0


CASES: list[Case] = []


def case(row: int, id: str, message: str, **options: Any) -> Callable[[Build], Build]:
    """A row for the builder below."""

    def add(build: Build) -> Build:
        CASES.append(Case(f"{row}-{build.__name__}", row, id, message, build, **options))
        return build

    return add


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(collections.OrderedDict(fc=nn.Linear(3, 5), norm=nn.LayerNorm(5), head=nn.Linear(5, 2)))


def big() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(200, 200), "b.weight": torch.randn(200, 200)}


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def unpickled(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def load_any(path: Path) -> Any:
    return load_file(path) if path.suffix == ".safetensors" else load(path)


def strict(path: Path) -> Any:
    """The file's state dict into a plain model, every name of it."""
    return net().load_state_dict(load_any(path))


def into(path: Path) -> Any:
    return ckptfix.load_into(net(), path)


def saved(folder: Path, value: Any, name: str = "model.pth", **options: Any) -> Path:
    torch.save(value, folder / name, **options)
    return folder / name


def written(folder: Path, data: bytes, name: str = "model.pth") -> Path:
    return builders.written(folder / name, data)


def content(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in net().state_dict().items()}


@contextmanager
def module(name: str, **classes: type) -> Iterator[None]:
    """A module of classes that is there while something is pickled, and gone afterwards."""
    made = types.ModuleType(name)
    for label, cls in classes.items():
        cls.__module__, cls.__qualname__, cls.__name__ = name, label, label
        setattr(made, label, cls)
    before = sys.modules.get(name)
    sys.modules[name] = made
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


def gone(name: str, label: str, value: Callable[[type], Any], base: type = object) -> bytes:
    """What torch.save makes of `value(class)`, whose class is gone afterwards."""
    cls = type(label, (base,), {})
    with module(name, **{label: cls}):
        return content(value(cls))


def torch_zip(ops: list[Any], *storages: bytes, **layout: Any) -> bytes:
    return builders.torch_zip(assemble(("PROTO", 2), *ops, "STOP"), list(storages), **layout)


ONE = builders.Tensor("0", (2,), 2)
DATA = numpy.array([1.5, 2.5], "<f4").tobytes()


def tagged(folder: Path, device: str) -> Path:
    plain = saved(folder, net().state_dict(), "plain.pth")
    ckptfix.map_location(plain, folder / "model.pth", device)
    plain.unlink()
    return folder / "model.pth"


def keys_json(folder: Path, shapes: dict[str, list[int]]) -> Path:
    return written(folder, json.dumps(shapes).encode(), "keys.json")


def like_net(folder: Path) -> Path:
    return keys_json(folder, {name: list(value.shape) for name, value in net().state_dict().items()})


@case(1, "truncated", "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
      fails=(load, "central directory"), loads=load, code=3)  # fmt: skip
def cut_zip(folder: Path) -> Path:
    whole = content(big())
    return written(folder, whole[: len(whole) * 6 // 10])


@case(1, "trailing-bytes", "failed finding central directory", fails=(load, "central directory"), loads=load)
def long_tail(folder: Path) -> Path:
    return written(folder, content(big()) + b"\1" * 70_000)


@case(2, "wrapped-names", 'Unexpected key(s) in state_dict: "module.fc.weight"', fails=(strict, "Unexpected key"),
      loads=strict)  # fmt: skip
def parallel(folder: Path) -> Path:
    return saved(folder, prefixed("module."))


@case(3, "foreign-global", "Weights only load failed. WeightsUnpickler error: Unsupported global: GLOBAL "
      "numpy._core.multiarray.scalar was not an allowed global", fails=(load, "Unsupported global"), loads=load)
def numpy_scalar(folder: Path) -> Path:
    return saved(folder, {"state_dict": net().state_dict(), "best": numpy.float64(0.5)})


def grown(path: Path) -> Any:
    model = nn.Sequential(collections.OrderedDict(fc=nn.Linear(3, 5), norm=nn.LayerNorm(5), head=nn.Linear(5, 7)))
    return model.load_state_dict(load(path), strict=False)


@case(4, "shape-mismatch", "size mismatch for head.weight: copying a param with shape torch.Size([2, 5])",
      fails=(grown, "size mismatch"), words="strict=False",
      like=lambda folder: keys_json(folder, {"fc.weight": [5, 3], "fc.bias": [5], "norm.weight": [5],
                                             "norm.bias": [5], "head.weight": [7, 5], "head.bias": [7]}))  # fmt: skip
def other_head(folder: Path) -> Path:
    return saved(folder, net().state_dict())


@case(5, "device-tags", "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False",
      fails=(load, "CUDA"), loads=strict)  # fmt: skip
def cuda(folder: Path) -> Path:
    return tagged(folder, "cuda:2")


@case(6, "lfs-pointer", "_pickle.UnpicklingError: invalid load key, 'v'.", fails=(load, "operand 118"),
      words="git lfs pull")  # fmt: skip
def pointer(folder: Path) -> Path:
    return written(folder, POINTER)


@case(7, "web-page", "invalid load key, '<'.", fails=(load, "operand 60"), words="download")
def html(folder: Path) -> Path:
    return written(folder, b"<!DOCTYPE html><html><title>Sign in</title></html>")


@case(7, "json-file", "invalid load key, '{'.", fails=(load, "operand 123"), words="download")
def message(folder: Path) -> Path:
    return written(folder, b'{"error": "not found"}')


@case(7, "compressed", "invalid load key, '\\x1f'.", fails=(load, "operand 31"), loads=strict)
def gzipped(folder: Path) -> Path:
    return written(folder, gzip.compress(content(net().state_dict())), "model.pth.gz")


@case(7, "zero-filled", "invalid load key, '\\x00'.", fails=(load, "operand 0|tar|corrupt|magic"), words="again")
def nuls(folder: Path) -> Path:
    return written(folder, bytes(5000))


@case(8, "whole-module", "ModuleNotFoundError: No module named 'models'",
      fails=(unpickled, "No module named 'models_of_a_repository'"), loads=load)  # fmt: skip
def repository(folder: Path) -> Path:
    def make(cls: type) -> Any:
        model = cls()
        model.fc = nn.Linear(3, 5)
        return model

    return written(folder, gone("models_of_a_repository", "Net", make, nn.Module))


@case(9, "whole-module", "AttributeError: Can't get attribute 'Net' on <module '__main__'>",
      fails=(unpickled, "attribute|No module"), loads=load)  # fmt: skip
def script(folder: Path) -> Path:
    def make(cls: type) -> Any:
        model = cls()
        model.fc = nn.Linear(3, 5)
        return model

    return written(folder, gone("__main__", "NetOfAScript", make, nn.Module))


@case(9, "whole-module", "AttributeError: module '__main__' has no attribute 'NetOfAScript'",
      fails=(unpickled, "attribute|No module"), loads=load)  # fmt: skip
def script_on_a_newer_python(folder: Path) -> Path:
    return script(folder)


@case(9, "foreign-global", "AttributeError: Can't get attribute 'RecorderMeter' on <module '__main__'>",
      fails=(unpickled, "RecorderMeter"), loads=load)  # fmt: skip
def meter(folder: Path) -> Path:
    data = gone("__main__", "RecorderMeter", lambda cls: {"state_dict": net().state_dict(), "meter": cls()})
    return written(folder, data)


@case(10, "whole-module", "'Upsample' object has no attribute 'recompute_scale_factor'", loads=load)
def old_module(folder: Path) -> Path:
    model = nn.Sequential(nn.Linear(2, 2), nn.Upsample(scale_factor=2))
    del model[1].recompute_scale_factor
    return saved(folder, model)


def open_safetensors(path: Path) -> Any:
    return load_file(path)


@case(11, "lfs-pointer", "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
      fails=(open_safetensors, "(?i)header *too *large"), words="git lfs pull")  # fmt: skip
def safetensors_pointer(folder: Path) -> Path:
    return written(folder, POINTER, "model.safetensors")


@case(11, "wrong-suffix", "Error while deserializing header: HeaderTooLarge",
      fails=(open_safetensors, "(?i)header *too *large"), loads=open_safetensors)  # fmt: skip
def renamed(folder: Path) -> Path:
    return saved(folder, net().state_dict(), "model.safetensors")


@case(12, "foreign-global", "No module named 'pytorch_lightning'", fails=(unpickled, "No module named"), loads=load)
def lightning(folder: Path) -> Path:
    data = gone("pytorch_lightning_gone", "AttributeDict", lambda cls: {"state_dict": net().state_dict(), "h": cls()})
    return written(folder, data, "model.ckpt")


@case(13, "wrapped-names", 'Missing key(s) in state_dict: "fc.weight". Unexpected key(s): "_orig_mod.module.fc.weight"',
      fails=(strict, "_orig_mod"), loads=strict)  # fmt: skip
def compiled(folder: Path) -> Path:
    return saved(folder, prefixed("module._orig_mod."))


def optimizer_of(path: Path) -> Any:
    model = nn.Sequential(collections.OrderedDict(fc=nn.Linear(3, 5)))
    return torch.optim.Adam(model.parameters()).load_state_dict(load(path)["optimizer"])


@case(14, "optimizer-groups", "loaded state dict contains a parameter group that doesn't match the size of "
      "optimizer's group", fails=(optimizer_of, "match the size"), loads=load, words="load_optimizer",
      like=lambda folder: keys_json(folder, {"fc.weight": [5, 3], "fc.bias": [5]}))  # fmt: skip
def optimizer(folder: Path) -> Path:
    made = torch.optim.Adam(net().parameters())
    return saved(folder, {"model": net().state_dict(), "optimizer": made.state_dict()})


def unzipped_into(folder: Path) -> Path:
    with zipfile.ZipFile(io.BytesIO(content(net().state_dict()))) as archive:
        archive.extractall(folder)
    (folder / "archive").rename(folder / "model")
    return folder / "model"


def pickle_load(path: Path) -> Any:
    with open(path / "data.pkl", "rb") as file:
        return pickle.load(file)


@case(15, "unzipped-folder", "UnpicklingError: A load persistent id instruction was encountered, but no "
      "persistent_load function was specified.", fails=(pickle_load, "persistent"), loads=strict)
def unzipped(folder: Path) -> Path:
    return unzipped_into(folder)


@case(16, "needs-torch", "model.pth is a zip archive (did you mean to use torch.jit.load()?)", loads=strict)
def before_torch_1_6(folder: Path) -> Path:
    return saved(folder, net().state_dict())


@case(17, "truncated", "OSError: Unable to load weights from pytorch checkpoint file. If you tried to load a PyTorch "
      "model from a TF 2.0 checkpoint, please set from_tf=True.", loads=load, code=3)  # fmt: skip
def from_tf(folder: Path) -> Path:
    whole = content(big())
    return written(folder, whole[: len(whole) * 6 // 10], "pytorch_model.bin")


@case(18, "training-checkpoint", 'Unexpected key(s) in state_dict: "epoch", "state_dict".',
      fails=(strict, "Unexpected key"), loads=strict)  # fmt: skip
def nested(folder: Path) -> Path:
    return saved(folder, {"epoch": 3, "state_dict": net().state_dict()})


def normed() -> nn.Module:
    return nn.Sequential(collections.OrderedDict(bn=nn.BatchNorm1d(2)))


def load_normed(path: Path) -> Any:
    return normed().load_state_dict(load(path))


def like_normed(folder: Path) -> Path:
    return keys_json(folder, {name: list(value.shape) for name, value in normed().state_dict().items()})


@case(19, "optional-buffers", 'Missing key(s) in state_dict: "bn.num_batches_tracked".',
      fails=(load_normed, "num_batches_tracked"), words="load_into", like=like_normed)  # fmt: skip
def no_counter(folder: Path) -> Path:
    state = normed().state_dict()
    del state["bn.num_batches_tracked"]
    return saved(folder, state)


@case(20, "python2-strings", "UnicodeDecodeError: 'ascii' codec can't decode byte 0xe9 in position 1", loads=load)
def python2(folder: Path) -> Path:
    name = [("SHORT_BINSTRING", b"\xe9t\xe9")]
    return written(folder, torch_zip(state_dict_ops({"fc.weight": ONE, "note": name}), DATA))


@case(21, "optional-buffers", "Unexpected key(s) in state_dict: \"emb.position_ids\"", words="load_into",
      like=lambda folder: keys_json(folder, {"emb.weight": [4, 3]}))  # fmt: skip
def position_ids(folder: Path) -> Path:
    return saved(folder, {"emb.weight": torch.randn(4, 3), "emb.position_ids": torch.arange(4).unsqueeze(0)})


@case(22, "truncated", "RuntimeError: unexpected EOF, expected 100 more bytes. The file might be corrupted.",
      fails=(load, "unexpected EOF"), loads=load, code=3)  # fmt: skip
def cut_legacy(folder: Path) -> Path:
    whole = content(big(), _use_new_zipfile_serialization=False)
    return written(folder, whole[: len(whole) - 1000])


@case(23, "bad-tensor", "RuntimeError: storage has wrong size: expected 3 got 2", loads=load, code=3)
def two_writers(folder: Path) -> Path:
    tensors = {"a": Tensor("0", (2,), 2, legacy=True), "b": Tensor("1", (3,), 3, legacy=True)}
    data = assemble(("PROTO", 2), *state_dict_ops(tensors), "STOP")
    return written(folder, builders.legacy(data, [("0", 2, DATA), ("1", 2, DATA)]))


@case(24, "empty-file", "EOFError: Ran out of input", fails=(unpickled, "Ran out of input"), words="older checkpoint")
def empty(folder: Path) -> Path:
    return written(folder, b"")


@case(25, "foreign-global", "NotImplementedError: cannot instantiate 'PosixPath' on your system", loads=load)
def paths(folder: Path) -> Path:
    return saved(folder, {"state_dict": net().state_dict(), "out": PurePosixPath("runs/1")})


@case(26, "tied-missing", 'Missing key(s) in state_dict: "lm_head.weight".', words="load_into",
      like=lambda folder: keys_json(folder, {"embed.weight": [7, 3], "lm_head.weight": [7, 3]}))  # fmt: skip
def tied(folder: Path) -> Path:
    return saved(folder, {"embed.weight": torch.randn(7, 3)})


def jit_load(path: Path) -> Any:
    return torch.jit.load(str(path))  # type: ignore[no-untyped-call]


@case(27, "state-dict-file", "PytorchStreamReader failed locating file constants.pkl: file not found",
      fails=(jit_load, "constants.pkl"), words="load_into")  # fmt: skip
def no_program(folder: Path) -> Path:
    return saved(folder, net().state_dict())


@case(28, "pickle-format", "Due to a serious vulnerability issue in torch.load, even with weights_only=True, we now "
      "require users to upgrade torch to at least v2.6", loads=strict)  # fmt: skip
def vulnerability(folder: Path) -> Path:
    return saved(folder, net().state_dict(), "pytorch_model.bin")


@case(29, "device-tags", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", loads=strict)
def all_on_one(folder: Path) -> Path:
    return tagged(folder, "cuda:0")


@case(30, "oversized-storage", "the file is too large: a slice of 2 rows", loads=load)
def view(folder: Path) -> Path:
    return saved(folder, {"w": torch.randn(100, 100)[:2]})


@case(31, "missing-shard", "OSError: does not appear to have a file named model-00002-of-00002.safetensors",
      words="download")  # fmt: skip
def stale_index(folder: Path) -> Path:
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    rows = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 16}, "weight_map": rows}
    return written(folder, json.dumps(index).encode(), "model.safetensors.index.json")


@case(32, "bad-local-header", "PytorchStreamReader failed reading file data/0: invalid header or archive is corrupted",
      fails=(load, "archive is corrupted"), loads=strict)  # fmt: skip
def local_header(folder: Path) -> Path:
    data = bytearray(content(net().state_dict()))
    data[data.index(b"archive/data/1") - 30] ^= 0x10
    return written(folder, bytes(data))


@case(33, "truncated", "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 49728 vs 49622",
      loads=load, code=3)  # fmt: skip
def full_disk(folder: Path) -> Path:
    whole = content(big())
    return written(folder, whole[: len(whole) - 3000])


@case(34, "device-tags", "don't know how to restore data location of torch.FloatStorage (tagged with xpu:1)",
      fails=(load, "restore data location"), loads=strict)  # fmt: skip
def other_device(folder: Path) -> Path:
    return tagged(folder, "npu:1")


@case(35, "needs-torch", "[enforce fail at inline_container.cc:222] . file_format_version <= "
      "kMaxSupportedFileFormatVersion", loads=strict)  # fmt: skip
def newer_archive(folder: Path) -> Path:
    return saved(folder, net().state_dict())


@case(36, "tied-tensors", "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk",
      fails=(lambda path: save_file(load(path), path.with_name("x.safetensors")), "share memory"),
      loads=load_any)  # fmt: skip
def shared(folder: Path) -> Path:
    weight = torch.randn(4, 3)
    return saved(folder, {"embed.weight": weight, "lm_head.weight": weight})


@case(37, "dcp-folder", "FileNotFoundError: the directory holds .distcp files only", loads=load_any)
def distributed(folder: Path) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch_versions import ALONE

    with warnings.catch_warnings(action="ignore"):
        save({"weight": torch.ones(3)}, checkpoint_id=folder / "dcp", **ALONE)
    return folder / "dcp"


@case(37, "dcp-no-metadata", "No such file or directory: 'dcp/.metadata'", words="older checkpoint")
def unfinished(folder: Path) -> Path:
    (folder / "dcp").mkdir()
    written(folder / "dcp", content({}), "__0_0.distcp")
    return folder / "dcp"


@case(38, "no-format-metadata", "AttributeError: 'NoneType' object has no attribute 'get'", loads=open_safetensors)
def no_metadata(folder: Path) -> Path:
    save_file(net().state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


@case(39, "needs-torch", "AttributeError: Can't get attribute '_rebuild_from_type_v2', or _rebuild_tensor_v3",
      loads=load, code=3)  # fmt: skip
def newer_call(folder: Path) -> Path:
    weight = torch.randn(2)
    weight.note = "x"  # type: ignore[attr-defined]
    return saved(folder, {"fc.weight": weight})


@case(40, "unzipped-folder", "IsADirectoryError: [Errno 21] Is a directory: 'model'",
      fails=(load, "Is a directory"), loads=strict)  # fmt: skip
def unpacked(folder: Path) -> Path:
    return unzipped_into(folder)


@case(40, "misnamed-tar", "tar: This does not look like a tar archive", words="torch.load")
def no_tar(folder: Path) -> Path:
    return saved(folder, net().state_dict(), "model.pth.tar")


@case(41, "other-spelling", 'Unexpected key(s) in state_dict: "norm.gamma", "norm.beta"',
      fails=(strict, "gamma"), loads=strict, like=like_net)  # fmt: skip
def gamma(folder: Path) -> Path:
    names = {"norm.weight": "norm.gamma", "norm.bias": "norm.beta"}
    return saved(folder, {names.get(name, name): value for name, value in net().state_dict().items()})


@case(42, "no-lightning-version", "KeyError: 'pytorch-lightning_version'", words="load_into")
def not_lightning(folder: Path) -> Path:
    return saved(folder, {"epoch": 1, "global_step": 5, "state_dict": net().state_dict()}, "model.ckpt")


@case(43, "device-tags", "AssertionError: If capturable=False, state_steps should not be CUDA tensors.", loads=load)
def steps(folder: Path) -> Path:
    step = [*builders.tensor_ops(Tensor("1", (), 1, location="cuda:0"))]
    state = ["EMPTY_DICT", "MARK", *push(0), "EMPTY_DICT", "MARK", *push("step"), *step, "SETITEMS", "SETITEMS"]
    groups = push([{"lr": 0.1, "params": [0]}])
    inner = ["EMPTY_DICT", "MARK", *push("state"), *state, *push("param_groups"), *groups, "SETITEMS"]
    ops = ["EMPTY_DICT", "MARK", *push("model"), *state_dict_ops({"fc.weight": ONE}), *push("optimizer"), *inner,
           "SETITEMS"]  # fmt: skip
    return written(folder, torch_zip(ops, DATA, DATA[:4]))


@case(44, "state-dict-file", "AttributeError: 'collections.OrderedDict' object has no attribute 'eval'",
      fails=(lambda path: load(path).eval(), "eval"), words="load_into")  # fmt: skip
def no_model(folder: Path) -> Path:
    return saved(folder, net().state_dict())


@case(44, "whole-module", "TypeError: Expected state_dict to be dict-like, got <class 'torch.nn.Sequential'>.",
      fails=(lambda path: net().load_state_dict(unpickled(path)), "dict-like"), loads=strict)  # fmt: skip
def no_state_dict(folder: Path) -> Path:
    return saved(folder, net())


@case(45, "foreign-global", "ModuleNotFoundError: No module named 'numpy._core'", loads=load)
def numpy_2(folder: Path) -> Path:
    return saved(folder, {"state_dict": net().state_dict(), "best": numpy.arange(3.0)})


@case(46, "zero-size", "size mismatch for fc.weight: copying a param with shape torch.Size([0])", words="of all ranks")
def zero3(folder: Path) -> Path:
    return saved(folder, {name: torch.empty(0) for name in net().state_dict()})


@case(46, "no-tensors", "adapter_model.bin has 443 bytes", words="save the state dict again")
def adapter(folder: Path) -> Path:
    return saved(folder, {}, "adapter_model.bin")


@case(47, "trailing-bytes", "Error while deserializing header: MetadataIncompleteBuffer",
      fails=(open_safetensors, "(?i)metadata"), loads=open_safetensors)  # fmt: skip
def long_safetensors(folder: Path) -> Path:
    save_file(net().state_dict(), folder / "model.safetensors", {"format": "pt"})
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"x" * 10)
    return folder / "model.safetensors"


@case(47, "truncated", "incomplete metadata, file not fully covered", fails=(open_safetensors, "(?i)metadata"),
      loads=open_safetensors, code=3)  # fmt: skip
def cut_safetensors(folder: Path) -> Path:
    save_file(net().state_dict(), folder / "model.safetensors", {"format": "pt"})
    data = (folder / "model.safetensors").read_bytes()
    return written(folder, data[:-10], "model.safetensors")


@case(48, "matched-by-structure", "Missing key(s) in state_dict: \"fc.weight\"; all keys were not initialized from",
      fails=(strict, "Missing key"), loads=strict, like=like_net)  # fmt: skip
def other_names(folder: Path) -> Path:
    new = {"fc": "stem", "norm": "ln", "head": "classifier"}
    state = net().state_dict()
    return saved(folder, {new[name.split(".")[0]] + "." + name.split(".")[1]: value for name, value in state.items()})


@case(48, "names-prefixed", "Unexpected key(s) in state_dict: \"model.fc.weight\"",
      fails=(strict, "Unexpected key"), loads=strict, like=like_net)  # fmt: skip
def based(folder: Path) -> Path:
    return saved(folder, prefixed("model."))


@case(49, "zip-root", "The file may be malicious, so the program is not going to read it: bad file inside",
      loads=strict)  # fmt: skip
def root(folder: Path) -> Path:
    return saved(folder, net().state_dict(), "stable.ckpt")


def weight_normed(old: bool) -> nn.Module:
    norm = torch.nn.utils.weight_norm if old else torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(collections.OrderedDict(conv=norm(nn.Linear(3, 2))))


def like_model(model: nn.Module) -> Build:
    return lambda folder: keys_json(folder, {name: list(value.shape) for name, value in model.state_dict().items()})


def load_old_norm(path: Path) -> Any:
    return weight_normed(True).load_state_dict(load(path))


@case(50, "other-spelling", 'Unexpected key(s): "conv.parametrizations.weight.original0"',
      fails=(load_old_norm, "original0"), loads=load_old_norm,
      like=lambda folder: like_model(weight_normed(True))(folder))  # fmt: skip
def new_weight_norm(folder: Path) -> Path:
    return saved(folder, weight_normed(False).state_dict())


@case(51, "position-embedding", "size mismatch for pos_embed: copying a param with shape torch.Size([1, 197, 8])",
      words="interpolate", like=lambda folder: keys_json(folder, {"pos_embed": [1, 577, 8], "fc.weight": [2, 2]}))
def resolution(folder: Path) -> Path:
    return saved(folder, {"pos_embed": torch.randn(1, 197, 8), "fc.weight": torch.randn(2, 2)})


@case(52, "wrapped-names", 'Unexpected key(s) in state_dict: "_fsdp_wrapped_module.fc.weight"',
      fails=(strict, "_fsdp_wrapped_module"), loads=strict)  # fmt: skip
def sharded_module(folder: Path) -> Path:
    return saved(folder, prefixed("_fsdp_wrapped_module._checkpoint_wrapped_module."))


@case(53, "unknown-dtype", "Error while deserializing header: unknown variant `F3`, expected one of `BOOL`",
      fails=(open_safetensors, "(?i)variant|header"), words="upgrade")  # fmt: skip
def new_dtype(folder: Path) -> Path:
    return written(folder, builders.safetensors([("w", "F3", [4], b"\1\2")]), "model.safetensors")


def spectral(old: bool) -> nn.Module:
    norm = torch.nn.utils.spectral_norm if old else torch.nn.utils.parametrizations.spectral_norm
    return nn.Sequential(collections.OrderedDict(conv=norm(nn.Linear(3, 2))))


def load_spectral(path: Path) -> Any:
    return spectral(False).load_state_dict(load(path))


@case(54, "other-spelling", 'Missing key(s) in state_dict: "conv.parametrizations.weight.original"',
      fails=(load_spectral, "original"), loads=load_spectral,
      like=lambda folder: like_model(spectral(False))(folder))  # fmt: skip
def old_spectral_norm(folder: Path) -> Path:
    return saved(folder, spectral(True).state_dict())


@case(55, "torchscript", "Cannot use weights_only=True with TorchScript archives passed to torch.load",
      fails=(load, "TorchScript"), loads=strict)  # fmt: skip
def scripted(folder: Path) -> Path:
    torch.jit.save(torch.jit.script(net()), folder / "model.pt")
    return folder / "model.pt"


@case(56, "bad-directory", "too many bytes: zip64 offsets beyond 2 GB", loads=strict)
def edited(folder: Path) -> Path:
    data = bytearray(content(net().state_dict()))
    place = data.rindex(b"PK\x06\x06") + 48
    data[place : place + 8] = (int.from_bytes(data[place : place + 8], "little") + 7).to_bytes(8, "little")
    return written(folder, bytes(data))


def again(rename: Callable[[str], str], extra: dict[str, bytes] | None = None) -> bytes:
    """A state dict's archive, written by another program with other names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content(net().state_dict()))) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            new.writestr(rename(info.filename), old.read(info))
        for name, data in (extra or {}).items():
            new.writestr(name, data)
    return buffer.getvalue()


@case(57, "repacked-zip", "PytorchStreamReader failed: file in archive is not in a subdirectory: data.pkl",
      fails=(load, "subdirectory"), loads=strict)  # fmt: skip
def no_root(folder: Path) -> Path:
    return written(folder, again(lambda name: name.removeprefix("archive/")))


@case(57, "repacked-zip", "file in archive is not in a subdirectory archive/: model/version",
      fails=(load, "."), loads=strict)  # fmt: skip
def deeper(folder: Path) -> Path:
    return written(folder, again(lambda name: f"outer/{name}"))


@case(57, "zip-in-zip", 'hasRecord("version") INTERNAL ASSERT FAILED', fails=(load, "."), loads=strict)
def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "model.pth", "w") as archive:
        archive.writestr("inner.pth", content(net().state_dict()))
    return folder / "model.pth"


@case(57, "numpy-file", "file in archive is not in a subdirectory: a.npy", fails=(load, "."),
      loads=load_file)  # fmt: skip
def npz(folder: Path) -> Path:
    numpy.savez(folder / "model.npz", a=numpy.zeros(2))
    shutil.move(folder / "model.npz", folder / "model.pth")
    return folder / "model.pth"


@case(58, "plain-pickle", "RuntimeError: Invalid magic number; corrupt file?",
      fails=(unpickled, "magic number"), words="pickle.load")  # fmt: skip
def dumped(folder: Path) -> Path:
    return written(folder, pickle.dumps({"a": 1}, protocol=2))


@case(59, "zero-filled", "KeyError: \"filename 'storages' not found\"; it looks like the legacy .tar format",
      fails=(unpickled, "."), words="again")  # fmt: skip
def zeros_for_tar(folder: Path) -> Path:
    return written(folder, bytes(20_000))


def mapped(path: Path) -> Any:
    return torch.load(path, weights_only=True, mmap=True)


@case(60, "no-mmap", "RuntimeError: mmap can only be used with files saved with `torch.save(...)`",
      fails=(mapped, "mmap"), loads=mapped)  # fmt: skip
def legacy_map(folder: Path) -> Path:
    return saved(folder, net().state_dict(), _use_new_zipfile_serialization=False)


@case(60, "deflated", "mmap=True with a compressed record", loads=mapped)
def deflated_map(folder: Path) -> Path:
    buffer = io.BytesIO()
    source = io.BytesIO(content(net().state_dict()))
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return written(folder, buffer.getvalue())


@case(61, "bad-crc", "no error: the outputs are wrong since the copy; a checksum?", loads=load, code=3)
def flipped(folder: Path) -> Path:
    data = bytearray(content(big()))
    data[data.index(big()["b.weight"].numpy().tobytes()) + 1001] ^= 4
    return written(folder, bytes(data))


@case(62, "peft-adapter", "OSError: Error no file named pytorch_model.bin, model.safetensors, tf_model.h5, "
      "model.ckpt.index or flax_model.msgpack found in directory run.", words="PeftModel.from_pretrained")
def an_adapter(folder: Path) -> Path:
    run = folder / "run"
    run.mkdir()
    (run / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    written(run, builders.safetensors([("w.lora_A.weight", "F32", (2,), bytes(8))], metadata={"format": "pt"}),
            "adapter_model.safetensors")
    return run


@case(63, "no-data", "NotImplementedError: Cannot copy out of meta tensor; no data!", words="save it again")
def without_data(folder: Path) -> Path:
    with torch.device("meta"):
        state = net().state_dict()
    return saved(folder, state)


@case(64, "optimizer-state", "The checkpoint being loaded used a DP world size of 2 but the current world size is 1.",
      words="ds_to_universal")  # fmt: skip
@case(65, "optimizer-state", "  File \"torch/optim/adam.py\", line 95, in step\n    exp_avg.mul_(beta1)\n"
      "RuntimeError: The size of tensor a (2048) must match the size of tensor b (7) at non-singleton dimension 3",
      words="load_optimizer")  # fmt: skip
def of_two_ranks(folder: Path) -> Path:
    model = net()
    made = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    return saved(folder, {"model": model.state_dict(), "optimizer": made.state_dict()})


ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"


def pairs(front: str, projections: Iterable[str], down: str, up: str) -> dict[str, torch.Tensor]:
    """A LoRA of rank 2 on projections of a U-Net's attention."""
    shapes = {down: (2, 4), up: (4, 2)}
    return {f"{front}{one}.{part}.weight": torch.ones(shape) for one in projections for part, shape in shapes.items()}


def holds(end: str) -> Use:
    def check(path: Path) -> None:
        files = [path] if path.is_file() else list(path.glob("*.safetensors"))
        assert any(key.endswith(end) for key in load_file(files[0]))

    return check


def kohya() -> dict[str, torch.Tensor]:
    names = [f"{ATTENTION.replace('.', '_')}_{one}" for one in ("to_q", "to_k")]
    alphas = {f"lora_unet_{name}.alpha": torch.tensor(2.0) for name in names}
    return pairs("lora_unet_", names, "lora_down", "lora_up") | alphas


@case(66, "adapter-names", "ValueError: Can't find 'adapter_config.json' at 'style'", loads=holds(".lora_A.weight"))
def adapter_of_kohya(folder: Path) -> Path:
    (folder / "style").mkdir()
    save_file(kohya(), folder / "style/adapter_model.safetensors", {"format": "pt"})
    return folder / "style"


@case(67, "adapter-names", "No LoRA keys associated to UNet2DConditionModel found with the prefix='unet'. This is safe "
      "to ignore if LoRA state dict didn't originally have any UNet2DConditionModel related params.",
      loads=holds(".lora_A.weight"))  # fmt: skip
def keys_of_kohya(folder: Path) -> Path:
    save_file(kohya(), folder / "style.safetensors", {"format": "pt"})
    return folder / "style.safetensors"


@case(68, "adapter-names", "Failed to match keys when loading network style.safetensors: "
      "{'base_model.model.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight': '?'}",
      loads=holds(".lora_down.weight"))  # fmt: skip
@case(69, "adapter-names", "lora key not loaded: base_model.model.down_blocks.0.attentions.0.transformer_blocks.0."
      "attn1.to_q.lora_A.weight", loads=holds(".lora_down.weight"))  # fmt: skip
def keys_of_peft(folder: Path) -> Path:
    names = [f"{ATTENTION}.{one}" for one in ("to_q", "to_k")]
    state = pairs("base_model.model.", names, "lora_A", "lora_B")
    save_file(state, folder / "style.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["to_q", "to_k"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder / "style.safetensors"

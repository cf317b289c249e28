"""Every kind of object that users save with torch, by name, and how to save it.

``KINDS[name].save(path, container="zip")`` writes one; ``make()`` gives an equal object each time (fixed seeds),
so a test compares what it loads with ``make()``.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_versions import checksums, is_safe, is_saved, named_parameters, need_dtensor

__all__ = ["CONTAINERS", "KINDS", "Kind", "Net", "cases", "location_tags", "tensor"]

CONTAINERS = ("zip", "legacy")

Factory = Callable[[], Any]


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint.

    Attributes:
        make: gives the object; equal objects at each call.
        safe: ``torch.load(weights_only=True)`` takes it.
        containers: those that torch can save it in.
        protocol: of the pickle.
        tag: location tag for a storage, instead of torch's; None leaves torch's.
        crc32: whether torch computes checksums.
    """

    name: str
    make: Factory
    safe: bool = True
    containers: tuple[str, ...] = CONTAINERS
    protocol: int = 2
    tag: Callable[[Any], str] | None = None
    crc32: bool = True

    def save(self, path: Path, container: str = "zip", obj: Any = None) -> Path:
        """Save the object (or `obj`) to `path` with torch."""
        with location_tags(self.tag), warnings.catch_warnings(), checksums(self.crc32):
            warnings.simplefilter("ignore")
            torch.save(
                self.make() if obj is None else obj,
                path,
                pickle_protocol=self.protocol,
                _use_new_zipfile_serialization=container == "zip",
            )
        return path


KINDS: dict[str, Kind] = {}


def kind(**how: Any) -> Callable[[Factory], Factory]:
    """Register the decorated factory under its own name."""

    def register(factory: Factory) -> Factory:
        name = factory.__name__.replace("_", "-")
        KINDS[name] = Kind(name, factory, **how)
        return factory

    return register


def cases(kinds: Callable[[Kind], bool] = lambda _: True) -> list[Any]:
    """pytest parameters (kind, container) for every kind that `kinds` takes."""
    return [
        pytest.param(one, container, id=f"{one.name}-{container}")
        for one in KINDS.values()
        if kinds(one)
        for container in one.containers
    ]


@contextmanager
def location_tags(tag: Callable[[Any], str] | None) -> Iterator[None]:
    """torch.save tags storages by `tag`: a file as from another machine, made on this one."""
    if tag is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", tag)
        yield


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of normal values, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


class Net(nn.Module):
    """A small model with a submodule whose name contains "module", batch statistics and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)
        self.submodule = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2))
        self.register_buffer("steps", torch.tensor(7))
        for index, parameter in enumerate(self.parameters()):
            parameter.data.copy_(tensor(*parameter.shape, seed=index))

    def forward(self, x: torch.Tensor) -> Any:
        return self.submodule(self.fc(x))


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for step in range(2):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = tensor(*parameter.shape, seed=100 * step + index)
        optimizer.step()
    return optimizer


def _adam(model: nn.Module, *, named: bool) -> torch.optim.Optimizer:
    parameters: Any = named_parameters(model) if named else model.parameters()
    return _trained(model, torch.optim.Adam(parameters, lr=0.125))


@kind()
def bare() -> Any:
    return OrderedDict(w=tensor(3, 2), b=tensor(3, seed=1))


@kind()
def state_dict() -> Any:
    return Net().state_dict()


@kind()
def data_parallel() -> Any:
    return nn.DataParallel(Net()).state_dict()


@kind()
def compiled() -> Any:
    model: Any = torch.compile(Net())
    return model.state_dict()


@kind()
def compiled_data_parallel() -> Any:
    model: Any = torch.compile(nn.DataParallel(Net()))
    return model.state_dict()


@kind()
def data_parallel_of_module() -> Any:
    """A model whose own submodule is called ``module``, wrapped."""
    return nn.DataParallel(nn.ModuleDict({"module": Net()})).state_dict()


@kind()
def nested() -> Any:
    model = nn.DataParallel(Net())
    return {
        "epoch": 3,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": _adam(model, named=False).state_dict(),
        "best": 0.5,
        "args": {"lr": 0.1, "names": ["module.fc.weight", "x"], "flag": True, "none": None},
        "history": [(1, 0.5), (2, 0.25)],
    }


@kind()
def sgd() -> Any:
    model = Net()
    optimizer = _trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@kind()
def param_names() -> Any:
    model = nn.DataParallel(Net())
    return {"net": model.state_dict(), "optimizer": _adam(model, named=True).state_dict()}


@kind()
def optimizer_by_name() -> Any:
    """As torch.distributed.checkpoint.state_dict and FSDP give it: state keyed by parameter name."""
    model = nn.DataParallel(Net())
    saved = _adam(model, named=True).state_dict()
    names = saved["param_groups"][0].pop("param_names")
    saved["state"] = {names[index]: value for index, value in saved["state"].items()}
    saved["param_groups"][0]["params"] = list(names)
    return {"state_dict": model.state_dict(), "optim": saved}


@kind()
def parameters() -> Any:
    plain, tagged = nn.Parameter(tensor(2, 2)), nn.Parameter(tensor(3), requires_grad=False)
    tagged.note = "kept"  # type: ignore[attr-defined]
    return {"module.plain": plain, "module.tagged": tagged}


@kind()
def tied() -> Any:
    embedding = tensor(4, 3)
    other = nn.Parameter(tensor(2))
    return OrderedDict([
        ("module.embed.weight", embedding), ("module.head.weight", embedding),
        ("module.part", embedding[1:3]), ("module.a", other), ("module.b", other),
    ])  # fmt: skip


@kind()
def views() -> Any:
    base = tensor(4, 6)
    return {
        "module.transposed": base.t(),
        "module.rows": base[1:3],
        "module.columns": base[:, 2:4],
        "module.stepped": base[::2, ::3],
        "module.expanded": tensor(3, 1, seed=5).expand(3, 4),
        "module.scalar": base[2, 3],
        "module.last": tensor(2, 3, 4, 5, seed=6).contiguous(memory_format=torch.channels_last),
    }


@kind()
def small_view_of_large() -> Any:
    return {"module.six": torch.arange(100_000, dtype=torch.float32)[50:56]}


@kind()
def grad() -> Any:
    return {"module.a": tensor(2).requires_grad_(), "module.b": tensor(2, seed=1)}


@kind()
def empty() -> Any:
    return OrderedDict([
        ("module.zero_d", torch.tensor(2.5)), ("module.none", torch.empty(0)),
        ("module.rows", torch.empty(0, 3)), ("module.columns", torch.empty(3, 0, 2)),
    ])  # fmt: skip


@kind()
def no_tensors() -> Any:
    return {"epoch": 1, "module.x": "text"}


@kind()
def list_root() -> Any:
    return [OrderedDict([("module.a", tensor(2))]), {"module.b": tensor(3, seed=1)}, 5]


DTYPES = tuple(name for name in (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex128", "complex64", "complex32", "uint16", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn",
    "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu",
) if is_saved(name))  # fmt: skip
"""Those that the installed torch saves."""


@functools.cache
def _bits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (256,), generator=generator, dtype=torch.uint8)


def of_dtype(name: str) -> torch.Tensor:
    """Six elements of a dtype with random bits."""
    dtype = getattr(torch, name)
    if name == "bool":
        return _bits()[:6] > 127
    return _bits()[: 6 * dtype.itemsize].clone().view(dtype).reshape(2, 3)


@kind(containers=("zip",))
def dtypes() -> Any:
    return {f"module.{name}": of_dtype(name) for name in DTYPES}


@kind()
def storage_class_dtypes() -> Any:
    return {f"module.{name}": of_dtype(name) for name in DTYPES[:12]}


@kind()
def conjugate() -> Any:
    value = torch.complex(tensor(3), tensor(3, seed=1))
    return {"module.conj": value.conj(), "module.negative": torch._neg_view(tensor(2, seed=2))}


@kind()
def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scales, zeros = torch.tensor([0.25, 0.5, 1.0]).double(), torch.tensor([0, 1, 2])
        return OrderedDict([
            ("module.tensor", torch.quantize_per_tensor(tensor(3, 4), 0.125, 2, torch.qint8)),
            ("module.channel", torch.quantize_per_channel(tensor(3, 4), scales, zeros, 0, torch.quint8)),
            ("module.int32", torch.quantize_per_tensor(tensor(2), 0.5, 0, torch.qint32)),
        ])  # fmt: skip


@kind()
def sparse() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = tensor(4, 4) * (tensor(4, 4, seed=2) > 0)
        coalesced = dense.to_sparse().coalesce()
        return OrderedDict([
            ("module.coo", coalesced), ("module.csr", dense.to_sparse_csr()),
            ("module.csc", dense.to_sparse_csc()), ("module.bsr", dense.to_sparse_bsr((2, 2))),
        ])  # fmt: skip


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor(2, 3), tensor(1, 3, seed=1)])


@kind(containers=("zip",), safe=is_safe(_nested()))
def jagged() -> Any:
    return {"module.strided": _nested()}


@kind()
def meta() -> Any:
    return {"module.shape": torch.empty(2, 3, device="meta", dtype=torch.float16), "module.real": tensor(2)}


def _mesh() -> Any:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch import distributed

    if not distributed.is_initialized():
        try:
            store = distributed.HashStore()  # type: ignore[attr-defined]
            distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        except RuntimeError as error:
            pytest.skip(f"gloo does not start here: {error}")
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", [0])


@kind(containers=("zip",))
def dtensor() -> Any:
    need_dtensor()
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = _mesh()
    return {
        "module.sharded": distribute_tensor(tensor(4, 2), mesh, [Shard(0)]),
        "module.whole": distribute_tensor(tensor(2), mesh, [Replicate()]),
    }


@kind(safe=False)
def rng_state() -> Any:
    """What a resumable trainer keeps: the generators of torch, numpy and Python."""
    return {
        "state_dict": {"module.w": tensor(2)},
        "torch": torch.Generator().manual_seed(5).get_state(),
        "numpy": np.random.RandomState(5).get_state(),
        "python": random.Random(5).getstate(),
    }


@kind(safe=is_safe({1, 2}))
def torch_values() -> Any:
    return {
        "module.w": tensor(2), "device": torch.device("cpu"), "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]), "set": {1, 2}, "big": 2**80, "negative": -(2**70),
        "bytes": b"\x00\xff", "text": "é \U0001f600 \x1b[31m", "complex": complex(1, 2),
    }  # fmt: skip


@kind(safe=False)
def numpy_values() -> Any:
    return {
        "module.w": tensor(2), "array": np.arange(6).reshape(2, 3), "scalar": np.float32(1.5),
        "args": argparse.Namespace(lr=0.1, device="cuda:0"),
    }  # fmt: skip


@kind(safe=False)
def whole_module() -> Any:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    for index, parameter in enumerate(model.parameters()):
        parameter.data.copy_(tensor(*parameter.shape, seed=index))
    return model


_GONE = "ckptfix_tests_gone"


@contextmanager
def _throw_away_module() -> Iterator[types.ModuleType]:
    module = types.ModuleType(_GONE)
    code = "class Config:\n    pass\nclass Special(dict):\n    pass\nclass Slots:\n    __slots__ = ('a', 'b')\n"
    exec(code, module.__dict__)
    sys.modules[_GONE] = module
    try:
        yield module
    finally:
        del sys.modules[_GONE]


@dataclass(frozen=True)
class _GoneKind(Kind):
    """Its classes exist only while it is saved."""

    def save(self, path: Path, container: str = "zip", obj: Any = None) -> Path:
        with _throw_away_module() as module:
            config, special, slots = module.Config(), module.Special(a=1), module.Slots()
            config.lr, config.weight, slots.a, slots.b = 0.1, tensor(3, seed=4), [config], special
            return super().save(path, container, {
                "state_dict": OrderedDict([("module.w", tensor(2)), ("module.b", tensor(2, seed=1))]),
                "config": config, "special": special, "slots": slots,
            })  # fmt: skip


KINDS["gone-classes"] = _GoneKind("gone-classes", dict, safe=False)


class Labelled(torch.Tensor):
    """A subclass with an attribute: saved by ``_rebuild_from_type_v2``."""


@kind(safe=False)
def subclass() -> Any:
    labelled = tensor(3).as_subclass(Labelled)
    labelled.label = "left"  # type: ignore[attr-defined]
    return {"module.labelled": labelled, "module.plain": tensor(2)}


@kind()
def attribute() -> Any:
    noted = tensor(3)
    noted.note = "kept"  # type: ignore[attr-defined]
    return {"module.noted": noted}


@kind()
def raw_storage() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"storage": tensor(3).storage(), "module.w": tensor(2)}  # type: ignore[no-untyped-call]


CUDA = "cuda:0"


def _cuda(_: Any) -> str:
    return CUDA


def _by_size(storage: Any) -> str:
    return ("cpu", "cuda:0", "cuda:1", "cuda:3")[storage.nbytes() // 4 % 4]


@kind(tag=_cuda)
def cuda() -> Any:
    return nn.DataParallel(Net()).state_dict()


@kind(tag=_cuda)
def one_tag_for_all() -> Any:
    """A thousand storages and a value share one memoised string."""
    items: list[tuple[str, Any]] = [(f"module.{index}", torch.tensor([float(index)])) for index in range(1000)]
    return {"note": CUDA, "state_dict": OrderedDict(items), CUDA: CUDA}


@kind(tag=_by_size)
def mixed_devices() -> Any:
    return OrderedDict((f"module.{size}", tensor(size)) for size in range(1, 9))


@kind(crc32=False)
def no_checksums() -> Any:
    return nn.DataParallel(Net()).state_dict()


@kind(protocol=3)
def protocol_3() -> Any:
    return nested()


@kind(protocol=4, safe=False)
def protocol_4() -> Any:
    return nested()


@kind(protocol=5, safe=False)
def protocol_5() -> Any:
    return nested()


@kind(protocol=4, safe=False)
def many_frames() -> Any:
    """A pickle of more than one 64 KiB frame, with a string too long for any of them."""
    items = {f"module.layers.{index}.attention.weight": tensor(2, seed=index) for index in range(600)}
    return {"state_dict": OrderedDict(items), "long": "x" * 70_000, "epoch": 1}

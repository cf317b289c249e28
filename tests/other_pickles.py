"""Files of tensors that torch.save of today does not write: joblib's, made without joblib, and old tars of torch."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import tarfile
import types
from pathlib import Path
from typing import IO, Any

import numpy
import torch


class NumpyArrayWrapper:
    """As joblib/numpy_pickle.py has it, for `joblib_dump`: which keeps its name and its state, and nothing else."""

    def __init__(self, array: Any, *, aligned: bool) -> None:
        self.subclass = type(array)
        self.shape = array.shape
        self.order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        self.dtype = array.dtype
        self.allow_mmap = not array.dtype.hasobject
        if aligned:
            self.numpy_array_alignment_bytes = 16


NumpyArrayWrapper.__module__ = "joblib.numpy_pickle"


_PythonPickler: Any = pickle.__dict__["_Pickler"]
"""The pickler in Python, whose `save` can be replaced."""


class _Pickler(_PythonPickler):  # type: ignore[misc]
    aligned = True
    file: IO[bytes]

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if type(value) is not numpy.ndarray:
            super().save(value)
            return
        wrapper = NumpyArrayWrapper(value, aligned=self.aligned)
        super().save(wrapper)
        if self.proto >= 4:
            self.framer.commit_frame(force=True)
        if value.dtype.hasobject:
            pickle.dump(value, self.file, protocol=5)
            return
        if self.aligned:
            padding = 16 - (self.file.tell() + 1) % 16
            self.file.write(bytes((padding,)) + b"\xff" * padding)
        self.file.write(value.tobytes("F" if wrapper.order == "F" else "C"))


def joblib_dump(value: Any, path: Path, *, protocol: int = 4, aligned: bool = True) -> None:
    """What ``joblib.dump(value, path, protocol=protocol)`` writes; versions before 1.1 do not align arrays."""
    module = types.ModuleType("joblib.numpy_pickle")
    module.NumpyArrayWrapper = NumpyArrayWrapper  # type: ignore[attr-defined]
    known = {name: sys.modules.get(name) for name in ("joblib", "joblib.numpy_pickle")}
    sys.modules["joblib"], sys.modules["joblib.numpy_pickle"] = types.ModuleType("joblib"), module
    try:
        with path.open("wb") as file:
            pickler = _Pickler(file, protocol)
            pickler.file = file
            pickler.aligned = aligned
            pickler.dump(value)
    finally:
        for name, old in known.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def torch_tar(value: Any) -> bytes:
    """What torch before 0.1.10 wrote for an object of dense tensors: a tar of four files.

    The layout is that of torch/serialization.py, ``_legacy_load.legacy_load``, which loads them.
    """
    storages: dict[int, tuple[int, torch.UntypedStorage, str]] = {}
    tensors: dict[int, tuple[torch.Tensor, int]] = {}

    def number(tensor: torch.Tensor) -> str:
        bytes_of = tensor.untyped_storage()
        kind = tensor.type().rpartition(".")[2].replace("Tensor", "Storage")
        row = storages.setdefault(bytes_of._cdata, (1000 + len(storages), bytes_of, kind))
        tensors.setdefault(id(tensor), (tensor, row[0]))
        return str(id(tensor))

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> Any:
            return number(part) if isinstance(part, torch.Tensor) else None

    objects = io.BytesIO()
    Pickler(objects, 2).dump(value)
    rows = [pickle.dumps(len(tensors), 2)]
    for key, (tensor, storage) in tensors.items():
        rows.append(pickle.dumps((key, storage, torch.FloatTensor), 2))
        rows.append(struct.pack("<i", tensor.dim()) + bytes(4))
        rows.append(struct.pack(f"<{2 * tensor.dim()}q", *tensor.shape, *tensor.stride()))
        rows.append(struct.pack("<q", tensor.storage_offset()))
    data = [pickle.dumps(len(storages), 2)]
    for key, stored, kind in storages.values():
        data.append(pickle.dumps((key, "cpu", getattr(torch, kind)), 2))
        itemsize = getattr(torch, kind).dtype.itemsize
        data.append(struct.pack("<q", stored.nbytes() // itemsize))
        # bytes(stored) would ask for each byte by itself.
        data.append(torch.empty(0, dtype=torch.uint8).set_(stored).numpy().tobytes())
    data.append(pickle.dumps([], 2))
    info = {"protocol_version": 1000, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    return tar_of({
        "sys_info": pickle.dumps(info, 2),
        "pickle": objects.getvalue(),
        "tensors": b"".join(rows),
        "storages": b"".join(data),
    })  # fmt: skip


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()

"""Files of tensors that torch.save did not write: joblib's, made without joblib."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path
from typing import IO, Any

import numpy


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

"""Two loaded objects, compared to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Rename = Callable[[str], str]


def assert_same(a: Any, b: Any, *, rename: Rename | None = None, device: str | None = None) -> None:
    """Both hold the same: types, order, tensors to the bit, strides, ties, requires_grad, attributes.

    Args:
        rename: what happened to the names of `a`'s state dicts, their ``_metadata`` and what refers to them; an
            optimizer (a key with "optim" in it) only has references.
        device: where the tensors of `b` must be; None: where the tensors of `a` are.
    """
    _Comparison(rename, device).same(a, b, "root")


def assert_same_state(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Two state dicts have the same names, in any order, and the same tensors: types, shapes and values."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name


def tensor_bytes(value: torch.Tensor) -> bytes:
    """The elements of a dense tensor in row-major order."""
    dense = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    # bytes(storage) would ask for each byte by itself.
    return torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage()).numpy().tobytes()


def names_of(value: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping are parameter names."""
    return any(isinstance(item, torch.Tensor) for item in value.values()) and all(isinstance(key, str) for key in value)


class _Comparison:
    def __init__(self, rename: Rename | None, device: str | None) -> None:
        self.rename = rename
        self.device = device
        self.pairs: dict[int, tuple[int, Any, Any]] = {}
        self.partners: dict[int, int] = {}

    def _paired(self, a: Any, b: Any, where: str) -> bool:
        """Note that `a` corresponds to `b`, one to one. True when it was known."""
        known = self.pairs.get(id(a))
        if known is not None:
            assert known[0] == id(b), f"{where}: an object that was shared is not"
            return True
        assert id(b) not in self.partners, f"{where}: objects that were two are one"
        self.pairs[id(a)] = (id(b), a, b)
        self.partners[id(b)] = id(a)
        return False

    def same(self, a: Any, b: Any, where: str) -> None:
        assert type(a) is type(b), f"{where}: {type(a)} became {type(b)}"
        if isinstance(a, torch.Tensor):
            self.tensor(a, b, where)
        elif isinstance(a, Mapping):
            if not self._paired(a, b, where):
                self.mapping(a, b, where)
        elif isinstance(a, list | tuple):
            if isinstance(a, list) and self._paired(a, b, where):
                return
            assert len(a) == len(b), f"{where}: length {len(a)} became {len(b)}"
            for index, (left, right) in enumerate(zip(a, b, strict=True)):
                self.same(left, right, f"{where}[{index}]")
        elif isinstance(a, torch.UntypedStorage):
            assert bytes(a) == bytes(b), f"{where}: bytes of a storage"
        elif isinstance(a, torch.storage.TypedStorage):
            assert a.dtype == b.dtype, f"{where}: {a.dtype} became {b.dtype}"
            self.same(a._untyped_storage, b._untyped_storage, where)
        elif isinstance(a, np.ndarray | np.generic):
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), where
        elif isinstance(a, float):
            assert repr(a) == repr(b), f"{where}: {a!r} became {b!r}"
        elif isinstance(a, type) or callable(a):
            assert a is b or isinstance(a, torch.nn.Module), f"{where}: {a!r} became {b!r}"
            if isinstance(a, torch.nn.Module):
                self.same(vars(a), vars(b), where)
        elif "__eq__" not in vars(type(a)) and hasattr(a, "__dict__"):
            if not self._paired(a, b, where):
                self.same(vars(a), vars(b), where)
        else:
            assert a == b, f"{where}: {a!r} became {b!r}"

    def mapping(self, a: Mapping[Any, Any], b: Mapping[Any, Any], where: str) -> None:
        left = list(a)
        if self.rename is not None and "optim" not in where and (names_of(a) or where.endswith("._metadata")):
            left = [self.rename(key) if isinstance(key, str) else key for key in left]
        if self.rename is not None and where.endswith("['optim']['state']"):
            left = [self.rename(key) if isinstance(key, str) else key for key in left]
        assert left == list(b), f"{where}: keys {left} became {list(b)}"
        for key, one, two in zip(left, a.values(), b.values(), strict=True):
            if self.rename is not None and key in ("param_names", "params") and _strings(one):
                one = [self.rename(name) for name in one]
            self.same(one, two, f"{where}[{key!r}]")
        for name in {**getattr(a, "__dict__", {}), **getattr(b, "__dict__", {})}:
            self.same(getattr(a, name), getattr(b, name), f"{where}.{name}")

    def tensor(self, a: torch.Tensor, b: torch.Tensor, where: str) -> None:
        assert a.dtype == b.dtype, f"{where}: {a.dtype} became {b.dtype}"
        assert a.layout == b.layout, f"{where}: {a.layout} became {b.layout}"
        assert a.is_nested == b.is_nested, where
        assert a.is_nested or a.shape == b.shape, f"{where}: {a.shape} became {b.shape}"
        assert a.requires_grad == b.requires_grad, f"{where}: requires_grad"
        wanted = a.device if self.device is None or a.is_meta else torch.device(self.device)
        assert b.device == wanted, f"{where}: on {b.device} instead of {wanted}"
        self.same(dict(a.__dict__), dict(b.__dict__), f"{where}.__dict__")
        if hasattr(a, "placements"):
            assert a.placements == getattr(b, "placements", None), where
            one, two = self._shard(a), self._shard(b)
            self.tensor(one, two, f"{where}._local_tensor")
        elif a.is_nested:
            for index, (one, two) in enumerate(zip(a.unbind(), b.unbind(), strict=True)):
                assert tensor_bytes(one) == tensor_bytes(two), f"{where}[{index}]"
        elif a.layout == torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced(), where
            self.tensor(a._indices(), b._indices(), f"{where}.indices")
            self.tensor(a._values(), b._values(), f"{where}.values")
        elif a.layout != torch.strided:
            rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
            for part in ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices"):
                self.tensor(getattr(a, part)(), getattr(b, part)(), f"{where}.{part}")
            self.tensor(a.values(), b.values(), f"{where}.values")
        else:
            self.dense(a, b, where)

    def _shard(self, value: Any) -> torch.Tensor:
        local: torch.Tensor = value._local_tensor
        return local

    def dense(self, a: torch.Tensor, b: torch.Tensor, where: str) -> None:
        assert a.stride() == b.stride(), f"{where}: stride {a.stride()} became {b.stride()}"
        assert a.storage_offset() == b.storage_offset(), f"{where}: storage offset"
        if a.is_meta:
            return
        assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg()), f"{where}: conjugate or negative bit"
        one, two = a.untyped_storage(), b.untyped_storage()
        if one.nbytes():
            self.tie(one, two, where)
        if a.is_quantized:
            assert a.qscheme() == b.qscheme(), where
            if a.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
                assert (a.q_scale(), a.q_zero_point()) == (b.q_scale(), b.q_zero_point()), where
            else:
                assert a.q_per_channel_axis() == b.q_per_channel_axis(), where
                assert torch.equal(a.q_per_channel_scales(), b.q_per_channel_scales()), where
                assert torch.equal(a.q_per_channel_zero_points(), b.q_per_channel_zero_points()), where
            a, b = a.int_repr(), b.int_repr()
        assert tensor_bytes(a) == tensor_bytes(b), f"{where}: values"

    def tie(self, a: torch.UntypedStorage, b: torch.UntypedStorage, where: str) -> None:
        """Two tensors of `a`'s side share memory exactly when those of `b`'s do."""
        known = self.pairs.get(a.data_ptr())
        if known is None:
            assert b.data_ptr() not in self.partners, f"{where}: tensors that were apart are tied"
            self.pairs[a.data_ptr()] = (b.data_ptr(), a, b)
            self.partners[b.data_ptr()] = a.data_ptr()
        else:
            assert known[0] == b.data_ptr(), f"{where}: a tie is lost"


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)

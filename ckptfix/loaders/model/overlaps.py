"""Tensors of a model that overlap in memory: copying into one of them changes the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptfix.checkpoint.tensors import reach
from ckptfix.loaders.model.fitting import Fit
from ckptfix.loaders.model.places import identity, is_lazy
from ckptfix.loaders.model.report import Mismatch
from ckptfix.loaders.model.torch_way import placed
from ckptfix.loaders.tensors import TensorMaker

if TYPE_CHECKING:
    import torch


def refuse_other_values(fit: Fit, maker: TensorMaker) -> None:
    """Find keys whose tensors overlap in the model while the file has values that conflict, and mark them mismatched.

    To test this, the values are copied into a scratch copy of the memory. Each must still be intact afterwards.
    """
    for group in _sharing(fit):
        base = fit.target.tensors[group[0]].detach().untyped_storage().clone()
        views = {name: _view(fit.target.tensors[name], base) for name in group}
        for name, view in views.items():
            view.copy_(placed(maker.once(fit.entry(name)).detach(), view))
        for name, view in views.items():
            if not _same(view, placed(maker.once(fit.entry(name)).detach(), view)):
                others = " and ".join(other for other in group if other != name)
                why = f"shares memory with {others} in the model, where the file has different values"
                fit.mismatched.append(Mismatch(name, fit.pairs[name], tuple(view.shape), tuple(view.shape), why))
                for both in group:
                    del fit.pairs[both]
                break


def _sharing(fit: Fit) -> list[list[str]]:
    """Return groups of keys to be loaded: each tensor overlaps the one before it, but is not the same tensor."""
    from torch import Tensor
    from torch.nn import Parameter

    rows: dict[object, list[tuple[int, int, str]]] = {}
    seen: set[object] = set()
    for name in fit.pairs:
        tensor = fit.target.tensors.get(name)
        if tensor is None or type(tensor) not in (Tensor, Parameter) or tensor.is_meta or is_lazy(tensor):
            continue
        own = identity(tensor)
        if own in seen or not _plain(tensor):
            continue
        seen.add(own)
        start = tensor.data_ptr()
        where = tensor.device, tensor.untyped_storage().data_ptr()
        stop = start + reach(tensor.shape, tensor.stride()) * tensor.element_size()
        rows.setdefault(where, []).append((start, stop, name))
    groups = []
    for found in rows.values():
        end = 0
        group: list[str] = []
        for start, stop, name in sorted(found):
            if start >= end:
                group = []
                groups.append(group)
            group.append(name)
            end = max(end, stop)
    return [group for group in groups if len(group) > 1]


def _plain(tensor: torch.Tensor) -> bool:
    from torch import strided

    return tensor.layout == strided and not tensor.is_quantized and bool(tensor.numel())


def _view(tensor: torch.Tensor, base: torch.UntypedStorage) -> torch.Tensor:
    """Return the view of `base` that `tensor` is of its own storage."""
    empty = tensor.detach().new_empty((0,))
    return empty.set_(base, tensor.storage_offset(), tensor.shape, tensor.stride())


def _same(view: torch.Tensor, value: torch.Tensor) -> bool:
    import torch

    wanted = value.to(view.device, view.dtype)
    return bool(torch.equal(view, wanted) or torch.allclose(view, wanted, rtol=0, atol=0, equal_nan=True))

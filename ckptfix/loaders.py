"""Tensors for torch: a state dict from any format, memory-mapped where the format allows, no pickle run.

torch is imported inside the functions, so that everything else of ckptfix starts without it.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptfix import dtypes, keys
from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Storage, TensorEntry
from ckptfix.errors import KeyConflict, Truncated, Unsupported
from ckptfix.fileio import read_chunks
from ckptfix.formats import open_checkpoint, safetensors
from ckptfix.formats.torch_common import Parts, element_sizes, little_endian
from ckptfix.formats.torch_tensors import LAZY
from ckptfix.ops import rename as rename_op
from ckptfix.ops.convert import chosen_state_dict, refuse_damaged

if TYPE_CHECKING:
    import torch

    Restore = Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    MapLocation = str | torch.device | Mapping[str, str] | Restore | None


def load_state_dict(
    path: str | os.PathLike[str],
    *,
    map_location: MapLocation = None,
    strip: str | None = "auto",
    at: str | None = None,
) -> OrderedDict[str, torch.Tensor]:
    """The state dict in the checkpoint at `path`, as ``Module.load_state_dict`` takes it.

    Args:
        map_location: as for torch.load: a device for everything, a dict from location to location, or a
            callable of (storage, location) that returns a storage, or None to leave it. None loads to the
            device it was saved from if that exists here, and else to the CPU, with a warning.
        strip: ``"auto"`` removes every wrapper's name (`module.`, `_orig_mod.`, ...), a prefix removes
            that one, None keeps the names.
        at: address of the state dict, when there are several.

    Returns:
        name -> tensor, in file order, with ``_metadata`` where the file has it. Shapes, strides, ties,
        requires_grad and nn.Parameter are as saved. CPU tensors are a private map of the file: they cost
        memory as they are touched, writing to them does not change the file, and the file must not be
        changed while they live. Values that are no tensors are left out.

    Raises:
        Refused: no state dict was found, or several and no `at`.
        WouldLoseData: a tensor of the file cannot be read; the message names it.
        PartialPrefix: only some names carry the prefix `strip`.
        Unsupported: a tensor that only its own library can rebuild (DTensor, nested).
    """
    checkpoint = open_checkpoint(path)
    chosen = chosen_state_dict(checkpoint, at)
    entries = [entry for entry in checkpoint.entries if entry.at == chosen.at]
    refuse_damaged(checkpoint)
    if checkpoint.format == safetensors.NAME:
        entries = list(safetensors.restore_ties(entries, checkpoint.metadata))
    names, module_path = _names(checkpoint, chosen.at, strip)
    make = _TensorMaker(checkpoint, map_location)
    loaded: OrderedDict[str, Any] = OrderedDict()
    for entry in entries:
        name = names.get(entry.key, entry.key)
        if name in loaded:
            raise KeyConflict(f"two tensors would be called {name!r}", path=checkpoint.path, where=chosen.at or None)
        loaded[name] = make(entry)
    if isinstance(checkpoint.graph, Parts):
        metadata = checkpoint.graph.found.module_metadata(chosen.at)
        if metadata is not None:
            renamed = ((keys.module_path(module_path, name), value) for name, value in metadata.items())
            loaded._metadata = OrderedDict(renamed)  # type: ignore[attr-defined]
    return loaded


def _names(checkpoint: Checkpoint, at: str, strip: str | None) -> tuple[Mapping[str, str], keys.Rule]:
    """old -> new for the names at `at`, and the same as a rule for module paths."""
    if strip is None:
        return {}, lambda name: name
    if strip == "auto":
        renames = rename_op.unwrap(checkpoint, at=at)
    else:
        renames = rename_op.strip(checkpoint, prefix=strip, at=at)
    names: dict[str, str] = {}
    modules: dict[str, str] = {}
    for edit in renames.edits:
        if edit.kind == "state_dict":
            names.update(edit.names)
        elif edit.kind == "metadata":
            modules.update((f"{old}." if old else "", f"{new}." if new else "") for old, new in edit.names.items())
    return names, lambda name: modules.get(name, name)


class _TensorMaker:
    """Builds tensors of one checkpoint; storages are made once, so ties stay ties."""

    def __init__(self, checkpoint: Checkpoint, map_location: Any) -> None:
        self.checkpoint = checkpoint
        self.restore = _restore_location(map_location)
        self.units = element_sizes(checkpoint) if checkpoint.byteorder == "big" else {}
        self.storages: dict[str, Any] = {}
        self.whole: Any = None

    def __call__(self, entry: TensorEntry) -> Any:
        import torch

        if entry.kind == "meta":
            tensor = torch.empty_strided(entry.shape, entry.stride, dtype=self.dtype(entry), device="meta")
        elif entry.kind == "sparse":
            tensor = self.sparse(entry)
        elif entry.kind == "quantized":
            tensor = self.quantized(entry)
        elif entry.kind == "dense":
            tensor = self.dense(entry)
        else:
            raise Unsupported(
                f"a {entry.kind} tensor ({entry.detail}), which only its own library can rebuild",
                path=self.checkpoint.path,
                where=entry.name,
            )
        if entry.parameter:
            return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
        return tensor.requires_grad_() if entry.requires_grad else tensor

    def dtype(self, entry: TensorEntry) -> Any:
        import torch

        dtype = getattr(torch, entry.dtype, None)
        if dtype is None:
            raise Unsupported(f"this torch has no dtype {entry.dtype}", path=self.checkpoint.path, where=entry.name)
        return dtype

    def dense(self, entry: TensorEntry) -> Any:
        import torch

        assert entry.storage is not None
        storage = self.storage(entry.storage, dtypes.by_name(entry.dtype).itemsize)
        empty = torch.empty((0,), dtype=self.dtype(entry), device=storage.device)
        tensor = empty.set_(storage, entry.offset, entry.shape, entry.stride)
        marks = {mark: True for mark in entry.detail.split(", ") if mark in LAZY}
        if marks:
            torch._utils.set_tensor_metadata(tensor, marks)
        return tensor

    def quantized(self, entry: TensorEntry) -> Any:
        import torch

        scheme, *values = entry.detail.split(", ")
        numbers = [ast.literal_eval(value) for value in values]
        parts = [self(part) for part in entry.parts]
        assert entry.storage is not None
        dtype = self.dtype(entry)
        storage = self.storage(entry.storage, entry.itemsize)
        shape, place = entry.shape, {"dtype": dtype, "device": storage.device}
        if scheme.startswith("per_channel"):
            scales, zero_points, (axis,) = *parts, numbers
            empty = torch._empty_per_channel_affine_quantized(
                shape, scales=scales, zero_points=zero_points, axis=axis, **place
            )
        else:
            scale, zero_point = numbers
            empty = torch._empty_affine_quantized(shape, scale=scale, zero_point=zero_point, **place)
        return empty.set_(storage, entry.offset, entry.shape, entry.stride)

    def sparse(self, entry: TensorEntry) -> Any:
        import torch

        layout, _, coalesced = entry.detail.partition(", coalesced=")
        parts = [self(part) for part in entry.parts]
        if len(parts) == 2:
            how: dict[str, Any] = {"is_coalesced": coalesced == "True"} if coalesced else {}
            return torch.sparse_coo_tensor(parts[0], parts[1], entry.shape, **how, check_invariants=True)
        how = {"layout": getattr(torch, layout)}
        return torch.sparse_compressed_tensor(parts[0], parts[1], parts[2], entry.shape, **how, check_invariants=True)

    def storage(self, storage: Storage, itemsize: int) -> Any:
        """The untyped storage on its device; `itemsize` is what its address must be a multiple of."""
        made = self.storages.get(storage.key)
        if made is None:
            assert storage.data is not None
            data = little_endian(storage.data, self.checkpoint.byteorder, self.units.get(storage.key, itemsize))
            made = self.storages[storage.key] = self.restore(self.load(data, itemsize), storage.location)
        return made

    def load(self, data: Data, itemsize: int) -> Any:
        import torch

        if isinstance(data, ByteRange) and data.length and data.offset % itemsize == 0:
            if self.whole is None:
                self.whole = torch.UntypedStorage.from_file(self.checkpoint.path, False, self.checkpoint.size)
            if data.end > self.checkpoint.size:
                left = max(self.checkpoint.size - data.offset, 0)
                raise Truncated(f"{data.length} bytes promised, {left} left", path=data.path, offset=data.offset)
            return self.whole[data.offset : data.end]
        storage = torch.UntypedStorage(data.length)
        view = torch.empty((0,), dtype=torch.uint8).set_(storage)
        position = 0
        for chunk in read_chunks(data):
            view[position : position + len(chunk)] = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
            position += len(chunk)
        return storage


def _restore_location(map_location: Any) -> Callable[[Any, str], Any]:
    """The function that moves a CPU storage to where its location tag and `map_location` say."""
    import torch
    from torch.serialization import default_restore_location

    if callable(map_location):

        def by_call(storage: Any, location: str) -> Any:
            moved = map_location(storage, location)
            return default_restore_location(storage, location) if moved is None else moved

        return by_call
    if isinstance(map_location, Mapping):
        return lambda storage, location: default_restore_location(storage, map_location.get(location, location))
    if map_location is not None:
        target = str(torch.device(map_location))
        return lambda storage, location: default_restore_location(storage, target)
    warned = False

    def as_saved(storage: Any, location: str) -> Any:
        nonlocal warned
        try:
            return default_restore_location(storage, location)
        except (RuntimeError, AssertionError):
            if not warned:
                message = f"saved on {location}, which is not here: loaded to the CPU (map_location says where else)"
                warnings.warn(message, stacklevel=4)
                warned = True
            return storage

    return as_saved

"""The pickle of a fresh state dict: an OrderedDict of rebuild calls, as torch.save writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptfix import dtypes
from ckptfix.checkpoint import Data, Storage, TensorEntry
from ckptfix.errors import WouldLoseData
from ckptfix.pickles import Call, Global, PersId
from ckptfix.pickles.emit import emit

_ORDERED_DICT = Global("collections", "OrderedDict", 0)
_V2 = Global("torch._utils", "_rebuild_tensor_v2", 0)
_V3 = Global("torch._utils", "_rebuild_tensor_v3", 0)
_PARAMETER = Global("torch._utils", "_rebuild_parameter", 0)
_UNTYPED = Global("torch.storage", "UntypedStorage", 0)


def state_dict_pickle(
    entries: Sequence[TensorEntry], *, legacy: bool = False
) -> tuple[bytes, list[tuple[str, Data, int | None]]]:
    """The pickle of a state dict with these dense tensors, and (key, data, CRC-32) of each storage.

    Entries whose storages have one key share a storage; keys are new, in the order of first use.

    Raises:
        WouldLoseData: an entry that is not dense.
    """
    odd = [entry.name for entry in entries if entry.kind != "dense"]
    if odd:
        raise WouldLoseData(f"only dense tensors can be written; not {', '.join(odd[:8])}")
    keys: dict[str, str] = {}
    storages: list[tuple[str, Data, int | None]] = []
    items: list[tuple[Any, Any]] = []
    for entry in entries:
        storage = entry.storage
        assert storage is not None and storage.data is not None
        if storage.key not in keys:
            keys[storage.key] = str(len(keys))
            storages.append((keys[storage.key], storage.data, storage.crc32))
        items.append((entry.key, _tensor(entry, storage, keys[storage.key], legacy)))
    root = Call(_ORDERED_DICT, (), "REDUCE", 0)
    root.items = items
    return emit(root), storages


def _tensor(entry: TensorEntry, storage: Storage, key: str, legacy: bool) -> Call:
    row = dtypes.by_name(entry.dtype)
    kind = Global("torch", row.storage_class, 0) if row.storage_class else _UNTYPED
    count = storage.nbytes // row.itemsize if row.storage_class else storage.nbytes
    pid: tuple[Any, ...] = ("storage", kind, key, storage.location, count)
    if legacy:
        pid += (None,)
    requires_grad = entry.requires_grad and not entry.parameter
    args: tuple[Any, ...] = (PersId(pid, 0, -1), entry.offset, entry.shape, entry.stride, requires_grad, _hooks())
    if not row.storage_class:
        args += (Global("torch", row.name, 0),)
    call = Call(_V2 if row.storage_class else _V3, args, "REDUCE", 0)
    if entry.parameter:
        call = Call(_PARAMETER, (call, entry.requires_grad, _hooks()), "REDUCE", 0)
    return call


def _hooks() -> Call:
    """An empty OrderedDict: every tensor is pickled with its own."""
    return Call(_ORDERED_DICT, (), "REDUCE", 0)

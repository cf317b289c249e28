"""Loading a state dict from any format, in the form that ``Module.load_state_dict`` takes."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.checkpoint import Checkpoint, NameList, StateDict
from ckptfix.errors import KeyConflict, PartialPrefix
from ckptfix.extras import need_torch
from ckptfix.formats import weights_of
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.loaders.open_for_loading import opened, opens_once
from ckptfix.loaders.tensors import TensorMaker, restore_location
from ckptfix.names import wrappers
from ckptfix.ops import choose
from ckptfix.ops.candidates import Candidate
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.extract.sources import read
from ckptfix.ops.rank_shards import refuse_piece
from ckptfix.ops.rename import sites

if TYPE_CHECKING:
    import torch

    from ckptfix.loaders.tensors import MapLocation


@opens_once
def load_state_dict(
    path: str | os.PathLike[str],
    *,
    map_location: MapLocation = None,
    strip: str | None = "auto",
    at: str | None = None,
    mmap: bool = False,
    verify: bool = True,
) -> OrderedDict[str, torch.Tensor]:
    """Load the state dict in the checkpoint at `path`, ready for ``Module.load_state_dict``.

    A whole pickled module (``torch.save(model)``) gives what its ``state_dict()`` would; its classes are not needed.

    Args:
        map_location: as for torch.load: a device for everything, a dict from location to location, a callable of
            (storage, location) that returns a storage or None for the default, or None. None loads each tensor to the
            device it was saved from if this machine has it, and else to the CPU, with a warning.
        strip: ``"auto"`` removes the prefixes of all wrappers (`module.`, `_orig_mod.`, ...), a prefix removes only
            that one, and None keeps the keys.
        at: address of the state dict, or of a whole pickled module, if there are several; ``""`` is the top level.
        mmap: as for torch.load: CPU tensors are views of a private map of the file, whose pages are read on first use.
            Do not change the file while they are in use. If it is cut short, the process dies of SIGBUS when it touches
            a missing page; if it is overwritten, values change. Data that cannot be mapped (big-endian files,
            compressed records, tensors in several pieces) is read.
        verify: compare the data with the checksums that a zip stores for it (legacy files and safetensors store
            none). Data is summed as it is read; with `mmap`, all of it is read for this. The pickle is always
            checked.

    Returns:
        key -> tensor, in file order, with ``_metadata`` if the file has it. Shapes, strides, ties, requires_grad and
        nn.Parameter are as saved. Without `mmap`, tensors have their own memory. All come from one version of the file.
        Values that are not tensors are left out. A tensor subclass becomes a plain tensor, with a warning.

    Raises:
        Refused: no state dict was found.
        Undecided: without `at`, there are several; or one was chosen by its key, but the tensors left out have more
            bytes, and nothing says what they are.
        WouldLoseData: a tensor of the file cannot be read; the message names it.
        DamagedFile: the checksum of the pickle, or of a tensor's data, does not match.
        ChangedFile: the file was written to while it was read.
        PartialPrefix: only some keys have the prefix `strip`.
        Unsupported: only its own library can rebuild a tensor (DTensor, nested).
        MissingExtra: torch is not installed.
    """
    need_torch("load_state_dict")
    checkpoint = opened(path)
    if at is None:
        refuse_piece(checkpoint)
    chosen = choose.choose(checkpoint, at)
    seen, versions = (checkpoint, None) if chosen.module is None else _of_module(checkpoint, chosen)
    refuse_piece(checkpoint, chosen.at)
    _ = seen.entries
    refuse_damaged(checkpoint)
    entries = weights_of(seen, chosen.at)
    names, module_path = _names(seen, chosen.at, strip)
    make = TensorMaker(checkpoint, restore_location(map_location), warn=True, verify=verify, mmap=mmap)
    loaded: OrderedDict[str, torch.Tensor] = OrderedDict()
    for entry in entries:
        name = names.get(entry.key, entry.key)
        if name in loaded:
            raise KeyConflict(f"two tensors would get the key {name!r}", path=checkpoint.path, where=chosen.at or None)
        loaded[name] = make(entry)
    make.reading.refuse_changes()
    parts = maybe_pickled_object(checkpoint)
    if versions is None and parts is not None:
        versions = parts.found.module_metadata(chosen.at)
    if versions is not None:
        renamed = ((wrappers.module_path(module_path, name), value) for name, value in versions.items())
        loaded._metadata = OrderedDict(renamed)  # type: ignore[attr-defined]
    return loaded


def _of_module(checkpoint: Checkpoint, row: Candidate) -> tuple[Checkpoint, Mapping[str, object]]:
    """Return the checkpoint with a whole pickled module as its only state dict, and the module's versions.

    Raises:
        CkptfixError: the module cannot be read.
    """
    taken = read(checkpoint, row)
    place = row.at
    entries = tuple(replace(entry, at=place) for entry in taken.entries)
    names = NameList(place, "state_dict", tuple(entry.key for entry in entries))
    paths = NameList(place, "metadata", tuple(taken.versions or ()))
    seen = replace(
        checkpoint,
        load_entries=lambda: entries,
        sites=(names, paths),
        state_dicts=(StateDict(place, len(entries), 0),),
        inside=None,
    )
    return seen, taken.versions or {}


def _names(checkpoint: Checkpoint, at: str, strip: str | None) -> tuple[Mapping[str, str], wrappers.Rule]:
    """Return old -> new for the keys at `at`, and the same renames as a rule for module paths."""
    state = checkpoint.state_at(at)
    payload = state is not None and state.payload
    if state is not None and payload and state.weights:
        # An object of an unknown class of mappings: the file is not edited, and the result is a plain dict.
        free = replace(state, payload=False)
        states = (free if row is state else row for row in checkpoint.state_dicts)
        checkpoint, payload = replace(checkpoint, state_dicts=tuple(states)), False
    # Only the class knows the meaning of keys in its own data: they have no wrapper's prefix.
    if strip is None or (strip == "auto" and payload):
        return {}, lambda name: name
    try:
        renames = sites.unwrap(checkpoint, at=at) if strip == "auto" else sites.strip(checkpoint, prefix=strip, at=at)
    except (PartialPrefix, KeyConflict) as error:
        error.hint = "strip=None keeps the keys"
        if strip != "auto":
            error.hint += "; strip='auto' removes what all keys have"
        raise
    names: dict[str, str] = {}
    modules: dict[str, str] = {}
    for edit in renames.edits:
        if edit.kind == "state_dict":
            names.update(edit.names)
        elif edit.kind == "metadata":
            modules.update((f"{old}." if old else "", f"{new}." if new else "") for old, new in edit.names.items())
    return names, lambda name: modules.get(name, name)

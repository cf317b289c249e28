"""A state dict of any format, as ``Module.load_state_dict`` takes it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.checkpoint import Checkpoint, NameSite, StateDict
from ckptfix.errors import KeyConflict, PartialPrefix
from ckptfix.extras import need_torch
from ckptfix.formats import weights_of
from ckptfix.formats.torch.common import pickled
from ckptfix.loaders.opened import opened, opens_once
from ckptfix.loaders.tensors import TensorMaker, restore_location
from ckptfix.names import wrappers
from ckptfix.ops import choose
from ckptfix.ops.candidates import Candidate
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.extract.sources import read
from ckptfix.ops.pieces import refuse_piece
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
    """The state dict in the checkpoint at `path`, as ``Module.load_state_dict`` takes it.

    A whole pickled module (``torch.save(model)``) gives what its ``state_dict()`` would; its classes are not needed.

    Args:
        map_location: as for torch.load: a device for everything, a dict from location to location, or a
            callable of (storage, location) that returns a storage, or None to leave it. None loads to the
            device it was saved from if that exists here, and else to the CPU, with a warning.
        strip: ``"auto"`` removes every wrapper's name (`module.`, `_orig_mod.`, ...), a prefix removes
            that one, None keeps the names.
        at: address of the state dict, or of a whole pickled module, when there are several; ``""`` is the top level.
        mmap: as for torch.load: CPU tensors are a private map of the file, whose pages are read when they are
            touched. Then the file must not be changed while they live: where it is cut short, the process dies of
            SIGBUS when it touches a page that is gone, and where it is saved over, values change. What cannot be
            mapped (files of other machines, compressed records, tensors in pieces) is read.
        verify: compare the data with the checksums that a zip states for it (legacy files and safetensors state
            none). Data is summed as it is read; with `mmap`, all of it is read for that. The pickle is always
            compared.

    Returns:
        name -> tensor, in file order, with ``_metadata`` where the file has it. Shapes, strides, ties,
        requires_grad and nn.Parameter are as saved. Tensors have memory of their own, all of one version of the
        file. Values that are not tensors are left out. A tensor of a subclass comes as a plain one, with a warning.

    Raises:
        Refused: no state dict was found.
        Undecided: without `at`, there are several; or the names chose one, and more bytes of other tensors would be
            left, of which nothing says what they are.
        WouldLoseData: a tensor of the file cannot be read; the message names it.
        DamagedFile: the pickle, or the data of a tensor, has another checksum than the file states.
        ChangedFile: the file was written to while it was read.
        PartialPrefix: only some names have the prefix `strip`.
        Unsupported: a tensor that only its own library can rebuild (DTensor, nested).
        MissingExtra: torch is not installed.
    """
    need_torch("load_state_dict")
    checkpoint = opened(path, programs=True)
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
            raise KeyConflict(f"two tensors would be called {name!r}", path=checkpoint.path, where=chosen.at or None)
        loaded[name] = make(entry)
    make.reading.refuse_changes()
    parts = pickled(checkpoint)
    if versions is None and parts is not None:
        versions = parts.found.module_metadata(chosen.at)
    if versions is not None:
        renamed = ((wrappers.module_path(module_path, name), value) for name, value in versions.items())
        loaded._metadata = OrderedDict(renamed)  # type: ignore[attr-defined]
    return loaded


def _of_module(checkpoint: Checkpoint, row: Candidate) -> tuple[Checkpoint, Mapping[str, object]]:
    """The checkpoint with the state dict of a whole pickled module as its only one, and the module's versions.

    Raises:
        CkptfixError: the module cannot be read.
    """
    taken = read(checkpoint, row)
    place = row.at
    entries = tuple(replace(entry, at=place) for entry in taken.entries)
    names = NameSite(place, "state_dict", tuple(entry.key for entry in entries))
    paths = NameSite(place, "metadata", tuple(taken.versions or ()))
    seen = replace(
        checkpoint,
        load_entries=lambda: entries,
        sites=(names, paths),
        state_dicts=(StateDict(place, len(entries), 0),),
        inside=None,
    )
    return seen, taken.versions or {}


def _names(checkpoint: Checkpoint, at: str, strip: str | None) -> tuple[Mapping[str, str], wrappers.Rule]:
    """old -> new for the names at `at`, and the same as a rule for module paths."""
    payload = any(state.payload for state in checkpoint.state_dicts if state.at == at)
    if strip is None or (strip == "auto" and payload):  # no wrapper names what only a class knows
        return {}, lambda name: name
    try:
        renames = sites.unwrap(checkpoint, at=at) if strip == "auto" else sites.strip(checkpoint, prefix=strip, at=at)
    except (PartialPrefix, KeyConflict) as error:
        error.hint = "strip=None keeps the names" + ("" if strip == "auto" else "; strip='auto' removes what all have")
        raise
    names: dict[str, str] = {}
    modules: dict[str, str] = {}
    for edit in renames.edits:
        if edit.kind == "state_dict":
            names.update(edit.names)
        elif edit.kind == "metadata":
            modules.update((f"{old}." if old else "", f"{new}." if new else "") for old, new in edit.names.items())
    return names, lambda name: modules.get(name, name)

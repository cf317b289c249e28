"""The state dicts of a checkpoint that `extract` can take: those that stand in it, and those of whole modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptfix.checkpoint import Checkpoint, Finding, TensorEntry
from ckptfix.errors import CkptfixError, DamagedFile, NoSuchTensor, WouldLoseData
from ckptfix.formats import safetensors, torch_module
from ckptfix.formats.torch_common import Parts
from ckptfix.formats.torch_detach import detached_call, detached_entry
from ckptfix.formats.torch_drop import node_at
from ckptfix.formats.torch_emit import Calls
from ckptfix.formats.torch_module import Module
from ckptfix.formats.torch_object import plain
from ckptfix.formats.torch_tensors import BadTensor, tensor_entry
from ckptfix.formats.torch_zip import Archive
from ckptfix.formats.weights import Weights, check_whole
from ckptfix.pickles.graph import label, pairs

EXTRA_STATE = "_extra_state"
"""Last component of the name of what a module keeps in a state dict that is no tensor (Module.get_extra_state)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state dict that could be taken: its address, and the node if it is a whole module."""

    at: str
    module: Any = None


def candidates(checkpoint: Checkpoint) -> list[Candidate]:
    """Every one that looks like a model's, in file order; where none does, those that are no optimizer's."""
    modules = [Candidate(at, node) for at, node in torch_module.modules(checkpoint)]
    states = [
        state
        for state in checkpoint.state_dicts
        if not state.optimizer and not any(is_inside(state.at, module.at) for module in modules)
    ]
    weights = [Candidate(state.at) for state in states if state.weights]
    if modules and weights:
        addresses = [address for address, _ in _addresses(checkpoint)]

        def place(row: Candidate) -> int:
            return next((index for index, address in enumerate(addresses) if is_inside(address, row.at)), 0)

        return sorted([*modules, *weights], key=place)
    return [*modules, *weights] or [Candidate(state.at) for state in states]


def is_inside(address: str, at: str) -> bool:
    """Whether `address` is that of the mapping or module at `at`, or of something in it."""
    return not at or address == at or address.startswith(f"{at}/")


def at_address(checkpoint: Checkpoint, at: str) -> Candidate:
    """The module or the mapping with tensors at an address.

    Raises:
        NoSuchTensor: there is neither.
    """
    at = at.strip("/")
    if isinstance(checkpoint.graph, Parts):
        try:
            node = node_at(checkpoint.graph.graph.root, at)
        except NoSuchTensor:
            node = None
        if torch_module.parts_of(node) is not None:
            return Candidate(at, node)
    if any(state.at == at for state in checkpoint.state_dicts):
        return Candidate(at)
    near = tuple(candidate.at or "''" for candidate in candidates(checkpoint))
    hint = f"there is one at {', '.join(near[:8])}" if near else "`ckptfix inspect` shows what it holds"
    raise NoSuchTensor(f"no state dict and no module at {at!r}", near=near, path=checkpoint.path, hint=hint)


def read(checkpoint: Checkpoint, candidate: Candidate) -> Weights:
    """The tensors of a candidate, as ``state_dict()`` gives them.

    Raises:
        DamagedFile: the pickle is not as it was written, a tensor's bytes are not in the file, or a module is none.
        WouldLoseData: a tensor that cannot be read.
        KeyConflict, Unsupported: as `torch_module.read_module`.
    """
    container = checkpoint.graph.container if isinstance(checkpoint.graph, Parts) else None
    if isinstance(container, Archive) and not container.pickle_ok:
        hint = "copy or download the file again"
        raise DamagedFile("the pickle does not match its CRC-32", path=checkpoint.path, where="data.pkl", hint=hint)
    made = _of_module(checkpoint, candidate) if candidate.module is not None else _of_mapping(checkpoint, candidate.at)
    check_whole(made, checkpoint.size)
    taken = {_view(entry) for entry in made.entries}
    inside = candidate.at if candidate.module is not None else None
    beside = [
        entry
        for entry in checkpoint.entries
        if entry.at != candidate.at
        and not (inside is not None and is_inside(entry.name, inside) and _view(entry) in taken)
    ]
    return replace(made, beside=tuple(beside))


def _view(entry: TensorEntry) -> tuple[Any, ...]:
    """What tells a tensor from others of its file, names aside."""
    key = entry.storage.key if entry.storage is not None else entry.name
    return key, entry.dtype, entry.offset, entry.shape, entry.stride


def _of_module(checkpoint: Checkpoint, candidate: Candidate) -> Weights:
    try:
        module = torch_module.read_module(candidate.module, candidate.at)
    except CkptfixError as error:
        error.path = checkpoint.path
        raise
    entries = _entries(checkpoint, module.tensors)
    return Weights(
        path=checkpoint.path,
        what=f"the module {module.cls}",
        at=candidate.at,
        entries=entries,
        versions=module.versions,
        calls=_calls(checkpoint, module.tensors, entries),
        left=left_behind(checkpoint, candidate.at, module=True),
        classes=module.classes,
        findings=module.findings,
        byteorder=checkpoint.byteorder,
    )


def module_entries(checkpoint: Checkpoint, module: Module) -> tuple[TensorEntry, ...]:
    """The entries of a module's state dict, under their full names.

    Raises:
        WouldLoseData: one of them describes no tensor of the file.
    """
    return _entries(checkpoint, module.tensors)


def _entries(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Any]]) -> tuple[TensorEntry, ...]:
    storages = checkpoint.graph.storages
    entries = []
    for name, node in tensors:
        try:
            entries.append(detached_entry(tensor_entry(node, name, "", storages), name))
        except BadTensor as error:
            raise WouldLoseData(str(error), path=checkpoint.path, where=name) from None
    return tuple(entries)


def _calls(
    checkpoint: Checkpoint, tensors: Iterable[tuple[str, Any]], entries: Iterable[TensorEntry]
) -> Calls | None:
    odd = {entry.key for entry in entries if entry.kind != "dense"}
    nodes = {name: detached_call(node) for name, node in tensors if name in odd}
    parts: Parts = checkpoint.graph
    return Calls(parts.graph, parts.storages, nodes) if nodes else None


def _of_mapping(checkpoint: Checkpoint, at: str) -> Weights:
    what = f"the state dict {at}" if at else "the state dict"
    left = left_behind(checkpoint, at)
    if not isinstance(checkpoint.graph, Parts):
        entries: tuple[TensorEntry, ...] = checkpoint.entries
        if checkpoint.format == safetensors.NAME:
            entries = safetensors.restore_ties(entries, checkpoint.metadata)
        own = tuple(detached_entry(entry, entry.key) for entry in entries if entry.at == at)
        return Weights(checkpoint.path, what, at, own, left=left, byteorder=checkpoint.byteorder)
    found = checkpoint.graph.found
    tensors = [(key, node) for where, key, node in found.tensors if where == at]
    entries = _entries(checkpoint, tensors)
    return Weights(
        path=checkpoint.path,
        what=what,
        at=at,
        entries=entries,
        versions=_versions(found.metadata.get(at)),
        calls=_calls(checkpoint, tensors, entries),
        left=left,
        findings=tuple(_losses(checkpoint, at, left)),
        byteorder=checkpoint.byteorder,
    )


def _versions(node: Any) -> dict[str, dict[str, Any]] | None:
    """The ``_metadata`` of a state dict, as far as it is made of plain values."""
    if node is None:
        return None
    return {label(path): _plain_dict(own) for path, own in pairs(node) or ()}


def _plain_dict(node: Any, depth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs(node) or ():
        if pairs(value) is None:
            found[label(key)] = plain(value)
        elif depth < 2:
            found[label(key)] = _plain_dict(value, depth + 1)
    return found


def left_behind(checkpoint: Checkpoint, at: str, *, module: bool = False) -> tuple[str, ...]:
    """Addresses of what is outside the mapping or module at `at`, cut where they part from it.

    The values of a mapping that are no tensors are among them; other attributes of a module are no part of any state
    dict, and are not.
    """
    own = at.split("/") if at else []
    taken = {} if module else {entry.name: entry for entry in checkpoint.entries if entry.at == at}
    left: dict[str, None] = {}
    for address, holder in _addresses(checkpoint):
        if (tensor := _around(address, taken)) is not None:
            # What a wrapper carries goes with it; a plain tensor is written anew, without attributes.
            if holder is not None and tensor.kind == "dense":
                left[address] = None
            continue
        parts = address.split("/")
        common = 0
        while common < min(len(own), len(parts)) and own[common] == parts[common]:
            common += 1
        if common < len(own) or not (module or holder == at or len(parts) == common):
            left["/".join(parts[: common + 1])] = None
    return tuple(left)


def _around(address: str, tensors: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """The tensor on which what is at `address` is an attribute, or a part of one."""
    end = address.rfind("/") if tensors else -1
    while end > 0:
        if (found := tensors.get(address[:end])) is not None:
            return found
        end = address.rfind("/", 0, end)
    return None


def _addresses(checkpoint: Checkpoint) -> Iterator[tuple[str, str | None]]:
    """(address, address of the mapping that holds it if it is a tensor) of every leaf."""
    if isinstance(checkpoint.graph, Parts):
        found = checkpoint.graph.found
        yield from ((f"{at}/{key}" if at else key, at) for at, key, _ in found.tensors)
        yield from ((address, None) for address, _ in found.values if address)
    else:
        yield from ((entry.name, entry.at) for entry in checkpoint.entries)
        yield from ((address, None) for address, _ in checkpoint.values())


def _losses(checkpoint: Checkpoint, at: str, left: Iterable[str]) -> Iterator[Finding]:
    """What is left of a state dict that its model would miss: extra state, and tensors in tuples (packed weights)."""
    depth = len(at.split("/")) + 1 if at else 1
    tensors = [address for address, holder in _addresses(checkpoint) if holder is not None]
    packed = {*tensors, *("/".join(address.split("/")[:depth]) for address in tensors)}
    for address in left:
        name = address[len(at) :].lstrip("/")
        if not address.startswith(at) or (at and name == address):
            continue
        if name.rpartition(".")[2] == EXTRA_STATE:
            yield Finding("not-taken", "warning", address, "extra state of a module, which is no tensor")
        elif address in packed and ("." in name or "/" in name):
            yield Finding("not-taken", "warning", address, "tensors packed in another object, which are not taken")


def picked(weights: Weights, names: Mapping[str, str], what: str, prefix: str = "") -> Weights:
    """The tensors that `names` lists (old -> new), under their new names; the others are left behind.

    Args:
        prefix: path of the module whose versions become those of the root.
    """
    entries = tuple(replace(entry, key=names[entry.key]) for entry in weights.entries if entry.key in names)
    calls = weights.calls
    if calls is not None:
        calls = replace(calls, nodes={names[name]: node for name, node in calls.nodes.items() if name in names})
    versions = weights.versions
    if versions is not None and prefix:
        inside = {path: own for path, own in versions.items() if path == prefix or path.startswith(f"{prefix}.")}
        versions = {path[len(prefix) + 1 :]: own for path, own in inside.items()}
    gone = tuple(f"{weights.at}/{entry.key}".lstrip("/") for entry in weights.entries if entry.key not in names)
    left = (*weights.left, *gone)
    return replace(weights, entries=entries, calls=calls, versions=versions, left=left, what=what)

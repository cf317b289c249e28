"""The tensors of the state dict that `extract` writes, and the data that it leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.checkpoint.address import is_inside, join, keys_of, of_keys
from ckptfix.checkpoint.tree import Item
from ckptfix.errors import NoSuchTensor, Refused
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import weights_of, without_optimizer
from ckptfix.formats.torch.calls import detached_entry
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.formats.torch.emit import Calls, calls_of
from ckptfix.formats.torch.weights import Weights, check_whole
from ckptfix.formats.torch.zip import archive_of
from ckptfix.formats.torch.zip_layout import refuse_damaged_pickle
from ckptfix.names import typed
from ckptfix.ops.candidates import Candidate, beside_state_dict, leaves, plain_entries, read_module, state_dict_of
from ckptfix.ops.choose import MISREAD, refuse_damaged
from ckptfix.ops.hazards import dangerous_below
from ckptfix.ops.rank_shards import refuse_odd_keys
from ckptfix.words import some

EXTRA_STATE = "_extra_state"
"""Last component of the key under which a module keeps data other than tensors (Module.get_extra_state)."""


def read(checkpoint: Checkpoint, candidate: Candidate) -> Weights:
    """Return the tensors of a candidate, in the form that ``state_dict()`` returns.

    Raises:
        DamagedFile: the pickle is damaged, a tensor's bytes are missing from the file, or a module is malformed.
        WouldLoseData: a tensor cannot be read.
        KeyConflict, Unsupported: as `formats.torch.module.read_module`.
    """
    archive = archive_of(checkpoint)
    if archive is not None:
        refuse_damaged_pickle(archive, checkpoint.path)
    made = _of_module(checkpoint, candidate) if candidate.module is not None else _of_mapping(checkpoint, candidate.at)
    made, unsafe = _without_hazards(replace(made, files=checkpoint.files))
    check_whole(made, checkpoint.size_of)
    refuse_damaged(checkpoint, MISREAD, candidate.at)
    if candidate.module is None:
        own = {entry.name for entry in state_dict_of(checkpoint, candidate)}
        beside = [entry for entry in checkpoint.entries if entry.name not in own]
        return replace(made, beside=(*unsafe, *beside))
    rest = beside_state_dict(checkpoint, candidate.at, made.entries)
    beside = [*rest, *(entry for entry in checkpoint.entries if not is_inside(entry.name, candidate.at))]
    left = dict.fromkeys((*made.left, *(entry.name for entry in rest)))
    return replace(made, beside=(*unsafe, *beside), left=tuple(left))


def _without_hazards(weights: Weights) -> tuple[Weights, tuple[TensorEntry, ...]]:
    """Split off the tensors whose calls name a global that can run code; each of them becomes a finding."""
    calls = weights.calls
    named = {} if calls is None else {key: dangerous_below(item) for key, item in calls.items().items()}
    unsafe = {key: name for key, name in named.items() if name}
    if calls is None or not unsafe:
        return weights, ()
    gone = tuple(entry for entry in weights.entries if entry.key in unsafe)
    places = tuple(join(weights.at, entry.key) for entry in gone)
    rows = tuple(
        found("not-taken", f"its call names {unsafe[entry.key]}, which can run code", where=place)
        for entry, place in zip(gone, places, strict=True)
    )
    entries = tuple(entry for entry in weights.entries if entry.key not in unsafe)
    left = (*weights.left, *places)
    findings = (*weights.findings, *rows)
    made = replace(weights, entries=entries, calls=calls.without(unsafe), left=left, findings=findings)
    return made, gone


def _of_module(checkpoint: Checkpoint, candidate: Candidate) -> Weights:
    module = read_module(checkpoint, candidate)
    entries = plain_entries(checkpoint, module.tensors)
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


def _calls(
    checkpoint: Checkpoint, tensors: Iterable[tuple[str, Item]], entries: Iterable[TensorEntry]
) -> Calls | None:
    odd = {entry.key for entry in entries if entry.kind != "dense"}
    return calls_of(checkpoint, ((name, item) for name, item in tensors if name in odd))


def _of_mapping(checkpoint: Checkpoint, at: str) -> Weights:
    refuse_odd_keys(checkpoint, at)
    what = f"the state dict {at}" if at else "the state dict"
    left = left_behind(checkpoint, at)
    parts = maybe_pickled_object(checkpoint)
    if parts is None:
        own = tuple(detached_entry(entry, entry.key) for entry in weights_of(checkpoint, at))
        return Weights(checkpoint.path, what, at, own, left=left, byteorder=checkpoint.byteorder)
    found = parts.found
    gone = _optimizer_names(checkpoint, at)
    tensors = [(key, item) for key, item in parts.tensors_at(at) if key not in gone]
    entries = plain_entries(checkpoint, tensors)
    return Weights(
        path=checkpoint.path,
        what=what,
        at=at,
        entries=entries,
        versions=found.module_metadata(at),
        calls=_calls(checkpoint, tensors, entries),
        left=left,
        findings=tuple(_losses(checkpoint, at, left)),
        byteorder=checkpoint.byteorder,
    )


def _optimizer_names(checkpoint: Checkpoint, at: str) -> set[str]:
    """Return the optimizer's keys in a state dict that also holds a model's keys."""
    entries = checkpoint.entries_at(at)
    return {entry.key for entry in entries} - {entry.key for entry in without_optimizer(entries)}


def left_behind(checkpoint: Checkpoint, at: str, *, module: bool = False) -> tuple[str, ...]:
    """Return the addresses outside the state dict or module at `at`, cut at the first key that differs from it.

    The values of a state dict that are not tensors are included. Other attributes of a module do not belong to its
    state dict, and are not included.
    """
    own = keys_of(at)
    entries = checkpoint.entries_at(at)
    taken = {} if module else {entry.name: entry for entry in without_optimizer(entries)}
    gone = set() if module else {entry.name for entry in entries} - taken.keys()
    left: dict[str, None] = {}
    for address, holder in leaves(checkpoint):
        if (tensor := _around(address, taken)) is not None:
            # A wrapper tensor keeps what it carries; a plain tensor is written again without attributes.
            if holder is not None and tensor.kind == "dense":
                left[address] = None
            continue
        if address in gone:
            left[address] = None
            continue
        keys = keys_of(address)
        common = 0
        while common < min(len(own), len(keys)) and own[common] == keys[common]:
            common += 1
        if common < len(own) or not (module or holder == at or len(keys) == common):
            left[of_keys(keys[: common + 1])] = None
    return tuple(left)


def _around(address: str, tensors: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """Return the tensor that has the value at `address` as an attribute, or as part of one."""
    keys = keys_of(address) if tensors else ()
    holders = (of_keys(keys[:end]) for end in range(len(keys) - 1, 0, -1))
    return next((found for holder in holders if (found := tensors.get(holder)) is not None), None)


def _losses(checkpoint: Checkpoint, at: str, left: Iterable[str]) -> Iterator[Finding]:
    """Yield findings for omitted data that the model would miss: extra state, and tensors packed in tuples."""
    own = keys_of(at)
    tensors = [address for address, holder in leaves(checkpoint) if holder is not None]
    parts = maybe_pickled_object(checkpoint)
    unread = frozenset(parts.found.unread(at) if parts is not None else ())
    packed = {*tensors, *(of_keys(keys_of(address)[: len(own) + 1]) for address in tensors)}
    mappings = [site.at for site in checkpoint.sites if site.kind == "state_dict" and site.at != at]
    gone = _optimizer_names(checkpoint, at)
    for address in left:
        if not is_inside(address, at) or any(is_inside(mapping, address) for mapping in mappings):
            continue
        name = "/".join(keys_of(address)[len(own) :])
        if name in gone:
            continue
        if address in unread:
            yield found("not-taken", "a tensor built from other values, such as a list", where=address)
        elif name.rpartition(".")[2] == EXTRA_STATE:
            yield found("not-taken", "extra state of a module, which is not a tensor", where=address)
        elif address in packed and ("." in name or "/" in name):
            yield found("not-taken", "tensors packed in another object, which are not extracted", where=address)


def nested(weights: Weights, asked: Sequence[str]) -> Weights:
    """Keep the tensors under the prefixes `asked`, ``NAME`` or ``NAME=PREFIX``, each in a dict called NAME.

    ``NAME=`` without a prefix takes all tensors.

    Raises:
        Refused: a name has a dot, two are the same, or a key has two of the prefixes.
        NoSuchTensor: no key has the prefix.
    """
    pairs = [(name, (prefix if equals else name).removesuffix(".")) for name, equals, prefix in (
             row.partition("=") for row in asked)]  # fmt: skip
    dicts = [name for name, _ in pairs]
    if len(set(dicts)) < len(dicts) or not all(name and "." not in name for name in dicts):
        raise Refused(f"the names of the dicts must differ, and have no dots: {some(dicts)}", path=weights.path)
    keys = [entry.key for entry in weights.entries]
    names: dict[str, str] = {}
    for name, prefix in pairs:
        front = f"{prefix}." if prefix else ""
        own = {key: f"{name}.{key[len(front) :]}" for key in keys if key.startswith(front)}
        if not own:
            near = typed.nearest(prefix, list(dict.fromkeys(key.partition(".")[0] for key in keys)))
            hint = f"did you mean {some(near)}?" if near else "run `ckptfix inspect` to list the keys"
            raise NoSuchTensor(f"no key begins with {prefix}.", path=weights.path, hint=hint)
        if not names.keys().isdisjoint(own):
            raise Refused(f"the keys under {front or name} would be in two dicts", path=weights.path)
        names |= own
    return replace(picked(weights, names, f"{weights.what}, as {some(dicts)}"), dicts=tuple(dicts))


def picked(weights: Weights, names: Mapping[str, str], what: str, prefix: str = "") -> Weights:
    """Keep the tensors that `names` lists (old -> new), under their new keys; the others are left behind.

    Args:
        prefix: path of the module whose versions become the root's.
    """
    entries = tuple(replace(entry, key=names[entry.key]) for entry in weights.entries if entry.key in names)
    calls = weights.calls
    if calls is not None:
        calls = replace(calls, nodes={names[name]: node for name, node in calls.nodes.items() if name in names})
    versions = weights.versions
    if versions is not None and prefix:
        inside = {path: own for path, own in versions.items() if path == prefix or path.startswith(f"{prefix}.")}
        versions = {path[len(prefix) + 1 :]: own for path, own in inside.items()}
    gone = tuple(join(weights.at, entry.key) for entry in weights.entries if entry.key not in names)
    left = (*weights.left, *gone)
    return replace(weights, entries=entries, calls=calls, versions=versions, left=left, what=what)

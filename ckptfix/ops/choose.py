"""Choice of the state dict that the user means: one answer for every verb.

The answer is an address from the caller, or the state dict that best fits a model that the caller has (`best`), or else
the candidates that remain after these steps. The top level is a candidate like any other.

1. Unlikely candidates are dropped. If there is a model or an average, these are the other things that trainers keep
   (`names.kinds`: optimizers, statistics, hyper-parameters). If there is a model, averages and other copies (`COPIES`)
   are dropped too.
2. A key that training code uses for its model (`NAMES`) wins; of several such keys, the outermost.
3. Candidates whose keys look like a module's parameters are preferred.
4. Several names for the same tensors are one state dict.

If several remain, as with a generator and a discriminator, the user is asked. Sizes never decide, but they are a reason
for doubt. If no key named the model, and the other tensors have more bytes than the chosen ones, the user is asked too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from ckptfix.checkpoint import Checkpoint, NameList, StateDict, TensorEntry, address, with_parts
from ckptfix.checkpoint.address import is_inside, is_inside_any, key_below
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused, Undecided, WouldLoseData
from ckptfix.findings import table
from ckptfix.findings.folders import BROKEN as BROKEN
from ckptfix.findings.folders import MISREAD as MISREAD
from ckptfix.findings.row import Finding
from ckptfix.formats import format_of
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.io.source import truncated_hint
from ckptfix.names import kinds, wrappers
from ckptfix.names.kinds import Kind
from ckptfix.ops.candidates import (
    Candidate,
    at_address,
    candidates,
    leaves,
    module_of,
    state_dict_of,
    view,
    whole_module,
)
from ckptfix.words import plural, some

NAMES: dict[str, str] = {
    "model": "torchvision references, fvcore Checkpointer, Ultralytics, fairseq, fastai save_model with its optimizer",
    "model_state_dict": "PyTorch tutorial 'Saving and loading a general checkpoint'",
    "model_state": "pycls checkpoint.py",
    "state_dict": "pytorch/examples imagenet/main.py, Lightning, MMEngine, timm",
    "net": "kuangliu/pytorch-cifar main.py",
    "net_state_dict": "trainers that call the model net",
    "network": "trainers that call the model network",
    "network_weights": "nnU-Net nnUNetTrainer.save_checkpoint",
    "network_state_dict": "trainers that call the model network",
    "module": "DeepSpeed engine.py _save_checkpoint",
    "params": "BasicSR models/base_model.py save_network",
    "weights": "trainers that save weights alone",
    "serialized_state_dict.pt": "torch.export.save before torch 2.8",
}
"""Key of the model's state dict -> its writers. It is at the top, or below other keys of this table and `AROUND`."""

AROUND = frozenset(("checkpoint", "ckpt", "state", "app"))
"""Keys of dicts around everything that a trainer saves."""

COPIES: dict[str, str] = {
    "current_model_state": "Lightning WeightAveraging: the weights before averaging; state_dict has the average",
    "module_16bit": "formats.zero: what a DeepSpeed model computed with; module has the fp32 weights",
    "frozen_param_fragments": "DeepSpeed engine.py: parts of frozen parameters; module has them, or zero_to_fp32 does",
}
"""Key of weights beside the model's, under the same keys -> their meaning. Averages are recognized separately."""

_NAMED, _PARAMETERS, _COPY, _OTHER, _OTHER_COPY, _ASIDE = range(6)


@dataclass(frozen=True, slots=True)
class Takes:
    """The kinds of state dicts that a verb accepts at an address, besides plain ones.

    Attributes:
        modules: whole pickled modules.
        payloads: dicts whose keys only the class of an object knows (`StateDict.payload`).
    """

    modules: bool = True
    payloads: bool = True


ANY = Takes()
MAPPINGS = Takes(modules=False)
EDITABLE = Takes(modules=False, payloads=False)


def choose(
    checkpoint: Checkpoint, at: str | None = None, *, doubt: bool = True, takes: Takes = ANY
) -> Candidate:
    """Return the state dict or whole module that is meant, for verbs that read one and ignore the rest.

    Args:
        at: its address, if the caller names one.
        doubt: refuse a doubtful choice (`refuse_doubt`); False where nothing is written or returned.
        takes: the kinds that the verb accepts at an address, so that the error lists no other kinds.

    Raises:
        NoSuchTensor: there is no state dict at `at`.
        Undecided: there are several, and nothing decides between them; or the choice is in doubt.
        Refused: there is no state dict.
    """
    if at is not None:
        return at_address(checkpoint, at)
    rows = meant(checkpoint)
    if not rows:
        raise Refused("it has no state dict and no module", path=checkpoint.path, hint=_instead(checkpoint))
    if len(rows) > 1:
        raise undecided(checkpoint, rows, takes=takes)
    if doubt:
        refuse_doubt(checkpoint, rows, takes)
    return rows[0]


def _instead(checkpoint: Checkpoint) -> str:
    """Return the hint for a file without a state dict."""
    parts = maybe_pickled_object(checkpoint)
    if parts is not None and any(parts.named_arrays()):
        made = command("sanitize", checkpoint.path, "OUT")
        return f"its weights are NumPy arrays: convert them to tensors with `{made}` first, and use its output"
    return "`ckptfix inspect` shows what it holds"


def mapping(
    checkpoint: Checkpoint, at: str | None = None, *, doubt: bool = True, takes: Takes = MAPPINGS
) -> Candidate:
    """Return the state dict that is meant, for verbs that cannot work on whole modules.

    Raises:
        Refused: it is a whole module; or as `choose`.
    """
    row = choose(checkpoint, at, doubt=doubt, takes=takes)
    if row.module is not None:
        raise whole_module(checkpoint, row.at)
    return row


def best(
    checkpoint: Checkpoint, score: Callable[[Candidate], Any], *, takes: Takes = ANY
) -> Candidate | None:
    """Return the candidate that fits a model best; None if no candidate fits, or there is only one.

    Args:
        score: returns how well a candidate fits, 0 for not at all.

    Raises:
        Undecided: several fit equally well, and nothing else decides between them.
    """
    rows = models(checkpoint)
    if len(rows) < 2:
        return None
    scores = {row.at: score(row) for row in rows}
    top = max(scores.values())
    if not top:
        return None
    found = meant(checkpoint, [row for row in rows if scores[row.at] == top])
    if len(found) > 1:
        raise undecided(checkpoint, found, fit=True, takes=takes)
    return found[0]


def meant(checkpoint: Checkpoint, rows: Sequence[Candidate] | None = None) -> list[Candidate]:
    """Return the candidates between which nothing decides: exactly one if the answer is known.

    Args:
        rows: the candidates to choose among; by default all that the file holds.
    """
    if rows is None:
        return list(checkpoint.once(_meant))
    return _different(checkpoint, narrowed(rows))


def _meant(checkpoint: Checkpoint) -> list[Candidate]:
    rows = candidates(checkpoint)
    return _different(checkpoint, _best(rows, checkpoint.once(_all_standings)))


def _different(checkpoint: Checkpoint, found: list[Candidate]) -> list[Candidate]:
    """Reduce the candidates that are made of the same tensors to one."""
    if len(found) < 2:
        return found
    first: dict[object, Candidate] = {}
    for row in sorted(found, key=lambda row: row.module is not None):
        first.setdefault(_tensors(checkpoint, row), row)
    kept = {id(row) for row in first.values()}
    return [row for row in found if id(row) in kept]


def narrowed(rows: Sequence[Candidate]) -> list[Candidate]:
    """Reduce the candidates like `meant`, by addresses and keys alone."""
    return list(rows) if len(rows) < 2 else _best(rows, _standings(rows))


def _best(rows: Sequence[Candidate], standing: Mapping[str, tuple[int, int]]) -> list[Candidate]:
    best = min(standing.values(), default=None)
    return [row for row in rows if standing[row.at] == best]


def _all_standings(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    return _standings(candidates(checkpoint))


def _standings(rows: Sequence[Candidate]) -> dict[str, tuple[int, int]]:
    """Map each address to its rank by key and names, the likeliest model first, and its depth if a key names it."""
    around = {row.at for row in rows if row.nested and _is_like_module(row)}
    return {row.at: _standing(row, around) for row in rows}


def _standing(row: Candidate, around: Collection[str]) -> tuple[int, int]:
    parts = address.keys_of(row.at)
    kind = kind_of(row)
    if kind not in (None, "average"):
        return _ASIDE, 0
    like_module = _is_like_module(row)
    if kind == "average" or any(part in COPIES for part in parts):
        return (_COPY if like_module else _OTHER_COPY), 0
    if not parts and (row.versions or not row.nested):
        return _NAMED, 0
    # 'params' among the keys of a module is a value of its trainer, unless it holds parameters.
    if is_named(row) and (like_module or not is_inside_any(row.at, around)):
        return _NAMED, len(parts)
    return (_PARAMETERS if like_module else _OTHER), 0


def is_named(row: Candidate) -> bool:
    """Return whether the key of a candidate is one that training code uses for its model."""
    parts = address.keys_of(row.at)
    return bool(parts) and parts[-1] in NAMES and all(part in NAMES or part in AROUND for part in parts)


def kind_of(row: Candidate) -> Kind | None:
    """Return the kind of a candidate that is not a model; None for a model."""
    return kinds.of(row.at, row.names if row.module is None else ())


def _is_like_module(row: Candidate) -> bool:
    if row.module is not None:
        return True
    return kinds.are_parameters(row.names if row.shaped is None else row.shaped, nested=row.nested)


def _tensors(checkpoint: Checkpoint, row: Candidate) -> object:
    """Return a value that is equal for candidates made of the same tensors of the file."""
    try:
        entries = state_dict_of(checkpoint, row)
        return frozenset(view(entry) for entry in entries) or row.at
    except CkptfixError:
        return row.at


def models(checkpoint: Checkpoint) -> list[Candidate]:
    """List every candidate that is a model or a copy of one, the main ones first.

    Candidates that are set aside are included only if there is nothing else.
    """
    return list(checkpoint.once(_models))


def _models(checkpoint: Checkpoint) -> list[Candidate]:
    rows = candidates(checkpoint)
    standing = {at: rank for at, (rank, _) in checkpoint.once(_all_standings).items()}
    likeliest = min(standing.values(), default=_ASIDE)
    found = [row for row in rows if standing[row.at] < _ASIDE and not _is_around(row, standing[row.at], likeliest)]
    found = found or rows
    first = {row.at for row in meant(checkpoint, found if len(found) < len(rows) else None)}
    return sorted(found, key=lambda row: row.at not in first)


def _is_around(row: Candidate, standing: int, likeliest: int) -> bool:
    """Return whether a dict around others is a trainer's, with a tensor (class weights) named like a layer's."""
    return row.nested and likeliest < standing == _OTHER


def states(checkpoint: Checkpoint) -> list[StateDict]:
    """List the state dicts among `models`, for verbs that edit all of them."""
    by_at = {state.at: state for state in checkpoint.state_dicts}
    return [by_at[row.at] for row in models(checkpoint) if row.module is None]


def choices(checkpoint: Checkpoint, ats: Iterable[str], takes: Takes) -> tuple[str, ...]:
    """Return those of the addresses `ats` that ``--at`` accepts as they are printed, each once."""
    modules = set() if takes.modules else {row.at for row in candidates(checkpoint) if row.module is not None}
    payloads = set() if takes.payloads else _payloads(checkpoint)
    return tuple(at for at in dict.fromkeys(ats) if address.is_typed(at) and at not in modules and at not in payloads)


def _payloads(checkpoint: Checkpoint) -> set[str]:
    return {state.at for state in checkpoint.state_dicts if state.payload}


def undecided(
    checkpoint: Checkpoint, rows: Sequence[Candidate], *, fit: bool = False, takes: Takes = ANY
) -> Refused:
    """Return the error that asks for one of `rows`; if the verb accepts none of them, the error that explains why.

    Args:
        rows: the candidates that the file holds, or with `fit` those that fit a model equally well.
        takes: the kinds that the verb accepts at an address.
    """
    ats = choices(checkpoint, (row.at for row in rows), takes)
    modules = [row.at for row in rows if row.module is not None]
    if not ats and modules:
        return whole_module(checkpoint, modules[0])
    if not ats and rows[0].at in _payloads(checkpoint):
        return _not_edited(checkpoint, rows[0].at)
    addresses = listed(ats)
    several = f"{len(rows)} state dicts"
    message = f"{several} fit equally well: {addresses}" if fit else f"it holds {several}: {addresses}"
    if modules and len(modules) < len(rows):
        message += f"; {', '.join(modules)} {'is a whole pickled module' if len(modules) == 1 else 'are whole modules'}"
    rest = [row.at for row in rows if row.at not in (*ats, *modules)]
    if rest:
        message += f"; {listed(rest)} cannot be chosen here"
    return Undecided(message, choices=ats, path=checkpoint.path)


def listed(ats: Iterable[str]) -> str:
    """Join addresses for a sentence, the top level as ``--at`` accepts it."""
    return ", ".join(address.shown(at, to_type=True) for at in ats)


@dataclass(frozen=True, slots=True)
class Outside:
    """The tensors outside a choice that may be a model's, because they are not recognized as anything else.

    Attributes:
        rows: address at the top -> bytes of tensors there.
        ats: addresses of state dicts among them, the largest first.
        taken: bytes of the choice.
    """

    rows: Mapping[str, int]
    ats: tuple[str, ...]
    taken: int

    @property
    def nbytes(self) -> int:
        return sum(self.rows.values())

    @property
    def doubtful(self) -> bool:
        return self.nbytes > self.taken


def outside(checkpoint: Checkpoint, rows: Sequence[Candidate]) -> Outside | None:
    """Return what is outside the candidates `rows`; None if a key names one of them, or there is nothing else.

    Three kinds of tensors do not count: recognized ones (`kinds.RECOGNISED`), copies with the keys and shapes of a
    chosen state dict, and other names of the chosen tensors.
    """
    ats = {row.at for row in rows}
    if not rows or any(map(is_named, rows)):
        return None
    if all(holder in ats for _, holder in leaves(checkpoint) if holder is not None):
        return None
    taken: dict[object, int] = {}
    copies: list[dict[str, tuple[int, ...]]] = []
    inside = [row.at for row in rows if row.module is not None]
    for row in rows:
        try:
            own = state_dict_of(checkpoint, row)
        except CkptfixError:
            own = tuple(entry for entry in checkpoint.entries if is_inside(entry.name, row.at))
        taken |= _held(own)
        copies.append(_shapes(own))
    optimizers = {state.at for state in checkpoint.state_dicts if state.optimizer}
    left: dict[str, list[TensorEntry]] = {}
    parts = {name for row in rows for name in _parts(checkpoint, row)}
    for entry in checkpoint.entries:
        if entry.at not in ats and not is_inside_any(entry.at, inside) and not is_inside_any(entry.at, parts):
            left.setdefault(entry.at, []).append(entry)
    sizes: dict[str, int] = {}
    tops: dict[str, int] = {}
    for at, entries in left.items():
        if at in optimizers or kinds.is_recognised(at, checkpoint.keys_at(at)):
            continue
        if _is_copy(_shapes(entries), copies):
            continue
        for entry in entries:
            if kinds.of_key(entry.key) in kinds.RECOGNISED or kinds.is_generator(entry.dtype, entry.shape):
                continue
            held = {place: nbytes for place, nbytes in _held([entry]).items() if place not in taken}
            taken |= dict.fromkeys(held, 0)
            count = sum(held.values())
            top = address.top_of(entry.name)
            tops[top] = tops.get(top, 0) + count
            sizes[at] = sizes.get(at, 0) + count
    found = sorted((at for at in sizes if checkpoint.names_at(at) is not None), key=lambda at: -sizes[at])
    return Outside(tops, tuple(found), sum(taken.values())) if sizes else None


def _parts(checkpoint: Checkpoint, row: Candidate) -> Iterator[str]:
    """Yield addresses in a state dict whose tensors belong to its module: packed weights, attributes of tensors."""
    tensors = {entry.key for entry in checkpoint.entries_at(row.at)}
    others = {site.at for site in checkpoint.sites if site.kind == "state_dict"}
    for key in dict.fromkeys(key_below(at, row.at) for at in dict.fromkeys(entry.at for entry in checkpoint.entries)):
        if key is None:
            continue
        name = address.join(row.at, key)
        if key in tensors or not (name in others or _is_trainers(key)):
            yield name


def _is_trainers(key: str) -> bool:
    """Return whether a key that holds no tensor is a trainer's own; a module's has dots or begins with ``_``."""
    return "." not in key and not key.startswith("_")


def refuse_doubt(checkpoint: Checkpoint, rows: Sequence[Candidate], takes: Takes) -> None:
    """Raise an error if the file has more bytes of other tensors than `rows`, its supposed models, have.

    The error lists the choices that the verb accepts.

    Raises:
        Undecided: no key names one of `rows` as the model's, and the tensors outside are larger.
    """
    found = outside(checkpoint, rows)
    if found is None or not found.doubtful:
        return
    ats = choices(checkpoint, (*(row.at for row in rows), *found.ats), takes)
    message = f"{doubt(rows, found)}; state dicts are {listed(ats)}" if ats else doubt(rows, found)
    raise Undecided(message, choices=ats, path=checkpoint.path)


def remarks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the same doubt as a finding, for verbs that only read and never stop."""
    rows = meant(checkpoint)
    found = outside(checkpoint, rows) if len(rows) == 1 else None
    if found is not None and found.doubtful:
        yield table.found("doubtful-model", doubt(rows, found), where=rows[0].at)


def doubt(rows: Sequence[Candidate], found: Outside) -> str:
    """Describe why `rows` may not be the model."""
    chosen = " and ".join(address.shown(row.at) for row in rows[:3])
    others = some(list(found.rows), 4)
    return (
        f"no key shows which state dict is the model's: {chosen} has {plural(found.taken, 'byte')} of tensors, "
        f"but {plural(found.nbytes, 'byte')} are elsewhere, in {others}"
    )


def _held(entries: Iterable[TensorEntry]) -> dict[object, int]:
    """Map the place of each tensor in the file to its bytes."""
    return {view(entry): entry.nbytes for entry in with_parts(entries) if entry.storage is not None}


def _shapes(entries: Iterable[TensorEntry]) -> dict[str, tuple[int, ...]]:
    """Map names without wrappers to shapes, for the tensors with at least one dimension."""
    return {wrappers.unwrapped(entry.key): entry.shape for entry in entries if entry.shape}


def _is_copy(shapes: Mapping[str, tuple[int, ...]], chosen: Sequence[Mapping[str, tuple[int, ...]]]) -> bool:
    """Return whether these are the tensors of a chosen state dict again: under its keys, or in a list."""
    if not shapes:
        return False
    if all(name.isdigit() for name in shapes):
        return any(not Counter(shapes.values()) - Counter(own.values()) for own in chosen)
    return any(shapes.items() <= own.items() and len(shapes) * 2 > len(own) for own in chosen)


def optimizer_tensors(checkpoint: Checkpoint) -> list[TensorEntry]:
    """List every tensor of an optimizer's state, including those among a model's keys."""
    fronts, flat = _states_of_optimizers(checkpoint)
    mixed: dict[str, frozenset[str]] = {}
    found = []
    for entry in checkpoint.entries:
        if entry.at not in mixed:
            mixed[entry.at] = kinds.optimizer_names(row.key for row in checkpoint.entries_at(entry.at))
        if entry.at in flat or is_inside_any(entry.at, fronts) or entry.key in mixed[entry.at]:
            found.append(entry)
    return found


def optimizers(checkpoint: Checkpoint) -> list[str]:
    """Return the addresses of the optimizers in the checkpoint."""
    fronts, flat = _states_of_optimizers(checkpoint)
    ats = (*map(address.holder_of, fronts), *flat)
    return [at for at in dict.fromkeys(ats) if at]


def _states_of_optimizers(checkpoint: Checkpoint) -> tuple[frozenset[str], frozenset[str]]:
    """Return the addresses of each optimizer's ``state``, and of dicts that are a flattened one."""
    fronts: set[str] = set()
    flat: set[str] = set()
    for state in checkpoint.state_dicts:
        if not state.optimizer:
            continue
        above = address.keys_of(state.at)[:-1]
        if "state" in above and not kinds.is_flat_optimizer(checkpoint.keys_at(state.at)):
            fronts.add(address.of_keys(above[: len(above) - above[::-1].index("state")]))
        else:
            flat.add(state.at)
    return frozenset(fronts), frozenset(flat)


def refuse_damaged(
    checkpoint: Checkpoint,
    ids: Collection[str] = BROKEN,
    below: str = "",
    left_out: Collection[str] = (),
    *,
    listed: bool = True,
) -> None:
    """Raise `WouldLoseData` if broken tensors would be missing from the output, or become something else there.

    Args:
        ids: the findings to look for.
        below: an address; findings about tensors elsewhere do not count.
        left_out: names and addresses that the output will not have; findings about them do not count either.
        listed: list the tensors first, which creates the findings about them. A verb that keeps and reports a tensor
            that it cannot read passes False, to check only the container.

    Raises:
        WouldLoseData: a tensor cannot be read as its writer meant it.
    """
    if listed:
        _ = checkpoint.entries
    broken = [row for row in checkpoint.findings if row.id in ids and not row.where.startswith("__metadata__/")]
    if left_out:
        broken = [row for row in broken if not address.is_inside_any(row.where, left_out)]
    if below and broken:
        names = checkpoint.once(_names)
        broken = [row for row in broken if address.is_inside(names.get(row.where, below), below)]
    if broken:
        message = f"{broken[0].message} ({len(broken)} such)" if len(broken) > 1 else broken[0].message
        where, offset = broken[0].where or None, broken[0].offset
        hint = table.said_remedy(broken[0], checkpoint.path).advice
        if broken[0].id == "truncated":
            hint = truncated_hint(checkpoint.path)
        elif broken[0].id == "unknown-dtype":
            hint = f"`{command('repair', checkpoint.path, 'OUT')}` writes the other tensors"
        raise WouldLoseData(message, path=checkpoint.path, where=where, offset=offset, hint=hint)


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    return {entry.name: entry.name for entry in checkpoint.entries}


def chosen_sites(checkpoint: Checkpoint, at: str | None, *, weights_only: bool = False) -> list[NameList]:
    """Return the state dicts to work on: the one at `at`, or all, or those that look like a model's.

    Raises:
        NoSuchTensor: there is no state dict at `at`.
        Refused: a whole module is there.
        Undecided: with `weights_only`, the choice is in doubt.
    """
    fixed = _payloads(checkpoint)
    sites = [site for site in checkpoint.sites if site.kind == "state_dict" and site.at not in fixed]
    if at is not None:
        row = at_address(checkpoint, at)
        if row.module is not None:
            raise whole_module(checkpoint, row.at)
        if row.at in fixed:
            raise _not_edited(checkpoint, row.at)
        return [site for site in sites if site.at == row.at]
    inside = module_of(checkpoint)
    sites = [site for site in sites if site.at not in inside]
    if weights_only:
        _refuse_payload(checkpoint, fixed)
        weights = {state.at for state in states(checkpoint)} - fixed
        refuse_doubt(checkpoint, [row for row in models(checkpoint) if row.at in weights], EDITABLE)
        return [site for site in sites if site.at in weights]
    return sites


def _refuse_payload(checkpoint: Checkpoint, fixed: Collection[str]) -> None:
    """Raise if the model is one of `fixed`: without it, an edit would miss the model, or do nothing."""
    first = next((row for row in meant(checkpoint) if row.module is None and row.at in fixed), None) if fixed else None
    if first is not None:
        raise _not_edited(checkpoint, first.at)


def refuse_unedited(checkpoint: Checkpoint, changes: Callable[[NameList], bool]) -> None:
    """Raise if an edit that found nothing to change would change a mapping whose keys are never edited.

    Args:
        changes: whether the edit would change the keys of a state dict.

    Raises:
        Refused: there is such a mapping.
    """
    fixed = _payloads(checkpoint)
    for site in checkpoint.sites if fixed else ():
        if site.kind == "state_dict" and site.at in fixed and changes(site):
            raise _not_edited(checkpoint, site.at)


def unnamed_keys(checkpoint: Checkpoint, site: NameList) -> tuple[str, ...]:
    """Return the keys of tensors in a state dict that are not text, as written: they are not parameters' names."""
    state = checkpoint.state_at(site.at)
    if state is None or state.tensors + state.extra <= len(set(site.names)):
        return ()
    names = set(site.names)
    return tuple(entry.key for entry in checkpoint.entries_at(site.at) if entry.key not in names)


def _not_edited(checkpoint: Checkpoint, at: str) -> Refused:
    """Return the error for a payload at `at`, whose keys are not edited."""
    hint = f"extract its tensors with `{command('extract', checkpoint.path, 'OUT', at=at or '/')}`"
    message = "its keys are not edited, because only the class of the object around it knows their meaning"
    return Refused(message, path=checkpoint.path, where=at, hint=hint)


def inner_keys(checkpoint: Checkpoint, site: NameList) -> frozenset[str]:
    """Return the keys of a state dict under which a trainer keeps other dicts: ``optimizer``, ``normalizer``."""
    tensors = _tensor_keys(checkpoint, site.at)
    found = checkpoint.once(_keys_of_dicts).get(site.at, ())
    return frozenset(key for key in found if key not in tensors and _is_trainers(key))


def _keys_of_dicts(checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Return, for each mapping, the keys under which it holds another mapping."""
    found = defaultdict[str, set[str]](set)
    above = [address.keys_of(place)[:-1] for place, _ in checkpoint.values()]
    for keys in {*above, *(address.keys_of(site.at) for site in checkpoint.sites)}:
        for depth, key in enumerate(keys):
            found[address.of_keys(keys[:depth])].add(key)
    return found


def own_keys(checkpoint: Checkpoint, site: NameList) -> tuple[str, ...]:
    """Return the keys of a state dict that belong to its model, without those that a trainer added.

    Left out are numbers and dicts under a plain key, and an optimizer's keys. If there are any of these, tensors that
    are counters or scores are left out too.
    """
    tensors = _tensor_keys(checkpoint, site.at) | (set() if site.at else format_of(checkpoint).ties(checkpoint).keys())
    gone = kinds.optimizer_names(site.names)
    others = {name for name in site.names if name not in tensors and _is_trainers(name)}
    counters = {name for name in site.names if others and name in tensors and kinds.is_progress(name)}
    if counters:
        counters -= checkpoint.shaped(site.at, site.names)
    if len(gone) < len(site.names):
        others |= gone
    return tuple(name for name in site.names if name not in others and name not in counters)


def _tensor_keys(checkpoint: Checkpoint, at: str) -> Set[str]:
    """Return the keys of the tensors in the state dict at `at`, whether or not they can be read."""
    return checkpoint.once(_keys_of_tensors).get(at, frozenset())


def _keys_of_tensors(checkpoint: Checkpoint) -> dict[str, set[str]]:
    found = defaultdict[str, set[str]](set)
    for name, holder in leaves(checkpoint):
        if holder is not None:
            found[holder].add(name[len(holder) + 1 if holder else 0 :])
    return found


def refuse_module(checkpoint: Checkpoint) -> None:
    """Raise an error if nothing was found to work on because the file holds a whole module.

    Raises:
        Refused: it holds one.
    """
    if not module_of(checkpoint):
        return
    module = next((row for row in meant(checkpoint) if row.module is not None), None)
    if module is not None:
        raise whole_module(checkpoint, module.at)

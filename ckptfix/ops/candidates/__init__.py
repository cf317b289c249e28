"""The state dicts that a checkpoint holds: dicts with a model's tensors, and whole pickled modules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.checkpoint.address import given, holders_of, is_inside, is_inside_any, join
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, NoSuchTensor, Refused, WouldLoseData, about
from ckptfix.formats import without_optimizer
from ckptfix.formats.torch import module as torch_module
from ckptfix.formats.torch.calls import detached_entry
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.formats.torch.module import Module
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.names import kinds
from ckptfix.words import where_else

if TYPE_CHECKING:
    from ckptfix.checkpoint.tree import Item


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state dict that the user could mean.

    Attributes:
        at: its address.
        module: the object, if it is a whole module.
        names: keys of the state dict, or of the buffers of the module itself.
        shaped: the keys among `names` whose tensor has at least one dimension; None where that is not known.
        nested: further state dicts or optimizers are inside it.
        versions: it has a ``_metadata``, which ``Module.state_dict()`` adds.
    """

    at: str
    module: Item = None
    names: tuple[str, ...] = ()
    shaped: tuple[str, ...] | None = None
    nested: bool = False
    versions: bool = False


def candidates(checkpoint: Checkpoint) -> list[Candidate]:
    """Return every candidate that looks like a model's, in file order; without one, all except those of optimizers.

    A module without tensors (a loss, an activation) counts only where there is nothing else.
    """
    rows = checkpoint.once(_candidates)
    return list(checkpoint.once(_compared)) if len(rows) > 1 else list(rows)


def _compared(checkpoint: Checkpoint) -> list[Candidate]:
    """Return the candidates with the fields filled in by which one is told apart from another."""
    around = holders_of(site.at for site in checkpoint.sites if site.kind == "state_dict")
    versions = {site.at for site in checkpoint.sites if site.kind == "metadata"}
    return [
        replace(
            row,
            shaped=tuple(checkpoint.shaped(row.at, row.names)) if row.module is None else None,
            nested=row.at in around,
            versions=row.at in versions,
        )
        for row in checkpoint.once(_candidates)
    ]


def _candidates(checkpoint: Checkpoint) -> list[Candidate]:
    modules = [
        Candidate(at, item, checkpoint.keys_at(join(at, "_buffers")))
        for at, item in torch_module.modules(checkpoint)
    ]
    taken = {module.at for module in modules}
    states = [
        state for state in checkpoint.state_dicts if not state.optimizer and not is_inside_any(state.at, taken)
    ]
    weights = [Candidate(state.at, None, checkpoint.keys_at(state.at)) for state in states if state.weights]
    if weights and all(_is_aside(row) for row in weights):
        # Statistics look like weights; parameters with other keys beside them still belong to a model.
        rest = [Candidate(state.at, None, checkpoint.keys_at(state.at)) for state in states if not state.weights]
        weights += [row for row in rest if not _is_aside(row) and checkpoint.shaped(row.at, row.names)]
    full = [row for row in modules if len(modules) + len(weights) == 1 or _has_tensors(row)]
    if full and weights:
        addresses = [address for address, _ in leaves(checkpoint)]

        def place(row: Candidate) -> int:
            return next((index for index, address in enumerate(addresses) if is_inside(address, row.at)), 0)

        return sorted([*full, *weights], key=place)
    others = [Candidate(state.at, None, checkpoint.keys_at(state.at)) for state in states]
    return [*full, *weights] or others or modules


def _is_aside(row: Candidate) -> bool:
    return kinds.of(row.at, row.names) not in (None, "average")


def _has_tensors(row: Candidate) -> bool:
    """Return whether the state dict of a module holds anything; True where that is unknown."""
    try:
        module = torch_module.read_module(row.module, row.at)
    except CkptfixError:
        return True
    return bool(module.tensors) or any(finding.id == "not-taken" for finding in module.findings)


def at_address(checkpoint: Checkpoint, at: str) -> Candidate:
    """Return the module, or the dict with tensors, at an address.

    Raises:
        NoSuchTensor: there is neither.
    """
    at = given(at)
    rows = candidates(checkpoint)
    known = next((row for row in rows if row.at == at), None)
    if known is not None:
        return known
    if maybe_pickled_object(checkpoint) is not None:
        with suppress(NoSuchTensor):
            item = checkpoint.tree.at(at)
            if torch_module.is_module(item):
                return Candidate(at, item)
    if checkpoint.names_at(at) is not None:
        return Candidate(at, None, checkpoint.keys_at(at))
    known_ats = [row.at for row in rows]
    others = [site.at for site in checkpoint.sites if site.kind == "state_dict"]
    addresses = list(dict.fromkeys([*known_ats, *others]))
    from difflib import get_close_matches

    near = tuple(get_close_matches(at, addresses, 3, 0.4)) or tuple(known_ats[:8])
    hint = where_else(near) if near else "`ckptfix inspect` shows what it holds"
    raise NoSuchTensor(f"no state dict and no module at {at!r}", near=near, path=checkpoint.path, hint=hint)


def leaves(checkpoint: Checkpoint) -> Iterator[tuple[str, str | None]]:
    """Yield (address, address of the dict that holds it if it is a tensor) of every leaf."""
    parts = maybe_pickled_object(checkpoint)
    if parts is not None:
        found = parts.found
        yield from ((join(at, key), at) for at, key, _ in found.tensors.unmade())
        yield from ((address, None) for address, _ in found.values if address)
    else:
        yield from ((entry.name, entry.at) for entry in checkpoint.entries)
        yield from ((address, None) for address, _ in checkpoint.values())


def state_dict_of(checkpoint: Checkpoint, row: Candidate) -> tuple[TensorEntry, ...]:
    """Return a candidate's tensors under the keys that ``state_dict()`` gives them; those of a dict keep their address.

    Raises:
        CkptfixError: the module is malformed, or one of its tensors cannot be read.
    """
    if row.module is None:
        return without_optimizer(checkpoint.entries_at(row.at))
    return module_entries(checkpoint, read_module(checkpoint, row))


def read_module(checkpoint: Checkpoint, row: Candidate) -> Module:
    """Read the whole module of a candidate.

    Raises:
        DamagedFile, KeyConflict, Unsupported: as `formats.torch.module.read_module`, about the file.
    """
    with about(checkpoint.path, always=True):
        return torch_module.read_module(row.module, row.at)


def module_entries(checkpoint: Checkpoint, module: Module) -> tuple[TensorEntry, ...]:
    """Return the entries of a module's state dict, under their full keys.

    Raises:
        WouldLoseData: one of them does not describe a tensor of the file.
    """
    return plain_entries(checkpoint, module.tensors)


def plain_entries(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Item]]) -> tuple[TensorEntry, ...]:
    """Convert pairs (name, item) to the entries of plain tensors.

    Raises:
        WouldLoseData: one of them does not describe a tensor of the file.
    """
    from ckptfix.checkpoint.tree import TensorValue

    entries = []
    for name, item in tensors:
        if not isinstance(item, TensorValue):
            raise WouldLoseData("a bare storage, without a tensor around it", path=checkpoint.path, where=name)
        try:
            entries.append(detached_entry(item.entry(name, ""), name))
        except BadTensor as error:
            raise WouldLoseData(str(error), path=checkpoint.path, where=name) from None
    return tuple(entries)


def view(entry: TensorEntry) -> tuple[object, ...]:
    """Return what distinguishes a tensor from others of its file, except its key; tensors without data are equal."""
    where = entry.storage.identity if entry.storage is not None else tuple(view(part) for part in entry.parts)
    return where, entry.dtype, entry.offset, entry.shape, entry.stride, entry.lazy


def beside_state_dict(checkpoint: Checkpoint, at: str, taken: Iterable[TensorEntry]) -> list[TensorEntry]:
    """List the tensors in the module at `at` that its state dict, `taken`, lacks: other buffers, plain attributes."""
    views = {view(entry) for entry in taken}
    return [entry for entry in checkpoint.entries if is_inside(entry.name, at) and view(entry) not in views]


def module_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Map the address of each dict in a whole pickled module (its ``_parameters``) to the address of the module."""
    holders = [site.at for site in checkpoint.sites if site.at.rpartition("/")[2] in torch_module.HOLDERS]
    if not holders:
        return {}
    modules = [at for at, _ in torch_module.modules(checkpoint)]
    states: Collection[str] = [site.at for site in checkpoint.sites]
    return {at: module for at in states for module in modules if not module or (at != module and is_inside(at, module))}


def whole_module(checkpoint: Checkpoint, at: str) -> Refused:
    """Return the error for the module at `at`, whose tensors have no state dict keys that could be changed."""
    hint = f"extract its state dict first: `{command('extract', checkpoint.path, 'OUT', at=at or None)}`"
    error = Refused("a whole pickled module, not a state dict", path=checkpoint.path, where=at or None, hint=hint)
    return error.because_of_module()

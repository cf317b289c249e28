"""Pairing of the tensors of two checkpoints, by address and key."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.checkpoint.address import given, is_inside, is_typed, shown
from ckptfix.dataclass import dataclass
from ckptfix.errors import KeyConflict, NoSuchTensor, Undecided
from ckptfix.findings.row import Finding
from ckptfix.formats import format_of
from ckptfix.names import wrappers
from ckptfix.ops import choose
from ckptfix.ops.diff.modules import as_state_dicts
from ckptfix.ops.diff.result import ModuleRead, Pairing

At = str | tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class DiffInput:
    """One of the two checkpoints, and the addresses of its paired state dicts.

    Attributes:
        roots: addresses of the paired state dicts; the n-th of one side is paired with the n-th of the other.
        everything: whether everything outside of them takes part too, under its own address.
    """

    checkpoint: Checkpoint
    roots: tuple[str, ...]
    everything: bool
    prefixes: tuple[str, ...]
    filter: str | None

    def place(self, address: str) -> tuple[int, str] | None:
        """Return (which root, the rest of the address); None if the address does not take part."""
        inside = [index for index, root in enumerate(self.roots) if is_inside(address, root)]
        if not inside:
            return (-1, address) if self.everything else None
        innermost = max(inside, key=lambda index: len(self.roots[index]))
        root = self.roots[innermost]
        return innermost, address[len(root) + 1 :] if root else address

    def stripped(self, name: str) -> str:
        """Return `name` without the prefixes to ignore."""
        for prefix in self.prefixes:
            name = wrappers.strip(name, prefix)
        return name

    def chosen(self, address: str) -> bool:
        """Return whether the filter accepts `address`: whole, or its last part in any of its forms."""
        if self.filter is None:
            return True
        key = address.rpartition("/")[2]
        forms = (address, key, self.stripped(key), wrappers.unwrapped(key))
        return any(fnmatchcase(form, self.filter) for form in forms)


def sides(
    a: Checkpoint, b: Checkpoint, *, at: At, strip: Sequence[str], filter: str | None
) -> tuple[DiffInput, DiffInput, tuple[Pairing, ...], tuple[ModuleRead, ...]]:
    """Return the two sides, with their state dicts paired, and the modules among them that were read as state dicts.

    Raises:
        NoSuchTensor: a file has no tensors at `at`.
        Undecided: the files have no address in common, and one has several state dicts to choose from.
    """
    mains = _meant(a), _meant(b)
    a, b, modules = as_state_dicts(a, b)
    pairings = tuple(_pairings(a, b, *mains)) if at is None else (_chosen(a, b, at, *mains),)
    prefixes = tuple(prefix.rstrip(".") for prefix in strip)
    side_a = DiffInput(a, tuple(row.at_a for row in pairings), at is None, prefixes, filter)
    side_b = DiffInput(b, tuple(row.at_b for row in pairings), at is None, prefixes, filter)
    return side_a, side_b, pairings, modules


def doubts(a: Checkpoint, b: Checkpoint, at: At) -> Iterator[Finding]:
    """Yield a note for each side whose main state dict is in doubt, unless `at` chooses what is compared."""
    for side, checkpoint in (("A", a), ("B", b)):
        if at is None or (isinstance(at, str) and not _has(checkpoint, given(at))):
            for note in choose.remarks(checkpoint):
                yield replace(note, message=f"{side}: {note.message}")


def _pairings(a: Checkpoint, b: Checkpoint, main_a: list[str], main_b: list[str]) -> Iterator[Pairing]:
    """Yield the state dicts to pair although their addresses differ; those at the same address are paired anyway.

    The main state dicts are paired if neither file has one at the address of the other's. Optimizers are paired if each
    side has exactly one.
    """
    ats_a, ats_b = _weights(a), _weights(b)
    if main_a and main_b and not (ats_a & set(main_b) or ats_b & set(main_a)):
        if len(main_a) == len(main_b) == 1:
            yield Pairing(main_a[0], main_b[0], "main state dict")
        elif not ats_a & ats_b:
            raise _undecided(a, b, main_a, main_b)
    optimizers = choose.optimizers(a), choose.optimizers(b)
    if len(optimizers[0]) == len(optimizers[1]) == 1 and optimizers[0] != optimizers[1]:
        yield Pairing(optimizers[0][0], optimizers[1][0], "optimizer")


def _meant(checkpoint: Checkpoint) -> list[str]:
    """Return the address of the main state dict, or of all between which nothing decides."""
    return [row.at for row in choose.meant(checkpoint)]


def _weights(checkpoint: Checkpoint) -> set[str]:
    states = [state for state in checkpoint.state_dicts if not state.optimizer]
    return {state.at for state in states if state.weights} or {state.at for state in states}


def _undecided(a: Checkpoint, b: Checkpoint, main_a: list[str], main_b: list[str]) -> Undecided:
    """Return the error that asks which of several state dicts to compare with the other file."""
    several, of = (main_a, a) if len(main_a) > 1 else (main_b, b)
    ats = choose.choices(of, several, choose.ANY)
    pair = tuple(next(filter(is_typed, main), None) for main in (main_a, main_b))
    message = f"it holds {len(several)} state dicts: {choose.listed(ats)}"
    return Undecided(message, choices=ats, choice={} if None in pair else {"at": pair}, path=of.path)


def _chosen(
    a: Checkpoint, b: Checkpoint, at: str | tuple[str, str], main_a: list[str], main_b: list[str]
) -> Pairing:
    """Pair the state dicts at `at`; if only one file has the address, the other is represented by its main one."""
    if not isinstance(at, str):
        at_a, at_b = map(given, at)
        for checkpoint, address in ((a, at_a), (b, at_b)):
            if not _has(checkpoint, address):
                raise _missing(checkpoint, address)
        return Pairing(at_a, at_b, "chosen")
    address = given(at)
    has_a, has_b = _has(a, address), _has(b, address)
    if not has_a and not has_b:
        raise _missing(a, address)
    lacking, mains = (b, main_b) if has_a else (a, main_a)
    if not (has_a and has_b) and not mains:
        raise _missing(lacking, address)
    if not (has_a and has_b) and len(mains) > 1:
        raise _undecided(a, b, [address] if has_a else main_a, [address] if has_b else main_b)
    return Pairing(address if has_a else main_a[0], address if has_b else main_b[0], "chosen")


def _has(checkpoint: Checkpoint, address: str) -> bool:
    if not address:
        return True
    return any(is_inside(entry.at, address) for entry in checkpoint.entries)


def _missing(checkpoint: Checkpoint, address: str) -> NoSuchTensor:
    known = list(dict.fromkeys(state.at for state in checkpoint.state_dicts))
    near = tuple(difflib.get_close_matches(address, known, 3) or known[:3])
    where = ", ".join(map(shown, near))
    return NoSuchTensor(
        f"no tensors at {address!r}", path=checkpoint.path, near=near, hint=f"it has {where}" if where else None
    )


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors that are paired by key; `wrapped` if only without wrapper prefixes."""

    a: TensorEntry
    b: TensorEntry
    wrapped: bool


def match(a: DiffInput, b: DiffInput) -> tuple[list[TensorPair], list[TensorEntry], list[TensorEntry]]:
    """Return the pairs by key in the order of A, and the remaining tensors of A and of B.

    Keys are matched unchanged; the remaining ones are then matched without wrapper prefixes, if that is unambiguous.

    Raises:
        KeyConflict: two tensors of a side have the same key after stripping.
    """
    named_a, named_b = _by_name(a), _by_name(b)
    pairs = {name: TensorPair(entry, named_b[name], False) for name, entry in named_a.items() if name in named_b}
    rest_a = {name: entry for name, entry in named_a.items() if name not in pairs}
    rest_b = {name: entry for name, entry in named_b.items() if name not in pairs}
    bare_a, bare_b = _unique_bare(rest_a), _unique_bare(rest_b)
    for bare, name in bare_a.items():
        other = bare_b.get(bare)
        if other is not None:
            pairs[name] = TensorPair(rest_a.pop(name), rest_b.pop(other), True)
    ordered = [pairs[name] for name in named_a if name in pairs]
    return ordered, list(rest_a.values()), list(rest_b.values())


Name = tuple[int, str, str]


def _by_name(side: DiffInput) -> dict[Name, TensorEntry]:
    """Map (root, address below it, key) to the tensor, for the tensors that take part."""
    found: dict[Name, TensorEntry] = {}
    for entry in _entries(side.checkpoint):
        place = side.place(entry.at)
        if place is None or not side.chosen(entry.name):
            continue
        name = (*place, side.stripped(entry.key))
        while name in found and found[name].key == entry.key:  # the keys 1 and "1" of one dict
            name = (*name[:2], name[2] + "\0")
        if name in found:
            raise KeyConflict(
                "two tensors have the same key",
                path=side.checkpoint.path,
                where=entry.name,
                pairs=((name[2], (found[name].name, entry.name)),),
            )
        found[name] = entry
    return found


def _entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """Yield every tensor, and a copy for each key that metadata ties to it."""
    yield from checkpoint.entries
    tied = format_of(checkpoint).ties(checkpoint)
    known = {entry.key: entry for entry in checkpoint.entries} if tied else {}
    for name, kept in tied.items():
        yield replace(known[kept], key=name)


def _unique_bare(names: Iterable[Name]) -> dict[Name, Name]:
    """Map each name without wrapper prefixes to the only name that it comes from."""
    bare = {name: (name[0], bare_address(name[1]), wrappers.unwrapped(name[2])) for name in names}
    counts = Counter(bare.values())
    return {short: name for name, short in bare.items() if counts[short] == 1}


def bare_address(address: str) -> str:
    """Remove wrapper prefixes from each part of an address: an optimizer's state may be keyed by parameter name."""
    return "/".join(map(wrappers.unwrapped, address.split("/")))

"""Renaming between two sets of keys that differ only by wrappers or a base prefix.

These are tried in order: the keys unchanged; without wrapper components on either side; with a base prefix (``model.``,
``backbone.``, ...) removed or added. If a component of a wrapper is an attribute of the model on both sides (see
`attributes`), the same is tried with that component kept. Nothing beyond that is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from ckptfix.dataclass import dataclass
from ckptfix.names import wrappers as keys
from ckptfix.names.attributes import attributes, without_wrappers
from ckptfix.names.spellings import BASE_PREFIXES

EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Renaming:
    """A renaming from the keys of the source to those of the target.

    Attributes:
        rule: in words: ``"exact"``, ``"wrapper module."``, ``"base prefix model."``, or several joined by ``" and "``.
        names: source -> its key in the target, for every key of the source, whether or not the target has it.
        agreeing: number of these keys that the target has.
        base: whether a base prefix is added or removed, not only wrapper components.
        rivals: rules of other base prefixes under which as many keys match, but different ones; empty if the renaming
            is complete.
    """

    rule: str
    names: Mapping[str, str]
    agreeing: int
    base: bool = False
    rivals: tuple[str, ...] = ()


def find(
    source: Sequence[str],
    target: Sequence[str],
    complete: Callable[[Mapping[str, str]], bool] | None = None,
    *,
    loose: Collection[str] = (),
) -> Renaming:
    """Return the first renaming under which all keys match, or else the one under which most match.

    Args:
        source, target: keys, each once.
        complete: given source -> new key, returns whether this matches everything that is needed on both sides. By
            default, all keys of both sides must match.
        loose: keys of the source that may be a trainer's. A wrapper is removed from the others even if these lack it.
    """
    wanted = set(target)
    best: Renaming | None = None
    rivals: list[str] = []
    for rule, base, names in _tries(source, target, loose):
        agreeing = [new for new in names.values() if new in wanted]
        if len(set(names.values())) != len(names):
            continue
        here = Renaming(rule, names, len(agreeing), base)
        done = len(agreeing) == len(wanted) == len(names) if complete is None else complete(names)
        if done:
            return here
        # Of equally good renamings the first wins; exact keys come first.
        if best is None or here.agreeing > best.agreeing:
            best, rivals = here, []
        elif best.base and here.agreeing == best.agreeing and _pairs(here, wanted) != _pairs(best, wanted):
            rivals.append(rule)
    assert best is not None  # exact keys are a renaming without conflict
    return replace(best, rivals=tuple(rivals)) if rivals else best


def _pairs(renaming: Renaming, wanted: Set[str]) -> set[tuple[str, str]]:
    return {(old, new) for old, new in renaming.names.items() if new in wanted}


def _tries(
    source: Sequence[str], target: Sequence[str], loose: Collection[str]
) -> Iterator[tuple[str, bool, dict[str, str]]]:
    """Yield (rule, whether it includes a base prefix, names), in order of preference."""
    yield EXACT, False, dict(zip(source, source, strict=True))
    yield from _tries_without(source, target, loose, (), ())
    shaped = set(source).difference(loose)
    kept = attributes(name for name in source if name in shaped), attributes(target)
    if all(kept):
        yield from _tries_without(source, target, loose, *kept)


def _tries_without(
    source: Sequence[str],
    target: Sequence[str],
    loose: Collection[str],
    kept: Collection[str],
    kept_there: Collection[str],
) -> Iterator[tuple[str, bool, dict[str, str]]]:
    """Yield what `_tries` yields after the keys unchanged.

    Args:
        kept, kept_there: paths of the modules of the source and of the target whose attributes keep their names.
    """
    bare, taken = unwrapped(source, loose, kept)
    goal, added = unwrapped(target, (), kept_there)
    wrappers = [_wrapper(component) for component in dict.fromkeys((*taken, *added))]
    if wrappers:
        yield " and ".join(wrappers), False, _joined(source, bare, goal, target)
    inner, inner_goal = _without_inner(bare), _without_inner(goal)
    if inner != bare or inner_goal != goal:
        rule = " and ".join(dict.fromkeys([*wrappers, *(_wrapper(part) for part in _inner_components(bare, goal))]))
        if len(set(inner)) == len(inner) and len(set(inner_goal)) == len(inner_goal):
            yield rule, False, _joined(source, inner, inner_goal, target)
    for prefix, on_source, on_target in _base_tries(bare, goal):
        new = [keys.strip(name, on_source) for name in bare] if on_source else bare
        new = [keys.add(name, on_target) for name in new] if on_target else list(new)
        rule = " and ".join([*wrappers, *(f"base prefix {part}." for part in prefix)])
        yield rule, bool(prefix), _joined(source, new, goal, target)


def unwrapped(
    names: Sequence[str], loose: Collection[str] = (), kept: Collection[str] = ()
) -> tuple[list[str], tuple[str, ...]]:
    """Return the keys without wrapper components, and the components that were removed.

    Args:
        loose: keys that may be a trainer's, so that it means nothing if they lack a component.
        kept: paths of the modules whose attributes keep their names (see `attributes`).

    Components that only wrappers have are removed everywhere. ``module`` and ``_module`` are removed only from the
    front, and only while all keys have them (except known companions such as ``n_averaged``).
    """
    rule = without_wrappers(kept)
    current = [rule(name) for name in names]
    aside = {rule(name) for name in loose} if loose else set()
    taken = [part for part in keys.wrappers_in(names, rule) if part in keys.ANYWHERE]
    while True:
        for component in keys.LEADING:
            carrying, others = keys.split_prefix(current, component)
            if aside.issuperset(carrying):
                continue
            if aside.issuperset(others):
                taken.append(component)
                current = [keys.strip(name, component) for name in current]
                aside = {keys.strip(name, component) for name in aside}
                break
        else:
            return current, tuple(dict.fromkeys(taken))


def _joined(source: Sequence[str], new: Sequence[str], goal: Sequence[str], target: Sequence[str]) -> dict[str, str]:
    """Return source -> new key in the target's own spelling.

    A key that the target does not have gets the wrapper prefix that all keys of the target share; a hook may know it.
    """
    spelled: dict[str, str] = {}
    front = _wrapped_in(target)
    for bare, name in zip(goal, target, strict=True):
        spelled.setdefault(bare, name)
    return {name: spelled.get(bare) or front + bare for name, bare in zip(source, new, strict=True)}


def _wrapped_in(names: Sequence[str]) -> str:
    """Return the wrapper components that all `names` begin with, with a trailing dot, or else ``""``."""
    front = ""
    for prefix in _common([name for name in names if name not in keys.COMPANIONS]):
        if prefix.rpartition(".")[2] not in keys.ANYWHERE.union(keys.LEADING):
            break
        front = f"{prefix}."
    return front


def _wrapper(component: str) -> str:
    return f"wrapper {component}."


def _without_inner(names: Iterable[str]) -> list[str]:
    """Return the keys without inner `LEADING` components, as from a DataParallel around a part of the model."""
    found = []
    for name in names:
        *path, leaf = name.split(".")
        found.append(".".join([*(part for part in path if part not in keys.LEADING), leaf]))
    return found


def _inner_components(*sides: Iterable[str]) -> list[str]:
    inside = {part for names in sides for name in names for part in name.split(".")[:-1]}
    return [component for component in keys.LEADING if component in inside]


def _base_tries(source: Sequence[str], target: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield (prefixes named in the rule, prefix to remove from the source's keys, prefix to add to them)."""
    known = [row.component for row in BASE_PREFIXES]
    # Full components that all keys of a side begin with can only be a prefix, whatever they are called.
    common = {"source": _common(source), "target": _common(target)}
    sides = {"source": source, "target": target}
    found: dict[str, list[str]] = {}
    for side, names in sides.items():
        fronts = {front for name in names for front in _fronts(name)}
        listed = [prefix for prefix in known if prefix in fronts]
        found[side] = list(dict.fromkeys([*listed, *common[side]]))
    for prefix in found["source"]:
        yield (prefix,), prefix, ""
    for prefix in found["target"]:
        yield (prefix,), "", prefix
    for taken in common["source"]:
        for put in common["target"]:
            if taken in known and put in known and taken != put:
                yield (taken, put), taken, put


def _fronts(name: str) -> Iterator[str]:
    """Yield the prefixes of `name` to look up in the table: its first component and its first two, if more follows."""
    first, dot, rest = name.partition(".")
    if dot:
        yield first
        second, dot, _ = rest.partition(".")
        if dot:
            yield f"{first}.{second}"


def _common(names: Sequence[str]) -> list[str]:
    """Return every prefix of full components that all `names` share, shortest first."""
    if not names:
        return []
    # A prefix that the smallest and the largest name share is shared by all names between them.
    low, high = (name.split(".")[:-1] for name in (min(names), max(names)))
    shared: list[str] = []
    for one, other in zip(low, high, strict=False):
        if one != other:
            break
        shared.append(one)
    prefixes = [".".join(shared[: count + 1]) for count in range(len(shared))]
    return [prefix for prefix in prefixes if all(keys.has_prefix(name, prefix) for name in names)]

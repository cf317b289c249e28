"""The renaming between two sets of names that differ by what wraps the model, and by nothing else.

Tried in this order: the names as they are; without wrappers' components on either side; with a base prefix
(``model.``, ``backbone.``, ...) removed or added. Nothing beyond that is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from ckptfix.names import wrappers as keys
from ckptfix.names.spellings import BASE_PREFIXES

EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Renaming:
    """What the names of the source are called in the target.

    Attributes:
        rule: in words: ``"exact"``, ``"wrapper module."``, ``"base prefix model."``, or several joined by ``" and "``.
        names: source -> its name there, for every name of the source, whether or not the target has it.
        agreeing: how many of them the target has.
        base: whether a base prefix is added or removed, and not wrappers' components alone.
        rivals: rules of other base prefixes under which as many agree, and others; empty if all that is wanted agrees.
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
    """The first renaming under which the names agree completely, or else the one under which most agree.

    Args:
        source, target: names, each once.
        complete: given source -> new name, whether that is all that is wanted on both sides. By default: all names
            of both agree.
        loose: names of the source that may be a trainer's, and do not keep a wrapper on the others.
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
        # Of equally good ones the earlier wins; exact names are the first.
        if best is None or here.agreeing > best.agreeing:
            best, rivals = here, []
        elif best.base and here.agreeing == best.agreeing and _pairs(here, wanted) != _pairs(best, wanted):
            rivals.append(rule)
    assert best is not None  # exact names are a renaming without conflict
    return replace(best, rivals=tuple(rivals)) if rivals else best


def _pairs(renaming: Renaming, wanted: Set[str]) -> set[tuple[str, str]]:
    return {(old, new) for old, new in renaming.names.items() if new in wanted}


def _tries(
    source: Sequence[str], target: Sequence[str], loose: Collection[str]
) -> Iterator[tuple[str, bool, dict[str, str]]]:
    """(rule, whether a base prefix is in it, names) in the order in which they count."""
    yield EXACT, False, dict(zip(source, source, strict=True))
    bare, taken = unwrapped(source, loose)
    goal, added = unwrapped(target)
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


def unwrapped(names: Sequence[str], loose: Collection[str] = ()) -> tuple[list[str], tuple[str, ...]]:
    """The names without wrappers' components, and the components that were removed.

    Args:
        loose: names that may be a trainer's, and say nothing where they lack a component.


    Components that only wrappers have go wherever they stand; ``module`` and ``_module`` only from the front, and
    only while all names have them (known companions such as ``n_averaged`` aside).
    """
    current = [keys.without_anywhere(name) for name in names]
    aside = {keys.without_anywhere(name) for name in loose} if loose else set()
    taken = [part for part in keys.wrappers_in(names) if part in keys.ANYWHERE]
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
    """source -> the target's own spelling of its new name.

    What the target does not have is spelled as the target wraps everything: its hooks may know the name.
    """
    spelled: dict[str, str] = {}
    front = _wrapped_in(target)
    for bare, name in zip(goal, target, strict=True):
        spelled.setdefault(bare, name)
    return {name: spelled.get(bare) or front + bare for name, bare in zip(source, new, strict=True)}


def _wrapped_in(names: Sequence[str]) -> str:
    """The wrappers' components that all `names` begin with, with a trailing dot; ``""`` for none."""
    front = ""
    for prefix in _common([name for name in names if name not in keys.COMPANIONS]):
        if prefix.rpartition(".")[2] not in keys.ANYWHERE.union(keys.LEADING):
            break
        front = f"{prefix}."
    return front


def _wrapper(component: str) -> str:
    return f"wrapper {component}."


def _without_inner(names: Iterable[str]) -> list[str]:
    """The names without a leading wrapper's component inside, as of a DataParallel around a part of the model."""
    found = []
    for name in names:
        *path, leaf = name.split(".")
        found.append(".".join([*(part for part in path if part not in keys.LEADING), leaf]))
    return found


def _inner_components(*sides: Iterable[str]) -> list[str]:
    inside = {part for names in sides for name in names for part in name.split(".")[:-1]}
    return [component for component in keys.LEADING if component in inside]


def _base_tries(source: Sequence[str], target: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """(prefixes of the rule, the one to remove from the source's names, the one to add to them)."""
    known = [row.component for row in BASE_PREFIXES]
    # Full components that all names of a side begin with can only be a prefix, whatever they are called.
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
    """The prefixes of `name` to look up in the table: its first component and its first two, with something left."""
    first, dot, rest = name.partition(".")
    if dot:
        yield first
        second, dot, _ = rest.partition(".")
        if dot:
            yield f"{first}.{second}"


def _common(names: Sequence[str]) -> list[str]:
    """Every prefix of full components that all `names` have, the shortest first."""
    if not names:
        return []
    # The smallest and the largest name share what all share.
    low, high = (name.split(".")[:-1] for name in (min(names), max(names)))
    shared: list[str] = []
    for one, other in zip(low, high, strict=False):
        if one != other:
            break
        shared.append(one)
    prefixes = [".".join(shared[: count + 1]) for count in range(len(shared))]
    return [prefix for prefix in prefixes if all(keys.has_prefix(name, prefix) for name in names)]

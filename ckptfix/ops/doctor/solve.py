"""The renaming between the keys of a file and those that a loader's message lists, verified on all of them.

Candidates are the renamings of known library versions, and the components in which a missing key differs from the most
similar key of the file. A candidate counts only by its effect: how many missing keys it makes, and that it changes no
key on which file and model agree. One word in the place of another is a guess: it counts only where no other key of
the file, and no other missing key, fits as well, and where no key is left over that contradicts it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher

from ckptfix.dataclass import dataclass
from ckptfix.names import library_names, spellings
from ckptfix.names.library_names import Substitutions

_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")

_SYNTAX = re.compile(r"\(\\d\+\)|\\g<\d>|\\\d|[^\w.]")
"""Whatever in a pattern or a replacement is not part of a key."""

_IN_PROJ = "in_proj_"
"""The beginning of the fused parameters of torch.nn.MultiheadAttention."""

MANY = 600
"""Keys of a file above which only one key of each kind is tried; the result is then verified on all of them."""

ROUNDS = 6
"""How often a further substitution is looked for."""

TRIED = 8
"""Missing keys that are compared with keys of the file in one round."""

RIVALS = 60
"""Keys of the file that one missing key is compared with."""

ALIKE = 0.6
"""Least similarity of two components, from 0 to 1, at which one may be the other's new name without more evidence."""

MARGIN = 0.15
"""Least difference between the similarity of a pair of keys and that of the second best pair."""

COMPANION = re.compile(r"(?:^|[.])(?:weight|bias)_\w+$|[.](?:weight|bias)[.]\w+$")
"""A key that belongs to a weight or bias, such as its scale, its mask or its quantization state."""


@dataclass(frozen=True, slots=True)
class Substituted:
    """The effect of substitutions on the keys of a file.

    Attributes:
        names: key of the file -> its new key, for all keys.
        made: missing keys that are among the new ones.
    """

    subs: Substitutions
    names: dict[str, str]
    made: frozenset[str]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The keys of the file that become missing keys, with these."""
        return [(old, new) for old, new in self.names.items() if new in self.made]


def solve(have: Sequence[str], missing: Collection[str], over: Collection[str], *, complete: bool) -> Substituted:
    """Return the substitutions that turn keys of the file into the most of `missing`; none if nothing helps.

    Args:
        have: the keys of the file.
        missing: keys that only the model has.
        over: keys that only the file has; empty if the message does not list any.
        complete: whether `over` has all of them, so that the other keys of the file must not change.
    """
    if len(have) > MANY:
        few = _representatives(have, missing)
        small = solve(few, _one_of_each(missing), set(over).intersection(few), complete=complete)
        whole = _effect(used(small.subs, have), have, frozenset(missing), frozenset())
        return whole or Substituted((), {name: name for name in have}, frozenset())
    agreed = frozenset[str]()
    if complete and over:
        kinds = {kind(name) for name in over}  # the message may be a part of the original
        agreed = frozenset(name for name in have if kind(name) not in kinds)
    wanted = frozenset(missing)
    best = _effect((), have, wanted, agreed)
    assert best is not None
    for change in library_names.CHANGES:
        if change.mark and not any(re.search(change.mark, name) for name in (*have, *missing)):
            continue
        for subs in (change.forward, change.back):
            # A pasted message is often a part of the original, so a known change outweighs keys that it does not list.
            made = _effect(used(subs, have), have, wanted, frozenset())
            if made is not None and len(made.made) > len(best.made) and (over or made.made == wanted):
                best = made
    if best.made == wanted:
        return best
    return _derived(best, have, wanted, frozenset(over), agreed, complete=complete)


def _representatives(have: Sequence[str], missing: Collection[str]) -> list[str]:
    """Return the first key of each kind, and the keys with the numbers of the first missing key of each kind."""
    numbers = {tuple(_NUMBER.findall(name)) for name in _one_of_each(missing)}
    few = dict.fromkeys(_one_of_each(have))
    for name in have:
        if len(few) < MANY and tuple(_NUMBER.findall(name)) in numbers:
            few[name] = None
    return list(few)[:MANY]


def _one_of_each(names: Iterable[str]) -> list[str]:
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(kind(name), name)
    return list(first.values())


def kind(name: str) -> str:
    """Return `name` with 0 for each number: keys of one kind differ only in numbers."""
    return _NUMBER.sub("0", name)


def used(subs: Substitutions, names: Sequence[str]) -> Substitutions:
    """Return those of `subs` that change a name; the others would be reported as rules that match nothing."""
    used = []
    for pattern, new in subs:
        made = [re.sub(pattern, new, name) for name in names]
        if made != list(names):
            used.append((pattern, new))
        names = made
    return tuple(used)


def _effect(
    subs: Substitutions, have: Sequence[str], wanted: frozenset[str], agreed: frozenset[str]
) -> Substituted | None:
    """Return the effect of `subs`; None if two keys become one, or a key changes on which both sides agree."""
    names = {name: library_names.substituted(name, subs) for name in have}
    if len(set(names.values())) < len(names) or any(names[name] != name for name in agreed):
        return None
    return Substituted(subs, names, wanted.intersection(names.values()))


def _derived(
    best: Substituted,
    have: Sequence[str],
    wanted: frozenset[str],
    over: frozenset[str],
    agreed: frozenset[str],
    *,
    complete: bool,
) -> Substituted:
    """Return `best` with further substitutions, as long as they make more of the `wanted` keys."""
    known = plain = best
    for _ in range(ROUNDS):
        left = sorted(wanted - best.made)
        sources = [new for old, new in best.names.items() if new not in wanted and (not over or old in over)]
        tried: dict[tuple[Substitutions, str, str], None] = {}
        for name in _spread(left):
            for source in _similar(name, sources):
                pairs = _between(source, name, loose=bool(over))
                tried |= dict.fromkeys((subs, source, name) for subs in pairs)
        better, moves = best, False
        for subs, source, name in tried:
            made = _effect((*best.subs, *subs), have, wanted, agreed)
            if made is None or len(made.made) <= len(better.made) or any(odd(made) for odd in _ODD_EFFECTS):
                continue
            if not _is_sure(subs) and not _is_supported(best, made, complete=complete):
                continue
            only_moves = _only_moves(subs)
            used = {best.names[old] for old, _ in made.pairs}
            rest = [other for other in sources if other not in used]
            if only_moves or _is_spelling(subs) or not _is_in_doubt(source, name, made, rest, left):
                better, moves = made, only_moves
        if better is best:
            break
        plain = better if moves and plain is best else plain
        best = better
        if best.made == wanted:
            break
    if not over and best.made != wanted:
        return known  # without `over`, nothing else supports a renaming
    used = {old for old, _ in best.pairs}
    return plain if contradicts(wanted - best.made, over - used) else best


def _only_moves(subs: Substitutions) -> bool:
    """Return whether the substitutions only add or remove components."""
    rows = ([set(filter(None, _SYNTAX.sub("", text).split("."))) for text in pair] for pair in subs)
    return all(old <= new or new <= old for old, new in rows)


def _is_spelling(subs: Substitutions) -> bool:
    """Return whether the substitutions are those of `_joined_leaf`, for two spellings of one fused projection."""
    return all(new.endswith(_IN_PROJ + r"\2") for _, new in subs)


def _is_in_doubt(source: str, name: str, made: Substituted, sources: Sequence[str], left: Sequence[str]) -> bool:
    """Return whether another key of the file may be the old one of `name`, or another missing key the new one.

    Args:
        made: the effect of the renaming; keys that it accounts for do not compete.
        sources: keys of the file that no missing key is made of, with this renaming.
        left: missing keys that are not made yet.
    """
    mine = _likeness(source, name)
    ours = [other for other in sources if other != source and _is_rival(other, source)]
    theirs = [other for other in left if other != name and other not in made.made and _is_rival(other, name)]
    second = [*(_likeness(other, name) for other in ours), *(_likeness(source, other) for other in theirs)]
    return bool(second) and (mine < ALIKE + MARGIN or max(second) > mine - MARGIN)


def _is_rival(one: str, other: str) -> bool:
    """Return whether two keys of one side may be taken for each other."""
    return _place(one) == _place(other)


def _place(name: str) -> tuple[str, ...]:
    """Return the last component and the numbers of a key."""
    return (name.rpartition(".")[2], *_NUMBER.findall(name))


def _likeness(one: str, other: str) -> float:
    """Return the similarity of the components in which two keys differ, from 0 to 1; case is ignored."""
    ours, theirs = one.lower().split("."), other.lower().split(".")
    left = [part for part in ours if part not in theirs]
    right = [part for part in theirs if part not in ours]
    return SequenceMatcher(None, ".".join(left), ".".join(right), autojunk=False).ratio()


def contradicts(left: Iterable[str], rest: Iterable[str]) -> bool:
    """Return whether a missing key and an unexpected one that no renaming accounts for may be the same tensor."""
    rivals = {_place(name) for name in rest}
    return any(_place(name) in rivals for name in left)


def _is_sure(subs: Substitutions) -> bool:
    """Return whether the substitutions only add or remove components, or change a word into a similar one."""
    rows = ((_SYNTAX.sub("", text) for text in pair) for pair in subs)
    return all(not old or not new or old in new or new in old or _alike(old, new) for old, new in rows)


def _takes_apart(made: Substituted) -> bool:
    """Return whether a tensor moves to a module with a different name, and another one of its module does not."""
    modules: dict[str, set[str]] = {}
    for old, new in made.names.items():
        modules.setdefault(old.rpartition(".")[0], set()).add(new.rpartition(".")[0])
    leaves = {old.rpartition(".")[2] for old in made.names}
    parts = {module.rpartition(".")[2] for news in modules.values() if len(news) > 1 for module in news}
    return any(len(news) > 1 for module, news in modules.items() if module) and not parts <= leaves


_PARTS = frozenset(part for _, _, splits in spellings.FUSIONS for split in splits for part in split)
_WHOLES = frozenset(whole for _, wholes, _ in spellings.FUSIONS for whole in wholes)


def _takes_part(made: Substituted) -> bool:
    """Return whether one part of a fused tensor becomes all of it, as q_proj becomes qkv, or the reverse."""
    modules = ((old.split(".")[-2:-1], new.split(".")[-2:-1]) for old, new in made.names.items() if old != new)
    pairs = {(one[0], other[0]) for one, other in modules if one and other}
    return any(
        (one in _PARTS and other in _WHOLES) or (one in _WHOLES and other in _PARTS)
        for one, other in pairs if one != other
    )  # fmt: skip


def _takes_one_of_list(made: Substituted) -> bool:
    """Return whether one module of a list becomes the whole, and others stay: ``proj.1.weight`` and ``proj.weight``."""
    wholes = {new.rpartition(".")[0] for old, new in made.pairs if old != new}
    stay = (old for old, new in made.names.items() if old == new)
    return any(name[: number.start() - 1] in wholes for name in stay for number in _NUMBER.finditer(name))


_ODD_EFFECTS = (_takes_apart, _takes_part, _takes_one_of_list)
"""Effects that no renaming of a module has."""


def _is_supported(before: Substituted, after: Substituted, *, complete: bool) -> bool:
    """Return whether all keys that changed are among the missing ones, and there are several."""
    changed = [new for old, new in after.names.items() if before.names[old] != new]
    hits = sum(new in after.made for new in changed)
    return hits == len(changed) if complete else hits >= 2 and 2 * hits >= len(changed)


def _spread(names: Sequence[str]) -> list[str]:
    step = max(1, len(names) // TRIED)
    return list(names[::step])[:TRIED]


def _similar(name: str, sources: Sequence[str]) -> list[str]:
    """Return the keys that `name` may have been: with the same numbers and last component, the most similar first."""
    numbers, leaf = _NUMBER.findall(name), name.rpartition(".")[2]
    same = [other for other in sources if other.rpartition(".")[2] == leaf]
    exact = [other for other in same if _NUMBER.findall(other) == numbers]
    rivals = exact or same or [other for other in sources if _NUMBER.findall(other) == numbers]
    parts = set(name.split("."))
    rivals.sort(key=lambda other: (-len(parts & set(other.split("."))), len(other)))
    rivals = rivals[:RIVALS]
    rivals.sort(key=lambda other: -SequenceMatcher(None, name, other, autojunk=False).ratio())
    return rivals[:3]


def _between(old: str, new: str, *, loose: bool) -> Iterator[Substitutions]:
    """Yield substitutions that turn `old` into `new`, each for all the places in which they differ.

    Args:
        loose: a component may be replaced by a different word, as there is other evidence.
    """
    ours, theirs = old.split("."), new.split(".")
    rows = SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    changes = [(ours[a:b], theirs[c:d], a, b) for kind, a, b, c, d in rows if kind != "equal"]
    if not changes:
        return
    for before, after, _, _ in changes:
        if before and after and not loose and not _alike(".".join(before), ".".join(after)):
            return
        if any(part.isdigit() for part in (*before, *after)) and len(before) == len(after):
            return
    if ours[-1] != theirs[-1] and (COMPANION.search(old) or (not loose and COMPANION.search(new))):
        return  # the tensor beside a weight, such as its scale or its value before a mask, is not the weight
    yield from _joined_leaf(ours, theirs)
    for context in (0, 1, 2):
        yield tuple(_substitution(ours, before, after, a, b, context) for before, after, a, b in changes)
    if len(changes) > 1:
        for before, after, a, b in changes:
            yield (_substitution(ours, before, after, a, b, 0),)


def _joined_leaf(ours: Sequence[str], theirs: Sequence[str]) -> Iterator[Substitutions]:
    """Yield the substitution for torch's ``in_proj_weight`` and ``in_proj_bias``, which belong to no inner module."""
    if len(ours) < 2 or ours[-1] not in ("weight", "bias") or theirs[-1] != _IN_PROJ + ours[-1]:
        return
    if ours[-2] not in spellings.FUSED_QKV:
        return
    rows = SequenceMatcher(None, ours[:-1], theirs[:-1], autojunk=False).get_opcodes()
    changes = [theirs[c:d] for kind, a, b, c, d in rows if kind != "equal" and b == len(ours) - 1 and b - a == 1]
    if changes and len([row for row in rows if row[0] != "equal"]) == 1:
        new = "".join(f"{part}." for part in changes[0]) + _IN_PROJ
        yield ((rf"(^|[.]){_escaped(ours[-2])}[.](weight|bias)$", rf"\1{new}\2"),)


def _alike(one: str, other: str) -> bool:
    return SequenceMatcher(None, one, other, autojunk=False).ratio() >= ALIKE


def _substitution(
    ours: Sequence[str], before: Sequence[str], after: Sequence[str], start: int, end: int, context: int
) -> tuple[str, str]:
    """Return a pattern and a replacement for the components from `start` to `end`.

    Args:
        context: neighboring components that the pattern includes: 0 for as few as possible, 1 for the one before, 2 for
            the ones on both sides.
    """
    left = ours[start - 1] if start and (context or not before) else None
    if not before and not start and context == 0:
        return "^", ".".join(after) + "."
    right = ours[end] if end < len(ours) and (context == 2 or (not before and not start)) else None
    if not before and start and context == 0 and end < len(ours) and left is not None and left.isdigit():
        right = ours[end]
    pattern, new, groups = "", "", 0

    def kept(text: str) -> None:
        nonlocal pattern, new, groups
        if text.isdigit():
            groups += 1
            pattern += r"(\d+)"
            new += rf"\{groups}"
        else:
            pattern += _escaped(text)
            new += text

    whole = left is None and start == 0
    if whole:
        pattern = "^"
    else:
        groups += 1
        # A digit behind a plain reference would be read as a part of its number.
        pattern, new = "(^|[.])", r"\g<1>" if left is None and "".join(after)[:1].isdigit() else r"\1"
    if left is not None:
        kept(left)
        pattern += "[.]" if before or right is not None else ""
        new += "." if after or right is not None else ""
    pattern += _escaped(".".join(before))
    new += ".".join(after)
    if right is not None:
        if before:
            pattern += "[.]"
        if after:
            new += "."
        kept(right)
    at_end = end == len(ours) if right is None else end + 1 == len(ours)
    if at_end:
        pattern += "$"
    elif before or right is not None or left is not None:
        dots = "[.]" if (before or right is not None or not after or left is not None) else ""
        pattern += dots
        new += "." if dots and (after or right is not None or left is not None) else ""
    elif after:
        new += "."
    return pattern, new


def _escaped(text: str) -> str:
    return re.escape(text).replace(r"\.", "[.]").replace(r"\-", "-")


def shared_prefix(names: Iterable[str], others: Sequence[str]) -> tuple[str, bool] | None:
    """Return the prefix that a loader removed from the keys of the file, or added to them, before it compared them.

    Args:
        names: keys of the message that are not in the file.
        others: the keys of the file.

    Returns:
        The prefix with its dot, and whether the file's keys have it; None if no prefix accounts for `names`.
    """
    rows = list(names)[:50]
    there = set(others)
    if not rows:
        return None
    longer = (other.removesuffix(rows[0]) for other in others if other.endswith(f".{rows[0]}"))
    for front in longer:
        if all(front + name in there for name in rows):
            return front, True
    parts = rows[0].split(".")
    for count in range(1, len(parts)):
        front = ".".join(parts[:count]) + "."
        if all(name.startswith(front) and name[len(front) :] in there for name in rows):
            return front, False
    return None

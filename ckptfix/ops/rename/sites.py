"""Changes of keys: strip, add and unwrap prefixes, and rename by rule.

Every place that holds a key changes with it: the keys of a state dict, its ``_metadata``, and the names in an
optimizer's groups and state. A state dict changes completely or not at all, and two keys never become one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckptfix.checkpoint import Checkpoint, NameList, Rename, address
from ckptfix.dataclass import dataclass
from ckptfix.errors import KeyConflict, PartialPrefix, Refused
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.names import typed, wrappers
from ckptfix.names.attributes import attributes_at, without_wrappers
from ckptfix.names.regexes import Regex
from ckptfix.names.rules import NameRule, RuleTable, is_rule
from ckptfix.names.wrappers import Rule
from ckptfix.ops import choose
from ckptfix.ops.candidates import averages
from ckptfix.ops.choose import chosen_sites
from ckptfix.ops.rename import flattened
from ckptfix.words import plural, some

Names = dict[str, str]


@dataclass(frozen=True, slots=True)
class NameChange:
    """One key of the state dict at `at`, before and after."""

    at: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Renames:
    """The effects of a renaming.

    Attributes:
        edits: for `plan_edit`.
        changes: the keys of state dicts that change.
        references: how many further names follow them (``_metadata``, optimizer).
        findings: rules that matched nothing, prefixes left in place.
    """

    edits: tuple[Rename, ...]
    changes: tuple[NameChange, ...]
    references: int
    findings: tuple[Finding, ...]


# Returns the new names of a site, and the rule that renames module paths; None leaves the site unchanged.
SiteRule = Callable[[NameList], tuple[Names, Rule] | None]


def strip(
    checkpoint: Checkpoint,
    *,
    prefix: str = "module",
    at: str | None = None,
    all_levels: bool = False,
    partial: bool = False,
) -> Renames:
    """Remove `prefix` from the keys of every state dict whose keys begin with it.

    Args:
        prefix: path components, with or without the trailing dot.
        at: only the state dict at this address.
        all_levels: remove it as many times as all keys have it, instead of once.
        partial: strip the keys that have it even if others do not.

    Raises:
        PartialPrefix: only some keys of a state dict have it.
        KeyConflict: two keys would become one.
    """
    prefix = _components(prefix)
    findings: list[Finding] = []

    def site_rule(site: NameList) -> tuple[Names, Rule] | None:
        current = list(site.names)
        steps: list[Rule] = []
        while not steps or all_levels:
            own = prefix.partition(".")[0] == wrappers.AVERAGED and averages.is_kept(checkpoint, site, current, at)
            if own:
                averages.note_kept(findings, site, current)
            seen = averages.counting(checkpoint, site, current, wrappers.AVERAGED if own else prefix)
            carrying, others = wrappers.split_prefix(averages.inside(seen) if own else seen, prefix)
            if not carrying or (others and (steps or own) and not partial):
                break
            if others and not partial:
                raise _partial(checkpoint, site, prefix, len(carrying), others)
            if not steps and not others:
                findings.extend(_scalars_left(checkpoint, site, current, prefix))
            step = wrappers.stripping(prefix)
            steps.append(averages.with_level(step) if own else step)
            current = [steps[-1](name) for name in current]
        return (_changed(site.names, current), wrappers.composed(steps)) if steps else None

    return _renames(checkpoint, at, site_rule, findings)


def _scalars_left(checkpoint: Checkpoint, site: NameList, names: Sequence[str], prefix: str) -> Iterator[Finding]:
    """Name the tensors without a dimension that keep their keys, because they lack the prefix of all others."""
    left = averages.scalars_left(checkpoint, site, names, prefix)
    if left:
        message = f"left {some(left)}: not under '{prefix}.', as all tensors with dimensions are"
        yield found("partial-prefix", message, where=site.at)


def _partial(checkpoint: Checkpoint, site: NameList, prefix: str, carrying: int, others: list[str]) -> PartialPrefix:
    shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
    return PartialPrefix(
        f"{carrying} of {carrying + len(others)} keys begin with '{prefix}.', these do not: {shown}",
        others=tuple(others),
        path=checkpoint.path,
        where=site.at or None,
        hint="--partial strips those that do; `ckptfix unwrap` removes the components of other wrappers",
    )


def add(checkpoint: Checkpoint, *, prefix: str = "module", at: str | None = None) -> Renames:
    """Put `prefix` before every key of the model's state dicts."""
    prefix = _components(prefix)

    def rule(name: str) -> str:
        return wrappers.add(name, prefix)

    findings: list[Finding] = []

    def site_rule(site: NameList) -> tuple[Names, Rule] | None:
        if at is None and site.kind == "state_dict" and averages.has_own_level(checkpoint, site, site.names):
            findings.append(averages.left(site))
            return None
        names = choose.own_keys(checkpoint, site) if site.kind == "state_dict" else site.names
        carrying, others = wrappers.split_prefix(averages.counting(checkpoint, site, site.names, prefix), prefix)
        if carrying and not others and site.kind == "state_dict":
            every = "the key" if len(carrying) == 1 else f"all {len(carrying):,} keys"
            message = f"{every} began with '{prefix}.' before, and now '{prefix}.{prefix}.'"
            findings.append(found("prefix-twice", message, where=site.at))
        return {name: rule(name) for name in names}, rule

    return _renames(checkpoint, at, site_rule, findings, weights_only=True)


def nearest_prefix(checkpoint: Checkpoint, prefix: str, at: str | None = None) -> str | None:
    """Return the beginning of a key, with as many components as `prefix`, that is most similar to it."""
    prefix = _components(prefix)
    length = prefix.count(".") + 1
    names = (name.split(".") for site in chosen_sites(checkpoint, at) for name in site.names)
    starts = dict.fromkeys(".".join(parts[:length]) for parts in names if len(parts) > length)
    return next(iter(typed.nearest(prefix, starts, 1)), None)


def unwrap(checkpoint: Checkpoint, *, at: str | None = None) -> Renames:
    """Remove every known wrapper's component from the keys, in any order and at any depth.

    Components that only wrappers have are removed anywhere. ``module`` and ``_module``, which a model may have itself,
    are removed only from the front, and only if every key of the state dict begins with them.
    """
    findings: list[Finding] = []
    everywhere = frozenset[str]().union(*(attributes_at(checkpoint, site) for site in chosen_sites(checkpoint, at)))

    def site_rule(site: NameList) -> tuple[Names, Rule] | None:
        # An optimizer's group has only some of a model's names; the state dict shows which others are beside them.
        kept = attributes_at(checkpoint, site) if site.kind == "state_dict" else everywhere
        bare = without_wrappers(kept)
        current = [bare(name) for name in site.names]
        steps: list[Rule] = [bare]
        if kept and site.kind == "state_dict":
            findings.append(_left_attribute(site, current))
        own = False
        while True:
            if not own and averages.is_kept(checkpoint, site, current, at):
                own = True
                averages.note_kept(findings, site, current)
            seen = averages.counting(checkpoint, site, current, *wrappers.LEADING)
            component = _leading(averages.inside(seen) if own else seen)
            if component is None:
                break
            if len(steps) == 1:
                findings.extend(_scalars_left(checkpoint, site, current, component))
            step = wrappers.stripping(component)
            steps.append(averages.with_level(step) if own else step)
            current = [steps[-1](name) for name in current]
        for component in () if own else wrappers.LEADING:
            seen = averages.counting(checkpoint, site, current, component)
            carrying, _ = wrappers.split_prefix(seen, component)
            if carrying and site.kind == "state_dict":
                some_of = f"{len(carrying):,} of {plural(len(seen), 'key')}"
                message = f"left '{component}.' on {some_of}, as the others lack it"
                findings.append(found("partial-prefix", message, where=site.at))
        names = _changed(site.names, current)
        return (names, wrappers.composed(steps)) if names else None

    return _renames(checkpoint, at, site_rule, findings)


def _left_attribute(site: NameList, names: Sequence[str]) -> Finding:
    """Report that a component which only wrappers have is an attribute's name here."""
    carried = wrappers.wrappers_in(names)
    components = [part for part in carried if part in wrappers.ANYWHERE]
    count = max(carried[part][0] for part in components)
    message = f"left {' and '.join(f'{part!r}' for part in components)} on {count:,} of {plural(len(names), 'key')}"
    return found("partial-prefix", f"{message}: a wrapper holds one module, but others are beside it", where=site.at)


def _leading(names: Sequence[str]) -> str | None:
    """Return the wrapper component that all `names` begin with."""
    for component in wrappers.LEADING:
        carrying, others = wrappers.split_prefix(names, component)
        if carrying and not others:
            return component
    return None


def rename(
    checkpoint: Checkpoint,
    *,
    subs: Sequence[tuple[str, str]] = (),
    mapping: Mapping[str, str] | None = None,
    at: str | None = None,
    allow_unmatched: bool = False,
) -> Renames:
    """Rename by regular expressions, in order, and then by a map.

    Args:
        subs: (pattern, replacement) as of `re.sub`; ``\\1`` refers to a group.
        mapping: old key -> new key. An old key with placeholders is a rule (`names.rules`): an exact key takes
            precedence over all rules, and otherwise the first matching rule wins.
        allow_unmatched: a pattern or a whole map without a match is a finding, not an error.

    Raises:
        NoSuchTensor: there is such a pattern or map.
        Refused: a pattern or replacement is not a regular expression, or a rule is malformed.
        KeyConflict: two keys would become one.
    """
    compiled = [(_pattern(pattern, replacement), replacement) for pattern, replacement in subs]
    substituted: dict[str, str] = {}
    exact = dict(mapping or {})
    rules = RuleTable([NameRule(old, new) for old, new in exact.items() if is_rule(old)])
    used: set[str] = set()

    def substitute(names: Sequence[str]) -> None:
        """Apply the patterns to all `names` at once, and store the results for `rule`."""
        made = names = [name for name in names if name not in substituted]
        for pattern, replacement in compiled:
            found = pattern.subn(replacement, made)
            made = [name for name, _ in found]
            if any(count for _, count in found):
                used.add(pattern.pattern)
        substituted.update(zip(names, made, strict=True))

    def rule(name: str) -> str:
        if compiled:
            substitute([name])
            name = substituted[name]
        if name in exact:
            used.add(name)
            return exact[name]
        for by_name in rules.about(_below(name)):
            new = _by_rule(by_name, name)
            if new is not None:
                used.add(by_name.old)
                return new
        return name

    def site_rule(site: NameList) -> tuple[Names, Rule] | None:
        inner = choose.inner_keys(checkpoint, site) if at is None and site.kind == "state_dict" else frozenset()
        substitute([name for name in site.names if name not in inner])
        names = _changed(site.names, [name if name in inner else rule(name) for name in site.names])
        return (names, rule) if names else None

    renames = _renames(checkpoint, at, site_rule, weights_only=True, by_parameter=False)
    patterns = [pattern.pattern for pattern, _ in compiled if pattern.pattern not in used]
    rows = [text for text in exact if text not in used]
    everything = checkpoint.all_keys()
    findings = typed.unmatched(patterns, everything, kind="regex", allow=allow_unmatched)
    findings += typed.unmatched_rows(rows, len(exact), everything, allow=allow_unmatched)
    return Renames(renames.edits, renames.changes, renames.references, (*renames.findings, *findings))


def _by_rule(rule: NameRule, name: str) -> str | None:
    """Apply `rule` to a name, or to a module's path with a trailing dot, for which ``{*}`` is anything below."""
    below = rule.apply(_below(name))
    if not name.endswith("."):
        return below
    return below.removesuffix("*") if below is not None and below.endswith(".*") else None


def _below(name: str) -> str:
    """Return a name as it is, and for a path with a trailing dot a name of something below it."""
    return f"{name}*" if name.endswith(".") else name


def _pattern(pattern: str, replacement: str) -> Regex:
    try:
        re._parser.parse_template(replacement, re.compile(pattern))  # type: ignore[attr-defined]
        return Regex(pattern)
    except (re.error, IndexError) as error:
        raise Refused(f"not a regular expression: {pattern!r} -> {replacement!r}: {error}") from None


def _components(prefix: str) -> str:
    cleaned = prefix.strip(".")
    if not cleaned:
        raise Refused("the prefix is empty", hint="give path components, such as --prefix module")
    return cleaned


def _changed(old: Iterable[str], new: Iterable[str]) -> Names:
    return {before: after for before, after in zip(old, new, strict=True) if before != after}


def _renames(
    checkpoint: Checkpoint,
    at: str | None,
    site_rule: SiteRule,
    findings: Sequence[Finding] = (),
    *,
    weights_only: bool = False,
    by_parameter: bool = True,
) -> Renames:
    """Apply `site_rule` to the chosen state dicts, and the same changes to everything that refers to their keys.

    Args:
        by_parameter: the rule is only for names of parameters, and not for the keys of a flattened optimizer.
    """
    flat = {(site.at, site.kind): frozenset(own) for site, own in flattened.sites(checkpoint)}
    chosen: dict[str, Names] = {}
    modules: dict[str, Names] = {}
    union: Names = {}
    unnamed: list[Finding] = []
    metadata = {site.at: site for site in checkpoint.sites if site.kind == "metadata"}
    for site in chosen_sites(checkpoint, at, weights_only=weights_only):
        own = flat.get((site.at, site.kind), frozenset())
        if by_parameter and own.issuperset(site.names):
            continue
        result = site_rule(site)
        if not result or not result[0]:
            continue
        names, rule = result
        chosen[site.at] = names
        unnamed += _unnamed(checkpoint, site)
        union |= {old: new for old, new in names.items() if old not in own}
        if site.at in metadata:
            modules[site.at] = _module_names(metadata[site.at], names, rule)
    if at is None and not chosen:
        choose.refuse_module(checkpoint)
        choose.refuse_unedited(checkpoint, lambda site: _has_names(site_rule, site))
    others = _names_elsewhere(checkpoint, at)

    def follow(site: NameList, *, alone: bool) -> Names:
        result = site_rule(site) if alone and not union else None
        if result:
            return result[0]
        return {name: union[name] for name in site.names if name in union and name not in others}

    edits: list[Rename] = []
    changes: list[NameChange] = []
    references = left = 0
    known = set(checkpoint.all_keys()) if flat else set()
    for site in checkpoint.sites:
        own = flat.get((site.at, site.kind), frozenset())
        direct = chosen.get(site.at, {}) if site.kind == "state_dict" else {}
        names = dict(direct)
        followed: Names = {}
        if own:
            flats = flattened.parsed((name for name in site.names if name in own), known - own)
            inside = NameList(site.at, "optimizer_state", tuple(dict.fromkeys(row.parameter for row in flats.values())))
            meant = at is None or address.given(at) == site.at
            followed = flattened.renamed(flats, follow(inside, alone=meant and by_parameter))
            left += sum(name in union and name in others for name in inside.names)
        elif site.kind in ("param_names", "optimizer_state"):
            followed = follow(site, alone=at is None)
            left += sum(name in union and name in others for name in site.names)
        names |= followed
        if names:
            _refuse_conflict(checkpoint, site, names)
            edits.append(Rename(site.at, site.kind, names))
        changes += [NameChange(site.at, old, new) for old, new in direct.items() if old not in followed]
        references += len(followed)
        if site.kind == "state_dict" and site.at in modules:
            references += len(modules[site.at])
            edits.append(Rename(site.at, "metadata", modules[site.at]))
    findings = [*findings, *unnamed]
    if left:
        message = f"left {left} names of an optimizer, because a second state dict has them too"
        findings.append(found("optimizer-names-left", message))
    return Renames(tuple(edits), tuple(changes), references, tuple(findings))


def _has_names(site_rule: SiteRule, site: NameList) -> bool:
    """Return whether a rule changes keys of `site`."""
    try:
        result = site_rule(site)
    except PartialPrefix:
        return False
    return result is not None and bool(result[0])


def _unnamed(checkpoint: Checkpoint, site: NameList) -> Iterator[Finding]:
    """Name the keys of a state dict that no renaming changes, because they are not text."""
    keys = choose.unnamed_keys(checkpoint, site)
    if keys:
        message = f"left {some(keys)}: a key that is not text is not a parameter's name"
        yield found("partial-prefix", message, where=site.at)


def _names_elsewhere(checkpoint: Checkpoint, at: str | None) -> set[str]:
    """Return keys of the state dicts that `at` does not name: an optimizer's names may be theirs."""
    if at is None:
        return set()
    sites = [site for site in checkpoint.sites if site.kind == "state_dict" and site.at != address.given(at)]
    return {name for site in sites for name in site.names}


def _module_names(site: NameList, names: Names, rule: Rule) -> Names:
    """Return the new module paths: from the keys below them if there are any, or else by the rule itself."""
    derived = wrappers.renamed_modules(names)
    new = {path: derived.get(path) or wrappers.module_path(rule, path) for path in site.names}
    return {old: after for old, after in new.items() if old != after}


def _refuse_conflict(checkpoint: Checkpoint, site: NameList, names: Names) -> None:
    """Raise `KeyConflict` if two names of one place would become one."""
    if site.kind == "param_names":
        return
    before = dict.fromkeys(site.names)
    if len({names.get(name, name) for name in before}) == len(before):
        return
    origin: dict[str, list[str]] = {}
    for name in before:
        origin.setdefault(names.get(name, name), []).append(name)
    pairs = tuple((new, tuple(old)) for new, old in origin.items() if len(old) > 1)
    if pairs:
        new, old = pairs[0]
        more = f", and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        raise KeyConflict(
            f"{' and '.join(repr(name) for name in old)} would both become {new!r}{more}",
            pairs=pairs,
            path=checkpoint.path,
            where=site.at or None,
            hint="nothing was written; rename one of them first with `ckptfix rename --map`",
        )


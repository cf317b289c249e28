"""The table of wrapper prefixes, and the rules that add and remove them.

A prefix is one or more full path components at the front of a dotted name, never a substring: ``submodule.weight``
does not begin with ``module``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from ckptfix.dataclass import dataclass

Rule = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A module that holds another one under a fixed name.

    Attributes:
        component: the path component that it adds.
        anywhere: whether it is removed at any depth, because no model gives a module this name. Models may really use
            the other names, so these count only at the front, on every key.
        made_by: the wrappers that add it, in words.
        source: where the name is defined.
    """

    component: str
    anywhere: bool
    made_by: str
    source: str


WRAPPERS: tuple[Wrapper, ...] = (
    Wrapper("module", False, "DataParallel, DistributedDataParallel, AveragedModel", "torch/nn/parallel"),
    Wrapper("_orig_mod", True, "torch.compile", "torch/_dynamo/eval_frame.py OptimizedModule"),
    Wrapper("_fsdp_wrapped_module", True, "FullyShardedDataParallel", "torch/distributed/fsdp/_common_utils.py"),
    Wrapper("_checkpoint_wrapped_module", True, "checkpoint_wrapper", "torch/distributed/algorithms/_checkpoint"),
    Wrapper("_fpw_module", True, "FlattenParamsWrapper (FairScale, early FSDP)", "fairscale/nn/misc"),
    Wrapper("_forward_module", True, "Lightning strategies and Fabric", "lightning/fabric/wrappers.py"),
    Wrapper("_module", False, "Opacus GradSampleModule", "opacus/grad_sample/gsm_base.py"),
)

ANYWHERE = frozenset(wrapper.component for wrapper in WRAPPERS if wrapper.anywhere)
_ANYWHERE = re.compile("|".join(map(re.escape, sorted(ANYWHERE))))
LEADING = tuple(wrapper.component for wrapper in WRAPPERS if not wrapper.anywhere)

AVERAGED = "module"
"""The component under which an averaging wrapper holds its copy of the model."""

COUNTERS: dict[str, str] = {
    "n_averaged": "AveragedModel (torch/optim/swa_utils.py)",
    "steps": "BaseAveragedModel (mmengine/model/averaged_model.py)",
}
"""Buffer in which an averaging wrapper counts its updates, beside keys that all have its component -> the wrapper."""

# Keys that a wrapper adds beside those that have its prefix, whatever those are.
COMPANIONS = frozenset({"n_averaged"})


def is_average(names: Sequence[str]) -> bool:
    """Return whether these are the keys of an averaging wrapper: its counter, and its component before all others."""
    others = [name for name in names if name not in COUNTERS]
    return 0 < len(others) < len(names) and all(has_prefix(name, AVERAGED) for name in others)


def has_prefix(name: str, prefix: str) -> bool:
    """Return whether `name` begins with the components of `prefix` and continues after them."""
    return name.startswith(prefix + ".") and len(name) > len(prefix) + 1


def strip(name: str, prefix: str) -> str:
    """Return `name` without `prefix`, if it has it. ``"module."``, the path of a module itself, becomes ``""``."""
    return name.removeprefix(prefix + ".")


def add(name: str, prefix: str) -> str:
    return f"{prefix}.{name}"


def stripping(prefix: str) -> Rule:
    """Return `strip` as a rule."""
    start = prefix + "."
    return lambda name: name.removeprefix(start)


def composed(rules: Sequence[Rule]) -> Rule:
    """Return a rule that applies the given rules one after the other."""

    def rule(name: str) -> str:
        for one in rules:
            name = one(name)
        return name

    return rule


def without_anywhere(name: str) -> str:
    """Return `name` without the components that only wrappers have."""
    if _ANYWHERE.search(name) is None:
        return name
    parts = [part for part in name.split(".") if part not in ANYWHERE]
    return ".".join(parts) if parts else name


@lru_cache(maxsize=1024)  # dicts of an optimizer all have the same few keys
def unwrapped(name: str) -> str:
    """Return `name` without wrapper components: those that only wrappers have, and all other leading ones."""
    name = without_anywhere(name)
    while True:
        for component in LEADING:
            if name.startswith(component + "."):
                name = strip(name, component)
                break
        else:
            return name


def wrappers_in(names: Iterable[str], rule: Rule = without_anywhere) -> dict[str, tuple[int, str]]:
    """Return component -> (number of names that have it where it counts, the first of them).

    Args:
        rule: removes the components that only wrappers have.
    """
    found: dict[str, tuple[int, str]] = {}
    for name in names:
        rest = rule(name).split(".")
        seen = set(name.split(".")).intersection(ANYWHERE).difference(rest)
        while len(rest) > 1 and rest[0] in LEADING:
            seen.add(rest.pop(0))
        for component in seen:
            count, first = found.get(component, (0, name))
            found[component] = (count + 1, first)
    return {wrapper.component: found[wrapper.component] for wrapper in WRAPPERS if wrapper.component in found}


def split_prefix(names: Iterable[str], prefix: str) -> tuple[list[str], list[str]]:
    """Return (the names that begin with `prefix`, the others without known companions)."""
    names = list(names)
    start = prefix + "."
    carrying = [name for name in names if name.startswith(start) and name != start]
    others: list[str] = []
    if len(carrying) < len(names):
        others = [name for name in names if not has_prefix(name, prefix) and name not in COMPANIONS]
    if carrying and prefix == AVERAGED and COUNTERS.keys() >= set(others):
        others = []
    return carrying, others


def module_path(rule: Rule, path: str) -> str:
    """Apply `rule` to a module's path; the root path is ``""``.

    Rules apply to parameter names, so the path is passed with a trailing dot, like the start of the names below it.
    """
    return rule(path + "." if path else "").removesuffix(".")


def renamed_modules(names: Mapping[str, str]) -> dict[str, str]:
    """Return the module paths that change with these names.

    ``features.0.weight -> conv.weight`` shows that the module ``features.0`` is now ``conv``. Paths for which names
    disagree are left out.
    """
    found: dict[str, str] = {}
    clash = set()
    for old, new in names.items():
        old_parts, new_parts = old.split("."), new.split(".")
        while old_parts and new_parts and old_parts.pop() == new_parts.pop():
            before, after = ".".join(old_parts), ".".join(new_parts)
            if found.setdefault(before, after) != after:
                clash.add(before)
    return {before: after for before, after in found.items() if before not in clash and before != after}

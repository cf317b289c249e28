"""Which components that only wrappers have are attributes of a model all the same.

A wrapper holds one module, so ``_orig_mod.weight`` beside ``fc.weight`` is no wrapper of both: a model has an attribute
of that name, and without the component the names of one of its branches would be those of the model itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckptfix.checkpoint import Checkpoint, NameSite
from ckptfix.names import kinds
from ckptfix.names.wrappers import ANYWHERE, COUNTERS, Rule, without_anywhere

_OWN = ("_extra_state", "_flat_param", "flat_param")
"""How names begin of what a wrapper itself holds beside its module: an FSDP unit has its parameters in one row."""


def attributes(names: Iterable[str]) -> frozenset[str]:
    """Paths of the modules that have such an attribute, by the names of tensors; ``""`` is the model itself."""
    rows = [name.split(".") for name in names]
    children: dict[str, set[str]] = {
        ".".join(parts[:at]): set() for parts in rows for at, part in enumerate(parts[:-1]) if part in ANYWHERE
    }
    for parts in rows if children else ():
        above = ""
        for at, part in enumerate(parts):
            if above in children and (at < len(parts) - 1 or not _is_wrappers(part)):
                children[above].add(part)
            above = f"{above}.{part}" if at else part
    return frozenset(parent for parent, inside in children.items() if len(inside) > 1)


def _is_wrappers(leaf: str) -> bool:
    return leaf.startswith(_OWN) or leaf in COUNTERS


def attributes_at(checkpoint: Checkpoint, site: NameSite) -> frozenset[str]:
    """Return the same for the names at a place of a checkpoint, without numbers and an optimizer's tensors there."""
    if not any(component in name for name in site.names for component in ANYWHERE) or not attributes(site.names):
        return frozenset()
    beside = kinds.optimizer_names(site.names)
    return attributes(entry.key for entry in checkpoint.entries_at(site.at) if entry.shape and entry.key not in beside)


def without_wrappers(kept: Collection[str]) -> Rule:
    """`without_anywhere` as a rule that leaves the attributes of the modules `kept`."""
    if not kept:
        return without_anywhere

    def rule(name: str) -> str:
        parts = name.split(".")
        left = [part for at, part in enumerate(parts) if part not in ANYWHERE or ".".join(parts[:at]) in kept]
        return ".".join(left) if left else name

    return rule


def bare_names(checkpoint: Checkpoint, site: NameSite) -> Rule:
    """The rule for the names at a place of a checkpoint."""
    return without_wrappers(attributes_at(checkpoint, site))

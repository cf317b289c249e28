"""Attributes of a model that have the name of a wrapper component.

A wrapper holds one module. So if ``_orig_mod.weight`` appears beside ``fc.weight``, no wrapper made it: the model has
an attribute of that name. Without the component, the keys of that branch would look like keys of the model itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckptfix.checkpoint import Checkpoint, NameList
from ckptfix.names import kinds
from ckptfix.names.wrappers import ANYWHERE, COUNTERS, Rule, without_anywhere

_OWN = ("_extra_state", "_flat_param", "flat_param")
"""Beginnings of the keys that a wrapper adds for itself: an FSDP unit stores its parameters in one flat tensor."""


def attributes(names: Iterable[str]) -> frozenset[str]:
    """Return the paths of the modules with such an attribute, judging by tensor keys; ``""`` is the model itself."""
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


def attributes_at(checkpoint: Checkpoint, site: NameList) -> frozenset[str]:
    """Return the same for the keys of `site`, without scalars and an optimizer's tensors that appear there."""
    if not any(component in name for name in site.names for component in ANYWHERE) or not attributes(site.names):
        return frozenset()
    beside = kinds.optimizer_names(site.names)
    return attributes(entry.key for entry in checkpoint.entries_at(site.at) if entry.shape and entry.key not in beside)


def without_wrappers(kept: Collection[str]) -> Rule:
    """Return `without_anywhere` as a rule that keeps the attributes of the modules `kept`."""
    if not kept:
        return without_anywhere

    def rule(name: str) -> str:
        parts = name.split(".")
        left = [part for at, part in enumerate(parts) if part not in ANYWHERE or ".".join(parts[:at]) in kept]
        return ".".join(left) if left else name

    return rule


def bare_names(checkpoint: Checkpoint, site: NameList) -> Rule:
    """Return the rule that removes wrapper components from the keys of `site`."""
    return without_wrappers(attributes_at(checkpoint, site))

"""Names of parameters inside the keys of a flattened optimizer, which are renamed with the model's keys.

::

    state.fc.weight.exp_avg                  torch.distributed.checkpoint.state_dict, flatten_optimizer_state_dict=True
    param_groups.fc.weight.lr
    optimizer.state.exp_avg.fc.weight        Megatron: the parameter is last

Source: torch/distributed/checkpoint/state_dict.py ``_flatten_optim_state_dict``; megatron/core/optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptfix.checkpoint import Checkpoint, NameList
from ckptfix.checkpoint.address import join
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.names import kinds
from ckptfix.ops.choose import chosen_sites

if TYPE_CHECKING:
    from ckptfix.ops.rename.transform import TransformedTensors


@dataclass(frozen=True, slots=True)
class Flat:
    """A key of a flattened optimizer: the name of a parameter between the parts before and after it."""

    before: str
    parameter: str
    behind: str

    def of(self, parameter: str) -> str:
        """Return the key of the same field for a different parameter."""
        return f"{self.before}{parameter}{self.behind}"


def sites(checkpoint: Checkpoint) -> list[tuple[NameList, tuple[str, ...]]]:
    """Return the state dicts that have keys of a flattened optimizer, and these keys."""
    editable = {site.at for site in chosen_sites(checkpoint, None)}
    found = []
    for site in checkpoint.sites:
        if site.kind == "optimizer_state" or (site.kind == "state_dict" and site.at in editable):
            names = tuple(site.names) if kinds.is_flat_optimizer(site.names) else _among(site.names)
            if names:
                found.append((site, names))
    return found


def _among(names: Sequence[str]) -> tuple[str, ...]:
    found = kinds.optimizer_names(names)
    return tuple(name for name in names if name in found) if found else ()


def parsed(names: Iterable[str], known: Collection[str]) -> dict[str, Flat]:
    """Split each key into its parts, and drop keys without a parameter.

    Args:
        known: keys of the model's tensors. If a key contains none of them, the optimizer's names of its states
            (`kinds.SLOTS`) show where the parameter is.
    """
    found: dict[str, Flat] = {}
    for name in names:
        before, rest = kinds.flat_levels(name)
        first, _, after = rest.partition(".")
        inside, _, last = rest.rpartition(".")
        if not after or not before:
            continue
        ends, begins = Flat(f"{before}{first}.", after, ""), Flat(before, inside, f".{last}")
        megatron = before.endswith("state.") and first in kinds.SLOTS | {"step"}
        likely = (ends, begins) if megatron else (begins, ends)
        if megatron and inside not in known and after not in known and last in kinds.SLOTS | {"step"}:
            likely = (begins, ends)
        found[name] = next((flat for flat in likely if flat.parameter in known), likely[0])
    return found


def renamed(flats: Mapping[str, Flat], new: Mapping[str, str]) -> dict[str, str]:
    """Map each old key to its new one, for the keys whose parameters are renamed."""
    return {name: flat.of(new[flat.parameter]) for name, flat in flats.items() if flat.parameter in new}


def follow(checkpoint: Checkpoint, made: TransformedTensors) -> int:
    """Rename the keys of flattened optimizers along with a rules file, and return how many of them changed.

    Raises:
        Refused: a parameter goes through an operation, or becomes several, so that its states cannot follow.
    """
    rows = {key: (site, own) for site in made.sites for key, own in site.rows.items()}
    targets = {site.at: site for site in reversed(made.sites)}
    known = set(checkpoint.all_keys())
    changed = 0
    for site, own in sites(checkpoint):
        entries = {entry.key: entry for entry in checkpoint.entries_at(site.at)}
        target = targets.get(site.at)
        if target is None:
            from ckptfix.ops.rename.transform import StateDictChange

            target = StateDictChange(site.at, tuple(dict.fromkeys(site.names)), {}, entries, {}, {})
        for name, flat in parsed(own, known.difference(own)).items():
            # A line of the rules may also match the optimizer's key itself.
            if flat.parameter not in rows or name in target.members:
                continue
            holder, new = rows[flat.parameter]
            group = holder.members.get(flat.parameter)
            if not new and group is not None and group.rule.operations[0].name in ("drop", "untie"):
                target.rows[name] = []
                made.dropped += [join(site.at, name)] if name in entries else []
            elif len(new) == 1 and new[0][1] is None:
                target.rows[name] = [(flat.of(new[0][0]), None)]
            else:
                raise _refused(checkpoint, join(site.at, name), flat.parameter)
            made.followed.add((site.at, name))
            changed += 1
        if target not in made.sites and target.rows:
            made.sites.append(target)
    return changed


def _refused(checkpoint: Checkpoint, where: str, parameter: str) -> Refused:
    way = command("slim", checkpoint.path, "OUT")
    message = f"this state of a flattened optimizer cannot follow {parameter}, whose tensor changes"
    hint = f"run `{way} --no-optimizer` first to drop it, and edit the result"
    return Refused(message, path=checkpoint.path, where=where, hint=hint)

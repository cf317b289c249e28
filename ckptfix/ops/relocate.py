"""``ckptfix.map_location`` and ``ckptfix.to_cpu``: tensors moved to other devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, SetLocation
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, StrPath
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.io.read import Progress
from ckptfix.ops.any_source import takes_any_source
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, copy_note, plan_edits
from ckptfix.words import plural

# Device types of torch.device (c10/core/DeviceType.h). A renamed private backend is accepted by its own name.
DEVICES = ("cpu", "cuda", "mps", "xpu", "xla", "hpu", "npu", "mtia", "maia", "ipu", "vulkan", "privateuseone")

ALIASES = {"gpu": "cuda", "nvidia": "cuda", "amd": "cuda", "rocm": "cuda", "metal": "mps"}
"""Names that users have for devices, for hints; torch calls AMD's GPUs cuda too."""


@dataclass(frozen=True, slots=True)
class Relocation:
    """The plan of a relocation.

    Attributes:
        edits: edits for `plan_edit`.
        moved: (from, to) -> number of places.
        kept: location -> number of unchanged places.
        findings: sources that do not occur, and places that cannot be edited.
    """

    edits: tuple[SetLocation, ...]
    moved: Mapping[tuple[str, str], int]
    kept: Mapping[str, int]
    findings: tuple[Finding, ...]


def device(text: str) -> str:
    """Return `text` as a location tag.

    Raises:
        Refused: torch does not know such a device; the hint names the closest one.
    """
    name = text.strip()
    match = re.fullmatch(r"([a-z]+)(?::(\d{1,3}))?", name)
    if not match or match[1] not in DEVICES:
        from difflib import get_close_matches

        kind, index = re.fullmatch(r"([^:\d]*):?(\d*).*", name.lower(), re.DOTALL).groups()  # type: ignore[union-attr]
        near = [ALIASES[kind]] if kind in ALIASES else get_close_matches(kind, DEVICES, 1)
        meant = f"{near[0]}:{index}" if near and index else "".join(near)
        hint = "devices are cpu, cuda:N, mps, xpu:N, ..." if meant in ("", name) else f"did you mean {meant}?"
        raise Refused(f"no such device: {text!r}", hint=hint)
    # torch tags CPU storages 'cpu' and does not know 'cpu:0' (torch/serialization.py, _cpu_deserialize).
    return "cpu" if match[1] == "cpu" else name


def plan_relocation(checkpoint: Checkpoint, target: str | Mapping[str, str]) -> Relocation:
    """Plan to move everything to `target`, or from each source to its target at once.

    Args:
        target: a device for everything, or source -> target. A source that does not occur becomes a finding.
    """
    findings: list[Finding] = []
    present = checkpoint.devices
    if isinstance(target, str):
        goal = device(target)
        moves = {location: goal for location in present if location != goal and location != "meta"}
    else:
        pairs = {device(source): device(goal) for source, goal in target.items()}
        moves = {source: goal for source, goal in pairs.items() if source in present and source != goal}
        for source in pairs:
            if source not in present:
                elsewhere = f", only on {', '.join(present)}" if present else ": no tensor has a device"
                findings.append(found("no-such-location", f"no tensor is on this device{elsewhere}", where=source))
    for place in checkpoint.fixed_devices:
        findings.append(found("fixed-device", f"not changed: {place}"))
    kept = {location: count for location, count in present.items() if location not in moves}
    moved = {(source, goal): present[source] for source, goal in moves.items()}
    return Relocation((SetLocation(moves),) if moves else (), moved, kept, tuple(findings))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RelocateResult(Result):
    """The result of a relocation.

    `moved` maps (from, to) to the number of places that moved; `kept` maps a location to the number that did not.
    """

    moved: Mapping[tuple[str, str], int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)

    def _details(self) -> dict[str, Any]:
        rows = [{"old": old, "new": new, "count": count} for (old, new), count in self.moved.items()]
        return {"moved": rows, "unmoved": dict(self.kept)}


@checks_types
@takes_any_source()
def map_location(
    source: StrPath,
    dest: StrPath | None,
    target: str | Mapping[str, str],
    *,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> RelocateResult:
    """Write `source` to `dest` with its tensors on other devices.

    Args:
        target: a device for everything (``"cpu"``), or pairs from -> to, applied at once (``{"cuda:1": "cuda:0"}``).

    The other arguments are those of `strip_module`.
    """

    def make(checkpoint: Checkpoint, dest: str) -> Draft[RelocateResult]:
        moves = plan_relocation(checkpoint, target)
        plan = plan_edits(checkpoint, moves.edits, dest)
        if moves.moved:
            rows = ", ".join(f"{old} -> {new} in {plural(count, 'place')}" for (old, new), count in moves.moved.items())
            kept = ", ".join(f"{count} on {location}" for location, count in moves.kept.items())
            line = f"moved {rows}" + (f"; left {kept}" if kept else "")
        else:
            already = " already" if isinstance(target, str) else ""
            here = f"the tensors are on {', '.join(checkpoint.devices)}{already}"
            line = f"nothing to do: {here if checkpoint.devices else 'no tensor of the file is on a device'}"
        lines = (line + copy_note(not moves.moved),)
        return Draft(
            result=partial(RelocateResult, moved=moves.moved, kept=moves.kept),
            format=checkpoint.format,
            plan=plan,
            promise=Promise(names_stay=False, edited=checkpoint),
            lines=lines,
            findings=moves.findings,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress)
    return carry_out(source, dest, make, how)


@checks_types
def to_cpu(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> RelocateResult:
    """Write `source` to `dest` with every tensor on the CPU: `map_location` to ``"cpu"``."""
    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress)
    return map_location(source, dest, "cpu", **how.keywords())

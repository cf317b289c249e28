"""Trial of `match` before doctor offers it: does it give a file the keys of a model? Nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptfix.align.fused import Heads
from ckptfix.align.match import match
from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import LIKE, Step, step
from ckptfix.ops.match import plan as match_plan
from ckptfix.ops.match.fused import with_operations
from ckptfix.ops.target.targets import ExpectedModel

_ABOUT_NAMES = (
    *("no-names-match", "missing-keys", "unexpected-keys", "other-spelling"),
    *("matched-by-structure", "names-prefixed"),
)

_OTHER_MODEL = "no renaming makes it fit: check that TARGET is the model that the file was saved from"


def offered(
    findings: Iterable[Finding],
    checkpoint: Checkpoint,
    side: ExpectedModel,
    target: ExpectedModel,
    agreeing: int,
    *,
    several: bool,
    most: int,
) -> Iterator[Finding]:
    """Yield `findings` about the keys of `side`, with `match` as their remedy only where it works.

    Args:
        agreeing: how many keys agree without it.
        several: whether the file has further state dicts, so that the command must name one.
        most: tensors of a side up to which it is tried.
    """
    rows = list(findings)
    about = [row for row in rows if row.id in _ABOUT_NAMES and row.fix is None and row.steps is None]
    small = max(len(side.slots), len(target.slots)) <= most
    fix = _remedy(checkpoint, side, target, agreeing) if about and small else None
    if isinstance(fix, Step) and several and side.at:
        fix = fix.having(at=side.at)
    for row in rows:
        if row not in about:
            yield row
        elif fix is not None:
            yield row.fixed_by(fix if isinstance(fix, str) else (fix,))
        else:
            yield row.fixed_by(_OTHER_MODEL if row.id == "no-names-match" else "")


_HEADS = "with the number of heads: ckptfix match {source} {matched} --like {like} --heads N"


def _remedy(checkpoint: Checkpoint, side: ExpectedModel, target: ExpectedModel, agreeing: int) -> Step | str | None:
    """Return `match` with the options with which it works and makes more keys agree; None where it does not.

    It is an instruction in words where the user must state the number of heads.
    """
    try:
        plain = match(side.slots, target.slots, by="structure")
        matching, operations = with_operations(plain, side.slots, target.slots, Heads(), {})
        planned = match_plan.plan(checkpoint, side, matching, operations)
    except CkptfixError:
        return None
    changes = bool(planned.names or planned.tensors) and len(matching.pairs) > agreeing
    (plain_step,) = step("match", like=LIKE)
    ways = ({}, {"drop_unexpected": True}, {"partial": True}) if changes else ({"drop_unexpected": True},)
    for options in ways:
        if not match_plan.refusals(side, target, matching, operations, **options):
            return plain_step.having(**options)
    asks = operations.refused and "--heads" in operations.questions[-1]
    return _HEADS if asks and not matching.missing and not matching.ambiguous else None

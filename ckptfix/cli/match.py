"""ckptfix match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ckptfix.cli.shared import tables, values
from ckptfix.cli.shared.common import (
    FileName,
    default_name,
    destination,
    file_argument,
    kept_name,
    reads,
    show,
    where_to,
)
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import TROUBLE
from ckptfix.cli.shared.operands import CommonOption, InAndOut, Others
from ckptfix.cli.shared.options import at_option, drop_unexpected_option, in_place_option
from ckptfix.errors import Refused, printable
from ckptfix.io.source import shares_open_files

if TYPE_CHECKING:
    from ckptfix.align.result import Skipped
    from ckptfix.ops.match import By, MatchProposal, MatchResult


_OUT, *_HOW = destination(optional=True)
_OTHERS = Others()

MOST = 20
"""Findings on a rules file that are listed; --json has all of them."""


@reads(
    "match",
    file_argument("source", "IN"),
    _OUT,
    _OTHERS,
    click.Option(
        ["--like"],
        metavar="TARGET",
        required=True,
        type=FileName(),
        help="The model whose keys to use: a checkpoint, a keys.json of names and shapes, or module:factory.",
    ),
    click.Option(
        ["--by"],
        type=click.Choice(["structure", "position"]),
        default="structure",
        show_default=True,
        help="How to match. By keys, shapes and neighbors, or the n-th tensor to the n-th.",
    ),
    at_option(),
    click.Option(["--like-at"], metavar="PATH", shell_complete=values.target_addresses, help="Like --at, for TARGET."),
    click.Option(["--report"], is_flag=True, help="Show every pair, rule and unmatched key. OUT is optional."),
    click.Option(["--rules", "rules_file"], metavar="FILE", type=FileName(output=True),
                 help="Write the learned rules to FILE, for `rename --map`; --force replaces an old file."),
    click.Option(["--check", "check"], metavar="RULES", type=FileName(),
                 help="Check learned rules; write nothing. They turn IN's keys into TARGET's, and back; see --source."),
    click.Option(["--accept-ambiguous"], is_flag=True, help="Use the first target if several fit equally well."),
    click.Option(["--partial"], is_flag=True, help="Rename the keys that have a counterpart; keep the others."),
    drop_unexpected_option(),
    click.Option(["--reshape"], is_flag=True, help="Also reshape tensors with equal element counts."),
    click.Option(["--heads"], metavar="N", type=click.IntRange(1),
                 help="Number of query heads of the attention, if a layout depends on it."),
    click.Option(["--kv-heads"], metavar="N", type=click.IntRange(1), help="Number of key and value heads, if fewer."),
    click.Option(["--blocks"], metavar="CHOICE",
                 help="Blocks to keep where IN has more: first, last, every-other, or a list such as 0,2,4."),
    click.Option(["--verify"], is_flag=True,
                 help="Run both models with the same random weights, and accept only equal outputs."),
    CommonOption(["--source", "source_model"], metavar="MODULE:FACTORY", help="The model of IN, for --verify."),
    CommonOption(["--input", "inputs"], metavar="FILE", type=FileName(),
                 help="Input for --verify, of both models: a file of torch.save, or module:factory."),
    CommonOption(["--allow-import"], is_flag=True, help="Allow importing module:factory, which runs its code."),
    in_place_option(),
    *_HOW,
    operands=InAndOut(_OTHERS, kept_name),
)  # fmt: skip
@shares_open_files()
def command(
    console: Console,
    *,
    source: str,
    dest: str | None,
    output: str | None,
    like: str,
    by: By,
    at: str | None,
    like_at: str | None,
    report: bool,
    rules_file: str | None,
    check: str | None,
    accept_ambiguous: bool,
    partial: bool,
    drop_unexpected: bool,
    reshape: bool,
    heads: int | None,
    kv_heads: int | None,
    blocks: str | None,
    verify: bool,
    source_model: str | None,
    inputs: str | None,
    allow_import: bool,
    force: bool,
    backup: bool,
    dry_run: bool,
    in_place: bool,
) -> int:
    """Rename the keys of IN to fit another model, TARGET.

    Values never change. Tensors that one side has as one piece and the other as several (query, key and value; gate and
    up; experts) are split and joined if names and sizes allow only one way. Ambiguous and leftover tensors are refused
    and listed; --drop-unexpected leaves out those that only IN has. The rules behind the pairs are shown:
    features.{n}.conv.weight -> backbone.{n}.0.weight.

    --verify runs both models, IN's from --source, and proves which of several targets are right. --check does the same
    for the lines of a rules file.
    """
    from ckptfix.ops import match as matching
    from ckptfix.ops.any_source import edits, is_direct
    from ckptfix.ops.writing import WriteOptions

    if check is not None:
        if dest is not None or output is not None or in_place or rules_file is not None:
            raise Refused("--check writes nothing", hint="leave out OUT, --rules and --in-place")
        from ckptfix.ops.match.rules_check import check_rules

        both = None
        if verify or source_model is not None:
            both = matching.models(source_model or "", like, inputs, allow_import)
        return show(
            console,
            check_rules(source, like, check, at=at, like_at=like_at, models=both, allow_import=allow_import),
            most=MOST,
        )
    alone = report or dry_run or rules_file is not None
    force = force or backup
    dest = where_to(dest, output, without=None)
    named = dest is None and not alone and not in_place
    if named:
        dest = default_name("match", source, {})
    if dest is not None:
        matching.check(source, dest, like, force)
    options: dict[str, Any] = {
        "by": by,
        "at": at,
        "like_at": like_at,
        "accept_ambiguous": accept_ambiguous,
        "partial": partial,
        "drop_unexpected": drop_unexpected,
        "reshape": reshape,
        "heads": heads,
        "kv_heads": kv_heads,
        "blocks": blocks,
        "verify": verify,
        "source_model": source_model,
        "inputs": inputs,
        "allow_import": allow_import,
    }
    found = None
    try:
        if dest is None or alone or is_direct(source, dest, {}, edits):
            found = matching.find(source, like, **options, reported=report)
    except Refused as error:
        if not error.of_module or dest is None or alone:
            raise
    if found is None:
        assert dest is not None
        with console.progress("flushing to disk", ("writing",)) as progress:
            how = WriteOptions(force=force, keep_old=backup, progress=progress)
            made = matching.match(source, dest, like, **options, **how.keywords())
        return show(console, made, named=named)
    writing = in_place or (dest is not None and not dry_run)
    if found.refusals and writing and not report:
        raise found.refusals[0]
    if rules_file and not (dry_run or found.refusals):
        matching.write_rules(found, rules_file, force=force)
    if writing and not found.refusals:
        with console.progress("flushing to disk", ("writing",)) as progress:
            how = WriteOptions(force=force, keep_old=backup, dry_run=dry_run, in_place=in_place, progress=progress)
            result = matching.write(found, dest, how)
    else:
        result = matching.preview(found, dest or "")
    if report:
        for line in lines(found, result, console.width):
            console.prose(line)
        result = replace(result, lines=tuple(line for line in result.lines if not line.startswith(" ")))
    if writing and found.refusals:
        result = replace(result, exit_code=TROUBLE)
    code = show(console, result, named=named)
    for refusal in found.refusals if not console.json else ():
        for line in getattr(refusal, "lines", ()):
            console.note(f"  {printable(line)}")
        if refusal.hint:
            console.note(f"hint: {printable(refusal.hint)}")
    return code


def lines(found: MatchProposal, result: MatchResult, width: int = 0) -> Iterator[str]:
    """Yield the report: the pairs, the rules, and the keys that only one side has."""
    from ckptfix.names.groups import collapse

    pairs = result.matching.pairs
    columns = {
        "source": [pair.source for pair in pairs],
        "target": [pair.target for pair in pairs],
        "shape": [
            tables.shape(result.slots[pair.source].shape)
            + (f" -> {tables.shape(pair.reshape)}" if pair.reshape is not None else "")
            for pair in pairs
        ],
        "confidence": [f"{pair.confidence:.2f}" for pair in pairs],
        "why": [
            pair.why
            + (f"; or {', '.join(pair.instead[:3])}" if pair.instead else "")
            + (f" | {pair.operation}" if pair.operation else "")
            for pair in pairs
        ],
    }
    if pairs:
        rows = zip(*columns.values(), strict=True)
        spare = ["confidence", "shape"]
        yield from tables.table(
            rows, list(columns), right=[3], spare=spare, names=["target"], width=width
        ).splitlines()
        yield ""
    if result.rules:
        yield "rules:"
        yield from (f"  {printable(rule)}" for rule in result.rules)
        yield ""
    sides = (
        ("IN", result.matching.left, result.matching.skipped_source, found.source),
        ("TARGET", result.matching.missing, result.matching.skipped_target, found.target),
    )
    for label, names, skipped, side in sides:
        if names:
            yield f"only in {label}:"
            yield from (f"  {printable(group)}" for group in collapse(names, [slot.name for slot in side.slots]))
            yield ""
        if skipped:
            yield f"only in {label}, skipped by rule:"
            yield from (f"  {printable(line)}" for line in _skipped(skipped))
            yield ""


def _skipped(skipped: tuple[Skipped, ...]) -> Iterator[str]:
    from ckptfix.names.groups import collapse

    rules: dict[str, list[str]] = {}
    for one in skipped:
        rules.setdefault(one.rule, []).append(one.name)
    for rule, names in rules.items():
        yield from (f"{group}: {rule}" for group in collapse(names))

"""Hugging Face shards: several safetensors or torch files, and an index of the tensors in each.

::

    FOLDER/model.safetensors.index.json               see `index`
    FOLDER/model-00001-of-00003.safetensors ...       each a file by itself
    FOLDER/config.json, tokenizer.json ...            companion files, copied with an edited checkpoint

    FOLDER/shard-00001-model-00001-of-00001.safetensors ...    slices of the tensors, a file for each rank: see `slices`

There are three kinds with different content: safetensors files, torch files (``pytorch_model.bin``), and slices. The
first kind detects all of them; the actual kind is known after the shards are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ckptfix.checkpoint import Checkpoint, Edit, FormatState, NameList, OutputFile, Plan, StateDict, TensorEntry
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import step
from ckptfix.findings.table import found
from ckptfix.formats.base import OF_OBJECTS, Format, nothing, nothing_beside, plain_weights
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.safetensors.ties import TIE_KEYS, VIEWS_KEY, both, restore_ties, share_plan
from ckptfix.formats.shards import edit, elsewhere, files, items, objects, repair, slices, write
from ckptfix.formats.shards.files import NAME, SLICES, TORCH
from ckptfix.formats.shards.index import looks_like_index
from ckptfix.formats.shards.layout import ShardedLayout, data_bytes, open_layout, prefixed
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.io.source import is_place

if TYPE_CHECKING:
    from ckptfix.checkpoint.tree import ValueTree


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings for folders of safetensors shards; newly written shards have the metadata that these lack."""
    for finding in safetensors.notes(checkpoint):
        if finding.id == "no-format-metadata":
            finding = finding.fixed_by(step("convert", to="hf", shard_size="5GB"))
        yield finding


def score(path: str, head: bytes, size: int) -> int:
    """Return 90 for an index or a folder with one, and 80 for a folder of files that are numbered like shards."""
    if head:
        return 90 if looks_like_index(path, head) else 0
    try:
        there = files.find(path)
    except CkptfixError:
        return 0
    return 90 if there.indexes else 80 if there else 0


def never(path: str, head: bytes, size: int) -> int:
    """Return 0: this kind is recognized only after its shards are read."""
    return 0


@dataclass(frozen=True, slots=True)
class _Named(FormatState):
    """The shards of a checkpoint of safetensors files."""

    layout: ShardedLayout


def layout_of(checkpoint: Checkpoint) -> ShardedLayout:
    """Return the shards of a checkpoint."""
    if isinstance(checkpoint.inside, _Named):
        return checkpoint.inside.layout
    return objects.layout_of(checkpoint)


def read(path: str) -> Checkpoint:
    """Read names, shapes and offsets of all shards; see the contract in `base`.

    Missing shards and tensors are findings.
    """
    layout = open_layout(path)
    traits: dict[str, object] = {"shards": len(layout.shards) + len(layout.unread)}
    if layout.index is not None:
        traits["index"] = files.relative(layout.index.path, layout.folder)
    if layout.unread:
        traits["unread"] = len(layout.unread)
    if slices.is_sliced(layout):
        entries, findings = slices.joined(layout)
        layout = replace(layout, findings=_without_doubled(layout.findings, findings))
        return _checkpoint(layout, SLICES, traits, lambda: entries, tuple(entry.key for entry in entries), ())
    if any(shard.read.format != safetensors.NAME for shard in layout.shards):
        made = objects.read(layout, TORCH, traits)
        return replace(made, inside=objects.ShardParts(torch_common.pickled_object(made), layout))
    names = dict.fromkeys(name for shard in layout.shards for name in shard.names)
    tied = dict.fromkeys(name for shard in layout.shards for name in shard.ties if name not in names)
    return _checkpoint(layout, NAME, traits, lambda: _entries(layout), tuple(names), tuple(tied))


def score_items(path: str, head: bytes, size: int) -> int:
    """Return 95 for a folder of torch_checkpointing whose model is in safetensors files, a file for each rank."""
    return 95 if not head and not size and is_place(path) and items.item_in(path) is not None else 0


def read_items(path: str) -> Checkpoint:
    """Read the safetensors files of all ranks of torch_checkpointing as one model."""
    layout, entries = items.joined(path)
    traits: dict[str, object] = {"ranks": len(layout.shards) + len(layout.unread)}
    return _checkpoint(layout, items.NAME, traits, lambda: entries, tuple(entry.key for entry in entries), ())


def _without_doubled(findings: Sequence[Finding], more: Sequence[Finding]) -> tuple[Finding, ...]:
    """Remove findings about tensors in several shards: for slices, that is normal."""
    return (*(finding for finding in findings if finding.id != "doubled-tensors"), *more)


def _checkpoint(
    layout: ShardedLayout,
    format: str,
    traits: Mapping[str, object],
    load_entries: Callable[[], tuple[TensorEntry, ...]],
    names: tuple[str, ...],
    tied: tuple[str, ...],
) -> Checkpoint:
    return Checkpoint(
        path=layout.path,
        format=format,
        size=sum(mark.stamp.size for mark in layout.marks),
        traits=traits,
        load_entries=load_entries,
        load_values=lambda: iter(()),
        metadata=_metadata(layout),
        sites=(NameList("", "state_dict", (*names, *tied)),),
        state_dicts=(StateDict("", len(names), 0),) if names else (),
        load_tree=_tree,
        inside=_Named(layout),
        findings=layout.findings,
        files=layout.marks,
    )


def _entries(layout: ShardedLayout) -> tuple[TensorEntry, ...]:
    """Return every tensor once; if several shards have it, the one in the shard that the index names."""
    made: dict[str, TensorEntry] = {}
    for shard in layout.shards:
        listed = set(shard.listed)
        for entry in shard.read.entries:
            if entry.key not in made or entry.key in listed:
                made[entry.key] = entry
    return tuple(made.values())


def _metadata(layout: ShardedLayout) -> dict[str, str]:
    """Return the string pairs of all shards, the first of each key; ties and views are merged over the shards."""
    pairs: dict[str, str] = {}
    for shard in layout.shards:
        for key, value in slices.without_slices(shard.read.metadata).items():
            if key in TIE_KEYS and key in pairs:
                pairs[key] = both(pairs[key], value)
            else:
                pairs.setdefault(key, value)
    return pairs


def validate(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield all faults of the index and the shards; see the contract in `base`."""
    layout = layout_of(checkpoint)
    said = dict.fromkeys(checkpoint.findings)
    if checkpoint.format == TORCH:
        said |= dict.fromkeys(torch_common.all_findings(checkpoint))
    if checkpoint.format == SLICES:
        said |= dict.fromkeys(slices.judged(layout))
    for shard in layout.shards:
        judged = files.file_formats()[shard.read.format].validate(shard.read)
        said |= dict.fromkeys(prefixed(finding, shard.name) for finding in judged)
    yield from elsewhere.settled(layout.path, list(said))
    stated = layout.index.total_size if layout.index is not None else None
    total = data_bytes([entry for shard in layout.shards for entry in shard.read.entries])
    if not layout.unread and type(stated) is int and stated != total:
        message = f"total_size is {stated:,}, but the tensors take {total:,} bytes"
        yield found("index-total", message, severity="warning" if abs(stated - total) * 100 > total else None)


def _tree(checkpoint: Checkpoint) -> ValueTree:
    """Return the tree of all tensors, ties and views too."""
    from ckptfix.checkpoint.tree import EntryTree

    return EntryTree(weights(checkpoint), metadata=checkpoint.metadata)


def weights(checkpoint: Checkpoint, at: str | None = None, *, views: bool = True) -> tuple[TensorEntry, ...]:
    """Return the tensors with ties and views; see the contract in `base`. Raises WouldLoseData if parts are missing."""
    layout_of(checkpoint).refuse_incomplete()
    if checkpoint.format != NAME:
        return plain_weights(checkpoint, at, views=views)
    if at:
        return ()
    pairs = {key: value for key, value in checkpoint.metadata.items() if views or key != VIEWS_KEY}
    return restore_ties(checkpoint.entries, pairs)


def tied_names(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the names that the metadata of a shard ties to one of its tensors -> that tensor."""
    return dict(chain.from_iterable(shard.ties.items() for shard in layout_of(checkpoint).shards))


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Plan the folder with `edits`; see `edit`."""
    return edit.plan_edit(checkpoint, layout_of(checkpoint), edits, dest)


def in_place(checkpoint: Checkpoint, plan: Plan, block: Callable[[], int]) -> Plan:
    """Rewrite the plan as an in-place edit of each shard, and overwrite the index; see `Format.in_place`."""
    return edit.in_place(layout_of(checkpoint), plan, block)


def plan_rows(
    checkpoint: Checkpoint, rows: Sequence[tuple[str, TensorEntry]], dest: str, metadata: Mapping[str, str]
) -> Plan:
    """Plan the folder with new tensors, each in the shard of its old key; see `Format.plan_rows`."""
    return edit.plan_rows(layout_of(checkpoint), rows, dest, metadata)


def edit_each_file(checkpoint: Checkpoint, make: Callable[[Checkpoint, str], Plan], dest: str) -> Plan:
    """Plan the folder with each shard as `make` plans it."""
    return edit.plan_files(layout_of(checkpoint), make, dest)


def around(checkpoint: Checkpoint, dest: str) -> tuple[OutputFile, ...]:
    """Return copies of the companion files, in `dest`."""
    return edit.around_of(layout_of(checkpoint)).copied_to(dest)


def plan_edit_slices(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Refuse the edit: slices must be joined first.

    Raises:
        Unsupported: always.
    """
    layout_of(checkpoint).refuse_incomplete()
    way = command("convert", checkpoint.path, "OUT")
    hint = f"join them first: `{way} --to hf`, or --to safetensors for one file; then edit the output"
    raise Unsupported("its files hold slices of tensors, one file for each rank", path=checkpoint.path, hint=hint)


def not_written(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """Raise Unsupported: this kind cannot be written."""
    raise Unsupported("shards are written as safetensors files", path=dest, hint="--to hf")


FORMAT = Format(
    name=NAME,
    title="Hugging Face shards",
    suffixes=(),
    states=frozenset({"metadata"}),
    score=score,
    read=read,
    validate=validate,
    weights=weights,
    refuses=safetensors.refuses,
    plan_edit=plan_edit,
    in_place=in_place,
    plan_write=write.plan_write,
    folder=True,
    companions=around,
    sized=write.sized,
    edits_each_file=edit_each_file,
    split_ties=share_plan,
    ties=tied_names,
    notes=notes,
    plan_rows=plan_rows,
    listed_beside=elsewhere.listed_beside,
    repair=repair.repair,
)

TORCH_FORMAT = Format(
    name=TORCH,
    title="Hugging Face shards of torch files",
    suffixes=(),
    states=OF_OBJECTS | {"checksums"},
    score=never,
    read=read,
    validate=validate,
    weights=weights,
    refuses=torch_zip.refuses,
    plan_edit=plan_edit,
    in_place=in_place,
    plan_write=not_written,
    folder=True,
    companions=around,
    writes=False,
    edits_each_file=edit_each_file,
)

SLICES_FORMAT = Format(
    name=SLICES,
    title="Hugging Face shards by rank (HuggingFaceStorageWriter)",
    suffixes=(),
    states=frozenset({"metadata"}),
    score=never,
    read=read,
    validate=validate,
    weights=weights,
    refuses=safetensors.refuses,
    plan_edit=plan_edit_slices,
    plan_write=not_written,
    folder=True,
    edits=False,
    companions=around,
    writes=False,
    notes=safetensors.notes,
)

ITEMS_FORMAT = replace(
    SLICES_FORMAT,
    name=items.NAME,
    title="torch_checkpointing's safetensors files of all ranks",
    score=score_items,
    read=read_items,
    companions=nothing_beside,
    notes=nothing,
)

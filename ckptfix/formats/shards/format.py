"""Hugging Face shards: several safetensors or torch files, and an index that says which holds which tensor.

::

    FOLDER/model.safetensors.index.json               see `index`
    FOLDER/model-00001-of-00003.safetensors ...       each a file by itself
    FOLDER/config.json, tokenizer.json ...            beside them: these go along with an edited checkpoint

    FOLDER/shard-00001-model-00001-of-00001.safetensors ...    slices of the tensors, a file for each rank: see `slices`

There are three kinds, which hold different things: of safetensors files, of torch files (``pytorch_model.bin``), and
of slices. All are found by the first; which it is, is known when the shards are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ckptfix.checkpoint import Checkpoint, Edit, Inside, NameSite, OutputFile, Plan, StateDict, TensorEntry
from ckptfix.commands import command
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import OF_OBJECTS, Format, plain_weights
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.safetensors.ties import TIE_KEYS, VIEWS_KEY, both, restore_ties, share_plan
from ckptfix.formats.shards import edit, files, objects, slices, write
from ckptfix.formats.shards.index import looks_like_index
from ckptfix.formats.shards.layout import Layout, data_bytes, open_layout, prefixed
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch import zip as torch_zip

NAME, TORCH, SLICES = "hf", "hf-bin", "hf-dcp"


def remarks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What is known of every folder of safetensors shards; what is missing from their metadata, new shards have."""
    for finding in safetensors.remarks(checkpoint):
        if finding.id == "no-format-metadata":
            finding = replace(finding, fix="ckptfix convert {source} {hf} --to hf --shard-size 5GB")
        yield finding


def score(path: str, head: bytes, size: int) -> int:
    """90 for a folder with an index, and for an index; 80 for one with files that are numbered as shards are."""
    if head:
        return 90 if looks_like_index(path, head) else 0
    try:
        there = files.find(path)
    except CkptfixError:
        return 0
    return 90 if there.indexes else 80 if there else 0


def never(path: str, head: bytes, size: int) -> int:
    """The score of a kind that is told apart by its shards."""
    return 0


@dataclass(frozen=True, slots=True)
class _Named(Inside):
    """The shards of a checkpoint of safetensors files."""

    layout: Layout


def layout_of(checkpoint: Checkpoint) -> Layout:
    """The shards of a checkpoint."""
    if isinstance(checkpoint.inside, _Named):
        return checkpoint.inside.layout
    return objects.layout_of(checkpoint)


def read(path: str) -> Checkpoint:
    """Read names, shapes and places of all shards; see the contract in `base`. What is missing is a finding."""
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
        return replace(made, inside=objects.ShardParts(torch_common.parts_of(made), layout))
    names = dict.fromkeys(name for shard in layout.shards for name in shard.names)
    tied = dict.fromkeys(name for shard in layout.shards for name in shard.ties if name not in names)
    return _checkpoint(layout, NAME, traits, lambda: _entries(layout), tuple(names), tuple(tied))


def _without_doubled(findings: Sequence[Finding], more: Sequence[Finding]) -> tuple[Finding, ...]:
    """Several files hold slices of a tensor by design."""
    return (*(finding for finding in findings if finding.id != "doubled-tensors"), *more)


def _checkpoint(
    layout: Layout,
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
        sites=(NameSite("", "state_dict", (*names, *tied)),),
        state_dicts=(StateDict("", len(names), 0),) if names else (),
        inside=_Named(layout),
        findings=layout.findings,
        files=layout.marks,
    )


def _entries(layout: Layout) -> tuple[TensorEntry, ...]:
    """Every tensor once; of those that stand in several shards, the one in the shard that the index names."""
    made: dict[str, TensorEntry] = {}
    for shard in layout.shards:
        listed = set(shard.listed)
        for entry in shard.read.entries:
            if entry.key not in made or entry.key in listed:
                made[entry.key] = entry
    return tuple(made.values())


def _metadata(layout: Layout) -> dict[str, str]:
    """The string pairs of all shards, the first of each key; a shard's ties and views are of its own tensors."""
    pairs: dict[str, str] = {}
    for shard in layout.shards:
        for key, value in slices.without_slices(shard.read.metadata).items():
            if key in TIE_KEYS and key in pairs:
                pairs[key] = both(pairs[key], value)
            else:
                pairs.setdefault(key, value)
    return pairs


def judge(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Everything that is wrong with index and shards; see the contract in `base`."""
    layout = layout_of(checkpoint)
    said = dict.fromkeys(checkpoint.findings)
    if checkpoint.format == TORCH:
        said |= dict.fromkeys(torch_common.all_findings(checkpoint))
    if checkpoint.format == SLICES:
        said |= dict.fromkeys(slices.judged(layout))
    for shard in layout.shards:
        judged = files.FILES[shard.read.format].judge(shard.read)
        said |= dict.fromkeys(prefixed(finding, shard.name) for finding in judged)
    yield from said
    stated = layout.index.total_size if layout.index is not None else None
    total = data_bytes([entry for shard in layout.shards for entry in shard.read.entries])
    if not layout.unread and type(stated) is int and stated != total:
        message = f"total_size is {stated:,}, and the tensors take {total:,} bytes"
        yield found("index-total", message, severity="warning" if abs(stated - total) * 100 > total else None)


def weights(checkpoint: Checkpoint, at: str | None = None, *, views: bool = True) -> tuple[TensorEntry, ...]:
    """The tensors with ties and views; see the contract in `base`. Raises WouldLoseData for half a checkpoint."""
    layout_of(checkpoint).refuse_incomplete()
    if checkpoint.format != NAME:
        return plain_weights(checkpoint, at, views=views)
    if at:
        return ()
    pairs = {key: value for key, value in checkpoint.metadata.items() if views or key != VIEWS_KEY}
    return restore_ties(checkpoint.entries, pairs)


def tied_names(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Names that the metadata of a shard ties to a tensor of it -> that tensor."""
    return dict(chain.from_iterable(shard.ties.items() for shard in layout_of(checkpoint).shards))


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """The folder with `edits`; see `edit`."""
    return edit.plan_edit(checkpoint, layout_of(checkpoint), edits, dest)


def in_place(checkpoint: Checkpoint, plan: Plan, block: Callable[[], int]) -> Plan:
    """`Format.in_place`: each shard by its own format; the index is written over."""
    return edit.in_place(layout_of(checkpoint), plan, block)


def by_file(checkpoint: Checkpoint, make: Callable[[Checkpoint, str], Plan], dest: str) -> Plan:
    """The folder with each shard as `make` plans it."""
    return edit.plan_files(layout_of(checkpoint), make, dest)


def around(checkpoint: Checkpoint, dest: str) -> tuple[OutputFile, ...]:
    """What else lies in the folder, copied to `dest`."""
    return edit.around_of(layout_of(checkpoint)).copied_to(dest)


def plan_edit_slices(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Slices are joined before they are edited.

    Raises:
        Unsupported: always.
    """
    layout_of(checkpoint).refuse_incomplete()
    way = command("convert", checkpoint.path, "OUT")
    hint = f"`{way} --to hf` joins them, or --to safetensors in one file; edit that"
    raise Unsupported("its files hold slices of tensors, a file for each rank", path=checkpoint.path, hint=hint)


def not_written(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """Raises Unsupported: this kind is only read and edited."""
    raise Unsupported("shards are written as safetensors files", path=dest, hint="--to hf")


FORMAT = Format(
    name=NAME,
    title="Hugging Face shards",
    suffixes=(),
    states=frozenset({"metadata"}),
    score=score,
    read=read,
    judge=judge,
    weights=weights,
    refuses=safetensors.refuses,
    plan_edit=plan_edit,
    in_place=in_place,
    plan_write=write.plan_write,
    folder=True,
    beside=around,
    sized=write.sized,
    by_file=by_file,
    share=share_plan,
    ties=tied_names,
    remarks=remarks,
)

TORCH_FORMAT = Format(
    name=TORCH,
    title="Hugging Face shards of torch files",
    suffixes=(),
    states=OF_OBJECTS | {"checksums"},
    score=never,
    read=read,
    judge=judge,
    weights=weights,
    refuses=torch_zip.refuses,
    plan_edit=plan_edit,
    in_place=in_place,
    plan_write=not_written,
    folder=True,
    beside=around,
    writes=False,
    by_file=by_file,
)

SLICES_FORMAT = Format(
    name=SLICES,
    title="Hugging Face shards by rank (HuggingFaceStorageWriter)",
    suffixes=(),
    states=frozenset({"metadata"}),
    score=never,
    read=read,
    judge=judge,
    weights=weights,
    refuses=safetensors.refuses,
    plan_edit=plan_edit_slices,
    plan_write=not_written,
    folder=True,
    edits=False,
    beside=around,
    writes=False,
    remarks=safetensors.remarks,
)


"""Detection of a file that is one rank's part of a model, which must not be written or loaded as the whole model.

::

    ShardedTensor, DTensor    left on a rank by FSDP and tensor parallelism; the pickle states the whole tensor's shape
    _flat_param               the parameters of an FSDP unit in one row, and a part of that
    ZeRO-3 model states       shapes in param_shapes, and tensors of shape [0] in module
    ZeRO optimizer states     the fp32 weights of a rank as flat groups, without names
    model-parallel states     slices of the parameters, or some layers: the sizes in Megatron's args, in the
                              hyper_parameters of NeMo, in mp_world_size; or other ranks' folders beside its own;
                              consolidated.NN.pth of Meta, -model_part-N.pt of fairseq
    metadata.pkl              a safetensors file of torch_checkpointing: the metadata lists it as the file of a rank
    DCP_SHARDING_INFO         a safetensors file of HuggingFaceStorageWriter: the offsets of each slice in its tensor

A numbered shard of a model, which `lone_shard` tells, has whole tensors: it may be converted alone, with a warning.
A replicated DTensor and a ShardedTensor of one shard are complete. Edits of keys and devices do not concern this
module, because they leave a rank's part what it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfix.checkpoint import Checkpoint, TensorEntry, address
from ckptfix.checkpoint.tree import Item, ListValue, ObjectValue, fields, listed, pairs_of
from ckptfix.commands import command, quoted, verbatim
from ckptfix.dataclass import dataclass
from ckptfix.errors import KeyConflict, WouldLoseData
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import format_of
from ckptfix.formats.members import NEMO_FILE, NEMO_JOINS, RANKS_METADATA
from ckptfix.formats.ranks.wrapped import flat_way, is_dtensor, is_flat, wrapped_of
from ckptfix.formats.safetensors import SHARDING_INFO
from ckptfix.formats.torch import module as torch_module
from ckptfix.formats.torch.common import PickledObject, maybe_pickled_object
from ckptfix.formats.torch.state import SHARDED
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.formats.torch.tree import sizes_of
from ckptfix.io.source import is_local
from ckptfix.ops import choose
from ckptfix.urls import as_path
from ckptfix.words import some

if TYPE_CHECKING:
    from ckptfix.formats.foreign.rank_items import RankItem
    from ckptfix.formats.shards.elsewhere import LoneShard

GATHER = (
    "gather it on all ranks before saving: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
    "of torch.distributed.checkpoint.state_dict; or save with torch.distributed.checkpoint, and join its folder with "
    "`ckptfix convert FOLDER OUT`"
)

FLAT_KIND = "flat parameters"

_RANK_IN_NAME = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+|rank[_-]?(\d+)|^shard-(\d+)-")


@dataclass(frozen=True, slots=True)
class RankShard:
    """The part of a model that a file holds.

    Attributes:
        kind: ``"DTensor"``, ``"ShardedTensor"``, ``"flat parameters"``, ``"ZeRO-3"``, ``"ZeRO optimizer"``,
            ``"model parallel"`` or ``"safetensors shard"``.
        rank, world: which of how many; None where the file does not state it.
        missing: the part of the model that is missing, in words.
        where: address of a tensor that is not whole.
        way_out: a command, or words.
        command: whether `way_out` is a command line.
        joined: it holds the files of all ranks, and is not whole nevertheless.
    """

    kind: str
    rank: int | None
    world: int | None
    missing: str
    where: str
    way_out: str
    command: bool = False
    joined: bool = False

    @property
    def message(self) -> str:
        """A sentence such as ``rank 0 of 2 (DTensor): emb.weight is a shard of [11, 13] along dim 0``."""
        if self.joined:
            return f"all ranks together ({self.kind}): {self.missing}"
        whose = "one rank's piece" if self.rank is None else f"rank {self.rank}"
        if self.rank is not None and self.world is not None:
            whose += f" of {self.world}"
        elif self.world is not None:
            whose += f" of {self.world} ranks"
        return f"{whose} ({self.kind}): {self.missing}"


def refuse_odd_keys(checkpoint: Checkpoint, at: str) -> None:
    """Raise `KeyConflict` if tensors of the dict at `at` have keys that a state dict cannot have.

    Raises:
        KeyConflict: tensors have bytes or tuples as keys, or a number beside the same number as text.
    """
    parts = maybe_pickled_object(checkpoint)
    odd = () if parts is None else parts.found.odd_keys.get(at, ())
    if odd:
        raise KeyConflict(
            f"{len(odd)} tensors have keys that a state dict cannot have: {', '.join(odd[:5])}",
            path=checkpoint.path,
            where=at or None,
            pairs=tuple((name, (name,)) for name in odd),
            hint="convert between zip and legacy keeps these keys; they cannot become a state dict",
        )


def refuse_piece(checkpoint: Checkpoint, at: str | None = None) -> None:
    """Raise `WouldLoseData` if the model's state dict is only one rank's part.

    Raises:
        WouldLoseData: the state dict at `at`, or by default the model's, is one rank's part.
    """
    piece = piece_of(checkpoint, at)
    if piece is not None:
        hint = f"join the files of all ranks: `{piece.way_out}`" if piece.command else piece.way_out
        raise WouldLoseData(piece.message, path=checkpoint.path, hint=hint)


def refuse_flat_partition(checkpoint: Checkpoint) -> None:
    """Raise `WouldLoseData` if the file has one ZeRO rank's optimizer state instead of the whole model's.

    Raises:
        WouldLoseData: it has one.
    """
    piece = piece_of(checkpoint)
    if piece is not None and piece.kind == "ZeRO optimizer":
        piece = replace(piece, missing="its optimizer state is a flat ZeRO partition, without names and shapes")
        folder = str(as_path(checkpoint.path).parent)
        hint = f"name the folder, {folder!r}, to join all ranks" if piece.command else piece.way_out
        raise WouldLoseData(piece.message, path=checkpoint.path, where=piece.where, hint=hint)


def remarks(checkpoint: Checkpoint, at: str | None = None) -> Iterator[Finding]:
    """Yield a warning if the file is one rank's part, for verbs that read or copy it unchanged."""
    piece = piece_of(checkpoint, at)
    # Data that is missing from the files of all ranks is reported by their format.
    if piece is not None and not piece.joined:
        # This is not a command of a chain: it reads further files, and its output is not a copy of this one.
        fix = verbatim(f"join the files of all ranks: `{piece.way_out}`" if piece.command else piece.way_out)
        yield found("one-rank", piece.message, where=piece.where, fix=fix, severity="warning")


def lone_shard(path: str) -> LoneShard | None:
    """Return what a file is a numbered shard of; None if it is not one.

    Only where its name may be that of a shard is the reader of shards imported.
    """
    if "-of-" not in as_path(path).name:
        return None
    from ckptfix.formats.shards.elsewhere import lone_shard

    return lone_shard(path)


def with_other_shards(
    checkpoint: Checkpoint, findings: Sequence[Finding] = (), asked: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yield `findings`, and that the file is one shard of a model, if it is.

    That is an error where it explains missing keys; their finding is then left out.

    Args:
        asked: keys of the model.
    """
    lone = lone_shard(checkpoint.path)
    if lone is None:
        yield from findings
        return
    from ckptfix.names import bases

    rows = [row for row in findings if row.id == "missing-keys" and not row.steps]
    have, others = (set(bases.unwrapped(list(keys))[0]) for keys in (checkpoint.all_keys(), lone.shard_of))
    lacking = {name: bare for name, bare in zip(asked, bases.unwrapped(asked)[0], strict=True) if bare not in have}
    elsewhere = [name for name, bare in lacking.items() if bare in others]
    if not rows or (others and not elsewhere):
        yield lone.finding()
        yield from findings
        return
    yield lone.finding("error", rows[0].about, elsewhere)
    explained = not others or len(elsewhere) == len(lacking)
    yield from (row for row in findings if not (explained and row in rows))


def piece_of(checkpoint: Checkpoint, at: str | None = None) -> RankShard | None:
    """Return the rank's part that the file is; None if it holds whole tensors, as far as it states.

    Args:
        at: address of the state dict to check; by default those of the model.
    """
    parts = maybe_pickled_object(checkpoint)
    if parts is None:
        return _of_metadata(checkpoint) or _of_item(checkpoint)
    return (
        _of_deepspeed(checkpoint, parts, at)
        or _of_model_parallel(checkpoint, parts)
        or _of_tensors(checkpoint, parts, at)
    )


def _of_metadata(checkpoint: Checkpoint) -> RankShard | None:
    try:
        said = json.loads(checkpoint.metadata.get(SHARDING_INFO, "null"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    shapes = {entry.key: list(entry.shape) for entry in checkpoint.entries}
    slices = {name: row.get("saved_offsets") for name, row in said.items() if isinstance(row, dict) and name in shapes}
    cut = [name for name, offsets in slices.items() if offsets and type(offsets) is list]
    if not cut:
        return None
    name = next((name for name in cut if any(slices[name] or ())), cut[0])
    missing = f"{name} is a slice of shape {shapes[name]} at {slices[name]} of a larger tensor{_more(len(cut) - 1)}"
    shard = re.match(r"shard-(\d+)-", as_path(checkpoint.path).name)
    rank = int(shard[1]) - 1 if shard else None
    return RankShard("safetensors shard", rank, None, missing, name, _joining(checkpoint.path))


def _of_item(checkpoint: Checkpoint) -> RankShard | None:
    """Return the part in a safetensors file of torch_checkpointing, which only the metadata beside it states."""
    listed_as = None if format_of(checkpoint).folder or not checkpoint.entries else _item_of(checkpoint.path)
    if listed_as is None:
        return None
    from ckptfix.formats.foreign.rank_items import consolidates

    folder, item, rank = listed_as
    missing = f"metadata.pkl lists it as the file of a rank, with slices of the tensors of {item.name}"
    where = checkpoint.entries[0].name
    way = command("convert", folder, "OUT.safetensors") if item.is_joined else consolidates(folder, item)
    return RankShard("safetensors shard", rank, len(item.files), missing, where, way, item.is_joined)


def _item_of(path: str) -> tuple[str, RankItem, int] | None:
    """Return (folder, item, rank) of the file of a rank that a metadata.pkl beside it, or one folder up, lists."""
    place = as_path(path)
    if not is_local(path) or not any((above / RANKS_METADATA).is_file() for above in (*place.parents,)[:2]):
        return None
    from ckptfix.formats.foreign.rank_items import item_of

    return item_of(path)


def _joining(path: str) -> str:
    """Return the advice that joins the slices of all ranks."""
    from ckptfix.formats.shards.files import find

    folder = as_path(path).parent
    if find(str(folder)).ranks:
        way = command("convert", folder, "OUT.safetensors")
        return f"its folder is the checkpoint: `{way}` joins the files of all ranks"
    return "put the files of all ranks in one folder: `ckptfix convert FOLDER OUT.safetensors` joins them"


def _more(count: int) -> str:
    return f", and so {'is 1 more' if count == 1 else f'are {count:,} more'}" if count > 0 else ""


def _rank_in_name(path: str) -> int | None:
    found = _RANK_IN_NAME.search(as_path(path).name)
    return None if found is None else int(next(group for group in found.groups() if group is not None))


def _of_deepspeed(checkpoint: Checkpoint, parts: PickledObject, at: str | None) -> RankShard | None:
    top = fields(parts.root)
    if "ds_version" not in top and "param_shapes" not in top:
        return None
    from ckptfix.formats.deepspeed import way_out

    words, is_command = way_out(checkpoint.path)
    rank = _rank_in_name(checkpoint.path)
    flat = fields(top.get("optimizer_state_dict"))
    groups = next((name for name in ("fp32_flat_groups", "single_partition_of_fp32_groups") if name in flat), None)
    if groups is not None and "module" not in top:
        count = flat.get("partition_count")
        world = _number(next(iter(listed(count)), count))
        missing = "its fp32 weights are flat groups of some parameters, without names, and not a model"
        where = f"optimizer_state_dict/{groups}"
        return RankShard("ZeRO optimizer", rank, world, missing, where, words, is_command)
    stated = {name: shape for name, shape in _stated_shapes(top) if 0 not in shape}
    empty = [
        entry for entry in checkpoint.entries
        if entry.at == "module" and entry.shape == (0,) and entry.key in stated
    ]  # fmt: skip
    if not empty or (at is not None and at != "module"):
        return None
    first = empty[0]
    missing = f"{first.key} is empty here, and {list(stated[first.key])} in the model{_more(len(empty) - 1)}"
    world = _number(top.get("dp_world_size"))
    return RankShard("ZeRO-3", rank, world, missing, first.name, words, is_command)


_SLICES = ("tensor_model_parallel_size", "model_parallel_size")
_MEGATRON = (
    *((name, "each with slices of its tensors") for name in _SLICES),
    ("pipeline_model_parallel_size", "each with some of its layers"),
    ("expert_model_parallel_size", "each with some of its experts"),
)
"""Argument of Megatron-LM with the number of parts that a model was cut into, and the contents of a part.

``model_parallel_size`` is the name of the first one until 2021. Source: megatron/training/arguments.py.
"""

_MEGATRON_MODEL = re.compile(r"model\d*|state_dict")
"""Keys of the model in its checkpoint: there are several with a virtual pipeline."""

_MP_RANK = re.compile(r"(?:mp|tp)_rank_(\d+)(?:_(?:pp_rank_)?(\d+))?(?:_(\d+))?")
"""Name of the folder of a rank: ``mp_rank_01_002`` of Megatron, ``tp_rank_01_pp_rank_002`` of NeMo.

Source: megatron/training/checkpointing.py get_checkpoint_name; nemo/utils/model_utils.py inject_model_parallel_rank.
"""

_MOST_FOLDERS = 10_000

_FOLDER_JOINS = "put the files of all ranks in one folder, as they were saved: `ckptfix convert FOLDER OUT` joins them"


def _of_model_parallel(checkpoint: Checkpoint, parts: PickledObject) -> RankShard | None:
    """Return a rank's part of a model that its own code cut, not torch: plain tensors, with the sizes beside them."""
    top = fields(parts.root)
    if format_of(checkpoint).folder:
        return None
    place = as_path(checkpoint.path)
    own = _MP_RANK.match(place.name) or _MP_RANK.fullmatch(place.parent.name)
    size = _number(top.get("mp_world_size"))
    if size is not None and size > 1 and ("module" in top or "ds_version" in top):
        from ckptfix.formats.deepspeed import to_universal

        missing = f"its mp_world_size is {size}: that many files hold the model, each with slices of its tensors"
        where = "module" if "module" in top else ""
        words = to_universal(str(place.parent))
        return RankShard("model parallel", _mp_rank_in_name(place.name), size, missing, where, words)
    numbers = [] if own is None else [int(part) for part in own.groups() if part]
    model = next((name for name in top if _MEGATRON_MODEL.fullmatch(name)), None)
    config = _nemo_config(top.get("hyper_parameters"))
    is_nemo = "nemo_version" in config or _text(config, "target").startswith("nemo.")
    for key, args, known in (("args", fields(top.get("args")), "checkpoint_version" in top),
                             ("hyper_parameters", config, is_nemo)):  # fmt: skip
        sizes = {name: size for name, _ in _MEGATRON if (size := _number(args.get(name))) is not None}
        if not sizes or not (known or own is not None):
            continue
        sizes = {name: size for name, size in sizes.items() if size > 1}
        if model is None or not sizes:
            return None
        means = dict(_MEGATRON)
        said = " and ".join(f"{name} in its {key} is {size}, {means[name]}" for name, size in sizes.items())
        missing = f"several files hold the model: {said}"
        rank, world = _megatron_rank(numbers, sizes) if numbers else None, math.prod(sizes.values())
        joins, is_command = _joins_megatron(place) if key == "args" else (NEMO_JOINS, False)
        return RankShard("model parallel", rank, world, missing, model, joins, is_command)
    if own is not None:
        return _of_rank_folders(checkpoint, numbers, model or "") if checkpoint.entries else None
    return _of_slices(checkpoint)


def _joins_megatron(place: Path) -> tuple[str, bool]:
    """Return the advice that joins a rank's file of Megatron-LM with those of the others, and if it is a command."""
    from ckptfix.formats.parallel.files import megatron_files

    folder = str(place.parent.parent)
    files = megatron_files(folder)
    if files is None or len(files.paths) < 2:
        return _FOLDER_JOINS, False
    return command("convert", folder, "OUT.safetensors"), True


def _of_slices(checkpoint: Checkpoint) -> RankShard | None:
    """Return the part in a file of Meta or fairseq, which is named after its rank."""
    place = as_path(checkpoint.path)
    if not any(part in place.name for part in ("consolidated", "part")):  # other files do not need these imports
        return None
    from ckptfix.formats.parallel.files import META_FILE, PART_FILE, meta_files, part_files

    meta, part = META_FILE.fullmatch(place.name), PART_FILE.fullmatch(place.name)
    if meta is None and part is None:
        return None
    find, rank = (meta_files, int(meta[1])) if meta is not None else (part_files, int(part[2]) if part else 0)
    folder = str(place.parent)
    files = find(folder)
    world = 0 if files is None else max(files.paths)[0] + 1
    if meta is not None:
        from ckptfix.formats.parallel.flat import parts_of

        world = max(world, parts_of({entry.key: entry.shape for entry in checkpoint.entries}, folder), rank + 1)
        if world < 2:
            return None
    there = files is not None
    joins = command("convert", folder, "OUT.safetensors")
    if not there:
        lost = [one for one in range(min(world, _MOST_FOLDERS)) if one != rank]
        joins = _copied_in(place, lost, meta is not None, joins)
    where = next((entry.name for entry in checkpoint.entries), "")
    missing = "each rank has slices of the tensors"
    return RankShard("model parallel", rank, world or None, missing, where, joins, there)


def _copied_in(place: Path, lost: Sequence[int], is_meta: bool, joins: str) -> str:
    """Return the advice to copy the files of the `lost` ranks beside the file of another, and then to join them."""
    if not lost:
        return _FOLDER_JOINS
    pattern = r"(?<=consolidated\.)(\d+)" if is_meta else r"(?<=-model_part-)(\d+)"
    front, number, suffix = re.split(pattern, place.name)
    names = [f"{front}{rank:0{len(number)}d}{suffix}" for rank in lost]
    return f"copy {some(names)} into {quoted(place.parent)} too: `{joins}` joins them"


def _nemo_config(item: Item) -> Mapping[str, Item]:
    """Return the settings of a NeMo model, which Lightning saves as `hyper_parameters`: a dict or an OmegaConf.

    Source: nemo/core/classes/modelPT.py, ``save_hyperparameters("cfg")``.
    """
    found = _settings(item)
    return _settings(found.get("cfg")) or found


def _settings(item: Item) -> Mapping[str, Item]:
    """Return the fields of a dict, without the objects that OmegaConf puts around it and around its values."""
    around = fields(item)
    found = fields(around["_content"]) if "_content" in around else around
    return {name: fields(value).get("_val", value) for name, value in found.items()}


def _of_rank_folders(checkpoint: Checkpoint, numbers: Sequence[int], model: str) -> RankShard | None:
    """Return the part in a file without sizes, if other ranks' folders beside its own have a file of the same name."""
    place = as_path(checkpoint.path)
    above = place.parent.parent
    try:
        if not _MP_RANK.fullmatch(place.parent.name) or not above.is_dir():
            return None
        folders = [row.name for row in islice(above.iterdir(), _MOST_FOLDERS) if _MP_RANK.fullmatch(row.name)]
        ranks = [name for name in folders if (above / name / place.name).is_file()]
    except OSError:
        return None
    others = sorted(name for name in ranks if name != place.parent.name)
    if not others:
        return None
    missing = f"several files hold the model: {place.name} is in {some(others)} too"
    rank = numbers[0] if len(numbers) == 1 else None
    if place.name == NEMO_FILE:
        joins = command("convert", above, "OUT.safetensors")
        return RankShard("model parallel", rank, len(ranks), missing, model, joins, True)
    joins = _FOLDER_JOINS if place.name.startswith("model_") and place.suffix == ".pt" else NEMO_JOINS
    return RankShard("model parallel", rank, len(ranks), missing, model, joins)


def _mp_rank_in_name(name: str) -> int | None:
    found = re.search(r"mp_rank_(\d+)", name)
    return None if found is None else int(found[1])


def _megatron_rank(numbers: Sequence[int], sizes: Mapping[str, int]) -> int | None:
    """Return the rank among the files of a model, as stated by the name of the folder: ``mp_rank_01_002``.

    The first number is that of the slice; one more follows for each further way in which the model is cut.
    """
    slices = next((size for name, size in sizes.items() if name in _SLICES), 1)
    ways = [slices, *(size for name, size in sizes.items() if name not in _SLICES)]
    if len(numbers) != len(ways) or any(own >= size for own, size in zip(numbers, ways, strict=True)):
        return None
    rank, step = 0, 1
    for own, size in zip(numbers, ways, strict=True):
        rank, step = rank + own * step, step * size
    return rank


def _stated_shapes(top: Mapping[str, Item]) -> Iterator[tuple[str, tuple[int, ...]]]:
    groups = top.get("param_shapes")
    for group in [*listed(groups), groups, top.get("frozen_param_shapes")]:
        for name, shape in pairs_of(group) or ():
            try:
                yield str(name), sizes_of(shape)
            except BadTensor:
                continue


def _of_tensors(checkpoint: Checkpoint, parts: PickledObject, at: str | None) -> RankShard | None:
    """Return the first tensor of the checked state dicts that the pickle describes as a part."""
    if not parts.found.tensors.any_other_than_plain(or_named=is_flat):
        return None
    # Only these can be parts; the other tensors, possibly very many, need not become nodes.
    rows = [entry for entry in checkpoint.entries if entry.kind == "wrapper" or is_flat(entry.key)]
    if not rows:
        return None
    ats = {row.at for row in choose.meant(checkpoint)} if at is None else {at}
    inside = tuple(address.join(at, holder) for at in ats for holder in torch_module.HOLDERS)
    tensors = parts.tensors(lambda where: where in ats or where.startswith(inside))
    items = {(where, key): item for where, key, item in tensors}
    first: RankShard | None = None
    count = 0
    for entry in rows:
        item = items.get((entry.at, entry.key))
        if item is None:
            continue
        made = _piece(entry, item)
        if made is not None:
            # A tensor that states its rank is preferred as the example.
            count += 1
            if first is None or (first.rank is None and made.rank is not None):
                first = made
    if first is None:
        return None
    joined = format_of(checkpoint).joins_ranks
    rank = _rank_in_name(checkpoint.path) if first.rank is None and not joined else first.rank
    missing = first.missing + _more(count - 1)
    words, is_command = (first.way_out, False) if first.kind == FLAT_KIND else _joined(checkpoint.path)
    return RankShard(first.kind, rank, first.world, missing, first.where, words, is_command, joined)


def _joined(path: str) -> tuple[str, bool]:
    """Return (the advice that joins a rank's file with those of the others, whether it is a command)."""
    from ckptfix.formats.ranks.names import beside

    files = beside(path)
    listed_as = _item_of(path) if len(files) == 1 else None
    if listed_as is not None:
        folder, item, _ = listed_as
        files = [str(as_path(folder, name)) for name in item.files.values()]
    if len(files) > 1:
        return command("convert", *files, output="OUT.pth"), True
    return f"`ckptfix convert RANK0.pt RANK1.pt ... -o OUT.pth` joins the files of all ranks; or {GATHER}", False


def _piece(entry: TensorEntry, item: Item) -> RankShard | None:
    cls, state = wrapped_of(item)
    if cls == SHARDED:
        return _sharded(entry, state)
    if is_dtensor(cls):
        return _dtensor(entry, state)
    if is_flat(entry.key):
        missing = f"{entry.key} holds the parameters of an FSDP unit in one row; no file has their names and shapes"
        return RankShard(FLAT_KIND, None, None, missing, entry.name, flat_way(entry.key))
    return None


def _shown(offset: Item) -> str:
    return str(listed(offset)) if isinstance(offset, ListValue) and offset.kind == "list" else "?"


def _number(item: Item) -> int | None:
    """Return an integer; None for anything else."""
    return item if type(item) is int else None


def _text(rows: Mapping[str, Item], name: str) -> str:
    """Return the text under `name`; empty for anything else."""
    value = rows.get(name)
    return str(value) if isinstance(value, str) else ""


def _class_name(item: Item) -> str:
    """Return the name of the class of an object; empty for anything else."""
    cls = item.cls if isinstance(item, ObjectValue) else None
    return "" if cls is None else cls.name


def _sharded(entry: TensorEntry, state: Mapping[str, Item]) -> RankShard | None:
    if len(entry.parts) == 1 and entry.parts[0].shape == entry.shape:
        return None
    group = fields(state.get("process_group"))
    rank, world = group.get("global_rank"), group.get("global_world_size")
    shards = state.get("local_shards")
    offsets = [fields(fields(shard).get("metadata")).get("shard_offsets") for shard in listed(shards)]
    if not entry.parts:
        what = f"entirely on other ranks, with shape {list(entry.shape)}"
    else:
        held = " and ".join(
            f"{list(part.shape)} at {_shown(offset)}"
            for part, offset in zip(entry.parts[:3], [*offsets, *[None] * 3], strict=False)
        )
        what = f"a shard of {list(entry.shape)}: {held}"
    kind, way = (FLAT_KIND, flat_way(entry.key)) if is_flat(entry.key) else ("ShardedTensor", GATHER)
    return RankShard(kind, _number(rank), _number(world), f"{entry.key} is {what}", entry.name, way)


def _dtensor(entry: TensorEntry, state: Mapping[str, Item]) -> RankShard | None:
    spec = fields(state.get("_spec"))
    mesh = fields(spec.get("mesh"))
    split: list[str] = []
    partial = False
    placements = spec.get("placements")
    for placement in listed(placements):
        name = _class_name(placement)
        if name.endswith("Shard"):
            dim = fields(placement).get("dim")
            split.append(f"dim {dim}" if type(dim) is int else "a dimension")
        elif name.endswith("Partial"):
            partial = True
    part = entry.parts[0] if entry.parts else None
    if not partial and part is not None and part.shape == entry.shape:
        return None
    ranks = next((mesh[name] for name in ("_flatten_rank_map", "_flatten_mesh_list") if name in mesh), None)
    world = len(listed(ranks)) or None
    held = f", and it holds {list(part.shape)}" if part is not None else ""
    if partial and not split:
        what = f"a term of a sum over the ranks, of shape {list(entry.shape)}"
    else:
        along = f" along {' and '.join(dict.fromkeys(split))}" if split else ""
        what = f"a shard of {list(entry.shape)}{along}{held}"
    return RankShard("DTensor", _number(mesh.get("_rank")), world, f"{entry.key} is {what}", entry.name, GATHER)

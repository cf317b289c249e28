"""Whether a file is one rank's piece of a model, which must not be written or loaded as if it were the whole.

::

    ShardedTensor, DTensor    what FSDP and tensor parallelism leave on a rank; the pickle states of which whole
    _flat_param               the parameters of an FSDP unit in one row, and a part of that
    ZeRO-3 model states       shapes in param_shapes, and tensors of shape [0] in module
    ZeRO optimizer states     the fp32 weights of a rank as flat groups, without names
    model-parallel states     slices of the parameters, or some layers: the sizes in Megatron's args, in the
                              hyper_parameters of NeMo, in mp_world_size; or folders of other ranks beside that of it
    DCP_SHARDING_INFO         a safetensors file of HuggingFaceStorageWriter: where each slice lies in its tensor

A replicated DTensor and a ShardedTensor of one shard are complete. Edits of names and devices do not concern
this module: they leave a piece a piece.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ckptfix.checkpoint import Checkpoint, TensorEntry, address
from ckptfix.commands import command, verbatim
from ckptfix.errors import KeyConflict, WouldLoseData
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import format_of
from ckptfix.formats.deepspeed import to_universal, way_out
from ckptfix.formats.folders.nodes import class_name, fields, listed, number, text_of
from ckptfix.formats.ranks import names
from ckptfix.formats.ranks.shards import is_dtensor, is_flat, wrapped
from ckptfix.formats.shards.files import find
from ckptfix.formats.shards.slices import SHARDING_INFO
from ckptfix.formats.torch import module as torch_module
from ckptfix.formats.torch.common import Parts, pickled
from ckptfix.formats.torch.state import SHARDED
from ckptfix.formats.torch.tensors import BadTensor, sizes
from ckptfix.ops import choose
from ckptfix.pickles.graph import Node, pairs
from ckptfix.urls import as_path
from ckptfix.words import some

GATHER = (
    "gather it on all ranks before saving: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
    "of torch.distributed.checkpoint.state_dict; or save with torch.distributed.checkpoint, whose folder "
    "`ckptfix convert FOLDER OUT` makes one file of"
)

FLAT = (
    "load each file into the same FSDP model on as many ranks, as a LOCAL_STATE_DICT, and save its "
    "FULL_STATE_DICT: the lines are in `ckptfix help recipes`, under flat parameters"
)
"""What joins flat parameters: torch alone cuts them into those of a model."""

_RANK_IN_NAME = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+|rank[_-]?(\d+)|^shard-(\d+)-")


@dataclass(frozen=True, slots=True)
class Piece:
    """What a file holds of a model.

    Attributes:
        kind: ``"DTensor"``, ``"ShardedTensor"``, ``"flat parameters"``, ``"ZeRO-3"``, ``"ZeRO optimizer"``,
            ``"model parallel"`` or ``"safetensors shard"``.
        rank, world: which of how many; None where the file does not say.
        missing: what of the model is not in it.
        where: address of a tensor that is a piece.
        way_out: a command, or words.
        command: whether `way_out` is a command line.
        joined: it is of all ranks, and no whole all the same.
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
        """Such as ``rank 0 of 2 (DTensor): emb.weight is a shard of [11, 13] along dim 0``."""
        if self.joined:
            return f"all ranks together ({self.kind}): {self.missing}"
        whose = "one rank's piece" if self.rank is None else f"rank {self.rank}"
        if self.rank is not None and self.world is not None:
            whose += f" of {self.world}"
        elif self.world is not None:
            whose += f" of {self.world} ranks"
        return f"{whose} ({self.kind}): {self.missing}"


def refuse_odd_keys(checkpoint: Checkpoint, at: str) -> None:
    """Refuse to take the mapping at `at` as a state dict, if its tensors would go by names that they do not have.

    Raises:
        KeyConflict: tensors under bytes or tuples, or under a number beside the same number as text.
    """
    parts = pickled(checkpoint)
    odd = () if parts is None else parts.found.odd_keys.get(at, ())
    if odd:
        raise KeyConflict(
            f"{len(odd)} keys of tensors are not names that a state dict can have: {', '.join(odd[:5])}",
            path=checkpoint.path,
            where=at or None,
            pairs=tuple((name, (name,)) for name in odd),
            hint="convert between zip and legacy keeps the keys as they are; no state dict can be taken from them",
        )


def refuse_piece(checkpoint: Checkpoint, at: str | None = None) -> None:
    """Refuse to take a piece for the whole.

    Raises:
        WouldLoseData: the state dict at `at`, or the one that is a model's, is one rank's piece.
    """
    piece = piece_of(checkpoint, at)
    if piece is not None:
        hint = f"`{piece.way_out}` makes the whole" if piece.command else piece.way_out
        raise WouldLoseData(piece.message, path=checkpoint.path, hint=hint)


def refuse_flat_partition(checkpoint: Checkpoint) -> None:
    """Refuse to take one ZeRO rank's optimizer state for the whole model's.

    Raises:
        WouldLoseData: it is one.
    """
    piece = piece_of(checkpoint)
    if piece is not None and piece.kind == "ZeRO optimizer":
        piece = replace(piece, missing="the optimizer's state in it is a flat ZeRO partition, without names and shapes")
        folder = str(as_path(checkpoint.path).parent)
        hint = f"name the folder, {folder!r}: what all ranks hold is joined" if piece.command else piece.way_out
        raise WouldLoseData(piece.message, path=checkpoint.path, where=piece.where, hint=hint)


def remarks(checkpoint: Checkpoint, at: str | None = None) -> Iterator[Finding]:
    """That the file is one rank's piece, where it is: no error for what reads or copies a piece as it is."""
    piece = piece_of(checkpoint, at)
    # What is in no file of all ranks is a finding of their format.
    if piece is not None and not piece.joined:
        # Not one command of a chain: it reads other files, and writes what is no copy of this one.
        fix = verbatim(f"`{piece.way_out}` makes the whole" if piece.command else piece.way_out)
        yield found("one-rank", piece.message, where=piece.where, fix=fix, severity="warning")


def piece_of(checkpoint: Checkpoint, at: str | None = None) -> Piece | None:
    """The piece that the file is; None where it holds whole tensors, as far as it states.

    Args:
        at: address of the state dict that counts; by default those that are a model's.
    """
    parts = pickled(checkpoint)
    if parts is None:
        return _of_metadata(checkpoint)
    return (
        _of_deepspeed(checkpoint, parts, at)
        or _of_model_parallel(checkpoint, parts)
        or _of_tensors(checkpoint, parts, at)
    )


def _of_metadata(checkpoint: Checkpoint) -> Piece | None:
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
    return Piece("safetensors shard", rank, None, missing, name, _joining(checkpoint.path))


def _joining(path: str) -> str:
    """What makes the whole of the slices of all ranks."""
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


def _of_deepspeed(checkpoint: Checkpoint, parts: Parts, at: str | None) -> Piece | None:
    top = fields(parts.graph.root)
    if "ds_version" not in top and "param_shapes" not in top:
        return None
    words, is_command = way_out(checkpoint.path)
    rank = _rank_in_name(checkpoint.path)
    flat = fields(top.get("optimizer_state_dict"))
    groups = next((name for name in ("fp32_flat_groups", "single_partition_of_fp32_groups") if name in flat), None)
    if groups is not None and "module" not in top:
        count = flat.get("partition_count")
        count = count[0] if type(count) is list and count else count
        world = count if type(count) is int else None
        missing = "the fp32 weights in it are flat groups of a part of the parameters, without names: no model"
        where = f"optimizer_state_dict/{groups}"
        return Piece("ZeRO optimizer", rank, world, missing, where, words, is_command)
    stated = {name: shape for name, shape in _stated_shapes(top) if 0 not in shape}
    empty = [
        entry for entry in checkpoint.entries
        if entry.at == "module" and entry.shape == (0,) and entry.key in stated
    ]  # fmt: skip
    if not empty or (at is not None and at != "module"):
        return None
    first = empty[0]
    missing = f"{first.key} is empty here, and {list(stated[first.key])} in the model{_more(len(empty) - 1)}"
    size = top.get("dp_world_size")
    world = size if type(size) is int else None
    return Piece("ZeRO-3", rank, world, missing, first.name, words, is_command)


_SLICES = ("tensor_model_parallel_size", "model_parallel_size")
_MEGATRON = (
    *((name, "each with slices of its tensors") for name in _SLICES),
    ("pipeline_model_parallel_size", "each with some of its layers"),
    ("expert_model_parallel_size", "each with some of its experts"),
)
"""Argument of Megatron-LM that says in how many parts a model was cut, and what a part has.

``model_parallel_size`` is what it called the first one until 2021. Source: megatron/training/arguments.py.
"""

_MEGATRON_MODEL = re.compile(r"model\d*|state_dict")
"""Keys of the model in its checkpoint: there are several with a virtual pipeline."""

_MP_RANK = re.compile(r"(?:mp|tp)_rank_(\d+)(?:_(?:pp_rank_)?(\d+))?(?:_(\d+))?")
"""Name of the folder of a rank: ``mp_rank_01_002`` of Megatron, ``tp_rank_01_pp_rank_002`` of NeMo.

Source: megatron/training/checkpointing.py get_checkpoint_name; nemo/utils/model_utils.py inject_model_parallel_rank.
"""

_MOST_FOLDERS = 10_000

_MEGATRON_JOINS = (
    "Megatron-LM joins the files of all ranks: tools/checkpoint/convert.py with --target-tensor-parallel-size 1 and "
    "--target-pipeline-parallel-size 1; or save with --ckpt-format torch_dist, whose folder `ckptfix convert FOLDER "
    "OUT` reads"
)

_NEMO_JOINS = (
    "NeMo joins the files of all ranks: examples/nlp/language_modeling/megatron_change_num_partitions.py with "
    "--target_tensor_model_parallel_size 1 and --target_pipeline_model_parallel_size 1"
)


def _of_model_parallel(checkpoint: Checkpoint, parts: Parts) -> Piece | None:
    """A rank's file of a model that was cut by hand, not by torch: the tensors are plain, and the sizes beside them."""
    top = fields(parts.graph.root)
    if format_of(checkpoint).folder:
        return None
    place = as_path(checkpoint.path)
    own = _MP_RANK.match(place.name) or _MP_RANK.fullmatch(place.parent.name)
    size = number(top.get("mp_world_size"))
    if size is not None and size > 1 and ("module" in top or "ds_version" in top):
        missing = f"mp_world_size in it is {size}: as many files hold the model, each with slices of its tensors"
        where = "module" if "module" in top else ""
        words = to_universal(str(place.parent))
        return Piece("model parallel", _mp_rank_in_name(place.name), size, missing, where, words)
    numbers = [] if own is None else [int(part) for part in own.groups() if part]
    model = next((name for name in top if _MEGATRON_MODEL.fullmatch(name)), None)
    config = _nemo_config(top.get("hyper_parameters"))
    is_nemo = "nemo_version" in config or (text_of(config, "target") or "").startswith("nemo.")
    for key, args, known in (("args", fields(top.get("args")), "checkpoint_version" in top),
                             ("hyper_parameters", config, is_nemo)):  # fmt: skip
        sizes = {name: size for name, _ in _MEGATRON if (size := number(args.get(name))) is not None}
        if not sizes or not (known or own is not None):
            continue
        sizes = {name: size for name, size in sizes.items() if size > 1}
        if model is None or not sizes:
            return None
        means = dict(_MEGATRON)
        said = " and ".join(f"{name} in its {key} is {size}, {means[name]}" for name, size in sizes.items())
        missing = f"several files hold the model: {said}"
        rank, world = _megatron_rank(numbers, sizes) if numbers else None, math.prod(sizes.values())
        joins = _MEGATRON_JOINS if key == "args" else _NEMO_JOINS
        return Piece("model parallel", rank, world, missing, model, joins)
    return _of_rank_folders(checkpoint, numbers, model or "") if own is not None and checkpoint.entries else None


def _nemo_config(node: Node) -> Mapping[str, Node]:
    """Return the settings of a NeMo model, which Lightning saves as `hyper_parameters`: a dict or an OmegaConf.

    Source: nemo/core/classes/modelPT.py, ``save_hyperparameters("cfg")``.
    """
    found = _settings(node)
    return _settings(found.get("cfg")) or found


def _settings(node: Node) -> Mapping[str, Node]:
    """Return the fields of a mapping, without the objects that OmegaConf puts around it and around its values."""
    around = fields(node)
    found = fields(around["_content"]) if "_content" in around else around
    return {name: fields(value).get("_val", value) for name, value in found.items()}


def _of_rank_folders(checkpoint: Checkpoint, numbers: Sequence[int], model: str) -> Piece | None:
    """A file that states no sizes, in a folder beside which those of other ranks hold a file of the same name."""
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
    joins = _MEGATRON_JOINS if place.name.startswith("model_optim_rng") else _NEMO_JOINS
    return Piece("model parallel", rank, len(ranks), missing, model, joins)


def _mp_rank_in_name(name: str) -> int | None:
    found = re.search(r"mp_rank_(\d+)", name)
    return None if found is None else int(found[1])


def _megatron_rank(numbers: Sequence[int], sizes: Mapping[str, int]) -> int | None:
    """The rank among the files of a model, as the name of the folder states it: ``mp_rank_01_002``.

    Its first number is that of the slice, and there is one for each other way that the model is cut in several.
    """
    slices = next((size for name, size in sizes.items() if name in _SLICES), 1)
    ways = [slices, *(size for name, size in sizes.items() if name not in _SLICES)]
    if len(numbers) != len(ways) or any(own >= size for own, size in zip(numbers, ways, strict=True)):
        return None
    rank, step = 0, 1
    for own, size in zip(numbers, ways, strict=True):
        rank, step = rank + own * step, step * size
    return rank


def _stated_shapes(top: Mapping[str, Node]) -> Iterator[tuple[str, tuple[int, ...]]]:
    groups = top.get("param_shapes")
    for group in [*listed(groups), groups, top.get("frozen_param_shapes")]:
        for name, shape in pairs(group) or ():
            try:
                yield str(name), sizes(shape)
            except BadTensor:
                continue


def _of_tensors(checkpoint: Checkpoint, parts: Parts, at: str | None) -> Piece | None:
    """The first of the tensors that counts and that the pickle describes as a piece."""
    # Only these can be: the others, of which there may be very many, need not become nodes.
    rows = [entry for entry in checkpoint.entries if entry.kind == "wrapper" or is_flat(entry.key)]
    if not rows:
        return None
    ats = {row.at for row in choose.meant(checkpoint)} if at is None else {at}
    inside = tuple(address.join(at, holder) for at in ats for holder in torch_module.HOLDERS)
    nodes = {
        (where, key): node
        for where, key, node in parts.found.tensors
        if where in ats or where.startswith(inside)
    }
    first: Piece | None = None
    count = 0
    for entry in rows:
        node = nodes.get((entry.at, entry.key))
        if node is None:
            continue
        made = _piece(entry, node)
        if made is not None:
            # One that says more of its rank, or of what it is a part of, stands for the others.
            count += 1
            if first is None or (first.rank is None and made.rank is not None):
                first = made
    if first is None:
        return None
    joined = format_of(checkpoint).joins_ranks
    rank = _rank_in_name(checkpoint.path) if first.rank is None and not joined else first.rank
    missing = first.missing + _more(count - 1)
    words, is_command = (FLAT, False) if first.kind == "flat parameters" else _joined(checkpoint.path)
    return Piece(first.kind, rank, first.world, missing, first.where, words, is_command, joined)


def _joined(path: str) -> tuple[str, bool]:
    """(what joins a rank's file with those of the others, whether it is a command)."""
    files = names.beside(path)
    if len(files) > 1:
        return command("convert", *files, output="OUT.pth"), True
    return f"`ckptfix convert RANK0.pt RANK1.pt ... -o OUT.pth` joins the files of all ranks; or {GATHER}", False


def _piece(entry: TensorEntry, node: Node) -> Piece | None:
    cls, state = wrapped(node)
    if cls == SHARDED:
        return _sharded(entry, dict(state))
    if is_dtensor(cls):
        return _dtensor(entry, dict(state))
    if is_flat(entry.key):
        missing = f"{entry.key} is the parameters of an FSDP unit in one row, whose names and shapes are in no file"
        return Piece("flat parameters", None, None, missing, entry.name, FLAT)
    return None


def _sharded(entry: TensorEntry, state: Mapping[str, Node]) -> Piece | None:
    if len(entry.parts) == 1 and entry.parts[0].shape == entry.shape:
        return None
    group = fields(state.get("process_group"))
    rank, world = group.get("global_rank"), group.get("global_world_size")
    shards = state.get("local_shards")
    offsets = [
        fields(fields(shard).get("metadata")).get("shard_offsets")
        for shard in listed(shards)
    ]
    if not entry.parts:
        what = f"on other ranks, all of its {list(entry.shape)}"
    else:
        held = " and ".join(
            f"{list(part.shape)} at {offset if type(offset) is list else '?'}"
            for part, offset in zip(entry.parts[:3], [*offsets, *[None] * 3], strict=False)
        )
        what = f"a shard of {list(entry.shape)}: {held}"
    kind = "flat parameters" if is_flat(entry.key) else "ShardedTensor"
    return Piece(kind, number(rank), number(world), f"{entry.key} is {what}", entry.name, GATHER)


def _dtensor(entry: TensorEntry, state: Mapping[str, Node]) -> Piece | None:
    spec = fields(state.get("_spec"))
    mesh = fields(spec.get("mesh"))
    split: list[str] = []
    partial = False
    placements = spec.get("placements")
    for placement in listed(placements):
        name = class_name(placement)
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
    held = f", of which it holds {list(part.shape)}" if part is not None else ""
    if partial and not split:
        what = f"a term of a sum over the ranks, of shape {list(entry.shape)}"
    else:
        along = f" along {' and '.join(dict.fromkeys(split))}" if split else ""
        what = f"a shard of {list(entry.shape)}{along}{held}"
    return Piece("DTensor", number(mesh.get("_rank")), world, f"{entry.key} is {what}", entry.name, GATHER)

"""The files of ranks, written: each tensor is cut as the writer of the format cuts it, and its bytes stay in place.

The names of the tensors are those of the source: a model with other names must be renamed first.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from ckptfix.checkpoint import Checkpoint, OutputFile, Plan, TensorEntry
from ckptfix.checkpoint.tree import fields as fields_of
from ckptfix.dataclass import dataclass
from ckptfix.errors import CutUnknown, DamagedFile, KeyConflict, Refused
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import ParallelSizes
from ckptfix.formats.folders.assembly import Assembly, mapping, ordered
from ckptfix.formats.members import MEGATRON_FOLDER
from ckptfix.formats.parallel import flat, megatron, parameters
from ckptfix.formats.parallel.cuts import RankCut, part_of_rank
from ckptfix.formats.parallel.files import (
    META_FILE,
    PARAMETERS,
    TRACKER,
    json_settings,
    planned_files,
)
from ckptfix.formats.parallel.megatron import EXPERT, HEAD_COPY, LAYER, OUTPUT, WORDS, MegatronSizes
from ckptfix.formats.parallel.tables import (
    MEGATRON,
    META,
    CutContext,
    CutRow,
    decided,
    given_cuts,
    hidden_size,
    row_of,
)
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.pickles import Call, Global
from ckptfix.pickles.graph import Node
from ckptfix.urls import as_path
from ckptfix.words import some

_NAMESPACE = Global("argparse", "Namespace", 0)

_LAST = re.compile(
    r"(?:.*\.)?(final_layernorm|final_norm|output_layer|lm_head|binary_head|pooler|mtp|word_embeddings_for_head)(\..*)?"
)
"""Modules of the last pipeline stage (megatron/core/models/gpt/gpt_model.py, ``post_process``)."""


def refuses(entry: TensorEntry) -> str | None:
    """Return why a tensor cannot be cut into parts: only dense tensors whose bytes are known can."""
    return None if entry.kind == "dense" and entry.storage is not None and entry.has_data else f"a {entry.kind} tensor"


def plan_meta_alone(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """Plan the one file of a model that is not cut."""
    return _flat_plan(entries, dest, {}, {}, ParallelSizes())


def plan_meta(
    checkpoint: Checkpoint,
    sizes: ParallelSizes,
    entries: Sequence[TensorEntry],
    dest: str,
    *,
    metadata: Mapping[str, str] | None = None,
) -> Plan:
    """Plan ``consolidated.NN.pth`` for as many ranks as `sizes` states.

    Raises:
        Refused: a tensor does not divide, or nothing says along which dimension it is cut.
    """
    if sizes.pipeline > 1 or sizes.expert > 1:
        raise Refused("Meta's files are cut by tensors alone", path=dest, hint="leave out --pp and --ep")
    cut = checkpoint.traits.get("tok_embeddings")
    known = {} if cut is None else {"tok_embeddings.weight": cut}
    folder = _folder_of(checkpoint)
    settings = json_settings(folder)
    if settings:
        return _flat_plan(entries, dest, settings, known, sizes)
    # The folder has no params.json that is copied along.
    settings = parameters.shown({entry.key: entry.shape for entry in entries}, json_settings(folder, "config.json"))
    plan = _flat_plan(entries, dest, settings, known, sizes)
    text = json.dumps(settings).encode()
    own = OutputFile.of(as_path(dest, PARAMETERS), [text])
    unknown = [name for name in parameters.NEEDED if name not in settings]
    why = "nothing in the source states it: add it before Meta's code loads the output"
    lacking = [found("left-behind", why, where=f"{PARAMETERS}/{name}") for name in unknown]
    return Plan((*plan.files, own), (*plan.findings, *lacking))


def _folder_of(checkpoint: Checkpoint) -> str:
    place = as_path(checkpoint.path)
    return str(place if checkpoint.path not in {file.path for file in checkpoint.files} else place.parent)


def _flat_plan(
    entries: Sequence[TensorEntry],
    dest: str,
    settings: Mapping[str, object],
    known: Mapping[str, object],
    sizes: ParallelSizes,
) -> Plan:
    ranks = sizes.tensor
    heads = settings.get("n_kv_heads") or settings.get("n_heads")
    if type(heads) is int and heads % ranks:
        raise Refused(f"{heads} heads of keys and values do not divide into {ranks} ranks", path=dest)
    tensors = {entry.key: entry for entry in entries}
    context = CutContext({name: entry.shape for name, entry in tensors.items()}, 1, settings,
                         given_cuts({**known, **sizes.dims}))  # fmt: skip
    cuts = _cuts(tensors, META, context, ranks, "Meta's")
    files: list[OutputFile] = []
    for rank in range(ranks):
        path = str(as_path(dest, flat.META_LAYOUT.pattern.format(rank)))
        assembly = Assembly()
        nodes = _nodes(assembly, {name: (entry, cuts[name]) for name, entry in tensors.items()}, rank, ranks)
        files += _file(assembly, ordered(nodes), path)
    return Plan(tuple(files))


def _cuts(
    tensors: Mapping[str, TensorEntry], table: tuple[CutRow, ...], context: CutContext, ranks: int, whose: str
) -> dict[str, RankCut]:
    """Return the cut of each tensor.

    Raises:
        CutUnknown: nothing decides the cuts of some tensors.
        Refused: the table does not know a name, or a tensor does not divide into `ranks` parts.
    """
    unknown = [name for name in tensors if row_of(table, name) is None]
    if unknown:
        message = f"{len(unknown)} of {len(tensors)} names are not {whose}: {some(unknown)}"
        hint = "--names renames them in the same pass, if a table has the model; `ckptfix match` does for any model"
        raise Refused(message, hint=hint)
    made: dict[str, RankCut] = {}
    undecided: list[str] = []
    for name, entry in tensors.items():
        try:
            cut = decided(table, name, context)
        except DamagedFile as error:
            raise Refused(error.message, where=name, hint=error.hint) from None
        if cut is None:
            undecided.append(name)
            continue
        try:
            cut.local(entry.shape, ranks)
        except ValueError as error:
            message = f"{error}: its shape is {list(entry.shape)}"
            raise Refused(message, where=name, hint="choose another --tp") from None
        made[name] = cut
    if undecided and ranks > 1:
        name = undecided[0]
        versions = name.endswith("tok_embeddings.weight")
        known = "0 in Llama 3, 1 in Llama 1 and 2" if versions else f"its shape is {list(tensors[name].shape)}"
        more = f"; the same for {some(undecided[1:])}" if len(undecided) > 1 else ""
        message = f"nothing says along which dimension it is cut: {known}{more}"
        dims = dict.fromkeys(undecided, "0")
        raise CutUnknown(message, dims=dims, where=name, hint=f"say it with --dim '{name}=0'")
    return made | dict.fromkeys(undecided, RankCut(None))


def _nodes(
    assembly: Assembly, rows: Mapping[str, tuple[TensorEntry, RankCut]], rank: int, ranks: int
) -> dict[str, Node]:
    """Return the tensors of a rank's state dict."""
    keys: dict[object, str] = {}
    made: dict[str, Node] = {}
    for name, (entry, cut) in rows.items():
        shape, data = part_of_rank(entry, cut, rank, ranks)
        storage = entry.storage
        tie = (None if storage is None else storage.identity, entry.offset, entry.shape, entry.stride, entry.dtype, cut)
        if tie not in keys:
            keys[tie] = assembly.storage(data)
        made[name] = assembly.tensor(keys[tie], entry.dtype, shape)
    return made


def _file(assembly: Assembly, root: Node, path: str) -> tuple[OutputFile, ...]:
    whole = assembly.checkpoint(root, path, format=torch_zip.NAME, files=(), traits={})
    return torch_zip.recode(whole, path).files


def plan_megatron_alone(
    entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None
) -> Plan:
    """Plan the one file of a model that is not cut."""
    return _megatron_plan(entries, dest, {}, {}, ParallelSizes())


def plan_megatron(
    checkpoint: Checkpoint,
    sizes: ParallelSizes,
    entries: Sequence[TensorEntry],
    dest: str,
    *,
    metadata: Mapping[str, str] | None = None,
) -> Plan:
    """Plan the folder of an iteration, or ``release``, with a file for each rank.

    Raises:
        Refused: a tensor or the layers do not divide, or nothing says along which dimension a tensor is cut.
    """
    top = {} if checkpoint.tree is None else fields_of(checkpoint.tree.root)
    args = {name: _plain(value) for name, value in fields_of(top.get("args")).items()}
    counters = {name: top[name] for name in ("iteration", "checkpoint_version") if type(top.get(name)) in (int, float)}
    return _megatron_plan(entries, dest, args, counters, sizes)


def _plain(item: object) -> object:
    """Return a setting of plain values; None for anything else."""
    if isinstance(item, str):
        return str(item)
    if item is None or isinstance(item, bool | int | float):
        return item
    listed = getattr(item, "items", None)
    return [_plain(one) for one in listed] if isinstance(listed, list | tuple) else None


@dataclass(frozen=True, slots=True)
class _StageTensor:
    """A tensor of a rank's file: its name there, the whole tensor, and its group of experts (None: all groups)."""

    name: str
    entry: TensorEntry
    cut: RankCut
    expert: int | None


def _megatron_plan(
    entries: Sequence[TensorEntry],
    dest: str,
    args: Mapping[str, object],
    counters: Mapping[str, object],
    sizes: ParallelSizes,
) -> Plan:
    tensors = {entry.key: entry for entry in entries}
    groups = args.get("num_query_groups") if args.get("group_query_attention") else args.get("num_attention_heads")
    if type(groups) is int and groups % sizes.tensor:
        raise Refused(f"{groups} groups of heads do not divide into {sizes.tensor} ranks", path=dest, hint="lower --tp")
    settings = {**args, "checkpoint_version": counters.get("checkpoint_version", 3.0)}
    context = CutContext({name: entry.shape for name, entry in tensors.items()}, 1, settings, given_cuts(sizes.dims))
    cuts = _cuts(tensors, MEGATRON, context, sizes.tensor, "Megatron-LM's")
    stages, layers, experts = _staged(tensors, cuts, sizes, dest)
    made = MegatronSizes(sizes.tensor, sizes.pipeline, sizes.expert, sizes.tensor, 1)
    iteration = counters.get("iteration")
    step = f"iter_{iteration:07d}" if type(iteration) is int and iteration >= 0 else "release"
    stated = _arguments(args, tensors, context, sizes, layers, experts)
    files: list[OutputFile] = []
    for place in made.expected():
        tensor, stage, group = place
        assembly = Assembly()
        rows = {row.name: (row.entry, row.cut) for row in stages[stage] if row.expert in (None, group)}
        nodes = _nodes(assembly, rows, tensor, sizes.tensor)
        root: dict[str, Node] = {"args": _namespace(stated)}
        root["checkpoint_version"] = counters.get("checkpoint_version", 3.0)  # type: ignore[assignment]
        root |= {"iteration": iteration} if type(iteration) is int else {}
        root["model"] = _nested(nodes)
        path = str(as_path(dest, step, made.folder(place), "model_optim_rng.pt"))
        files += _file(assembly, mapping(root), path)
    text = str(iteration) if step != "release" else step
    files.append(OutputFile.of(as_path(dest, TRACKER), [text.encode()]))
    return Plan(tuple(files), tuple(_unknown(stated)))


def _staged(
    tensors: Mapping[str, TensorEntry], cuts: Mapping[str, RankCut], sizes: ParallelSizes, dest: str
) -> tuple[list[list[_StageTensor]], int, int]:
    """Return the tensors of each pipeline stage, and the numbers of layers and of experts.

    Raises:
        Refused: they do not divide, or there are several series of layers.
    """
    found = {name: LAYER.fullmatch(name) for name in tensors}
    series: dict[str, int] = {}
    for match in found.values():
        if match is not None and not match[1].startswith("mtp."):
            series[match[1]] = max(series.get(match[1], 0), int(match[2]) + 1)
    if sizes.pipeline > 1 and len(series) != 1:
        what = "no layers" if not series else f"layers in {some(sorted(series))}"
        message = f"it has {what}: only one series of layers is divided into stages"
        raise Refused(message, path=dest, hint="leave out --pp")
    layers = max(series.values(), default=0)
    if layers % sizes.pipeline:
        message = f"{layers} layers do not divide into {sizes.pipeline} stages"
        raise Refused(message, path=dest, hint="choose another --pp")
    experts = _experts(tensors)
    if experts % sizes.expert or (sizes.expert > 1 and not experts):
        message = f"{experts} experts do not divide into {sizes.expert} groups"
        raise Refused(message, path=dest, hint="choose another --ep")
    each, local = max(layers // sizes.pipeline, 1), experts // sizes.expert
    stages: list[list[_StageTensor]] = [[] for _ in range(sizes.pipeline)]
    for name, entry in tensors.items():
        match, stage, own = found[name], 0, name
        if match is not None and match[1] in series:
            stage, number = divmod(int(match[2]), each)
            own = f"{match[1]}{number}{match[3]}"
        elif _LAST.fullmatch(name) is not None:
            stage = sizes.pipeline - 1
        own, group = _local_expert(own, local)
        stages[stage].append(_StageTensor(own, entry, cuts[name], group))
    words = next((name for name in tensors if WORDS.fullmatch(name)), None)
    outputs = any(OUTPUT.fullmatch(name) or HEAD_COPY.fullmatch(name) for name in tensors)
    if sizes.pipeline > 1 and words is not None and not outputs:
        # The last stage has a copy of the embeddings that its output layer is tied to (saver_base.py).
        old = words.startswith("language_model.")
        copy = "word_embeddings_for_head.weight" if old else words.replace("embedding.word_embeddings", "output_layer")
        stages[-1].append(_StageTensor(copy, tensors[words], cuts[words], None))
    for rows in stages:
        if len({row.name for row in rows if row.expert in (None, 0)}) != sum(row.expert in (None, 0) for row in rows):
            raise KeyConflict("two tensors of a stage would have one name", path=dest, pairs=())
    return stages, layers, experts


def _experts(tensors: Mapping[str, TensorEntry]) -> int:
    numbers = [int(match[3] or match[6]) for name in tensors if (match := EXPERT.fullmatch(name)) is not None]
    return max(numbers, default=-1) + 1


def _local_expert(name: str, local: int) -> tuple[str, int | None]:
    """Return the name of a tensor on the rank that has it, and its group of experts; None if all groups have it."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return name, None
    group, number = divmod(int(match[3] or match[6]), local)
    if match[2]:
        return f"{match[1]}{match[2]}{number}{match[4]}", group
    return f"{match[1]}{match[5]}{number}", group


def _arguments(
    args: Mapping[str, object],
    tensors: Mapping[str, TensorEntry],
    context: CutContext,
    sizes: ParallelSizes,
    layers: int,
    experts: int,
) -> dict[str, object]:
    """Return the arguments of the output: those of the source, and what the tensors show."""
    words = next((entry for name, entry in tensors.items() if WORDS.fullmatch(name)), None)
    shown: dict[str, object] = {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.tensor,
        "untie_embeddings_and_output_weights": any(OUTPUT.fullmatch(name) for name in tensors),
        "ckpt_format": "torch",
    }
    if layers:
        shown["num_layers"] = layers
    if experts:
        shown["num_experts"] = experts
    if words is not None and len(words.shape) == 2:
        shown |= {"padded_vocab_size": words.shape[0], "hidden_size": hidden_size(context) or words.shape[1]}
    gated = [len(decided_cut.stacked) for name in tensors if re.search(r"(linear_fc1|dense_h_to_4h)\.weight\d*$", name)
             for decided_cut in [decided(MEGATRON, name, context)] if decided_cut is not None]  # fmt: skip
    if gated and "swiglu" not in args:
        shown["swiglu"] = gated[0] == 2
    return {name: value for name, value in args.items() if name not in OF_ONE_RANK} | shown


OF_ONE_RANK = frozenset({"rank", "local_rank", "world_size", "data_parallel_size"})
"""Arguments that are not those of the model: Megatron-LM sets them anew in each job."""


def _unknown(stated: Mapping[str, object]) -> Iterator[Finding]:
    """Report that Megatron-LM needs arguments that nothing in the source states."""
    lacking = [name for name in ("num_attention_heads",) if stated.get(name) is None]
    if lacking:
        message = "the source does not state it: load the output with --finetune, which does not compare arguments"
        yield found("left-behind", message, where=f"args/{lacking[0]}")


def _namespace(values: Mapping[str, object]) -> Call:
    """Return an argparse.Namespace of these values, as Megatron-LM saves its arguments."""
    made = Call(_NAMESPACE, (), "NEWOBJ", 0)
    made.state = mapping({name: _node(value) for name, value in values.items()})
    return made


def _node(value: object) -> Node:
    return [_node(one) for one in value] if isinstance(value, list) else value  # type: ignore[return-value]


_EMBEDDING = re.compile(r"language_model\.embedding\.(\w+)\.(.+)")
_OLD = re.compile(r"language_model\.(encoder|decoder|transformer|pooler|output_layer)\.(.+)")
_HEAD = re.compile(r"(word_embeddings_for_head|lm_head|binary_head)\.(.+)")


def _nested(nodes: Mapping[str, Node]) -> Node:
    """Return the state dict of a rank, which was nested before Megatron's core (state_dict_for_save_checkpoint)."""
    if not any(name.startswith(("language_model.", "word_embeddings_for_head.")) for name in nodes):
        return ordered(nodes)
    made: dict[tuple[str, ...], dict[str, Node]] = {}
    for name, node in nodes.items():
        if (match := _EMBEDDING.fullmatch(name)) is not None:
            made.setdefault(("language_model", "embedding", match[1]), {})[match[2]] = node
        elif (match := _OLD.fullmatch(name)) is not None:
            made.setdefault(("language_model", match[1]), {})[match[2]] = node
        elif (match := _HEAD.fullmatch(name)) is not None:
            made.setdefault((match[1],), {})[match[2]] = node
        else:
            made.setdefault((), {})[name] = node
    return _tree(made, ())


def _tree(rows: Mapping[tuple[str, ...], Mapping[str, Node]], at: tuple[str, ...]) -> Node:
    inner = dict.fromkeys(keys[len(at)] for keys in rows if len(keys) > len(at) and keys[: len(at)] == at)
    below = {key: _tree(rows, (*at, key)) for key in inner}
    return ordered({**below, **rows.get(at, {})})


def read_meta_plan(plan: Plan) -> Checkpoint:
    """Return the checkpoint of a planned folder of Meta's files."""
    files, folder = _planned(plan, META_FILE)
    return flat.read(flat.META_LAYOUT, folder, planned_files(files, META_FILE, folder))


def read_megatron_plan(plan: Plan) -> Checkpoint:
    """Return the checkpoint of a planned folder of Megatron-LM."""
    files, folder = _planned(plan, MEGATRON_FOLDER)
    return megatron.read(folder, planned_files(files, MEGATRON_FOLDER, folder))


def _planned(plan: Plan, pattern: re.Pattern[str]) -> tuple[list[PlannedFile], str]:
    """Return the planned files of ranks, and the folder above all of them."""
    own = [file for file in plan.files if any(map(pattern.fullmatch, PurePath(file.path).parts[-2:]))]
    if not own:
        raise DamagedFile("the plan has no files of ranks")
    folder = os.path.commonpath([os.path.dirname(file.path) for file in own])  # noqa: PTH120 (a name, not a place)
    return [PlannedFile(file) for file in own], folder

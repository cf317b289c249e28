"""The reader of a DeepSpeed save, as the object that one torch.save of the whole would have pickled.

::

    module          the model's state dict: fp32 master weights if there are any, buffers unchanged
    module_16bit    the same parameters in the dtype that the model computed with, if it differs (stages 1 and 2)
    optimizer       {"state": {NAME: {"exp_avg", "exp_avg_sq", "step"}}, "param_groups": [{..., "params": [NAME ...]}]}
    global_steps, lr_scheduler, ds_config ...      as in the model states
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.findings.table import found
from ckptfix.formats.deepspeed import Save, read_save, to_universal
from ckptfix.formats.folders.copies import alike, differing
from ckptfix.formats.folders.nodes import number
from ckptfix.formats.torch.tensors import is_tensor
from ckptfix.formats.zero import universal
from ckptfix.formats.zero.frozen_parameters import join_frozen
from ckptfix.formats.zero.joined_tensors import Joiner
from ckptfix.formats.zero.missing_ranks import lost_rank, other_model, other_steps, refuse_other_steps
from ckptfix.formats.zero.moments import moments
from ckptfix.formats.zero.object import Parameter, ZeroCheckpoint, assembled, model_dtype
from ckptfix.formats.zero.partitions import Cut, Cuts, each_cuts, row_cuts, share_of
from ckptfix.formats.zero.rank_evidence import Ranks
from ckptfix.formats.zero.states import MOST_RANKS, Lost, Model, Optim, attempt, file_of, read_model, read_optim
from ckptfix.io.source import mark
from ckptfix.urls import as_path

Models = Mapping[int, Model | Lost]
Optims = Sequence[Optim | Lost]


def read(path: str) -> Checkpoint:
    """Read the save in the folder `path`: names, shapes and offsets. A rank whose file is missing is a finding.

    Raises:
        Unsupported: the save has model-parallel ranks, pipeline stages or experts.
        DamagedFile: it has no model states, or files that do not belong together.
    """
    save = read_save(path)
    models = {rank: attempt(save, name, read_model, "") for rank, name in sorted(save.models.items())}
    first = next((model for model in models.values() if isinstance(model, Model)), None)
    if first is None:
        lost = next((model for model in models.values() if isinstance(model, Lost)), None)
        what = "the folder has no model states" if lost is None else f"{as_path(lost.path).name} {lost.why}"
        raise DamagedFile(f"{what}: without model states, the names and shapes are unknown", path=save.folder)
    _refuse_other_models(models)
    _refuse_slice(save, first)
    if save.universal:
        whole = universal.read(save, first, models)
    elif save.optims or save.partitioned:
        whole = _partitioned(save, first, models)
    else:
        whole = ZeroCheckpoint(first, Joiner(path, lambda: None), stage=0 if not any(first.groups) else None)
        if any(first.groups):
            message = "there are no optimizer states: the weights are in the dtype that the model computed with"
            whole.findings.append(found("no-masters", message, where="module"))
    slices = [attempt(save, name, read_model, "") for name in save.slices]
    there = [model for model in (*models.values(), *slices) if isinstance(model, Model)]
    whole.findings += differing(_unequal(there))
    whole.files += [model.file.mark for model in there]
    whole.files += [mark(save.pointer)] if save.pointer is not None else []
    return assembled(path, whole, tuple(whole.files), _traits(whole))


def _refuse_slice(save: Save, first: Model) -> None:
    """Refuse the files of a single model-parallel rank if their own number says that there were several.

    Raises:
        Unsupported: there were several.
    """
    size = number(first.file.top.get("mp_world_size"))
    if size is not None and size > 1 and not save.universal:
        message = f"these are the files of one of {size} model-parallel ranks; each rank has slices of the parameters"
        raise Unsupported(message, path=save.folder, hint=to_universal(save.folder))


def _traits(whole: ZeroCheckpoint) -> dict[str, object]:
    rows: dict[str, object] = {
        "DeepSpeed": whole.model.version,
        "ZeRO stage": whole.stage,
        "ranks": whole.ranks,
        "step": whole.model.step,
        "model dtype": model_dtype(whole),
    }
    return {name: value for name, value in rows.items() if value is not None}


def ranks_of(checkpoint: Checkpoint) -> Ranks | None:
    """Read the files of the ranks again; None for a save without optimizer's states of ranks."""
    save = read_save(checkpoint.path)
    if save.universal or not save.optims:
        return None
    rows = (attempt(save, name, read_model, "") for _, name in sorted(save.models.items()))
    first = next((model for model in rows if isinstance(model, Model)), None)
    if first is None:
        return None
    there, optims = _optims(save, first, {0: first})
    return Ranks(there, first, _cuts(first, optims, _is_partitioned(save, there)), len(optims))


def judge_steps(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return (file, message) of the ranks whose optimizer is at a different step; reads a few bytes of each file."""
    ranks = ranks_of(checkpoint)
    return [] if ranks is None else [(own.file.path, message) for own, message in other_steps(ranks)]


def _optims(save: Save, first: Model, models: Models) -> tuple[dict[int, Optim], Optims]:
    """Return the optimizer states that can be read, by rank, and those of all ranks, lost ones included."""
    read = {rank: attempt(save, name, read_optim, "") for rank, name in sorted(save.optims.items())}
    there = {rank: own for rank, own in read.items() if isinstance(own, Optim)}
    ranks = _ranks(save, first, read, models)
    return there, [read.get(rank) or Lost(save.expected(rank), "is missing") for rank in range(ranks)]


def _is_partitioned(save: Save, there: Mapping[int, Optim]) -> bool:
    """Tell whether each parameter is cut among the ranks, as of stage 3."""
    return next(iter(there.values())).partitioned if there else save.partitioned


def _partitioned(save: Save, first: Model, models: Models) -> ZeroCheckpoint:
    """Join the parameters that ZeRO partitioned over the ranks."""
    there, optims = _optims(save, first, models)
    ranks = len(optims)
    partitioned = _is_partitioned(save, there)
    _refuse_others(there, partitioned)
    flats = [own if isinstance(own, Lost) else own.flat for own in optims]
    cuts = _cuts(first, optims, partitioned)
    own_ranks = Ranks(there, first, cuts, ranks)
    whole = ZeroCheckpoint(first, Joiner(save.path, lambda: refuse_other_steps(own_ranks)), ranks=ranks, masters=True)
    said = next((own.stage for own in there.values() if own.stage is not None), None)
    whole.stage = 3 if partitioned else said
    whole.files += [own.file.mark for own in there.values()]
    for group, shapes in enumerate(first.groups):
        for name, shape in shapes.items():
            cut = cuts[group][name]
            dtype = _dtype(cut, group, there)
            number = whole.joiner.add(name, dtype, shape, cut, flats)
            whole.parameters[name] = Parameter(dtype, shape, number)
    if partitioned:
        join_frozen(whole, save, models, ranks)
    whole.moments = moments(first, optims, cuts, whole.joiner)
    whole.findings += whole.moments.findings if whole.moments is not None else []
    whole.findings += other_model(first, there)
    whole.findings += [
        lost_rank(rank, ranks, own, first.groups, cuts) for rank, own in enumerate(optims) if isinstance(own, Lost)
    ]
    return whole


def _ranks(save: Save, first: Model, read: Mapping[int, Optim | Lost], models: Models) -> int:
    """Return the number of ranks.

    Raises:
        DamagedFile: the files state different numbers, or there are more files than ranks.
    """
    there = [own for own in read.values() if isinstance(own, Optim)]
    said = Counter(own.ranks for own in there)
    if not said:
        size = first.file.top.get("dp_world_size")
        stated = size if type(size) is int and 0 < size <= MOST_RANKS else 1
        return max(stated, *(rank + 1 for rank in (*read, *models)))
    ranks = said.most_common(1)[0][0]
    odd = next((own for own in there if own.ranks != ranks), None)
    hint = "move the files of the other save away"
    if odd is not None:
        message = (
            f"it is from a save of {odd.ranks} ranks, and other files from one of {ranks}: two saves are in one folder"
        )
        raise DamagedFile(message, path=odd.file.path, hint=hint)
    beyond = next((rank for rank in read if rank >= ranks), None)
    if beyond is not None:
        message = f"it belongs to rank {beyond}, but the save has {ranks} ranks: it is from a different save"
        raise DamagedFile(message, path=file_of(save, save.optims[beyond]), hint=hint)
    return ranks


def _refuse_other_models(models: Models) -> None:
    """Refuse model states of a different step."""
    there = [model for model in models.values() if isinstance(model, Model)]
    usual = Counter(model.step for model in there).most_common(1)[0][0]
    for model in there:
        if model.step != usual:
            message = f"it is at step {model.step}, the other ranks' at {usual}: it is from a different save"
            raise DamagedFile(message, path=model.file.path, hint="copy the files of all ranks from one save")
        if model.groups != there[0].groups or model.frozen != there[0].frozen:
            raise DamagedFile("the names or shapes of its parameters differ from rank 0's", path=model.file.path)


def _unequal(models: Sequence[Model]) -> list[str]:
    """Find buffers that differ between ranks; DeepSpeed does not synchronize them."""
    first, *others = map(_buffers, models)
    unequal = [name for name, own in first.items() if not all(alike(own, rank.get(name, own)) for rank in others)]
    return [f"module/{name}" for name in unequal]


def _buffers(model: Model) -> dict[str, TensorEntry]:
    """Return the buffers whose tensors are contiguous."""
    made = {}
    for name, node in model.module:
        if name in model.buffers and is_tensor(node):
            with suppress(DamagedFile):
                made[name] = model.file.tensor(node, name)
    return made


def _refuse_others(there: Mapping[int, Optim], partitioned: bool) -> None:
    """Refuse optimizer states whose groups differ from those of most ranks."""
    kinds = Counter(tuple(entry.dtype for entry in own.flat) for own in there.values())
    for own in there.values():
        usual = kinds.most_common(1)[0][0]
        if own.partitioned is not partitioned or tuple(entry.dtype for entry in own.flat) != usual:
            message = "its parameter groups differ from the other ranks' files: it is from a different save"
            raise DamagedFile(message, path=own.file.path)


def _cuts(first: Model, optims: Optims, partitioned: bool) -> Cuts:
    there = [own for own in optims if isinstance(own, Optim)]
    path = there[0].file.path if there else first.file.path
    try:
        if not partitioned:
            if there and len(first.groups) != len(there[0].flat):
                held = len(there[0].flat)
                raise DamagedFile(f"it has {held} parameter groups, and the model states {len(first.groups)}")
            return row_cuts(first.groups, [_parts(first, optims, group) for group in range(len(first.groups))])
        sizes = Counter(tuple(entry.numel for entry in own.flat) for own in there)
        usual = sizes.most_common(1)[0][0] if sizes else _shares(first, len(optims))
        for own in there:
            if tuple(entry.numel for entry in own.flat) != usual:
                path = own.file.path
                raise DamagedFile("its share of the parameters differs in size from the other ranks' shares")
        return each_cuts(first.groups, usual, len(optims))
    except DamagedFile as error:
        error.path = error.path or path
        raise


def _shares(first: Model, ranks: int) -> tuple[int, ...]:
    """Return the sizes that a rank's shares must have, if no file states them."""
    return tuple(sum(share_of(math.prod(shape), ranks) for shape in shapes.values()) for shapes in first.groups)


def _parts(first: Model, optims: Optims, group: int) -> list[int]:
    """Return the number of elements in each rank's part of a group; for lost files, derived from the others."""
    needed = sum(map(math.prod, first.groups[group].values()))
    known = [own.flat[group].numel if isinstance(own, Optim) else None for own in optims]
    last = optims[-1]
    full = max((size for size in known[:-1] if size is not None), default=None)
    if full is None and isinstance(last, Optim) and len(last.paddings) > group:
        full = last.flat[group].numel + last.paddings[group]
    if full is None:
        full = -(-needed // len(optims))
    out = [full if size is None else size for size in known]
    if known[-1] is None:
        out[-1] = max(needed - sum(out[:-1]), 0)
    return out


def _dtype(cut: Cut, group: int, there: Mapping[int, Optim]) -> str:
    own = next(iter(there.values()), None)
    place = next((flat for _, flat in islice(cut.touched(), 1)), group)
    return own.flat[place].dtype if own is not None and place < len(own.flat) else "float32"

"""Frozen parameters: in stage 3, each rank's model states hold a part of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ckptfix.checkpoint import TensorEntry
from ckptfix.errors import DamagedFile
from ckptfix.formats.deepspeed import Save, rank_of
from ckptfix.formats.zero.joined_tensors import Joiner
from ckptfix.formats.zero.missing_ranks import lost_rank
from ckptfix.formats.zero.object import Parameter, ZeroCheckpoint
from ckptfix.formats.zero.partitions import Cut, Each, share_of
from ckptfix.formats.zero.states import Lost, Model
from ckptfix.urls import as_path


def join_frozen(whole: ZeroCheckpoint, save: Save, models: Mapping[int, Model | Lost], ranks: int) -> None:
    """Add the frozen parameters to those of `whole`, and a finding for each rank whose file is lost.

    Raises:
        DamagedFile: a rank's part is missing, or has the wrong size.
    """
    frozen = whole.model.frozen
    if not frozen:
        return
    cuts: dict[str, Cut] = {}
    for group, (name, shape) in enumerate(frozen.items()):
        share = share_of(math.prod(shape), ranks)
        cuts[name] = Each(((group, 0, share),) if share else (), math.prod(shape), ranks)
    table = [_row(models.get(rank), rank, save, list(frozen)) for rank in range(ranks)]
    dtypes = [entry.dtype for entry in next(row for row in table if not isinstance(row, Lost))]
    for rank, row in enumerate(table):
        for entry, dtype, shape in zip(() if isinstance(row, Lost) else row, dtypes, frozen.values(), strict=False):
            needed = share_of(math.prod(shape), ranks)
            if (entry.numel, entry.dtype) != (needed, dtype):
                message = f"it has {entry.numel:,} elements of {entry.dtype}, and {needed:,} of {dtype} are needed"
                own = models[rank]
                path = own.file.path if isinstance(own, Model) else save.folder
                raise DamagedFile(message, path=path, where=entry.key)
        if isinstance(row, Lost):
            whole.findings.append(lost_rank(rank, ranks, row, [frozen], [cuts]))
    _add(whole, whole.joiner, cuts, dtypes, table)


def _add(
    whole: ZeroCheckpoint,
    joiner: Joiner,
    cuts: Mapping[str, Cut],
    dtypes: Sequence[str],
    table: Sequence[Sequence[TensorEntry] | Lost],
) -> None:
    for (name, shape), dtype in zip(whole.model.frozen.items(), dtypes, strict=True):
        whole.parameters[name] = Parameter(dtype, shape, joiner.add(name, dtype, shape, cuts[name], table))


def _row(model: Model | Lost | None, rank: int, save: Save, names: Sequence[str]) -> Sequence[TensorEntry] | Lost:
    if model is None:
        return Lost(str(as_path(save.folder, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")), "is missing")
    if isinstance(model, Lost):
        return model
    if (other := rank_of(model.file.saved_as)) not in (None, rank):
        return Lost(model.file.path, f"was saved as the file of rank {other}")
    lacking = next((name for name in names if name not in model.fragments), None)
    if lacking is not None:
        raise DamagedFile(f"it has no part of {lacking}", path=model.file.path, where="frozen_param_fragments")
    return [model.file.tensor(model.fragments[name], f"frozen_param_fragments/{name}") for name in names]

"""Models that tensor parallelism alone has cut: Meta's ``consolidated.NN.pth``, and fairseq's model parts.

::

    consolidated.NN.pth      the state dict of a rank; params.json beside it has the sizes of the model
    NAME-model_part-N.pt     {"cfg" or "args": ..., "model": the state dict of a rank, "last_optimizer_state": ...}

Meta's files do not state how many they are. The attention's output matrix does: it has a column for each feature of the
rank's heads, and all ranks together have as many as the hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptfix.checkpoint import Checkpoint
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, UnknownFormat, Unsupported
from ckptfix.findings.table import found
from ckptfix.formats.base import AS_THE_FILES_SAY, JoinOptions
from ckptfix.formats.parallel.cuts import Shape
from ckptfix.formats.parallel.files import FoundFiles, RankPart, json_settings, open_part, plain
from ckptfix.formats.parallel.model import JoinedModel, assembled
from ckptfix.formats.parallel.tables import FAIRSEQ, META, CutContext, CutRow, hidden_size
from ckptfix.pickles.graph import Node
from ckptfix.urls import as_path

META_NAME = "meta"
FAIRSEQ_NAME = "fairseq"


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The layout of a library for files of ranks that have slices of all tensors.

    Attributes:
        holder: the key of the state dict in a file; ``""`` if the file is the state dict.
        pattern: the name of a file, with its rank.
    """

    name: str
    holder: str
    table: tuple[CutRow, ...]
    pattern: str


META_LAYOUT = RankLayout(META_NAME, "", META, "consolidated.{:02d}.pth")
FAIRSEQ_LAYOUT = RankLayout(FAIRSEQ_NAME, "model", FAIRSEQ, "model_part-{}")


def read(layout: RankLayout, path: str, files: FoundFiles, options: JoinOptions = AS_THE_FILES_SAY) -> Checkpoint:
    """Read the files of all ranks as one checkpoint; a missing file is a finding.

    Raises:
        DamagedFile: the files do not belong together.
        Unsupported: several ranks have copies of a part.
    """
    parts: dict[int, RankPart] = {}
    why: dict[int, str] = {}
    for (rank,), name in sorted(files.paths.items()):
        try:
            parts[rank] = open_part(name)
        except (DamagedFile, UnknownFormat) as error:
            why[rank] = f"cannot be read ({error.message})"
    if not parts:
        raise DamagedFile("none of the files of its ranks can be read", path=path)
    settings = json_settings(files.folder) if layout.name == META_NAME else {}
    named = {rank: part.named(layout.holder) for rank, part in parts.items()}
    first = min(parts)
    shapes = {name: parts[first].entry(address).shape for name, address in named[first].items()}
    if not shapes:
        raise DamagedFile("it holds no tensors of a model", path=parts[first].path)
    model = JoinedModel(path, layout.table, options)
    ranks = max(max(files.paths)[0] + 1, _ranks(shapes, settings))
    heads = settings.get("n_kv_heads")
    if type(heads) is int and 0 < heads < ranks:
        message = f"{ranks} ranks share {heads} heads of keys and values, so that several have the same"
        raise Unsupported(message, path=path, hint=f"join the files for {heads} ranks or fewer")
    lost = {}
    for rank in range(ranks):
        if rank not in parts:
            lost[rank] = str(as_path(files.folder, layout.pattern.format(rank)))
            message = f"rank {rank} of {ranks}: {as_path(lost[rank]).name} {why.get(rank, 'is missing')}"
            message += "; it holds a part of every matrix"
            model.findings.append(found("missing-rank", message, where=lost[rank]))
    for rank, own in named.items():
        odd = next((name for name in own if name not in named[first]), None) or next(
            (name for name in named[first] if name not in own), None
        )
        if odd is not None:
            message = f"only one of it and {as_path(parts[first].path).name} has {odd}: they are from different saves"
            raise DamagedFile(message, path=parts[rank].path)
    for rank, part in parts.items():
        other = re.fullmatch(r"consolidated\.(\d+)|.*-model_part-(\d+)", part.saved_as)
        if other is not None and int(other[1] or other[2]) != rank:
            message = f"it was saved as the file of rank {int(other[1] or other[2])}"
            model.findings.append(found("other-save", message, where=part.path))
    context = model.context(shapes, ranks, settings)
    for name in named[first]:
        rows = {rank: (part.entry(named[rank][name]), part.path) for rank, part in parts.items()}
        model.add(name, name, rows, context, lost)
    model.cut_vocabulary(settings, json_settings(path, "config.json"))
    model.finish()
    _leave(model, layout, parts[first])
    traits: dict[str, object] = {"tensor parallel": ranks, "files": len(parts)}
    words = model.tensors.get("tok_embeddings.weight")
    if words is not None and words.is_cut:
        traits["tok_embeddings"] = words.cut.dim
    marks = tuple(part.mark for part in parts.values())
    return assembled(model, layout.holder, {}, format=layout.name, files=marks, traits=traits)


def _ranks(shapes: Mapping[str, Shape], settings: Mapping[str, object]) -> int:
    """Return the number of ranks that the size of the attention's output matrix shows; 0 if it is unknown."""
    heads, size = settings.get("n_heads"), settings.get("head_dim")
    hidden = hidden_size(CutContext(shapes, 1, settings))
    if type(heads) is int and type(size) is int:
        hidden = heads * size
    out = next((shape for name, shape in shapes.items() if name.endswith("attention.wo.weight")), ())
    if hidden is None or len(out) != 2 or not out[1] or hidden % out[1]:
        return 0
    return hidden // out[1]


def parts_of(shapes: Mapping[str, Shape], folder: str) -> int:
    """Return the number of files that hold a model, judged by the shapes in one of Meta's; 1 if it is whole."""
    return max(_ranks(shapes, json_settings(folder)), 1)


def _leave(model: JoinedModel, layout: RankLayout, part: RankPart) -> None:
    """Report what the joined object does not have."""
    top: Mapping[str, Node] = part.top
    for name, value in top.items():
        if name == layout.holder or (not layout.holder and name in model.tensors):
            continue
        why = "it is the state of a rank" if plain(value) is None else "it is not a tensor of the model"
        model.leave(name, why)

"""The tensors of a checkpoint that are codes of quantized weights, and the reasons to refuse operations on them.

The scheme is recognized by keys, dtypes and shapes, by the ``config.json`` beside the file if there is one, and by the
index of a sharded checkpoint beside it, which lists the tensors of the other shards.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.checkpoint import Checkpoint, TensorEntry, dtypes
from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.quantization_signs import BLOCKS, has_signs, patterns
from ckptfix.commands import word
from ckptfix.errors import CkptfixError, Refused
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import format_of, listed_beside, open_checkpoint
from ckptfix.io.source import found_as, is_local
from ckptfix.urls import as_path
from ckptfix.words import plural

if TYPE_CHECKING:
    from ckptfix.checkpoint.quantization import OtherShards, Quantized, Role

CONFIG = "config.json"
MOST_CONFIG = 1 << 22
"""Bytes of the largest config.json that is read; a real one has a few thousand."""

MOST_GLOBS = 8
"""The most globs in a hint."""


class Quantization:
    """The quantized weights of a checkpoint.

    Attributes:
        weights: in file order.
        roles: address of a tensor -> its role, and the weight that it belongs to.
    """

    __slots__ = ("roles", "weights")

    def __init__(
        self, weights: tuple[Quantized, ...] = (), roles: Mapping[str, tuple[Role, Quantized]] | None = None
    ) -> None:
        self.weights = weights
        self.roles: Mapping[str, tuple[Role, Quantized]] = {} if roles is None else roles

    def __bool__(self) -> bool:
        return bool(self.weights)

    @property
    def counts(self) -> dict[str, int]:
        """Name of a scheme in messages -> number of its weights."""
        found: dict[str, int] = {}
        for row in self.weights:
            found[row.label] = found.get(row.label, 0) + 1
        return found


def quantization_of(checkpoint: Checkpoint) -> Quantization:
    """Return the quantized weights of a checkpoint; no tensor byte is read."""
    return checkpoint.once(_quantization)


def _quantization(checkpoint: Checkpoint) -> Quantization:
    optimizer = {state.at for state in checkpoint.state_dicts if state.optimizer}
    entries = [entry for entry in checkpoint.entries if entry.at not in optimizer]
    methods = methods_of(checkpoint)
    if not methods and not has_signs(entries):
        return Quantization()
    # Only such files are worth the import of the table of schemes.
    from ckptfix.checkpoint.quantization import recognised

    return Quantization(*recognised(entries, methods, _elsewhere(checkpoint, entries)))


def _elsewhere(checkpoint: Checkpoint, entries: Sequence[TensorEntry]) -> OtherShards:
    """Return what the index beside a lone shard lists in other shards."""
    from ckptfix.checkpoint.quantization import NOWHERE, OtherShards, linked_names

    if not is_local(checkpoint.path) or found_as(checkpoint.path) != "file":
        return NOWHERE
    linked = {name for entry in entries if not entry.at for name in linked_names(entry)}
    if not linked:
        return NOWHERE  # no tensor could be codes or a companion, so the folder is not looked at
    place = as_path(checkpoint.path)
    shard_of = listed_beside(checkpoint.path)
    if not shard_of:
        return NOWHERE
    wanted = linked & shard_of.keys()
    read = (entry for shard in sorted({shard_of[name] for name in wanted}) for entry in _shard(place.parent, shard))
    return OtherShards(frozenset(wanted), {entry.key: entry for entry in read if entry.key in wanted and not entry.at})


def _shard(folder: Path, name: str) -> tuple[TensorEntry, ...]:
    """Return the tensors of another shard; none if it cannot be read, or is not in the folder."""
    if "/" in name or "\\" in name or found_as(str(folder / name)) != "file":
        return ()
    try:
        return tuple(open_checkpoint(str(folder / name)).entries)
    except CkptfixError:
        return ()


def methods_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the quantization in the config.json beside a checkpoint; empty if it names none."""
    return tuple(_methods(json_beside(checkpoint, CONFIG)))


def file_beside(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the path of the file `name` beside a local checkpoint or in its folder, or None if it does not exist."""
    if not is_local(checkpoint.path):
        return None
    path = as_path(checkpoint.path)
    file = str((path if found_as(checkpoint.path) == "folder" else path.parent) / name)
    return file if found_as(file) == "file" else None


def json_beside(checkpoint: Checkpoint, name: str, most: int = MOST_CONFIG) -> dict[str, Any]:
    """Return the object in the JSON file `name` beside a local checkpoint.

    It is empty if there is no such file, or if the file has more than `most` bytes.
    """
    file = file_beside(checkpoint, name)
    if file is None:
        return {}
    # Most files have none beside them, and are described faster without this import.
    from ckptfix.formats.json_files import json_object

    return json_object(file, most)


def config_beside(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the settings in config.json beside a checkpoint: those of the whole, then those of its language model."""
    return ChainMap(*map(dict, holders_of(json_beside(checkpoint, CONFIG))))


def holders_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the objects in a config.json that state settings: the whole, then that of its language model, if any."""
    inner = config.get("text_config")
    return (config, inner) if isinstance(inner, dict) else (config,)


def _methods(config: Mapping[str, Any]) -> Iterable[str]:
    for holder in holders_of(config):
        for key in ("quantization_config", "compression_config", "quantization"):
            row = holder.get(key)
            if isinstance(row, dict):
                if key == "quantization" and isinstance(row.get("bits"), int):
                    yield "mlx"  # mlx_lm writes group_size and bits there, without the name of a method.
                values = (row.get(name) for name in ("quant_method", "quant_algo", "format"))
                yield from (value for value in values if isinstance(value, str))


def described(name: str, role: Role, weight: Quantized) -> str:
    """Describe a tensor for a message."""
    if role == "codes":
        return f"codes of a quantized weight, {weight.label}"
    of = "" if weight.codes is None else f" of {weight.codes}"
    return f"the {role}{of}, {weight.label}"


_PACKED: frozenset[Role] = frozenset({"scale", "zero point", "second scale"})
"""Roles of companions that are codes too if they are not floats: exponents, packed zeros, quantized scales."""


def codes_of(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the tensors whose elements are codes and not numbers: address -> its description."""
    return checkpoint.once(_codes)


def _codes(checkpoint: Checkpoint) -> dict[str, str]:
    roles = quantization_of(checkpoint).roles
    if not roles:
        return {}
    dtype_of = {entry.name: entry.dtype for entry in checkpoint.entries if entry.name in roles}
    made = {
        name: described(name, role, weight)
        for name, (role, weight) in roles.items()
        if role == "codes" or (role in _PACKED and not _is_float(dtype_of.get(name, "")))
    }
    tied = format_of(checkpoint).ties(checkpoint)
    return made | {name: made[base] for name, base in tied.items() if base in made}


def _is_float(dtype: str) -> bool:
    row = dtypes.find(dtype)
    return row is not None and row.family == "float"


def no_numbers(checkpoint: Checkpoint, entry: TensorEntry) -> str | None:
    """Return why a tensor has no numbers to compute with, such as that they are codes; None if it has."""
    # Verbs that read no elements start faster without this import.
    from ckptfix.elements.reader import why_no_numbers

    return why_no_numbers(entry) or codes_of(checkpoint).get(entry.name)


def codes_note(names: Collection[str], kinds: Iterable[object] = ()) -> tuple[Finding, ...]:
    """Return a note that some tensors, at these addresses, hold codes; nothing for no tensors.

    Args:
        kinds: descriptions of the quantized weights.
    """
    if not names:
        return ()
    hold = "holds" if len(names) == 1 else "hold"
    message = f"{plural(len(names), 'tensor')} {hold} codes of quantized weights, not numbers"
    said = "; ".join(map(str, kinds))
    message = f"{message} ({said})" if said else message
    return (found("quantized", message, where=next(iter(names)), fix="--dequantized computes the weights"),)


_LIBRARIES: tuple[tuple[str, str], ...] = (
    ("fp8", "transformers or vLLM with fp8"),
    ("nvfp4-modelopt", "vLLM or TensorRT-LLM (ModelOpt)"),
    ("int4-modelopt", "vLLM or TensorRT-LLM (ModelOpt)"),
    ("nvfp4", "compressed-tensors"), ("mxfp4-pack", "compressed-tensors"), ("mxfp8", "compressed-tensors"),
    ("mxfp4", "transformers with kernels (gpt-oss)"), ("pack-quantized", "compressed-tensors"),
    ("int8-scale", "compressed-tensors"), ("marlin-24", "compressed-tensors"), ("bitsandbytes", "bitsandbytes"),
    ("gptq", "gptqmodel"), ("awq", "gptqmodel or autoawq"), ("torchao", "torchao"), ("quanto", "optimum-quanto"),
    ("hqq", "hqq"), ("mlx", "mlx"), ("eetq", "eetq"), ("exl", "exllama"), ("aqlm", "aqlm"), ("vptq", "vptq"),
    ("higgs", "flute-kernel"), ("spqr", "spqr_quant"), ("bitnet", "transformers with bitnet"),
    ("nunchaku", "nunchaku"),
)  # fmt: skip
"""Beginning of the id of a scheme -> the library that loads its weights; the first one counts."""


def library_of(weight: Quantized) -> str:
    """Return the library that loads a quantized weight."""
    if weight.scheme.id == "tensor-class":
        return weight.label.partition(" ")[0]
    names = (name for start, name in _LIBRARIES if weight.scheme.id.startswith(start))
    return next(names, "the library that quantized it")


def refuse(checkpoint: Checkpoint, names: Iterable[str], why: str, hint: str) -> None:
    """Refuse to compute with tensors that are quantized codes, or belong to them.

    Args:
        names: addresses of the tensors.
        why: the reason to refuse; it follows the description of the first one.

    Raises:
        Refused: one of them is a code, or belongs to one.
    """
    roles = quantization_of(checkpoint).roles
    wrong = [name for name in names if name in roles]
    if wrong:
        # A person looks for the weight, and its scale may come before it.
        wrong.sort(key=lambda name: roles[name][0] != "codes")
        more = f" ({len(wrong):,} such tensors)" if len(wrong) > 1 else ""
        message = f"{described(wrong[0], *roles[wrong[0]])}: {why}{more}"
        raise Refused(message, path=checkpoint.path, where=wrong[0], hint=hint)


def refuse_blocks(checkpoint: Checkpoint) -> None:
    """Refuse to write the blocks of GGUF to a file of another format, which cannot name their type.

    Raises:
        Refused: a tensor consists of such blocks.
    """
    if any(entry.detail.startswith(BLOCKS) for entry in checkpoint.entries):
        roles = quantization_of(checkpoint).roles
        names = [name for name, (_, weight) in roles.items() if weight.scheme.id == "gguf-blocks"]
        hint = "add --dequantize, which writes plain weights"
        refuse(checkpoint, names, "other formats cannot name the type of its blocks", hint)


def selecting(names: Collection[str], others: Collection[str]) -> str:
    """Return options of ``cast`` that exclude the keys `names` and no `others`; empty if that takes too many globs."""
    globs = list(dict.fromkeys(map(_last, names)))
    if _apart(globs, names, others):
        return _options("--keep", globs)
    for option, wanted, rest in (("--keep", names, others), ("--only", others, names)):
        globs = list(patterns(wanted))
        if _apart(globs, wanted, rest):
            return _options(option, globs)
    return ""


def _last(key: str) -> str:
    """Return a glob for the last component of a key."""
    return next(patterns([key.rpartition(".")[2]])) if "." not in key else f"*.{key.rpartition('.')[2]}"


def _apart(globs: Sequence[str], names: Collection[str], others: Collection[str]) -> bool:
    if len(globs) > MOST_GLOBS:
        return False
    from ckptfix.names.globs import Globs

    made = Globs(globs)
    return all(map(made.match, names)) and not any(map(made.match, others))


def _options(option: str, globs: Sequence[str]) -> str:
    return " ".join(f"{option} {word(glob)}" for glob in globs)


_ALIGNED = frozenset({"stack", "unstack"})
"""Operations that keep each tensor whole: right for codes of any scheme if their companions get the same ones."""

_BLOCKWISE = frozenset({"concat", "split", "transpose"})
"""Operations that are right if codes and scales have the same dimensions, and each scale covers whole blocks."""

_LOOSE = frozenset({"activation scale", "state"})
"""Roles of tensors without which codes mean the same weights."""


def lone(checkpoint: Checkpoint, at: str, gone: Iterable[str]) -> list[str]:
    """Return the keys of `gone` without which codes that stay would mean other weights: scales, zero points, tables."""
    roles = quantization_of(checkpoint).roles
    names = {join(at, key): key for key in gone} if roles else {}
    rows = ((key, *roles[name]) for name, key in names.items() if name in roles)
    return [key for key, role, weight in rows if role not in _LOOSE and weight.codes not in names]


def refuse_lone(checkpoint: Checkpoint, at: str, gone: Iterable[str]) -> None:
    """Refuse to leave out what codes need that stay.

    Raises:
        Refused: the output would have other weights.
    """
    for key in lone(checkpoint, at, gone):
        name = join(at, key)
        what = described(name, *quantization_of(checkpoint).roles[name])
        message = f"{what}: without it, the codes are other weights"
        hint = "`ckptfix convert --dequantize` writes plain weights, and they can be matched"
        raise Refused(message, path=checkpoint.path, where=name, hint=hint)


def refuse_apart(checkpoint: Checkpoint, at: str, steps: Sequence[tuple[tuple[str, ...], Sequence[Any]]]) -> None:
    """Refuse operations on codes unless their companions get the same operations.

    Args:
        at: address of the state dict.
        steps: keys of tensors that are transformed together, and the operations (`names.operations.Operation`).

    Raises:
        Refused: the weights would change.
    """
    roles = quantization_of(checkpoint).roles if steps else {}
    if not roles:
        return
    entries = {entry.name: entry for entry in checkpoint.entries_at(at)}
    done = {tuple(join(at, key) for key in keys): operations for keys, operations in steps}
    place = {name: (names, index) for names in done for index, name in enumerate(names)}
    for names, operations in done.items():
        wrong = [name for name in names if name in roles]
        if not wrong or all(one.name in ("drop", "tie", "untie") for one in operations):
            continue
        weight = roles[wrong[0]][1]
        weights = [roles[name][1] for name in names if name in roles]
        whole = len(wrong) == len(names) and all(_goes_along(weight, place, entries) for weight in weights)
        if whole and _same_way(weights, done, place, entries):
            continue
        said = " | ".join(map(str, operations)) or "a new shape"
        message = f"{described(wrong[0], *roles[wrong[0]])}: `{said}` on it but not on its companions"
        message += " changes the weights"
        hint = f"these belong together: {', '.join(weight.names)}; match it to a model with the same quantization"
        raise Refused(message, path=checkpoint.path, where=wrong[0], hint=hint)


def _goes_along(
    weight: Quantized, place: Mapping[str, tuple[tuple[str, ...], int]], entries: Mapping[str, TensorEntry]
) -> bool:
    """Return whether all tensors that belong to a weight change too."""
    return weight.codes is not None and all(name in place for name in weight.names if name in entries)


def _same_way(
    weights: Sequence[Quantized],
    done: Mapping[tuple[str, ...], Sequence[Any]],
    place: Mapping[str, tuple[tuple[str, ...], int]],
    entries: Mapping[str, TensorEntry],
) -> bool:
    """Return whether codes and companions get the same operations in the same order, and blocks stay whole."""
    first = weights[0]
    steps = done[place[first.names[0]][0]]
    texts = tuple(map(str, steps))
    blockwise = not {one.name for one in steps} <= _ALIGNED
    if blockwise and not {one.name for one in steps} <= _ALIGNED | _BLOCKWISE:
        return False
    ratios: set[tuple[int, ...]] = set()
    for weight in weights:
        assert weight.codes is not None
        order = place[weight.codes][1]
        for name in weight.names:
            around, index = place[name]
            if tuple(map(str, done[around])) != texts or index != order or len(around) != len(weights):
                return False
        if blockwise:
            codes = entries[weight.codes].shape
            for name in weight.names[1:]:
                shape = entries[name].shape
                even = len(shape) == len(codes) and all(
                    part and not whole % part for whole, part in zip(codes, shape, strict=True)
                )
                if not even:
                    return False
                ratios.add(tuple(whole // part for whole, part in zip(codes, shape, strict=True)))
    # The sizes of a split differ in proportion between codes and scales, so one text cannot state both.
    if any(one.name == "split" and one.numbers("sizes") for one in steps):
        return False
    return len(ratios) <= 1

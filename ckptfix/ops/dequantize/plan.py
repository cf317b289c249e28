"""The plan of a dequantization: the plain weights of a checkpoint, and the tensors that it no longer needs."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count

from ckptfix.checkpoint import Checkpoint, Drop, Edit, OutputFile, Put, Rename, Storage, TensorEntry, same_place
from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.quantization import Quantized
from ckptfix.dataclass import dataclass
from ckptfix.errors import KeyConflict, Refused
from ckptfix.formats import format_of
from ckptfix.ops import quantized
from ckptfix.ops.audit.promise import Promise, listed
from ckptfix.ops.dequantize.layout import Layout, Parts, numbers, plain
from ckptfix.ops.dequantize.own import own_tensors
from ckptfix.ops.dequantize.settings import COMFY, OTHERS, Settings, object_of, settings_of, without
from ckptfix.ops.dequantize.table import DECODERS, REASONS
from ckptfix.urls import as_path
from ckptfix.words import plural, some

DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32",
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
}  # fmt: skip
"""Names of the dtypes that weights can be dequantized to."""

UNUSED = "activation scale"
"""The role of companions that a plain weight does not need."""


def dtype_of(name: str | None) -> str | None:
    """Return the dtype that a user calls `name`; None for that of each scheme.

    Raises:
        Refused: it is not one of `DTYPES`.
    """
    if name is None:
        return None
    found = DTYPES.get(name.lower().removeprefix("torch."))
    if found is None:
        raise Refused(f"cannot dequantize to {name!r}", hint="choose bf16, fp16 or fp32")
    return found


@dataclass(frozen=True, slots=True)
class Opened:
    """A quantized weight with its layout.

    Attributes:
        used: the tensors that the plain weight is computed from, codes first.
        gone: other tensors that belong to it.
    """

    weight: Quantized
    layout: Layout
    parts: Parts
    used: tuple[TensorEntry, ...]
    gone: tuple[TensorEntry, ...]


def opened(checkpoint: Checkpoint, weight: Quantized, settings: Settings, *, checks: bool = True) -> Opened:
    """Return the layout of a quantized weight; at most a few numbers of it are read.

    Args:
        checks: read and check the numbers that only the computation needs.

    Raises:
        Refused: its scheme is not computed, or its tensors do not fit together.
    """
    first = weight.names[0]
    reason = REASONS.get(weight.scheme.id)
    if reason is None and weight.codes is None:
        reason = "its codes are in another file; name the folder or the index of all shards"
    if reason is not None or weight.codes is None:
        hint = "dequantize it with the library that wrote it"
        raise Refused(f"{weight.label} is known but not dequantized: {reason}", where=first, hint=hint)
    entries = checkpoint.once(_by_name)
    codes = entries[weight.codes]
    if checkpoint.byteorder != "little":
        hint = "convert it to safetensors first"
        raise Refused("quantized weights are read from little-endian files only", where=codes.name, hint=hint)
    beside = checkpoint.once(_by_place)[codes.at]
    parts = Parts(weight, codes, beside, settings, checks=checks)
    for name in weight.names:
        if name in entries and not entries[name].has_data:
            raise Refused("the file holds no data for it", where=name)
    if checks:
        refuse_comfy(parts)
    layout = DECODERS[weight.scheme.id](parts)
    own = [(role, entries[name]) for role, name in weight.companions if name in entries]
    used = (codes, *codes.parts, *(entry for role, entry in own if role != UNUSED))
    return Opened(weight, layout, parts, used, tuple(entry for role, entry in own if role == UNUSED))


COMFY_PLAIN = frozenset({"float8_e4m3fn", "float8_e5m2", "int8_tensorwise"})
"""ComfyUI's formats whose weights are codes times scales, in the order of the weight."""

MOST_COMFY = 1 << 16
"""The limit in bytes of ComfyUI's statement about a weight."""


def refuse_comfy(parts: Parts) -> None:
    """Raise `Refused` for a weight that ComfyUI stores in the order of a kernel, or rotated.

    Its names and shapes are those of another scheme: the scales of nvfp4 and mxfp8 are in the order of cuBLAS, and the
    first code of nvfp4 is in the high bits (comfy_kitchen/tensor/nvfp4.py, mxfp8.py, int8.py).
    """
    entry = parts.of_module("comfy_quant")
    stated: Mapping[str, object] = parts.settings.of_comfy(parts.stem.rpartition(".")[0])
    if entry is not None and entry.numel <= MOST_COMFY:
        stated = object_of(numbers(entry).tobytes().decode("utf-8", "replace"))
    if entry is None and not stated:
        return
    name = stated.get("format")
    rotated = any(value for key, value in stated.items() if key in ("convrot", "rotation"))
    if name not in COMFY_PLAIN or rotated:
        how = "rotated" if rotated else "in the order of a kernel"
        hint = "use the file that was quantized"
        raise parts.wrong(f"ComfyUI stored it as {name}, {how}, which is not dequantized", hint=hint)


def _by_name(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in checkpoint.entries}


def _by_place(checkpoint: Checkpoint) -> dict[str, dict[str, TensorEntry]]:
    found: dict[str, dict[str, TensorEntry]] = {}
    for entry in checkpoint.entries:
        found.setdefault(entry.at, {})[entry.key] = entry
    return found


@dataclass(frozen=True, slots=True)
class Dequantization:
    """The plan of a dequantization.

    Attributes:
        puts: address of codes -> the plain weight, under its own key.
        made: address of each tensor of a weight that is computed from it -> that weight.
        unused: addresses of tensors that belong to a weight and are left out.
        weights: the weights with their layouts.
        settings: the quantization settings beside the checkpoint.
    """

    puts: Mapping[str, TensorEntry]
    made: Mapping[str, Sequence[TensorEntry]]
    unused: tuple[str, ...]
    weights: tuple[Opened, ...]
    settings: Settings

    @property
    def written(self) -> dict[str, tuple[str, str]]:
        """Address of codes -> key and dtype of the plain weight."""
        return {name: (put.key, put.dtype) for name, put in self.puts.items()}

    @property
    def companions(self) -> list[str]:
        """Addresses of the scales, zeros and other companions, which the output lacks."""
        return [*(name for name in self.made if name not in self.puts), *self.unused]

    def applied(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Return the tensors of a state dict, with plain weights instead of codes and companions.

        Raises:
            KeyConflict: a plain weight has the key of another tensor.
        """
        gone = {*self.made, *self.unused}
        kept = {entry.key for entry in entries if entry.name not in gone}
        made: list[TensorEntry] = []
        for entry in entries:
            put = self.puts.get(entry.name)
            if put is not None and put.key in kept:
                raise KeyConflict("the plain weight would get the key of another tensor", where=put.name, pairs=())
            if put is not None or entry.name not in gone:
                made.append(put or entry)
        return made

    def edits(self) -> list[Edit]:
        """Return the edits that keep the object of a checkpoint."""
        edits: list[Edit] = []
        for at in dict.fromkeys(put.at for put in self.puts.values()):
            puts = {codes: put for codes, put in self.puts.items() if put.at == at}
            keys = {codes: _key(codes, at) for codes in puts}
            edits.append(Put(at, {keys[codes]: put for codes, put in puts.items()}))
            names = tuple(_key(name, at) for name in self.companions if _is_at(name, at))
            if names:
                edits.append(Drop(at, names))
            renamed = {keys[codes]: put.key for codes, put in puts.items() if keys[codes] != put.key}
            if renamed:
                edits.append(Rename(at, "state_dict", renamed))
        return edits

    def pairs(self, pairs: Mapping[str, str]) -> dict[str, str]:
        """Return the metadata of a file without what describes only codes."""
        return {key: value for key, value in pairs.items() if key != COMFY}

    def around(self, checkpoint: Checkpoint, files: Sequence[OutputFile]) -> list[OutputFile]:
        """Return the companion files of a folder, with config.json as for a plain model, and without other settings."""
        config = quantized.json_beside(checkpoint, quantized.CONFIG)
        made: list[OutputFile] = []
        for file in files:
            name = as_path(file.path).name
            if name == quantized.CONFIG and config:
                text = json.dumps(without(config), indent=2, ensure_ascii=False) + "\n"
                made.append(OutputFile.of(file.path, [text.encode()], along=True))
            elif name not in OTHERS:
                made.append(file)
        return made

    def promise(self, promise: Promise, entries: Sequence[TensorEntry]) -> Promise:
        """Return a promise that lists the tensors in `entries` as made into plain weights, or as left out."""
        out = set(self.unused)
        kept = [entry for entry in entries if entry.name not in out]
        others = [*promise.others, *(entry for entry in entries if entry.name in out)]
        gone = {entry.storage.identity for entry in others if entry.storage is not None}
        return replace(
            promise,
            kept=kept,
            storages=[storage for storage in promise.storages if storage.identity not in gone],
            others=others,
            made=self.made,
            reported=frozenset((*promise.reported, *out)),
            names_stay=False,
        )

    def lines(self, *, folder: bool) -> list[str]:
        """Return what was done in words.

        Args:
            folder: the output is a folder with a config.json of its own.
        """
        counts: dict[tuple[str, str], int] = {}
        for row in self.weights:
            to = self.puts[row.used[0].name].dtype
            counts[row.weight.label, to] = counts.get((row.weight.label, to), 0) + 1
        lines = [f"dequantized {plural(number, 'weight')} to {to}: {label}" for (label, to), number in counts.items()]
        if self.companions:
            lines.append(f"left out with them: {some(self.companions)}")
        if self.settings.rows and not folder:
            lines.append("remove the quantization settings from the config.json that you use with the output")
        return lines


def _free(key: str, keys: Collection[str]) -> str:
    """Return a key of a storage that is not among `keys`."""
    return next(made for number in count(1) if (made := f"{key}-{number}") not in keys)


def _key(name: str, at: str) -> str:
    return name[len(join(at, "")) :] if at else name


def _is_at(name: str, at: str) -> bool:
    return name.startswith(join(at, "")) if at else True


def with_ties(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that lists the tensors under every key, also those that metadata ties to another."""
    entries = tuple(listed(checkpoint))
    if len(entries) == len(checkpoint.entries):
        return checkpoint
    tied = format_of(checkpoint).ties(checkpoint)
    kept = {key: value for key, value in checkpoint.metadata.items() if key not in tied}
    return replace(checkpoint, load_entries=lambda: entries, metadata=kept)


def dequantized(
    checkpoint: Checkpoint, to: str | None, at: str | None = None, *, parallel: bool = True
) -> Dequantization:
    """Plan plain weights instead of all quantized ones.

    Args:
        to: their dtype; that of each scheme's own code by default.
        at: address of the only state dict to change.
        parallel: compute each weight on threads.

    Raises:
        Refused: there are none, or one of them cannot be computed.
    """
    checkpoint = with_ties(checkpoint)
    settings = settings_of(checkpoint)
    optimizer = {state.at for state in checkpoint.state_dicts if state.optimizer}
    whole = own_tensors(entry for entry in checkpoint.entries if entry.at not in optimizer)
    rows = (*quantized.quantization_of(checkpoint).weights, *whole)
    at_of = {entry.name: entry.at for entry in checkpoint.entries}
    everywhere = rows
    rows = tuple(row for row in rows if at is None or at_of.get(row.names[0]) == at)
    if not rows and everywhere:
        first = everywhere[0].names[0]
        message = f"{plural(len(everywhere), 'quantized weight')} of the file: none is in the state dict to write"
        hint = "torch.ao packs weight and bias in a tuple (_packed_params), for its own quantized modules"
        raise Refused(message, where=first, hint=hint)
    if not rows:
        raise Refused("there are no quantized weights to dequantize", hint="leave out --dequantize")
    weights = tuple(opened(checkpoint, row, settings) for row in rows)
    puts: dict[str, TensorEntry] = {}
    made: dict[str, list[TensorEntry]] = {}
    taken: set[tuple[str, str]] = set()
    shared: dict[object, Storage] = {}
    keys = {entry.storage.key for entry in checkpoint.entries if entry.storage is not None}
    gone = {entry.name for row in weights for entry in (*row.used, *row.gone)}
    stay = (entry for entry in checkpoint.entries if entry.name not in gone)
    used = {entry.storage.identity for entry in stay if entry.storage is not None}
    for row in weights:
        # Weights are tied if they are computed from the same tensors, and not if only their codes share a storage.
        place = (row.layout.shape, *(same_place(entry) or entry.name for entry in row.used))
        put = plain(row.layout, row.parts, row.used, to, shared.get(place), parallel=parallel)
        assert put.storage is not None
        if place not in shared:
            storage = put.storage
            if storage.identity in used:
                storage = replace(storage, key=_free(storage.key, keys))
            keys.add(storage.key)
            used.add(storage.identity)
            shared[place] = storage
            put = replace(put, storage=storage)
        if (put.at, put.key) in taken:
            raise KeyConflict("two plain weights would get the same key", where=put.name, pairs=())
        taken.add((put.at, put.key))
        puts[row.used[0].name] = put
        inside = {part.name for part in row.parts.codes.parts}
        for entry in row.used:
            if entry.name not in inside:
                made.setdefault(entry.name, []).append(put)
    unused = tuple(dict.fromkeys(entry.name for row in weights for entry in row.gone if entry.name not in made))
    return Dequantization(puts, made, unused, weights, settings)

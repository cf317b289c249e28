"""fp8 codes with scales, as transformers and vLLM read them: the output of ``cast --scale``.

A matrix becomes codes of float8_e4m3fn under the same key, and a scale beside it. The numbers are those of the
libraries that read them:

- ``block``: a float32 scale for each 128 x 128, ``weight_scale_inv``, which despite its name is multiplied.
  transformers integrations/finegrained_fp8.py ``Fp8Quantize`` computes ``448 / max``, multiplies by it, and stores its
  inverse; vLLM quantization/fp8.py reads the same names.
- ``row``, ``tensor``: ``weight_scale`` in the dtype of the weight, for each row or for the tensor, with the settings of
  compressed-tensors' ``float-quantized``, which both read. compressed_tensors quantization/utils/helpers.py
  ``calculate_qparams`` and lifecycle/forward_helpers.py ``_quantize`` divide in the dtype of the weight.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckptfix.checkpoint import (
    Checkpoint,
    Derived,
    OutputFile,
    Plan,
    Storage,
    TensorEntry,
    contiguous_stride,
    same_place,
)
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import Encoding, rounded
from ckptfix.errors import KeyConflict, Refused, WouldLoseData
from ckptfix.formats import format_of, states, weights_of
from ckptfix.formats.base import Format
from ckptfix.formats.object_edit import ObjectEdit
from ckptfix.formats.safetensors.ties import TIE_KEYS
from ckptfix.io.elements import row_major
from ckptfix.io.read import read_from
from ckptfix.io.threads import Workers
from ckptfix.names.vocabulary import OUTPUT_LAYERS
from ckptfix.ops import quantized
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.dequantize.layout import Layout, Tensors, rounding_to, stream
from ckptfix.ops.dequantize.settings import without
from ckptfix.ops.rename.objects import edit_site
from ckptfix.ops.rename.transform import Row, StateDictChange
from ckptfix.ops.writing import companions
from ckptfix.urls import as_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

ScaleFor = Literal["tensor", "row", "block"]
"""The elements that share a scale: those of a tensor, of a row, or of a block of 128 x 128."""

CODES = "float8_e4m3fn"

MOST = 448.0
"""The largest number of float8_e4m3fn."""

BLOCK = 128
"""Elements of a side of a block."""

FLOATS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Dtypes of weights that are quantized, and their epsilon, the scale of a row of zeros in compressed-tensors."""

TASK = 1 << 22
"""Elements whose largest value is computed at once."""

_EMBEDDINGS = frozenset({"wte", "wpe", "shared", "relative_attention_bias"})
_HEADS = frozenset({*OUTPUT_LAYERS, "score", "classifier"})
_ROUTERS = frozenset({"gate", "router"})


def why_not_linear(key: str) -> str | None:
    """Return why readers keep the weight with this key in its dtype; None for the weight of a linear layer."""
    *module, leaf = key.split(".")
    last = module[-1] if module else ""
    if leaf != "weight":
        return "only the weight of a linear layer gets a scale"
    if last in _EMBEDDINGS or any("embed" in part for part in module):
        return "an embedding, which readers keep in its dtype"
    if last in _HEADS:
        return "an output layer, which readers keep in its dtype"
    return "a router, which readers keep in its dtype" if last in _ROUTERS else None


@dataclass(frozen=True, slots=True)
class ScaledCast:
    """The plan of a cast with scales.

    Attributes:
        plan: the files to write.
        promise: the content that the output must have.
        old: address of a weight -> its former dtype.
        scales: address of a weight -> key of its scale.
        config: the quantization settings for config.json.
        configured: whether config.json is among the files.
    """

    plan: Plan
    promise: Promise
    old: Mapping[str, str]
    scales: Mapping[str, str]
    config: Mapping[str, Any]
    configured: bool


def plan_quantization(
    checkpoint: Checkpoint,
    weights: Sequence[TensorEntry],
    how: ScaleFor,
    kept: Mapping[str, str],
    dest: str,
    target: Format,
    source: object,
) -> ScaledCast:
    """Plan `dest` as the checkpoint with fp8 codes and scales for `weights`, which are matrices.

    Args:
        kept: the addresses of other tensors -> why they are not quantized; the matrices among them are named in the
            settings.
        target: the format of the output: that of the checkpoint, or a folder for a file that is alone in one.
        source: the user's name of the checkpoint.

    Raises:
        Refused: the format is not written, or its numbers are big-endian.
        KeyConflict: a scale would get the key of another tensor.
        WouldLoseData: torch loads no fp8 from a legacy file.
    """
    hint = "run `ckptfix convert` to safetensors first"
    if not target.writes:
        raise Refused(f"{target.title} cannot get new tensors, such as scales", path=checkpoint.path, hint=hint)
    if checkpoint.byteorder != "little" and weights:
        raise Refused("scales are computed for little-endian files only", path=checkpoint.path, hint=hint)
    suffix = "_scale_inv" if how == "block" else "_scale"
    quantized_at = {entry.at for entry in weights} or {""}
    sites = {at: _site(checkpoint, at, weights, how, suffix) for at in sorted(quantized_at)}
    entries = [entry for site in sites.values() for entry in site.entries.values()]
    matrices = [entry for entry in entries if len(entry.shape) == 2 and entry.name in kept]
    config = settings(how, [entry.key.removesuffix(".weight") for entry in matrices if entry.key.endswith(".weight")])
    if states(checkpoint, "objects"):
        edit = ObjectEdit(checkpoint)
        for site in sites.values():
            edit_site(edit, site)
        plan = edit.plan(dest)
    else:
        plan = _named(checkpoint, sites[""], dest, target, source)
    files, configured = _configured(checkpoint, plan, config)
    made = {entry.name: [row for _, row in site.rows[entry.key] if row is not None]
            for site in sites.values() for entry in site.entries.values() if entry.key in site.rows}  # fmt: skip
    promise = Promise(edited=checkpoint, made=made, names_stay=False)
    scales = {entry.name: entry.key + suffix for entry in weights}
    old = {entry.name: entry.dtype for entry in weights}
    return ScaledCast(replace(plan, files=files), promise, old, scales, config, configured)


def _site(
    checkpoint: Checkpoint, at: str, weights: Sequence[TensorEntry], how: ScaleFor, suffix: str
) -> StateDictChange:
    """Return a state dict in which each of its `weights` becomes codes and a scale; tied ones stay tied."""
    views = not states(checkpoint, "objects")
    entries = {entry.key: entry for entry in weights_of(checkpoint, at, views=views)}
    taken = {entry.key for entry in weights if entry.at == at}
    made: dict[object, tuple[TensorEntry, TensorEntry]] = {}
    rows: dict[str, list[Row]] = {}
    for key, entry in entries.items():
        if key not in taken:
            continue
        if key + suffix in entries:
            raise KeyConflict("the scale would get the key of another tensor", where=join(at, key + suffix), pairs=())
        place = same_place(entry) or entry.name
        if place not in made:
            made[place] = _pair(entry, how, key + suffix)
        codes, scale = made[place]
        rows[key] = [(key, codes), (key + suffix, scale)]
    return StateDictChange(at, tuple(entries), rows, entries, {}, {})


def _pair(entry: TensorEntry, how: ScaleFor, key: str) -> tuple[TensorEntry, TensorEntry]:
    """Return the codes of a weight, and its scale."""
    codes, scale = _storages(entry, how, key)
    shape = scale_shape(entry.shape, how)
    return (
        replace(entry, storage=codes, dtype=CODES, stride=contiguous_stride(entry.shape), offset=0),
        TensorEntry(key, entry.at, scale, scale.dtype, shape, contiguous_stride(shape)),
    )


def _named(checkpoint: Checkpoint, site: StateDictChange, dest: str, target: Format, source: object) -> Plan:
    """Plan a format of keys and tensors, with the companion files of a folder."""
    output = [replace(site.entries[key] if entry is None else entry, key=name, at="")
              for key, (name, entry) in site.after()]  # fmt: skip
    written, metadata, findings = target.split_ties(output)
    names = {*format_of(checkpoint).ties(checkpoint), *TIE_KEYS}
    pairs = {**{key: value for key, value in checkpoint.metadata.items() if key not in names}, **metadata}
    plan = target.plan_write(written, dest, metadata=pairs)
    mine = {file.path for file in plan.files}
    around = [file for file in companions(checkpoint, source, dest) if file.path not in mine] if target.folder else []
    return Plan((*around, *plan.files), (*findings, *plan.findings))


def scale_shape(shape: tuple[int, ...], how: ScaleFor) -> tuple[int, ...]:
    """Return the shape of the scale of a matrix."""
    rows, width = shape
    if how == "block":
        return -(-rows // BLOCK), -(-width // BLOCK)
    return (rows, 1) if how == "row" else (1,)


def settings(how: ScaleFor, skipped: Sequence[str]) -> dict[str, Any]:
    """Return the settings of config.json.

    Args:
        skipped: modules with a matrix that is not quantized.
    """
    if how == "block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            # transformers reads the first of these names, and vLLM the second.
            "modules_to_not_convert": list(skipped),
            "ignored_layers": list(skipped),
        }
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel" if how == "row" else "tensor", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(skipped),
    }


def _configured(
    checkpoint: Checkpoint, plan: Plan, config: Mapping[str, Any]
) -> tuple[tuple[OutputFile, ...], bool]:
    """Return the files of a plan with the settings in the config.json of a folder, and whether there is one."""
    stated = quantized.json_beside(checkpoint, quantized.CONFIG)
    text = json.dumps({**without(stated), "quantization_config": dict(config)}, indent=2, ensure_ascii=False) + "\n"
    files = tuple(
        OutputFile.of(file.path, [text.encode()], along=True) if stated and _is_config(file) else file
        for file in plan.files
    )
    return files, files != plan.files


def _is_config(file: OutputFile) -> bool:
    return file.along and as_path(file.path).name == quantized.CONFIG


@dataclass(slots=True)
class _Scales:
    """The scales of a weight, computed when they are first needed.

    Attributes:
        found: the numbers that are stored, and those that the weight is multiplied by (block) or divided by.
    """

    entry: TensorEntry
    how: ScaleFor
    found: tuple[Array, Array] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self) -> tuple[Array, Array]:
        """Return the numbers that are stored, as float32, and those that are computed with.

        Raises:
            WouldLoseData: the weight has a number that is not finite.
        """
        with self.lock:
            if self.found is None:
                self.found = self._computed()
            return self.found

    def _computed(self) -> tuple[Array, Array]:
        import numpy

        rows, width = self.entry.shape
        step = max(TASK // max(width, 1) // BLOCK, 1) * BLOCK
        tensors = Tensors()
        try:
            tasks = Workers().run(partial(self._largest, tensors, step), range(0, rows, step))
            most = numpy.concatenate(list(tasks)) if rows else numpy.zeros(scale_shape((0, width), self.how))
        finally:
            tensors.close()
        if self.how == "tensor":
            most = most.max(initial=0, keepdims=True).reshape(1)
        most = most.astype(numpy.float32)
        if not numpy.isfinite(most).all():
            raise WouldLoseData("it has a number that is not finite", where=self.entry.name)
        with numpy.errstate(all="ignore"):
            if self.how == "block":
                # torch divides a number by a tensor in two steps, and the second of them may overflow for tiny blocks.
                factor = numpy.where(most > 0, numpy.float32(1) / most * numpy.float32(MOST), numpy.float32(1))
                factor = numpy.minimum(factor, numpy.finfo(numpy.float32).max)
                return (numpy.float32(1) / factor).astype(numpy.float32), factor
            scale = rounding_to(self.entry.dtype)(most / numpy.float32(MOST))
            scale = numpy.where(scale == 0, numpy.float32(FLOATS[self.entry.dtype]), scale).astype(numpy.float32)
        return scale, scale

    def _largest(self, tensors: Tensors, step: int, first: int) -> Array:
        """Return the largest absolute values of some rows: of each row, or of each block."""
        import numpy

        rows, width = self.entry.shape
        last = min(first + step, rows)
        nbytes = width * self.entry.itemsize
        made = []
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            data = tensors.rows(self.entry, start, stop, nbytes)
            block = numpy.abs(Encoding.of(self.entry.dtype, "little").decoded(data.data)).reshape(stop - start, width)
            if self.how == "block":
                columns = range(0, width, BLOCK)
                made.append(numpy.maximum.reduceat(block.max(axis=0), columns)[None] if width else block[:1])
            else:
                made.append(block.max(axis=1, initial=0)[:, None])
        return numpy.concatenate(made)


def _storages(entry: TensorEntry, how: ScaleFor, key: str) -> tuple[Storage, Storage]:
    """Return the storages of the codes and of the scale of a weight."""
    storage = entry.storage
    assert storage is not None
    scales = _Scales(entry, how)
    layout = _layout(entry, how, scales)
    codes = stream(layout, [entry], CODES, what="quantized")
    dtype = "float32" if how == "block" else entry.dtype
    length = math.prod(scale_shape(entry.shape, how)) * Encoding.of(dtype, "little").itemsize
    sources = tuple(read_from(row_major(entry, "little")))
    scale = Derived(length, partial(_stored, scales, dtype), f"{key} of {entry.key}", sources)
    return (
        Storage(f"{entry.name} codes", CODES, codes.length, storage.location, codes),
        Storage(f"{entry.name} scale", dtype, length, storage.location, scale),
    )


def _stored(scales: _Scales, dtype: str) -> Iterator[bytes]:
    import numpy

    stored, _ = scales.get()
    into = numpy.empty(stored.shape, f"u{Encoding.of(dtype, 'little').itemsize}")
    rounded(stored, dtype, into)
    yield into.tobytes()


def _layout(entry: TensorEntry, how: ScaleFor, scales: _Scales) -> Layout:
    """Return the codes of a weight as numbers that are rounded to fp8."""
    rows, width = entry.shape
    encoding = Encoding.of(entry.dtype, "little")
    nbytes = width * entry.itemsize
    near = rounding_to(entry.dtype)

    def read(tensors: Tensors, first: int, last: int) -> Sequence[Array]:
        import numpy

        data = tensors.rows(entry, first, last, nbytes)
        _, numbers = scales.get()
        if how == "tensor":
            return [data, numbers.reshape(1, 1).repeat(last - first, axis=0)]
        return [data, numbers[first:last] if how == "row" else numbers[numpy.arange(first, last) // BLOCK]]

    def compute(round_: Any, data: Array, numbers: Array) -> Array:
        import numpy

        block = encoding.decoded(numpy.ascontiguousarray(data).data).reshape(len(data), width)
        made = block * numbers.repeat(BLOCK, axis=1)[:, :width] if how == "block" else near(block / numbers)
        clipped: Array = numpy.clip(made, -MOST, MOST)
        return clipped

    group = {"tensor": (), "row": (1, width), "block": (BLOCK, BLOCK)}[how]
    return Layout(entry.key, entry.shape, CODES, 8, group, rows, width, read, compute)

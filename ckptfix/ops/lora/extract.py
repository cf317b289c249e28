"""``ckptfix.lora_extract`` and ``ckptfix.lora_resize``: adapters made from two models, or of another rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, TensorEntry, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import TARGETS
from ckptfix.errors import Refused, StrPath, file_name
from ckptfix.formats import without_optimizer
from ckptfix.io.read import Progress
from ckptfix.io.source import shares_open_files
from ckptfix.names import adapters as names_of
from ckptfix.names.globs import Globs
from ckptfix.ops import choose, quantized
from ckptfix.ops.adapter import DIFFUSERS
from ckptfix.ops.any_source import as_state_dict
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.cast import dtype_of
from ckptfix.ops.dequantize.layout import numbers
from ckptfix.ops.lora.convert import written_module
from ckptfix.ops.lora.factors import factors, refactored
from ckptfix.ops.lora.layouts import To, Writer, WrittenModule, made, plan
from ckptfix.ops.lora.merge import opened
from ckptfix.ops.lora.targets import CONV1D, has_conv1d
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out_file
from ckptfix.words import plural, some

SMALLEST = 1e-6
"""The difference of a weight, relative to it, below which it is taken for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoraExtractResult(Result):
    """An adapter that was made of a difference, or of another adapter.

    Attributes:
        to: the layout of the output.
        rank: the rank.
        energy: path of a module -> sum of the squares of its update over that of the difference.
        whole: energy of all modules together.
        left: keys of tensors that differ and are not in the output.
        config: adapter_config.json, where the layout has one.
    """

    to: str = ""
    rank: int = 0
    energy: Mapping[str, float] = field(default_factory=dict)
    whole: float = 1.0
    left: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None

    def _details(self) -> dict[str, Any]:
        return {
            "to": self.to,
            "rank": self.rank,
            "energy": self.whole,
            "modules": [{"name": name, "energy": energy} for name, energy in self.energy.items()],
            "not_extracted": list(self.left),
            "config": None if self.config is None else dict(self.config),
        }


@checks_types
@shares_open_files()
def lora_extract(
    base: StrPath,
    tuned: StrPath,
    dest: StrPath,
    *,
    rank: int,
    to: To = "peft",
    only: Sequence[str] = (),
    dtype: str | None = None,
    prefix: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> LoraExtractResult:
    """Write an adapter of rank `rank` that makes `tuned` of `base`, as nearly as one can.

    The difference of each weight is decomposed (truncated SVD), one weight at a time.

    Args:
        base, tuned: checkpoints of the same model, in any format.
        dest: for PEFT a folder, otherwise a file.
        only: globs of keys; other weights are left out.
        dtype: of the factors; by default that of the weights.
        to, prefix: as in `lora_convert`.

    Raises:
        Refused: shapes differ, a model is quantized, or no weight differs.
        CkptfixError: a file cannot be read, or `dest` cannot be written.
    """
    if rank < 1:
        raise Refused(f"the rank must be at least 1, not {rank}")
    kind = None if dtype is None else dtype_of(dtype)

    def make(path: str, dest: str) -> Draft[LoraExtractResult]:
        one, two = (as_state_dict(str(name), dest, None, stack) for name in (base, tuned))
        mine, others = (_weights(checkpoint) for checkpoint in (one, two))
        wanted = Globs(only)
        made_rows: list[WrittenModule] = []
        energy: dict[str, float] = {}
        left: list[str] = []
        sums = [0.0, 0.0]
        shared = [key for key in mine if key in others]
        if not shared:
            raise Refused("the two models have no key in common", path=file_name(tuned),
                          hint="`ckptfix match` renames the keys of one")  # fmt: skip
        conv1d = to == "peft" and has_conv1d({key: entry.shape for key, entry in mine.items()})
        for key in shared:
            turned = conv1d and key.removesuffix(".weight").rpartition(".")[2] in CONV1D
            chosen = not only or wanted.match(key)
            row = _extracted(mine[key], others[key], rank, kind, chosen=chosen, turned=turned)
            if isinstance(row, str):
                left.append(row)
            elif row is not None:
                module, kept, squares = row
                made_rows.append(module)
                energy[module.path] = kept
                sums[0] += kept * squares
                sums[1] += squares
        left += [key for key in others if key not in mine]
        if not made_rows:
            raise Refused("no weight differs", path=file_name(tuned), hint="`ckptfix diff` compares the two")
        whole = sums[0] / sums[1] if sums[1] else 1.0
        return _draft(made_rows, energy, whole, rank, to, prefix, path, dest, left, [one, two],
                      [f"extracted {plural(len(made_rows), 'module')} of rank {rank}: {whole:.2%} of the difference"],
                      base=file_name(base), settings={"fan_in_fan_out": conv1d})  # fmt: skip

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    with ExitStack() as stack:
        return carry_out_file(base, dest, make, how, others=[tuned], folder=to == "peft")


def _weights(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    site = choose.mapping(checkpoint).at
    choose.refuse_damaged(checkpoint)
    if checkpoint.byteorder != "little":
        raise Refused("it is big-endian", path=checkpoint.path, hint="convert it to safetensors first")
    entries = without_optimizer(checkpoint.entries_at(site))
    quantized.refuse(checkpoint, [row.name for row in entries], "a difference of codes is not one of weights",
                     "`ckptfix convert --dequantize` writes plain weights")  # fmt: skip
    return {row.key: row for row in entries}


def _extracted(
    one: TensorEntry, two: TensorEntry, rank: int, dtype: str | None, *, chosen: bool, turned: bool
) -> tuple[WrittenModule, float, float] | str | None:
    """Return a module with its energy and the squares of the difference; a key that is left out; None if equal.

    Args:
        turned: the weight has the inputs in its rows.
    """
    import numpy

    row = dtypes.find(one.dtype)
    if one.kind != "dense" or two.kind != "dense" or row is None or row.family != "float" or not one.has_data:
        return None
    if one.shape != two.shape:
        if not chosen:
            return one.key
        hint = "--only leaves out the weights of other sizes"
        raise Refused(f"the shapes differ: {list(one.shape)} and {list(two.shape)}", where=one.key, hint=hint)
    first, second = numbers(one), numbers(two)
    delta = second.astype(numpy.float64)
    delta -= first
    size = float(numpy.abs(delta).max(initial=0))
    if not size:
        return None
    if not numpy.isfinite(size):
        raise Refused("the difference has a number that is not finite", where=one.key)
    if not chosen or len(one.shape) < 2 or not one.key.endswith(".weight"):
        return one.key
    if size <= SMALLEST * float(numpy.abs(first).max(initial=0)):
        return None
    matrix = delta.T if turned else delta.reshape(len(delta), -1)
    made_of = factors(matrix, rank)
    squares = float(numpy.einsum("ij,ij->", matrix, matrix))
    path = one.key.removesuffix(".weight")
    kind = dtype or (one.dtype if one.dtype in ("float16", "bfloat16", "float32") else "float32")
    kernel = one.shape[2:]
    used = made_of.up.shape[1]
    inputs = one.shape[:1] if turned else one.shape[1:]
    down = made("down", made_of.down.reshape(used, *inputs), kind)
    up = made("up", made_of.up.reshape(len(matrix), used, *(1,) * len(kernel)), kind)
    return WrittenModule("", path, down, up, 1.0), made_of.energy, squares


@checks_types
@shares_open_files()
def lora_resize(
    source: StrPath,
    dest: StrPath,
    *,
    rank: int,
    dtype: str | None = None,
    alpha: float | None = None,
    adapter: str | None = None,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> LoraExtractResult:
    """Write the adapter in `source` with another rank, in its own layout; each module keeps its scale.

    Args:
        dest: for PEFT a folder, otherwise a file.
        dtype: of the factors; by default their own.

    Raises:
        Refused: it is not a plain LoRA, or its layout is not written.
        CkptfixError: it cannot be read, or `dest` cannot be written.
    """
    import numpy

    if rank < 1:
        raise Refused(f"the rank must be at least 1, not {rank}")
    kind = None if dtype is None else dtype_of(dtype)
    if kind is not None and kind not in TARGETS:
        raise Refused(f"cannot write {kind}")

    def make(path: str, dest: str) -> Draft[LoraExtractResult]:
        found = opened(path, at=at, name=adapter, alpha=alpha)
        if found.layout not in ("peft", "kohya", "diffusers", "comfy"):
            raise Refused(f"the layout of {found.layout} is not written", path=path,
                          hint="run `ckptfix lora convert` first, and resize its output")  # fmt: skip
        to: To = found.layout
        rows: list[WrittenModule] = []
        energy: dict[str, float] = {}
        sums = [0.0, 0.0]
        for row in found.modules.values():
            if row.method != "LoRA":
                what = row.method or "a difference"
                raise Refused(f"{row.name} is {what}, and only LoRA has another rank", path=path)
            old = written_module(row, row.path, to)
            if old.magnitude is not None:
                raise Refused(f"{row.name} is DoRA, whose magnitude fits only its own update", path=path)
            first, second = numbers(old.up).astype(numpy.float64), numbers(old.down).astype(numpy.float64)
            up, down = first.reshape(len(first), -1), second.reshape(len(second), -1)
            new = refactored(up, down, rank)
            squares = float(numpy.square(numpy.linalg.norm(numpy.linalg.qr(up)[1] @ down)))
            energy[row.name] = new.energy
            sums[0] += new.energy * squares * old.scale**2
            sums[1] += squares * old.scale**2
            width = new.up.shape[1]
            rows.append(replace(
                old,
                up=made("up", new.up.reshape(old.up.shape[0], width, *old.up.shape[2:]), kind or old.up.dtype),
                down=made("down", new.down.reshape(width, *old.down.shape[1:]), kind or old.down.dtype),
            ))  # fmt: skip
        whole = sums[0] / sums[1] if sums[1] else 1.0
        tensors = {names_of.container_of(key)[1]: entry for key, entry in found.whole.items()}
        line = f"resized {plural(len(rows), 'module')} to rank {rank}: {whole:.2%} of the update"
        pairs = {key: value for key, value in found.checkpoint.metadata.items() if key != DIFFUSERS}
        if "ss_network_dim" in pairs:
            pairs["ss_network_dim"] = str(rank)
            alphas = {one.scale * one.rank for one in rows}
            pairs["ss_network_alpha"] = f"{alphas.pop():g}" if len(alphas) == 1 else "Dynamic"
        own = {key: value for key, value in found.config.items() if key not in _OF_RANK} if to == "peft" else {}
        return _draft(rows, energy, whole, rank, to, None, path, dest, [], [found.checkpoint], [line],
                      base=found.base_model, tensors=tensors, pairs=pairs, settings=own)  # fmt: skip

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    from ckptfix.formats.target import of_suffix

    return carry_out_file(source, dest, make, how, folder=of_suffix(str(dest)) is None)


_OF_RANK = frozenset({"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"})
"""Settings of an adapter of PEFT that another rank changes; rsLoRA divides by the root of it."""


def _draft(
    rows: Sequence[WrittenModule],
    energy: Mapping[str, float],
    whole: float,
    rank: int,
    to: To,
    prefix: str | None,
    path: str,
    dest: str,
    left: Sequence[str],
    read: Iterable[Checkpoint],
    lines: Sequence[str],
    *,
    base: str | None,
    tensors: Mapping[str, TensorEntry] | None = None,
    pairs: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Draft[LoraExtractResult]:
    writer = Writer(to, prefix)
    writer.write(rows, tensors or {}, base)
    if writer.config is not None:
        writer.config |= settings or {}
    done, format = plan(writer, path, dest, {"format": "pt", **(pairs or {})})
    worst = min(energy, key=lambda name: energy[name])
    said = [*lines, f"least: {energy[worst]:.2%} of {worst}"]
    if left:
        said.append(f"different, and not in the adapter: {some(left)}")
    return Draft(
        result=partial(
            LoraExtractResult, to=to, rank=rank, energy=energy, whole=whole, left=tuple(left), config=writer.config
        ),
        format=format,
        plan=replace(done, holds=(done.holds, tuple(read))),
        promise=Promise(),
        read=tuple(mark for one in read for mark in one.files),
        lines=said,
        findings=done.findings,
        folder=to == "peft",
    )

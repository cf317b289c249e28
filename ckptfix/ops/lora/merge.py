"""``ckptfix.lora_merge``: adapters merged into their base, in constant memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import (
    Checkpoint,
    Drop,
    Edit,
    FileVersion,
    OutputFile,
    Plan,
    Put,
    Rename,
    SetMetadata,
    Storage,
    TensorEntry,
    contiguous_stride,
    dtypes,
    same_place,
)
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.errors import KeyConflict, Refused, StrPath, about, file_name
from ckptfix.formats import FORMATS, format_of, located, open_checkpoint, states, without_optimizer
from ckptfix.formats.object_edit import ObjectEdit
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.names import adapters as names_of
from ckptfix.names.globs import Globs
from ckptfix.names.vocabulary import is_output_layer
from ckptfix.ops import adapter as reading
from ckptfix.ops import choose, quantized
from ckptfix.ops.adapter import Adapter, AdapterModule, target_of
from ckptfix.ops.any_source import takes_any_source
from ckptfix.ops.audit.promise import Promise, listed
from ckptfix.ops.cast import dtype_of, plan_cast
from ckptfix.ops.dequantize.plan import Dequantization, dequantized
from ckptfix.ops.lora.records import KEY, digest_of_adapter, digest_of_base, recorded, with_rows
from ckptfix.ops.lora.targets import CONV1D, LEVELS, Base, Place, Targets, has_conv1d, refuse_others, resolved
from ckptfix.ops.lora.updates import EPSILON, Merged, Update, misfit, size_of, stream
from ckptfix.ops.rename.objects import edit_site
from ckptfix.ops.rename.transform import StateDictChange
from ckptfix.ops.writing import (
    Draft,
    Result,
    WriteOptions,
    carry_out,
    companions,
    existing,
    plan_edits,
    refuse_destination,
)
from ckptfix.urls import as_path
from ckptfix.words import plural, some

PREFIX = "base_model.model."
"""The beginning of a name of the base in a model of PEFT."""

TYING = "ensure_weight_tying"
"""The setting of PEFT with which an adapter of the embedding is one of the output layer too."""

TIED = "tie_word_embeddings"
"""The setting of config.json with which transformers makes the output layer the embedding again."""

HEAD_OF: Mapping[str, str] = {
    "model.embed_tokens.weight": "lm_head.weight",
    "transformer.wte.weight": "lm_head.weight",
    "gpt_neox.embed_in.weight": "embed_out.weight",
}
"""Key of an embedding -> that of the output layer that is tied to it."""


@dataclass(frozen=True, slots=True)
class Given:
    """An adapter to merge, with its strength."""

    name: str
    adapter: Adapter
    scale: float
    digest: str


@dataclass(frozen=True, slots=True)
class Merging:
    """The plan of a merge.

    Attributes:
        puts: key in the file -> the tensor that replaces it.
        added: key -> a tensor that the base lacks.
        renamed: key in the file -> key in the output, where they differ.
        dropped: keys in the file of the adapter's own tensors.
        merged: plain keys of the tensors with updates.
        replaced: plain keys of those that the adapter replaces.
        used: key in the file -> the tensors that are made of it.
        left: what of the adapters is not merged, because of ``only``.
        apart: plain keys of output layers that are no longer tied to the embedding, which an adapter changes.
    """

    at: str
    puts: dict[str, TensorEntry] = field(default_factory=dict)
    added: dict[str, TensorEntry] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, None] = field(default_factory=dict)
    merged: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    used: dict[str, list[TensorEntry]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoraMergeResult(Result):
    """The result of a merge of adapters.

    Attributes:
        adapters: of each adapter its file, its layout, the strength, and the digest of its tensors.
        merged: keys of the tensors with updates, and their dtype.
        replaced: keys of the tensors that an adapter replaces, or adds.
        left: names of modules that were not merged on request.
        recorded: whether the metadata of the output records the merge.
    """

    adapters: tuple[Mapping[str, Any], ...] = ()
    merged: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    recorded: bool = False

    def _details(self) -> dict[str, Any]:
        return {
            "adapters": [dict(row) for row in self.adapters],
            "merged": [{"name": name, "dtype": dtype} for name, dtype in self.merged.items()],
            "replaced": [{"name": name, "dtype": dtype} for name, dtype in self.replaced.items()],
            "not_merged": list(self.left),
            "recorded": self.recorded,
        }


@checks_types
@shares_open_files()
def lora_merge(
    base: StrPath,
    adapters: Sequence[StrPath],
    dest: StrPath,
    *,
    scale: float | Sequence[float] = 1.0,
    dtype: str | None = None,
    alpha: float | None = None,
    adapter: str | None = None,
    only: Sequence[str] = (),
    dequantize: bool = False,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> LoraMergeResult:
    """Write `base` to `dest` with adapters merged into its weights.

    Each weight is read once, in blocks: ``W + scale * (up @ down)`` in float64, rounded to float32 and then to its
    dtype. Everything else is copied. If `base` is a folder and `dest` has no suffix of a file, the output is a folder
    with the configuration and the tokenizer.

    Args:
        base: a file or folder of any format. Without `adapters` it holds an adapter too (``base_layer`` and
            ``lora_A.default``), and that one is merged.
        adapters: files or folders of adapters, of any layout; adapter_config.json is read beside them.
        scale: strength of all adapters, or of each.
        dtype: cast the floating-point tensors of the output, such as ``"bfloat16"``; by default each keeps its own.
        alpha: the alpha of adapters that state none.
        adapter: the name of the adapter, in a file with several.
        only: globs; only modules of the adapters whose names match are merged.
        dequantize: write plain weights instead of quantized ones, and merge into those.
        at: address of the state dict in `base`.
        force: replace `dest`, and merge an adapter that the metadata of `base` records as merged.

    Raises:
        Refused: an adapter is for another base, was merged already, or cannot be merged; or the base is quantized.
        WouldLoseData: a number leaves the range of float16.
        CkptfixError: a file cannot be read, or `dest` cannot be written.
    """
    paths = [file_name(one) for one in adapters]
    shares = [float(scale)] * max(len(paths), 1) if isinstance(scale, int | float) else [float(one) for one in scale]
    if len(shares) != max(len(paths), 1):
        raise Refused(f"{plural(len(shares), 'scale')} for {plural(max(len(paths), 1), 'adapter')}")
    if not all(map(math.isfinite, shares)):
        raise Refused("a scale is not finite")
    if dtype is not None:
        dtype_of(dtype)
    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    wanted = Globs(only)

    @takes_any_source()
    def merged(source: StrPath, dest: StrPath, *, at: str | None = None, **options: Any) -> LoraMergeResult:
        return carry_out(source, dest, partial(make, here=at), WriteOptions(**options), folder=_folder_of(base, dest))

    def make(checkpoint: Checkpoint, dest: str, here: str | None) -> Draft[LoraMergeResult]:
        options = {"alpha": alpha, "name": adapter}
        if paths:
            site = choose.mapping(checkpoint, here).at
            given = [_given(path, share, options) for path, share in zip(paths, shares, strict=True)]
        else:
            own = reading.read(checkpoint, at=here, **options)  # type: ignore[arg-type]
            if not own.base:
                hint = "name the base first: lora merge BASE ADAPTER"
                raise Refused("it holds no base model beside the adapter", hint=hint)
            refuse_unusable(own)
            site = own.at
            given = [Given(checkpoint.path, own, shares[0], digest_of_adapter(own))]
        if not force:
            _refuse_again(checkpoint, given)
        change = _change(checkpoint, site, dtype, dequantize=dequantize)
        done = plan_merge(checkpoint, site, given, dtype, wanted, change)
        return _draft(checkpoint, base, dest, done, given, change)

    refuse_destination(dest, paths, how, folder=bool(_folder_of(base, dest)))
    return merged(base, dest, at=at, **how.keywords())


def merge_own(source: StrPath, dest: StrPath, **options: Any) -> LoraMergeResult:
    """Write `source`, which holds a base and an adapter, with the adapter merged: `lora_merge` as a step of a chain."""
    return lora_merge(source, (), dest, **options)


def _folder_of(base: StrPath, dest: StrPath) -> bool | None:
    """Return True where the output is a folder because the base is one that holds a model in a single file."""
    if not found_as(file_name(base)):
        return None
    path = located(base)
    alone = path != file_name(base) and FORMATS.with_suffix(file_name(dest)) is None and found_as(path) == "file"
    return True if alone and not path.endswith(".json") else None


def opened(path: StrPath, **options: Any) -> Adapter:
    """Read the adapter in a file or folder, and refuse one that cannot be computed with.

    Raises:
        CkptfixError: it cannot be read, or is refused.
    """
    name = located(existing(path))
    with about(name):
        found = reading.read(open_checkpoint(name), **options)
        refuse_unusable(found, own_ranks=bool(options.get("own_ranks")))
    return found


def refuse_unusable(found: Adapter, *, own_ranks: bool = False) -> None:
    """Raise `Refused` for an adapter that cannot be computed with.

    Raises:
        Refused: as `adapter.refuse_missing`; or a tensor has no numbers, or the file is big-endian.
        DamagedFile: the file is damaged.
    """
    reading.refuse_missing(found, own_ranks=own_ranks)
    choose.refuse_damaged(found.checkpoint)
    tensors = [entry for row in found.modules.values() for entry in row.tensors.values()]
    for entry in (*tensors, *found.whole.values()):
        row = dtypes.find(entry.dtype)
        if not entry.has_data or entry.kind != "dense" or row is None or row.family != "float":
            raise Refused(f"its numbers cannot be computed with: {entry.kind} {entry.dtype}", where=entry.name)
        if not entry.numel:
            raise Refused("it has no elements", where=entry.name)
    for one in found.modules.values():
        only_bias = one.method is None and "difference" not in one.tensors
        if not only_bias and size_of(one) is None:
            shapes = ", ".join(f"{role} {list(entry.shape)}" for role, entry in one.tensors.items() if role != "alpha")
            raise Refused(f"the tensors of {one.name} do not fit together: {shapes}")
    if found.checkpoint.byteorder != "little":
        raise Refused("adapters are read from little-endian files only", hint="convert it to safetensors first")


def _given(path: str, scale: float, options: Mapping[str, Any]) -> Given:
    found = opened(path, **options)
    return Given(path, found, scale, digest_of_adapter(found))


def _refuse_again(checkpoint: Checkpoint, given: Sequence[Given]) -> None:
    before = {row.get("adapter"): row for row in recorded(checkpoint)}
    for one in given:
        if one.digest in before:
            message = f"{one.name} is merged into it already, with the strength {before[one.digest].get('scale')}"
            hint = "merge it into the original base; --force merges it again"
            raise Refused(message, path=checkpoint.path, hint=hint)


def _change(checkpoint: Checkpoint, at: str, dtype: str | None, *, dequantize: bool) -> Dequantization | None:
    if dequantize:
        return dequantized(checkpoint, None if dtype is None else dtype_of(dtype), at)
    return None


def plan_merge(
    checkpoint: Checkpoint,
    at: str,
    given: Sequence[Given],
    dtype: str | None,
    only: Globs,
    change: Dequantization | None,
) -> Merging:
    """Plan the tensors of the output.

    Raises:
        Refused: an adapter does not fit.
    """
    if checkpoint.byteorder != "little":
        raise Refused("weights are merged in little-endian files only", hint="convert the base to safetensors first")
    choose.refuse_damaged(checkpoint)
    done = Merging(at)
    own = [one.adapter for one in given if one.adapter.checkpoint is checkpoint]
    mine = {entry.key for one in own for row in one.modules.values() for entry in row.tensors.values()}
    mine |= {entry.key for one in own for entry in one.whole.values()}
    entries = {row.key: row for row in without_optimizer(tuple(one for one in listed(checkpoint) if one.at == at))}
    plain: dict[str, str] = {}
    for key in entries:
        if key in mine:
            done.dropped[key] = None
            continue
        name = _plain(key, own) if own else key
        if own and ".original_module." in key and name.removeprefix(PREFIX) in {
            one.removeprefix(PREFIX) for row in own for one in row.whole
        }:
            done.dropped[key] = None
            continue
        if name in plain:
            raise KeyConflict("two tensors would get one key", where=join(at, key), pairs=((name, (plain[name], key)),))
        plain[name] = key
        if name != key:
            done.renamed[key] = name
    if own and done.renamed:
        plain = {name.removeprefix(PREFIX): key for name, key in plain.items()}
        done.renamed.update({key: name for name, key in plain.items() if name != key})
    if change is not None:
        plain = {put.key if (put := change.puts.get(entries[key].name)) is not None and name == key else name: key
                 for name, key in plain.items()}  # fmt: skip
    view = {name: _seen(entries[key], change) for name, key in plain.items()}
    base = Base.of({name: entry for name, entry in view.items() if entry is not None})
    updates: dict[str, list[Update]] = {}
    wholes: dict[str, tuple[TensorEntry, Given]] = {}
    try:
        for one in given:
            _resolve(one, base, only, updates, wholes, done)
    except Refused:
        # Codes have other shapes and names than the weights that they stand for.
        if change is None:
            _refuse_codes(checkpoint, entries)
        raise
    if not updates and not wholes:
        raise Refused("nothing is to be merged: no module of an adapter matches", hint="--only takes globs of names")
    touched = [plain[name] for name in (*updates, *wholes) if name in plain]
    if change is None:
        _refuse_codes(checkpoint, {key: entries[key] for key in touched})
    to = None if dtype is None else dtype_of(dtype)
    apart = _apart(checkpoint, view, updates, wholes, given)
    done.apart.extend(apart)
    _put(checkpoint, done, entries, plain, view, updates, wholes, to, change)
    for head, embedding in apart.items():
        if head not in plain:
            table = view[embedding]
            assert table is not None
            storage = _copied(table, to or table.dtype, "of the output layer")
            stride = contiguous_stride(table.shape)
            done.added[head] = TensorEntry(head, at, storage, storage.dtype, table.shape, stride)
    return done


def _apart(
    checkpoint: Checkpoint,
    view: Mapping[str, TensorEntry | None],
    updates: Mapping[str, Sequence[Update]],
    wholes: Mapping[str, tuple[TensorEntry, Given]],
    given: Sequence[Given],
) -> dict[str, str]:
    """Return output layers that are tied to an embedding which an adapter changes alone, each with that embedding.

    In the model that PEFT trained, the output layer is the embedding of the base, without the adapter
    (peft/tuners/tuners_utils.py, ``tie_word_embeddings``), unless ``ensure_weight_tying`` is set.
    """
    config = quantized.json_beside(checkpoint, quantized.CONFIG)
    if not config or config.get(TIED, True) is False or any(one.adapter.config.get(TYING) for one in given):
        return {}
    made: dict[str, str] = {}
    for name in (*updates, *wholes):
        head, own = HEAD_OF.get(name, ""), view.get(name)
        if not head or own is None or head in updates or head in wholes:
            continue
        other = view.get(head)
        is_tied = other is None or (same_place(other) is not None and same_place(other) == same_place(own))
        if is_tied and (name not in wholes or wholes[name][0].shape == own.shape):
            made[head] = name
    return made


def _refuse_codes(checkpoint: Checkpoint, entries: Mapping[str, TensorEntry]) -> None:
    names = [entry.name for entry in entries.values()]
    hint = "--dequantize writes plain weights, and merges into those"
    quantized.refuse(checkpoint, names, "an update cannot be added to codes", hint)


def _plain(key: str, own: Sequence[Adapter]) -> str:
    """Return the key that a tensor of the base has without the adapter's layer around it."""
    name = names_of.plain_key(key)
    for level in LEVELS:
        module, found, leaf = name.rpartition(f"{level}.")
        if found and any(module in one.modules for one in own):
            return f"{module}.{leaf}"
    return name


def _seen(entry: TensorEntry, change: Dequantization | None) -> TensorEntry | None:
    """Return a tensor of the base as updates see it: plain, if it is dequantized; None if only codes need it."""
    if change is None:
        return entry
    if entry.name in change.puts:
        return change.puts[entry.name]
    return None if entry.name in change.made or entry.name in change.unused else entry


def _resolve(
    one: Given,
    base: Base,
    only: Globs,
    updates: dict[str, list[Update]],
    wholes: dict[str, tuple[TensorEntry, Given]],
    done: Merging,
) -> None:
    """Add the updates of an adapter to those of the others."""
    adapter = one.adapter
    modules = [row for name, row in adapter.modules.items() if not only or only.match(name)]
    done.left.extend(name for name in adapter.modules if only and not only.match(name))
    with about(adapter.path):
        targets = resolved(adapter, base, modules)
        refuse_others(adapter, targets, len(modules))
        if one.scale != 1 and any(row.is_dora for row in modules):
            hint = "merge it with the strength 1"
            raise Refused("DoRA has a magnitude, to which a strength does not apply", hint=hint)
        turned = _turned(adapter, modules, targets, base)
        for row in modules:
            for place in targets.places[row.name]:
                total = sum(other.rows for other in targets.places[row.name])
                _add(one, row, place, base, updates, total, turned=turned.get(row.name, False))
        for key, entry in targets.whole.items():
            if only and not only.match(entry.key):
                done.left.append(entry.key)
                continue
            if key in wholes:
                raise Refused(f"two adapters replace {key}", hint="merge one of them")
            wholes[key] = entry, one


def _turned(
    adapter: Adapter, modules: Sequence[AdapterModule], targets: Targets, base: Base
) -> Mapping[str, bool]:
    """Return for each module whether the base has the inputs in its rows (`transformers.Conv1D`).

    Sizes decide. For a square weight the other modules do, or else the configuration: PEFT itself sets
    ``fan_in_fan_out`` by the class of each layer, whatever the configuration states.
    """
    found: dict[str, bool] = {}
    squares: list[str] = []
    for row in modules:
        size = size_of(row)
        if size is None or row.is_embedding:
            continue
        shapes = [base.entries[place.key].shape for place in targets.places[row.name]]
        if size[0] == size[1]:
            squares += [row.name] if all(tuple(shape) == size for shape in shapes) else []
            continue
        whole = all(place.rows == base.entries[place.key].shape[0] for place in targets.places[row.name])
        found[row.name] = whole and any(tuple(shape) == size[::-1] for shape in shapes)
    turned = any(found.values()) if found else bool(adapter.config.get("fan_in_fan_out"))
    if not turned and squares and has_conv1d({key: entry.shape for key, entry in base.entries.items()}):
        return found | {name: target_of(adapter.modules[name]) in CONV1D for name in squares}
    return found | dict.fromkeys(squares, turned)


def _add(
    one: Given,
    module: AdapterModule,
    place: Place,
    base: Base,
    updates: dict[str, list[Update]],
    total: int,
    *,
    turned: bool,
) -> None:
    """Add the update of one module in one place.

    Args:
        total: rows of all places of the module.
        turned: the weight has the inputs in its rows.

    Raises:
        Refused: its size is not that of the weight.
    """
    entry = base.entries[place.key]
    assert module.scale is not None
    scale = module.scale * one.scale
    dora = EPSILON if one.adapter.layout in ("kohya", "comfy") else 0.0
    if module.method is not None or "difference" in module.tensors:
        shape = entry.shape
        update = Update(module, scale, place.first, place.rows, place.start, shape, turned, dora)
        if not _fits(size_of(module), update, total):
            raise Refused(misfit(module, shape), where=place.key, hint="it is an adapter for another base")
        if module.is_dora and (place.rows, place.start) != (shape[0], 0):
            raise Refused(f"{module.name} is a part of {place.key}: DoRA of a part is not merged")
        if module.is_dora:
            _refuse_magnitude(update)
        updates.setdefault(place.key, []).append(update)
    for role in ("added bias", "bias difference"):
        if role in module.tensors:
            key = base.bias_of(place.key)
            if key not in base.entries:
                raise Refused(f"the base has no {key}, to which {role} of {module.name} would be added")
            tensor = module.tensors[role]
            if (place.first, place.rows, place.start) != (0, *entry.shape[:1], 0):
                raise Refused(f"{module.name} is a part of {place.key}: {role} of a part is not merged")
            if tensor.shape != base.entries[key].shape:
                raise Refused(misfit(module, base.entries[key].shape), where=key)
            part = replace(module, method=None, tensors={"difference": tensor})
            strength = scale if role == "added bias" else one.scale
            shape = (*tensor.shape, 1)
            updates.setdefault(key, []).append(Update(part, strength, 0, tensor.shape[0], 0, shape))


def _fits(size: tuple[int, int] | None, update: Update, total: int) -> bool:
    """Return whether an update has the columns of the weight, and the rows of its places together."""
    if size is None or not update.shape:
        return False
    rows, width = size[::-1] if update.turned else size
    return (rows, width) == (total, update.width)


def _refuse_magnitude(update: Update) -> None:
    from ckptfix.ops.lora.updates import by_rows

    entry = update.module.tensors["magnitude"]
    rows = by_rows(update, entry)
    fits = entry.numel == update.shape[0] if rows else entry.numel > 0 and entry.numel == update.shape[1]
    if not fits:
        raise Refused(f"the magnitude of {update.module.name} does not fit: {list(entry.shape)}")


def _put(
    checkpoint: Checkpoint,
    done: Merging,
    entries: Mapping[str, TensorEntry],
    plain: Mapping[str, str],
    view: Mapping[str, TensorEntry | None],
    updates: Mapping[str, Sequence[Update]],
    wholes: Mapping[str, tuple[TensorEntry, Given]],
    to: str | None,
    change: Dequantization | None,
) -> None:
    """Add the tensors of the output to the plan."""
    if change is not None:
        done.puts.update({key: put for key, row in entries.items() if (put := change.puts.get(row.name)) is not None})
        done.renamed.update({key: put.key for key, put in done.puts.items() if put.key != key})
        gone = {*change.made, *change.unused}
        spare = gone.difference(change.puts)
        done.dropped.update({key: None for key, row in entries.items() if row.name in spare})
        for address, plains in change.made.items():
            done.used[address] = list(plains)
    if to is not None:
        cast = plan_cast(checkpoint, to, at=done.at, keep=[_literal(key) for key in (*done.puts, *done.dropped)],
                         allow_unmatched=True)  # fmt: skip
        done.puts.update({key: put for key, row in entries.items() if (put := cast.puts.get(row.name)) is not None})
    known: dict[object, Storage] = {}
    ties = _ties(entries)
    for name, rows in updates.items():
        key = plain[name]
        entry = view[name]
        assert entry is not None
        replaced = wholes.get(name)
        start = entry if replaced is None else replace(replaced[0], key=entry.key, at=entry.at)
        if start.shape != entry.shape:
            raise Refused(f"an adapter replaces {name} by another shape, and adds to it", where=name)
        dtype = to or entry.dtype
        place = same_place(entry) or entry.name
        others = [other for other in ties.get(same_place(entries[key]), ()) if other != key] if change is None else []
        others = [other for other in others if done.renamed.get(other, other) not in done.apart]
        sources = [*_own(start, change, entries[key]), *_tensors(rows)]
        used = _matrix(start)
        data = stream(Merged(used, rows), dtype, sources)
        first = entries[key].storage
        assert first is not None
        storage = known.setdefault((place, name), Storage(first.key, dtype, data.length, first.location, data))
        put = replace(entry, dtype=dtype, storage=storage, stride=contiguous_stride(entry.shape), offset=0, detail="")
        for one in (key, *others):
            done.puts[one] = put if one == key else replace(put, key=one)
            done.used.setdefault(entries[one].name, []).append(put)
        if replaced is not None:
            del done.used[entries[key].name]
        done.merged[name] = dtype
    for name, (entry, _) in wholes.items():
        if name in updates:
            continue
        known_key = plain.get(name)
        dtype = to or (entries[known_key].dtype if known_key is not None else entry.dtype)
        storage = _copied(entry, dtype)
        made = TensorEntry(name, done.at, storage, dtype, entry.shape, contiguous_stride(entry.shape))
        if known_key is None:
            done.added[name] = made
        else:
            done.puts[known_key] = replace(made, key=known_key)
        done.replaced[name] = dtype


def _literal(key: str) -> str:
    return "".join(f"[{one}]" if one in "*?[" else one for one in key)


def _ties(entries: Mapping[str, TensorEntry]) -> dict[object, list[str]]:
    found: dict[object, list[str]] = {}
    for key, entry in entries.items():
        place = same_place(entry)
        if place is not None:
            found.setdefault(place, []).append(key)
    return found


def _own(start: TensorEntry, change: Dequantization | None, entry: TensorEntry) -> list[TensorEntry]:
    """Return the tensors of the base that a merged weight is made of."""
    if change is None or entry.name not in change.puts:
        return [start]
    return [start, entry]


def _matrix(entry: TensorEntry) -> TensorEntry:
    return entry if len(entry.shape) > 1 else replace(entry, shape=(*entry.shape, 1), stride=(*entry.stride, 1))


def _tensors(rows: Sequence[Update]) -> Iterator[TensorEntry]:
    for one in rows:
        yield from one.module.tensors.values()


def _copied(entry: TensorEntry, dtype: str, what: str = "of the adapter") -> Storage:
    """Return the storage of a tensor that is new to the base, or replaces one of it; `what` is a part of its key."""
    assert entry.storage is not None
    used = _matrix(entry) if entry.shape else replace(entry, shape=(1, 1), stride=(1, 1))
    data = stream(Merged(used, ()), dtype, [entry])
    return Storage(f"{entry.storage.key} {what}", dtype, data.length, "cpu", data)


def _draft(
    checkpoint: Checkpoint,
    source: StrPath,
    dest: str,
    done: Merging,
    given: Sequence[Given],
    change: Dequantization | None,
) -> Draft[LoraMergeResult]:
    """Return the draft of the output."""
    format = format_of(checkpoint)
    has_record = states(checkpoint, "metadata")
    rows = [
        {"adapter": one.digest, "base": digest_of_base(checkpoint.entries_at(done.at)), "scale": one.scale}
        for one in given
    ]
    record = {KEY: with_rows(recorded(checkpoint), rows)} if has_record else {}
    alone = bool(_folder_of(source, dest))
    to = str(as_path(dest) / as_path(checkpoint.path).name) if alone else dest
    along = list(companions(checkpoint, source, dest)) if alone else []
    if done.added:
        plan = _with_added(checkpoint, done, to, record)
    else:
        plan = plan_edits(checkpoint, list(_edits(done, record)), to)
    if not alone and format.folder and change is not None:
        along = [file for file in plan.files if file.along]
        plan = replace(plan, files=tuple(file for file in plan.files if not file.along))
        along = change.around(checkpoint, along)
    elif change is not None:
        along = change.around(checkpoint, along)
    files, untied = _untied(checkpoint, (*along, *plan.files), done)
    plan = replace(plan, files=files, holds=(plan.holds, given))
    made = done.used
    dropped = [entry for entry in listed(checkpoint) if entry.at == done.at and entry.key in done.dropped]
    reported = frozenset(entry.name for entry in dropped if entry.name not in made)
    lines = [f"merged {plural(len(done.merged), 'weight')} with {_said(given)}"]
    if done.replaced:
        lines.append(f"from the adapter: {some(list(done.replaced))}")
    if change is not None:
        lines += change.lines(folder=bool(along))
    if done.apart:
        lines.append(f"{some(done.apart)} is the embedding of the base, as in the model that was trained")
    if done.left:
        lines.append(f"not merged, as requested: {some(done.left)}")
    if untied:
        lines.append(untied)
    if not has_record:
        lines.append(f"{format.title} has no place for a record: a second merge of the same adapter is not noticed")
    promise = Promise(edited=checkpoint, made=made, puts=_puts_of(done, checkpoint, made), names_stay=False,
                      reported=reported)  # fmt: skip
    return Draft(
        result=partial(
            LoraMergeResult,
            adapters=tuple(
                {"path": one.name, "layout": one.adapter.layout, "scale": one.scale, "digest": one.digest}
                for one in given
            ),
            merged=done.merged,
            replaced=done.replaced,
            left=tuple(done.left),
            recorded=has_record,
        ),
        format=checkpoint.format,
        plan=plan,
        promise=promise,
        lines=lines,
        findings=plan.findings,
        read=_read(given),
        folder=alone,
    )


def _read(given: Sequence[Given]) -> tuple[FileVersion, ...]:
    return tuple(mark for one in given for mark in one.adapter.checkpoint.files)


def _puts_of(
    done: Merging, checkpoint: Checkpoint, made: Mapping[str, Sequence[TensorEntry]]
) -> dict[str, TensorEntry]:
    """Return the tensors that replace others and are not in `made`: those that are only cast."""
    return {join(done.at, key): put for key, put in done.puts.items() if join(done.at, key) not in made}


def _said(given: Sequence[Given]) -> str:
    texts = []
    for one in given:
        strength = "" if one.scale == 1 else f" at the strength {one.scale:g}"
        texts.append(f"{as_path(one.name).name} ({one.adapter.described()}){strength}")
    return "; ".join(texts)


def _edits(done: Merging, record: Mapping[str, str]) -> Iterator[Edit]:
    if done.puts:
        yield Put(done.at, done.puts)
    if done.dropped:
        yield Drop(done.at, tuple(done.dropped))
    renamed = {key: name for key, name in done.renamed.items() if key not in done.dropped}
    if renamed:
        yield Rename(done.at, "state_dict", renamed)
    if record:
        yield SetMetadata(dict(record))


def _with_added(checkpoint: Checkpoint, done: Merging, dest: str, record: Mapping[str, str]) -> Plan:
    """Plan an output with keys that the base lacks."""
    entries = {row.key: row for row in listed(checkpoint) if row.at == done.at}
    rows: dict[str, list[tuple[str, TensorEntry | None]]] = {}
    for key in entries:
        if key in done.dropped:
            rows[key] = []
        elif key in done.puts or key in done.renamed:
            rows[key] = [(done.renamed.get(key, key), done.puts.get(key))]
    last = [key for key in entries if key not in done.dropped][-1]
    rows[last] = [*rows.get(last, [(last, None)]), *done.added.items()]
    site = StateDictChange(done.at, tuple(entries), rows, entries, {}, {})
    if states(checkpoint, "objects"):
        edit = ObjectEdit(checkpoint)
        edit_site(edit, site)
        return edit.plan(dest)
    format = format_of(checkpoint)
    output = [replace(site.entries[key] if entry is None else entry, key=name, at="")
              for key, (name, entry) in site.after()]  # fmt: skip
    written, metadata, findings = format.split_ties(output)
    pairs = {**{key: value for key, value in checkpoint.metadata.items() if key not in format.ties(checkpoint)},
             **metadata, **record}  # fmt: skip
    if format.plan_like is not None:
        plan = format.plan_like(checkpoint, written, dest, pairs)
    else:
        plan = format.plan_write(written, dest, metadata=pairs)
    mine = {file.path for file in plan.files}
    around = format.companions(checkpoint, dest) if format.folder else ()
    return Plan((*(file for file in around if file.path not in mine), *plan.files), (*findings, *plan.findings))


def _untied(
    checkpoint: Checkpoint, files: Sequence[OutputFile], done: Merging
) -> tuple[tuple[OutputFile, ...], str | None]:
    """Return the files with a config.json that does not tie an output layer which the adapter replaces.

    transformers would make it the embedding again.
    """
    config = quantized.json_beside(checkpoint, quantized.CONFIG)
    changed = (*done.replaced, *done.merged, *done.apart)
    heads = [name for name in changed if is_output_layer(name)]
    if not heads or config.get(TIED, True) is False or not config:
        return tuple(files), None
    text = json.dumps({**config, TIED: False}, indent=2, ensure_ascii=False) + "\n"
    made = tuple(
        OutputFile.of(file.path, [text.encode()], along=True)
        if file.along and as_path(file.path).name == quantized.CONFIG else file
        for file in files
    )  # fmt: skip
    if made != tuple(files):
        return made, f"config.json has {TIED}: false now, because {heads[0]} is not the embedding"
    return made, f"set {TIED} to false in the config.json that you use with it: {heads[0]} is not the embedding"

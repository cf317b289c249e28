"""Modules of an adapter under the names of another code, which may fuse them or have them apart.

A split keeps the rank: each part gets its rows of `up`, and the same `down`. A fusion has the ranks of all parts
together: `up` is block-diagonal, with the scales in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import TensorEntry
from ckptfix.errors import Refused
from ckptfix.names import diffusion, tables
from ckptfix.names.rulefile import Rules
from ckptfix.names.rules import NameRule
from ckptfix.ops.adapter.litgpt import PARTS
from ckptfix.ops.dequantize.layout import numbers
from ckptfix.ops.lora.layouts import To, WrittenModule, made
from ckptfix.words import some

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]


def in_names_of(
    modules: Sequence[WrittenModule], to: To, like: Mapping[str, TensorEntry] | None
) -> list[WrittenModule]:
    """Return the modules under the names that a layout uses for Flux, SD3 and others; the same for other models.

    Args:
        like: key -> tensor of the base, whose names are used instead of those that are usual for the layout.

    Raises:
        Refused: a part of a fused module is missing, or its rows are unknown.
    """
    paths = [row.path for row in modules]
    known = None if like is None else [tail for key in like for _, tail in diffusion.tails(key.removesuffix(".weight"))]
    original = diffusion.original_models(paths)
    other = diffusion.other_models(paths) if not original else []
    to_original = to in ("kohya", "comfy") if known is None else bool(diffusion.original_models(known))
    if original and not to_original:
        return [_of_diffusers(new, to) for row in modules for new in _split(row, original)]
    if not original and other and to_original:
        if known is not None:
            other = [name for name in other if name in diffusion.original_models(known)] or other
        other = [name for name in other if name != "OpenCLIP" or known is not None]
        if len(other) > 1 and any(_row(other, row.path) for row in modules):
            hint = "--like BASE names the base, whose keys say so"
            raise Refused(f"the names are those that diffusers has for {some(other)}, and each has others", hint=hint)
        return _fused(modules, other, like)
    return list(modules)


def _of_diffusers(module: WrittenModule, to: To) -> WrittenModule:
    """Return a module as one of diffusers' transformer, if its container is only called a U-Net."""
    if to == "diffusers" and module.container in ("lora_unet", "unet", "diffusion_model", ""):
        return replace(module, container="transformer")
    return module


def of_transformers(
    modules: Sequence[WrittenModule], layout: str, config: Mapping[str, Any]
) -> list[WrittenModule] | None:
    """Return the modules of an adapter of torchtune or LitGPT under the names of transformers.

    The rows of queries and keys get the order that transformers' rotary embedding has, by the tables of `rename`.

    Args:
        config: config.json of the base.

    Returns:
        None if no table is for this kind of model.
    """
    kind = config.get("model_type")
    pair = layout, tables.ecosystem("transformers")
    rows = [row for row in tables.shipped() if row.names == pair and kind in row.types]
    if not rows:
        return None
    rules = rows[0].rules()
    return [_by_rules(module, rules, config) for module in modules]


def _by_rules(module: WrittenModule, rules: Rules, config: Mapping[str, Any]) -> WrittenModule:
    key, number = f"{module.path}.weight", 0
    front, _, last = module.path.rpartition(".")
    for old, new in rules.names.items():
        made_key = NameRule(old, new).apply(key)
        if made_key is not None:
            return replace(module, path=made_key.removesuffix(".weight"))
    fused = f"{front}.qkv.weight" if last in PARTS else ""
    for rule in rules.tensors:
        for asked in (key, fused):
            if rule.new is None or not asked or len(rule.old.names) > 1:
                continue
            number = PARTS.index(last) if asked == fused and len(rule.new.names) == len(PARTS) else 0
            made_key = NameRule(rule.old.names[0], rule.new.names[number]).apply(asked)
            if made_key is None:
                continue
            path = made_key.removesuffix(".weight")
            if any(one.name == "rope" for one in rule.operations):
                heads = "num_attention_heads" if path.endswith("q_proj") else "num_key_value_heads"
                count = config.get(heads, config.get("num_attention_heads"))
                module = _rotated(module, count)
            return replace(module, path=path)
    raise Refused(f"the table of names has no line for {module.path}", hint="--like BASE of the same model")


def _rotated(module: WrittenModule, heads: object) -> WrittenModule:
    """Return a module with the rows of each head in two halves, instead of in pairs."""
    rows = module.up.shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise Refused(f"{module.path} has {rows} rows, which are not those of {heads} heads")

    def turned(entry: TensorEntry) -> TensorEntry:
        array = numbers(entry)
        parts = array.reshape(heads, rows // heads // 2, 2, -1)
        return made(entry.key, parts.swapaxes(1, 2).reshape(array.shape), entry.dtype, [entry])

    magnitude = None if module.magnitude is None else turned(module.magnitude)
    return replace(module, up=turned(module.up), magnitude=magnitude)


def _row(models: Iterable[str], path: str) -> diffusion.Row | None:
    return next((row for model in models if (row := diffusion.other_row(model, path)) is not None), None)


def _split(module: WrittenModule, models: Sequence[str]) -> list[WrittenModule]:
    rows = (diffusion.original_row(model, module.path) for model in models if model != "OpenCLIP")
    row = next((one for one in rows if one is not None), None)
    if row is None:
        return [module]
    names = row.others
    _refuse_products(module, len(names) > 1 or row.row.halves)
    if len(names) == 1:
        return [replace(_turned(module) if _has_halves(row, module) else module, path=names[0])]
    sizes = _sizes(len(names), module.up.shape[0], module.down.shape[1])
    if sizes is None:
        raise Refused(f"{module.path}: its {module.up.shape[0]} rows are not those of {' + '.join(names)}")
    up = numbers(module.up)
    magnitude = None if module.magnitude is None else numbers(module.magnitude).reshape(-1)
    new, first = [], 0
    for name, size in zip(names, sizes, strict=True):
        part = made(name, up[first : first + size], module.up.dtype, [module.up])
        held = None
        if magnitude is not None and module.magnitude is not None:
            held = made(name, magnitude[first : first + size], module.magnitude.dtype, [module.magnitude])
        new.append(replace(module, path=name, up=part, magnitude=held))
        first += size
    return new


def _refuse_products(module: WrittenModule, cut: bool) -> None:
    if module.products is not None and cut:
        raise Refused(f"{module.path} is {module.products.method}, and the other names have its rows in other tensors",
                      hint="merge it with lora merge")  # fmt: skip


def _has_halves(row: diffusion.Row, module: WrittenModule) -> bool:
    return row.row.halves and module.up.shape[0] == 2 * module.down.shape[1]


def _turned(module: WrittenModule) -> WrittenModule:
    """Return a module with the two halves of its rows the other way round."""
    import numpy

    def turn(entry: TensorEntry) -> TensorEntry:
        array = numbers(entry)
        half = len(array) // 2
        return made(entry.key, numpy.concatenate([array[half:], array[:half]]), entry.dtype, [entry])

    if module.magnitude is not None:
        raise Refused(f"{module.path} is DoRA, and its rows have another order in the other names")
    return replace(module, up=turn(module.up))


def _sizes(count: int, rows: int, width: int) -> list[int] | None:
    """Return the rows of each part: equal ones, but for what is fused with query, key and value."""
    if count == 4:
        return [width, width, width, rows - 3 * width] if rows > 3 * width else None
    return [rows // count] * count if rows % count == 0 else None


def _fused(
    modules: Sequence[WrittenModule], models: Sequence[str], like: Mapping[str, TensorEntry] | None
) -> list[WrittenModule]:
    new: list[WrittenModule] = []
    groups: dict[str, dict[int, WrittenModule]] = {}
    rows: dict[str, diffusion.Row] = {}
    for module in modules:
        row = _row(models, module.path)
        if row is None or row.part is None:
            new.append(module)
        elif len(row.others) == 1:
            _refuse_products(module, row.row.halves)
            new.append(replace(_turned(module) if _has_halves(row, module) else module, path=row.original))
        else:
            _refuse_products(module, True)
            groups.setdefault(row.original, {})[row.part] = module
            rows[row.original] = row
    return new + [_joined(path, rows[path], parts, like) for path, parts in groups.items()]


def _joined(
    path: str, row: diffusion.Row, parts: Mapping[int, WrittenModule], like: Mapping[str, TensorEntry] | None
) -> WrittenModule:
    import numpy

    first = next(iter(parts.values()))
    if any(one.magnitude is not None for one in parts.values()):
        raise Refused(f"{first.path} is DoRA, and the parts of {path} are not joined then")
    count = len(row.others)
    sizes: dict[int, int] = {number: one.up.shape[0] for number, one in parts.items()}
    for number in range(min(count, 3)):
        sizes.setdefault(number, next((sizes[other] for other in (1, 2, 0) if other in sizes), first.down.shape[1]))
    if len(sizes) < count:
        entries = (entry for key, entry in (like or {}).items() if key.removesuffix(".weight").endswith(path))
        whole = next(entries, None)
        if whole is None:
            hint = "--like BASE names the base, whose sizes say so"
            raise Refused(f"{path} has the rows of {row.others[3]} too, which the adapter lacks", hint=hint)
        sizes[3] = whole.shape[0] - sum(sizes.values())
    downs, ups, start = [], [], 0
    rank = sum(one.rank for one in parts.values())
    for number in range(count):
        one = parts.get(number)
        block = numpy.zeros((sizes[number], rank))
        if one is not None:
            block[:, start : start + one.rank] = numbers(one.up).astype(numpy.float64) * one.scale
            downs.append(numbers(one.down))
            start += one.rank
        ups.append(block)
    if len({array.shape[1:] for array in downs}) > 1:
        raise Refused(f"the parts of {path} have different inputs")
    used = list(parts.values())
    down = made(path, numpy.concatenate(downs), first.down.dtype, [one.down for one in used])
    up = made(path, numpy.concatenate(ups), first.up.dtype, [one.up for one in used])
    return WrittenModule(first.container, path, down, up, 1.0)

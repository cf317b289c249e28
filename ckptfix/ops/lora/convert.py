"""``ckptfix.lora_convert``: the same adapter in the layout of another library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import OutputFile, TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused, StrPath, about
from ckptfix.formats import without_optimizer
from ckptfix.io.read import Progress
from ckptfix.io.source import shares_open_files
from ckptfix.names import adapters as names_of
from ckptfix.names.adapters import TITLES
from ckptfix.ops import choose
from ckptfix.ops.adapter import CONFIG, DIFFUSERS, Adapter, AdapterModule
from ckptfix.ops.any_source import as_state_dict
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.dequantize.layout import numbers
from ckptfix.ops.lora.layouts import Products, To, Writer, WrittenModule, as_diffusers, made, plan, with_dots
from ckptfix.ops.lora.merge import opened, refuse_unusable
from ckptfix.ops.lora.peft_lokr import peft_lokr
from ckptfix.ops.lora.renaming import in_names_of, of_transformers
from ckptfix.ops.lora.targets import Base, refuse_others, resolved
from ckptfix.ops.quantized import json_beside
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out_file, companions
from ckptfix.urls import as_path
from ckptfix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoraConvertResult(Result):
    """The result of a conversion of an adapter.

    Attributes:
        layout: of the input.
        to: of the output.
        modules: name of a module in the input -> its first key in the output, without the suffix.
        folded: number of modules whose scale became a part of a factor.
        config: adapter_config.json, where the layout has one.
    """

    layout: str = ""
    to: str = ""
    modules: Mapping[str, str]
    folded: int = 0
    config: Mapping[str, Any] | None = None

    def _details(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "to": self.to,
            "modules": [{"name": name, "new": new} for name, new in self.modules.items()],
            "folded": self.folded,
            "config": None if self.config is None else dict(self.config),
        }


@checks_types
@shares_open_files()
def lora_convert(
    source: StrPath,
    dest: StrPath,
    *,
    to: To,
    like: StrPath | None = None,
    prefix: str | None = None,
    alpha: float | None = None,
    adapter: str | None = None,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> LoraConvertResult:
    """Write the adapter in `source` to `dest` in another layout, with the same update for each weight.

    kohya and ComfyUI state alpha for each module, PEFT in adapter_config.json; for diffusers the scale becomes a part
    of ``lora_B``. Pairs of the metadata (``ss_*``) are kept.

    Args:
        dest: a file; for PEFT a folder, with adapter_config.json.
        to: ``"peft"``, ``"kohya"``, ``"diffusers"`` or ``"comfy"``.
        like: the base: its keys say where the dots of a path of kohya are, and what the modules are called.
        prefix: the beginning of the names of the output, where the input does not say which part they belong to.
        alpha, adapter, at: as in `lora_merge`, of the adapter.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Raises:
        Refused: the layout has no form for a module; or the dots in a path are ambiguous, and `like` is not given.
        CkptfixError: a file cannot be read, or `dest` cannot be written.
    """
    if to not in ("peft", "kohya", "diffusers", "comfy"):
        raise Refused(f"no layout called {to!r}", hint="layouts are peft, kohya, diffusers and comfy")

    def make(path: str, dest: str) -> Draft[LoraConvertResult]:
        found = opened(path, at=at, name=adapter, alpha=alpha, own_ranks=True)
        entries, config = (None, {}) if like is None else _base(like, stack)
        moved = None
        if found.layout in ("torchtune", "litgpt"):
            plain = [written_module(row, row.path, to) for row in found.modules.values()]
            moved = of_transformers(plain, found.layout, config or found.config)
        names = _paths(found, entries if moved is None else None, to)
        writer = Writer(to, prefix)
        rows = moved or [written_module(row, names[row.name], to) for row in found.modules.values()]
        rows = _of_one_part(in_names_of(rows, to, entries), to)
        whole = {names_of.container_of(key)[1]: entry for key, entry in found.whole.items()}
        with about(path):
            writer.write(rows, whole, found.base_model)
        if writer.config is not None and found.layout == "peft":
            writer.config = _kept(found, writer.config)
        pairs = {key: value for key, value in found.checkpoint.metadata.items() if key != DIFFUSERS}
        done, format = plan(writer, path, dest, {"format": "pt", **pairs})
        lines = [f"converted {plural(len(rows), 'module')}: {TITLES[found.layout]} -> {TITLES[to]}"]
        lines += [f"corrected: {sentence}" for sentence in found.wrong.values()] if to == "peft" else []
        if writer.folded:
            lines.append(f"alpha became a part of lora_B of {plural(writer.folded, 'module')}")
        if moved is not None:
            lines.append("the names, and the order of rows, are those of transformers")
        elif found.layout in ("diffusers-old", "torchtune", "litgpt", "mlx", "nemo") and to == "peft":
            lines.append("the names of the modules are as they were; --like BASE with its config.json gives those of "
                         "transformers to an adapter of torchtune or LitGPT")  # fmt: skip
        promise = _promise(found, writer.tensors)
        return Draft(
            result=partial(
                LoraConvertResult,
                layout=found.layout,
                to=to,
                modules={row.name: names[row.name] for row in found.modules.values()},
                folded=writer.folded,
                config=writer.config,
            ),
            format=format,
            plan=replace(
                done, files=(*_along(found, source, dest, to), *done.files), holds=(done.holds, found.checkpoint)
            ),
            promise=promise,
            read=found.checkpoint.files,
            lines=lines,
            findings=done.findings,
            folder=to == "peft",
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    with ExitStack() as stack:
        return carry_out_file(source, dest, make, how, others=[] if like is None else [like], folder=to == "peft")


def _kept(found: Adapter, made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that an adapter of PEFT has, with what its tensors say otherwise."""
    if not found.config:
        return dict(made)
    config = {**made, **found.config}
    if "rank" in found.wrong:
        config |= {key: made[key] for key in ("r", "rank_pattern")}
    if "targets" in found.wrong or not config.get("target_modules"):
        config["target_modules"] = made["target_modules"]
    return config


def _along(found: Adapter, source: StrPath, dest: str, to: To) -> list[OutputFile]:
    """Return copies of the files beside an adapter in a folder, such as its model card, for an output in a folder."""
    if to != "peft":
        return []
    rows = companions(found.checkpoint, source, dest)
    return [row for row in rows if as_path(row.path).name != CONFIG]


def is_convertible(found: Adapter, to: To) -> bool:
    """Return whether `lora_convert` needs nothing but the file to write this layout."""
    return written_paths(found, to) is not None


def written_paths(found: Adapter, to: To) -> list[str] | None:
    """Return the paths of the modules as `lora_convert` writes them; None if it needs more than the file."""
    try:
        refuse_unusable(found, own_ranks=True)
        names = _paths(found, None, to)
        rows = in_names_of([written_module(row, names[row.name], to) for row in found.modules.values()], to, None)
        writer = Writer(to)
        for module in rows:
            writer.refuse(module)
            if to != "peft":
                writer.container(module)
    except CkptfixError:
        return None
    if len(found.names) > 1 or (found.whole and to != "peft"):
        return None
    return [row.path for row in rows]


def is_known(paths: Sequence[str], to: To) -> bool:
    """Return whether loaders of a layout know modules with these paths: of diffusion models, under the names it uses.

    ComfyUI, and what reads kohya's files, have the names of the original code; for the U-Net of Stable Diffusion,
    kohya has those of diffusers too.
    """
    return bool(paths) and all(_KNOWN[to].match(path) for path in paths)


_UNET = r"(?:down_blocks|up_blocks)[.]\d+[.]|mid_block[.]"
_ORIGINAL = r"(?:input_blocks|output_blocks|middle_block|double_blocks|single_blocks|joint_blocks)[.]\d+[.]"
_TEXT = r"text_model[.]encoder[.]layers[.]\d+[.]"
_KNOWN: Mapping[To, re.Pattern[str]] = {
    "peft": re.compile(""),
    "diffusers": re.compile(rf"{_TEXT}|{_UNET}|(?:single_)?transformer_blocks[.]\d+[.]"),
    "comfy": re.compile(rf"{_TEXT}|{_ORIGINAL}"),
    "kohya": re.compile(rf"{_TEXT}|{_ORIGINAL}|{_UNET}"),
}
"""Layout -> the beginnings of paths that its loaders know."""


def _promise(found: Adapter, written: Sequence[TensorEntry]) -> Promise:
    """Return the content of the output: each tensor of the adapter, or what is made of it; alphas are stated anew."""
    tensors = [entry for row in found.modules.values() for role, entry in row.tensors.items() if role != "alpha"]
    tensors += found.whole.values()
    made: dict[str, list[TensorEntry]] = {}
    for entry in tensors:
        place = {(span.path, span.offset) for span in _spans(entry)}
        made[entry.name] = [new for new in written if place & {(span.path, span.offset) for span in _spans(new)}]
    chosen = {entry.name for entry in tensors}
    others = [entry for entry in found.checkpoint.entries if entry.name not in chosen]
    return Promise(tensors, others=others, made=made, reported=frozenset(entry.name for entry in others),
                   names_stay=False)  # fmt: skip


def _spans(entry: TensorEntry) -> Sequence[Any]:
    from ckptfix.io.elements import row_major
    from ckptfix.io.read import read_from

    return tuple(read_from(row_major(entry, "little")))


def written_module(module: AdapterModule, path: str, to: To) -> WrittenModule:
    """Return a module as it is written.

    Raises:
        Refused: it is not a plain LoRA.
    """
    if module.method in ("LoHa", "LoKr"):
        return _of_products(module, path, to)
    if module.method != "LoRA":
        raise Refused(f"{module.name} is a difference, and only LoRA, DoRA, LoHa and LoKr are converted",
                      hint="merge it with lora merge")  # fmt: skip
    if "mid" in module.tensors:
        raise Refused(f"{module.name} has a lora_mid, which other layouts lack", hint="merge it with lora merge")
    assert module.scale is not None
    roles = module.tensors
    if module.is_embedding:
        down, up = roles["embedding down"], roles["embedding up"]
    else:
        down, up = roles["down"], roles["up"]
    if module.turned:
        down, up = (made(one.key, numbers(one).T, one.dtype, [one]) for one in (down, up))
    container, path = _container(module, path, to)
    return WrittenModule(container, path, down, up, module.scale, roles.get("magnitude"), module.is_embedding,
                         roles.get("added bias"))  # fmt: skip


def _of_one_part(rows: Sequence[WrittenModule], to: To) -> list[WrittenModule]:
    """Return the modules without a container for PEFT, whose adapter is for one model, if all are in the same part."""
    if to == "peft" and len({row.container for row in rows}) == 1:
        return [replace(row, container="") for row in rows]
    return list(rows)


def _container(module: AdapterModule, path: str, to: To) -> tuple[str, str]:
    container = module.container
    if container == "base_model.model":
        container, rest = names_of.container_of(path)
        container, path = (container, rest) if container in DIFFUSERS_OF else ("", path)
    if to == "peft":
        container = DIFFUSERS_OF.get(container, "")
    return container, path


def _of_products(module: AdapterModule, path: str, to: To) -> WrittenModule:
    """Return a module of LoHa or LoKr as it is written.

    Raises:
        Refused: PEFT cuts the weight into other factors.
    """
    assert module.scale is not None and (module.method == "LoHa" or module.method == "LoKr")
    roles = {role: entry for role, entry in module.tensors.items() if role not in ("alpha", "magnitude")}
    head = "hada" if module.method == "LoHa" else "lokr"
    rank, scale, factor, both = module.rank or 1, module.scale, -1, False
    if module.method == "LoKr":
        both = "w1" not in roles and "w2" not in roles
        if to == "peft":
            rank, factor = peft_lokr({role: entry.shape for role, entry in roles.items()}, module.name)
        elif module.rank is None and scale != 1:
            # kohya and ComfyUI set alpha aside where both factors are whole.
            roles["w2"] = made(module.name, numbers(roles["w2"]) * scale, roles["w2"].dtype, [roles["w2"]])
            scale = 1.0
    ends = {f"{head}_{role}": entry for role, entry in roles.items()}
    products = Products(module.method, ends, rank, factor, both)
    container, path = _container(module, path, to)
    first, *_, last = roles.values()
    return WrittenModule(container, path, first, last, scale, module.tensors.get("magnitude"), products=products)


DIFFUSERS_OF = {"lora_te": "text_encoder", "lora_te1": "text_encoder", "lora_te2": "text_encoder_2",
                "text_encoder": "text_encoder", "text_encoder_2": "text_encoder_2"}  # fmt: skip
"""Container of a text encoder -> the component that keeps it apart from the other parts in a file of PEFT."""


def _base(like: StrPath, stack: ExitStack) -> tuple[dict[str, TensorEntry], Mapping[str, Any]]:
    """Return the tensors of the base by key, and its config.json."""
    checkpoint = as_state_dict(str(like), str(like), None, stack)
    site = choose.mapping(checkpoint).at
    entries = {entry.key: entry for entry in without_optimizer(checkpoint.entries_at(site))}
    return entries, json_beside(checkpoint, "config.json")


def _paths(found: Adapter, like: Mapping[str, TensorEntry] | None, to: To) -> dict[str, str]:
    """Return the path of each module with dots.

    Raises:
        Refused: the dots are ambiguous.
    """
    modules = list(found.modules.values())
    if like is not None:
        base = Base.of(like)
        targets = resolved(found, base, modules)
        with about(found.path):
            refuse_others(found, targets, len(modules))
        stems = {key: stem for stem, key in base.stems.items()}
        names: dict[str, str] = {}
        for row in modules:
            place, *others = targets.places[row.name]
            whole = not others and place.rows == like[place.key].shape[0]
            named = _named(stems[place.key], to) if whole else with_dots(row.path)
            if _is_flat(row) and named is None:
                raise Refused(f"{row.name}: the base has it in parts, or as a part", path=found.path)
            names[row.name] = named if _is_flat(row) and named is not None else row.path
        return names
    made: dict[str, str] = {}
    for row in modules:
        path: str | None = row.path
        if _is_flat(row) and to != "kohya":
            path = with_dots(row.path)
            if path is None:
                hint = "--like BASE names the base, whose keys say so"
                raise Refused(f"{row.name}: where the dots of the path are is ambiguous", path=found.path, hint=hint)
            path = _named(path, to)
        assert path is not None
        made[row.name] = path
    return made


def _is_flat(module: AdapterModule) -> bool:
    return bool(module.container) and module.name == f"{module.container}_{module.path}"


def _named(path: str, to: To) -> str:
    for start in ("model.diffusion_model.", "diffusion_model."):
        path = path.removeprefix(start)
    return as_diffusers(path) if to in ("diffusers", "peft") else path



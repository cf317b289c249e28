"""An adapter as read: its modules with rank, alpha and scale, whatever the layout, and what is missing.

No tensor byte is read except the numbers called alpha.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, NoSuchTensor, Refused, printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.names import adapters
from ckptfix.names.adapter_signs import has_signs
from ckptfix.names.adapters import TITLES, AdapterKey, LayoutName, Method, Role
from ckptfix.ops import quantized
from ckptfix.urls import as_path
from ckptfix.words import plural, some

if TYPE_CHECKING:
    from ckptfix.names.regexes import Regex

CONFIG = "adapter_config.json"
"""The file that PEFT and mlx-lm write beside the weights."""

DIFFUSERS = "lora_adapter_metadata"
"""The pair of a safetensors file in which diffusers keeps the configurations of PEFT (``loaders/lora_base.py``)."""

MOST_TEXT = 200
"""Characters of a text of the configuration that are shown."""

CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` with which PEFT changes the base weights, so that an adapter fits only those."""

OWN_PATHS = ("torchtune", "litgpt", "mlx", "nemo")
"""Layouts whose keys are paths of the model. Those of LitGPT begin with ``transformer.``, a container elsewhere."""

LARGEST_ALPHA = 64
"""Elements of the largest tensor that is read as an alpha."""


Wrong = Literal["prefix", "name", "layout", "rank", "targets"]
"""A part of an adapter of PEFT that is wrong: the beginning of its keys, the name in them, the library that they are
of; or in the configuration the rank, or the list of targets."""


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The tensors of an adapter for one module of the base.

    Attributes:
        name: path of the module, with the container before it.
        container: the beginning of the name, before the path.
        path: the path in the base.
        tensors: role -> tensor.
        method: how the update is made; None if the module has only differences.
        rank: rank of the update; None if it has no rank.
        alpha: the stated number, or None.
        scale: what the product is multiplied by; None if it is unknown.
    """

    name: str
    container: str
    path: str
    tensors: Mapping[Role, TensorEntry]
    method: Method | None
    rank: int | None
    alpha: float | None
    scale: float | None
    turned: bool = False

    @property
    def is_embedding(self) -> bool:
        """True if it is the update of a table of embeddings."""
        return "embedding down" in self.tensors

    @property
    def is_dora(self) -> bool:
        """True if a magnitude replaces the norm of the sum (DoRA)."""
        return "magnitude" in self.tensors


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter.

    Attributes:
        checkpoint: the file.
        at: address of the state dict that holds it.
        layout: whose layout it has.
        modules: name -> module.
        whole: key in the base -> the tensor that replaces it.
        base: keys in the file of the base model's own tensors, where the file holds both.
        unknown: all other keys -> a description.
        names: the adapters' names in a model of PEFT; empty without one.
        config: the configuration beside it.
        missing: what is missing or contradictory, a sentence each.
        wrong: what a loader of PEFT does not accept, and a conversion to PEFT corrects -> a sentence.
    """

    checkpoint: Checkpoint
    at: str
    layout: LayoutName
    modules: Mapping[str, AdapterModule]
    whole: Mapping[str, TensorEntry]
    base: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    wrong: Mapping[Wrong, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The file."""
        return self.checkpoint.path

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, with the variants of LoRA."""
        found = dict.fromkeys(row.method for row in self.modules.values() if row.method)
        dora = any(row.is_dora for row in self.modules.values())
        slora = bool(self.config.get("use_rslora"))
        names = ["DoRA" if dora and one == "LoRA" else "rsLoRA" if slora and one == "LoRA" else one for one in found]
        return tuple(names) or ("differences",)

    @property
    def ranks(self) -> dict[int, int]:
        """Rank -> number of modules, most frequent first."""
        return dict(Counter(row.rank for row in self.modules.values() if row.rank is not None).most_common())

    @property
    def alphas(self) -> dict[float, int]:
        """Alpha -> number of modules, most frequent first."""
        return dict(Counter(row.alpha for row in self.modules.values() if row.alpha is not None).most_common())

    @property
    def scales(self) -> dict[float, int]:
        """Scale -> number of modules, most frequent first."""
        return dict(Counter(row.scale for row in self.modules.values() if row.scale is not None).most_common())

    @property
    def targets(self) -> dict[str, int]:
        """Last component of a module's path -> number of modules."""
        return dict(sorted(Counter(target_of(row) for row in self.modules.values()).items()))

    @property
    def layers(self) -> int:
        """Number of layers: of different numbers in the paths of the modules, with the part before them."""
        found = {_layer(row.path) for row in self.modules.values()}
        return len(found - {None})

    @property
    def base_model(self) -> str | None:
        """The name of the base model, where one is stated."""
        pairs = self.checkpoint.metadata
        stated = (
            self.config.get("base_model_name_or_path"), self.config.get("model"), pairs.get("ss_sd_model_name"),
            pairs.get("ss_base_model_version"), pairs.get("modelspec.architecture"),
        )  # fmt: skip
        return next((_text(one) for one in stated if isinstance(one, str) and one), None)

    def described(self) -> str:
        """Return the adapter in one line."""
        parts = [f"{TITLES[self.layout]} {' and '.join(self.methods)}"]
        if self.ranks:
            parts.append(_varied("rank", self.ranks))
        if self.alphas:
            parts.append(_varied("alpha", self.alphas))
        elif any(row.scale is None for row in self.modules.values()):
            parts.append("alpha unknown")
        parts.append(f"{plural(len(self.modules), 'module')} ({some(list(self.targets), 6)})")
        if self.layers:
            parts.append(plural(self.layers, "layer"))
        if self.whole:
            parts.append(f"{plural(len(self.whole), 'whole tensor')}")
        if self.base:
            parts.append(f"with its base model ({plural(len(self.base), 'tensor')})")
        elif self.base_model:
            parts.append(f"for {self.base_model}")
        return ", ".join(parts)


def target_of(module: AdapterModule) -> str:
    """Return the last component of a module's path that is not a number; of a kohya path, what follows its numbers."""
    if module.path == module.name or "." in module.path:
        parts = [part for part in module.path.split(".") if not part.isdigit()]
        return parts[-1] if parts else module.path
    return re.split(r"_\d+_", module.path)[-1]


def _layer(path: str) -> str | None:
    found = re.match(r"(.*?[._]\d+)(?=[._]|$)", path)
    return None if found is None else found[1]


def _varied(what: str, counts: Mapping[Any, int]) -> str:
    values = sorted(counts)
    shown = [f"{one:g}" for one in values]
    if len(values) <= 3:
        return f"{what} {' and '.join(shown)}"
    return f"{what} {shown[0]} to {shown[-1]}"


def _text(value: str) -> str:
    return printable(value if len(value) <= MOST_TEXT else f"{value[:MOST_TEXT]}...")


def is_adapter(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint holds an adapter."""
    return bool(_places(checkpoint))


def _places(checkpoint: Checkpoint) -> list[str]:
    """Return the addresses of the state dicts that hold an adapter."""
    return checkpoint.once(_found_places)


def _found_places(checkpoint: Checkpoint) -> list[str]:
    skipped = {state.at for state in checkpoint.state_dicts if state.optimizer}
    keys: dict[str, list[str]] = {}
    for entry in checkpoint.entries:
        if entry.at not in skipped:
            keys.setdefault(entry.at, []).append(entry.key)
    return [at for at, names in keys.items() if adapters.is_adapter(names)]


def glance(checkpoint: Checkpoint, *, own_ranks: bool = False) -> Adapter | None:
    """Return the adapter in a checkpoint; None if it holds none, several, or a damaged one."""
    if not has_signs(entry.key for entry in checkpoint.entries):
        return None
    try:
        return read(checkpoint, own_ranks=own_ranks)
    except (CkptfixError, ValueError, OverflowError):
        return None


def differences(checkpoints: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Yield findings about adapters whose tensors are averaged or put together by key."""
    found_in = [(one.path, adapter) for one in checkpoints if (adapter := glance(one)) is not None]
    if len(found_in) < 2:
        return
    first, one = found_in[0]
    for path, other in found_in[1:]:
        for what, mine, theirs in (("ranks", one.ranks, other.ranks), ("alphas", one.alphas, other.alphas),
                                   ("scales", one.scales, other.scales)):  # fmt: skip
            if mine != theirs:
                message = f"{what} of {sorted(theirs)}, and of {sorted(mine)} in {first}"
                yield found("adapters-differ", message, where=path)
                break


def read(
    checkpoint: Checkpoint,
    *,
    at: str | None = None,
    name: str | None = None,
    alpha: float | None = None,
    config: Mapping[str, Any] | None = None,
    own_ranks: bool = False,
) -> Adapter:
    """Read the adapter in a checkpoint.

    Args:
        at: address of the state dict that holds it.
        name: the adapter's name in a model of PEFT, where there are several.
        alpha: the alpha of modules without a stated one.
        config: the configuration; by default adapter_config.json beside the file.
        own_ranks: take the ranks from the tensors where the configuration states others.

    Raises:
        Refused: there is no adapter, or there are several.
        NoSuchTensor: there is no adapter at `at`, or none with this name.
    """
    places = _places(checkpoint)
    if at is not None:
        places = [one for one in places if one == at]
    if not places:
        kinds = (adapters.other_kind(entry.key, entry.shape) for entry in checkpoint.entries)
        other = next((what for what in kinds if what is not None), None)
        if other is not None:
            raise Refused(f"an adapter of a kind that is not merged: {other}", path=checkpoint.path)
        hint = "LoRA has keys such as lora_A, lora_down or lora_a; `ckptfix inspect` lists the keys"
        raise (Refused if at is None else NoSuchTensor)("it holds no adapter", path=checkpoint.path, hint=hint)
    if len(places) > 1:
        shown = ", ".join(places)
        raise Refused(f"it holds several adapters: {shown}", path=checkpoint.path, hint="choose one with --at")
    if config is None:
        config = quantized.json_beside(checkpoint, CONFIG)
    found = _read(checkpoint, places[0], name, alpha, config)
    if own_ranks and "rank" in found.wrong:
        ranks = found.ranks
        right = {
            **config, "r": next(iter(ranks)),
            "rank_pattern": {one.path: one.rank for one in found.modules.values() if one.rank != next(iter(ranks))},
        }  # fmt: skip
        again = _read(checkpoint, places[0], name, alpha, right)
        return replace(again, wrong=found.wrong)
    return found


def _read(
    checkpoint: Checkpoint, at: str, name: str | None, alpha: float | None, config: Mapping[str, Any]
) -> Adapter:
    keys: list[AdapterKey] = []
    rest: list[str] = []
    unknown: dict[str, str] = {}
    entries = {entry.key: entry for entry in checkpoint.entries_at(at)}
    for key in entries:
        row = adapters.parsed(key)
        kind = adapters.other_kind(key, entries[key].shape) if row is None else None
        if row is not None:
            keys.append(row)
        elif kind is not None:
            unknown[key] = kind
        else:
            rest.append(key)
    strong = {key.module for key in keys if adapters.is_sure(key)}
    weak = [key for key in keys if key.suffix is not None and not key.suffix.strong]
    differences = {key.module for key in weak if key.role in ("difference", "bias difference")}
    loose = {key.key for key in weak if key.module not in strong and key.module not in differences}
    keys = [key for key in keys if key.key not in loose]
    rest += loose
    layout = adapters.layout_of(keys)
    bases = {adapters.plain_key(key) for key in rest}
    together = all(_weights(one) & bases for one in strong)
    if layout != "peft" and not together:
        unknown |= dict.fromkeys((key for key in rest if not adapters.is_saved(key)), "not a part of an adapter")
        rest = [key for key in rest if key not in unknown]
    saved = [adapters.whole(key) for key in rest if adapters.is_saved(key) or not together]
    names = tuple(dict.fromkeys(key.adapter for key in (*keys, *saved) if key.adapter is not None))
    if name is None and len(names) > 1:
        hint = f"choose one with --adapter, such as --adapter {names[0]}"
        raise Refused(f"it holds {len(names)} adapters: {', '.join(names)}", path=checkpoint.path, hint=hint)
    if name is not None and name not in names:
        there = f"its adapters are {', '.join(names)}" if names else "its keys have no name of an adapter"
        raise NoSuchTensor(f"there is no adapter called {name!r}", path=checkpoint.path, near=names, hint=there)
    chosen = [one for one in keys if name is None or one.adapter in (name, None)]
    whole = {row.module: entries[row.key] for row in saved if name is None or row.adapter in (name, None)}
    tensors: dict[str, dict[Role, TensorEntry]] = {}
    methods: dict[str, Method | None] = {}
    for part in chosen:
        tensors.setdefault(part.module, {})[part.role] = entries[part.key]
        assert part.suffix is not None
        methods[part.module] = methods.get(part.module) or part.suffix.method
    if layout == "litgpt":
        alpha = _parted(checkpoint, tensors, methods, unknown, alpha)
    settings = Settings(layout, checkpoint, config, alpha)
    modules = {one: settings.module(one, roles, methods[one]) for one, roles in tensors.items()}
    base = tuple(key for key in rest if not adapters.is_saved(key)) if together else ()
    missing = tuple(_missing(layout, modules, config))
    wrong = dict(_wrong(checkpoint, layout, modules, names, config)) if not base else {}
    return Adapter(checkpoint, at, layout, modules, whole, base, unknown, names, config, missing, wrong)


def _parted(
    checkpoint: Checkpoint,
    tensors: dict[str, dict[Role, TensorEntry]],
    methods: dict[str, Method | None],
    unknown: dict[str, str],
    alpha: float | None,
) -> float | None:
    """Put a module for each part in the place of LitGPT's fused ones, and return alpha as its files state it."""
    from ckptfix.ops.adapter.litgpt import LitGptSettings, is_fused, parts_of

    settings = LitGptSettings.beside(checkpoint)
    for name in [name for name, roles in tensors.items() if is_fused(name, roles)]:
        roles = tensors.pop(name)
        parts = parts_of(name, roles, settings)
        if isinstance(parts, str):
            unknown.update((entry.key, parts) for entry in roles.values())
            continue
        tensors.update(parts)
        methods.update(dict.fromkeys(parts, methods[name]))
    return settings.alpha if alpha is None else alpha


def _weights(module: str) -> set[str]:
    """Return the keys that the weight of a module may have beside its adapter."""
    return {f"{module}.weight", f"{module}.linear.weight", f"{module}.to_wrap.weight"}


def _missing(
    layout: LayoutName, modules: Mapping[str, AdapterModule], config: Mapping[str, Any]
) -> Iterator[str]:
    lone = [one for row in modules.values() for one in _lone(row)]
    if lone:
        yield f"{plural(len(lone), 'tensor')} that belong to others are missing: {some(lone, 4)}"
    unknown = [row.name for row in modules.values() if row.scale is None]
    if unknown and layout in ("peft", "mlx") and not config:
        yield f"{CONFIG}, which states alpha, rank and the base model"
    elif unknown:
        yield f"alpha of {plural(len(unknown), 'module')}: {some(unknown, 4)}"


def _wrong(
    checkpoint: Checkpoint,
    layout: LayoutName,
    modules: Mapping[str, AdapterModule],
    names: Sequence[str],
    config: Mapping[str, Any],
) -> Iterator[tuple[Wrong, str]]:
    """Yield what a loader of PEFT does not accept (``utils/save_and_load.py``, ``tuners/tuners_utils.py``)."""
    named = as_path(checkpoint.path).name.startswith("adapter_model.")
    if layout != "peft":
        if named and layout in ("kohya", "comfy", "diffusers", "diffusers-old"):
            yield "layout", f"its keys are those of {TITLES[layout]}: a loader of PEFT takes no tensor from it"
        elif layout == "diffusers" and names:
            key = next(entry.key for row in modules.values() for entry in row.tensors.values())
            yield "name", (f"its keys have the adapter's name {names[0]!r} in them, such as {key}: diffusers puts a "
                           "name there itself, and takes no tensor from such keys")  # fmt: skip
        return
    double = f"{adapters.PEFT_MODEL}.{adapters.PEFT_MODEL}."
    twice = [row for row in modules.values() if row.name.startswith(double)]
    if twice:
        yield "prefix", (f"{plural(len(twice), 'module')} have the beginning {double}, with {adapters.PEFT_MODEL} "
                         "twice: a loader of PEFT does not know them, and leaves its adapter as it was "
                         "initialized")  # fmt: skip
    if names:
        key = next(entry.key for row in modules.values() for entry in row.tensors.values())
        yield "name", (f"its keys have the adapter's name {names[0]!r} in them, such as {key}: a file of PEFT has "
                       "none, and its loaders, vLLM and converters do not know such keys")  # fmt: skip
    if config and all(row.method == "LoRA" for row in modules.values()):
        yield from _wrong_rank(modules, config)
        yield from _wrong_targets(modules, config)


def _wrong_rank(modules: Mapping[str, AdapterModule], config: Mapping[str, Any]) -> Iterator[tuple[Wrong, str]]:
    ranks: dict[tuple[int, int], list[str]] = {}
    for row in modules.values():
        stated = _pattern(config.get("rank_pattern"), row.path, config.get("r"))
        if isinstance(stated, int) and row.rank and row.rank != stated:
            ranks.setdefault((stated, row.rank), []).append(row.path)
    for (stated, rank), paths in sorted(ranks.items())[:1]:
        others = sorted({rank for _, rank in ranks})
        shown = " and ".join(map(str, others[:4]))
        about = "" if len(paths) == len(modules) else f", as {paths[0]}"
        yield "rank", f"{CONFIG} states the rank {stated}, and tensors have the rank {shown}{about}"


_ALL = "all-linear"
"""PEFT's short form for all linear layers."""


def _wrong_targets(modules: Mapping[str, AdapterModule], config: Mapping[str, Any]) -> Iterator[tuple[Wrong, str]]:
    stated = config.get("target_modules")
    if not stated or stated == _ALL or config.get("layers_to_transform") is not None or config.get("target_parameters"):
        return
    paths = [row.path for row in modules.values()]
    if isinstance(stated, str):
        over = [path for path, hit in zip(paths, _matches(stated, paths), strict=True) if not hit]
    elif isinstance(stated, list):
        ends = {one for one in stated if isinstance(one, str)}
        over = [path for path in paths if not _ends(path) & ends]
    else:
        return
    if over:
        yield "targets", (f"target_modules in {CONFIG} does not name {plural(len(over), 'module')} that the file has: "
                          f"{some(over, 4)}; a loader of PEFT leaves their tensors out, and does not "
                          "say so")  # fmt: skip


def _ends(path: str) -> set[str]:
    """Return the endings of a path at its dots."""
    parts = path.split(".")
    return {".".join(parts[first:]) for first in range(len(parts))}


@lru_cache(256)
def _regex(pattern: str) -> Regex:
    from ckptfix.names.regexes import Regex

    return Regex(pattern)


def _matches(pattern: str, paths: Sequence[str]) -> list[bool]:
    """Return for each path whether a pattern of the configuration matches the whole of it; True if none can tell."""
    try:
        return _regex(rf"\A(?:{pattern})\Z").search(paths)
    except (re.error, Refused, OverflowError, RecursionError):
        return [True] * len(paths)


PAIRS: tuple[tuple[Role, Role], ...] = (
    ("down", "up"), ("embedding down", "embedding up"), ("w1_a", "w1_b"), ("w2_a", "w2_b"),
)  # fmt: skip


def _lone(module: AdapterModule) -> Iterator[str]:
    """Yield the roles that a module lacks."""
    for one, two in PAIRS:
        for mine, other in ((one, two), (two, one)):
            if mine in module.tensors and other not in module.tensors:
                yield f"{other} of {module.name}"
    if module.method == "LoKr":
        for number in "12":
            if not any(role.startswith(f"w{number}") for role in module.tensors):
                yield f"w{number} of {module.name}"
    if module.method == "LoHa" and "w1_a" not in module.tensors:
        yield f"w1_a of {module.name}"
    if module.method == "LoRA" and not {"down", "up", "embedding down", "embedding up"} & module.tensors.keys():
        yield f"down and up of {module.name}"
    if module.method is None and not {"difference", "bias difference"} & module.tensors.keys():
        yield f"the update of {module.name}"


def refuse_missing(adapter: Adapter, *, own_ranks: bool = False) -> None:
    """Raise `Refused` for an adapter that cannot be computed with.

    Args:
        own_ranks: ranks that the configuration states wrongly do not matter.

    Raises:
        Refused: tensors are missing, the scale is unknown, or there are tensors of a kind that is not known.
    """
    if adapter.unknown:
        key, what = next(iter(adapter.unknown.items()))
        count = plural(len(adapter.unknown), "tensor")
        raise Refused(f"{count} of a kind that is not merged: {what}, as {key}", path=adapter.path)
    lone = [one for row in adapter.modules.values() for one in _lone(row)]
    if lone:
        raise Refused(f"{plural(len(lone), 'tensor')} are missing: {some(lone, 4)}", path=adapter.path)
    unknown = [row.name for row in adapter.modules.values() if row.scale is None and row.method]
    if unknown:
        message = f"the alpha of {plural(len(unknown), 'module')} is unknown: {some(unknown, 3)}"
        hint = f"put {CONFIG} beside the file, or give --alpha"
        raise Refused(message, path=adapter.path, hint=hint)
    infinite = [row.name for row in adapter.modules.values() if row.scale is not None and not math.isfinite(row.scale)]
    if infinite:
        raise Refused(f"the alpha of {infinite[0]} is not finite", path=adapter.path)
    config = adapter.config
    for option in ("layer_replication", "alora_invocation_tokens", "target_parameters", "use_qalora", "use_bdlora"):
        if config.get(option):
            raise Refused(f"{CONFIG} has {option}, which is not merged", path=adapter.path)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASE):
        message = f"init_lora_weights is {init!r}: PEFT changed the base weights, and the adapter fits only those"
        hint = "save it with path_initial_model_for_weight_conversion in PEFT, which makes a plain LoRA of it"
        raise Refused(message, path=adapter.path, hint=hint)
    if "rank" in adapter.wrong and not own_ranks:
        hint = "`ckptfix lora convert IN OUT --to peft` writes the ranks of the tensors"
        raise Refused(adapter.wrong["rank"], path=adapter.path, hint=hint)


@dataclass(frozen=True, slots=True)
class Settings:
    """The statements about ranks and alphas of an adapter, beside its tensors.

    Attributes:
        alpha: of modules without a stated one, as the user gave it.
    """

    layout: LayoutName
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    alpha: float | None

    def module(self, name: str, tensors: Mapping[Role, TensorEntry], method: Method | None) -> AdapterModule:
        """Return a module with its rank, alpha and scale."""
        container, path = ("", name) if self.layout in OWN_PATHS else adapters.container_of(name)
        rank = _rank(tensors, method, turned=self.layout == "mlx")
        made = AdapterModule(name, container, path, tensors, method, rank, None, None, turned=self.layout == "mlx")
        alpha, scale = self._scale(made)
        return replace(made, alpha=alpha, scale=scale)

    def _scale(self, module: AdapterModule) -> tuple[float | None, float | None]:
        if module.method is None:
            return None, 1.0
        own = module.tensors.get("alpha")
        if own is not None:
            alpha = _number(own)
            if module.method == "LoKr" and module.rank is None:
                return alpha, 1.0  # LyCORIS sets alpha aside where both factors are whole (modules/lokr.py).
            return alpha, None if alpha is None or not module.rank else alpha / module.rank
        config = self._config(module)
        if config is not None and _is_number(config.get("lora_alpha", config.get("alpha"))):
            return _scale_of_peft(config, module)
        mlx = self.config.get("lora_parameters")
        if self.layout == "mlx" and isinstance(mlx, dict) and _is_number(mlx.get("scale")):
            return None, float(mlx["scale"])
        if self.alpha is not None:
            return self.alpha, self.alpha / module.rank if module.rank else 1.0
        if self.layout in ("kohya", "comfy", "diffusers", "diffusers-old"):
            # Without an alpha their loaders use the product as it is.
            return None, 1.0
        return None, None

    def _config(self, module: AdapterModule) -> Mapping[str, Any] | None:
        """Return the configuration of PEFT for a module."""
        if self.layout in ("peft", "torchtune", "unknown"):
            return self.config or None
        stated = self.checkpoint.metadata.get(DIFFUSERS)
        if self.layout == "diffusers" and stated:
            try:
                found = json.loads(stated)
            except (ValueError, RecursionError):
                return None
            if isinstance(found, dict):
                head = f"{module.container}."
                return {key[len(head) :]: value for key, value in found.items() if key.startswith(head)} or None
        return None


def _scale_of_peft(config: Mapping[str, Any], module: AdapterModule) -> tuple[float | None, float | None]:
    """Return alpha and scale as PEFT computes them (``tuners/lora/layer.py``, ``utils/other.py get_pattern_key``)."""
    rank = _pattern(config.get("rank_pattern"), module.path, config.get("r"))
    alpha = _pattern(config.get("alpha_pattern"), module.path, config.get("lora_alpha", config.get("alpha")))
    if not _is_number(alpha):
        return None, None
    used = rank if _is_number(rank) and rank > 0 else module.rank
    if not used:
        return float(alpha), None
    return float(alpha), float(alpha) / (math.sqrt(used) if config.get("use_rslora") else used)


def _pattern(patterns: Any, path: str, otherwise: Any) -> Any:
    if isinstance(patterns, dict):
        ends = _ends(path)
        for pattern, value in patterns.items():
            if pattern in ends or (not _PLAIN.fullmatch(pattern) and _matches(rf"(?:.*\.)?(?:{pattern})", [path])[0]):
                return value
    return otherwise


_PLAIN = re.compile(r"[\w.]+")
"""A pattern without other signs than dots; that dots match any character matters to no path."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(entry: TensorEntry) -> float | None:
    """Return the number in a tensor of one element; None if it has more, or no data."""
    if entry.numel != 1 or not entry.has_data or entry.kind != "dense":
        return None
    from ckptfix.ops.dequantize.layout import numbers

    return float(numbers(entry).reshape(-1)[0])


def _rank(tensors: Mapping[Role, TensorEntry], method: Method | None, *, turned: bool) -> int | None:
    names: Sequence[Role] = ("down", "embedding down") if method == "LoRA" else ("w1_b", "w2_b")
    for role in names:
        entry = tensors.get(role)
        if entry is not None and entry.shape:
            return entry.shape[-1] if turned and role == "down" else entry.shape[0]
    return None

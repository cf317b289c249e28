"""The keys of adapters (LoRA and its relatives), as each library spells them: one table for all that ask.

A key is the path of a module of the base model, and a suffix that says what the tensor is to that module. `SUFFIXES`
lists the suffixes, `CONTAINERS` the beginnings. Sources: huggingface/peft ``utils/save_and_load.py`` and
``tuners/*/layer.py``; kohya-ss/sd-scripts ``networks/lora.py``; KohakuBlueleaf/LyCORIS ``lycoris/modules``;
comfyanonymous/ComfyUI ``comfy/weight_adapter`` and ``comfy/lora.py``; huggingface/diffusers
``utils/state_dict_utils.py`` and ``loaders/lora_conversion_utils.py``; pytorch/torchtune ``modules/peft``;
Lightning-AI/litgpt ``lora.py``; ml-explore/mlx-lm ``tuner/lora.py`` and ``tuner/dora.py``; NVIDIA NeMo
``collections/llm/peft``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Literal, NamedTuple

from ckptfix.dataclass import dataclass

Role = Literal[
    "down", "up", "mid", "alpha", "magnitude", "added bias", "embedding down", "embedding up",
    "w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t1", "t2", "difference", "bias difference", "whole",
]  # fmt: skip
"""The role of a tensor in its module. The update of the weight is ``up @ down`` (of an embedding its transpose), the
elementwise product of ``w1_a @ w1_b`` and ``w2_a @ w2_b`` (LoHa), the Kronecker product of ``w1`` and ``w2`` (LoKr), or
the ``difference`` itself; ``whole`` replaces the tensor of the base."""

Method = Literal["LoRA", "LoHa", "LoKr"]

LayoutName = Literal[
    "peft", "diffusers", "diffusers-old", "kohya", "comfy", "torchtune", "litgpt", "mlx", "nemo", "unknown"
]

TITLES: Mapping[LayoutName, str] = {
    "peft": "PEFT",
    "diffusers": "diffusers",
    "diffusers-old": "old diffusers",
    "kohya": "kohya",
    "comfy": "ComfyUI",
    "torchtune": "torchtune",
    "litgpt": "LitGPT",
    "mlx": "MLX",
    "nemo": "NeMo",
    "unknown": "unknown",
}
"""Layout -> what it is called in text."""


class Suffix(NamedTuple):
    """The end of a key of an adapter.

    Attributes:
        pattern: of the end; the group ``adapter`` is the adapter's name in a model of PEFT, ``role`` decides the role.
        roles: what the group ``role`` matched -> the role.
        spelling: the library that spells it so.
        method: how the update is made; None where the suffix does not tell.
        strong: it shows that a file is an adapter; the others count only beside such a key.
        module: what replaces the end in the path of the module, with the groups of the pattern.
    """

    pattern: str
    roles: Mapping[str, Role]
    spelling: Literal["peft", "kohya", "diffusers", "diffusers-old", "torchtune", "litgpt", "mlx", "nemo"]
    method: Method | None = "LoRA"
    strong: bool = True
    module: str = ""


_NAME = r"(?:[.](?P<adapter>(?!weight$|bias$)[^.]+))?"
_W: dict[str, Role] = {"w1": "w1", "w1_a": "w1_a", "w1_b": "w1_b", "w2": "w2", "w2_a": "w2_a", "w2_b": "w2_b",
                       "t1": "t1", "t2": "t2"}  # fmt: skip
_AB: dict[str, Role] = {"A": "down", "B": "up"}
_ab: dict[str, Role] = {"a": "down", "b": "up"}
_DOWN: dict[str, Role] = {"down": "down", "up": "up", "mid": "mid"}

SUFFIXES = (
    Suffix(rf"[.]lora_(?P<role>[AB]){_NAME}[.]weight", _AB, "peft"),
    Suffix(rf"[.]lora_(?P<role>B){_NAME}[.]bias", {"B": "added bias"}, "peft"),
    Suffix(rf"[.]lora_embedding_(?P<role>[AB]){_NAME}", {"A": "embedding down", "B": "embedding up"}, "peft"),
    Suffix(rf"[.]lora_(?P<role>magnitude)_vector{_NAME}(?:[.]weight)?", {"magnitude": "magnitude"}, "peft"),
    Suffix(r"[.]lora_(?P<role>down|up|mid)[.]weight", _DOWN, "kohya"),
    Suffix(r"[.]processor[.](?P<part>to_[qkv]|add_[qkv]_proj)_lora[.](?P<role>down|up)[.]weight", _DOWN,
           "diffusers-old", module=r".\g<part>"),
    Suffix(r"[.]processor[.](?P<part>to_out|to_add_out)_lora[.](?P<role>down|up)[.]weight", _DOWN,
           "diffusers-old", module=r".\g<part>.0"),
    Suffix(r"[.]to_(?P<part>[qkv])_lora[.](?P<role>down|up)[.]weight", _DOWN, "diffusers-old",
           module=r".\g<part>_proj"),
    Suffix(r"[.]to_out_lora[.](?P<role>down|up)[.]weight", _DOWN, "diffusers-old", module=".out_proj"),
    Suffix(r"[.]lora(?:_linear_layer)?[.](?P<role>down|up)[.]weight", _DOWN, "diffusers-old"),
    Suffix(rf"[.]hada_(?P<role>w[12]_[ab]|t[12]){_NAME}", _W, "kohya", "LoHa"),
    Suffix(rf"[.]lokr_(?P<role>w[12](?:_[ab])?|t2){_NAME}", _W, "kohya", "LoKr"),
    Suffix(r"[.]lora_(?P<role>[ab])[.]weight", _ab, "torchtune"),
    Suffix(r"[.]lora_(?P<role>[AB])", _AB, "litgpt"),
    Suffix(r"[.]lora_(?P<role>[ab])", _ab, "mlx"),
    Suffix(r"[.]adapter[.]linear_(?P<role>in|out)[.]weight", {"in": "down", "out": "up"}, "nemo"),
    Suffix(r"[.](?P<role>alpha)", {"alpha": "alpha"}, "kohya", None, strong=False),
    Suffix(r"[.](?P<role>dora_scale|magnitude)", {"dora_scale": "magnitude", "magnitude": "magnitude"}, "kohya", None,
           strong=False),
    Suffix(r"[.](?P<role>m)", {"m": "magnitude"}, "mlx", None, strong=False),
    Suffix(r"[.](?P<role>diff|diff_b)", {"diff": "difference", "diff_b": "bias difference"}, "kohya", None,
           strong=False),
    Suffix(r"[.](?P<role>w_norm|b_norm)", {"w_norm": "difference", "b_norm": "bias difference"}, "kohya", None,
           strong=False),
)  # fmt: skip
"""The ends of keys. The first that matches counts."""

OTHERS = (
    (r"[.]boft_\w+(?:[.].*)?", "BOFT"),
    (r"[.]oft_\w+(?:[.].*)?", "OFT"),
    (r"[.]ia3_l(?:[.].*)?|[.]on_input", "IA3"),
    (r"[.]vera_lambda_\w+(?:[.].*)?", "VeRA"),
    (r"[.][ab][12][.]weight", "GLoRA"),
    (r"[.]trainable_tokens_(?:delta|original)(?:[.].*)?", "trainable tokens of PEFT"),
    (r"(?:^|[.])prompt_embeddings|(?:^|[.])prompt_encoder[.].*", "a prompt"),
    (r"[.]scalar|[.]reshape_weight|[.]set_weight", "a part of LyCORIS or ComfyUI"),
    (r"(?:^|[.])bundle_emb[.].*", "an embedding of a prompt"),
)
"""Ends of keys that are known and have no merge here, and what they are."""

CONTAINERS: tuple[tuple[str, LayoutName], ...] = (
    (r"(?:base_model[.]model[.])+", "peft"),
    (r"lora_(?:unet|te\d?|transformer|prior(?:_\w+?)?|llm_adapter|text_encoder)(?=_)", "kohya"),
    (r"lycoris(?=_)", "kohya"),
    (r"diffusion_model[.]", "comfy"),
    (r"text_encoders[.](?:\w+[.])(?:transformer[.])?", "comfy"),
    (r"(?:unet|transformer|text_encoder(?:_\d)?|prior|controlnet|language_model_lora)[.]", "diffusers"),
)
"""Containers, the beginnings of the names of modules, and the layout that each is typical of."""


PEFT_MODEL = "base_model.model"
"""The container of PEFT. A model that is wrapped twice repeats it, and so do the keys of its adapter."""


@cache
def _suffixes() -> tuple[tuple[re.Pattern[str], Suffix], ...]:
    return tuple((re.compile(rf"(?P<module>.*){row.pattern}", re.DOTALL), row) for row in SUFFIXES)


@cache
def _others() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(rf".*(?:{pattern})", re.DOTALL), what) for pattern, what in OTHERS)


@cache
def _containers() -> tuple[tuple[re.Pattern[str], LayoutName], ...]:
    return tuple((re.compile(pattern), layout) for pattern, layout in CONTAINERS)


_SAVED = re.compile(r"[.]modules_to_save(?:[.](?P<adapter>[^.]+))?(?=[.])")
_LEVEL = re.compile(r"[.](?:base_layer|original_module)(?=[.])")
_MARK = re.compile(r"lora|hada_w|lokr_w|lycoris_|[.]adapter[.]linear_|[.]diff(?:_b)?$|[.][wb]_norm$")


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """A key of an adapter.

    Attributes:
        key: the key.
        module: path of the module, with the container before it; of a ``whole`` tensor the key in the base.
        role: what the tensor is to the module.
        suffix: the row of the table; None for a ``whole`` tensor.
        adapter: the adapter's name in a model of PEFT; None without one.
    """

    key: str
    module: str
    role: Role
    suffix: Suffix | None = None
    adapter: str | None = None


@lru_cache(1 << 12)
def parsed(key: str) -> AdapterKey | None:
    """Return what a key of an adapter says; None for a key without one of the suffixes."""
    for pattern, row in _suffixes():
        found = pattern.fullmatch(key)
        if found is not None and found["module"]:
            module = found["module"] + (found.expand(row.module) if row.module else "")
            adapter = found.groupdict().get("adapter")
            return AdapterKey(key, module, row.roles[found["role"]], row, adapter)
    return None


def is_adapter(keys: Iterable[str]) -> bool:
    """Return whether one of the keys is that of an adapter."""
    for key in keys:
        if _MARK.search(key):
            found = parsed(key)
            if found is not None and is_sure(found):
                return True
    return False


def is_sure(key: AdapterKey) -> bool:
    """Return whether a key shows that a file is an adapter: by its suffix, or as a difference by its container too."""
    if key.suffix is None or key.suffix.strong:
        return key.suffix is not None
    if key.role not in ("difference", "bias difference"):
        return False
    return any(layout in ("kohya", "comfy") and pattern.match(key.module) for pattern, layout in _containers())


def other_kind(key: str, shape: Sequence[int] = ()) -> str | None:
    """Return what a key of a known kind of adapter is that is not merged here; None for any other key.

    Args:
        shape: of the tensor: LyCORIS has one key for OFT and for BOFT, whose blocks have a dimension more.
    """
    found = next((what for pattern, what in _others() if pattern.fullmatch(key)), None)
    return "BOFT" if found == "OFT" and len(shape) == 4 else found


def whole(key: str) -> AdapterKey:
    """Return a key without a suffix as that of a tensor that replaces one of the base (``modules_to_save``)."""
    found = _SAVED.search(key)
    adapter = found["adapter"] if found is not None else None
    return AdapterKey(key, plain_key(_SAVED.sub("", key)), "whole", None, adapter)


def is_saved(key: str) -> bool:
    """Return whether a key has the level ``modules_to_save`` in it."""
    return _SAVED.search(key) is not None


def plain_key(key: str) -> str:
    """Return a key of a model of PEFT without the levels that PEFT puts around a layer of the base."""
    return _LEVEL.sub("", key)


def has_level(key: str) -> bool:
    """Return whether a key has a level that PEFT puts around a layer of the base (``base_layer``)."""
    return _LEVEL.search(key) is not None


def container_of(module: str) -> tuple[str, str]:
    """Return the container of a module, without its separator, and the path below it."""
    for pattern, layout in _containers():
        found = pattern.match(module)
        if found is not None:
            head = PEFT_MODEL if layout == "peft" else found[0].rstrip(".")
            rest = module[found.end() :]
            return head, rest[1:] if layout == "kohya" else rest
    return "", module


def layout_of(keys: Iterable[AdapterKey]) -> LayoutName:
    """Return the layout that the keys of an adapter have, most of them."""
    votes: Counter[LayoutName] = Counter()
    for key in keys:
        if not is_sure(key):
            continue
        votes[_layout(key)] += 1
    return votes.most_common(1)[0][0] if votes else "unknown"


def _layout(key: AdapterKey) -> LayoutName:
    assert key.suffix is not None
    head = next((layout for pattern, layout in _containers() if pattern.match(key.module)), None)
    spelling = key.suffix.spelling
    if spelling in ("torchtune", "litgpt", "mlx", "nemo", "diffusers-old"):
        return spelling
    if head is not None:
        return head
    if spelling == "kohya":
        # LoHa and LoKr of PEFT end like those of LyCORIS, which has alpha beside them and no dots in the path.
        return "peft" if key.adapter is not None else "comfy" if "." in key.module else "kohya"
    return "peft"


class InModel(NamedTuple):
    """The names of an adapter's file in a model of PEFT.

    Attributes:
        names: key in the file -> key in the model.
        base: keys of the model that belong to its base, and not to an adapter.
    """

    names: Mapping[str, str]
    base: frozenset[str]


def in_model(file: Iterable[str], model: Iterable[str]) -> InModel | None:
    """Return the names of an adapter's file in a model of PEFT, whose keys have the name of the adapter in them.

    Source: peft/utils/save_and_load.py, set_peft_model_state_dict.

    Returns:
        None if the file is not an adapter of PEFT, holds the base too, or the model has no adapter, or several.
    """
    have = list(file)
    if not is_adapter(have) or any(has_level(key) for key in have):
        return None
    mine: dict[str, str] = {}
    names: set[str | None] = set()
    base: set[str] = set()
    for key in model:
        one = parsed(key) if ".lora_" in key else None
        if one is None and is_saved(key):
            one = whole(key)
        if one is None:
            base.add(key)
            continue
        names.add(one.adapter)
        mine[_without_name(key, one.adapter)] = key
    if len(names) != 1 or None in names:
        return None
    made = {}
    for key in have:
        one = parsed(key) or whole(key)
        made[key] = mine.get(_without_name(key, one.adapter), key)
    return InModel(made, frozenset(base))


def _without_name(key: str, name: str | None) -> str:
    """Return a key as PEFT writes it to a file: without the name of the adapter, and without ``modules_to_save``."""
    if is_saved(key):
        return _SAVED.sub("", key)
    return key if name is None else key.replace(f".{name}.", ".", 1).removesuffix(f".{name}")


# Stable Diffusion's U-Net has two sets of names: those of the original code (and of single files), and those of
# diffusers. Source: huggingface/diffusers, scripts/convert_diffusers_to_original_stable_diffusion.py.
_RESNET = (("in_layers.0", "norm1"), ("in_layers.2", "conv1"), ("emb_layers.1", "time_emb_proj"),
           ("out_layers.0", "norm2"), ("out_layers.3", "conv2"), ("skip_connection", "conv_shortcut"))  # fmt: skip
_TOP = (("time_embed.0", "time_embedding.linear_1"), ("time_embed.2", "time_embedding.linear_2"),
        ("input_blocks.0.0", "conv_in"), ("out.0", "conv_norm_out"), ("out.2", "conv_out"),
        ("label_emb.0.0", "add_embedding.linear_1"), ("label_emb.0.2", "add_embedding.linear_2"))  # fmt: skip
_BLOCK = re.compile(r"(input_blocks|output_blocks|middle_block)[.](\d+)(?:[.](\d+))?[.]?(.*)")


def names_of_diffusers(path: str) -> Iterator[str]:
    """Yield the name that diffusers has for a module of the original Stable Diffusion code, if it has another."""
    for old, new in _TOP:
        if path == old:
            yield new
    found = _BLOCK.fullmatch(path)
    if found is None:
        return
    block, first, second, rest = found[1], int(found[2]), int(found[3] or 0), found[4]
    if block == "middle_block":
        rest = f"{found[3]}.{rest}" if found[3] is not None and rest else found[3] or rest
        if first == 1:
            yield f"mid_block.attentions.0.{rest}"
        else:
            yield from (f"mid_block.resnets.{first // 2}.{name}" for name in _renamed(rest))
        return
    if found[3] is None:
        return
    if block == "input_blocks":
        group, place = divmod(first - 1, 3)
        if place == 2:
            yield f"down_blocks.{group}.downsamplers.0.{rest.replace('op', 'conv')}"
            return
        base = f"down_blocks.{group}"
    else:
        group, place = divmod(first, 3)
        base = f"up_blocks.{group}"
        if rest == "conv":
            yield f"{base}.upsamplers.0.conv"
            return
    if second == 1:
        yield f"{base}.attentions.{place}.{rest}"
    elif second == 0:
        yield from (f"{base}.resnets.{place}.{name}" for name in _renamed(rest))


def _renamed(rest: str) -> Iterator[str]:
    yield from (new for old, new in _RESNET if rest == old)

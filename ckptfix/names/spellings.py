"""Spellings that many models share: two names of the same tensor.

The table `FAMILIES` lists what is known and where it comes from; the functions here implement its rows. Nothing here
looks at values or renames by itself; it only answers matchers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from itertools import permutations
from typing import Literal

from ckptfix.dataclass import dataclass
from ckptfix.names.slots import Slot


@dataclass(frozen=True, slots=True)
class Spelling:
    """A row of the table of spellings.

    Attributes:
        id: short name, as shown in reports.
        how: ``"same"``: two spellings of one tensor. ``"fused"``: one tensor on one side and several on the other;
            this is reported, never done.
        about: the spellings.
        source: where they are defined.
    """

    id: str
    how: Literal["same", "fused"]
    about: str
    source: str


FAMILIES: tuple[Spelling, ...] = (
    Spelling("layer-norm", "same", "gamma and beta, a_2 and b_2, g and b: weight and bias", "google-research/bert"),
    Spelling(
        "batch-norm", "same", "moving_mean, moving_variance: running_mean, running_var", "keras, mindspore, paddle"
    ),
    Spelling(
        "weight-norm", "same", "weight_g, weight_v: parametrizations.weight.original0, original1", "torch/nn/utils"
    ),
    Spelling(
        "spectral-norm", "same", "weight_orig, _u, _v: parametrizations.weight.original, .0._u, .0._v", "torch/nn/utils"
    ),
    Spelling(
        "in-proj", "same", "in_proj_weight, in_proj.weight, qkv.weight, Wqkv.weight, c_attn.weight", "torch, timm"
    ),
    Spelling("gated", "same", "fc_1, fc_2, proj: gate_proj, up_proj, down_proj", "litgpt/model.py LLaMAMLP"),
    Spelling("qkv", "fused", "one projection for query, key and value, or three", "torch MultiheadAttention, timm"),
    Spelling("gate-up", "fused", "one projection for gate and value of a gated MLP, or two", "Phi-3, DINOv2 SwiGLU"),
)

@dataclass(frozen=True, slots=True)
class BasePrefix:
    """A name under which models hold the model that they are built on.

    Attributes:
        component: the path components, without the trailing dot.
        used_by: models and tools that use it.
    """

    component: str
    used_by: str


BASE_PREFIXES: tuple[BasePrefix, ...] = (
    BasePrefix("model", "LightningModules by habit; base_model_prefix of LLaMA, BART and others in transformers"),
    BasePrefix("net", "LightningModules and training scripts by habit"),
    BasePrefix("network", "nnU-Net and training scripts by habit"),
    BasePrefix("backbone", "mmcv, mmdetection, detectron2, torchvision detection, Lightning Bolts"),
    BasePrefix("encoder", "autoencoders, segmentation_models_pytorch"),
    BasePrefix("base_model", "PEFT (base_model.model), stable-baselines"),
    BasePrefix("base_model.model", "PEFT"),
    BasePrefix("model.model", "a LightningModule that holds a wrapper"),
    BasePrefix("encoder_q", "MoCo, main_moco.py"),
    BasePrefix("encoder_k", "MoCo, main_moco.py"),
    BasePrefix("base_encoder", "MoCo v3"),
    BasePrefix("momentum_encoder", "MoCo v3"),
    BasePrefix("student", "DINO, distillation"),
    BasePrefix("teacher", "DINO, distillation"),
    BasePrefix("student.backbone", "DINO, DINOv2"),
    BasePrefix("teacher.backbone", "DINO, DINOv2"),
    BasePrefix("ema", "exponential averages by habit"),
    BasePrefix("model_ema", "latent diffusion"),
    BasePrefix("ema_model", "ema-pytorch"),
    BasePrefix("online_model", "ema-pytorch"),
    BasePrefix("generator", "GANs"),
    BasePrefix("discriminator", "GANs"),
    BasePrefix("netG", "pytorch-CycleGAN-and-pix2pix"),
    BasePrefix("netD", "pytorch-CycleGAN-and-pix2pix"),
    BasePrefix("visual", "CLIP, open_clip"),
    BasePrefix("visual.trunk", "open_clip with a timm model"),
    BasePrefix("vision_model", "CLIP and SigLIP in transformers"),
    BasePrefix("text_model", "CLIP and SigLIP in transformers"),
    BasePrefix("image_encoder", "SAM, CLIP-likes"),
    BasePrefix("feature_extractor", "transfer learning by habit"),
    BasePrefix("trunk", "timm wrappers, metric learning"),
    BasePrefix("bert", "base_model_prefix in transformers"),
    BasePrefix("roberta", "base_model_prefix in transformers"),
    BasePrefix("distilbert", "base_model_prefix in transformers"),
    BasePrefix("albert", "base_model_prefix in transformers"),
    BasePrefix("electra", "base_model_prefix in transformers"),
    BasePrefix("deberta", "base_model_prefix in transformers"),
    BasePrefix("transformer", "base_model_prefix of GPT-2, XLNet, T5 in transformers"),
    BasePrefix("gpt_neox", "base_model_prefix in transformers"),
    BasePrefix("vit", "base_model_prefix in transformers"),
    BasePrefix("deit", "base_model_prefix in transformers"),
    BasePrefix("beit", "base_model_prefix in transformers"),
    BasePrefix("swin", "base_model_prefix in transformers"),
    BasePrefix("convnext", "base_model_prefix in transformers"),
    BasePrefix("resnet", "base_model_prefix in transformers"),
    BasePrefix("segformer", "base_model_prefix in transformers"),
    BasePrefix("wav2vec2", "base_model_prefix in transformers"),
    BasePrefix("hubert", "base_model_prefix in transformers"),
)

_AFFINE = (("gamma", "beta"), ("a_2", "b_2"), ("g", "b"))
"""Weight and bias of a norm as spelled by TensorFlow, the Annotated Transformer and OpenAI's first GPT."""

_STATISTICS = (("moving_mean", "moving_variance"), ("moving_mean", "moving_var"), ("_mean", "_variance"))
"""Running mean and variance as spelled by Keras and MindSpore, by MXNet-style ports, and by Paddle."""

_COUNTS = {"num_batches_tracked"}

FUSED_QKV = ("qkv", "Wqkv", "qkv_proj", "to_qkv", "c_attn", "in_proj", "W_pack")
"""Modules that project to query, key and value together, in this order. GPT-NeoX's ``query_key_value`` is not included
because it is ordered head by head."""

REORDERED_QKV = {
    name.replace("qkv", "".join(letters)): tuple(map(letters.index, "qkv"))
    for name in FUSED_QKV
    for letters in permutations("qkv")
    if "qkv" in name and letters != tuple("qkv")
}
"""Modules whose names spell another order, such as ``kqv``: the places of query, key and value among their rows."""

_SPLIT_QKV = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("linear_q", "linear_k", "linear_v"),
    ("w_q", "w_k", "w_v"),
    ("w_qs", "w_ks", "w_vs"),
    ("wq", "wk", "wv"),
    ("W_q", "W_k", "W_v"),
    ("q", "k", "v"),
)

_OF_ATTENTION = {
    word: part
    for part, words in enumerate(("q query queries wq qs", "k key keys wk ks", "v value values wv vs"))
    for word in words.split()
}
"""Word -> 0, 1 or 2, in the name of a module that projects to query, key or value."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

_LISTED = {
    "linears": ("query", "key", "value", "out"),
    "linear_layers": ("query", "key", "value"),
}
"""Lists of an attention's projections, in the order of their numbers: the Annotated Transformer (MultiHeadedAttention,
``linears``), and BERT-pytorch (attention/multi_head.py, ``linear_layers``)."""

HEAD_BY_HEAD = ("query_key_value", "linear_qkv", "attn")
"""Modules that store query, key and value head by head in GPT-NeoX, BLOOM, Falcon, Megatron and old files of LitGPT
(``attn.attn``), but one after the other in ChatGLM."""

UNTOLD = ("wqkv",)
"""Modules that store query, key and value by groups in InternLM2, but one after the other, with different rotary pairs,
in gpt-fast. The names beside them are the same in both."""

CONV1D = {(module, "weight") for module in ("c_attn", "c_proj", "c_fc", "q_attn")}
"""Projections that are `transformers.Conv1D` in GPT-2 and related models, but `Linear` in nanoGPT."""

FROM_THE_RIGHT = ("text_projection", "proj")
"""Parameters of CLIP (OpenAI's, open_clip) that features are multiplied with: a `Linear` stores them transposed."""

OWN_ORDER = re.compile(r"\.mlp\.fc_in\.|\.output_gate\.|attention_biases$|\.attn_(?:block|grid)\.")
"""Names beside a fused ``qkv`` whose rows have a different order: CodeGen (four blocks of query, value and key),
MiniMax, TinyViT and EfficientFormer, MaxViT (head by head)."""

NEIGHBOURS = re.compile(r"(?:^|\.)layers\.\d+\.attention\.w[qk]\.")
"""Queries and keys of Meta's LLaMA and of Mistral's own files, in which rotary pairs are neighbors."""

NEIGHBOURS_OF_TORCHTUNE = re.compile(r"(?:^|\.)layers\.\d+\.attn\.[qk]_proj\.")
"""The same for torchtune, which has ``tok_embeddings`` too."""

ADAPTER_OF_TORCHTUNE = re.compile(r"(?:^|\.)layers\.\d+\.attn\.\w+\.lora_[ab]\.")
"""A key of torchtune's LoRA. Only ``lora_b`` has the rows of queries and keys."""

FUSIONS: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...] = (
    ("qkv", (*FUSED_QKV, *HEAD_BY_HEAD, *UNTOLD), _SPLIT_QKV),
    ("kv", ("kv", "kv_proj", "to_kv"), tuple(split[1:] for split in _SPLIT_QKV)),
    ("gate-up", ("gate_up_proj",), (("gate_proj", "up_proj"), ("w1", "w3"), ("fc_1", "fc_2"), ("gate", "up"))),
    ("gate-up of xformers", ("w12",), (("w1", "w2"),)),
)
"""Family, fused modules, and the parts that they may be split into, in the order of the fused tensor's rows. Those of
attention are the usual names; `splits_of` finds others by their words."""


def splits_of(names: Iterable[str]) -> dict[tuple[str, str], list[tuple[str, tuple[str, ...]]]]:
    """Return (path before the modules, parameter) -> families, and the modules that each of them fuses, in order.

    A module is the query, key or value if its name has one word for one of the three. There may be one of each.
    """
    found: dict[tuple[str, str], dict[int, list[str]]] = {}
    listed = set()
    for name in names:
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        place = f"{parent}." if parent else "", leaf
        listed.add((*place, last))
        parts = {_OF_ATTENTION[word] for word in map(str.lower, _WORD.findall(last)) if word in _OF_ATTENTION}
        if len(parts) == 1 and "norm" not in last.lower():
            found.setdefault(place, {}).setdefault(parts.pop(), []).append(last)
    made: dict[tuple[str, str], list[tuple[str, tuple[str, ...]]]] = {}
    for place, row in found.items():
        if len(row.get(1, ())) == len(row.get(2, ())) == 1:
            made.setdefault(place, []).append(("kv", (row[1][0], row[2][0])))
            if len(row.get(0, ())) == 1:
                made[place].append(("qkv", (row[0][0], row[1][0], row[2][0])))
    fixed: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for family, _, splits in FUSIONS:
        for split in splits if "kv" not in family else ():
            fixed.setdefault(split[0], []).append((family, split))
    for front, leaf, last in listed:
        for family, split in fixed.get(last, ()):
            if all((front, leaf, part) in listed for part in split):
                made.setdefault((front, leaf), []).append((family, split))
    return made

_EXPERT_PARTS = {
    **dict.fromkeys(("w1", "gate_proj", "gate"), "gate"),
    **dict.fromkeys(("w3", "up_proj", "up"), "up"),
    **dict.fromkeys(("w2", "down_proj", "down"), "down"),
    "gate_up_proj": "gate-up",
}


def part_of_expert(name: str) -> str | None:
    """Return the role of an expert's tensor: gate, up, down, or gate and up in one; None for any other tensor."""
    return _EXPERT_PARTS.get(name.removesuffix(".weight"))


GATED = {"fc_1": "gate_proj", "fc_2": "up_proj", "proj": "down_proj"}
"""Parts of a gated MLP: their names in LitGPT, and those of other libraries (litgpt/model.py LLaMAMLP)."""

_ATTENTION = re.compile(r"(?:attn|attention)$", re.IGNORECASE)

_NO_ATTENTION = {"A_log", "conv1d.weight", "x_proj.weight"}
"""Names beside an ``in_proj`` that show it to be Mamba's, not that of attention."""


_IN_PROJ = frozenset(["in_proj_weight", "in_proj_bias"])

_PROJECTIONS = frozenset([*GATED, *FUSED_QKV, *(str(at) for words in _LISTED.values() for at in range(len(words)))])
"""Own names of the modules whose spelling depends on the modules around them."""


def canonical(names: Sequence[str]) -> dict[str, str]:
    """Return name -> canonical name, for the names of one model that a family spells in its own way.

    The canonical spelling is the one that torch's newest module writes (``weight``, ``running_mean``,
    ``parametrizations.weight.original0``); a fused attention projection is ``qkv``. A spelling counts only if all its
    names are there: a lone ``gamma`` is a layer scale and is kept. Two names never get the same canonical name.
    """
    modules: dict[str, list[str]] = defaultdict(list)
    for name in names:
        module, _, leaf = name.rpartition(".")
        modules[module].append(leaf)
    found: dict[str, str] = {}
    spelled: dict[frozenset[str], tuple[tuple[str, str], ...]] = {}  # thousands of modules have the same parameters
    for module, leaves in modules.items():
        own = frozenset(leaves)
        if own not in spelled:
            spelled[own] = (*_norm(own), *_weight_norm(own), *_spectral_norm(own))
        front = f"{module}." if module else ""
        for leaf, new in spelled[own]:
            found[front + leaf] = front + new
    present = set(names)
    for name in names:
        module, _, leaf = name.rpartition(".")
        if name not in found and module.rpartition(".")[2] not in _PROJECTIONS and leaf not in _IN_PROJ:
            continue
        if (listed := _listed_name(name, modules)) is not None:
            found[name] = listed
        gated = _gated_name(name, modules)
        if gated is not None:
            found[name] = gated
        fused = _fused_name(found.get(name, name), present)
        if fused is not None:
            found[name] = fused
    if not found:
        return found
    taken = Counter(found.get(name, name) for name in present)
    return {name: found[name] for name in names if name in found and taken[found[name]] == 1}


def _norm(own: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield the affine parameters and statistics of a norm, provided that the module has nothing else."""
    statistics = {"running_mean", "running_var"}
    for mean, variance in _STATISTICS:
        if {mean, variance} <= own and not own & statistics:
            statistics = {mean, variance}
            yield mean, "running_mean"
            yield variance, "running_var"
            break
    for weight, bias in _AFFINE:
        if {weight, bias} <= own and own <= {weight, bias} | statistics | _COUNTS:
            yield weight, "weight"
            yield bias, "bias"
            return


def _weight_norm(own: Set[str]) -> Iterator[tuple[str, str]]:
    for leaf in own:
        parameter = leaf.removesuffix("_g")
        # Beside w_q and w_k, w_g and w_v belong to a gated attention; beside weight_orig, to a spectral norm.
        siblings = {parameter, f"{parameter}_orig", f"{parameter}_q", f"{parameter}_k"}
        if parameter != leaf and parameter and f"{parameter}_v" in own and not own & siblings:
            yield leaf, f"parametrizations.{parameter}.original0"
            yield f"{parameter}_v", f"parametrizations.{parameter}.original1"


def _spectral_norm(own: Set[str]) -> Iterator[tuple[str, str]]:
    for leaf in own:
        parameter = leaf.removesuffix("_orig")
        if parameter != leaf and parameter and f"{parameter}_u" in own:
            front = f"parametrizations.{parameter}"
            yield leaf, f"{front}.original"
            yield f"{parameter}_u", f"{front}.0._u"
            if f"{parameter}_v" in own:  # files before torch 1.2 lack it
                yield f"{parameter}_v", f"{front}.0._v"


def _fused_name(name: str, present: set[str]) -> str | None:
    """Return `name` with ``qkv`` for a fused projection's own name; None if nothing changes."""
    module, _, leaf = name.rpartition(".")
    if leaf in _IN_PROJ:
        return f"{module}.qkv.{leaf[8:]}".removeprefix(".")
    parent, _, last = module.rpartition(".")
    if last not in FUSED_QKV or last == "qkv":
        return None
    front = f"{parent}." if parent else ""
    if last == "in_proj" and any(front + other in present for other in _NO_ATTENTION):
        return None
    return f"{front}qkv.{leaf}"


def _gated_name(name: str, modules: Collection[str]) -> str | None:
    """Return `name` with a word for a part of LitGPT's gated MLP, which numbers its gate and up projections."""
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if last not in GATED or not all(f"{parent}.{part}" in modules for part in GATED):
        return None
    return f"{parent}.{GATED[last]}.{leaf}"


def _listed_name(name: str, modules: Collection[str]) -> str | None:
    """Return `name` with a word for a projection of an attention that keeps its projections in a list."""
    module, _, leaf = name.rpartition(".")
    front, _, number = module.rpartition(".")
    attention, _, last = front.rpartition(".")
    words = _LISTED.get(last, ())
    if not words or not _ATTENTION.search(attention) or number not in map(str, range(len(words))):
        return None
    others = [at for at in range(len(words) + 1) if f"{front}.{at}" in modules]
    return f"{attention}.{words[int(number)]}.{leaf}" if others == [*range(len(words))] else None


def fusions(one: Iterable[Slot], other: Iterable[Slot]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the tensors of `one` that fuse several tensors of `other`: (fused name, names of the parts).

    They are recognized by their last components and by shapes: the parts' rows add up to those of the fused tensor.
    """
    groups = _split_groups({slot.name: slot for slot in other})
    found: list[tuple[str, tuple[str, ...]]] = []
    for slot in one:
        module, _, leaf = slot.name.rpartition(".")
        last = module.rpartition(".")[2]
        if leaf in _IN_PROJ:
            last, leaf = "in_proj", leaf[8:]
        family = next((family for family, fused, _ in FUSIONS if last in fused), None)
        waiting = groups.get((family or "", leaf, slot.shape))
        if waiting:
            found.append((slot.name, waiting.popleft()))
    return tuple(found)


def _split_groups(parts: dict[str, Slot]) -> dict[tuple[str, str, tuple[int, ...]], deque[tuple[str, ...]]]:
    """Return (family, parameter, fused shape) -> the parts that would make such a tensor, in the order of `parts`."""
    groups: dict[tuple[str, str, tuple[int, ...]], deque[tuple[str, ...]]] = defaultdict(deque)
    for (front, leaf), rows_of in splits_of(parts).items():
        for family, split in rows_of:
            names = tuple(f"{front}{part}.{leaf}" for part in split)
            shapes = [parts[part].shape for part in names]
            if all(shape and shape[1:] == shapes[0][1:] for shape in shapes):
                rows = sum(shape[0] for shape in shapes)
                groups[family, leaf, (rows, *shapes[0][1:])].append(names)
    return groups

"""Keys that a version of a library changed: one table, by library and version, of renamings in both directions.

A row is used only where it accounts for the keys of a message; nothing here looks at files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ckptfix.dataclass import dataclass

Substitutions = tuple[tuple[str, str], ...]
"""Patterns and replacements of `re.sub`, in order."""


@dataclass(frozen=True, slots=True)
class LibraryChange:
    """A row of the table.

    Attributes:
        id: short name.
        since: the library and the version that changed the keys.
        about: what changed, as old and new keys.
        forward: from the old keys to the new ones.
        back: from the new keys to the old ones.
        source: where the change is described.
        mark: a regular expression for keys that only these models have: the file or the model must have one; empty if
            the substitutions themselves are as particular.
        reordered: tensors whose elements have a different order too: a regular expression for their keys, and the
            operations of a line of rules, forward and back.
    """

    id: str
    since: str
    about: str
    forward: Substitutions
    back: Substitutions
    source: str
    mark: str = ""
    reordered: tuple[tuple[str, str, str], ...] = ()


_VISION = "vision_tower|multi_modal_projector|vision_model|connector|audio_tower|qformer"

Pairs = tuple[tuple[str, str], ...]
"""Old and new beginnings of keys, with ``{n}`` for a number; one without a dot at its end is a whole key."""

_LLAMA = (("attention_norm.", "input_layernorm."), ("ffn_norm.", "post_attention_layernorm."),
          *((f"attention.w{part}.", f"self_attn.{part}_proj.") for part in "qkvo"),
          ("feed_forward.w1.", "mlp.gate_proj."),
          ("feed_forward.w2.", "mlp.down_proj."), ("feed_forward.w3.", "mlp.up_proj."))  # fmt: skip
_META: Pairs = (
    ("tok_embeddings.", "model.embed_tokens."), ("norm.", "model.norm."), ("output.", "lm_head."),
    *((f"layers.{{n}}.{old}", f"model.layers.{{n}}.{new}") for old, new in _LLAMA),
)  # fmt: skip
_TUNE = (*((f"self_attn.{part}_proj.", f"attn.{part}_proj.") for part in "qkv"),
         ("self_attn.o_proj.", "attn.output_proj."),
         ("mlp.gate_proj.", "mlp.w1."), ("mlp.down_proj.", "mlp.w2."), ("mlp.up_proj.", "mlp.w3."))  # fmt: skip
_TORCHTUNE: Pairs = (
    ("model.embed_tokens.", "tok_embeddings."), ("model.norm.weight", "norm.scale"), ("lm_head.", "output."),
    *((f"model.layers.{{n}}.{old}", f"layers.{{n}}.{new}") for old, new in _TUNE),
    ("model.layers.{n}.input_layernorm.weight", "layers.{n}.sa_norm.scale"),
    ("model.layers.{n}.post_attention_layernorm.weight", "layers.{n}.mlp_norm.scale"),
)  # fmt: skip
_LEAVES = (("lora_A.weight", "lora_a.weight"), ("lora_B.weight", "lora_b.weight"),
           ("lora_magnitude_vector", "magnitude"))  # fmt: skip
_TUNED: Pairs = tuple((f"base_model.model.model.layers.{{n}}.{old}{leaf}", f"layers.{{n}}.{new}{end}")
                      for old, new in _TUNE for leaf, end in _LEAVES)  # fmt: skip


def _forward(pairs: Pairs) -> Substitutions:
    return tuple((_pattern(old), new.replace("{n}", r"\1")) for old, new in pairs)


def _back(pairs: Pairs) -> Substitutions:
    return _forward(tuple((new, old) for old, new in pairs))


def _pattern(front: str) -> str:
    end = "" if front.endswith(".") else "$"
    return "^" + front.replace(".", "[.]").replace("{n}", r"(\d+)") + end


_PARTS = (("query", "q"), ("key", "k"), ("value", "v"))
_VIT_ATTENTION: Substitutions = (
    *((f"[.]attention[.]attention[.]{old}[.]", f".attention.{new}_proj.") for old, new in _PARTS),
    ("[.]attention[.]output[.]dense[.]", ".attention.o_proj."),
)
_VIT_ATTENTION_BACK: Substitutions = (
    ("[.]attention[.]o_proj[.]", ".attention.output.dense."),
    *((f"[.]attention[.]{new}_proj[.]", f".attention.attention.{old}.") for old, new in _PARTS),
)

CHANGES: tuple[LibraryChange, ...] = (
    LibraryChange(
        "vlm", "transformers 4.52", "language_model.model.* became model.language_model.*, and vision_tower.* "
        "model.vision_tower.*",
        (("^language_model[.]model[.]", "model.language_model."), ("^language_model[.]lm_head[.]", "lm_head."),
         (rf"^({_VISION})[.]", r"model.\1."), ("^image_newline$", "model.image_newline")),
        (("^model[.]language_model[.]", "language_model.model."), ("^lm_head[.]", "language_model.lm_head."),
         (rf"^model[.]({_VISION})[.]", r"\1."), ("^model[.]image_newline$", "image_newline")),
        "huggingface/transformers#37033",
    ),
    LibraryChange(
        "qwen-vl", "transformers 4.52", "visual.* became model.visual.*, and model.* model.language_model.*",
        (("^visual[.]", "model.visual."), ("^model[.](?!visual[.]|language_model[.])", "model.language_model.")),
        (("^model[.]visual[.]", "visual."), ("^model[.]language_model[.]", "model.")),
        "huggingface/transformers#37033",
    ),
    LibraryChange(
        "clip-text", "transformers 5.6", "CLIPTextModel's text_model.* lost that prefix",
        ((r"(^|[.])text_model[.](embeddings|encoder|final_layer_norm)[.]", r"\1\2."),),
        ((r"(^|[.])(?<!text_model[.])(embeddings[.](?:token|position)_embedding|encoder[.]layers|final_layer_norm)[.]",
          r"\1text_model.\2."),),
        "huggingface/transformers#44431",
    ),
    LibraryChange(
        "dinov2", "transformers 5", "DINOv2's attention.attention.query became attention.q_proj, and "
        "attention.output.dense attention.o_proj",
        _VIT_ATTENTION, _VIT_ATTENTION_BACK,
        "huggingface/transformers, conversion_mapping.py Dinov2Model",
        r"[.]layer[.]\d+[.]attention[.]attention[.]query[.]",
    ),
    LibraryChange(
        "vit", "transformers 5", "ViT's encoder.layer.N.attention.attention.query became layers.N.attention.q_proj, "
        "and intermediate.dense mlp.fc1",
        ((r"(^|[.])encoder[.]layer[.](\d+)[.]", r"\1layers.\2."), *_VIT_ATTENTION,
         ("[.]intermediate[.]dense[.]", ".mlp.fc1."), (r"([.]\d+)[.]output[.]dense[.]", r"\1.mlp.fc2.")),
        ((r"([.]\d+)[.]mlp[.]fc2[.]", r"\1.output.dense."), ("[.]mlp[.]fc1[.]", ".intermediate.dense."),
         *_VIT_ATTENTION_BACK, (r"(^|[.])layers[.](\d+)[.]", r"\1encoder.layer.\2.")),
        "huggingface/transformers, conversion_mapping.py ViTModel",
        r"[.]layer[.]\d+[.]attention[.]attention[.]query[.]",
    ),
    LibraryChange(
        "peft-adapter-name", "PEFT", "a model has the name of the adapter in its keys (lora_A.default.weight), and "
        "the files of save_pretrained do not",
        (("[.](lora_(?:embedding_)?[AB]|lora_magnitude_vector|modules_to_save)[.](?!default[.])", r".\1.default."),),
        (("[.](lora_(?:embedding_)?[AB]|lora_magnitude_vector|modules_to_save)[.]default[.]", r".\1."),),
        "huggingface/peft, utils/save_and_load.py",
    ),
    LibraryChange(
        "diffusers-attention", "diffusers 0.15", "AttentionBlock's query, key, value and proj_attn became to_q, to_k, "
        "to_v and to_out.0",
        (("[.]query[.]", ".to_q."), ("[.]key[.]", ".to_k."), ("[.]value[.]", ".to_v."),
         ("[.]proj_attn[.]", ".to_out.0.")),
        (("[.]to_q[.]", ".query."), ("[.]to_k[.]", ".key."), ("[.]to_v[.]", ".value."),
         ("[.]to_out[.]0[.]", ".proj_attn.")),
        "huggingface/diffusers#2697",
    ),
    LibraryChange(
        "weight-norm", "torch 2.0", "weight_g and weight_v became parametrizations.weight.original0 and original1",
        (("(^|[.])weight_g$", r"\1parametrizations.weight.original0"),
         ("(^|[.])weight_v$", r"\1parametrizations.weight.original1")),
        (("(^|[.])parametrizations[.]weight[.]original0$", r"\1weight_g"),
         ("(^|[.])parametrizations[.]weight[.]original1$", r"\1weight_v")),
        "torch/nn/utils/parametrizations.py",
    ),
    LibraryChange(
        "layer-norm", "TensorFlow", "LayerNorm's gamma and beta are weight and bias in torch",
        ((r"(^|[.])gamma$", r"\1weight"), (r"(^|[.])beta$", r"\1bias")),
        ((r"([Ll]ayer_?[Nn]orm)[.]weight$", r"\1.gamma"), (r"([Ll]ayer_?[Nn]orm)[.]bias$", r"\1.beta")),
        "google-research/bert",
    ),
    LibraryChange(
        "mask2former", "Mask2Former", "the pixel decoder moved from sem_seg_head.* to sem_seg_head.pixel_decoder.*",
        (("^sem_seg_head[.](?!predictor[.]|pixel_decoder[.])", "sem_seg_head.pixel_decoder."),),
        (("^sem_seg_head[.]pixel_decoder[.]", "sem_seg_head."),),
        "facebookresearch/Mask2Former, mask_former_head.py",
    ),
    LibraryChange(
        "openmmlab-swin", "OpenMMLab", "its Swin has stages.N.blocks.N.attn.w_msa and ffn.layers.0.0, and Microsoft's "
        "and timm's layers.N.blocks.N.attn and mlp.fc1; it merges patches in a different order",
        ((r"(^|[.])layers[.](\d+)[.](blocks|downsample)[.]", r"\1stages.\2.\3."),
         ("[.]attn[.](?!w_msa[.])", ".attn.w_msa."),
         ("[.]mlp[.]fc1[.]", ".ffn.layers.0.0."), ("[.]mlp[.]fc2[.]", ".ffn.layers.1."),
         (r"(^|[.])patch_embed[.]proj[.]", r"\1patch_embed.projection.")),
        ((r"(^|[.])stages[.](\d+)[.](blocks|downsample)[.]", r"\1layers.\2.\3."), ("[.]attn[.]w_msa[.]", ".attn."),
         ("[.]ffn[.]layers[.]0[.]0[.]", ".mlp.fc1."), ("[.]ffn[.]layers[.]1[.]", ".mlp.fc2."),
         (r"(^|[.])patch_embed[.]projection[.]", r"\1patch_embed.proj.")),
        "open-mmlab/mmdetection, mmdet/models/backbones/swin.py swin_converter",
        r"[.]blocks[.]\d+[.]attn[.]w_msa[.]",
        (
            (r"(?:^|[.])downsample[.]reduction[.]weight$",
             "| reshape from=o,4*c to=o,2,2,c | permute dims=0,3,2,1 | reshape from=o,c,2,2 to=o,4*c",
             "| reshape from=o,4*c to=o,c,2,2 | permute dims=0,3,2,1 | reshape from=o,2,2,c to=o,4*c"),
            (r"(?:^|[.])downsample[.]norm[.](?:weight|bias)$",
             "| reshape from=4*c to=2,2,c | permute dims=2,1,0 | reshape from=c,2,2 to=4*c",
             "| reshape from=4*c to=c,2,2 | permute dims=2,1,0 | reshape from=2,2,c to=4*c"),
        ),
    ),
    LibraryChange(
        "meta-llama", "Meta's LLaMA", "its own files have layers.N.attention.wq, feed_forward.w1 and attention_norm, "
        "and transformers model.layers.N.self_attn.q_proj, mlp.gate_proj and input_layernorm",
        _forward(_META), _back(_META), "huggingface/transformers, models/llama/convert_llama_weights_to_hf.py",
        r"^layers[.]\d+[.]attention[.]w[qkvo][.]",
    ),
    LibraryChange(
        "torchtune", "torchtune", "its models have layers.N.attn.q_proj, mlp.w1 and sa_norm.scale, and transformers "
        "model.layers.N.self_attn.q_proj, mlp.gate_proj and input_layernorm.weight",
        _forward(_TORCHTUNE), _back(_TORCHTUNE), "pytorch/torchtune, models/convert_weights.py",
        r"^layers[.]\d+[.]attn[.](?:[qkv]|output)_proj[.]weight$",
    ),
    LibraryChange(
        "torchtune-adapter", "torchtune", "its adapters have layers.N.attn.q_proj.lora_a, and PEFT's "
        "base_model.model.model.layers.N.self_attn.q_proj.lora_A",
        _forward(_TUNED), _back(_TUNED), "pytorch/torchtune, models/convert_weights.py tune_to_peft_adapter_weights",
        r"^layers[.]\d+[.](?:attn|mlp)[.]\w+[.]lora_[ab][.]",
    ),
)  # fmt: skip
"""The renamings of known versions."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A row of the table of files that a script trains as one model, and that several models read in parts.

    Attributes:
        id: short name.
        about: who reads which keys.
        pairs: beginnings of the keys that the script writes, and those that are read.
        source: where both are defined.
    """

    id: str
    about: str
    pairs: Pairs
    source: str


SHARED_FILES: tuple[SharedFile, ...] = (
    SharedFile(
        "ip-adapter",
        "IP-Adapter reads image_proj.* and ip_adapter.* from a safetensors file, or two dicts of these names",
        (("image_proj_model.", "image_proj."), ("adapter_modules.", "ip_adapter.")),
        "tencent-ailab/IP-Adapter, tutorial_train.py and ip_adapter/ip_adapter.py load_ip_adapter",
    ),
)
"""The files with parts for several models."""

EXPERTS_SINCE = "transformers 5"
"""The library and version that store all experts of a layer in one tensor: mlp.experts.gate_up_proj and down_proj."""


def change_of(pairs: Iterable[tuple[str, str]]) -> LibraryChange | None:
    """Return the row that accounts for all `pairs` of an old and a new key, in one direction; None if none does."""
    rows = list(pairs)
    for change in CHANGES:
        for subs in (change.forward, change.back):
            if rows and all(substituted(old, subs) == new for old, new in rows):
                return change
    return None


def reordered(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the new key and the operations, for each of `pairs` whose tensor has a different order of elements too."""
    change = change_of(pairs)
    if change is None:
        return
    forward = all(substituted(old, change.forward) == new for old, new in pairs)
    for _, new in pairs:
        for pattern, ahead, back in change.reordered:
            if re.search(pattern, new):
                yield new, ahead if forward else back


def substituted(name: str, subs: Iterable[tuple[str, str]]) -> str:
    """Return `name` after the substitutions, as `rename` makes them."""
    for pattern, new in subs:
        name = re.sub(pattern, new, name)
    return name

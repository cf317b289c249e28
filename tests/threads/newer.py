"""Twenty-seven more public threads, written down with their right answers before ckptfix was run on any of them.

`outcome` and `want` are as in `threads.reports`. A message is shortened to the keys of the file, whose sizes are small;
where a thread only names the error (LlamaFactory#10294, SILI_CD#2), its message is in the form of the framework.

At the first try, the first command solved 6 of the 27, and 11 were explained (4 of these were expected to get a
command). Two had no answer. Three had a wrong one (a log with keys of a second file, a trained head in an adapter, a
lookup in the file that was taken for one in the model), and five commands did harm: PEFT's adapter name in its file
(twice), the renaming of one of several layers (twice), and half of a renaming whose tensors also have another order.
The rules that they led to are not part of that measure. bearpaw#35 was expected to say shape-mismatch first, which it
says second; Swin#220 was expected to be explained; diffusers#3390 to get a command, though the loader needs none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from threads.others import GROUPS, size_mismatch
from threads.reports import (
    NEEDS_BASE,
    NO_NEED,
    NOT_SAVED,
    OTHER_MODEL,
    Report,
    distributed,
    moments,
    pickled,
    tensors,
    trained,
    zeros,
)
from threads.threads import BACKBONE, LLAMA, QWEN, Shapes, llama, moved, torch_message

DETECTOR = {**{f"backbone.{name}": shape for name, shape in BACKBONE.items()}, "bbox_head.fc_cls.weight": (3, 8)}
AVERAGED = {f"ema_{name.replace('.', '_')}": shape for name, shape in DETECTOR.items()}
GENERATOR = {f"generator.{name}.{leaf}": (4, 3, 3, 3) if leaf == "weight" else (4,)
             for name in ("conv_first", "body.0.rdb1.conv1", "body.1.rdb1.conv1") for leaf in ("weight", "bias")}
AVERAGED_GENERATOR = moved(GENERATOR, ("generator.", "generator_ema."))
QWEN_ADAPTER = {f"base_model.model.model.language_model.layers.{n}.linear_attn.in_proj_{part}.lora_{side}.weight": shape
                for n in range(2) for part in "ab" for side, shape in (("A", (4, 8)), ("B", (8, 4)))}
NEW_QWEN_ADAPTER = moved(QWEN_ADAPTER, ("base_model.model.model.language_model.", "base_model.model.model."))
MLLAMA = {f"base_model.model.{tower}.layers.{n}.self_attn.{part}_proj.lora_{side}.weight": shape
          for tower in ("vision_model.transformer", "language_model.model") for n in range(2) for part in "qv"
          for side, shape in (("A", (4, 8)), ("B", (8, 4)))}
NEW_MLLAMA = moved(MLLAMA, ("base_model.model.vision_model.", "base_model.model.model.vision_model."),
                   ("base_model.model.language_model.model.", "base_model.model.model.language_model."))
GPT_OSS = {**llama(), **{f"model.layers.{n}.mlp.experts.{part}": (3, 8, 8) for n in range(2)
                         for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")}}
TABULAR = {"model.layers.0.weight": (4, 3), "model.layers.0.bias": (4,), "model.head.weight": (1, 4)}
LIGHTNING = ("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks",
             "optimizer_states", "lr_schedulers", "hparams_name", "hyper_parameters")
COMPILED = {"resnet.conv1.weight": (4, 3, 3, 3), "resnet.bn1.weight": (4,), "resnet.bn1.bias": (4,),
            "classifier.conv0.weight": (2, 4, 3, 3)}
STEM = {"patch_embed.proj.0.weight": (4, 3, 3, 3), "patch_embed.proj.1.weight": (4,), "patch_embed.proj.1.bias": (4,),
        "patch_embed.proj.6.weight": (8, 4, 1, 1), "patch_embed.proj.6.bias": (8,), "layers.0.norm.weight": (8,)}
SWIN = {f"layers.{stage}.blocks.{n}.{part}": shape for stage in range(2) for n in range(2) for part, shape in (
        ("norm1.weight", (8,)), ("attn.qkv.weight", (24, 8)), ("attn.relative_position_bias_table", (9, 2)),
        ("mlp.fc1.weight", (32, 8)), ("mlp.fc2.weight", (8, 32)))}
SWIN_BUFFERS = {f"layers.{stage}.blocks.{n}.{part}": shape for stage in range(2) for n, part, shape in (
                (0, "attn.relative_position_index", (4, 4)), (1, "attn.relative_position_index", (4, 4)),
                (1, "attn_mask", (4, 4, 4)))}
SWIN_DETECTOR = {**{f"backbone.{name}": shape for name, shape in SWIN.items()},
                 "backbone.patch_embed.proj.weight": (8, 3, 4, 4),
                 "backbone.layers.0.downsample.reduction.weight": (16, 32),
                 "backbone.layers.0.downsample.norm.weight": (32,)}
OPENMMLAB = {name.replace("backbone.layers.", "backbone.stages.").replace("attn.", "attn.w_msa.").replace(
             "mlp.fc1.", "ffn.layers.0.0.").replace("mlp.fc2.", "ffn.layers.1.").replace("embed.proj.",
             "embed.projection."): shape for name, shape in SWIN_DETECTOR.items()}
OUTPUT_NORMS = [f"norm{n}.{leaf}" for n in range(4) for leaf in ("weight", "bias")]
ONE_NORM = {**SWIN, "norm.weight": (8,), "norm.bias": (8,), "head.weight": (9, 8), "head.bias": (9,),
            **{name: shape for name, shape in SWIN_BUFFERS.items() if "mask" in name}}
DEEPER = {f"module.layer1.{n}.{part}": shape for n in range(2) for part, shape in (
          ("conv1.weight", (4, 8, 1, 1)), ("conv3.weight", (8, 4, 1, 1)), ("bn3.weight", (8,)))} | {
          f"module.bn1.{leaf}": (4,) for leaf in ("weight", "bias", "running_mean", "running_var")}
T5 = {"_LLM_model.shared.weight": (32, 8), "_LLM_model.lm_head.weight": (32, 8),
      "_LLM_model.encoder.block.0.layer.0.SelfAttention.q.weight": (8, 8)}
TRAINED_HEAD = {"base_model.model.lm_head.weight": (40, 8), "base_model.model.model.embed_tokens.weight": (40, 8),
                **{name.replace("language_model.", ""): shape for name, shape in QWEN_ADAPTER.items()}}
WAV2VEC = {"wav2vec2.encoder.pos_conv_embed.conv.weight_g": (1, 1, 8), "wav2vec2.mask_time_emb_vector": (8,),
           "wav2vec2.encoder.pos_conv_embed.conv.weight_v": (8, 2, 8), "wav2vec2.encoder.layers.0.fc.weight": (8, 8),
           "lm_head.weight": (32, 8)}
NEW_WAV2VEC = {"wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original0": (1, 1, 8),
               "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original1": (8, 2, 8),
               "wav2vec2.encoder.layers.0.fc.weight": (8, 8), "lm_head.weight": (32, 8)}
FLUX = {f"model.diffusion_model.{name}": shape for name, shape in {
        "img_in.weight": (8, 4), "txt_in.weight": (8, 4), "double_blocks.0.img_attn.qkv.weight": (24, 8),
        "final_layer.linear.weight": (4, 8)}.items()}
TEXT = {"text_model.embeddings.token_embedding.weight": (16, 8), "text_model.encoder.layers.0.mlp.fc1.bias": (32,)}
OTHER_TOWER = {"vision_model.encoder.layers.0.self_attn.out_proj.bias": (8,), "logit_scale": (),
               "visual_projection.weight": (8, 8), "text_projection.weight": (8, 8)}
FLUX_LORA = {f"transformer.single_transformer_blocks.{n}.attn.to_q.lora_{side}.weight": shape for n in (1, 2)
             for side, shape in (("A", (4, 8)), ("B", (8, 4)))}
PYRAMID = {f"backbone.bottom_up.res4.1.{name}.weight": shape for name, shape in (
           ("conv1", (4, 16, 1, 1)), ("conv2", (4, 4, 3, 3)), ("conv3", (16, 4, 1, 1)))}


def int8() -> dict[str, torch.Tensor]:
    name = "model.layers.0.mlp.down_proj"
    return {f"{name}.weight": torch.ones(16, 8, dtype=torch.int8), f"{name}.SCB": torch.ones(16),
            f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8), "model.norm.weight": torch.ones(16)}


def gptq(folder: Path) -> Path:
    """Write a GPTQ layer and its config.json, which the first version of this row lacked."""
    name = "model.layers.0.mlp.down_proj"
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}}
    (folder / "config.json").write_text(json.dumps(config))
    state = {f"{name}.qweight": torch.zeros(4, 8, dtype=torch.int32), f"{name}.scales": torch.ones(1, 8).half(),
            f"{name}.qzeros": torch.zeros(1, 1, dtype=torch.int32), f"{name}.g_idx": torch.zeros(32, dtype=torch.int32),
            "model.norm.weight": torch.ones(8).half()}  # fmt: skip
    torch.save(state, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def saved(state: Mapping[str, Any], *others: str) -> dict[str, Any]:
    return {**dict.fromkeys(others, 1), "state_dict": dict(state)}


def named(names: Shapes, adapter: str = "default") -> list[str]:
    """Return the keys of an adapter as the model has them."""
    return [name.removesuffix(".weight") + f".{adapter}.weight" for name in names]


def not_used(kind: str, names: Sequence[str], new: Sequence[str] = ()) -> str:
    text = (f"Some weights of the model checkpoint at x were not used when initializing {kind}: {[*names]}\n- This IS "
            f"expected if you are initializing {kind} from the checkpoint of a model trained on another task\n")
    return text + (f"Some weights of {kind} were not initialized from the model checkpoint at x and are newly "
                   f"initialized: {[*new]}\nYou should probably TRAIN this model" if new else "")


def mmcv(unexpected: list[str], missing: list[str]) -> str:
    text = "The model and loaded state dict do not match exactly\n\nunexpected key in source state_dict: "
    text += f"{', '.join(unexpected)}\n"
    return text + (f"\nmissing keys in source state_dict: {', '.join(missing)}\n" if missing else "")


NEWER: tuple[Report, ...] = (
    Report("Bo396543018/Picodet_Pytorch/issues/7", mmcv(list(AVERAGED), []),
           pickled({"meta": {}, **saved(zeros({**DETECTOR, **AVERAGED}))}), "solved", DETECTOR),
    Report("open-mmlab/mmagic/issues/1439", mmcv(["step_counter", *AVERAGED_GENERATOR], []),
           pickled(saved(zeros({**GENERATOR, **AVERAGED_GENERATOR, "step_counter": (1,)}))), "solved",
           {**GENERATOR, "step_counter": (1,)}),
    Report("hiyouga/LlamaFactory/issues/10294",
           f"peft/peft_model.py:569: UserWarning: Found missing adapter keys while loading the checkpoint: "
           f"{named(NEW_QWEN_ADAPTER)}.", tensors(QWEN_ADAPTER, "adapter_model.safetensors"), "solved",
           NEW_QWEN_ADAPTER),
    Report("huggingface/peft/issues/2566",
           f"UserWarning: Found missing adapter keys while loading the checkpoint: {named(NEW_MLLAMA)}.",
           tensors(MLLAMA, "adapter_model.safetensors"), "solved", NEW_MLLAMA),
    Report("vllm-project/vllm/issues/45830",
           "(Worker pid=1345116) ERROR [multiproc_executor.py:888] Traceback (most recent call last):\n"
           "    param = params_dict[name]\nKeyError: 'layers.0.mlp.experts.w2_weight'", tensors(GPT_OSS),
           "said:missing-keys", beyond=OTHER_MODEL),
    Report("OpenTabular/DeepTab/issues/137", torch_message("BaseModel", [], list(LIGHTNING)),
           pickled({**dict.fromkeys(LIGHTNING, 1), "state_dict": zeros(TABULAR)}, "best.ckpt"), "solved", TABULAR),
    Report("justchenhao/SILI_CD/issues/2",
           torch_message("OptimizedModule", [f"_orig_mod.{name}" for name in COMPILED], list(COMPILED)),
           pickled({"epoch_id": 3, "model_G_state_dict": zeros(COMPILED)}, "best_ckpt.pt"), "solved",
           {f"_orig_mod.{name}": shape for name, shape in COMPILED.items()}),
    Report("facebookresearch/deepcluster/issues/61",
           "optimizer.load_state_dict(checkpoint['optimizer'])\nKeyError: 'optimizer'",
           pickled({"arch": "alexnet", "epoch": 1, "state_dict": zeros(BACKBONE)}), "said:missing-keys",
           beyond=NOT_SAVED),
    Report("JiangWenPL/multiperson/issues/1", mmcv(["fc.weight", "fc.bias"], [
           "layer4.0.bn2.num_batches_tracked", "layer3.4.bn1.num_batches_tracked"]) + GROUPS, pickled(trained),
           "python"),
    Report("bitsandbytes-foundation/bitsandbytes/issues/98",
           "  File \"bitsandbytes/optim/optimizer.py\", line 487, in update_step\n    if state['state1'].dtype == "
           "torch.float:\nKeyError: 'state1'",
           pickled({"state_dict": zeros(BACKBONE), "optimizer_states": [moments(*BACKBONE)]}), "said:optimizer-state",
           beyond=NOT_SAVED),
    Report("NVIDIA-NeMo/Automodel/pull/2071",
           "RuntimeError: Missing key in checkpoint state_dict: optim.state.model.layers.1.mlp.gate.weight.step.",
           distributed(model=zeros({f"model.layers.{n}.mlp.gate.weight": (4, 4) for n in range(2)}),
                       optim={f"state.model.layers.0.mlp.gate.weight.{key}": torch.zeros(1) for key in (
                              "step", "exp_avg")}), "said:missing-keys", beyond=NOT_SAVED),
    Report("Xiyue-Wang/TransPath/issues/11",
           torch_message("SwinTransformer", ["patch_embed.proj.weight", "patch_embed.proj.bias"],
                         [name for name in STEM if "proj" in name]),
           pickled({"model": zeros(STEM)}, "ctranspath.pth"), "said:missing-keys", beyond=OTHER_MODEL),
    Report("davide-coccomini/Deepfake-Detection-Challenge-DFAD2023/issues/2",
           torch_message("SwinTransformer", [], list(SWIN_BUFFERS)), pickled(zeros({**SWIN, **SWIN_BUFFERS})),
           "solved", SWIN),
    Report("SwinTransformer/Swin-Transformer-Object-Detection/issues/220",
           mmcv(list(SWIN_DETECTOR), list(OPENMMLAB)), pickled(saved(zeros(SWIN_DETECTOR), "meta")), "solved",
           OPENMMLAB),
    Report("SwinTransformer/Swin-Transformer-Object-Detection/issues/22",
           mmcv([name for name in ONE_NORM if name not in SWIN], OUTPUT_NORMS), pickled({"model": zeros(ONE_NORM)}),
           "said:missing-keys", beyond=NOT_SAVED),
    Report("bearpaw/pytorch-classification/issues/35",
           torch_message("DataParallel", [f"module.bn.{leaf}" for leaf in ("weight", "bias", "running_mean",
                         "running_var")], [name for name in DEEPER if "bn" in name or "conv3" in name])
           + size_mismatch(*((name, shape, (4, 4, 3, 3)) for name, shape in DEEPER.items() if "conv1" in name)
                           ).partition(":")[2].partition(":")[2],
           pickled(saved(zeros(DEEPER), "epoch")), "said:unexpected-keys", beyond=OTHER_MODEL),
    Report("flowersteam/lamorel/issues/32",
           torch_message("HF_LLM", ["_LLM_model.encoder.embed_tokens.weight", "_LLM_model.decoder.embed_tokens.weight"],
                         []), pickled(zeros(T5), "model.checkpoint"), "solved",
           {**T5, **{f"_LLM_model.{side}.embed_tokens.weight": (32, 8) for side in ("encoder", "decoder")}}),
    Report("ggml-org/llama.cpp/issues/11554",
           "INFO:lora-to-gguf:Exporting model...\nERROR:lora-to-gguf:Unexpected name 'base_model.model.lm_head.weight':"
           " Not a lora_A or lora_B tensor\nERROR:lora-to-gguf:Embeddings is present in the adapter. This can be due "
           "to new tokens added during fine tuning", tensors(TRAINED_HEAD, "adapter_model.safetensors"),
           "said:unexpected-keys", beyond=NEEDS_BASE),
    Report("ggml-org/llama.cpp/issues/12923", "ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.SCB'",
           pickled(int8, "pytorch_model.bin"), "solved",
           {"model.layers.0.mlp.down_proj.weight": (16, 8), "model.norm.weight": (16,)}),
    Report("ggml-org/llama.cpp/issues/8134", "ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.qweight'",
           gptq, "solved", {"model.layers.0.mlp.down_proj.weight": (8, 32), "model.norm.weight": (8,)}),
    Report("huggingface/transformers/issues/27605",
           not_used("Wav2Vec2ForCTC", list(WAV2VEC)[:3], list(NEW_WAV2VEC)[:2]), pickled(zeros(WAV2VEC)), "solved",
           {**NEW_WAV2VEC, "wav2vec2.mask_time_emb_vector": (8,)}),
    Report("huggingface/peft/issues/1453",
           "ValueError: Trying to set a tensor of shape torch.Size([32, 8]) in \"weight\" (which has shape "
           "torch.Size([0])), this look incorrect.", tensors(LLAMA), "said:model-side", beyond=OTHER_MODEL),
    Report("huggingface/diffusers/issues/10540",
           "File \"src/diffusers/loaders/single_file_utils.py\", line 598, in infer_diffusers_model_type\n    if "
           "checkpoint[\"img_in.weight\"].shape[1] == 384:\n       ~~~~~~~~~~^^^^^^^^^^^^^^^^^\nKeyError: "
           "'img_in.weight'", tensors(FLUX, "flux1-dev.safetensors"), "solved",
           moved(FLUX, ("model.diffusion_model.", ""))),
    Report("invoke-ai/InvokeAI/pull/9333",
           "RuntimeError: Failed to load all parameters from checkpoint. Meta tensors remain: "
           "['model.visual.blocks.0.attn.qkv.weight', 'model.language_model.embed_tokens.weight']", tensors(QWEN),
           "solved", {**llama("model.language_model."), "lm_head.weight": (32, 8),
                      "model.visual.blocks.0.attn.qkv.weight": (24, 8)}),
    Report("hpanwar08/detectron2/issues/13",
           "'backbone.bottom_up.res4.1.conv1.weight' has shape (4, 16, 1, 1) in the checkpoint but (16, 16, 1, 1) in "
           "the model! Skipped.\n'backbone.bottom_up.res4.1.conv2.weight' has shape (4, 4, 3, 3) in the checkpoint "
           "but (16, 2, 3, 3) in the model! Skipped.", pickled({"model": zeros(PYRAMID)}), "said:shape-mismatch",
           beyond=OTHER_MODEL),
    Report("huggingface/diffusers/issues/3390", not_used("CLIPTextModel", list(OTHER_TOWER)),
           tensors({**TEXT, **OTHER_TOWER}), "said:unexpected-keys", beyond=NO_NEED),
    Report("huggingface/diffusers/pull/9622",
           "Loading adapter weights from state_dict led to missing keys in the model: \n\n"
           "single_transformer_blocks.0.attn.to_q.lora_A.default_0.weight, "
           "single_transformer_blocks.0.attn.to_q.lora_B.default_0.weight.", tensors(FLUX_LORA), "said:missing-keys",
           beyond=OTHER_MODEL),
)  # fmt: skip
"""The threads."""

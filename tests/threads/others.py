"""Thirty-two more public threads, written down with the answers that they need before ckptfix was run on any of them.

`outcome` is what a person with the thread open would answer: ``solved``, if one command gives a file that the loader
takes; ``python``, if a line of Python does; ``said:ID``, if no file can help, and the finding ID says why. A message is
shortened to the keys of the file, whose sizes are small.

At the first try, 17 of the 32 came out as written down: 9 solved, 1 by Python, 7 explained. Of the others, one was a
traceback, four commands did harm (weights called scales, attention and layers left out), four did a part of the work,
four threads had no answer, and two a wrong one, because the rebuilt file lacked the keys beside its weights. The rules
that they led to are not part of that measure.
"""

from __future__ import annotations

from threads.threads import Thread, llama, lora, moved, torch_message

BERT = {"embeddings.word_embeddings.weight": (32, 8), "embeddings.LayerNorm.weight": (8,)}
GPT2 = {f"lm_model.transformer.h.{n}.attn.{part}": shape for n in range(2)
        for part, shape in (("c_attn.weight", (8, 24)), ("c_attn.bias", (24,)))}  # fmt: skip
MASKS = {f"lm_model.transformer.h.{n}.attn.{part}": shape for n in range(2)
         for part, shape in (("bias", (1, 1, 16, 16)), ("masked_bias", ()))}  # fmt: skip
T5 = {"shared.weight": (101, 8), "lm_head.weight": (101, 8), "encoder.block.0.layer.0.SelfAttention.q.weight": (8, 8)}
DELTA = {"decoder.embed_tokens.weight": (104, 8), "decoder.output_projection.weight": (104, 8),
         "decoder.layers.0.fc1.weight": (16, 8)}  # fmt: skip
HEADED = {**llama(), "lm_head.weight": (32, 8)}
SAVED = {"base_model.model.model.embed_tokens.modules_to_save.weight": (64, 8),
         "base_model.model.lm_head.modules_to_save.weight": (64, 8), **lora("base_model.model.model.")}  # fmt: skip
DEEPSEEK = {"model.embed_tokens.weight": (32, 8), "model.layers.3.mlp.shared_experts.down_proj.weight": (8, 16)}
IP = {"unet.conv_in.weight": (4, 4), "unet.mid_block.conv.weight": (4, 4), "image_proj_model.proj.weight": (8, 4),
      "image_proj_model.proj.bias": (8,), "image_proj_model.norm.weight": (4,), "image_proj_model.norm.bias": (4,),
      "adapter_modules.1.to_k_ip.weight": (4, 4), "adapter_modules.1.to_v_ip.weight": (4, 4)}  # fmt: skip
NEW_IP = {name: shape for name, shape in moved(IP, ("image_proj_model.", "image_proj."),
          ("adapter_modules.", "ip_adapter.")).items() if not name.startswith("unet.")}  # fmt: skip
GATED = {f"bn1.{part}": (4,) for part in ("g", "area", "score", "bn_mask", "bn.weight", "bn.bias", "bn.running_mean",
                                          "bn.running_var")} | {"conv1.weight": (4, 3, 3, 3)}  # fmt: skip
ATTENTION = ("q_lin.weight", "q_lin.bias", "k_lin.weight", "k_lin.bias")
PARLAI = {f"decoder.layers.{n}.self_attention.{part}": (8, 8) if part.endswith("weight") else (8,)
          for n in range(4) for part in ATTENTION} | {"decoder.norm_embeddings.weight": (8,),
          "decoder.norm_embeddings.bias": (8,), "embeddings.weight": (32, 8)}  # fmt: skip
OLD_LORA = {f"down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_{part}_lora.{side}.weight": shape
            for part in ("k", "q") for side, shape in (("down", (4, 8)), ("up", (8, 4)))}  # fmt: skip
IA3 = {f"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_{part}.{leaf}": shape
       for part in "kv" for leaf, shape in (("weight", (8, 1)), ("on_input", ()))}  # fmt: skip
FLUX = {"img_in.weight": (8, 4), "txt_in.weight": (8, 4), "double_blocks.0.img_attn.qkv.weight": (24, 8),
        "double_blocks.0.txt_attn.qkv.weight": (24, 8), "single_blocks.0.linear1.weight": (56, 8),
        "final_layer.linear.weight": (4, 8)}  # fmt: skip
LANES = {"backbone.conv1.weight": (4, 3, 3, 3), "decoder.layers.0.norms.0.weight": (4,)}
EMA_LANES = {f"ema_{name.replace('.', '_')}": shape for name, shape in LANES.items()}
RESNET = {"conv1.weight": (4, 3, 3, 3), "bn1.weight": (4,), "bn1.bias": (4,)}
MMCLS = {"backbone.cls_token": (1, 1, 8), "backbone.pos_embed": (1, 5, 8),
         "backbone.patch_embed.projection.weight": (8, 3, 2, 2), "head.layers.head.weight": (3, 8)} | {
    f"backbone.layers.{n}.{part}": shape for n in range(2) for part, shape in (
        ("ln1.weight", (8,)), ("attn.qkv.weight", (24, 8)), ("attn.qkv.bias", (24,)), ("attn.proj.weight", (8, 8)),
        ("attn.proj.bias", (8,)), ("ffn.layers.0.0.weight", (32, 8)))}  # fmt: skip
MMSEG = {name.removeprefix("backbone.").replace("attn.qkv.", "attn.attn.in_proj_").replace(
         "attn.proj.", "attn.attn.out_proj."): shape for name, shape in MMCLS.items() if "head" not in name}
POSTER = {f"llama_model.base_model.model.model.layers.{n}.self_attn.{part}_proj.{leaf}": shape for n in range(2)
          for part in "qv" for leaf, shape in (("weight", (8, 8)), ("lora_A.default.weight", (4, 8)),
          ("lora_B.default.weight", (8, 4)))} | {"llama_model.base_model.model.model.norm.weight": (8,)}  # fmt: skip
NEW_POSTER = {name.replace("_proj.weight", "_proj.base_layer.weight"): shape for name, shape in POSTER.items()}
DUKE = {f"dec.embedding.{part}": shape for part, shape in (
        ("word_embeddings.weight", (32, 8)), ("position_embeddings.weight", (16, 8)), ("LayerNorm.weight", (8,)),
        ("LayerNorm.bias", (8,)))} | {"enc.enc.encoder.layer.0.output.dense.weight": (8, 8)}  # fmt: skip
NEW_DUKE = moved(DUKE, ("dec.embedding.", "dec.embedding.0."))
SCGPT = {f"transformer_encoder.layers.{n}.{part}": shape for n in range(2) for part, shape in (
         ("self_attn.Wqkv.weight", (24, 8)), ("self_attn.Wqkv.bias", (24,)), ("self_attn.out_proj.weight", (8, 8)),
         ("linear1.weight", (16, 8)))}  # fmt: skip
NEW_SCGPT = {name.replace("Wqkv.", "in_proj_"): shape for name, shape in SCGPT.items()}
LINEAR = {"model.conv.weight": (4, 3), "model.Linear4.weight": (2, 4), "model.Linear4.bias": (2,)}
MOBILE = {f"features.{n}.conv.{part}.weight": (4, 4, 1, 1) for n in (1, 2) for part in (0, 4)}
DIFFUSION = {f"denoise_fn.downs.{n}.{part}": shape for n in (11, 12, 13) for part, shape in (
             ("res_block.block1.weight", (8, 8)), ("res_block.block1.bias", (8,)))}  # fmt: skip
MORE_ATTENTION = {f"denoise_fn.downs.{n}.attn.{part}": (8, 8) if part != "norm.bias" else (8,) for n in (12, 13)
                  for part in ("norm.bias", "qkv.weight", "out.weight")}  # fmt: skip
SHARDED = {f"language_model.model.layers.3.self_attn.{part}_proj.weight": (8, 8) for part in "qkv"}
FEATURES = {"module.feature.0.weight": (4, 3, 3, 3), "module.feature.0.bias": (4,), "module.classifier.weight": (2, 4)}
QWEN_LORA = {f"base_model.model.model.layers.9.{part}.lora_{side}.weight": shape for part, rows, columns in (
             ("self_attn.o_proj", 28, 28), ("mlp.gate_proj", 148, 28), ("mlp.down_proj", 28, 148))
             for side, shape in (("A", (16, columns)), ("B", (rows, 16)))}  # fmt: skip


def size_mismatch(*rows: tuple[str, tuple[int, ...], tuple[int, ...]], model: str = "Model") -> str:
    """Return torch's message about tensors whose shapes differ: name, shape in the file, shape in the model."""
    lines = (f"\n\tsize mismatch for {name}: copying a param with shape torch.Size({list(saved)}) from checkpoint, the "
             f"shape in current model is torch.Size({list(wanted)})." for name, saved, wanted in rows)  # fmt: skip
    return f"RuntimeError: Error(s) in loading state_dict for {model}:{''.join(lines)}"


GROUPS = ("  File \"torch/optim/optimizer.py\", line 114, in load_state_dict\n    raise ValueError(\"loaded state dict "
          "contains a parameter group \"\nValueError: loaded state dict contains a parameter group that doesn't match "
          "the size of optimizer's group")  # fmt: skip

OTHERS: tuple[Thread, ...] = (
    Thread(
        "PyThaiNLP/MultiEL/issues/2", "torch",
        torch_message("HFEncoder", [], ["transformer.embeddings.position_ids"]),
        {f"transformer.{name}": shape for name, shape in {**BERT, "embeddings.position_ids": (1, 16)}.items()},
        "solved", {f"transformer.{name}": shape for name, shape in BERT.items()},
    ),
    Thread(
        "ChuanMeng/DukeNet/issues/2", "torch",
        torch_message("DukeNet", ["enc.enc.embeddings.position_ids", "dec.embedding.0.position_ids",
                                  *(name for name in NEW_DUKE if "embedding" in name), "dec.embedding.1.pe"],
                      [name for name in DUKE if "embedding" in name]),
        DUKE, "solved", NEW_DUKE, "model",
    ),
    Thread(
        "bowang-lab/scGPT/issues/173", "torch",
        torch_message("TransformerGenerator", [], [name for name in SCGPT if "Wqkv" in name]),
        SCGPT, "solved", NEW_SCGPT,
    ),
    Thread(
        "xiongxslab/Translatomer/issues/3", "torch",
        torch_message("TrainModule", ["model.Linear1.weight", "model.Linear1.bias"],
                      ["model.Linear4.weight", "model.Linear4.bias"]),
        LINEAR, "solved", moved(LINEAR, ("model.Linear4.", "model.Linear1.")), "state_dict",
    ),
    Thread(
        "dukGuo/valle-audiodec/issues/1", "torch", torch_message("AR", [], list(MASKS)),
        {**GPT2, **MASKS}, "solved", GPT2, "model",
    ),
    Thread(
        "Jiuzhouh/PiVe/issues/4", "torch",
        size_mismatch(("shared.weight", (101, 8), (128, 8)), ("lm_head.weight", (101, 8), (128, 8))),
        T5, "solved", {**T5, "shared.weight": (128, 8), "lm_head.weight": (128, 8)},
    ),
    Thread(
        "microsoft/unilm/issues/392", "fairseq",
        size_mismatch(("decoder.embed_tokens.weight", (104, 8), (96, 8)),
                      ("decoder.output_projection.weight", (104, 8), (96, 8)), model="XLMTDecoderVariantModel"),
        DELTA, "solved", {**DELTA, "decoder.embed_tokens.weight": (96, 8), "decoder.output_projection.weight": (96, 8)},
    ),
    Thread(
        "YangRui2015/RiC/issues/19", "torch",
        size_mismatch(("model.embed_tokens.weight", (32, 8), (28, 8)), ("lm_head.weight", (32, 8), (28, 8)),
                      model="LlamaForCausalLM"),
        HEADED, "solved", {**HEADED, "model.embed_tokens.weight": (28, 8), "lm_head.weight": (28, 8)},
    ),
    Thread(
        "hiyouga/LlamaFactory/issues/7062", "PEFT",
        "\n".join(f"[rank1]:        size mismatch for {name}: copying a param with shape torch.Size([64, 8]) from "
                  "checkpoint, the shape in current model is torch.Size([48, 8])." for name in (
                      "base_model.model.model.embed_tokens.modules_to_save.default.weight",
                      "base_model.model.lm_head.modules_to_save.default.weight")),
        SAVED, "solved", {name: (48, 8) if shape == (64, 8) else shape for name, shape in SAVED.items()},
    ),
    Thread(
        "huggingface/autotrain-advanced/issues/834", "torch",
        "size mismatch for lm_head.weight: copying a param with shape torch.Size([33, 8]) from checkpoint, the shape in"
        " current model is torch.Size([32, 8]).",
        {**HEADED, "model.embed_tokens.weight": (33, 8), "lm_head.weight": (33, 8)}, "solved",
        {**HEADED, "model.embed_tokens.weight": (32, 8), "lm_head.weight": (32, 8)},
    ),
    Thread(
        "huggingface/autotrain-advanced/issues/487", "PEFT",
        size_mismatch(*((name.replace(".weight", ".default.weight"), shape, tuple(32 if size == 28 else 112
                         if size == 148 else size for size in shape)) for name, shape in QWEN_LORA.items())),
        QWEN_LORA, "said:model-side",
    ),
    Thread(
        "sgl-project/sglang/issues/6054", "SGLang",
        "[2025-05-06 11:38:39 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        "KeyError: 'model.layers.3.mlp.shared_experts.down_proj.weight_scale'",
        DEEPSEEK, "said:missing-keys",
    ),
    Thread(
        "vllm-project/vllm/issues/41174", "vLLM",
        "ValueError: Missing keys ('language_model.model.layers.3.self_attn.attn.q_scale', "
        "'language_model.model.layers.3.self_attn.attn.k_scale', ...) in loaded state!",
        SHARDED, "said:missing-keys",
    ),
    Thread(
        "tencent-ailab/IP-Adapter/issues/29", "torch",
        torch_message("ImageProjModel", ["proj.weight", "proj.bias", "norm.weight", "norm.bias"], []),
        IP, "solved", NEW_IP,
    ),
    Thread(
        "tencent-ailab/IP-Adapter/issues/444", "torch",
        "    ip_layers.load_state_dict(state_dict[\"Adapter\"])\nKeyError: 'Adapter'", NEW_IP, "said:missing-keys",
    ),
    Thread(
        "youzhonghui/gate-decorator-pruning/issues/25", "torch",
        torch_message("ResNet", ["bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"],
                      [name for name in GATED if name != "conv1.weight"]),
        GATED, "solved", {"conv1.weight": (4, 3, 3, 3), **{f"bn1.{leaf}": (4,) for leaf in (
                          "weight", "bias", "running_mean", "running_var")}},
    ),
    Thread(
        "YINYIPENG-EN/Pruning_for_YOLOX/issues/5", "torch",
        torch_message("YOLOX", [], ["start_epoch", "model", "optimizer", "amp"]),
        RESNET, "solved", RESNET, "model", beside=("start_epoch", "optimizer", "amp"),
    ),
    Thread(
        "MeteoSwiss/ldcast/issues/12", "torch",
        torch_message("LatentDiffusion", list(RESNET), ["epoch", "global_step", "pytorch-lightning_version",
                      "state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers"]),
        RESNET, "solved", RESNET, "state_dict",
        beside=("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "optimizer_states",
                "lr_schedulers"),
    ),
    Thread(
        "facebookresearch/ParlAI/issues/2931", "torch",
        torch_message("TransformerGeneratorModel", [], [name for name in PARLAI if "norm_" in name or "layers.2" in name
                                                       or "layers.3" in name]),
        PARLAI, "said:unexpected-keys",
    ),
    Thread(
        "wgcban/ddpm-cd/issues/51", "torch", torch_message("DDPM", [], list(MORE_ATTENTION)),
        {**DIFFUSION, **MORE_ATTENTION}, "said:unexpected-keys",
    ),
    Thread(
        "Comfy-Org/ComfyUI/issues/1144", "ComfyUI", "\n".join(f"lora key not loaded {name}" for name in OLD_LORA),
        OLD_LORA, "said:unexpected-keys",
    ),
    Thread(
        "Comfy-Org/ComfyUI/issues/6397", "ComfyUI", "\n".join(f"lora key not loaded: {name}" for name in IA3),
        IA3, "said:unexpected-keys",
    ),
    Thread(
        "Comfy-Org/ComfyUI/issues/7221", "ComfyUI",
        "ERROR: Could not detect model type of: /Users/eren/CUI-AI/ComfyUI/models/checkpoints/aidmaFLUXPro1.1-FLUX.safe"
        "tensors", FLUX, "solved", {f"model.diffusion_model.{name}": shape for name, shape in FLUX.items()},
    ),
    Thread(
        "zkyseu/O2SFormer/issues/23", "mmengine",
        f"The model and loaded state dict do not match exactly\n\nunexpected key in source state_dict: "
        f"{', '.join(EMA_LANES)}\n", {**LANES, **EMA_LANES}, "solved", LANES, at="state_dict",
    ),
    Thread(
        "ligang-cs/PseCo/issues/7", "mmengine",
        "2022-09-13 15:15:48,052 - mmcv - WARNING - The model and loaded state dict do not match exactly\n\nunexpected "
        "key in source state_dict: conv1.bias\n", {**RESNET, "conv1.bias": (4,)}, "said:unexpected-keys",
    ),
    Thread(
        "open-mmlab/mmsegmentation/issues/1473", "mmengine",
        f"unexpected key in source state_dict: {', '.join(MMCLS)}\n\nmissing keys in source state_dict: "
        f"{', '.join(MMSEG)}\n", MMCLS, "solved", {**MMSEG, "head.layers.head.weight": (3, 8)}, "state_dict",
    ),
    Thread(
        "jaepoong/PosterLlama/issues/10", "torch",
        torch_message("PosterLlama", [name for name in NEW_POSTER if "base_layer" in name],
                      [name for name in POSTER if name.endswith("_proj.weight")]),
        POSTER, "solved", NEW_POSTER, "model",
    ),
    Thread(
        "Eric-mingjie/network-slimming/issues/5", "torch before 0.4",
        "    .format(name))\nKeyError: 'unexpected key \"module.feature.0.weight\" in state_dict'",
        FEATURES, "solved", moved(FEATURES, ("module.", "")), "state_dict",
    ),
    Thread(
        "lmbxmu/1xN/issues/1", "torch",
        torch_message("MobileNetV3", [name.replace(".weight", ".bias") for name in MOBILE], []),
        MOBILE, "said:missing-keys",
    ),
    Thread("facebookresearch/GloRe/issues/8", "optimizer", GROUPS, {}, "python", optimizer="SGD"),
    Thread(
        "ultralytics/yolov3/issues/80", "optimizer",
        "    exp_avg, exp_avg_sq = state['exp_avg'], state['exp_avg_sq']\nKeyError: 'exp_avg'", {},
        "said:optimizer-state", optimizer="SGD",
    ),
    Thread(
        "pytorch/pytorch/issues/40769", "optimizer",
        "  File \"torch/optim/adam.py\", line 95, in step\n    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)\n"
        "RuntimeError: The size of tensor a (2048) must match the size of tensor b (7) at non-singleton dimension 3",
        {}, "python", optimizer="Adam",
    ),
)  # fmt: skip
"""The threads; the file of one with `optimizer` is a training checkpoint with the state of that optimizer."""

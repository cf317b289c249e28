"""The 36 reports of people that were rebuilt first: the pasted message, the smallest file, and the answer.

`outcome` is as in `threads.threads`; ``merged``: the printed line of `merge` gives the model. A thread is in scope if a
changed file would be its cure, whether or not ckptfix can make it (it joins no tensor-parallel files yet). `beyond` has
the reason why no file can be.
"""

from __future__ import annotations

import io
import json
import struct
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import rank_files
import torch
import zero_files
from array_files import onnx_model, onnx_tensor
from safetensors.torch import save_file
from threads.others import FLUX, GROUPS, IP, NEW_IP, size_mismatch
from threads.threads import BACKBONE, LLAMA, Shapes, lora, torch_message
from torch import nn

Build = Callable[[Path], Path]


@dataclass(frozen=True)
class Report:
    """A report; `url` is under https://github.com/, `want` the keys and shapes of the right output, and `beyond` why
    the thread is out of scope."""

    url: str
    message: str
    build: Build
    outcome: str
    want: Shapes | None = None
    beyond: str = ""


NOT_SAVED = "the values that the loader misses were never trained, or never saved"
EMPTIED = "nothing is left in the file"
OTHER_MODEL = "the cause is how the model was built, or which release of the program builds it: the file is sound"
FUSED_ONCE = "a convolution and its BatchNorm that were fused cannot be taken apart"
UNFLAT = "only the wrapped model knows what is where in a flat parameter"
FOREIGN = "a model of another framework: its own converters know the architecture"
NEEDS_BASE = "the cure is a merge into the base model, which the file does not have"
NO_NEED = "nothing is wrong: the file loads as it is, or once its library is imported"


def zeros(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def tensors(shapes: Shapes, name: str = "model.safetensors", **metadata: str) -> Build:
    def build(folder: Path) -> Path:
        save_file(zeros(shapes), folder / name, metadata or {"format": "pt"})
        return folder / name

    return build


def pickled(value: Any, name: str = "model.pth") -> Build:
    def build(folder: Path) -> Path:
        torch.save(value() if callable(value) else value, folder / name)
        return folder / name

    return build


def raw(name: str, data: bytes) -> Build:
    def build(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return build


def fp8(folder: Path) -> Path:
    front = "model.layers.0.mlp.down_proj."
    state = {f"{front}weight": torch.ones(16, 32).to(torch.float8_e4m3fn), f"{front}weight_scale": torch.ones(16, 1)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def nf4(folder: Path) -> Path:
    name = "model.layers.0.mlp.down_proj.weight"
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [32, 64]}
    state = {name: torch.zeros(1024, 1, dtype=torch.uint8), f"{name}.absmax": torch.ones(32),
             f"{name}.quant_map": torch.linspace(-1, 1, 16), "model.norm.weight": torch.ones(32),
             f"{name}.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(facts).encode()], dtype=torch.uint8)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def quanto(folder: Path) -> Path:
    state = {"lm_head.weight._data": torch.ones(32, 8, dtype=torch.int8), "lm_head.weight._scale": torch.ones(32, 1),
             "lm_head.input_scale": torch.ones(1), "lm_head.output_scale": torch.ones(1)}  # fmt: skip
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def zero(folder: Path) -> Path:
    zero_files.example(2, 2).save(folder / "run")
    return folder / "run"


def consolidated(folder: Path) -> Path:
    shapes = {"tok_embeddings.weight": (32, 4), "layers.0.attention.wq.weight": (4, 8),
              "layers.0.attention.wo.weight": (8, 4)}  # fmt: skip
    for rank in range(2):
        torch.save(zeros(shapes), folder / f"consolidated.0{rank}.pth")
    return folder / "consolidated.00.pth"


def extra_state(folder: Path) -> Path:
    data = io.BytesIO()
    torch.save({"scale_fwd": torch.ones(3)}, data)
    front = "decoder.layers.0."
    state = {f"{front}self_attention.linear_qkv.weight": torch.zeros(24, 8),
             f"{front}self_attention.linear_qkv._extra_state": io.BytesIO(data.getvalue()),
             f"{front}self_attention.core_attention._extra_state": None,
             f"{front}mlp.linear_fc1._extra_state": torch.empty(0, dtype=torch.uint8)}  # fmt: skip
    torch.save({"model": state, "iteration": 3}, folder / "model_optim_rng.pt")
    return folder / "model_optim_rng.pt"


def agent(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "model_saved.zip", "w") as archive:
        archive.writestr("data", json.dumps({"gamma": 0.99, "num_timesteps": 1000}))
        for name, value in (("policy.pth", zeros({"q_net.0.weight": (8, 4)})),
                            ("policy.optimizer.pth", {"state": {}, "param_groups": [{"lr": 1e-3, "params": [0]}]})):
            data = io.BytesIO()
            torch.save(value, data)
            archive.writestr(name, data.getvalue())
        archive.writestr("_stable_baselines3_version", "2.2.1")
    return folder / "model_saved.zip"


def gone(name: str, kind: type) -> None:
    """Give the class `kind` the module `name`, which is not importable once `build` returns."""
    module = types.ModuleType(name)
    kind.__module__, kind.__qualname__ = name, kind.__name__
    setattr(module, kind.__name__, kind)
    parts = name.split(".")
    for count in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
    sys.modules[name] = module


def yolo(folder: Path) -> Path:
    class C3k2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

    class DetectionModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(C3k2())

    before = set(sys.modules)
    gone("ultralytics.nn.modules.block", C3k2)
    gone("ultralytics.nn.tasks", DetectionModel)
    torch.save({"epoch": -1, "model": None, "ema": DetectionModel(), "optimizer": None}, folder / "best.pt")
    for name in set(sys.modules) - before:
        del sys.modules[name]
    return folder / "best.pt"


def index_of_others(folder: Path) -> Path:
    names = list(LLAMA)
    parts = {"model-00001-of-00002.safetensors": names[:6], "model-00002-of-00002.safetensors": names[6:]}
    for number, keys in enumerate(parts.values(), start=1):
        torch.save(zeros({key: LLAMA[key] for key in keys}), folder / f"hf_model_000{number}_15.pt")
    rows = {key: part for part, keys in parts.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": rows}))
    (folder / "config.json").write_text("{}")
    return folder


def interrupted(folder: Path) -> Path:
    save_file(zeros(lora("base_model.model.model.")), folder / "pytorch_lora_weights.safetensors", {"format": "pt"})
    (folder / "optimizer.bin").write_bytes(b"")
    (folder / "training_state.json").write_text("{}")
    return folder


def distributed(**values: Any) -> Build:
    def build(folder: Path) -> Path:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(values, checkpoint_id=folder / "step-10", no_dist=True)
        return folder / "step-10"

    return build


def npu(folder: Path) -> Path:
    torch.save({"w": torch.zeros(4)}, folder / "cpu.pt")
    with zipfile.ZipFile(folder / "cpu.pt") as old, zipfile.ZipFile(folder / "npu.pt", "w") as new:
        for row in old.infolist():
            data = old.read(row)
            new.writestr(row.filename, data.replace(b"X\x03\x00\x00\x00cpu", b"X\x05\x00\x00\x00npu:0"))
    (folder / "cpu.pt").unlink()
    return folder / "npu.pt"


def ranks(folder: Path) -> Path:
    (folder / "actor").mkdir()
    for rank in range(rank_files.WORLD):
        path = folder / "actor" / f"model_world_size_{rank_files.WORLD}_rank_{rank}.pt"
        rank_files.dtensors(path, rank, {"layer_scalar": torch.ones(1), "s": torch.tensor(1.0)})
    return folder / "actor"


class AffineQuantizedTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape)

    def __init__(self, data: torch.Tensor) -> None:
        self.tensor_impl = data

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["tensor_impl"], []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return args[0]


def torchao(folder: Path) -> Path:
    before = set(sys.modules)
    gone("torchao.dtypes.affine_quantized_tensor", AffineQuantizedTensor)
    torch.save({"0.weight": AffineQuantizedTensor(torch.ones(4, 4)), "0.bias": torch.zeros(4)}, folder / "m.pt")
    for name in set(sys.modules) - before:
        del sys.modules[name]
    return folder / "m.pt"


def trained() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}


def moments(*names: str) -> dict[str, Any]:
    state = {name: {key: torch.zeros(2) for key in ("step", "exp_avg", "exp_avg_sq")} for name in names}
    return {"state": state, "param_groups": [{"lr": 1e-3, "params": list(names)}]}


ADAPTER = lora("base_model.model.model.")
NAMED = {name.replace(".weight", ".default.weight"): shape for name, shape in ADAPTER.items()}
SAVED = {"base_model.model.model.embed_tokens.modules_to_save.weight": (50, 8), **ADAPTER}
KOHYA = {f"lora_unet_blocks_0_self_attn_q.{part}": shape for part, shape in (
         ("lora_down.weight", (4, 16)), ("lora_up.weight", (16, 4)), ("alpha", ()))}  # fmt: skip
CLIP = {f"text_encoder.text_model.{name}": (8, 8) for name in (
        "embeddings.token_embedding.weight", "encoder.layers.0.self_attn.q_proj.weight")}  # fmt: skip
EXPERTS = {"model.norm.weight": (8,)} | {
    f"model.layers.0.mlp.experts.{n}.{part}.weight": (8, 6) if part == "down_proj" else (6, 8)
    for n in range(3) for part in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
STACKED = {"model.layers.0.mlp.experts.gate_up_proj": (3, 12, 8), "model.layers.0.mlp.experts.down_proj": (3, 8, 6),
           "model.norm.weight": (8,)}  # fmt: skip
BURN = {**{f"backbone.{name}": shape for name, shape in BACKBONE.items()}, "decode_head.conv.weight": (2, 8, 1, 1)}
FUSED = {f"model.{n}.conv.{leaf}": (4, 4, 3, 3) if leaf == "weight" else (4,) for n in (0, 1)
         for leaf in ("weight", "bias")}  # fmt: skip
QAT = {"conv.weight": (4, 3, 3, 3), "conv.bias": (4,), "conv.weight_fake_quant.scale": (1,),
       "conv.weight_fake_quant.zero_point": (1,), "conv.weight_fake_quant.fake_quant_enabled": (1,),
       "conv.activation_post_process.scale": (1,)}  # fmt: skip
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q20sIQ5s", 20, b"general.architecture", 8, 5, b"llama")
GGUF += struct.pack("<Q19sIQQIQ", 19, b"blk.0.attn_q.weight", 2, 4, 4, 0, 0)
GGUF += bytes(-len(GGUF) % 32) + numpy.arange(16, dtype="<f4").tobytes()
FLAT = "student._fsdp_wrapped_module._flat_param"
DYFADET = {"projection.embed.0.conv.weight": (4, 3, 3), "projection.embed.0.norm.weight": (4,)}

REPORTS: tuple[Report, ...] = (
    Report("Facico/Chinese-Vicuna/issues/199",
           torch_message("PeftModelForCausalLM", [next(iter(NAMED))], [next(iter(ADAPTER))]),
           tensors(ADAPTER, "adapter_model.safetensors"), "solved", NAMED),
    Report("meta-pytorch/torchtune/issues/2537",
           "ValueError: Missing LoRA key layers.0.attn.q_proj.lora_a.weight from adapter state dict",
           pickled(zeros(ADAPTER), "adapter_0.pt"), "said:library-names"),
    Report("hiyouga/LlamaFactory/issues/3125",
           size_mismatch(("base_model.model.model.embed_tokens.modules_to_save.default.weight", (50, 8), (32, 8)),
                         model="PeftModelForCausalLM"),
           tensors(SAVED, "adapter_model.safetensors"), "solved",
           {**SAVED, "base_model.model.model.embed_tokens.modules_to_save.weight": (32, 8)}),
    Report("ggml-org/llama.cpp/issues/7924", "ValueError: Can not map tensor 'bert.embeddings.LayerNorm.beta'",
           pickled(zeros({"bert.embeddings.LayerNorm.beta": (8,), "bert.embeddings.LayerNorm.gamma": (8,)}),
                   "pytorch_model.bin"), "solved",
           {"bert.embeddings.LayerNorm.bias": (8,), "bert.embeddings.LayerNorm.weight": (8,)}),
    Report("ggml-org/llama.cpp/issues/9252", "ValueError: Can not map tensor 'lm_head.weight._scale'", quanto,
           "solved", {"lm_head.weight": (32, 8)}),
    Report("vllm-project/vllm/issues/15959",
           size_mismatch(("model.layers.0.mlp.down_proj.weight", (1024, 1), (32, 64)), model="LlamaForCausalLM"), nf4,
           "solved", {"model.layers.0.mlp.down_proj.weight": (32, 64), "model.norm.weight": (32,)}),
    Report("vllm-project/llm-compressor/issues/959", "KeyError: 'layers.0.mlp.down_proj.weight_scale'", fp8, "solved",
           {"model.layers.0.mlp.down_proj.weight": (16, 32)}),
    Report("deepspeedai/DeepSpeed/issues/2898",
           "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 4 but the current world size is "
           "6. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently "
           "supported.", zero, "python"),
    Report("meta-llama/llama/issues/208",
           size_mismatch(("tok_embeddings.weight", (32, 4), (32, 8)), model="Transformer"), consolidated,
           "said:one-rank"),
    Report("NVIDIA/Megatron-LM/issues/900",
           torch_message("GPTModel", [], ["decoder.layers.0.self_attention.core_attention._extra_state"]), extra_state,
           "solved", {"decoder.layers.0.self_attention.linear_qkv.weight": (24, 8)}),
    Report("LucasAlegre/sumo-rl/issues/195",
           "UserWarning: Could not deserialize object lr_schedule.\nException: code() argument 13 must be str, not int",
           agent, "solved", {"q_net.0.weight": (8, 4)}),
    Report("ultralytics/ultralytics/issues/19350",
           "AttributeError: Can't get attribute 'C3k2' on <module 'ultralytics.nn.modules.block' from 'a.py'>", yolo,
           "solved", {"model.0.conv.weight": (4, 3, 1, 1), "model.0.conv.bias": (4,)}),
    Report("ubisoft/ComfyUI-Chord/pull/29",
           torch_message("ChordModel", ["text_encoder.embeddings.token_embedding.weight"],
                         ["text_encoder.text_model.embeddings.token_embedding.weight"]),
           tensors(CLIP, "chord.safetensors"), "solved",
           {name.replace("text_model.", ""): shape for name, shape in CLIP.items()}),
    Report("hiyouga/LlamaFactory/pull/10414", torch_message("Qwen3MoeForCausalLM", list(STACKED)[:2], []),
           tensors(EXPERTS), "solved", STACKED),
    Report("NASA-IMPACT/hls-foundation-os/issues/64",
           f"The model and loaded state dict do not match exactly\n\nunexpected key in source state_dict: "
           f"{', '.join(BURN)}\n\nmissing keys in source state_dict: {', '.join(BACKBONE)}",
           pickled({"state_dict": zeros(BURN), "meta": {}}), "solved",
           {**BACKBONE, "decode_head.conv.weight": (2, 8, 1, 1)}),
    Report("huggingface/accelerate/issues/3971",
           "RuntimeError: Missing key in checkpoint state_dict: optimizer.state.0.step.",
           distributed(optimizer=moments("weight", "bias")), "python"),
    Report("facebookresearch/dinov2/issues/544",
           f"The checkpoint state_dict contains keys that are not used by the model:\n  {FLAT}",
           pickled({"model": zeros({FLAT: (100,)})}, "model_0000099.rank_0.pth"), "said:one-rank", beyond=UNFLAT),
    Report("Comfy-Org/ComfyUI/issues/5820",
           "RuntimeError: ERROR: Could not detect model type of: ComfyUI/models/checkpoints/flux_dev.safetensors",
           tensors(FLUX, "flux_dev.safetensors"), "solved",
           {f"model.diffusion_model.{name}": shape for name, shape in FLUX.items()}),
    Report("tdrussell/diffusion-pipe/issues/114",
           "lora key not loaded: lora_unet_blocks_0_self_attn_q.lora_down.weight",
           tensors(KOHYA, "kohya.safetensors", format="pt", ss_network_dim="4"), "said:unexpected-keys"),
    Report("karpathy/llama2.c/issues/266", torch_message("Transformer", [], ["rope.freqs"]),
           pickled(zeros({"tok_embeddings.weight": (8, 4), "rope.freqs": (4,)}), "consolidated.00.pth"), "solved",
           {"tok_embeddings.weight": (8, 4)}),
    Report("sming256/OpenTAD/issues/44", torch_message("DyFADet", list(DYFADET), []),
           pickled({"epoch": 37, "state_dict": zeros({f"module.{name}": shape for name, shape in DYFADET.items()})}),
           "solved", DYFADET),
    Report("bghira/SimpleTuner/issues/2613", "EOFError: Ran out of input", interrupted, "said:empty-file",
           beyond=EMPTIED),
    Report("meta-pytorch/torchtune/issues/931",
           "OSError: q does not appear to have a file named model-00001-of-00002.safetensors", index_of_others,
           "merged", LLAMA),
    Report("ultralytics/ultralytics/issues/9374",
           torch_message("YOLO", ["model.0.bn.weight", "model.0.bn.bias", "model.0.bn.running_mean",
                                  "model.0.bn.running_var"], ["model.0.conv.bias"]),
           pickled(zeros(FUSED)), "said:model-side", beyond=FUSED_ONCE),
    Report("p-e-w/heretic/issues/139",
           "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", raw("m.gguf", GGUF),
           "solved", {"blk.0.attn_q.weight": (4, 4)}),
    Report("huggingface/transformers/issues/8242", "UnpicklingError: invalid load key",
           raw("tf_model.h5", b"\x89HDF\r\n\x1a\n" + b"\0" * 2040), "said:damaged", beyond=FOREIGN),
    Report("onnx/onnx/issues", "_pickle.UnpicklingError: invalid load key, '\\x08'.",
           raw("model.onnx", onnx_model(onnx_tensor("w", numpy.ones(3, "f4")))), "solved",
           {"w": (3,)}),
    Report("mir-group/nequip/pull/590", "AssertionError: EMA module does not hold EMA weights",
           pickled({"state_dict": zeros({"model.w": (4, 4), "ema.model.w": (4, 4)}), "ema_swapped": True}), "nothing"),
    Report("jfzhang95/pytorch-deeplab-xception/issues/134", GROUPS, pickled(trained), "python"),
    Report("tencent-ailab/IP-Adapter/issues/375", "KeyError: 'image_proj'", tensors(IP), "solved", NEW_IP),
    Report("Ascend/pytorch", "RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage "
           "(tagged with npu:0)", npu, "solved", {"w": (4,)}),
    Report("pytorch/pytorch/issues/52492", "ValueError: Attempted to use an uninitialized parameter in <method 'x'>",
           pickled(lambda: nn.Sequential(nn.LazyLinear(4)).state_dict(), "lazy.pt"), "said:no-data", beyond=NOT_SAVED),
    Report("pytorch/pytorch/issues", torch_message("M", [], ["conv.weight_fake_quant.scale"]), pickled(zeros(QAT)),
           "solved", {"conv.weight": (4, 3, 3, 3), "conv.bias": (4,)}),
    Report("pytorch/torchtitan/issues/1903", "the outputs are not human-readable",
           distributed(**zeros({"layers.0.attention.wq.weight": (8, 8), "norm.weight": (8,)}),
                       optimizer={"state.norm.weight.exp_avg": torch.zeros(8)}), "nothing"),
    Report("verl-project/verl/pull/7610",
           "RuntimeError: zero-dimensional tensor (at position 0) cannot be concatenated", ranks, "solved",
           {"fc.weight": (4, 3), "fc.bias": (3,), "layer_scalar": (1,), "s": ()}),
    Report("pytorch/ao/issues/2478",
           "_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported global: GLOBAL "
           "torchao.dtypes.affine_quantized_tensor.AffineQuantizedTensor was not an allowed global by default.",
           torchao, "said:tensor-class", beyond=NO_NEED),
)  # fmt: skip
"""The reports."""

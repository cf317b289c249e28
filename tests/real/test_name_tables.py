"""The tables of names on models of the libraries themselves, where these are installed: equal outputs, or the tensors
that the library's own conversion makes.

Megatron-Core needs no GPU here: its random states for dropout, which only CUDA has, are left out.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real.test_rules import library
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptfix

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BASE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
NEOX = {name: value for name, value in BASE.items() if name not in ("num_key_value_heads", "rms_norm_eps")}
EXPERTS = {"num_experts_per_tok": 2}
HF: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", BASE),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**BASE, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", BASE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**BASE, "head_dim": 16}),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig",
        {**BASE, **EXPERTS, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {**BASE, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**BASE, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    ),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64, "activation_function": "gelu"},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**NEOX, "intermediate_size": 128, "layer_norm_eps": 1e-5}),
}  # fmt: skip
"""Family -> the model and the configuration of transformers."""

TOKENS = torch.arange(18).reshape(2, 9) * 7 % 64


def filled(model: Any) -> Any:
    """A model for inference, with weights that make its outputs depend on each of them."""
    made = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=made) * 0.1)
    return model.eval()


def hf(family: str, **more: Any) -> Any:
    found = library("transformers")
    model, config, sizes = HF[family]
    return filled(getattr(found, model)(getattr(found, config)(**{**sizes, **more})))


def files_of(model: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors that save_pretrained writes: not those in memory, since transformers 5."""
    model.save_pretrained(folder / "saved")
    return load_file(folder / "saved/model.safetensors")


def converted(state: dict[str, Tensor], names: str, folder: Path, **heads: Any) -> dict[str, Tensor]:
    """The tensors after `names`; the way back must give equal bytes, and diff must find nothing."""
    old, new = names.split(":")
    files = [folder / f"{one}.pth" for one in (old, new, "back")]
    torch.save(dict(state), files[0])
    ckptfix.rename(files[0], files[1], names=names, force=True, **heads)
    ckptfix.rename(files[1], files[2], names=f"{new}:{old}", force=True, **heads)
    assert ckptfix.diff(files[0], files[1], names=names, **heads).same
    made: dict[str, Tensor]
    made, back = (torch.load(file, weights_only=True) for file in files[1:])
    left = {name for name in state if name not in back}
    assert left <= {"proj_out.weight"}
    assert all(torch.equal(value, state[name]) for name, value in back.items())
    return made


HEADS = {"heads": 4, "kv_heads": 2}


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)


def logits(model: Any) -> Tensor:
    found: Tensor = model(TOKENS).logits
    return found


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_neox"])
def test_files_of_transformers_5(family: str, tmp_path: Path) -> None:
    model = hf(family)
    want = model.state_dict()
    if "lm_head.weight" not in want:
        pytest.skip("transformers 4 has these names in memory too")
    found = converted(files_of(model, tmp_path), "hf:transformers5", tmp_path, **HEADS)
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


LIT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attn_bias": True},
    "qwen3": {"norm_qk": True, "head_size": 16},
    "mixtral": {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2},
    "qwen3_moe": {
        "mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "intermediate_size": 24,
        "moe_intermediate_size": 24, "norm_qk": True, "head_size": 8,
    },
    "gpt_neox": {
        "bias": True, "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "n_query_groups": 4,
        "parallel_residual": True, "rotary_percentage": 0.25, "intermediate_size": 128, "gelu_approximate": "none",
    },
}  # fmt: skip


@pytest.mark.parametrize("family", LIT)
def test_litgpt(family: str, tmp_path: Path) -> None:
    litgpt = library("litgpt")
    model = hf(family)
    sizes: dict[str, Any] = {
        "block_size": 64, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 2, "n_head": 4, "n_query_groups": 2,
        "n_embd": 32, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_eps": 1e-5,
        "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 48,
    }  # fmt: skip
    other = litgpt.GPT(litgpt.Config(**{**sizes, **LIT[family]})).eval()
    heads = {"heads": 4} if family == "gpt_neox" else HEADS
    other.load_state_dict(converted(files_of(model, tmp_path), "hf:litgpt", tmp_path, **heads))
    assert close(other(TOKENS), logits(model))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_torchtune(family: str, tmp_path: Path) -> None:
    library("torchtune")
    from torchtune.models.llama3 import llama3
    from torchtune.models.qwen2 import qwen2

    model = hf(family)
    other = (qwen2 if family == "qwen2" else llama3)(
        vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64, intermediate_dim=48,
        rope_base=10000, norm_eps=1e-5,
    ).eval()  # fmt: skip
    other.load_state_dict(converted(files_of(model, tmp_path), "hf:torchtune", tmp_path, **HEADS))
    assert close(other(TOKENS), logits(model))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_torchtitan_makes_the_same(family: str, tmp_path: Path) -> None:
    library("torchtitan")
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    model = hf(family)
    attention = SimpleNamespace(n_heads=4, n_kv_heads=2, head_dim=getattr(model.config, "head_dim", None) or 8)
    layer = SimpleNamespace(attention=attention, moe=SimpleNamespace(num_experts=4))
    config = SimpleNamespace(layers=[layer], dim=32, enable_weight_tying=False)
    own = (Llama3StateDictAdapter if family == "llama" else Qwen3StateDictAdapter)(config, None)
    own._validate_hf_rope_config = lambda *_: None
    state = files_of(model, tmp_path)
    want = own.from_hf(dict(state))
    found = converted(state, "hf:torchtitan", tmp_path, **HEADS)
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process group of this process."""
    if not torch.distributed.is_initialized():
        place = tmp_path_factory.mktemp("group") / "store"
        torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)


def test_meta(tmp_path: Path, one_process: None, request: pytest.FixtureRequest) -> None:
    library("fairscale")
    library("llama_models")
    import fairscale.nn.model_parallel.initialize as parallel
    from llama_models.llama3.args import ModelArgs
    from llama_models.llama3.model import Transformer

    parallel.initialize_model_parallel(1)
    request.addfinalizer(parallel.destroy_model_parallel)
    other = Transformer(
        ModelArgs(
            dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, multiple_of=96, norm_eps=1e-5,
            rope_theta=10000, use_scaled_rope=False, max_batch_size=2, max_seq_len=16,
        )
    ).eval()  # fmt: skip
    model = hf("llama", intermediate_size=other.layers[0].feed_forward.w1.weight.shape[0])
    other.load_state_dict(converted(files_of(model, tmp_path), "hf:meta", tmp_path, **HEADS))
    assert close(other(TOKENS, 0), logits(model))


RMS: dict[str, Any] = {
    "normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu, "num_query_groups": 2, "ffn_hidden_size": 48,
}  # fmt: skip
MOE: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
GELU: dict[str, Any] = {"ffn_hidden_size": 128, "activation_func": torch.nn.functional.gelu}
MEGATRON: dict[str, dict[str, Any]] = {
    "llama": RMS,
    "mistral": RMS,
    "qwen2": {**RMS, "add_qkv_bias": True},
    "qwen3": {**RMS, "qk_layernorm": True, "kv_channels": 16},
    "mixtral": {**RMS, **MOE},
    "qwen2_moe": {
        **RMS, **MOE, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 40, "add_qkv_bias": True,
        "moe_shared_expert_gate": True, "moe_router_pre_softmax": True,
    },
    "qwen3_moe": {**RMS, **MOE, "moe_ffn_hidden_size": 24, "kv_channels": 8, "qk_layernorm": True},
    "gpt2": {**GELU, "position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True},
    "gpt_neox": {**GELU, "rotary_percent": 0.25},
}  # fmt: skip
MODEL = ("position_embedding_type", "share_embeddings_and_output_weights", "rotary_percent")
"""Arguments of the model; all others are of its configuration."""


@pytest.fixture
def megatron(
    one_process: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[str], Any]:
    """Make a model of Megatron-Core for a family."""
    library("megatron.core")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    parallel_state.initialize_model_parallel(1, 1)
    request.addfinalizer(parallel_state.destroy_model_parallel)

    def make(family: str) -> Any:
        own = {name: value for name, value in MEGATRON[family].items() if name not in MODEL}
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0,
            attention_dropout=0, masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
            gradient_accumulation_fusion=False, layernorm_epsilon=1e-5, **own,
        )  # fmt: skip
        layers = get_gpt_layer_local_spec(
            num_experts=own.get("num_moe_experts"), moe_grouped_gemm=False,
            qk_layernorm=own.get("qk_layernorm", False), normalization=config.normalization,
        )  # fmt: skip
        of_model = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
        of_model |= {name: value for name, value in MEGATRON[family].items() if name in MODEL}
        return GPTModel(config, layers, vocab_size=64, max_sequence_length=64, **of_model).eval()

    return make


def heads_of_megatron(family: str) -> dict[str, Any]:
    return {} if family == "gpt_neox" else {"heads": 4} if family == "gpt2" else HEADS


@pytest.mark.parametrize("family", MEGATRON)
def test_megatron(family: str, tmp_path: Path, megatron: Callable[[str], Any]) -> None:
    other = megatron(family)
    model = hf(family, **({"use_parallel_residual": False} if family == "gpt_neox" else {}))
    state = converted(files_of(model, tmp_path), "hf:megatron-local", tmp_path, **heads_of_megatron(family))
    assert state.keys() == {name for name in other.state_dict() if "_extra_state" not in name}
    other.load_state_dict(state, strict=False)
    mask = torch.triu(torch.ones(9, 9, dtype=torch.bool), 1)[None, None]
    assert close(other(TOKENS, torch.arange(9)[None].expand(2, 9), mask), logits(model))


@pytest.mark.parametrize("family", [name for name in MEGATRON if name != "mistral"])
def test_torch_dist_of_megatron(
    family: str, tmp_path: Path, megatron: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that Megatron-Core writes: a tensor holds all layers, and common.pt the numbers of heads."""
    model = filled(megatron(family))
    from megatron.core import dist_checkpointing

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    heads = heads_of_megatron(family)
    args = argparse.Namespace(num_attention_heads=4, num_query_groups=2, group_query_attention="kv_heads" in heads)
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    dist_checkpointing.save({"args": args, "model": model.sharded_state_dict()}, str(folder))
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    want = converted(tensors, "megatron-local:hf", tmp_path, **heads)
    found, back, again = (tmp_path / f"{name}.safetensors" for name in ("found", "dist", "again"))
    ckptfix.convert(folder, found, names="hf")
    made = load_file(found)
    assert made.keys() == want.keys() and all(torch.equal(made[name], want[name]) for name in want)
    ckptfix.rename(found, back, names="hf:megatron-dist", **heads)
    ckptfix.rename(back, again, names="megatron-dist:hf", **heads)
    assert ckptfix.diff(found, again).same
    saved = {key: value.shape for key, value in ckptfix.load_state_dict(folder).items() if isinstance(value, Tensor)}
    old = ".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight"  # of TransformerEngine, with experts
    moved = {name.replace(*old) if "num_moe_experts" in MEGATRON[family] else name: saved[name] for name in saved}
    assert {key: value.shape for key, value in load_file(back).items()} == moved


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_executorch_makes_the_same(family: str, tmp_path: Path) -> None:
    library("executorch.examples.models.qwen3.convert_weights")
    if family == "qwen3":
        from executorch.examples.models.qwen3.convert_weights import qwen_3_tune_to_meta as own
    else:
        from executorch.examples.models.qwen2_5.convert_weights import qwen_2_5_hf_to_meta as own
    state = files_of(hf(family), tmp_path)
    want = own(dict(state))
    found = converted(state, "hf:meta", tmp_path)
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


def test_whisper(tmp_path: Path) -> None:
    library("whisper")
    transformers = library("transformers")
    from whisper.model import ModelDimensions, Whisper

    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))}  # fmt: skip
    config = transformers.WhisperConfig(
        **sizes, d_model=32, vocab_size=64, max_target_positions=16, max_source_positions=20, num_mel_bins=80,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = filled(transformers.WhisperForConditionalGeneration(config))
    other = Whisper(ModelDimensions(80, 20, 32, 4, 2, 64, 16, 32, 4, 2)).eval()
    other.load_state_dict(converted(model.state_dict(), "hf:openai", tmp_path))
    sound = torch.randn(2, 80, 40)
    assert close(other(sound, TOKENS), model(sound, decoder_input_ids=TOKENS).logits)


@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_vit(source: str, tmp_path: Path) -> None:
    transformers = library("transformers")
    if source == "timm":
        kind = library("timm").models.vision_transformer.VisionTransformer
        one = kind(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=7)
    else:
        one = library("torchvision").models.VisionTransformer(32, 8, 2, 4, 32, 128, num_classes=7)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32,
        patch_size=8, num_labels=7, layer_norm_eps=1e-6,
    )  # fmt: skip
    other = transformers.ViTForImageClassification(config).eval()
    new = "transformers5" if any(name.startswith("vit.layers.") for name in other.state_dict()) else "hf"
    other.load_state_dict(converted(filled(one).state_dict(), f"{source}:{new}", tmp_path))
    image = torch.randn(2, 3, 32, 32)
    assert close(one(image), other(image).logits)


def test_clip(tmp_path: Path) -> None:
    transformers = library("transformers")
    library("open_clip")
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=8, vocab_size=64, width=64, heads=4, layers=2)
    one = filled(CLIP(32, vision, text, quick_gelu=True))
    same = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    other = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**same, "vocab_size": 64, "max_position_embeddings": 8, "eos_token_id": 2},
            vision_config={**same, "image_size": 32, "patch_size": 8},
            projection_dim=32,
        )
    ).eval()
    other.load_state_dict(converted(one.state_dict(), "openai:hf", tmp_path))
    image, words = torch.randn(2, 3, 32, 32), TOKENS[:, :8] % 60
    words[:, -1] = 63
    found = other(input_ids=words, pixel_values=image)
    picture, phrase = one(image, words)[:2]
    assert close(picture, found.image_embeds) and close(phrase, found.text_embeds)


CROSS, PLAIN = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"), ("DownBlock2D", "UpBlock2D")


def unet(name: str) -> Any:
    kinds = {"sd_unet": (CROSS, CROSS, CROSS, PLAIN), "sdxl_unet": (PLAIN, CROSS, CROSS)}[name]
    more: dict[str, Any] = {} if name == "sd_unet" else {
        "transformer_layers_per_block": (1, 2, 3), "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 56, "use_linear_projection": True,
    }  # fmt: skip
    return library("diffusers").UNet2DConditionModel(
        sample_size=8, layers_per_block=2, block_out_channels=(32, 32, 64, 64)[: len(kinds)], cross_attention_dim=16,
        attention_head_dim=8, norm_num_groups=8, down_block_types=tuple(down for down, _ in kinds),
        up_block_types=tuple(up for _, up in reversed(kinds)), **more,
    )  # fmt: skip


def vae(name: str) -> Any:
    return library("diffusers").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 32, 64, 64), layers_per_block=2, norm_num_groups=8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "build", "front"),
    [
        ("sd_unet", unet, "model.diffusion_model."),
        ("sdxl_unet", unet, "model.diffusion_model."),
        ("sd_vae", vae, "first_stage_model."),
    ],
)
def test_diffusers_makes_the_same(name: str, build: Callable[[str], Any], front: str, tmp_path: Path) -> None:
    model = filled(build(name))
    from diffusers.loaders import single_file_utils

    own = getattr(single_file_utils, "convert_ldm_unet_checkpoint" if "unet" in name else "convert_ldm_vae_checkpoint")
    want = model.state_dict()
    original = converted(want, "diffusers:original", tmp_path)
    found = own({f"{front}{key}": value for key, value in original.items()}, config=dict(model.config))
    assert found.keys() == want.keys() and all(torch.equal(found[key], want[key]) for key in want)


def test_old_names_of_a_vae(tmp_path: Path) -> None:
    """diffusers itself gives the attention of old files its new names when it loads them."""
    model = filled(vae("sd_vae"))
    want = model.state_dict()
    old = converted(want, "diffusers:diffusers-old", tmp_path)
    assert sum(".proj_attn." in name for name in old) == 4
    model._fix_state_dict_keys_on_load(old)
    assert old.keys() == want.keys() and all(torch.equal(old[key], want[key]) for key in want)


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_the_parts_of_a_single_file(name: str, tmp_path: Path) -> None:
    """As the page of the tables says: each part out of the file, and the file of its parts again."""
    transformers = library("transformers")
    library("open_clip")
    from diffusers.loaders import single_file_utils
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    text = transformers.CLIPTextConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=64,
        max_position_embeddings=8,
    )  # fmt: skip
    first = filled(transformers.CLIPTextModel(text)).state_dict()
    first = {f"text_model.{key.removeprefix('text_model.')}": value for key, value in first.items()}
    tower = CLIPTextCfg(context_length=8, vocab_size=64, width=64, heads=4, layers=2)
    vision = CLIPVisionCfg(layers=1, width=64, head_width=16, patch_size=8, image_size=32)
    second = {key: value for key, value in filled(CLIP(64, vision, tower)).state_dict().items()
              if not key.startswith("visual.") and key != "logit_scale"}  # fmt: skip
    parts = {
        "unet": ("model.diffusion_model", "diffusers", filled(unet(f"{name}_unet")).state_dict()),
        "vae": ("first_stage_model", "diffusers", filled(vae("sd_vae")).state_dict()),
    }
    places = {"sd": "cond_stage_model.transformer", "sdxl": "conditioner.embedders.0.transformer"}
    whole: dict[str, Tensor] = {f"{places[name]}.{key}": value for key, value in first.items()}
    for part, (prefix, _, state) in parts.items():
        (tmp_path / part).mkdir()
        original = converted(state, "diffusers:original", tmp_path / part)
        whole |= {f"{prefix}.{key}": value for key, value in original.items()}
    if name == "sdxl":
        prefix = "conditioner.embedders.1.model"
        whole |= {f"{prefix}.{key}": value for key, value in second.items()}
        model = transformers.CLIPTextModelWithProjection(text)
        own = single_file_utils.convert_open_clip_checkpoint(model, dict(whole), prefix=f"{prefix}.")
        parts["text_encoder_2"] = prefix, "hf", own
    file = tmp_path / f"{name}.safetensors"
    save_file({key: value.contiguous() for key, value in whole.items()}, file)
    files = []
    for part, (prefix, names, want) in parts.items():
        found, back, front = (tmp_path / f"{part}.{word}.safetensors" for word in ("found", "back", "front"))
        ckptfix.convert(file, found, names=names, keep=[f"{prefix}.*"], strip_prefix=prefix)
        made = load_file(found)
        assert made.keys() == want.keys() and all(torch.equal(made[key], want[key]) for key in want)
        ckptfix.convert(found, back, names="openai" if names == "hf" else "original")
        ckptfix.add_module(back, front, prefix=prefix)
        files.append(front)
    text_file = tmp_path / "text.safetensors"
    ckptfix.convert(file, text_file, keep=[f"{places[name]}.*"], strip_prefix=places[name])
    made, own = load_file(text_file), single_file_utils.convert_ldm_clip_checkpoint(dict(whole))
    assert made.keys() == own.keys() == first.keys() and all(torch.equal(made[key], own[key]) for key in own)
    ckptfix.add_module(text_file, tmp_path / "text.front.safetensors", prefix=places[name])
    ckptfix.merge([*files, tmp_path / "text.front.safetensors"], tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == whole.keys() and all(torch.equal(again[key], whole[key]) for key in whole)

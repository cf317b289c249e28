"""Adapters written in the layout of a library: keys, alphas and configuration."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckptfix.checkpoint import Derived, OutputFile, Plan, Storage, TensorEntry, contiguous_stride, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import rounded
from ckptfix.errors import Refused
from ckptfix.formats import FORMATS
from ckptfix.formats.target import target_format
from ckptfix.io.elements import row_major
from ckptfix.io.read import read_from
from ckptfix.names import adapters as names_of
from ckptfix.ops.adapter import CONFIG
from ckptfix.ops.dequantize.layout import numbers
from ckptfix.urls import as_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

To = Literal["peft", "kohya", "diffusers", "comfy"]
"""A layout that is written."""

FILE = "adapter_model.safetensors"
"""The file of weights that PEFT reads in a folder."""

_DIFFUSION = re.compile(r"(?:^|[._])(?:down_blocks|up_blocks|mid_block|input_blocks|middle_block|output_blocks"
                        r"|transformer_blocks|single_transformer_blocks|double_blocks|single_blocks)"
                        r"(?=[._]|$)")  # fmt: skip

_OF_FLUX = re.compile(r"(?:^|[._])(?:double_blocks|single_blocks|single_transformer_blocks)(?=[._])")

KOHYA: Mapping[str, str] = {
    "unet": "lora_unet", "transformer": "lora_unet", "diffusion_model": "lora_unet", "text_encoder": "lora_te",
    "text_encoder_2": "lora_te2", "text_encoder_3": "lora_te3", "text_encoders.clip_l": "lora_te1",
    "text_encoders.clip_l.transformer": "lora_te1", "text_encoders.clip_g.transformer": "lora_te2",
    "text_encoders.clip_g": "lora_te2", "text_encoders.t5xxl": "lora_te3",
    "text_encoders.t5xxl.transformer": "lora_te3",
    "lora_unet": "lora_unet", "lora_te": "lora_te", "lora_te1": "lora_te1", "lora_te2": "lora_te2",
    "lora_te3": "lora_te3",
}  # fmt: skip
"""Container in any layout -> the container in kohya's."""

DIFFUSERS: Mapping[str, str] = {
    "lora_unet": "unet", "unet": "unet", "transformer": "transformer", "diffusion_model": "transformer",
    "lora_te": "text_encoder", "lora_te1": "text_encoder", "lora_te2": "text_encoder_2",
    "lora_te3": "text_encoder_3", "text_encoder": "text_encoder", "text_encoder_2": "text_encoder_2",
    "text_encoder_3": "text_encoder_3", "text_encoders.clip_l.transformer": "text_encoder",
    "text_encoders.clip_g.transformer": "text_encoder_2", "text_encoders.t5xxl.transformer": "text_encoder_3",
}  # fmt: skip
"""The same for diffusers."""

COMFY: Mapping[str, str] = {
    "lora_unet": "diffusion_model", "unet": "diffusion_model", "transformer": "diffusion_model",
    "diffusion_model": "diffusion_model", "lora_te": "text_encoders.clip_l.transformer",
    "lora_te1": "text_encoders.clip_l.transformer", "lora_te2": "text_encoders.clip_g.transformer",
    "lora_te3": "text_encoders.t5xxl.transformer", "text_encoder_3": "text_encoders.t5xxl.transformer",
    "text_encoder": "text_encoders.clip_l.transformer", "text_encoder_2": "text_encoders.clip_g.transformer",
}  # fmt: skip
"""The same for ComfyUI."""

FLUX: Mapping[To, Mapping[str, str]] = {
    "kohya": {"text_encoder_2": "lora_te3"},
    "diffusers": {"lora_te3": "text_encoder_2", "text_encoders.t5xxl.transformer": "text_encoder_2"},
    "comfy": {"text_encoder_2": "text_encoders.t5xxl.transformer"},
}
"""The differences in Flux, whose second text encoder is T5."""


@dataclass(frozen=True, slots=True)
class Products:
    """The factors of a LoHa or LoKr.

    Attributes:
        factors: end of the key -> tensor.
        rank: the rank that is stated with alpha.
        factor: LoKr's decompose_factor in PEFT.
        both: both factors of a LoKr are products.
    """

    method: Literal["LoHa", "LoKr"]
    factors: Mapping[str, TensorEntry]
    rank: int
    factor: int = -1
    both: bool = False


@dataclass(frozen=True, slots=True)
class WrittenModule:
    """A module of an adapter as it is written.

    Attributes:
        container: the beginning of its name, in the layout that it comes from.
        path: with dots.
        down, up: tensors of a plain LoRA, as (rank, inputs, ...) and (outputs, rank, ...).
        scale: what their product is multiplied by.
        magnitude: of DoRA.
        embedding: it is the update of a table of embeddings; `down` is (rank, number) and `up` is (width, rank).
        products: the factors of a LoHa or LoKr, for which `down` and `up` are two of them.
    """

    container: str
    path: str
    down: TensorEntry
    up: TensorEntry
    scale: float
    magnitude: TensorEntry | None = None
    embedding: bool = False
    bias: TensorEntry | None = None
    products: Products | None = None

    @property
    def rank(self) -> int:
        """The rank."""
        return self.down.shape[0] if self.products is None else self.products.rank


def made(key: str, array: Array, dtype: str, sources: Iterable[TensorEntry] = ()) -> TensorEntry:
    """Return a tensor with the numbers in `array`, in the dtype `dtype`."""
    import numpy

    held = numpy.array(array, order="C", ndmin=0)
    bits = numpy.empty(held.shape, f"u{dtypes.by_name(dtype).itemsize}")
    with numpy.errstate(all="ignore"):
        rounded(held if dtype == "float64" else held.astype(numpy.float32), dtype, bits)
    raw = bits.tobytes()
    places = tuple(place for entry in sources for place in read_from(row_major(entry, "little")))
    data = Derived(len(raw), lambda: iter((raw,) if raw else ()), key, places)
    return TensorEntry(key, "", Storage(key, dtype, len(raw), "cpu", data), dtype, held.shape,
                       contiguous_stride(held.shape))  # fmt: skip


def renamed(entry: TensorEntry, key: str, shape: tuple[int, ...] | None = None) -> TensorEntry:
    """Return a tensor under a new key, and in another shape."""
    new = replace(entry, key=key, at="")
    return new if shape is None else replace(new, shape=shape, stride=contiguous_stride(shape))


@dataclass(slots=True)
class Writer:
    """The tensors of an adapter in a layout.

    Attributes:
        folded: number of modules whose scale became a part of their `up`.
        parts: containers of all modules.
        flux: the model is Flux.
    """

    to: To
    prefix: str | None = None
    parts: frozenset[str] = frozenset()
    flux: bool = False
    folded: int = 0
    tensors: list[TensorEntry] = field(default_factory=list)
    config: dict[str, Any] | None = None

    def write(self, modules: Sequence[WrittenModule], whole: Mapping[str, TensorEntry], base: str | None) -> None:
        """Make the tensors.

        Args:
            whole: plain key -> tensor that replaces one of the base; PEFT alone has such.
            base: the name of the base model.

        Raises:
            Refused: the layout cannot hold a module.
        """
        if whole and self.to != "peft":
            first = next(iter(whole))
            hint = "--to peft keeps them; merge the adapter otherwise"
            raise Refused(f"only PEFT has whole tensors beside a LoRA, such as {first}", hint=hint)
        self.parts = frozenset(module.container for module in modules)
        self.flux = any(_OF_FLUX.search(module.path) for module in modules)
        for module in modules:
            self.refuse(module)
            self.tensors += self._of_peft(module) if self.to == "peft" else self._of_others(module)
        if self.to == "peft":
            self.tensors += [renamed(entry, f"base_model.model.{key}") for key, entry in whole.items()]
            self.config = config_of(modules, whole, base)
        keys = Counter(entry.key for entry in self.tensors)
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            raise Refused(f"two modules would get the key {twice[0]}", hint="convert the parts apart")

    def refuse(self, module: WrittenModule) -> None:
        """Raise `Refused` for a module that the layout has no form for.

        Raises:
            Refused: PEFT alone has a form for it, or PEFT has none, or diffusers has none.
        """
        if (module.embedding or module.bias is not None) and self.to != "peft":
            what = "embeddings" if module.embedding else "a bias of its own"
            raise Refused(f"only PEFT has a LoRA with {what}: {module.path}", hint="--to peft keeps it")
        if module.products is None:
            return
        if self.to == "peft" and module.magnitude is not None:
            raise Refused(f"PEFT has no magnitude of DoRA beside {module.products.method}: {module.path}",
                          hint="--to kohya keeps it")  # fmt: skip
        if self.to == "diffusers":
            raise Refused(f"diffusers has no spelling for {module.products.method}: {module.path}",
                          hint="merge it with lora merge, or choose --to peft, kohya or comfy")  # fmt: skip

    def _of_peft(self, module: WrittenModule) -> Iterator[TensorEntry]:
        head = f"{module.container}." if module.container in ("text_encoder", "text_encoder_2") else ""
        path = f"base_model.model.{head}{module.path}"
        if module.products is not None:
            for end, entry in module.products.factors.items():
                yield renamed(entry, f"{path}.{end}")
        elif module.embedding:
            yield renamed(module.down, f"{path}.lora_embedding_A")
            yield renamed(module.up, f"{path}.lora_embedding_B")
        else:
            yield renamed(module.down, f"{path}.lora_A.weight")
            yield renamed(module.up, f"{path}.lora_B.weight")
        if module.magnitude is not None:
            shape = module.magnitude.shape
            flat = (module.magnitude.numel,) if len(module.down.shape) == 2 else (1, shape[0], *shape[2:])
            flat = shape if len(shape) == 1 or shape[0] == 1 else flat
            yield renamed(module.magnitude, f"{path}.lora_magnitude_vector", flat)
        if module.bias is not None:
            yield renamed(module.bias, f"{path}.lora_B.bias")

    def _of_others(self, module: WrittenModule) -> Iterator[TensorEntry]:
        if self.to == "kohya":
            head = self.container(module)
            path = f"{head}_{module.path.replace('.', '_')}"
            down, up = f"{path}.lora_down.weight", f"{path}.lora_up.weight"
        else:
            head = self.container(module)
            path = f"{head}.{module.path}"
            down, up = f"{path}.lora_A.weight", f"{path}.lora_B.weight"
        if module.products is not None:
            for end, entry in module.products.factors.items():
                yield renamed(entry, f"{path}.{end}")
        else:
            yield renamed(module.down, down)
        if self.to == "diffusers":
            # diffusers before 0.34 reads no alpha of this form.
            yield self._folded(module, up)
        else:
            import numpy

            if module.products is None:
                yield renamed(module.up, up)
            yield made(f"{path}.alpha", numpy.array(module.scale * module.rank), "float32")
        if module.magnitude is not None:
            if self.to == "diffusers":
                yield renamed(module.magnitude, f"{path}.lora_magnitude_vector", (module.magnitude.numel,))
            else:
                rest = (1,) * (len(module.down.shape) - 1)
                yield renamed(module.magnitude, f"{path}.dora_scale", (module.magnitude.numel, *rest))

    def container(self, module: WrittenModule) -> str:
        """Return the beginning of a module's name in a layout other than that of PEFT.

        Raises:
            Refused: the layout has none for the part of the model.
        """
        if self.prefix is not None:
            return self.prefix
        table = {"kohya": KOHYA, "diffusers": DIFFUSERS, "comfy": COMFY}[self.to]
        if self.flux:
            table = {**table, **FLUX[self.to]}
        found = table.get(module.container)
        if found == KOHYA["text_encoder"] and module.container != found and len(self.parts) > 1 and self._has_numbers():
            found = KOHYA["lora_te1"]
        if found is None and not module.container:
            if _DIFFUSION.search(module.path):
                found = table["unet"]
                new = re.search(r"(?:^|[.])(?:single_)?transformer_blocks[.]", module.path)
                if self.to == "diffusers" and new and not re.search(r"(?:down|up|mid)_block", module.path):
                    found = "transformer"
            elif "text_model" in module.path or module.path.startswith("encoder.layers"):
                found = table["text_encoder"]
        if found is None:
            what = module.container or module.path
            hint = "--prefix states the beginning of the names"
            raise Refused(f"{what} belongs to no part that {self.to} has a name for", hint=hint)
        return found

    def _has_numbers(self) -> bool:
        """Return whether kohya numbers the text encoders: those of Stable Diffusion 1 and 2 alone have no number."""
        numbered = any(part.endswith(("_2", "_3", "te2")) for part in self.parts)
        return numbered or self.flux or "transformer" in self.parts

    def _folded(self, module: WrittenModule, key: str) -> TensorEntry:
        if module.scale == 1:
            return renamed(module.up, key)
        self.folded += 1
        return made(key, numbers(module.up) * module.scale, module.up.dtype, [module.up])


def config_of(
    modules: Sequence[WrittenModule], whole: Mapping[str, TensorEntry], base: str | None
) -> dict[str, Any]:
    """Return adapter_config.json: the rank and alpha of most modules, and patterns for the others."""
    methods = {None if one.products is None else one.products.method for one in modules}
    if len(methods) > 1:
        raise Refused("PEFT has one method for an adapter, and this one has several", hint="--to kohya keeps them")
    ranks = Counter(one.rank for one in modules)
    rank = ranks.most_common(1)[0][0] if ranks else 8
    alphas = Counter(one.scale * one.rank for one in modules if one.rank == rank)
    alpha = alphas.most_common(1)[0][0] if alphas else float(rank)
    saved = sorted({key.rpartition(".")[0] for key in whole})
    paths = [_path(one) for one in modules]
    targets = sorted({path.rpartition(".")[2] for path in paths})
    numbered = any(target.isdigit() for target in targets)
    products = modules[0].products if modules else None
    if products is not None:
        return _config_of_products(modules, products, rank, alpha, sorted(paths) if numbered else targets, base)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(alpha),
        "lora_dropout": 0.0,
        "target_modules": sorted(paths) if numbered else targets,
        "rank_pattern": {_path(one): one.rank for one in modules if one.rank != rank},
        "alpha_pattern": {
            _path(one): _number(one.scale * one.rank)
            for one in modules
            if not math.isclose(one.scale * one.rank, alpha, rel_tol=1e-12)
        },
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": any(one.magnitude is not None for one in modules),
        "lora_bias": any(one.bias is not None for one in modules),
        "modules_to_save": saved or None,
    }


def _config_of_products(
    modules: Sequence[WrittenModule],
    products: Products,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    base: str | None,
) -> dict[str, Any]:
    """Return adapter_config.json of a LoHa or LoKr (peft ``tuners/loha/config.py``, ``tuners/lokr/config.py``)."""
    rows = [one.products for one in modules if one.products is not None]
    cores = {any("_t" in end for end in row.factors) for row, one in zip(rows, modules, strict=True)
             if len(one.down.shape) > 2 or any("_t" in end for end in row.factors)}  # fmt: skip
    config: dict[str, Any] = {
        "peft_type": products.method.upper(),
        "base_model_name_or_path": base,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "alpha": _number(alpha),
        "target_modules": list(targets),
        "rank_pattern": {_path(one): one.rank for one in modules if one.rank != rank},
        "alpha_pattern": {
            _path(one): _number(one.scale * one.rank)
            for one in modules
            if not math.isclose(one.scale * one.rank, alpha, rel_tol=1e-12)
        },
        "rank_dropout": 0.0,
        "module_dropout": 0.0,
        "use_effective_conv2d": True in cores,
        "modules_to_save": None,
    }
    if products.method == "LoKr":
        if len({(row.factor, row.both) for row in rows}) > 1:
            raise Refused("PEFT has one decompose_factor and one decompose_both for a LoKr, and the modules of this "
                          "one need several", hint="--to kohya keeps them")  # fmt: skip
        config |= {"decompose_both": products.both, "decompose_factor": products.factor}
    return config


def _path(module: WrittenModule) -> str:
    head = f"{module.container}." if module.container in ("text_encoder", "text_encoder_2") else ""
    return f"{head}{module.path}"


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def plan(writer: Writer, source: str, dest: str, metadata: Mapping[str, str]) -> tuple[Plan, str]:
    """Plan the file, or for PEFT the folder, of an adapter; also return its format.

    Raises:
        Refused: PEFT needs a folder.
    """
    suffix = FORMATS.with_suffix(dest)
    if writer.config is None:
        name = target_format(source, dest, None)
        return FORMATS[name].plan_write(writer.tensors, dest, metadata=dict(metadata)), name
    if suffix is not None:
        hint = f"name a folder, without {as_path(dest).suffix}"
        raise Refused(f"PEFT reads {CONFIG} beside the weights, so the output is a folder", path=dest, hint=hint)
    text = json.dumps(writer.config, indent=2, ensure_ascii=False) + "\n"
    made = FORMATS["safetensors"].plan_write(writer.tensors, str(as_path(dest) / FILE), metadata=dict(metadata))
    config = OutputFile.of(str(as_path(dest) / CONFIG), [text.encode()], along=True)
    return Plan((config, *made.files), made.findings), "safetensors"


WORDS = frozenset((
    "down_blocks", "up_blocks", "mid_block", "transformer_blocks", "single_transformer_blocks", "attentions",
    "resnets", "downsamplers", "upsamplers", "attn", "attn1", "attn2", "ff", "ff_context", "net", "proj", "conv",
    "conv1", "conv2", "conv_in", "conv_out", "conv_shortcut", "time_emb_proj", "time_embedding", "time_embed",
    "add_embedding", "linear_1", "linear_2", "linear1", "linear2", "proj_in", "proj_out", "proj_mlp", "to_q", "to_k",
    "to_v", "to_out", "to_add_out", "add_q_proj", "add_k_proj", "add_v_proj", "norm", "norm1", "norm2",
    "norm1_context", "norm_out", "linear", "input_blocks", "middle_block", "output_blocks", "in_layers", "out_layers",
    "emb_layers", "skip_connection", "op", "label_emb", "out", "double_blocks", "single_blocks", "img_attn",
    "txt_attn", "img_mlp", "txt_mlp", "img_mod", "txt_mod", "lin", "modulation", "qkv", "final_layer",
    "adaLN_modulation", "img_in", "txt_in", "vector_in", "guidance_in", "time_in", "in_layer", "out_layer",
    "text_model", "encoder", "layers", "self_attn", "q_proj", "k_proj", "v_proj", "out_proj", "mlp", "fc1", "fc2",
    "joint_blocks", "x_block", "context_block", "x_embedder", "context_embedder", "t_embedder", "y_embedder",
    "pos_embed",
    "transformer", "resblocks", "in_proj", "c_fc", "c_proj", "time_text_embed", "timestep_embedder",
    "text_embedder", "guidance_embedder", "q", "k", "v", "o", "model", "o_proj", "gate_proj",
    "up_proj", "down_proj", "embed_tokens", "lm_head", "block", "layer", "DenseReluDense", "wi_0", "wi_1", "wo",
    "SelfAttention",
))  # fmt: skip
"""Components of the paths of models that kohya trains. Between them an underscore is a dot."""


def with_dots(path: str) -> str | None:
    """Return a path of kohya with dots, if it consists of known components; None otherwise."""
    tokens = path.split("_")
    parts: list[str] = []
    while tokens:
        for count in range(min(4, len(tokens)), 0, -1):
            word = "_".join(tokens[:count])
            if word in WORDS or (count == 1 and word.isdigit()):
                parts.append(word)
                del tokens[:count]
                break
        else:
            return None
    return ".".join(parts)


def as_diffusers(path: str) -> str:
    """Return the name that diffusers has for a module of Stable Diffusion's U-Net."""
    return next(names_of.names_of_diffusers(path), path)

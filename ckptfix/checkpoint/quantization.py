"""The table of quantization schemes: the names, dtypes and shapes by which a weight is recognized as codes.

A code is a number that means a weight only together with its companions: a scale, a zero point, a codebook. A scheme is
recognized if the name, the dtype and the shape of the codes and of every companion that it needs agree. A
`layer_scale`, a `logit_scale`, the `scale` of a norm, an int8 buffer, or a float `weight` beside a `weight_scale` match
in at most one of the three, and are not codes. If only a shape does not fit, the codes are quantized in an unknown
layout (`UNKNOWN`). If a ``config.json`` names the scheme, companions may be in a different file; so they may if the
index of a sharded checkpoint lists them there.

A name is a stem and a suffix: ``l.weight`` and ``l.weight_scale_inv`` are the stem ``l.weight`` with the suffixes
``""`` and ``"_scale_inv"``; ``l.qweight`` and ``l.scales`` are the stem ``l.`` with ``"qweight"`` and ``"scales"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from ckptfix.checkpoint.quantization_signs import BLOCKS, FLOATS, INTEGERS
from ckptfix.checkpoint.tensors import TensorEntry
from ckptfix.dataclass import dataclass

Shape = tuple[int, ...]

Role = Literal[
    "codes", "scale", "zero point", "second scale", "codebook", "group index", "shape", "activation scale", "state",
]  # fmt: skip
"""The role of a tensor of a quantized weight; ``state`` is other data of the scheme's own code (a packed record)."""

Fits = Callable[[Shape, Shape], bool]
"""A test of whether a companion of the second shape belongs to codes of the first."""

FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
EXPONENTS = frozenset({"uint8", "float8_e8m0fnu"})
"""Dtypes of a power of two for each group, as in MX formats."""

NIBBLES = frozenset({"uint8", "int8", "float4_e2m1fn_x2"})
"""Dtypes that hold two codes of four bits in a byte."""

ANY = FLOATS | FLOAT8 | INTEGERS | EXPONENTS | {"bool", "uint32"}


def anything(codes: Shape, own: Shape) -> bool:
    """Accept a companion of any shape."""
    return True


def one(codes: Shape, own: Shape) -> bool:
    """Return whether the companion is one number for the whole tensor."""
    return math.prod(own) == 1


def flat(codes: Shape, own: Shape) -> bool:
    """Return whether the companion is a vector."""
    return len(own) == 1


def blocks(codes: Shape, own: Shape) -> bool:
    """Return whether the companion has one number for the tensor, each column, or each block of the tensor.

    It may also have one for each of the first dimensions (a row, an expert).
    """
    if math.prod(own) == 1 or (len(codes) > 1 and own == codes[-1:]):
        return True
    if len(own) > len(codes) or not all(own) or not all(codes):
        return False
    codes = codes[: len(own)]
    return all(part <= whole and -(-whole // -(-whole // part)) == part for whole, part in zip(codes, own, strict=True))


def rows(codes: Shape, own: Shape) -> bool:
    """Return whether the companion has a number for each row."""
    return bool(codes) and own in ((codes[0],), (codes[0], 1))


def groups_of(*sizes: int, per_item: int = 1) -> Fits:
    """Return a test for a number for each group of one of these sizes along the last dimension.

    Args:
        per_item: codes in one element.
    """

    def fits(codes: Shape, own: Shape) -> bool:
        if len(own) != len(codes) or not own or own[:-1] != codes[:-1] or not own[-1]:
            return False
        return any(-(-codes[-1] * per_item // size) == own[-1] for size in sizes)

    return fits


def packed_groups(codes: Shape, own: Shape) -> bool:
    """Return whether the companion has a number for each row or group of a row; codes are packed in 32-bit elements."""
    return one(codes, own) or (len(own) == len(codes) and bool(own) and own[:-1] == codes[:-1] and 0 < own[-1])


_BITS = (2, 3, 4, 5, 6, 8)


def mlx_groups(codes: Shape, own: Shape) -> bool:
    """Return whether the companion has a number for each group of 16 to 128; codes are packed in 32-bit elements."""
    if len(own) != len(codes) or not own or own[:-1] != codes[:-1] or not own[-1]:
        return False
    sizes = (codes[-1] * 32 / bits / own[-1] for bits in _BITS)
    return any(size in (16, 32, 64, 128) for size in sizes)


def gptq_columns(codes: Shape, own: Shape) -> bool:
    """Return whether the rows are groups of inputs, with a column for each output.

    The codes have the same number of columns: they are packed along the inputs.
    """
    return len(own) == len(codes) == 2 and own[1] == codes[1] and 0 < own[0]


def gptq_zeros(codes: Shape, own: Shape) -> bool:
    """Return whether the rows are groups of inputs, and the columns are outputs packed in 32 bits."""
    return len(own) == len(codes) == 2 and any(own[1] == -(-codes[1] * bits // 32) for bits in (2, 3, 4, 8))


def awq_columns(codes: Shape, own: Shape) -> bool:
    """Return whether the rows are groups of inputs, with a column for each output.

    The codes pack several outputs in one column.
    """
    return len(own) == len(codes) == 2 and 0 < own[0] <= codes[0] and own[1] in (codes[1] * 8, codes[1] * 4)


def awq_zeros(codes: Shape, own: Shape) -> bool:
    """Return whether the rows are groups of inputs, and the columns are packed like those of the codes."""
    return len(own) == len(codes) == 2 and own[1] == codes[1] and 0 < own[0] <= codes[0]


def per_row(codes: Shape, own: Shape) -> bool:
    """Tell whether there is one number for each output, the codes having a column for each."""
    return len(codes) == 2 and own in ((codes[1],), (codes[1], 1))


def fused_parts(codes: Shape, own: Shape) -> bool:
    """Tell whether there is one number for the tensor, or for each of a few layers that were fused in it."""
    return math.prod(own) == 1 or (len(own) == 1 and own[0] in (2, 3))


def flute_groups(codes: Shape, own: Shape) -> bool:
    """Tell whether there is a number for each group of a row, the rows being packed in elements of 16 bits."""
    if len(codes) != 2 or len(own) != 2 or not all(codes) or not all(own):
        return False
    return codes[1] % own[1] == 0 and any(own[0] * bits == codes[0] * 16 for bits in (2, 3, 4))


def table_of(dimensions: int) -> Fits:
    """Return what accepts a table with a row for each code of 2 to 4 bits, or for each pair of codes."""

    def fits(codes: Shape, own: Shape) -> bool:
        return len(own) == dimensions and own[0] in (4, 8, 16) and (dimensions == 1 or own[1] == own[0])

    return fits


def mx_groups(codes: Shape, own: Shape) -> bool:
    """Return whether the companion has the shape of the codes without their last dimension, which is one group."""
    return len(codes) >= 2 and own == codes[:-1]


def columns(codes: Shape, own: Shape) -> bool:
    """Return whether the companion has a number for each column."""
    return bool(codes) and own in ((codes[-1],), (1, codes[-1]))


@dataclass(frozen=True, slots=True)
class Companion:
    """A tensor beside the codes that they need or that belongs to them.

    Attributes:
        suffix: the text of its name behind the stem.
        needed: the scheme is not recognized without it.
        of_module: it is an attribute of the module that has the weight: its name is the stem without its last
            component, and the suffix.
    """

    role: Role
    suffix: str
    dtypes: frozenset[str]
    fits: Fits = anything
    needed: bool = True
    of_module: bool = False

    def name(self, stem: str) -> str:
        """Return its name beside codes with the stem `stem`."""
        return f"{stem[: stem.rfind('.') + 1] if self.of_module else stem}{self.suffix}"


def _also(role: Role, suffix: str, dtypes: frozenset[str] = ANY, fits: Fits = anything) -> Companion:
    return Companion(role, suffix, dtypes, fits, needed=False)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A row of the table.

    Attributes:
        id: its identifier, which never changes.
        title: its name in messages.
        suffix: of the codes, behind the stem.
        dtypes: of the codes.
        dimensions: numbers of dimensions that the codes may have; empty for any.
        companions: in the order of the formula.
        formula: the weight, with the roles as names.
        source: code that defines it.
        methods: ``quant_method`` and ``quant_algo`` in config.json.
        last: the last components of names of codes that only config.json declares as codes; empty for any.
    """

    id: str
    title: str
    suffix: str
    dtypes: frozenset[str]
    companions: tuple[Companion, ...]
    formula: str
    source: str
    methods: frozenset[str] = frozenset()
    dimensions: frozenset[int] = frozenset()
    last: frozenset[str] = frozenset({"weight"})


_FP8_METHODS = frozenset({"fp8", "compressed-tensors", "modelopt", "fbgemm_fp8", "float-quantized", "FP8"})
_TWO = frozenset({2, 3})
_ACTIVATIONS = (
    _also("activation scale", "_input_scale", FLOATS),
    Companion("activation scale", "input_scale", FLOATS, needed=False, of_module=True),
    Companion("activation scale", "input_zero_point", INTEGERS, needed=False, of_module=True),
)
_COMFY = Companion("state", "comfy_quant", frozenset({"uint8"}), flat, needed=False, of_module=True)
"""ComfyUI's format of a weight, as JSON in UTF-8 (comfy/ops.py, ``mixed_precision_ops``)."""

_BNB_4BIT = "bitsandbytes/functional.py QuantState"
_CT = "compressed_tensors/compressors/"

_HQQ_SETTINGS = (
    "axis", "packing", "compute_dtype", "nbits", "group_size", "view_as_float", "unpack_view_dtype", "quant_scale",
    "quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
"""Settings that hqq writes as tensors of one number, or of the codes of letters (hqq/core/utils.py)."""

SCHEMES: tuple[Scheme, ...] = (
    Scheme(
        "fp8-scale-inv", "fp8 with weight_scale_inv (DeepSeek, transformers)", "", FLOAT8,
        (
            Companion("scale", "_scale_inv", FLOATS | {"float8_e8m0fnu"}, blocks),
            _also("activation scale", "_activation_scale", FLOATS),
        ),
        "codes * scale, a scale for each block (128 x 128) or tensor; despite its name (inv), the scale is multiplied",
        "DeepSeek-V3 inference/kernel.py weight_dequant; transformers integrations/finegrained_fp8.py",
        _FP8_METHODS, last=frozenset(),
    ),
    Scheme(
        "nvfp4-modelopt", "NVFP4 (ModelOpt)", "", NIBBLES,
        (
            Companion("scale", "_scale", frozenset({"float8_e4m3fn"}), groups_of(16, per_item=2)),
            Companion("second scale", "_scale_2", frozenset({"float32"}), blocks),
            *_ACTIVATIONS, _COMFY,
        ),
        "E2M1(codes) * scale * second scale, a scale for each 16",
        "modelopt/torch/quantization/qtensor/nvfp4_tensor.py", frozenset({"modelopt", "modelopt_fp4", "NVFP4"}),
        _TWO,
    ),
    Scheme(
        "nvfp4-pack-quantized", "NVFP4 (compressed-tensors)", "_packed", NIBBLES,
        (
            Companion("scale", "_scale", frozenset({"float8_e4m3fn"}), groups_of(16, per_item=2)),
            Companion("second scale", "_global_scale", frozenset({"float32"}), blocks),
            _also("activation scale", "_input_global_scale", FLOATS),
        ),
        "E2M1(codes) * scale / second scale, a scale for each 16",
        f"{_CT}nvfp4", frozenset({"compressed-tensors"}), _TWO, frozenset({"weight_packed"}),
    ),
    Scheme(
        "mxfp4-pack-quantized", "MXFP4 (compressed-tensors)", "_packed", NIBBLES,
        (Companion("scale", "_scale", EXPONENTS, groups_of(32, per_item=2)),),
        "E2M1(codes) * 2 ** (scale - 127), a scale for each 32",
        f"{_CT}mxfp4", frozenset({"compressed-tensors"}), _TWO, frozenset({"weight_packed"}),
    ),
    Scheme(
        "mxfp4-blocks", "MXFP4 (gpt-oss)", "_blocks", frozenset({"uint8", "float4_e2m1fn_x2"}),
        (Companion("scale", "_scales", EXPONENTS, mx_groups),),
        "E2M1(codes) * 2 ** (scale - 127), a scale for each 32",
        "gpt-oss gpt_oss/torch/weights.py; transformers integrations/mxfp4.py", frozenset({"mxfp4"}),
        last=frozenset({"gate_up_proj_blocks", "down_proj_blocks", "mlp1_weight_blocks", "mlp2_weight_blocks"}),
    ),
    Scheme(
        "mx-pairs", "MXFP4 (weight.blocks and weight.scales)", ".blocks", frozenset({"uint8", "float4_e2m1fn_x2"}),
        (Companion("scale", ".scales", EXPONENTS, mx_groups),),
        "E2M1(codes) * 2 ** (scale - 127), a scale for each 32",
        "gpt-oss gpt_oss/torch/weights.py", last=frozenset({"blocks"}),
    ),
    Scheme(
        "mxfp8", "MXFP8", "", FLOAT8,
        (Companion("scale", "_scale", EXPONENTS, groups_of(32)), _COMFY),
        "codes * 2 ** (scale - 127), a scale for each 32",
        f"{_CT}mxfp8", frozenset({"compressed-tensors", "modelopt", "mxfp8"}), _TWO,
    ),
    Scheme(
        "fp8-scale", "fp8 with weight_scale (compressed-tensors, ModelOpt, FBGEMM)", "", FLOAT8,
        (Companion("scale", "_scale", FLOATS | {"float8_e8m0fnu"}, blocks), *_ACTIVATIONS, _COMFY),
        "codes * scale, a scale for the tensor, each row or each block",
        f"{_CT}naive_quantized; modelopt/torch/quantization/qtensor/fp8_tensor.py", _FP8_METHODS, last=frozenset(),
    ),
    Scheme(
        "fp8-module-scale", "fp8 with scale (DeepSeek's own inference)", "weight", FLOAT8,
        (Companion("scale", "scale", FLOATS | {"float8_e8m0fnu"}, blocks),),
        "codes * scale, a scale for each block",
        "DeepSeek-V3 inference/convert.py and model.py", dimensions=_TWO,
    ),
    Scheme(
        "fp8-scale-weight", "fp8 with scale_weight (ComfyUI)", "weight", FLOAT8,
        (
            Companion("scale", "scale_weight", FLOATS, blocks),
            _also("activation scale", "scale_input", FLOATS),
        ),
        "codes * scale", "ComfyUI comfy/ops.py fp8_linear: linear and convolution",
    ),
    *(
        Scheme(
            f"bitsandbytes-int8{kind}", "int8 with SCB (bitsandbytes)", "weight", frozenset({"int8"}),
            (Companion("scale", suffix, FLOATS, rows), _also("state", "weight_format", INTEGERS)),
            "codes * scale / 127, a scale for each row",
            "bitsandbytes/nn/modules.py Int8Params; functional.int8_vectorwise_dequant", frozenset({"bitsandbytes"}),
            frozenset({2}),
        )
        # Linear8bitLt writes SCB; exporters that copy the attributes of an Int8Params write weight.SCB.
        for kind, suffix in (("", "SCB"), ("-attribute", "weight.SCB"))
    ),
    *(
        Scheme(
            f"smoothquant{kind}", "int8 with dequant_scale (AutoSmoothQuant)", "weight", frozenset({"int8"}),
            (
                *(Companion("scale", f"{part}dequant_scale", FLOATS, fused_parts) for part in parts),
                _also("activation scale", "quant_scale", FLOATS, one),
            ),
            "", "autosmoothquant/layers/nn/linear.py W8A8BFP32OFP32Linear: the scale has that of the activations in it",
            frozenset({"smoothquant"}), frozenset({2}),
        )
        for kind, parts in (("", ("",)), ("-qkv", ("q_", "k_", "v_")))
    ),
    Scheme(
        "higgs", "HIGGS (FLUTE)", "weight", frozenset({"int16"}),
        (
            Companion("scale", "scales", FLOATS, flute_groups),
            Companion("codebook", "tables", FLOATS, table_of(1)),
            Companion("codebook", "tables2", FLOATS, table_of(3)),
        ),
        "", "transformers integrations/higgs.py HiggsLinear: codes in the order of FLUTE's kernel, after a Hadamard "
        "transform", frozenset({"higgs"}), frozenset({2}),
    ),
    Scheme(
        "spqr", "SpQR", "dense_weights", frozenset({"int64"}),
        (
            Companion("group index", "row_offsets", frozenset({"int32"}), flat),
            Companion("state", "col_vals", frozenset({"int32"}), flat),
            _also("group index", "in_perm", frozenset({"int32"}), flat),
        ),
        "", "SpQR inference_lib/src/spqr_quant/inference.py QuantizedLinear: codes and scales in one, outliers apart",
        frozenset({"spqr"}), frozenset({1}), frozenset({"dense_weights"}),
    ),
    Scheme(
        "bitsandbytes-4bit", "4 bits (bitsandbytes nf4, fp4)", "weight",
        frozenset({"uint8", "bfloat16", "float16", "float32"}),
        (
            Companion("scale", "weight.absmax", frozenset({"float32", "uint8"}), flat),
            Companion("codebook", "weight.quant_map", frozenset({"float32"}), flat),
            _also("state", "weight.quant_state.bitsandbytes__nf4"),
            _also("state", "weight.quant_state.bitsandbytes__fp4"),
            _also("second scale", "weight.nested_absmax", frozenset({"float32"})),
            _also("codebook", "weight.nested_quant_map", frozenset({"float32"})),
        ),
        "codebook[codes] * scale, a scale for each block of 64; scales may be quantized too (double quantization)",
        _BNB_4BIT, frozenset({"bitsandbytes"}),
    ),
    Scheme(
        "gptq", "GPTQ", "qweight", frozenset({"int32"}),
        (
            Companion("scale", "scales", FLOATS, gptq_columns),
            _also("zero point", "qzeros", frozenset({"int32"}), gptq_zeros),
            _also("group index", "g_idx", frozenset({"int32", "int64"}), flat),
        ),
        "(codes - zero point) * scale, a scale for each group of inputs",
        "gptqmodel/nn_modules/qlinear/torch.py", frozenset({"gptq", "autoround", "auto-round", "intel/auto-round"}),
        frozenset({2}), frozenset({"qweight"}),
    ),
    Scheme(
        "gptq-zeros", "GPTQ with zeros (of early 2023)", "qweight", frozenset({"int32"}),
        (Companion("scale", "scales", FLOATS, per_row), Companion("zero point", "zeros", FLOATS, per_row)),
        "codes * scale - zero point, a scale for each output",
        "IST-DASLab/gptq quant.py Quant3Linear; GPTQ-for-LLaMa quant.py QuantLinear at 0334e25",
        frozenset({"gptq"}), frozenset({2}), frozenset({"qweight"}),
    ),
    Scheme(
        "awq", "AWQ", "qweight", frozenset({"int32"}),
        (
            Companion("scale", "scales", FLOATS, awq_columns),
            Companion("zero point", "qzeros", frozenset({"int32"}), awq_zeros),
        ),
        "(codes - zero point) * scale, a scale for each group of inputs, columns in the order 0 2 4 6 1 3 5 7",
        "awq/utils/packing_utils.py, awq/modules/linear/gemm.py", frozenset({"awq"}),
        frozenset({2}), frozenset({"qweight"}),
    ),
    Scheme(
        "awq-fast", "AWQ (gemv_fast, llm-awq v2)", "qweight", frozenset({"int16"}),
        (
            Companion("scale", "scales", FLOATS, lambda codes, own: len(own) == 2),
            _also("zero point", "scaled_zeros", FLOATS),
            _also("zero point", "qzeros", FLOATS),
        ),
        "", "awq/modules/linear/gemv_fast.py: codes in the order of its kernel", frozenset({"awq"}), frozenset({2}),
        frozenset({"qweight"}),
    ),
    Scheme(
        "nunchaku", "SVDQuant (nunchaku)", "qweight", frozenset({"int8", "int32"}),
        (
            Companion("scale", "wscales", FLOATS | FLOAT8),
            _also("second scale", "wtscale", FLOATS), _also("second scale", "wcscales", FLOATS),
            _also("zero point", "wzeros", FLOATS), _also("activation scale", "smooth_factor", FLOATS),
            _also("activation scale", "smooth_factor_orig", FLOATS), _also("activation scale", "smooth", FLOATS),
            _also("activation scale", "smooth_orig", FLOATS),
        ),
        "", "nunchaku/models/linear.py: codes in the order of its kernel", last=frozenset({"qweight"}),
    ),
    Scheme(
        "marlin-24", "Marlin 2:4 (compressed-tensors)", "weight_packed", frozenset({"int32"}),
        (Companion("scale", "scale_packed", FLOATS), Companion("state", "meta", frozenset({"int16"}))),
        "", f"{_CT}sparse_quantized_compressors/marlin_24.py: codes in the order of its kernel",
        frozenset({"compressed-tensors"}), last=frozenset({"weight_packed"}),
    ),
    Scheme(
        "pack-quantized", "pack-quantized (compressed-tensors)", "_packed", frozenset({"int32"}),
        (
            Companion("scale", "_scale", FLOATS, packed_groups),
            _also("shape", "_shape", frozenset({"int32", "int64"}), flat),
            _also("zero point", "_zero_point", frozenset({"int32", "int8"})),
            _also("group index", "_g_idx", frozenset({"int32", "int64"}), flat),
        ),
        "(codes - zero point) * scale, a scale for each row or group of a row; shape is that of the weight",
        f"{_CT}pack_quantized", frozenset({"compressed-tensors"}), last=frozenset({"weight_packed"}),
    ),
    Scheme(
        "int8-scale", "int8 with weight_scale (compressed-tensors)", "", frozenset({"int8"}),
        (
            Companion("scale", "_scale", FLOATS, blocks),
            _also("zero point", "_zero_point", frozenset({"int8", "int32"})),
            *_ACTIVATIONS, _COMFY,
        ),
        "(codes - zero point) * scale, a scale for the tensor, each row or each group",
        f"{_CT}naive_quantized", frozenset({"compressed-tensors", "int-quantized"}), _TWO,
    ),
    Scheme(
        "eetq", "int8 with weight_scales (EETQ)", "weight", frozenset({"int8"}),
        (Companion("scale", "weight_scales", FLOATS, columns),),
        "codes * scale, a scale for each output", "EETQ eetq/modules/qlinear.py", frozenset({"eetq"}), frozenset({2}),
    ),
    Scheme(
        "int8-scales", "int8 with scales (gpt-fast)", "weight", frozenset({"int8"}),
        (Companion("scale", "scales", FLOATS, rows),),
        "codes * scale, a scale for each row", "gpt-fast quantize.py WeightOnlyInt8Linear", dimensions=frozenset({2}),
    ),
    Scheme(
        "int4-scales-and-zeros", "int4 with scales_and_zeros (gpt-fast, tinygemm)", "weight",
        frozenset({"int32", "uint8"}),
        (Companion("scale", "scales_and_zeros", FLOATS, lambda codes, own: len(own) == 3 and own[-1] == 2),),
        "", "gpt-fast quantize.py WeightOnlyInt4Linear: tiles in the order of its kernel",
        dimensions=frozenset({2, 4}),
    ),
    Scheme(
        "bitnet", "BitNet (packed ternary)", "weight", frozenset({"uint8"}),
        (Companion("scale", "weight_scale", FLOATS, one),),
        "(codes of two bits - 1) * scale, or / scale as config.json states", "transformers integrations/bitnet.py",
        frozenset({"bitnet"}), frozenset({2}),
    ),
    Scheme(
        "int4-modelopt", "int4 (ModelOpt)", "weight", frozenset({"uint8", "int8"}),
        (
            Companion("scale", "weight_scale", FLOATS, lambda codes, own: len(own) == 2 and own[0] == 2 * codes[0]),
            _also("second scale", "weight_scale_2", FLOATS, one),
            _also("scale", "pre_quant_scale", FLOATS, flat),
        ),
        "codes * scale, two codes a byte along the rows, a scale for each group",
        "modelopt/torch/export/quant_utils.py", frozenset({"modelopt", "W4A16_AWQ"}), frozenset({2}),
    ),
    *(
        Scheme(
            id, title, suffix, dtypes,
            (
                Companion("scale", "._scale", FLOATS),
                _also("zero point", "._shift", FLOATS | INTEGERS),
                _also("zero point", "._zeropoint", FLOATS | INTEGERS),
                *_ACTIVATIONS,
                Companion("activation scale", "output_scale", FLOATS, needed=False, of_module=True),
            ),
            formula, f"optimum/quanto/tensor/weights/{source}", frozenset({"quanto"}), last=frozenset({"_data"}),
        )
        for id, title, suffix, dtypes, formula, source in (
            ("quanto", "quanto", "._data", FLOAT8 | {"int8", "uint8"},
             "codes * scale, or codes * scale - zero point", "qbytes.py"),
            ("quanto-packed", "quanto, packed", "._data._data", frozenset({"uint8", "int32"}),
             "codes * scale - shift, several codes a byte", "qbits.py, packed.py"),
        )
    ),
    *(
        Scheme(
            f"torchao-{kind}", "torchao", f"{mark}qdata", FLOAT8 | INTEGERS | {"float4_e2m1fn_x2", "uint32"},
            (
                Companion("scale", f"{mark}scale", FLOATS | FLOAT8 | EXPONENTS),
                _also("zero point", f"{mark}zero_point"),
                _also("zero point", f"{mark}zero"),
                _also("second scale", f"{mark}per_tensor_scale", FLOATS),
                _also("activation scale", f"{mark}act_quant_scale", FLOATS),
                _also("activation scale", f"{mark}act_pre_scale", FLOATS),
            ),
            "(codes - zero point) * scale, in the form of the tensor's class, which the file's metadata names",
            "torchao/prototype/safetensors/safetensors_support.py", frozenset({"torchao"}),
            last=frozenset({"_weight_qdata", "weight:qdata"}),
        )
        for kind, mark in (("flattened", "_"), ("colon", ":"))
    ),
    Scheme(
        "mlx", "MLX", "weight", frozenset({"uint32"}),
        (Companion("scale", "scales", FLOATS, mlx_groups), Companion("zero point", "biases", FLOATS, mlx_groups)),
        "codes * scale + zero point, a scale for each group of 16 to 128",
        "mlx/backend/cpu/quantized.cpp; mlx.nn.QuantizedLinear", frozenset({"mlx"}), _TWO,
    ),
    Scheme(
        "mlx-mx", "MLX (mxfp4, mxfp8, nvfp4)", "weight", frozenset({"uint32"}),
        (Companion("scale", "scales", EXPONENTS, mlx_groups),),
        "E2M1 or E4M3(codes) * scale", "mlx.core.quantize, mode mxfp4", frozenset({"mlx"}), _TWO,
    ),
    Scheme(
        "hqq", "HQQ", "W_q", frozenset({"uint8", "int8", "int32", "float16", "bfloat16"}),
        (
            Companion("scale", "scale", FLOATS), Companion("zero point", "zero", FLOATS),
            _also("shape", "shape", INTEGERS, flat),
            *(_also("state", name, INTEGERS) for name in _HQQ_SETTINGS),
        ),
        "(codes - zero point) * scale, groups along an axis that the file states", "hqq/core/quantize.py",
        frozenset({"hqq"}), last=frozenset({"W_q"}),
    ),
    Scheme(
        "marlin", "Marlin", "B", frozenset({"int32"}), (Companion("scale", "s", FLOATS),),
        "", "marlin/__init__.py Layer: codes in the order of its kernel", frozenset({"marlin"}), frozenset({2}),
        frozenset({"B"}),
    ),
    Scheme(
        "marlin-sparse", "Sparse Marlin", "B_24", frozenset({"int32"}),
        (Companion("scale", "s", FLOATS), Companion("state", "B_meta", frozenset({"int16"}))),
        "", "vllm gptq_marlin_24.py: codes in the order of its kernel", dimensions=frozenset({2}),
        last=frozenset({"B_24"}),
    ),
    Scheme(
        "exl2", "EXL2", "q_weight", frozenset({"int32"}),
        (
            Companion("scale", "q_scale", INTEGERS),
            Companion("second scale", "q_scale_max", FLOATS),
            _also("group index", "q_groups"), _also("group index", "q_invperm"), _also("group index", "q_perm"),
        ),
        "", "exllamav2/linear.py: bits differ by group", frozenset({"exl2"}), last=frozenset({"q_weight"}),
    ),
    Scheme(
        "exl3", "EXL3", "trellis", frozenset({"int16", "uint16"}),
        (Companion("scale", "suh", FLOATS), Companion("scale", "svh", FLOATS), _also("state", "mcg"),
         _also("state", "mul1")),
        "", "exllamav3/modules/quant/exl3.py: a trellis", frozenset({"exl3"}), last=frozenset({"trellis"}),
    ),
    Scheme(
        "aqlm", "AQLM", "codes", frozenset({"int8", "int16", "int32", "uint8"}),
        (Companion("codebook", "codebooks", FLOATS), Companion("scale", "scales", FLOATS)),
        "", "aqlm/inference.py: sums of codebook vectors", frozenset({"aqlm"}), last=frozenset({"codes"}),
    ),
    Scheme(
        "vptq", "VPTQ", "indices", INTEGERS | {"uint16", "uint32"},
        (
            Companion("codebook", "centroids.weight", FLOATS), Companion("scale", "weight_scale", FLOATS),
            Companion("zero point", "weight_bias", FLOATS), _also("codebook", "res_centroids.weight", FLOATS),
            _also("codebook", "outlier_centroids.weight", FLOATS), _also("state", "outlier_indices"),
            _also("group index", "perm"),
        ),
        "", "vptq/layers/vqlinear.py: vectors of a codebook", frozenset({"vptq"}), last=frozenset({"indices"}),
    ),
    Scheme(
        "quip", "QuIP#", "Qidxs", frozenset({"int64", "int32", "int16", "uint8"}),
        (Companion("scale", "SU", FLOATS | INTEGERS), Companion("scale", "SV", FLOATS | INTEGERS),
         _also("codebook", "codebook_id"), _also("scale", "Wscale", FLOATS)),
        "", "quip-sharp lib/linear/quantized_linear.py: a lattice", frozenset({"quip"}), last=frozenset({"Qidxs"}),
    ),
)  # fmt: skip
"""The schemes in the order in which they are tried: the first match wins. Schemes without a formula are recognized, but
their weights cannot be computed."""

LIBRARIES: Mapping[str, str] = {
    "torchao": "torchao",
    "optimum": "optimum-quanto",
    "bitsandbytes": "bitsandbytes",
    "hqq": "hqq",
}
"""Top module of tensor classes that are quantized weights -> the package that contains it."""

SUBCLASS = Scheme(
    "tensor-class", "a tensor class of its library", "", frozenset(), (), "the library's dequantize()",
    "torch._utils._rebuild_wrapper_subclass", last=frozenset(),
)  # fmt: skip
"""A quantized weight that a torch file holds as one object, with its codes and scales as parts."""


GGUF = Scheme(
    "gguf-blocks", "blocks of GGUF", "", frozenset({"uint8"}), (), "(codes - offset) * scale, both in each block",
    "ggml/src/ggml-quants.c dequantize_row_*", last=frozenset(),
)  # fmt: skip
"""A weight as GGUF stores it: rows of blocks, which hold their own scales."""

UNKNOWN = Scheme(
    "unknown-layout", "quantized in an unknown layout", "", frozenset(), (), "",
    "names and dtypes of codes and companions match a scheme, but a shape does not", last=frozenset(),
)  # fmt: skip
"""Codes whose companions have the names and dtypes of a scheme, but not the shape that it writes."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized weight of a checkpoint.

    Attributes:
        codes: address of the tensor with the codes; None if the file has only the companions, which config.json or
            another shard identifies.
        companions: role and address of each tensor that belongs to it.
        label: the name of the scheme in messages.
    """

    scheme: Scheme
    codes: str | None
    companions: tuple[tuple[Role, str], ...] = ()
    label: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The addresses of all its tensors."""
        return (*(() if self.codes is None else (self.codes,)), *(name for _, name in self.companions))


@dataclass(frozen=True, slots=True)
class OtherShards:
    """The tensors that an index lists in the other shards of a checkpoint.

    Attributes:
        names: keys of all of them.
        entries: key -> tensor, for those whose shard could be read.
    """

    names: Collection[str] = frozenset()
    entries: Mapping[str, TensorEntry] = field(default_factory=dict)


NOWHERE = OtherShards()
"""No other shards."""

_CODES_OF: Mapping[str, tuple[str, ...]] = {
    suffix: tuple(
        dict.fromkeys(
            scheme.suffix
            for scheme in SCHEMES
            for companion in scheme.companions
            if companion.needed and not companion.of_module and companion.suffix == suffix
        )
    )
    for suffix in sorted({companion.suffix for scheme in SCHEMES for companion in scheme.companions})
}
"""Suffix of a companion -> the suffixes that codes beside it may have."""


def linked_names(entry: TensorEntry) -> Iterator[str]:
    """Yield the keys that the codes, or the companions, of the weight of `entry` would have, for any scheme."""
    if entry.dtype not in FLOATS:
        for scheme in SUFFIXES.get(entry.dtype, ()):
            if entry.key.endswith(scheme.suffix):
                stem = entry.key[: len(entry.key) - len(scheme.suffix)]
                yield from (companion.name(stem) for companion in scheme.companions)
    for suffix, codes in _CODES_OF.items():
        if entry.key.endswith(suffix):
            stem = entry.key[: len(entry.key) - len(suffix)]
            yield from (stem + own for own in codes)


SUFFIXES: Mapping[str, tuple[Scheme, ...]] = {
    dtype: tuple(scheme for scheme in SCHEMES if dtype in scheme.dtypes)
    for dtype in sorted(set().union(*(scheme.dtypes for scheme in SCHEMES)))
}
"""dtype -> the schemes whose codes may have it."""


def recognised(
    entries: Iterable[TensorEntry], methods: Sequence[str] = (), elsewhere: OtherShards = NOWHERE
) -> tuple[tuple[Quantized, ...], dict[str, tuple[Role, Quantized]]]:
    """Return the quantized weights among `entries`, and the role of each tensor that belongs to one, by its address.

    Args:
        methods: names of the scheme in config.json; its codes and companions are then recognized without each other.
        elsewhere: the tensors of other shards, among which companions and codes may be.
    """
    listed = list(entries)
    by_at: dict[str, dict[str, TensorEntry]] = {}
    for entry in listed:
        by_at.setdefault(entry.at, {})[entry.key] = entry
    for key, entry in elsewhere.entries.items():
        by_at.setdefault("", {}).setdefault(key, entry)
    said = tuple(scheme for scheme in SCHEMES if scheme.methods & set(methods))
    weights: list[Quantized] = []
    taken: set[str] = set()

    def take(look: Callable[[TensorEntry], Quantized | None]) -> None:
        for entry in listed:
            if entry.name not in taken and (found := look(entry)) is not None:
                weights.append(found)
                taken.update(found.names)

    absent = frozenset(elsewhere.names).difference(elsewhere.entries)
    take(lambda entry: _alone(entry) or _of(entry, by_at[entry.at], (), absent=absent if not entry.at else ()))
    own = {entry.name for entry in listed}
    for entry in elsewhere.entries.values():
        # The codes are in another shard, and a companion is in this one.
        away = _of(entry, by_at[""], ())
        here = tuple(row for row in away.companions if row[1] in own - taken) if away is not None else ()
        if away is not None and here:
            weights.append(replace(away, codes=None, companions=here))
            taken.update(name for _, name in here)
    if said:
        # Names, dtypes and shapes leave some cases open: a scale may have the dtype of codes.
        take(lambda entry: _orphan(entry, said))
        take(lambda entry: _of(entry, by_at[entry.at], said))
    take(lambda entry: _of(entry, by_at[entry.at], (), shapes=False))
    places = {entry.name: place for place, entry in enumerate(listed)}
    weights.sort(key=lambda row: places[row.names[0]])
    roles: dict[str, tuple[Role, Quantized]] = {}
    for row in weights:
        if row.codes is not None:
            roles[row.codes] = ("codes", row)
        for role, name in row.companions:
            roles.setdefault(name, (role, row))
    return tuple(weights), roles


def _alone(entry: TensorEntry) -> Quantized | None:
    """Return the weight for one tensor that holds codes and scales: of GGUF, or of a library's class."""
    if entry.detail.startswith(BLOCKS):
        return Quantized(GGUF, entry.name, (), f"GGUF {entry.detail.removeprefix(BLOCKS)}")
    top = entry.detail.partition(".")[0]
    if entry.kind != "wrapper" or top not in LIBRARIES:
        return None
    return Quantized(SUBCLASS, entry.name, (), f"{LIBRARIES[top]} ({entry.detail})")


def _of(
    entry: TensorEntry,
    beside: Mapping[str, TensorEntry],
    said: Sequence[Scheme],
    *,
    shapes: bool = True,
    absent: Collection[str] = (),
) -> Quantized | None:
    """Return the weight whose codes `entry` is, by the first scheme that fits.

    Args:
        shapes: the shapes must fit, too; False for codes in a layout that is not in the table.
        absent: keys in files that are not here: of a companion there, only the name counts.
    """
    if entry.kind != "dense" or (not shapes and (entry.dtype in FLOATS or not entry.shape)):
        return None
    for scheme in SUFFIXES.get(entry.dtype, ()):
        if not entry.key.endswith(scheme.suffix):
            continue
        if shapes and scheme.dimensions and len(entry.shape) not in scheme.dimensions:
            continue
        if not shapes and not _has_name(entry, scheme):
            continue
        stem = entry.key[: len(entry.key) - len(scheme.suffix)]
        if scheme.suffix[:1].isalnum() and stem and stem[-1] not in "._/":
            continue
        known = scheme in said and (not scheme.last or entry.key.rpartition(".")[2] in scheme.last)
        known = known and entry.dtype not in FLOATS
        away = () if entry.dtype in FLOATS else absent
        found = _companions(scheme, stem, entry, beside, known=known, shapes=shapes, absent=away)
        if found is not None:
            row = scheme if shapes else UNKNOWN
            return Quantized(row, entry.name, found, row.title)
    return None


def _has_name(entry: TensorEntry, scheme: Scheme) -> bool:
    """Return whether integers have a name that a scheme gives its codes; fp8 values are codes under any name."""
    return entry.dtype in FLOAT8 or not scheme.last or entry.key.rpartition(".")[2] in scheme.last


def _companions(
    scheme: Scheme,
    stem: str,
    entry: TensorEntry,
    beside: Mapping[str, TensorEntry],
    *,
    known: bool,
    shapes: bool,
    absent: Collection[str],
) -> tuple[tuple[Role, str], ...] | None:
    """Return the companions of codes; None if one that is needed is missing, or a different tensor has its name."""
    found: list[tuple[Role, str]] = []
    for companion in scheme.companions:
        other = beside.get(companion.name(stem))
        if other is None and companion.needed and not known and companion.name(stem) not in absent:
            return None
        if other is None or other is entry:
            continue
        fits = other.kind == "dense" and other.dtype in companion.dtypes
        if fits and (not shapes or companion.fits(entry.shape, other.shape)):
            found.append((companion.role, other.name))
        elif companion.needed:
            return None
    return tuple(found)


def _orphan(entry: TensorEntry, said: Sequence[Scheme]) -> Quantized | None:
    """Return the weight for a companion whose codes are in a different file, of a scheme that config.json names."""
    for scheme in said:
        for companion in scheme.companions:
            if not companion.needed or entry.dtype not in companion.dtypes or entry.kind != "dense":
                continue
            if _ends(entry.key, scheme, companion):
                return Quantized(scheme, None, ((companion.role, entry.name),), scheme.title)
    return None


def _ends(key: str, scheme: Scheme, companion: Companion) -> bool:
    """Return whether a name is that of a companion of this scheme's codes."""
    suffix = companion.suffix
    if scheme.suffix in ("", *(scheme.last or ("weight",))):
        whole = f"weight{suffix}" if not scheme.suffix else suffix
        return key == whole or key.endswith(f".{whole}")
    return any(
        key == last.removesuffix(scheme.suffix) + suffix or key.endswith(f".{last.removesuffix(scheme.suffix)}{suffix}")
        for last in scheme.last
    )

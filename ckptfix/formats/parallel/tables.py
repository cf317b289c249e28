"""The dimension along which each tensor of a model is cut, by its name and the kind of model.

A row is a pattern of names, and what is cut. Where the name alone does not tell, a function of the row decides it from
the shapes of the tensors beside it and from the model's settings (Megatron-LM's ``args``, Meta's ``params.json``).

Sources, as of Megatron-LM d98e8a64dd (2026-08), fairscale 146f1602, llama 689c7f2, llama3 a0940f9, llama-models
a9c89c4, fairseq 3d262bb2::

    ColumnParallelLinear     [out, in]   weight and bias along 0    megatron/core/tensor_parallel/layers.py,
    RowParallelLinear        [out, in]   weight along 1, bias whole   fairscale/nn/model_parallel/layers.py
    VocabParallelEmbedding   [vocabulary, hidden]   along 0
    ParallelEmbedding        [vocabulary, hidden]   along 1         fairscale only: Llama 1 and 2
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from fnmatch import fnmatchcase

from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, Refused
from ckptfix.formats.parallel.cuts import RankCut, Shape, equal_parts


@dataclass(frozen=True, slots=True)
class CutContext:
    """The facts that decide the cut of a tensor.

    Attributes:
        shapes: name -> shape of the tensor on a rank.
        ranks: the number of ranks of tensor parallelism that the tensors are cut into; 1 if they are whole.
        settings: of the model, by the names of its writer.
        dims: globs of names -> the cut that the user gave.
    """

    shapes: Mapping[str, Shape]
    ranks: int
    settings: Mapping[str, object]
    dims: Mapping[str, RankCut] = field(default_factory=dict)

    def number(self, *names: str) -> int | None:
        """Return the first setting of these that is a positive integer."""
        found = (self.settings.get(name) for name in names)
        return next((value for value in found if type(value) is int and value > 0), None)


Decide = Callable[[CutContext, str], "RankCut | None"]


@dataclass(frozen=True, slots=True)
class CutRow:
    """A row of a table.

    Attributes:
        names: a pattern of the last components of a name.
        cut: the cut, or the function that decides it and returns None if it cannot.
        hidden: the dimension that is as large as the model's hidden size; None if none is.
        vocabulary: the dimension 0 has a row for each token, and rows of padding at its end.
        source: the class or the function that cuts it.
    """

    names: re.Pattern[str]
    cut: RankCut | Decide
    hidden: int | None
    vocabulary: bool
    source: str


def _row(
    names: str, cut: RankCut | Decide, source: str, *, hidden: int | None = None, vocabulary: bool = False
) -> CutRow:
    return CutRow(re.compile(rf"(?:.*\.)?(?:{names})", re.ASCII), cut, hidden, vocabulary, source)


COPY, ROWS, COLUMNS, LAST = RankCut(None), RankCut(0), RankCut(1), RankCut(-1)


def _beside(context: CutContext, name: str, **other: str) -> Shape | None:
    """Return the shape of the tensor whose name differs from `name` in these words."""
    for old, new in other.items():
        name = name.replace(old, new)
    return context.shapes.get(name)


def _feed_forward(context: CutContext, name: str) -> RankCut | None:
    """Return the cut of the first layer of an MLP: that of two matrices if the MLP is gated.

    megatron/core/transformer/mlp.py apply_swiglu_sharded_factory; legacy/model/transformer.py ParallelMLP.
    """
    second = name.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h")
    after = context.shapes.get(re.sub(r"\.bias(\d*)$", r".weight\1", second))
    rows = context.shapes[name][0]
    gated = context.settings.get("swiglu")
    if after is None:
        return None if not isinstance(gated, bool) else RankCut(0, equal_parts(1 + gated))
    if len(after) != 2 or rows not in (after[1], 2 * after[1]):
        return None
    if gated is True and rows != 2 * after[1]:
        raise DamagedFile(f"swiglu is set, but it has {rows} rows for {after[1]} inputs of the next layer", where=name)
    return RankCut(0, equal_parts(rows // after[1]))


def _interleaved(context: CutContext, name: str) -> RankCut | None:
    """Return the cut of a query_key_value or key_value matrix.

    Until checkpoint version 1.0 a rank has all of its queries, then its keys, then its values; since then the rows of
    a head, or of a group of heads, are together. megatron/training/checkpointing.py fix_query_key_value_ordering.
    """
    version = context.settings.get("checkpoint_version", 0)
    if type(version) in (int, float) and version >= 1:  # type: ignore[operator]
        return ROWS
    return RankCut(0, equal_parts(2 if ".key_value." in name else 3))


def _of_size(*settings: str) -> Decide:
    """Return the decision by the sum of these settings, the size of the whole dimension 0.

    A module of Transformer Engine has these matrices whole on each rank, and a ColumnParallelLinear cuts them
    (megatron/core/transformer/multi_latent_attention.py).
    """

    def decide(context: CutContext, name: str) -> RankCut | None:
        sizes = [context.number(one) for one in settings]
        rows = context.shapes[name][0]
        if None in sizes:
            return None
        whole = sum(size for size in sizes if size is not None)
        return COPY if rows == whole and context.ranks > 1 else ROWS if rows * context.ranks == whole else None

    return decide


def _fused_latents(context: CutContext, name: str) -> RankCut | None:
    """Return the cut of the down projections of queries, keys and values in one matrix (FusedMLASelfAttention)."""
    sizes = [context.number(one) for one in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim")]
    queries, *others = (size or 0 for size in sizes)
    rows, whole = context.shapes[name][0], queries + sum(others)
    if None in sizes or rows not in (whole, whole // context.ranks):
        return None
    return COPY if rows == whole and context.ranks > 1 else RankCut(0, (queries, sum(others)))


_MIXED = re.compile(r"(in_proj\.(weight|bias)|conv1d[._](weight|bias))$")


def _mixer(context: CutContext, name: str) -> RankCut | None:
    """Return the cut of the matrices that a mixer of a linear attention stacks in one.

    megatron/core/ssm: mamba_mixer.py, gated_delta_net/gdn.py and gdn2.py, gated_delta_product.py. Only Mamba has a
    skip ``D``, and only a GatedDeltaNet has an ``out_norm``.
    """
    at = _MIXED.sub("", name)
    project, out, log, steps = (
        context.shapes.get(f"{at}{one}", ()) for one in ("in_proj.weight", "out_proj.weight", "A_log", "dt_bias")
    )
    if not (project and len(out) == 2 and log and steps):
        return None
    rows, inner, heads = project[0], out[1], log[0]
    made: tuple[int, ...]
    mixed: tuple[int, ...]
    if f"{at}D" in context.shapes:  # z, x, B, C, dt
        state = (rows - 2 * inner - heads) // 2
        made, mixed = (inner, inner, state, state, heads), (inner, state, state)
    elif f"{at}out_norm.weight" in context.shapes:
        is_second = steps[0] != heads  # a step for each channel of the keys, and not for each head
        keys = steps[0] if is_second else (rows - 2 * inner - 2 * heads) // 2
        made = (keys, keys, inner, inner, *((keys, keys, inner) if is_second else (heads, heads)))
        mixed = (keys, keys, inner)  # queries, keys, values; then z, and beta and alpha, or f, b and w
    else:
        count = context.number("gdp_num_householder")
        if count is None:
            return None
        keys = (rows - (count + 1) * (inner + heads)) // (count + 1)
        mixed = (*(inner,) * count, *(keys,) * (count + 1))  # V, K, Q; z before them, and b and a behind them
        made = (inner, *mixed, *(heads,) * (count + 1))
    cut = made if "in_proj" in name else mixed
    return RankCut(0, cut) if min(made) > 0 and sum(made) == rows and sum(cut) == context.shapes[name][0] else None


PACKED_HINT = "save with --ckpt-format torch_dist, and convert its folder"


def _grouped(context: CutContext, name: str) -> RankCut | None:
    """Return the cut of the matrices of GroupedMLP (megatron/core/transformer/moe/experts.py, core 0.16.1).

    The memory of weight1, [hidden, experts * ffn], is that of a matrix [hidden, ffn] for each expert, with the gate
    and the other columns of a gated MLP side by side. The matrices [ffn, hidden] of weight2 are stacked along 0.
    """
    experts = context.number("num_experts")
    second = context.shapes.get(re.sub(r"weight1$", "weight2", name))
    shape = context.shapes[name]
    if experts is None or second is None or len(second) != 2 or len(shape) != 2:
        return None
    if name.endswith("weight2"):
        return RankCut(0, equal_parts(experts))
    if shape[1] not in (second[0], 2 * second[0]) or shape[1] % experts:
        return None
    return RankCut(1, equal_parts(shape[1] // second[0]), experts)


_LINEAR = "ColumnParallelLinear"
_INPUT = "RowParallelLinear"
_VOCABULARY = "VocabParallelEmbedding"
_EVERY = "every rank has it"

MEGATRON: tuple[CutRow, ...] = (
    _row(r"_extra_state", COPY, "Transformer Engine"),
    _row(r"experts\.weight1", _grouped, "GroupedMLP", hidden=0),
    _row(r"experts\.weight2", _grouped, "GroupedMLP", hidden=1),
    _row(r"(mixer|self_attention)\.(in_proj\.(weight|bias)|conv1d[._](weight|bias))", _mixer,
         "MambaMixer, GatedDeltaNet, GatedDeltaProduct"),
    _row(r"(mixer|self_attention)\.(A_log|dt_bias|D)|mixer\.norm\.weight", ROWS,
         "MambaMixer, GatedDeltaNet, GatedDeltaProduct"),
    _row(r"(mixer|self_attention)\.out_proj\.weight", COLUMNS, _INPUT, hidden=0),
    _row(r"(mixer|self_attention)\.out_proj\.bias", COPY, _INPUT),
    _row(r"merger\.\w+\.(weight|bias)", COPY, "PixtralLargePatchMerger, QwenPatchMerger: Linear of torch"),
    _row(r"(conv1|patch_embed\.proj)\.(weight|bias)|class_token|mask_token|position_embeddings|pos_embed\.weight"
         r"|ln_(pre|post)\.(weight|bias)", COPY, "CLIPViTModel, RADIOViTModel, ViTModel"),
    _row(r"(video_)?embedder\.(weight|bias)", ROWS, "RADIOViTModel: ColumnParallelLinear"),
    _row(r"vision_projection\.encoder\.(weight|bias)", ROWS, "MultimodalProjector: ColumnParallelLinear"),
    _row(r"(word_embeddings|word_embeddings_for_head|output_layer)\.weight|word_embeddings_for_head\.weight", ROWS,
         _VOCABULARY, hidden=1, vocabulary=True),
    _row(r"output_layer\.bias|lm_head\.bias", ROWS, _VOCABULARY, vocabulary=True),
    _row(r"(position|tokentype)_embeddings\.weight", COPY, _EVERY),
    _row(r"(linear_\w+|in_proj)\.layer_norm_(weight|bias)", COPY, "TELayerNormColumnParallelLinear"),
    _row(r"(query_key_value|key_value)\.weight", _interleaved, _LINEAR, hidden=1),
    _row(r"(query_key_value|key_value)\.bias", _interleaved, _LINEAR),
    _row(r"linear_qkv\.weight", ROWS, _LINEAR, hidden=1),
    _row(r"linear_(qkv|q|kv|q_proj|q_up_proj|kv_up_proj)\.(weight|bias)|(inter_)?attention\.query\.(weight|bias)", ROWS,
         _LINEAR),
    _row(r"linear_q_down_proj\.weight", _of_size("q_lora_rank"), "TELinear or ColumnParallelLinear"),
    _row(r"linear_kv_down_proj\.weight", _of_size("kv_lora_rank", "qk_pos_emb_head_dim"),
         "TELinear or ColumnParallelLinear"),
    _row(r"linear_qkv_down_proj\.weight", _fused_latents, "FusedMLASelfAttention"),
    _row(r"indexer\.(linear_wq_b|linear_wk|linear_weights_proj)\.weight", COPY, "DSAIndexer: duplicated"),
    _row(r"\w+_hyper_connection\.(mapping_proj\.weight|alpha_(pre|post|res)|bias)", COPY, "HyperConnectionModule"),
    _row(r"core_attention\.softmax_offset", ROWS, "DotProductAttention"),
    _row(r"(linear_proj|(self_|inter_|cross_)?attention\.dense)\.weight", COLUMNS, _INPUT, hidden=0),
    _row(r"(linear_proj|(self_|inter_|cross_)?attention\.dense)\.bias", COPY, _INPUT),
    _row(r"(linear_fc1|dense_h_to_4h)\.weight\d*", _feed_forward, _LINEAR, hidden=1),
    _row(r"(linear_fc1|dense_h_to_4h)\.bias\d*", _feed_forward, _LINEAR),
    _row(r"dense_h_to_4h_2\.(weight|bias)", ROWS, "NeMo's ParallelMLP"),
    _row(r"(linear_fc2|dense_4h_to_h)\.weight\d*", COLUMNS, _INPUT, hidden=0),
    _row(r"(linear_fc2|dense_4h_to_h)\.bias\d*", COPY, _INPUT),
    _row(r"router\.\w+|shared_experts\.gate_weight", COPY, "TopKRouter"),
    _row(r"eh_proj\.weight", ROWS, _LINEAR),
    _row(r"\w*(layer_?norm\w*|norm\d?)\.(weight|bias)|(enorm|hnorm)\.(weight|bias)", COPY, _EVERY),
    _row(r"(pooler\.dense|lm_head\.dense|binary_head)\.(weight|bias)|rotary_pos_emb\.inv_freq", COPY, _EVERY),
)  # fmt: skip


def _token_embeddings(context: CutContext, name: str) -> RankCut | None:
    """Return the cut of Meta's token embeddings, which differs between versions of the model.

    Llama 1 and 2 cut the hidden dimension (ParallelEmbedding, llama/model.py), Llama 3 and later the vocabulary
    (VocabParallelEmbedding, llama3/llama/model.py). The hidden size tells which of them is whole. Of whole tensors, the
    vocabulary tells it: 32,000 tokens and a few of code models until Llama 2, and 128,256 and more since Llama 3.
    """
    shape, hidden = context.shapes[name], hidden_size(context)
    if len(shape) != 2 or hidden is None:
        return None
    if context.ranks > 1:
        cut = [cut for cut, width in ((ROWS, shape[1]), (COLUMNS, shape[1] * context.ranks)) if width == hidden]
        return cut[0] if cut else None
    return COLUMNS if 32_000 <= shape[0] <= 32_064 else ROWS if shape[0] >= 128_000 else None


def _attention(context: CutContext, name: str) -> RankCut | None:
    """Return the cut of Meta's fused queries, keys and values (llama-models/models/checkpoint.py reshard_mp)."""
    out = _beside(context, name, wqkv="wo")
    if out is None or len(out) != 2:
        return None
    other, odd = divmod(context.shapes[name][0] - out[1], 2)
    return RankCut(0, (out[1], other, other)) if other > 0 and not odd else None


def _experts(context: CutContext, name: str) -> RankCut | None:
    """Return the cut of the experts' output matrices, stacked along 0 (convert_moe_weights, reshard_mp)."""
    found = context.settings.get("moe_args")
    count = found.get("num_experts") if isinstance(found, dict) else None
    return RankCut(0, equal_parts(count)) if type(count) is int and count > 0 else None


META: tuple[CutRow, ...] = (
    _row(r"tok_embeddings\.weight", _token_embeddings, "ParallelEmbedding, VocabParallelEmbedding", vocabulary=True),
    _row(r"output\.weight", ROWS, _LINEAR, hidden=1, vocabulary=True),
    _row(r"output\.bias", ROWS, _LINEAR, vocabulary=True),
    _row(r"attention\.(wq|wk|wv)\.weight", ROWS, _LINEAR, hidden=1),
    _row(r"attention\.(wq|wk|wv)\.bias|attn\.(wq|wk|wv)\.(weight|bias)", ROWS, _LINEAR),
    _row(r"attention\.wqkv\.weight", _attention, "reshard_mp", hidden=1),
    _row(r"attention\.wo\.weight", COLUMNS, _INPUT, hidden=0),
    _row(r"attn\.wo\.weight|mlp\.c_proj\.weight", COLUMNS, _INPUT),
    _row(r"attention\.wo\.bias|attn\.wo\.bias|mlp\.c_proj\.bias|feed_forward\.w2\.bias", COPY, _INPUT),
    _row(r"feed_forward\.(w1|w3|w_in_shared_FD|w_swiglu_FD|shared_expert\.w[13])\.weight", ROWS, _LINEAR, hidden=1),
    _row(r"feed_forward\.(w2|w_out_shared_DF|shared_expert\.w2)\.weight", COLUMNS, _INPUT, hidden=0),
    _row(r"feed_forward\.mlp\.fc1_weight", RankCut(0, (1, 1)), "reshard_mp", hidden=1),
    _row(r"feed_forward\.mlp\.fc2_weight", COLUMNS, "reshard_mp", hidden=0),
    _row(r"experts\.(moe_w_in_eD_F|moe_w_swiglu_eD_F)", LAST, "reshard_mp"),
    _row(r"experts\.moe_w_out_eF_D", _experts, "reshard_mp"),
    _row(r"mlp\.c_fc\.(weight|bias)|conv1\._linear\.weight|vision_projection\.(weight|bias)", ROWS, _LINEAR),
    _row(r"learnable_embedding\.weight", ROWS, _VOCABULARY, hidden=1),
    _row(r"\w*norm\w*\.(weight|bias)|ln_\w+\.(weight|bias)|\w+\.layer_norm_(weight|bias)|feed_forward\.mlp\.layer_norm_\w+",
         COPY, _EVERY),
    _row(r"rope\.freqs|feed_forward\.router_DE|\w*positional_embedding\w*|class_embedding|gate_\w+"
         r"|\w+_tile_pos_embed\.(embedding|gate)", COPY, _EVERY),
)  # fmt: skip

FAIRSEQ: tuple[CutRow, ...] = (
    _row(r"(embed_tokens|output_projection)\.weight", ROWS, "model_parallel/models/transformer_lm.py", vocabulary=True),
    _row(r"(self_attn|encoder_attn)\.(q_proj|k_proj|v_proj)\.(weight|bias)", ROWS,
         "model_parallel/modules/multihead_attention.py"),
    _row(r"(self_attn|encoder_attn)\.out_proj\.weight", COLUMNS, "model_parallel/modules/multihead_attention.py"),
    _row(r"layers\.\d+\.fc1\.(weight|bias)", ROWS, "model_parallel/modules/transformer_layer.py"),
    _row(r"layers\.\d+\.fc2\.weight", COLUMNS, "model_parallel/modules/transformer_layer.py"),
    _row(r"out_proj\.bias|fc2\.bias", COPY, _INPUT),
    _row(r"\w*layer_?norm\w*\.(weight|bias)|embed_positions\.(weight|_float_tensor)|version", COPY, _EVERY),
)  # fmt: skip


def row_of(table: tuple[CutRow, ...], name: str) -> CutRow | None:
    """Return the row of a table for a tensor; None if the table does not know its name."""
    return next((row for row in table if row.names.fullmatch(name)), None)


def hidden_size(context: CutContext) -> int | None:
    """Return the hidden size of a model: as its settings state it, or the size of its last norm."""
    for name in () if context.number("hidden_size", "dim") is not None else ("norm.weight", "text_model.norm.weight"):
        shape = context.shapes.get(name)
        if shape is not None and len(shape) == 1:
            return shape[0]
    return context.number("hidden_size", "dim")


_TOWER = re.compile(r"(?:.*\.)?(?:vision_model|vision_projection|modality_submodules)\..+")
"""Names of what is beside the language model, whose sizes and activation the settings do not state."""


def decided(table: tuple[CutRow, ...], name: str, context: CutContext) -> RankCut | None:
    """Return how a tensor is cut; None if neither the user, the table nor the settings say.

    Raises:
        DamagedFile: its shape contradicts the table, or the settings of the model.
        Refused: the table says that nothing is known of such tensors.
    """
    if _TOWER.fullmatch(name):
        stated = {key: value for key, value in context.settings.items() if key == "checkpoint_version"}
        context = replace(context, settings=stated)
    shape = context.shapes[name]
    given = [cut for glob, cut in context.dims.items() if name == glob or fnmatchcase(name, glob)]
    row = row_of(table, name)
    if given:
        cut: RankCut | None = given[-1]
    elif row is None or (not shape and row.cut is not COPY):
        return None
    else:
        cut = row.cut if isinstance(row.cut, RankCut) else row.cut(context, name)
        hidden = hidden_size(context)
        if cut is not None and row.hidden is not None and hidden is not None and len(shape) > row.hidden:
            size = shape[row.hidden]
            if size != hidden:
                words = f"its shape on a rank is {list(shape)}, and the hidden size is {hidden}"
                raise DamagedFile(f"{words}: it is cut in another way than {row.source} cuts it", where=name)
    return None if cut is None else _normal(cut, shape, name)


def _normal(cut: RankCut, shape: Shape, name: str) -> RankCut:
    """Return the cut with a dimension that counts from the first one."""
    if cut.dim is None:
        return cut
    if not -len(shape) <= cut.dim < len(shape):
        raise DamagedFile(f"it is cut along dimension {cut.dim}, but its shape is {list(shape)}", where=name)
    made = replace(cut, dim=cut.dim % len(shape))
    try:
        made.sizes(made.in_memory(shape)[made.dim or 0])
    except ValueError as error:
        raise DamagedFile(str(error), where=name) from None
    return made


def given_cuts(dims: Mapping[str, object]) -> dict[str, RankCut]:
    """Return the cuts that a user gave: a dimension, ``DIM/N`` for N matrices stacked along it, or ``copy``.

    Raises:
        Refused: one has a different form.
    """
    made: dict[str, RankCut] = {}
    for name, value in dims.items():
        text = str(value)
        found = re.fullmatch(r"(-?\d{1,2})(?:/(\d{1,4}))?", text)
        if text != "copy" and (found is None or found[2] == "0"):
            hint = "give a dimension, such as 'NAME=0', 'NAME=0/2' for two matrices stacked along it, or 'NAME=copy'"
            raise Refused(f"--dim {name}={text} names no dimension", hint=hint)
        made[name] = COPY if found is None else RankCut(int(found[1]), equal_parts(int(found[2] or 1)))
    return made


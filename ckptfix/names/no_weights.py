"""Entries of a state dict that are not weights: one row for each kind, with its source.

Buffers that are counted or computed again, data of modules, observers, masks, weights of loss functions, metrics. A row
says what an entry is, and whether either side may lack it: frameworks read files with and without a row that is
optional. The others are only reported for what they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

from ckptfix.dataclass import dataclass
from ckptfix.names.slots import Slot

Test = Callable[[Slot], bool]


@dataclass(frozen=True, slots=True)
class NoWeight:
    """A row of the table.

    Attributes:
        id: short name, as shown in reports.
        about: what the entries are.
        source: where they are defined.
        keys: a regular expression for the end of a key, after a dot or at its beginning.
        test: what dtype and shape must be.
        optional: either side may lack it.
    """

    id: str
    about: str
    source: str
    keys: str
    test: Test
    optional: bool = True


def _whole(slot: Slot) -> bool:
    return slot.dtype in ("", "bool") or "int" in slot.dtype


def _scalar(slot: Slot) -> bool:
    return slot.shape in ((), (1,))


def _square(slot: Slot) -> bool:
    return len(slot.shape) >= 2 and slot.shape[-1] == slot.shape[-2]


def _triangle(slot: Slot) -> bool:
    # A layer's bias is a vector; GPT-2's "bias" is a lower triangle of ones, float in nanoGPT.
    return slot.shape[:2] == (1, 1) and len(slot.shape) == 4 and _square(slot)


def _bytes(slot: Slot) -> bool:
    return slot.dtype in ("", "uint8") and len(slot.shape) <= 1


def _vector(slot: Slot) -> bool:
    return len(slot.shape) == 1


def _any(slot: Slot) -> bool:
    return True


_WORD = r"(?:^|(?<=\.))"
"""The beginning of a component of a key."""

KINDS: tuple[NoWeight, ...] = (
    NoWeight(
        "num_batches_tracked", "BatchNorm's count of steps", "torch/nn/modules/batchnorm.py",
        "num_batches_tracked", lambda slot: _scalar(slot) and _whole(slot),
    ),
    NoWeight("position_ids", "0, 1, 2, ... as a buffer", "transformers, saved until 4.31", "position_ids", _whole),
    NoWeight("token_type_ids", "zeros as a buffer", "transformers", "token_type_ids", _whole),
    NoWeight(
        "relative_position_index", "indices of a window's positions", "Swin, BEiT, MaxViT",
        "relative_position_index", _whole,
    ),
    NoWeight(
        "relative_coords_table", "log-spaced offsets of a window", "Swin V2", "relative_coords_table", _any
    ),
    NoWeight(
        "attention-mask", "a causal or window mask as a buffer", "GPT-2, GPT-J, nanoGPT, Swin",
        "mask|attn_mask|causal_mask|tril", _square,
    ),
    NoWeight("attention-mask", "a causal mask as a buffer", "GPT-2, nanoGPT", "bias", _triangle),
    NoWeight(
        "masked_bias", "the number used as minus infinity", "GPT-2 of transformers", "masked_bias", _scalar
    ),
    NoWeight(
        "rotary", "frequencies, sines and cosines of rotary positions", "LLaMA, GPT-NeoX",
        "inv_freq|cos_cached|sin_cached|freqs_cis", _any,
    ),
    NoWeight(
        "rotary", "frequencies of rotary positions", "Llama 1 and 2; meta-llama/llama loads with strict=False",
        r"rope\.freqs", _vector,
    ),
    NoWeight("n_averaged", "AveragedModel's count of updates", "torch/optim/swa_utils.py", "n_averaged", _scalar),
    NoWeight(
        "profile", "total_ops and total_params, which a profiler leaves behind", "thop/profile.py",
        "total_ops|total_params", _scalar,
    ),
    NoWeight(
        "fairseq-version", "version and _float_tensor, which hold no weights", "fairseq", "_float_tensor|version",
        _scalar,
    ),
    NoWeight(
        "extra-state", "a module's own data, such as the scales of fp8; empty if there are none",
        "transformer_engine/pytorch/module/base.py get_extra_state, torch/nn/modules/module.py", "_extra_state", _bytes,
    ),
    NoWeight(
        "observer", "observers and fake quantizers of quantization-aware training",
        "torch/ao/quantization/observer.py, fake_quantize.py",
        r"(?:activation_post_process(?:_\d+)?|\w*_?fake_quant(?:_\d+)?)(?:\.[\w.]+)?|fake_quant_enabled|observer_enabled",
        _any, optional=False,
    ),
    NoWeight(
        "pruning-mask", "masks of pruning: the weight is weight_orig * weight_mask, which prune.remove folds",
        "torch/nn/utils/prune.py", r"(?:weight|bias)\w*_mask", _any, optional=False,
    ),
    NoWeight(
        "loss", "weights of a loss function", "LightningModules and training scripts that save their criterion",
        r"(?:\w+_)?(?:criterion|loss|losses)(?:_\w+)?\.[\w.]+", _any, optional=False,
    ),
    NoWeight(
        "metric", "counts of a metric", "torchmetrics/metric.py add_state(persistent=True)",
        r"(?:(?:train|val|valid|test)_(?:acc|accuracy|auroc|auc|f1|iou|map|precision|recall|metrics?)|metrics?)\.[\w.]+",
        _any, optional=False,
    ),
)  # fmt: skip
"""The kinds; the first row that fits an entry counts."""

_ROWS = [(row, re.compile(rf"{_WORD}(?:{row.keys})\Z").search) for row in KINDS]

_NAMED = re.compile("|".join(f"(?:{_WORD}(?:{row.keys})\\Z)" for row in KINDS)).search
"""The test for all rows together, because nearly every key of a model fits none."""

_DIGITS = re.compile(r"\d+")


@lru_cache(1 << 14)
def _is_named(name: str) -> bool:
    """Return whether a row may fit a key, given with 0 for each number: no row asks for a certain number."""
    return _NAMED(name) is not None


def kind_of(slot: Slot) -> NoWeight | None:
    """Return the kind of an entry that is not a weight; None for one that may be a weight."""
    if not _is_named(_DIGITS.sub("0", slot.name)):
        return None
    return next((row for row, matches in _ROWS if matches(slot.name) and row.test(slot)), None)


def optional(slot: Slot) -> NoWeight | None:
    """Return the kind of a buffer that either side may lack, or None for a tensor that must not be skipped.

    Shape and dtype must fit too: ``attn.bias`` is a mask only if it is square.
    """
    row = kind_of(slot)
    return row if row is not None and row.optional else None


def described(slots: Iterable[Slot], most: int = 3) -> str:
    """Describe the entries that are not weights: ``not weights: counts of a metric (3)``; empty without any."""
    counts: dict[str, int] = {}
    for slot in slots:
        row = kind_of(slot)
        if row is not None:
            counts[row.about] = counts.get(row.about, 0) + 1
    return "; ".join(f"not weights: {about} ({count:,})" for about, count in list(counts.items())[:most])


_REPARAMETERIZED = re.compile(rf"{_WORD}(?:rbr_reparam|reparam_conv|conv_reparam|reparam)\.").search

FUSED = {
    "file": "the file's convolutions are fused with their BatchNorm, which cannot be undone: save the unfused model",
    "model": "the model's convolutions are fused with their BatchNorm: load the file first, and fuse afterwards",
    "branches": "one side has the branches of RepVGG or MobileOne in one convolution: load the file into the unfused "
    "model first, and fuse afterwards",
}
"""Fused side -> the sentence about it (torch.nn.utils.fuse_conv_bn_eval; DingXiaoH/RepVGG switch_to_deploy)."""


def fused(missing: Collection[str], over: Collection[str]) -> str:
    """Return the sentence of `FUSED` that explains what the file lacks and has over; empty if none does."""
    if any(map(_REPARAMETERIZED, missing)) != any(map(_REPARAMETERIZED, over)):
        return FUSED["branches"]
    lacks, has = ([name.rpartition(".")[2] for name in names] for names in (missing, over))
    counts = [(leaves.count("running_mean"), leaves.count("bias")) for leaves in (lacks, has)]
    # A norm that is folded away takes its own bias with it, and gives the convolution one.
    if counts[1][0] and not counts[0][0] and counts[0][1]:
        return FUSED["model"]
    return FUSED["file"] if counts[0][0] and not counts[1][0] and counts[1][1] else ""

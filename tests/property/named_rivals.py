"""Random models whose parts are each other's rivals: equal shapes everywhere, in two naming styles that disagree.

Unlike `property.named_models`, two styles may define towers, blocks and parts in other orders, count the levels of a
U-Net's decoder from either end, give a stem the names of a block's parts, count a list in stages or flat, and lose a
block from the middle of a stack. Two rules hold, without which no name would say anything: words that say something
say what is so, and where both styles number the same parts (levels of a U-Net aside), they number them in one order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptfix.names.slots import Slot

Key = tuple[str, int, str, str]
"""What a tensor is: tower, block (-1: stem, -2: tail), part, leaf."""

PARTS: dict[str, tuple[str, ...]] = {
    "q": ("attn.q_proj", "self_attn.q", "attention.self.query", "attention.wq", "sa.to_q"),
    "k": ("attn.k_proj", "self_attn.k", "attention.self.key", "attention.wk", "sa.to_k"),
    "v": ("attn.v_proj", "self_attn.v", "attention.self.value", "attention.wv", "sa.to_v"),
    "o": ("attn.c_proj", "self_attn.out_proj", "attention.output.dense", "attention.wo", "sa.to_out"),
    "cq": ("cross_attn.q_proj", "encoder_attn.q", "crossattention.self.query", "cross_attention.wq", "ca.to_q"),
    "ck": ("cross_attn.k_proj", "encoder_attn.k", "crossattention.self.key", "cross_attention.wk", "ca.to_k"),
    "norm1": ("ln_1", "self_attn_layer_norm", "attention.output.LayerNorm", "attention_norm", "norm1"),
    "norm2": ("ln_2", "final_layer_norm", "output.LayerNorm", "ffn_norm", "norm2"),
    "gate": ("mlp.gate_proj", "mlp.gate", "feed_forward.w1", "ffn.w1", "ff.gate_proj"),
    "up": ("mlp.up_proj", "mlp.up", "feed_forward.w3", "ffn.w3", "ff.up_proj"),
    "down": ("mlp.down_proj", "mlp.down", "feed_forward.w2", "ffn.w2", "ff.down_proj"),
    "fc1": ("mlp.c_fc", "fc1", "intermediate.dense", "ffn.lin1", "ff.fc1"),
    "fc2": ("mlp.c_proj", "fc2", "output.dense", "ffn.lin2", "ff.fc2"),
    "conv1": ("conv1", "convs.0", "conv_a", "layer.0", "block1.proj"),
    "bn1": ("bn1", "norms.0", "bn_a", "layer.1", "block1.norm"),
    "conv2": ("conv2", "convs.1", "conv_b", "layer.3", "block2.proj"),
    "bn2": ("bn2", "norms.1", "bn_b", "layer.4", "block2.norm"),
    "shortcut": ("downsample.0", "shortcut", "skip", "shortcut.0", "nin_shortcut"),
    "lin": ("linear", "fc", "dense", "proj", "lin"),
}
STEM: dict[str, tuple[str, ...]] = {
    "conv": ("conv1", "stem.0", "conv_in", "conv_first", "stem.conv"),
    "norm": ("bn1", "stem.1", "norm_in", "bn_first", "stem.norm"),
    "embedding": ("embed", "tok_embeddings", "word_embeddings", "wte", "embedding"),
    "linear": ("in_proj", "fc_in", "stem", "input", "first"),
}
TAIL: dict[str, tuple[str, ...]] = {
    "norm": ("ln_f", "norm", "final_norm", "norm_out", "post_layernorm"),
    "linear": ("fc", "proj", "output", "last", "out_proj"),
    "head": ("head", "classifier", "lm_head", "fc_out", "score"),
}
TOWERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "one": (("layers",), ("blocks",), ("model.layers",), ("h",), ("features",)),
    "halves": (("encoder.layers", "decoder.layers"), ("enc.blocks", "dec.blocks"), ("encoder.layer", "decoder.layer")),
    "unet": (("down", "up"), ("encoder", "decoder"), ("down_blocks", "up_blocks"), ("enc", "dec"), ("downs", "ups")),
    "modality": (("text.layers", "vision.layers"), ("textual.blocks", "visual.blocks"), ("text.h", "image.h")),
    "copies": (("student.layers", "teacher.layers"), ("online.blocks", "target.blocks"), ("student.h", "ema.h")),
    "cycle": (("netG_A.model", "netG_B.model"), ("gen_a.blocks", "gen_b.blocks"), ("G_A.layers", "G_B.layers")),
    "sides": (("left.layers", "right.layers"), ("left_branch.blocks", "right_branch.blocks"), ("lhs.h", "rhs.h")),
    "players": (("actor.layers", "critic.layers"), ("policy.net", "value_net.net"), ("pi.net", "vf.net")),
    "siamese": (("nets.0", "nets.1"), ("branch1.layers", "branch2.layers"), ("tower_a.h", "tower_b.h")),
}
BLUNT = tuple(a + b for a in ("zan", "kip", "lor", "mev", "tus", "nar", "bol", "fim") for b in ("dex", "jup", "rik"))


@dataclass(frozen=True, slots=True)
class Part:
    """A module of a tower: where it runs, and the shapes of its tensors by leaf."""

    tower: int
    block: int
    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


def pair(seed: int) -> tuple[list[tuple[Slot, Key]], list[tuple[Slot, Key]]]:
    """One model in two styles; of one in twelve, the second lacks a block of the middle."""
    rng = random.Random(f"rivals {seed}")
    kind = rng.choice(["one", "one", "one", *TOWERS])
    depth = rng.choice([1, 2, 2, 3, 4, 4, 6, 8, 12])
    per_stage = rng.choice([size for size in (1, 2, 3, 4) if depth % size == 0])
    parts = list(model(rng, kind, depth, per_stage))
    gone = rng.randrange(1, depth - 1) if depth > 2 and rng.random() < 1 / 12 else None
    rest = [part for part in parts if part.block != gone]
    return rendered(rng, kind, per_stage, parts, 0, False), rendered(rng, kind, per_stage, rest, 1, gone is not None)


def model(rng: random.Random, kind: str, depth: int, per_stage: int) -> Iterator[Part]:
    """Towers of equal blocks, as they are run, each with a stem and a tail or without."""
    width = 4

    def shapes(*rows: tuple[str, tuple[int, ...]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return rows

    bias = (("bias", (width,)),) if rng.random() < 0.5 else ()
    linear = shapes(("weight", (width, width)), *bias)
    vector = shapes(("weight", (width,)), *bias)
    norm = shapes(*((leaf, (width,)) for leaf in ("weight", "bias", "running_mean", "running_var")))
    conv = shapes(("weight", (width, width, 3, 3)))
    wide = shapes(("weight", (2 * width, width))), shapes(("weight", (width, 2 * width)))
    blocks: dict[str, list[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]]] = {
        "square": [("norm1", vector), *((name, linear) for name in "qkvo"), ("norm2", vector), ("fc1", linear),
                   ("fc2", linear)],
        "usual": [("norm1", vector), *((name, linear) for name in "qkvo"), ("norm2", vector), ("fc1", wide[0]),
                  ("fc2", wide[1])],
        "gated": [("norm1", vector), *((name, linear) for name in "qkvo"), ("norm2", vector), ("gate", wide[0]),
                  ("up", wide[0]), ("down", wide[1])],
        "cross": [*((name, linear) for name in ("q", "k", "cq", "ck", "fc1")), ("norm1", vector), ("norm2", vector)],
        "conv": [("conv1", conv), ("bn1", norm), ("conv2", conv), ("bn2", norm)],
        "conv one": [("conv1", conv), ("bn1", norm)],
        "plain": [("lin", linear)],
    }  # fmt: skip
    chosen = rng.choice(["conv", "conv", "conv one"] if kind == "unet" else [*blocks])
    convolves = chosen.startswith("conv")
    shortcut = rng.choice(["", "", "first", "some"]) if convolves else ""
    stem = rng.random() < 0.6
    tail = rng.choice(["", "norm", "linear", "norm"])
    for tower in range(len(TOWERS[kind][0])):
        if stem:
            yield Part(tower, -1, "conv" if convolves else "linear", conv if convolves else linear)
            if convolves:
                yield Part(tower, -1, "norm", norm)
        for block in range(depth):
            for name, what in blocks[chosen]:
                yield Part(tower, block, name, what)
            first = block % per_stage == 0
            if shortcut and first and (shortcut == "first" or (block // per_stage) % 2 == 0):
                yield Part(tower, block, "shortcut", shapes(("weight", (width, width, 1, 1))))
        if tail:
            what = linear if tail == "linear" else norm if convolves else vector
            yield Part(tower, -2, tail, what)
        if rng.random() < 0.5:
            yield Part(tower, -2, "head", shapes(("weight", (7 + tower, width))))


def rendered(
    rng: random.Random, kind: str, per_stage: int, parts: Sequence[Part], side: int, gap: bool
) -> list[tuple[Slot, Key]]:
    """The keys of `parts` in a random style, in its order of definition, and what each is."""
    words = iter(rng.sample(BLUNT[side::2], len(BLUNT) // 2))
    how = rng.choice(["telling"] * 5 + ["blunt", "mixed", "numbered"])
    habit = rng.randrange(5)
    names = list(dict.fromkeys(part.name for part in parts if part.block >= 0))
    called = {name: PARTS[name][habit] for name in names}
    for name in names:
        if how == "blunt" or (how == "mixed" and rng.random() < 0.4):
            called[name] = next(words)
        elif how == "numbered":
            called[name] = str(names.index(name))
    towers = list(rng.choice(TOWERS[kind]))
    if rng.random() < 0.1:
        towers = [next(words) for _ in towers]
    outside = rng.randrange(5)
    layout = rng.choice(["block", "block", "block", "glued", "role", "stages", "stages"])
    base, stride = rng.choice([0, 0, 1]), 1 if gap else rng.choice([1, 1, 1, 2])
    depth = max(part.block for part in parts) + 1
    counted_down = kind == "unet" and rng.random() < 0.4
    rows: list[tuple[str, tuple[int, ...], Key]] = []
    fronts = [name.rpartition(".")[0] or name for name in towers]
    for part in _defined(rng, parts, names):
        if part.block < 0:
            table = STEM if part.block == -1 else TAIL
            front = "" if len(towers) == 1 else f"{fronts[part.tower]}_io." if fronts == towers else (
                f"{fronts[part.tower]}.")  # fmt: skip
            path = front + table[part.name][outside]
        else:
            at = depth - 1 - part.block if counted_down and part.tower == 1 else part.block
            front, role = towers[part.tower], called[part.name]
            number = base + stride * at
            path = {
                "block": f"{front}.{number}.{role}",
                "glued": f"{front}{number}.{role}",
                "role": f"{front}.{role}.{number}",
                "stages": f"{front}.{base + at // per_stage}.{base + at % per_stage}.{role}",
            }[layout]
        rows += [(f"{path}.{leaf}", shape, (str(part.tower), part.block, part.name, leaf))
                 for leaf, shape in part.shapes]  # fmt: skip
    sorting = rng.choice(["", "", "", "", "sorted", "shuffled"])
    if sorting == "sorted":
        rows.sort()
    elif sorting == "shuffled":
        rng.shuffle(rows)
    prefix = rng.choice(["", "", "model.", "module."])
    return [(Slot(prefix + path, shape, "float32"), key) for path, shape, key in rows]


def _defined(rng: random.Random, parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """`parts` in an order of definition that need not be the order of use."""
    order = {name: place for place, name in enumerate(names)}
    if rng.random() < 0.4:
        order = {name: place for place, name in enumerate(rng.sample(names, len(names)))}
    swapped = -1 if rng.random() < 0.25 else 1
    down = -1 if rng.random() < 0.1 else 1
    stem, tail = rng.choice([(0, 2), (0, 2), (0, 2), (2, 3), (0, 0)])
    by_role = rng.random() < 0.1

    def place(part: Part) -> tuple[int, ...]:
        if part.block < 0:
            return (swapped * part.tower, stem if part.block == -1 else tail)
        inside = (down * part.block, order[part.name])
        return (swapped * part.tower, 1, *(inside[::-1] if by_role else inside))

    return sorted(parts, key=place)

"""Random models of the usual kinds, each in two naming styles, whose true renaming is known.

A model is a list of modules, each with an identity that no name shows: tower, stage, block, part. A style says where
it stands: in stages or in one flat list, a stem beside the blocks or as the first of them, what is between two
stages in a list of its own, at the end of the one or at the beginning of the other; whether parts have words that
say something, words that say nothing, or places in a list; whether lists count from 0 or 1; and in which order all is
defined. Widths may be equal everywhere, so that shapes say nothing.

What both styles keep to: a word of the tables says what is so; lists count up as blocks are run. One list does not: the
levels of a way up may be counted from either end, and then only a refusal, or a model whose shapes tell, is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptfix.names.slots import Slot

Key = tuple[str, int, int, str, str]
"""What a tensor is: tower, stage, block, part, leaf. Stage and block are -1 before all of them, and 99 after."""

Shapes = dict[str, tuple[int, ...]]

BEFORE, AFTER, BETWEEN = -1, 99, 50
"""Numbers of what is no block: in front of all stages, behind them, and (as a block) at the end of one."""

PARTS: dict[str, tuple[str, ...]] = {
    "q": ("attn.q", "self_attn.q_proj", "attention.self.query", "attention.wq", "sa.to_q"),
    "k": ("attn.k", "self_attn.k_proj", "attention.self.key", "attention.wk", "sa.to_k"),
    "v": ("attn.v", "self_attn.v_proj", "attention.self.value", "attention.wv", "sa.to_v"),
    "o": ("attn.proj", "self_attn.out_proj", "attention.output.dense", "attention.wo", "sa.to_out"),
    "cq": ("cross_attn.q", "encoder_attn.q_proj", "crossattention.self.query", "cross_attention.wq", "ca.to_q"),
    "ck": ("cross_attn.k", "encoder_attn.k_proj", "crossattention.self.key", "cross_attention.wk", "ca.to_k"),
    "cv": ("cross_attn.v", "encoder_attn.v_proj", "crossattention.self.value", "cross_attention.wv", "ca.to_v"),
    "co": ("cross_attn.proj", "enc_attn.out_proj", "crossattention.output.dense", "cross_attention.wo", "ca.to_out"),
    "qkv": ("attn.qkv", "self_attn.in_proj", "attention.qkv", "attention.wqkv", "sa.to_qkv"),
    "norm1": ("norm1", "self_attn_layer_norm", "attention.output.LayerNorm", "attention_norm", "ln_1"),
    "normc": ("norm_cross", "encoder_attn_layer_norm", "crossattention.output.LayerNorm", "cross_attention_norm",
              "ln_cross"),
    "norm2": ("norm2", "final_layer_norm", "output.LayerNorm", "ffn_norm", "ln_2"),
    "fc1": ("mlp.fc1", "fc1", "intermediate.dense", "ffn.lin1", "mlp.c_fc"),
    "fc2": ("mlp.fc2", "fc2", "output.dense", "ffn.lin2", "mlp.c_proj"),
    "gamma1": ("ls1.gamma", "gamma_1", "lambda_1", "layer_scale_1", "ls_1"),
    "gamma2": ("ls2.gamma", "gamma_2", "lambda_2", "layer_scale_2", "ls_2"),
    "conv1": ("conv1", "convs.0", "conv_a", "layer.0.convolution", "block1.proj"),
    "bn1": ("bn1", "norms.0", "bn_a", "layer.0.normalization", "block1.norm"),
    "conv2": ("conv2", "convs.1", "conv_b", "layer.1.convolution", "block2.proj"),
    "bn2": ("bn2", "norms.1", "bn_b", "layer.1.normalization", "block2.norm"),
    "conv3": ("conv3", "convs.2", "conv_c", "layer.2.convolution", "block3.proj"),
    "bn3": ("bn3", "norms.2", "bn_c", "layer.2.normalization", "block3.norm"),
    "short": ("downsample.0", "shortcut.convolution", "skip.conv", "shortcut.0", "identity_conv.conv"),
    "shortbn": ("downsample.1", "shortcut.normalization", "skip.bn", "shortcut.1", "identity_conv.bn"),
    "lin": ("linear", "fc", "dense", "lin", "proj"),
    "ln": ("norm", "ln", "layer_norm", "layernorm", "normalization"),
    "down": ("conv", "reduction", "proj", "pool.conv", "op"),
    "downnorm": ("norm", "normalization", "layer_norm", "bn", "ln"),
    "wx": ("weight_x", "input.weight", "i2h", "wx", "x2h"),
    "wh": ("weight_h", "hidden.weight", "h2h", "wh", "h2hh"),
}
"""Part -> what libraries call it; one column is one habit."""

AROUND: dict[str, tuple[str, ...]] = {
    "stem": ("conv1", "embedder.embedder.convolution", "stem.0", "features.init_block.conv", "patch_embed.proj"),
    "stemnorm": ("bn1", "embedder.embedder.normalization", "stem.1", "features.init_block.bn", "patch_embed.norm"),
    "embed": ("tok_embeddings", "embed_tokens", "embeddings.word_embeddings", "wte", "embedding"),
    "first": ("fc_in", "in_proj", "input", "stem", "linear0"),
    "tailnorm": ("norm", "final_norm", "ln_f", "layernorm", "head.norm"),
    "last": ("fc_out", "out_proj", "last", "proj", "final"),
    "head": ("fc", "classifier", "head", "output", "head.fc"),
}

TOWERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "one": (("",), ("model",), ("backbone",), ("features",), ("",)),
    "halves": (("encoder", "decoder"), ("enc", "dec"), ("encoder", "decoder")),
    "ways": (("down", "up"), ("encoder", "decoder"), ("down_path", "up_path"), ("downs", "ups"), ("enc", "dec")),
    "modality": (("text", "vision"), ("textual", "visual"), ("text_model", "vision_model")),
    "copies": (("student", "teacher"), ("online", "target"), ("student", "ema")),
    "sides": (("left", "right"), ("lhs", "rhs"), ("branch1", "branch2"), ("tower_a", "tower_b"), ("nets.0", "nets.1")),
    "directions": (("fwd", "bwd"), ("f", "b"), ("forward", "backward"), ("fw", "bw")),
}

STAGES = (
    "layer{s}.{b}",
    "stages.{s}.blocks.{b}",
    "stages.{s}.{b}",
    "stage{s}.unit{b}",
    "encoder.stages.{s}.layers.{b}",
)
FLAT = ("blocks.{i}", "layers.{i}", "h.{i}", "layer.{i}", "block{i}")

BLUNT = tuple(
    front + end
    for front in ("zan", "kip", "lor", "mev", "tus", "nar", "bol", "fim")
    for end in ("dex", "jup", "rik", "pel")
)


NAMED = ["telling"] * 5 + ["index", "index", "blunt", "mixed"]
"""How the parts of a block are called: by words, by places in a list, by words that say nothing, or by some of each."""


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the model, and the shapes of its tensors by leaf."""

    tower: int
    stage: int
    block: int
    part: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(slots=True)
class Model:
    """Modules in the order in which they run.

    Attributes:
        towers: key of `TOWERS`.
        upward: the second tower's stages may be counted from either end.
        tied: the head has the tensor of the embedding.
    """

    kind: str
    towers: str
    modules: list[Module] = field(default_factory=list)
    upward: bool = False
    tied: bool = False


def linear(outside: int, inside: int, bias: bool = True) -> Shapes:
    return {"weight": (outside, inside), **({"bias": (outside,)} if bias else {})}


def conv(outside: int, inside: int, size: int = 3) -> Shapes:
    return {"weight": (outside, inside, size, size)}


def batch(width: int) -> Shapes:
    return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (width,))


def layer(width: int) -> Shapes:
    return dict.fromkeys(("weight", "bias"), (width,))


@dataclass(slots=True)
class Maker:
    """Makes the modules of one random model."""

    rng: random.Random
    model: Model
    tower: int = 0

    def add(self, stage: int, block: int, part: str, shapes: Shapes) -> None:
        self.model.modules.append(Module(self.tower, stage, block, part, tuple(shapes.items())))

    def depths(self) -> list[int]:
        even = self.rng.random() < 0.5
        count = self.rng.choice([1, 1, 2, 2, 3, 4])
        same = self.rng.choice([1, 2, 2, 3])
        return [same if even else self.rng.choice([1, 2, 2, 3, 4]) for _ in range(count)]

    def widths(self, depths: Sequence[int]) -> list[int]:
        grows = self.rng.random() < 0.4
        return [4 * (2**stage if grows else 1) for stage in range(len(depths) + 1)]

    def resnet(self) -> None:
        rng, depths = self.rng, self.depths()
        widths = self.widths(depths)
        bottleneck, stem, size = rng.random() < 0.3, rng.random() < 0.7, rng.choice([1, 3])
        shortcut = rng.choice(["none", "first", "later", "some"])
        if stem:
            self.add(BEFORE, 0, "stem", conv(widths[0], rng.choice([3, widths[0]])))
            if rng.random() < 0.8:
                self.add(BEFORE, 0, "stemnorm", batch(widths[0]))
        for stage, depth in enumerate(depths):
            before, own = widths[stage - 1 if stage else 0], widths[stage]
            for block in range(depth):
                self.add(stage, block, "conv1", conv(own, own if block else before, size))
                self.add(stage, block, "bn1", batch(own))
                self.add(stage, block, "conv2", conv(own, own, 3))
                self.add(stage, block, "bn2", batch(own))
                if bottleneck:
                    self.add(stage, block, "conv3", conv(own, own, size))
                    self.add(stage, block, "bn3", batch(own))
                if not block and (shortcut == "first" or (shortcut == "later" and stage)
                                  or (shortcut == "some" and rng.random() < 0.5)):  # fmt: skip
                    self.add(stage, block, "short", conv(own, before, 1))
                    self.add(stage, block, "shortbn", batch(own))
        if rng.random() < 0.3:
            self.add(AFTER, 0, "tailnorm", batch(widths[len(depths) - 1]))
        self.head(widths[len(depths) - 1])

    def densenet(self) -> None:
        depths, width = self.depths(), 4
        self.add(BEFORE, 0, "stem", conv(width, 3))
        self.add(BEFORE, 0, "stemnorm", batch(width))
        for stage, depth in enumerate(depths):
            for block in range(depth):
                self.add(stage, block, "bn1", batch(width))
                self.add(stage, block, "conv1", conv(width, width, 1))
                self.add(stage, block, "bn2", batch(width))
                self.add(stage, block, "conv2", conv(width, width, 3))
            if stage + 1 < len(depths):
                self.add(stage, BETWEEN, "downnorm", batch(width))
                self.add(stage, BETWEEN, "down", conv(width, width, 1))
        if self.rng.random() < 0.7:
            self.add(AFTER, 0, "tailnorm", batch(width))
        self.head(width)

    def swin(self) -> None:
        rng, depths = self.rng, self.depths()
        widths, norm = self.widths(depths), layer
        fused, scaled, down_norm = rng.random() < 0.5, rng.random() < 0.3, rng.random() < 0.8
        self.add(BEFORE, 0, "stem", {**conv(widths[0], 3, 4), "bias": (widths[0],)})
        if rng.random() < 0.7:
            self.add(BEFORE, 0, "stemnorm", norm(widths[0]))
        for stage, depth in enumerate(depths):
            width = widths[stage]
            for block in range(depth):
                self.attention(stage, block, width, fused, norm)
                if scaled:
                    self.add(stage, block, "gamma1", {"": (width,)})
                self.feed(stage, block, width, rng_wide=2, norm=norm)
                if scaled:
                    self.add(stage, block, "gamma2", {"": (width,)})
            if stage + 1 < len(depths):
                if down_norm:
                    self.add(stage, BETWEEN, "downnorm", norm(width))
                self.add(stage, BETWEEN, "down", linear(widths[stage + 1], width, False))
        if rng.random() < 0.7:
            self.add(AFTER, 0, "tailnorm", norm(widths[len(depths) - 1]))
        self.head(widths[len(depths) - 1])

    def attention(self, stage: int, block: int, width: int, fused: bool, norm: Callable[[int], Shapes]) -> None:
        self.add(stage, block, "norm1", norm(width))
        for part in ("qkv",) if fused else "qkv":
            self.add(stage, block, part, linear(width * (3 if fused else 1), width))
        self.add(stage, block, "o", linear(width, width))

    def feed(self, stage: int, block: int, width: int, rng_wide: int, norm: Callable[[int], Shapes]) -> None:
        self.add(stage, block, "norm2", norm(width))
        self.add(stage, block, "fc1", linear(width * rng_wide, width))
        self.add(stage, block, "fc2", linear(width, width * rng_wide))

    def transformer(self) -> None:
        rng, width = self.rng, 4
        towers = len(TOWERS[self.model.towers][0])
        wide, fused, same = rng.choice([1, 2]), rng.random() < 0.3, rng.random() < 0.5
        embedded, tail, depth = rng.random() < 0.7, rng.random() < 0.7, rng.choice([1, 2, 3, 4])
        crossed = self.model.towers == "halves" and rng.random() < 0.7
        for tower in range(towers):
            self.tower = tower
            if embedded:
                self.add(BEFORE, 0, "embed", {"weight": (11, width)})
            for block in range(depth if same else rng.choice([1, 2, 3, 4])):
                self.attention(0, block, width, fused, layer)
                if crossed and self.tower:
                    self.add(0, block, "normc", layer(width))
                    for part in ("cq", "ck", "cv", "co"):
                        self.add(0, block, part, linear(width, width))
                self.feed(0, block, width, wide, layer)
            if tail:
                self.add(AFTER, 0, "tailnorm", layer(width))
        if embedded and rng.random() < 0.5:
            self.model.tied = rng.random() < 0.6
            self.add(AFTER, 0, "head", {"weight": (11, width)})
        else:
            self.head(width)

    def chain(self) -> None:
        rng, width = self.rng, 4
        normed, bias = rng.random() < 0.5, rng.random() < 0.7
        ends = rng.random() < 0.6
        same, depth = rng.random() < 0.6, rng.choice([1, 2, 3, 4, 6])
        for tower in range(len(TOWERS[self.model.towers][0])):
            self.tower = tower
            if ends:
                self.add(BEFORE, 0, "first", linear(width, rng.choice([3, width]), bias))
            for block in range(depth if same else rng.choice([1, 2, 3, 5])):
                self.add(0, block, "lin", linear(width, width, bias))
                if normed:
                    self.add(0, block, "ln", layer(width))
            if ends and rng.random() < 0.7:
                self.add(AFTER, 0, "last", linear(rng.choice([2, width]), width, bias))

    def recurrent(self) -> None:
        width, depth = 4, self.rng.choice([1, 2, 3])
        for tower in range(len(TOWERS[self.model.towers][0])):
            self.tower = tower
            for block in range(depth):
                self.add(0, block, "wx", {"": (4 * width, width)})
                self.add(0, block, "wh", {"": (4 * width, width)})
        self.head(2 * width)

    def ways(self) -> None:
        """A U-Net: levels down and levels up, of blocks, with a convolution between two levels."""
        rng = self.rng
        levels, depth = rng.choice([2, 3, 4]), rng.choice([1, 1, 2])
        grows, between, normed = rng.random() < 0.3, rng.random() < 0.6, rng.random() < 0.7
        widths = [4 * (2**level if grows else 1) for level in range(levels)]
        self.add(BEFORE, 0, "stem", conv(4, 3))
        for tower in (0, 1):
            self.tower = tower
            for at in range(levels):
                width = widths[at if not self.tower else levels - 1 - at]
                for block in range(depth):
                    for number in "12":
                        self.add(at, block, "conv" + number, conv(width, width))
                        if normed:
                            self.add(at, block, "bn" + number, batch(width))
                if between and at + 1 < levels:
                    after = widths[at + 1 if not self.tower else levels - 2 - at]
                    self.add(at, BETWEEN, "down", conv(after, width))
        if rng.random() < 0.5:
            self.add(AFTER, 0, "tailnorm", batch(4))
        self.head(4)

    def head(self, width: int) -> None:
        if self.rng.random() < 0.8:
            self.add(AFTER, 0, "head", linear(self.rng.choice([7, width]), width))


def model(rng: random.Random) -> Model:
    kind = rng.choice(["resnet", "resnet", "densenet", "swin", "swin", "transformer", "transformer", "chain", "ways",
                       "recurrent"])  # fmt: skip
    several = [name for name in TOWERS if name not in ("ways", "directions")]
    towers = {"transformer": rng.choice(["one", "one", *several]), "chain": rng.choice(["one", "one", *several]),
              "recurrent": "directions", "ways": "ways"}.get(kind, "one")  # fmt: skip
    made = Model(kind, towers, upward=kind == "ways")
    getattr(Maker(rng, made), kind)()
    return made


def pair(seed: int, names: str = "") -> tuple[list[tuple[Slot, Key]], list[tuple[Slot, Key]]]:
    """One model in two styles, of distinct names; with `names`, parts are called so in both."""
    rng = random.Random(f"models {seed}")
    while True:
        made = model(rng)
        sides = Style(rng, made, 0, names).rendered(), Style(rng, made, 1, names).rendered()
        if all(len({slot.name for slot, _ in rows}) == len(rows) for rows in sides):
            return sides


class Style:
    """How one side names and orders a model; parts are `NAMED` as `names` says, or as is drawn."""

    def __init__(self, rng: random.Random, made: Model, side: int, names: str = "") -> None:
        self.rng, self.made = rng, made
        words = rng.sample(BLUNT[side::2], len(BLUNT) // 2)
        drawn = rng.choice(NAMED)
        how = names or drawn
        habit = rng.randrange(5)
        parts = list(dict.fromkeys(module.part for module in made.modules if module.part in PARTS))
        inner = [part for part in parts if part not in ("down", "downnorm")]
        gap = rng.choice([1, 1, 2])
        self.parts: dict[str, str] = {}
        for part in parts:
            if how == "blunt" or (how == "mixed" and rng.random() < 0.4):
                self.parts[part] = words.pop()
            elif how == "index":
                of_kind = inner if part in inner else [other for other in parts if other not in inner]
                at = of_kind.index(part)
                self.parts[part] = str(at + (at // 2) * (gap - 1))
            else:
                self.parts[part] = PARTS[part][habit]
        around = rng.randrange(5) if rng.random() < 0.5 else habit
        self.around = {name: written[around] for name, written in AROUND.items()}
        self.towers = list(rng.choice(TOWERS[made.towers]))
        if rng.random() < 0.07:
            self.towers = [words.pop() for _ in self.towers]
        self.glued_ends = rng.random() < 0.3
        staged = max((module.stage for module in made.modules if module.stage not in (BEFORE, AFTER)), default=0) > 0
        self.staged = rng.random() < (0.7 if staged else 0.15)
        self.text = rng.choice(STAGES if self.staged else FLAT)
        self.in_sequence = not self.staged and made.towers == "one" and rng.random() < 0.2
        self.between = rng.choice(["end", "beginning", "beside", "list", "sequence"])
        self.between_name = rng.choice(["downsample", "transition", "reduce", "down", "trans"])
        self.bases = rng.choice([0, 0, 1]), rng.choice([0, 0, 1])
        self.turned = made.upward and rng.random() < 0.4
        self.prefix = rng.choice(["", "", "", "model.", "module.", "net."])

    def rendered(self) -> list[tuple[Slot, Key]]:
        rows = [(self.path(module), module) for module in self.ordered()]
        made: list[tuple[Slot, Key]] = []
        for path, module in rows:
            for leaf, shape in module.shapes:
                name = f"{self.prefix}{path}.{leaf}" if leaf else f"{self.prefix}{path}"
                made.append((Slot(name, shape, "float32"),
                             (str(module.tower), module.stage, module.block, module.part, leaf)))  # fmt: skip
        sorting = self.rng.choice(["", "", "", "", "", "sorted", "shuffled"])
        if sorting == "sorted":
            made.sort(key=lambda row: row[0].name)
        elif sorting == "shuffled":
            self.rng.shuffle(made)
        return list(self.tied(made)) if self.made.tied else made

    def tied(self, rows: Sequence[tuple[Slot, Key]]) -> Iterator[tuple[Slot, Key]]:
        """`rows` where the last embedding and the head are one tensor: the first of the two names has it."""
        last = max(key[0] for _, key in rows if key[3] == "embed")
        first: str | None = None
        for slot, key in rows:
            if key[3] == "head" or (key[3] == "embed" and key[0] == last):
                yield Slot(slot.name, slot.shape, slot.dtype, first), ("", 0, 0, "tied", "weight")
                first = first or slot.name
            else:
                yield slot, key

    def ordered(self) -> list[Module]:
        """The modules in an order of definition that need not be the order in which they run."""
        rng = self.rng
        names = list(dict.fromkeys(module.part for module in self.made.modules))
        order = {name: place for place, name in enumerate(names)}
        if rng.random() < 0.35:
            order = {name: place for place, name in enumerate(rng.sample(names, len(names)))}
        elif rng.random() < 0.2:
            order = {name: place + 100 * ("norm" in name or "bn" in name) for name, place in order.items()}
        swapped = -1 if rng.random() < 0.2 else 1
        back = -1 if rng.random() < 0.07 else 1
        stem, tail = rng.choice([(0, 2), (0, 2), (0, 2), (0, 2), (2, 3), (0, 0)])
        by_role = rng.random() < 0.1

        def place(module: Module) -> tuple[int, ...]:
            tower = swapped * module.tower
            if module.stage in (BEFORE, AFTER):
                return (tower, stem if module.stage == BEFORE else tail, 0, 0, order[module.part])
            stage = -module.stage if self.turned and module.tower == 1 else module.stage
            inside = (back * stage, back * module.block, order[module.part])
            if self.between == "list" and module.block == BETWEEN:
                return (tower, 1, -99, *inside)
            return (tower, 1, *(inside[::-1] if by_role else inside))

        return sorted(self.made.modules, key=place)

    def front(self, tower: int) -> str:
        return f"{self.towers[tower]}." if self.towers[tower] else ""

    def path(self, module: Module) -> str:
        front = self.front(module.tower)
        if module.stage in (BEFORE, AFTER):
            if self.in_sequence:
                return f"{self.sequence(module)}.{self.around[module.part].rpartition('.')[2]}"
            if self.made.towers == "ways":
                return self.around[module.part]
            return (front[:-1] + "_" if self.glued_ends and front else front) + self.around[module.part]
        part = self.parts[module.part]
        stage = module.stage
        if self.turned and module.tower == 1:
            levels = max(other.stage for other in self.made.modules if 0 <= other.stage < BETWEEN)
            stage = (levels - 1 if module.block == BETWEEN else levels) - stage
        if self.in_sequence:
            return f"{self.sequence(module)}.{part}"
        base_s, base_b = self.bases
        if module.block == BETWEEN:
            return self.between_path(front, stage, part)
        depth = self.index(module)
        return front + self.text.format(s=stage + base_s, b=module.block + base_b, i=depth + base_b) + f".{part}"

    def between_path(self, front: str, stage: int, part: str) -> str:
        base = self.bases[0]
        name = self.between_name
        if not self.staged:
            return f"{front}{name}{stage + base}.{part}" if self.between == "beside" else (
                f"{front}{name}s.{stage + base}.{part}")  # fmt: skip
        stem = self.text.partition("{s}")[0]
        at = {"end": stage, "beginning": stage + 1, "beside": stage, "list": stage, "sequence": stage}[self.between]
        if self.between in ("end", "beginning"):
            return f"{front}{stem}{at + base}.{name}.{part}"
        if self.between == "beside":
            return f"{front}{name}{at + base}.{part}"
        return f"{front}{name}s.{at + base}.{part}"

    def index(self, module: Module) -> int:
        """Number of its block among all of its tower, from 0."""
        blocks = {(self.shown(other), other.block) for other in self.made.modules
                  if other.tower == module.tower and 0 <= other.stage < BETWEEN and other.block != BETWEEN}  # fmt: skip
        return sorted(blocks).index((self.shown(module), module.block))

    def shown(self, module: Module) -> int:
        return -module.stage if self.turned and module.tower == 1 else module.stage

    def sequence(self, module: Module) -> str:
        """Its place in one list of everything, stem and what is between two stages too."""
        groups = list(dict.fromkeys((other.stage, other.block) for other in self.made.modules))
        return f"features.{groups.index((module.stage, module.block)) + self.bases[0]}"

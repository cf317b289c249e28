"""Random models whose keys are known by what they are, not by what they are called, in two naming styles each.

A model is a list of parts: blocks of a stack, each with tensors of certain roles, and what stands around them. A style
names the parts, and puts them in an order of definition. What two styles make of one part is one tensor: so the right
matching is known, however little the names say about it.

What every style keeps to is what any reader of names must take for granted: numbers count up as blocks are run, words
that say something say what is so, and two styles that number the same parts number them in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfix.names.slots import Slot

Key = tuple[str, int, str, int, str]
"""What a tensor is: stack, block, role, expert, leaf."""

Row = tuple[str, tuple[int, ...], Key]

TELLING: dict[str, tuple[str, ...]] = {
    "q": ("attn.q", "self_attn.q_proj", "attention.query", "attention.wq", "sa.to_q"),
    "k": ("attn.k", "self_attn.k_proj", "attention.key", "attention.wk", "sa.to_k"),
    "v": ("attn.v", "self_attn.v_proj", "attention.value", "attention.wv", "sa.to_v"),
    "o": ("attn.proj", "self_attn.o_proj", "attention.output.dense", "attention.wo", "sa.to_out"),
    "norm1": ("norm1", "input_layernorm", "attention_norm", "ln_1", "layer_norm1"),
    "norm2": ("norm2", "post_attention_layernorm", "ffn_norm", "ln_2", "layer_norm2"),
    "gate": ("mlp.gate_proj", "feed_forward.w1", "ffn.gate"),
    "up": ("mlp.up_proj", "feed_forward.w3", "ffn.up"),
    "down": ("mlp.down_proj", "feed_forward.w2", "ffn.down"),
    "fc1": ("mlp.fc1", "intermediate.dense", "mlp.c_fc", "ffn.lin1"),
    "fc2": ("mlp.fc2", "output.dense", "mlp.c_proj", "ffn.lin2"),
    "conv1": ("conv1", "convs.0", "conv_a"),
    "conv2": ("conv2", "convs.1", "conv_b"),
    "bn1": ("bn1", "norms.0", "bn_a"),
    "bn2": ("bn2", "norms.1", "bn_b"),
    "shortcut": ("downsample.0", "shortcut", "skip"),
    "lin": ("linear", "fc", "dense"),
}
"""Role -> how libraries call it; the places of roles of one habit are the same."""

STACKS: dict[str, tuple[str, ...]] = {
    "encoder": ("encoder.layers", "enc.blocks", "encoder.layer"),
    "decoder": ("decoder.layers", "dec.blocks", "decoder.layer"),
    "student": ("student.blocks", "online.layers", "student.layer"),
    "teacher": ("teacher.blocks", "target.layers", "momentum.layer"),
    "actor": ("actor.layers", "policy.net", "actor.net"),
    "critic": ("critic.layers", "critic.net", "critic.mlp"),
    "trunk": ("layers", "blocks", "model.layers", "transformer.h", "features"),
    "other": ("tail", "extra.layers", "more"),
}
BLUNT = tuple(
    front + end
    for front in ("zan", "kip", "lor", "mev", "tus", "nar", "bol", "fim", "rul", "gac")
    for end in ("dex", "jup", "rik", "pel")
)
"""Words that no table knows."""


@dataclass(slots=True)
class Role:
    """A module of a block: its name, and the shapes of its tensors by leaf."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    numbered: int = 0  # place among the roles of its kind, for styles that number


@dataclass(slots=True)
class Stack:
    """Blocks that repeat; `only_first` are roles that no block but the first has."""

    name: str
    depth: int
    roles: list[Role]
    experts: int = 0
    only_first: frozenset[str] = frozenset()


@dataclass(slots=True)
class Model:
    """Stacks, and what stands around them: (name, how libraries call it, shapes by leaf)."""

    stacks: list[Stack]
    around: list[tuple[str, tuple[str, ...], dict[str, tuple[int, ...]]]] = field(default_factory=list)


def pair(seed: int) -> tuple[list[tuple[Slot, Key]], list[tuple[Slot, Key]]]:
    """One model in two styles."""
    rng = random.Random(seed)
    made = model(rng)
    one, other = style(rng, made, 0), style(rng, made, 1)
    return rendered(made, one), rendered(made, other)


def transformer(rng: random.Random, width: int) -> list[Role]:
    wide = rng.choice([width, width, width * 2])
    bias = rng.random() < 0.5

    def linear(inside: int, outside: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (outside, inside), **({"bias": (outside,)} if bias else {})}

    norm = {"weight": (width,), **({"bias": (width,)} if rng.random() < 0.5 else {})}
    attention = [Role(name, linear(width, width)) for name in "qkvo"]
    if rng.random() < 0.5:
        feed = [Role("gate", linear(width, wide)), Role("up", linear(width, wide)), Role("down", linear(wide, width))]
    else:
        feed = [Role("fc1", linear(width, wide)), Role("fc2", linear(wide, width))]
    return [Role("norm1", dict(norm)), *attention, Role("norm2", dict(norm)), *feed]


def convolutions(rng: random.Random, width: int) -> list[Role]:
    size = rng.choice([1, 3])
    norm = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (width,))
    conv = {"weight": (width, width, size, size)}
    roles = [Role("conv1", dict(conv)), Role("bn1", dict(norm)), Role("conv2", dict(conv)), Role("bn2", dict(norm))]
    if rng.random() < 0.5:
        roles.append(Role("shortcut", {"weight": (width, width, 1, 1)}))
    return roles


def plain(rng: random.Random, width: int) -> list[Role]:
    return [Role("lin", {"weight": (width, width), "bias": (width,)})]


def model(rng: random.Random) -> Model:
    """One or two stacks of one kind, embeddings before, a norm and a head behind."""
    width = rng.choice([4, 8])
    names = rng.choice([["trunk"]] * 4 + [["encoder", "decoder"], ["student", "teacher"], ["actor", "critic"],
                                          ["trunk", "other"]])  # fmt: skip
    kind = rng.choice([transformer, transformer, convolutions, plain])
    roles = kind(rng, width)
    same = rng.random() < 0.5
    depth = rng.choice([1, 2, 2, 3, 4, 6, 12])
    stacks = []
    for name in names:
        own = roles if same else kind(rng, width)
        stack = Stack(name, depth if same else rng.choice([1, 2, 3, 5]), own)
        if kind is transformer and rng.random() < 0.2:
            stack.experts = rng.choice([2, 3, 4])
        if any(role.name == "shortcut" for role in own):
            stack.only_first = frozenset({"shortcut"})
        stacks.append(stack)
    for stack in stacks:
        for role in stack.roles:
            alike = [other.name for other in stack.roles if other.shapes == role.shapes]
            role.numbered = alike.index(role.name)
    made = Model(stacks)
    if rng.random() < 0.7:
        written = ("embed", "tok_embeddings", "word_embeddings", "wte")
        made.around.append(("embedding", written, {"weight": (11, width)}))
    if rng.random() < 0.4:
        made.around.append(("position", ("pos_embed", "position_embeddings", "wpe"), {"weight": (11, width)}))
    if rng.random() < 0.6:
        made.around.append(("norm", ("norm", "final_layernorm", "ln_f", "post_norm"), {"weight": (width,)}))
    if rng.random() < 0.7:
        made.around.append(("head", ("head", "classifier", "lm_head", "output"), {"weight": (7, width), "bias": (7,)}))
    return made


@dataclass(slots=True)
class Style:
    """How one side names and orders a model; drawn once, so that all blocks are named alike."""

    rng: random.Random
    roles: dict[str, str]
    stacks: dict[str, str]
    around: dict[str, str]
    layout: str
    base: int
    stride: int
    prefix: str
    order: str
    expert_first: bool


LAYOUTS = ("block", "block", "role", "glued")
ORDERS = ("as run", "as run", "as run", "role by role", "sorted", "shuffled", "permuted")


def style(rng: random.Random, made: Model, side: int) -> Style:
    """A random style for `made`; the two sides share no word that says nothing."""
    names = {role.name for stack in made.stacks for role in stack.roles}
    kind = rng.choice(["telling"] * 4 + ["blunt", "mixed", "numbered"])
    habit = rng.randrange(5)
    words = rng.sample(BLUNT[side::2], len(BLUNT) // 2)
    chosen: dict[str, str] = {}
    for stack in made.stacks:
        for role in stack.roles:
            telling = TELLING[role.name]
            if kind == "telling" or (kind == "mixed" and rng.random() < 0.5):
                chosen.setdefault(role.name, telling[habit % len(telling)])
            elif kind == "numbered":
                kinds = sorted({tuple(sorted(other.shapes.items())) for other in stack.roles})
                front = words[kinds.index(tuple(sorted(role.shapes.items())))]
                chosen.setdefault(role.name, f"{front}{role.numbered}")
            else:
                chosen.setdefault(role.name, words.pop())
    if len(set(chosen.values())) < len(names):
        chosen = {name: f"{text}{'' if list(chosen.values()).count(text) < 2 else '_' + name}"
                  for name, text in chosen.items()}  # fmt: skip
    habit = rng.randrange(6)
    blunt_stacks = rng.random() < 0.25
    stacks = {
        stack.name: words.pop() if blunt_stacks else STACKS[stack.name][habit % len(STACKS[stack.name])]
        for stack in made.stacks
    }
    around = {name: rng.choice(written) for name, written, _ in made.around}
    return Style(
        rng, chosen, stacks, around, rng.choice(LAYOUTS), rng.choice([0, 0, 1]), rng.choice([1, 1, 1, 2, 3]),
        rng.choice(["", "", "model.", "module.", "net."]), rng.choice(ORDERS), rng.random() < 0.5,
    )  # fmt: skip


def rendered(made: Model, how: Style) -> list[tuple[Slot, Key]]:
    """The keys of `made` in the style `how`, and what each is."""
    before: list[Row] = []
    blocks: list[Row] = []
    behind: list[Row] = []
    for name, _, shapes in made.around:
        place = before if name in ("embedding", "position") else behind
        place += [(f"{how.around[name]}.{leaf}", shape, (name, 0, "", 0, leaf)) for leaf, shape in shapes.items()]
    for stack in made.stacks:
        part = list(_stack(stack, how))
        if how.order == "role by role":
            names = [role.name for role in stack.roles]
            part.sort(key=lambda row: names.index(row[2][2]))
        elif how.order == "permuted":
            names = [role.name for role in stack.roles]
            shuffled = how.rng.sample(names, len(names))
            part.sort(key=lambda row: (row[2][1], shuffled.index(row[2][2])))
        blocks += part
    rows = [*before, *blocks, *behind]
    if how.order == "sorted":
        rows.sort()
    elif how.order == "shuffled":
        how.rng.shuffle(rows)
    return [(Slot(how.prefix + name, shape, "float32"), key) for name, shape, key in rows]


def _stack(stack: Stack, how: Style) -> Iterator[Row]:
    front = how.stacks[stack.name]
    for block in range(stack.depth):
        number = how.base + how.stride * block
        for role in stack.roles:
            if role.name in stack.only_first and block:
                continue
            several = stack.experts if role.name in ("gate", "up", "down", "fc1", "fc2") else 0
            for expert in range(max(several, 1)):
                text = how.roles[role.name]
                if several:
                    text = f"experts.{expert}.{text}" if how.expert_first else f"{text}.{expert}"
                path = {
                    "block": f"{front}.{number}.{text}",
                    "role": f"{front}.{text}.{number}",
                    "glued": f"{front}{number}.{text}",
                }[how.layout]
                for leaf, shape in role.shapes.items():
                    yield f"{path}.{leaf}", shape, (stack.name, block, role.name, expert, leaf)

"""A pasted message in the terms of one state dict of the file, and the answer to it while it is worked out."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import field

from ckptfix.checkpoint import Checkpoint
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.findings.message_names import Shape, ShapeConflict
from ckptfix.findings.steps import Fix
from ckptfix.names import lines
from ckptfix.names.operations import Operation
from ckptfix.ops.quantized import config_beside, json_beside, quantization_of
from ckptfix.words import some

ODD = re.compile(r"[\s{}|#=\\]")
POSITIONS = ("pos_embed", "position_embedding", "positional_embedding", "relative_position_bias_table", "wpe")
LORA = re.compile(r"(?:^|[._])lora_(?:embedding_)?[ABab]\b|[._]lora_(?:down|up)\b")



Fused = tuple[lines.Line, tuple[str, ...], tuple[str, ...]]
"""A line of rules, the keys that it takes, and those that it makes."""


@dataclass(frozen=True, slots=True)
class MessageSide:
    """A state dict of the file, and the message in its terms: all keys as the loader had them.

    Attributes:
        at: its address.
        shapes: key -> shape.
        missing: keys that the file lacks.
        over: keys of the file that the model lacks.
        there: keys that the message calls missing, but which the file has.
        foreign: keys that the message says the file has, but which it does not have.
        conflicts: tensors of the file whose shape differs from the model's.
        complete: whether the message lists all keys that the model lacks.
        first: keys that are only the first that a loader could not place.
        shortened: whether the message is a part of the original.
    """

    at: str
    shapes: Mapping[str, Shape]
    missing: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    conflicts: tuple[ShapeConflict, ...] = ()
    complete: bool = False
    first: tuple[str, ...] = ()
    shortened: bool = False


@dataclass(slots=True)
class Answer:
    """The result for one state dict: the parts of one `rename`, and the sentences about them."""

    subs: tuple[tuple[str, str], ...] = ()
    lines: list[str] = field(default_factory=list)
    rows: list[tuple[str, str, Fix | None]] = field(default_factory=list)
    solved: int = 0
    unlike: bool = False
    """True if the model was built with a different configuration, so that similar keys prove little."""

    def say(self, id: str, message: str, fix: Fix | None = None) -> None:
        self.rows.append((id, message, fix))


def brief(names: Sequence[str]) -> str:
    return some(list(names)) if len(names) <= 2 else f"{len(names):,} keys, such as {names[0]}"


def module_of(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def is_coded(checkpoint: Checkpoint, at: str, name: str) -> bool:
    return join(at, name) in quantization_of(checkpoint).roles


PRUNED = "pruned tensors, which the model has multiplied with their masks"
"""The beginning of a message about them."""


def pruned(shapes: Mapping[str, Shape], wanted: Container[str]) -> Iterator[Fused]:
    """Yield lines that multiply a parameter with its mask, as torch.nn.utils.prune.remove does."""
    for name, shape in shapes.items():
        whole = name.removesuffix("_orig")
        parts = name, f"{whole}_mask"
        if whole != name and shapes.get(parts[1]) == shape and whole in wanted:
            made = lines.line(parts, [whole], [Operation("mask")])
            if made is not None:
                yield made, parts, (whole,)


MOST_TOKENIZER = 64 << 20
"""Bytes of the largest tokenizer.json that is read."""


def tokens_of(checkpoint: Checkpoint) -> int | None:
    """Return the number of tokens of the tokenizer.json beside the file: the greatest id, and one."""
    made = json_beside(checkpoint, "tokenizer.json", MOST_TOKENIZER)
    model, added = made.get("model"), made.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [one for one in vocabulary.values() if isinstance(one, int)] if isinstance(vocabulary, dict) else []
    rows = added if isinstance(added, list) else []
    ids += [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), int)]
    return max(ids) + 1 if ids else None


def heads_of(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return the number of heads of queries, and of keys, from config.json or Meta's params.json beside the file."""
    config = {**json_beside(checkpoint, "params.json"), **config_beside(checkpoint)}
    query = config.get("num_attention_heads", config.get("n_heads"))
    key = config.get("num_key_value_heads", config.get("n_kv_heads")) or query
    whole = isinstance(query, int) and isinstance(key, int) and query > 0 and key > 0
    return (query, key) if whole and isinstance(query, int) and isinstance(key, int) else None

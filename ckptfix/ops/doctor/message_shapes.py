"""The tensors whose shapes a message contrasts: a finding for each cause, with a command where one helps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckptfix.checkpoint import Checkpoint
from ckptfix.findings.message_names import Shape, ShapeConflict
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import shell_line
from ckptfix.findings.table import found
from ckptfix.names import lines
from ckptfix.names.slots import is_transposed
from ckptfix.names.vocabulary import EMBEDDINGS, OF_TOKENS
from ckptfix.ops.doctor import quantized_keys
from ckptfix.ops.doctor.message_side import (
    LORA,
    ODD,
    POSITIONS,
    Answer,
    MessageSide,
    is_coded,
    module_of,
    tokens_of,
)
from ckptfix.ops.quantized import config_beside


def say_conflicts(checkpoint: Checkpoint, side: MessageSide, answer: Answer) -> None:
    """Report the tensors whose shapes differ, by cause."""
    empty = [row for row in side.conflicts if 0 in row.wanted and 0 not in row.saved]
    if empty:
        row = empty[0]
        answer.say("model-side", f"the cause is the model, not the file: its {row.name} has the shape "
                   f"{list(row.wanted)} and no values, because DeepSpeed ZeRO-3 partitioned it; the file is whole",
                   "load inside deepspeed.zero.GatheredParameters(..., modifier_rank=0), or before "
                   "deepspeed.initialize; engine.load_checkpoint reads only DeepSpeed's own folders")  # fmt: skip
    rows = _say_ranks(checkpoint, side, [row for row in side.conflicts if row not in empty], answer)
    other = [row for row in rows if side.shapes[row.name] != row.saved]
    rows = [row for row in rows if row not in other]
    if other and not rows:
        row = other[0]
        advice = _resize(row) if _is_vocabulary(row) else ""
        answer.say("other-file", f"the message says that {row.name} has the shape {list(row.saved)}, and in this file "
                   f"it has {list(side.shapes[row.name])}: the message is about a different file", advice)  # fmt: skip
    coded = [row for row in rows if is_coded(checkpoint, side.at, row.name)]
    if coded:
        answer.say("quantized-keys", f"{_shapes(coded)}: the file has codes of quantized weights, and the model has "
                   f"plain weights; {quantized_keys.needs(checkpoint)}", quantized_keys.remedy(checkpoint))  # fmt: skip
    rows = [row for row in rows if row not in coded]
    for says in (_say_rows, _say_reshaped, _say_lora, _say_positions):
        rows = says(checkpoint, side, rows, answer)
    if rows:
        if all(row.saved == (0,) for row in rows):
            answer.say("zero-size", f"{_shapes(rows)}: the file does not hold its values")
            return
        note = _shape_note(rows)
        answer.unlike |= note == _CONFIGURATION
        answer.say("shape-mismatch", _shapes(rows) + note)


def _shapes(rows: Sequence[ShapeConflict]) -> str:
    row = rows[0]
    more = f" (and {len(rows) - 1:,} more)" if len(rows) > 1 else ""
    return f"{row.name} is {list(row.saved)} here, {list(row.wanted)} in the model{more}"


_CONFIGURATION = ": the model was built with a different configuration"


def _shape_note(rows: Sequence[ShapeConflict]) -> str:
    if all(is_transposed(row.saved, row.wanted) for row in rows):
        return ": the same sizes in a different order, as of a transposed layer"
    heads = [row for row in rows if row.saved[1:] == row.wanted[1:] and module_of(row.name) not in EMBEDDINGS]
    last = {module_of(row.name) or row.name for row in heads}
    if len(heads) == len(rows) and len(last) <= 2 and heads[0].wanted:
        return f": an output layer for {heads[0].saved[0]:,} classes, and the model has {heads[0].wanted[0]:,}"
    return _CONFIGURATION


Says = list[ShapeConflict]


def _say_rows(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: Answer) -> Says:
    """Report embeddings and output heads with a different number of rows: a vocabulary that was padded or resized."""
    more: list[ShapeConflict] = []
    if side.shortened:
        listed = {row.name for row in side.conflicts}
        first = next(filter(_is_vocabulary, rows), None)
        same = (name for name, shape in side.shapes.items() if first and shape == first.saved and name not in listed)
        more = [ShapeConflict(name, first.saved, first.wanted) for name in same if first]
    made = vocabulary(checkpoint, [*rows, *filter(_is_vocabulary, more)])
    if made is None:
        return rows
    about, message, rules = made
    answer.lines += rules
    answer.say("vocabulary-rows", message)
    return [row for row in rows if row not in about]


def vocabulary(checkpoint: Checkpoint, rows: Says) -> tuple[Says, str, list[str]] | None:
    """Explain tensors of a vocabulary with a different number of rows: which they are, why, and the rules that help.

    Args:
        rows: tensors whose shapes differ; others than those of a vocabulary are ignored.

    Returns:
        None if none of them is of a vocabulary.
    """
    about = [row for row in rows if _is_vocabulary(row)]
    if all(module_of(row.name) == "output" for row in about):  # without an embedding, it may be a layer for classes
        return None
    saved, wanted = about[0].saved[0], about[0].wanted[0]
    about = [row for row in about if (row.saved[0], row.wanted[0]) == (saved, wanted)]
    # The output head has other names too, and its bias has the same rows.
    shapes = ((about[0].saved, about[0].wanted), ((saved,), (wanted,)))
    about += [row for row in rows if (row.saved, row.wanted) in shapes and row not in about]
    config = config_beside(checkpoint).get("vocab_size")
    tokens = tokens_of(checkpoint)
    evidence = f"; config.json says {config:,}" if isinstance(config, int) else ""
    evidence += f", the tokenizer has {tokens:,} tokens" if tokens else ""
    padded = saved in _padded(wanted) and (tokens is None or tokens <= wanted)
    if saved < wanted:
        why = "the model has more: it was resized for new tokens, or padded; new rows are zeros until they are trained"
    elif padded:
        why = "the file's were padded to a round number, and the rows at its end stand for no token"
    else:
        why = (f"the file's were resized for {saved - wanted:,} new tokens: to keep them, {_resize(about[0])}; the "
               "command cuts them off")  # fmt: skip
    fill = " fill=0" if wanted > saved else ""
    names = [row.name for row in about if not ODD.search(row.name)]
    rules = [f"{name} -> {name} | rows from={saved} to={wanted}{fill}" for name in names]
    message = f"the vocabulary has {saved:,} rows here ({about[0].name}), and {wanted:,} in the model{evidence}: {why}"
    return about, message, rules


def _padded(rows: int) -> set[int]:
    """Return the numbers of rows to which libraries pad a vocabulary: the next multiples of powers of two."""
    return {-(-rows // (1 << power)) << power for power in range(3, 11)} - {rows}


_OF_TEXT = ("embed_tokens", "wte", "word_embeddings", "embed_in", "shared")
"""Modules of transformers whose rows are the ``vocab_size`` of config.json."""


def of_config(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding if config.json beside the file states a different number of rows than its embedding has."""
    stated = config_beside(checkpoint).get("vocab_size")
    if not isinstance(stated, int):
        return
    keys = [(entry.key, entry.shape) for entry in checkpoint.entries if not entry.at and len(entry.shape) == 2]
    rows = [(key, shape[0]) for key, shape in keys if module_of(key) in _OF_TEXT and key.endswith(".weight")]
    if not rows or any(count == stated for _, count in rows) or any(map(LORA.search, (key for key, _ in keys))):
        return
    key, count = rows[0]
    if ODD.search(key):
        return
    tokens = tokens_of(checkpoint)
    also = f", and the tokenizer has {tokens:,} tokens" if tokens else ""
    message = f"{key} has {count:,} rows, and vocab_size in config.json is {stated:,}{also}: from_pretrained refuses it"
    rule = f"{key} -> {key} | rows from={count} to={stated}{' fill=0' if stated > count else ''}"
    advice = f'set "vocab_size": {count} in config.json; or, if these rows are wrong, ckptfix rename {{source}} OUT '
    advice += shell_line(("--line", rule))
    yield found("vocabulary-rows", message, where=key, severity="warning", fix=advice)


def _resize(row: ShapeConflict) -> str:
    return f"call model.resize_token_embeddings({row.saved[0]}) before loading"


def _is_vocabulary(row: ShapeConflict) -> bool:
    parts = row.name.removesuffix(".weight").removesuffix(".default").removesuffix(".modules_to_save").split(".")
    named = parts[-1] in (*EMBEDDINGS, *OF_TOKENS) or "word_embeddings" in parts
    large = min(row.saved[:1] + row.wanted[:1], default=0) >= 16
    position = any(part in row.name for part in POSITIONS)
    return named and large and not position and len(row.saved) == 2 and row.saved[1:] == row.wanted[1:]


def _say_reshaped(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: Answer) -> Says:
    """Report a linear layer that is a convolution of size 1 on the other side."""
    kinds: dict[tuple[str, str], Says] = {}
    for row in rows:
        if row.saved != row.wanted and _plain(row.saved) == _plain(row.wanted) and not ODD.search(row.name):
            kinds.setdefault((_letters(row.saved), _letters(row.wanted)), []).append(row)
    for (old, new), about in kinds.items():
        made = [f"{row.name} -> {row.name} | reshape from={old} to={new}" for row in about]
        grouped = lines.joined([(row.name, row.name, f"| reshape from={old} to={new}") for row in about])
        short = [f"{left} -> {right} {end}" for left, right, end in grouped]
        answer.lines += short if len(short) < len(made) else made
        answer.say("shape-mismatch", f"{_shapes(about)}: the same values, as a linear layer and as a convolution of "
                   "size 1")  # fmt: skip
    done = [row for about in kinds.values() for row in about]
    return [row for row in rows if row not in done]


def _plain(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _letters(shape: Shape) -> str:
    letters = iter("oiabcdef")
    return ",".join("1" if size == 1 else next(letters) for size in shape)


def _say_lora(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: Answer) -> Says:
    about = [row for row in rows if LORA.search(row.name)]
    pairs = [(row.saved, row.wanted) for row in about if len(row.saved) == 2 == len(row.wanted)]
    ranks = {_ranks(saved, wanted) for saved, wanted in pairs}
    if len(ranks) != 1:
        ranks = {(min(saved), min(wanted)) for saved, wanted in pairs}
    if len(ranks) != 1:
        return rows
    ((saved, wanted),) = ranks
    answer.say("model-side", f"the adapter was trained with rank {saved}, and the model was built for rank {wanted}: "
               "the file is whole", f"build the model with r={saved}, as in adapter_config.json")  # fmt: skip
    return [row for row in rows if row not in about]


def _ranks(saved: Shape, wanted: Shape) -> tuple[int, int]:
    """Return the ranks of two factors: the sizes that differ, or the smaller ones where both do."""
    differ = [(one, two) for one, two in zip(saved, wanted, strict=True) if one != two]
    return differ[0] if len(differ) == 1 else (min(saved), min(wanted))


def _say_positions(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: Answer) -> Says:
    about = [row for row in rows if any(part in row.name for part in POSITIONS)]
    if about:
        answer.say("position-embedding", _shapes(about), "interpolate them in the model's code; to load the rest: "
                   "ckptfix.load_into(model, {source}, strict=False)")  # fmt: skip
    return [row for row in rows if row not in about]


def _say_ranks(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: Answer) -> Says:
    """Report several tensors that are an exact part of the model's along one dimension: those of one rank."""
    ratios = {_ratio(row) for row in rows}
    if not rows or len(ratios) != 1 or None in ratios or not (len(rows) > 2 or _RANKED.search(checkpoint.path)):
        return rows
    (ratio,) = ratios
    answer.say("one-rank", f"{_shapes(rows)}: 1/{ratio} of each, so the file holds the part of one of {ratio} ranks",
               "join the files of all ranks first: `ckptfix convert FOLDER OUT` joins those of FSDP and DeepSpeed, of "
               "Megatron-LM, of Meta (consolidated.NN.pth) and of fairseq")  # fmt: skip
    return []


_RANKED = re.compile(r"consolidated\.\d\d\.|mp_rank_\d|rank_?\d", re.IGNORECASE)


def _ratio(row: ShapeConflict) -> int | None:
    if len(row.saved) != len(row.wanted):
        return None
    ways = {big // small for small, big in zip(row.saved, row.wanted, strict=True) if small and small != big}
    exact = all(small and big % small == 0 for small, big in zip(row.saved, row.wanted, strict=True))
    several = sum(small != big for small, big in zip(row.saved, row.wanted, strict=True)) == 1
    return ways.pop() if exact and several and len(ways) == 1 else None

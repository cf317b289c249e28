"""Comparison of a file with the keys and shapes that a loader's message lists: what differs, and the command for it.

The message is one side, and the file is the other. A command is proposed only after its effect was verified on all
keys of the message; what it leaves is reported with it. A cause on the model's side is reported as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptfix.align import layouts
from ckptfix.checkpoint import Checkpoint
from ckptfix.checkpoint.quantization_signs import observers
from ckptfix.errors import CkptfixError
from ckptfix.findings.message_names import Listed, Prefix, Shape, ShapeConflict
from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.steps import Fix, Value, step
from ckptfix.findings.table import found
from ckptfix.names import averaged_keys, bases, library_names, lines, no_weights, rules, spellings, tables, typed
from ckptfix.names.operations import HALF, INTERLEAVED, Operation
from ckptfix.names.slots import Slot
from ckptfix.names.vocabulary import EMBEDDINGS, OUTPUT_LAYERS
from ckptfix.names.wrappers import WRAPPERS
from ckptfix.ops import choose
from ckptfix.ops.doctor import contents, message_parts, message_shapes, quantized_keys, solve
from ckptfix.ops.doctor.groups import BESIDE, TOLD
from ckptfix.ops.doctor.message_side import (
    LORA,
    ODD,
    PRUNED,
    Answer,
    Fused,
    MessageSide,
    brief,
    heads_of,
    is_coded,
    module_of,
    pruned,
)
from ckptfix.ops.quantized import config_beside
from ckptfix.ops.rename import by_table
from ckptfix.words import plural

STRICT = frozenset(("torch", "torch before 0.4", "vLLM", "llama.cpp", "Megatron", "MLX", ""))
"""Frameworks whose loaders refuse a key that the model lacks; the others only list it."""

MOST_LINES = 12
"""Lines of rules in a printed command."""




def scan(checkpoint: Checkpoint, names: Listed) -> list[Finding]:
    """Return the findings about `checkpoint` that follow from the keys and shapes of a message; empty without any."""
    if parts := message_parts.scan(checkpoint, names):
        return parts
    if "DCP" in names.frameworks or not choose.states(checkpoint):
        return list(_scan_whole(checkpoint, names))
    tried: list[tuple[tuple[int, int], MessageSide, Answer]] = []
    for state in choose.states(checkpoint)[:8]:
        shapes = {entry.key: entry.shape for entry in checkpoint.entries_at(state.at)}
        if shapes:
            side = _sided(state.at, shapes, names)
            answer = _answered(checkpoint, side, names)
            tried.append(((len(side.over) + len(side.conflicts), answer.solved), side, answer))
    if not tried:
        return []
    _, side, answer = max(tried, key=lambda row: row[0])
    if values := _values(checkpoint, side):
        globs = tuple(dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in values))
        fix = step("select", drop=globs) if all(name.endswith(_STATE) for name in values) else ""
        message = f"the model lacks {brief(values)}, which hold no weights: the command leaves them out"
        return [found("optional-buffers", message, where=side.at, fix=fix, about=TOLD)]
    several = bool(side.at) and len(checkpoint.state_dicts) > 1
    return list(_findings(answer, side.at if several else "", side.at))


_STATE = "._extra_state"
"""Values that modules such as Transformer Engine's save beside their weights: nn.Module.get_extra_state."""


def _values(checkpoint: Checkpoint, side: MessageSide) -> list[str]:
    """Return the unexpected keys of values other than tensors, if the message is about nothing else of the file."""
    site = checkpoint.names_at(side.at)
    names = set(site.names if site is not None else ())
    over = [*side.foreign, *side.over]
    if side.missing or side.conflicts or not side.foreign:
        return [name for name in over if not side.missing and over and all(row.endswith(_STATE) for row in over)]
    return over if all(name in names for name in side.foreign) else []


def _scan_whole(checkpoint: Checkpoint, names: Listed) -> Iterator[Finding]:
    """Yield findings about the keys of a whole checkpoint, in which torch.distributed joins all levels with dots."""
    have = [entry.name.replace("/", ".") for entry in checkpoint.entries]
    have += [address.replace("/", ".") for address, _ in checkpoint.values()]
    there = set(have)
    asked = [*names.missing, *names.unexpected, *names.seen]
    lacking = [name for name in asked if name not in there]
    if not asked or not have:
        return
    if not lacking:
        message = f"the checkpoint has {brief(asked)}: the message is about a different one"
        yield found("other-file", message, about=TOLD, fix="")
        return
    bare, taken = bases.unwrapped(have)
    if taken and all(name in bare for name in lacking):
        return  # wrapped-names says it
    if (level := _level(lacking, have)) is not None:
        yield found("missing-keys", level[0], about=TOLD, fix=level[1])
        return
    near = _alike(lacking[0], have)
    hint = f"; the nearest is {near}" if near else f"; its keys are like {have[0]}"
    message = f"the checkpoint has no {brief(lacking)}{hint}"
    advice = ""
    if near and _PLACE.search(lacking[0]) and not _PLACE.search(near):
        message += ": its optimizer's state is by the names of parameters, and the loader asks by their numbers"
        advice = (
            "load it with the function that saved it (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict "
            "gives names), or in Python: ckptfix.load_optimizer(optimizer, {source!r}, model=model)"
        )
    yield found("missing-keys", message, about=TOLD, fix=advice)


def _level(lacking: Sequence[str], have: Sequence[str]) -> tuple[str, str] | None:
    """Return what to say, and to do, if the loader's dict has one level more or less than the checkpoint."""
    level = solve.shared_prefix(lacking, have)
    if level is None or level[0].count(".") != 1:
        return None
    name = level[0][:-1]
    if level[1]:
        return (f"the checkpoint has {brief(lacking)} one level deeper, in its dict {name!r}",
                f"load it into {{{{{name!r}: state_dict}}}}")  # fmt: skip
    return (f"the checkpoint has {brief(lacking)} without the level {name!r} of the loader's dict",
            f"load it into the state dict itself, not into {{{{{name!r}: state_dict}}}}")  # fmt: skip


_PLACE = re.compile(r"(?:^|\.)state\.\d+\.")
"""An optimizer's state by the number of a parameter."""


def _alike(name: str, have: Sequence[str]) -> str | None:
    """Return the key with the same first and last component, or the most similar one."""
    parts = name.split(".")
    rows = [other for other in have if other.split(".")[0] == parts[0] and other.rpartition(".")[2] == parts[-1]]
    return rows[0] if rows else _nearest(name, have)


def _findings(answer: Answer, at: str, where: str) -> Iterator[Finding]:
    """Yield the findings of an answer, with the one command that does the work of all of them."""
    options: dict[str, Value] = {}
    if answer.subs:
        options["subs"] = answer.subs
    if answer.lines:
        options["lines"] = tuple(dict.fromkeys(answer.lines))
    command = step("rename", **options) if options else None
    rows: dict[str, tuple[str, Fix | None]] = {}
    for id, message, fix in answer.rows:
        if id in rows:
            said, other = rows[id]
            message, fix = f"{said}; {message}", None if fix is None or other is None else other or fix
        rows[id] = message, fix
    for id, (message, fix) in rows.items():
        if fix is None or (id == "names-prefixed" and answer.lines):  # one command does the work of all
            fix = command or ""
        if at and not isinstance(fix, str):
            fix = tuple(one if one.get("at") is not None else one.having(at=at) for one in fix)
        severity: Severity | None = "error" if not isinstance(fix, str) and id not in _NOTES else None
        if not fix and id == "unexpected-keys":
            severity = "info"
        yield found(id, message, where=where, fix=fix, about=TOLD, severity=severity)


_NOTES = frozenset({"training-checkpoint", "quantized-keys", "averaged-keys"})
"""Findings that do not count as errors of the file, although a command helps."""


def _sided(at: str, shapes: Mapping[str, Shape], names: Listed) -> MessageSide:
    have = list(shapes)
    names = _of_adapter(_without_adapter_name(names), have)
    said = [*names.unexpected, *(row.name for row in names.conflicts)]
    front, stripped = "", True
    if said and not any(name in shapes for name in said):
        front, stripped = solve.shared_prefix(said, have) or ("", True)
    elif not said and names.seen and not any(name in shapes for name in names.seen):
        front, stripped = solve.shared_prefix(names.seen, have) or ("", True)

    def own(name: str) -> str:
        return front + name if stripped else name.removeprefix(front)

    modules = tuple(own(name) for name in names.modules)
    under = [name for name in have if any(_is_under(name, module) for module in modules)]
    seen = [own(name) for name in names.seen]
    over = dict.fromkeys([*map(own, names.unexpected), *(name for name in seen if name in shapes), *under])
    missing = dict.fromkeys([*map(own, names.missing), *(name for name in seen if name not in shapes)])
    conflicts = tuple(replace(row, name=_conflicting(row, own(row.name), shapes)) for row in names.conflicts)
    return MessageSide(
        at,
        shapes,
        tuple(name for name in missing if name not in shapes),
        tuple(name for name in over if name in shapes),
        tuple(name for name in missing if name in shapes),
        tuple(name for name in (*over, *(row.name for row in conflicts)) if name not in shapes),
        tuple(row for row in conflicts if row.name in shapes),
        bool(names.unexpected) and not names.shortened,
        tuple(seen),
        names.shortened,
    )


def _without_adapter_name(names: Listed) -> Listed:
    """Return `names` as the files of PEFT have them, if PEFT's loader wrote them: it adds the adapter's name itself.

    Source: peft/utils/save_and_load.py, set_peft_model_state_dict.
    """
    if set(names.frameworks) != {"PEFT"}:
        return names
    plain = tuple(_ADAPTER_NAME.sub(r".\1\2", name).replace(".modules_to_save.", ".") for name in names.missing)
    return replace(names, missing=plain)


_ADAPTER_NAME = re.compile(
    r"\.(lora_(?:embedding_)?[AB](?:_\d+)?|lora_magnitude_vector|modules_to_save)\.[\w-]+(\.(?:weight|bias)|)$"
)
"""A module of an adapter, and the adapter's name."""


def _of_adapter(names: Listed, have: Sequence[str]) -> Listed:
    """Return `names` with keys of the base model, as converters of adapters print them, as those of the adapter."""
    if not names.unexpected or any(name in have for name in names.unexpected):
        return names
    of_base: dict[str, list[str]] = {}
    for name in have:
        if LORA.search(name):
            of_base.setdefault(_ADAPTED.sub("", name.removeprefix("base_model.model.")), []).append(name)
    over = [adapted for name in names.unexpected for adapted in of_base.get(name, (name,))]
    return replace(names, unexpected=tuple(over))


_ADAPTED = re.compile(r"\.lora_(?:embedding_)?[AB](?:\.default)?")


def _in_file(name: str, shapes: Mapping[str, Shape]) -> str:
    """Return the key of the file that is `name` in the model, by a known change; `name` without one."""
    if name in shapes:
        return name
    changes = (subs for change in library_names.CHANGES for subs in (change.forward, change.back))
    olds = (library_names.substituted(name, subs) for subs in changes)
    return next((old for old in olds if old in shapes), name)


def _conflicting(row: ShapeConflict, name: str, shapes: Mapping[str, Shape]) -> str:
    """Return the key of the file that a conflict is about; accelerate prints only its last component."""
    short = "." not in row.name and row.name not in shapes
    ends = (key for key, shape in shapes.items() if short and shape == row.saved and key.endswith(f".{row.name}"))
    return next(ends, None) or _in_file(name, shapes)


def _is_under(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.") or f".{module}." in f".{name}"


def _answered(checkpoint: Checkpoint, side: MessageSide, names: Listed) -> Answer:
    answer = Answer()
    message_shapes.say_conflicts(checkpoint, side, answer)
    if _are_around(checkpoint, side.at, names):
        return answer  # training-checkpoint says it
    if {"state", "param_groups"} <= set(names.unexpected):
        answer.say("other-file", "the message lists the keys of an optimizer's state: the loader was given the file of "
                   "the optimizer, or a dict with both, as the model", "pass the model's state dict")  # fmt: skip
        return answer
    if side.foreign and not side.over and not side.conflicts:
        _, wrappers = bases.unwrapped(list(side.shapes))
        if any(set(name.split(".")[:-1]) & set(wrappers) for name in side.foreign):
            return answer  # the file has that wrapper too: wrapped-names says it
        answer.say("other-file", f"the message names {brief(side.foreign)}, which this file does not have: it is about "
                   "a different file, or the loader changed the keys first", "")  # fmt: skip
        return answer
    if side.there and not side.missing:
        _say_there(side, answer)
        return answer
    if not side.missing and not side.over:
        return answer
    _solve(checkpoint, side, names, answer)
    return answer


def _are_around(checkpoint: Checkpoint, at: str, names: Listed) -> bool:
    """Return whether the unexpected keys are those of a dict that holds the state dict at `at`, at any depth."""
    if not at or not names.unexpected:
        return False
    addresses = [*(entry.name for entry in checkpoint.entries), *(place for place, _ in checkpoint.values())]
    parts = at.split("/")
    for depth in range(len(parts)):
        above = "".join(f"{part}/" for part in parts[:depth])
        keys = {place[len(above) :].partition("/")[0] for place in addresses if place.startswith(above)}
        if keys.issuperset(names.unexpected):
            return True
    return False


def _say_there(side: MessageSide, answer: Answer) -> None:
    count = f"the file has {brief(side.there)}, which the message calls missing"
    if side.at:
        answer.say("training-checkpoint", f"{count}, at {side.at!r}: pass that state dict to load_state_dict",
                   step("extract", at=side.at))  # fmt: skip
    else:
        answer.say("other-file", f"{count}: the message is about a different file, or the loader changed the keys", "")


def _solve(checkpoint: Checkpoint, side: MessageSide, names: Listed, answer: Answer) -> None:
    """Find new keys, fused tensors, tied ones and ones to leave out that explain the missing and unexpected keys."""
    have = list(side.shapes)
    adapter = all(LORA.search(name) or "modules_to_save" in name for name in have)
    of_base = [name for name in side.missing if adapter and not LORA.search(name) and "modules_to_save" not in name]
    missing = [name for name in side.missing if name not in of_base]
    over = list(side.over)
    wrapped = _without_wrappers(side, missing)
    if wrapped:
        return
    result = solve.solve(have, missing, over, complete=side.complete)
    if not missing and over:
        result = _known_change(have, over, names) or _main_module(side, names) or result
    current = result.names
    left = [name for name in missing if name not in result.made]
    if (heads := _rotary(checkpoint, side, result, names, answer)) is not None:
        _say_names(side, result, missing, left, [], names, answer, heads)
        return
    answer.subs = result.subs
    moved = [(old, new) for old, new in current.items() if old != new]
    answer.lines += [f"{old} -> {new} {end}" for old, new, end in lines.joined(
        [(new, new, operations) for new, operations in library_names.reordered(moved)])]  # fmt: skip
    rest = [name for name in (over or have) if current[name] not in result.made and current[name] == name]
    made = {new: side.shapes[old] for old, new in current.items()}
    fused = list(_fused(list(made), left, made)) if left else []
    if fused:
        answer.lines += [f"{old} -> {new} {end}" for old, new, end in lines.joined([row for row, _, _ in fused])]
        used = {name for _, olds, _ in fused for name in olds}
        new = {name for _, _, news in fused for name in news}
        rest = [name for name in rest if current[name] not in used]
        left = [name for name in left if name not in new]
    if left and _say_table(checkpoint, side, missing, answer):
        return
    taken = {name for _, olds, _ in fused for name in olds}
    loose = [current[name] for name in side.over if current[name] not in {*result.made, *taken}]
    if 2 * len(left) > len(missing) and solve.contradicts(left, loose) and not _fused_biases(left, rest):
        answer.subs, answer.lines = (), []
        _say_unlike(missing, over, answer)
        return
    if _is_guess(result) and any(map(_is_weight, left)) and any(map(_is_weight, loose)):
        answer.subs, answer.lines = (), []
        _say_names(side, result, missing, left, fused, names, answer, _REST_UNKNOWN)
        return
    _say_names(side, result, missing, left, fused, names, answer)
    left = _tie(checkpoint, side, current, rest, left, answer)
    if over:
        _drop(checkpoint, side, names, current, rest, left, answer)
    if answer.unlike and _is_guess(result):
        answer.subs, answer.lines = (), []
        answer.rows[:] = [row for row in answer.rows if row[0] != "other-spelling"]
    _say_left(side, left, of_base, rest if over else [], answer)
    _say_fused_norm(left, rest, answer)
    answer.solved = len(missing) - len(left) + len(over) - len(rest)


_REST_UNKNOWN = (
    "the message does not show what the others are called: with the model, or any file that it loads: ckptfix match "
    "{source} OUT --like MODEL"
)


def _is_weight(name: str) -> bool:
    return not no_weights.optional(Slot(name, ()))


def _is_guess(result: solve.Substituted) -> bool:
    """Return whether a renaming follows from the likeness of keys alone, and not from a known change or a prefix."""
    pairs = [(old, new) for old, new in result.pairs if old != new]
    every = len(pairs) == len(result.names) and all(old.endswith(new) or new.endswith(old) for old, new in pairs)
    return bool(pairs) and not every and library_names.change_of(pairs) is None


_NORM = ("running_mean", "running_var")


def _say_fused_norm(left: Sequence[str], rest: Sequence[str], answer: Answer) -> None:
    """Report convolutions that have a bias in the file, and a BatchNorm in the model: they were fused."""
    if biases := _fused_biases(left, rest):
        norm = next(name for name in left if name.rpartition(".")[2] in _NORM)
        answer.rows[:] = [row for row in answer.rows if row[0] not in ("missing-keys", "unexpected-keys")]
        answer.say("model-side", f"the file was saved after its convolutions were fused with their BatchNorm: it has "
                   f"{biases[0]}, and the model {norm}", "fuse the model too before loading (model.fuse()), or use "
                   "a file that was saved before; fused layers cannot be taken apart")  # fmt: skip


def _say_table(checkpoint: Checkpoint, side: MessageSide, missing: Sequence[str], answer: Answer) -> bool:
    """Report the table of names that makes all missing keys of the file's; return whether there is one."""
    names = by_table.names_making(checkpoint, missing, side.over, side.at)
    if names is None:
        return False
    old, new = names.split(":")
    what = f"all {plural(len(missing), 'missing key')} of the message"
    message = f"the file has the names of {old}, and the model those of {new}: a table of names makes {what}"
    answer.subs, answer.lines = (), []
    answer.say("library-names", message, step("rename", names=names))
    answer.solved = len(missing) + len(side.over)
    return True


def _say_unlike(missing: Sequence[str], over: Sequence[str], answer: Answer) -> None:
    """Report that file and model name nearly everything differently, so that the message alone decides nothing."""
    answer.say("missing-keys", f"the model names its tensors differently: the file has keys like {over[0]}, and the "
               f"model keys like {missing[0]}; the message does not show which is which",
               "with the model, or any file that it loads: ckptfix match {source} OUT --like MODEL")  # fmt: skip


def _rotary(
    checkpoint: Checkpoint, side: MessageSide, result: solve.Substituted, names: Listed, answer: Answer
) -> str | None:
    """Add lines that reorder the rows of queries and keys, if only one of two implementations rotates neighbors.

    Returns:
        What to do instead, where the number of heads is unknown; None where a command can be given, or nothing need be
        reordered.
    """
    moved = {old: new for old, new in result.names.items() if old != new}
    near = [layouts.neighbours([Slot(name, ()) for name in (*keys, *more)])
            for keys, more in ((moved, side.shapes), (moved.values(), (*names.missing, *result.made)))]  # fmt: skip
    rows = [(old, new) for old, new in moved.items() if (old in near[0]) != (new in near[1])]
    if not rows:
        return None
    layout = HALF if rows[0][0] in near[0] else INTERLEAVED
    heads = heads_of(checkpoint)
    if heads is None or any(side.shapes[old][0] % (2 * heads[bool(_KEYS.search(new))]) for old, new in rows):
        pair = tables.pair_for(list(side.shapes), names.missing)
        why = "the rows of queries and keys are in a different order too, because only one side rotates neighboring "
        if pair is not None:
            options = f"--names {pair} --heads N --kv-heads N"
            return f"{why}values: with the numbers of heads: ckptfix rename {{source}} OUT {options}"
        way = "ckptfix match {source} OUT --like MODEL --heads N"
        return f"{why}values: with the model, and its number of heads: {way}"
    made = [(new, new, f"| rope heads={heads[bool(_KEYS.search(new))]} to={layout}") for _, new in rows]
    answer.lines += [f"{old} -> {new} {end}" for old, new, end in lines.joined(made)]
    return None


_KEYS = re.compile(r"\.(?:wk|k_proj)\.")
"""The keys of attention, which may have fewer heads than its queries."""


def _fused_biases(left: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Return the biases of the file in layers whose BatchNorm only the model has."""
    norms = [name for name in left if name.rpartition(".")[2] in _NORM]
    layers = {name.rpartition(".")[0].rpartition(".")[0] for name in norms}
    return [name for name in rest if name.endswith(".bias") and name.rpartition(".")[0].rpartition(".")[0] in layers]


def _without_wrappers(side: MessageSide, missing: Sequence[str]) -> bool:
    """Return whether the keys without wrapper components are all that the message misses: wrapped-names says it."""
    loose = [name for name, shape in side.shapes.items() if not shape]
    bare, taken = bases.unwrapped(list(side.shapes), loose)
    if not taken:
        return False
    new = dict(zip(side.shapes, bare, strict=True))
    there = set(bare)
    if missing:
        return all(name in there for name in missing) and all(new[name] in missing for name in side.over)
    return len(side.over) > 0 and all(new[name] != name for name in side.over)


def _known_change(have: Sequence[str], over: Sequence[str], names: Listed) -> solve.Substituted | None:
    """Return the change of a library that all unexpected keys show, where the message lists no missing ones."""
    spelled = spellings.canonical(have)
    norms = next(change.forward for change in library_names.CHANGES if change.id == "layer-norm")
    known = [subs for framework, subs, beside in _ONE_SIDED if framework in ("", *names.frameworks)
             and all(any(part in name for name in have) for part in beside)]  # fmt: skip
    for subs in (norms, *known):
        new = {name: library_names.substituted(name, subs) for name in have}
        changed = [name for name in have if new[name] != name]
        if not all(name in changed for name in over) or len(set(new.values())) < len(new):
            continue
        if subs == norms and any(spelled.get(name) != new[name] for name in changed):
            continue
        used = solve.used(subs, have)
        return solve.Substituted(used, new, frozenset(new[name] for name in changed))
    return None


def _main_module(side: MessageSide, names: Listed) -> solve.Substituted | None:
    """Return the removal of a prefix that the model lacks and that most keys of the file have."""
    have = list(side.shapes)
    for module in names.modules:
        under = [name for name in have if name.startswith(f"{module}.")]
        if 2 * len(under) > len(have):
            new = {name: name.removeprefix(f"{module}.") for name in have}
            subs = ((f"^{module.replace('.', '[.]')}[.]", ""),)
            return solve.Substituted(subs, new, frozenset(new[name] for name in under))
    return None


_ONE_SIDED: tuple[tuple[str, library_names.Substitutions, tuple[str, ...]], ...] = (
    ("", (("^base_model[.]model[.](?:base_model[.]model[.])+", "base_model.model."),), ()),
    ("llama.cpp", (("(^|[.])language_model[.]", r"\1"),), ()),
    ("ComfyUI", (("^transformer[.]base_model[.]model[.]", "transformer."),), ()),
    ("ComfyUI", (("^transformer[.]", ""),), ()),
    ("llama.cpp", (("^(embed_tokens|layers|norm)[.]", r"model.\1."),), ()),
    ("", (("[.]self_attn[.]Wqkv[.]", ".self_attn.in_proj_"),), (".self_attn.out_proj.", ".linear1.")),
)
"""Framework, or ``""`` for any, a renaming that the file's own keys show to be right, and parts of keys that it needs.

PEFT's prefix twice; the level of a model with images, which the converter for text models does not know; a base model
without its prefix; the prefixes with which trainers of diffusers save LoRAs, and which ComfyUI does not always know;
flash-attn's FlashMHA in torch's TransformerEncoderLayer, whose MultiheadAttention has in_proj_weight (as in scGPT).
"""


def _say_names(
    side: MessageSide,
    result: solve.Substituted,
    missing: Sequence[str],
    left: Sequence[str],
    fused: Sequence[Fused],
    names: Listed,
    answer: Answer,
    advice: str | None = None,
) -> None:
    """Report the keys that are called differently.

    Args:
        advice: what to do instead of the command.
    """
    if not result.subs and not fused:
        return
    pairs = [(old, new) for old, new in result.pairs if old != new]
    change = library_names.change_of(pairs)
    done = len(missing) - len(left)
    verified = f"{done:,} of the {plural(len(missing), 'missing key')} of the message" if missing else ""
    verified = f"all {plural(len(missing), 'missing key')} of the message" if missing and not left else verified
    if missing and names.shortened:
        verified += ", which does not list all"
    example = f"{pairs[0][0]}, there {pairs[0][1]}" if pairs else ""
    if change is not None:
        message = f"keys changed by {change.since}: {change.about}"
        answer.say("library-names", f"{message} ({verified})" if verified else message, advice)
    elif pairs:
        prefix = _prefix(side, result)
        why = f": {verified}" if verified else ""
        if prefix is not None and advice is None:
            one = prefix.step.having(partial=True) if prefix.in_file and _others(side, prefix) else prefix.step
            answer.say("names-prefixed", f"{prefix.meaning}{why}", (one,))
        else:
            count = sum(old != new for old, new in result.names.items())
            answer.say("other-spelling", f"{count:,} keys are called differently in the model: {example}{why}", advice)
    if fused:
        (old, new, operations), _, news = fused[0]
        experts = any(".experts." in name for name in news)
        since = f" (since {library_names.EXPERTS_SINCE})" if experts else ""
        what = PRUNED if "mask" in operations else f"tensors that the model joins or splits{since}"
        answer.say("other-spelling", f"{what}: {old}, there {new}")


def _prefix(side: MessageSide, result: solve.Substituted) -> Prefix | None:
    """Return the prefix that the substitution adds to all keys, or removes, if that is all that it does."""
    if len(result.subs) != 1:
        return None
    pattern, new = result.subs[0]
    name = pattern.removeprefix("^").replace("[.]", ".").removesuffix(".")
    if pattern == "^" and new.endswith("."):
        return Prefix(new[:-1], False)
    if new == "" and pattern.startswith("^") and pattern.endswith("[.]") and not re.search(r"[()\\|?*]", name):
        return Prefix(name, True)
    return None


def _others(side: MessageSide, prefix: Prefix) -> bool:
    return any(not name.startswith(f"{prefix.name}.") for name in side.shapes)


def _fused(have: Sequence[str], missing: Sequence[str], shapes: Mapping[str, Shape]) -> Iterator[Fused]:
    """Yield lines that join or split tensors of the file into missing ones, where names leave only one way."""
    there = set(have)
    wanted = _Kinds(missing)
    for joined, parts in (*_named_fusions(missing), *_named_fusions(have)):
        if joined in wanted and all(part in there for part in parts):
            made = lines.line(parts, [joined], [Operation("concat")])
            if made is not None:
                yield made, parts, (joined,)
        elif joined in there and all(part in wanted for part in parts) and _are_equal(shapes[joined], parts):
            made = lines.line([joined], parts, [Operation("split")])
            if made is not None:
                yield made, (joined,), parts
    yield from pruned(shapes, wanted)
    yield from _experts(have, wanted)


def _are_equal(shape: Shape, parts: Sequence[str]) -> bool:
    """Return whether the parts of a fused tensor are certainly of one size: a square each, or two halves."""
    if not shape or shape[0] % len(parts):
        return False
    return len(parts) == 2 or (len(shape) == 2 and shape[0] == len(parts) * shape[1])


class _Kinds:
    """The missing keys, and those of the same kind: a pasted message may be a part of the original."""

    def __init__(self, names: Iterable[str]) -> None:
        self._kinds = {solve.kind(name) for name in names}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and solve.kind(name) in self._kinds


def _named_fusions(names: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (fused key, keys of its parts), for each way in which the parts of such a key are called."""
    uncertain = {*spellings.HEAD_BY_HEAD, *spellings.UNTOLD}
    for name in names:
        module, _, leaf = name.rpartition(".")
        if leaf in ("in_proj_weight", "in_proj_bias"):
            module, leaf = f"{module}.in_proj", leaf[8:]
        parent, _, last = module.rpartition(".")
        front = f"{parent}." if parent else ""
        for _, fused, splits in spellings.FUSIONS:
            if last in fused and last not in uncertain:
                for split in splits:
                    yield name, tuple(f"{front}{part}.{leaf}" for part in split)


_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(\w+)(\.weight|)$")


def _experts(have: Sequence[str], wanted: _Kinds) -> Iterator[Fused]:
    """Yield lines that stack the experts of a layer, as transformers 5 stores them."""
    layers: dict[str, dict[str, dict[int, str]]] = {}
    for name in have:
        if (row := _EXPERT.match(name)) is not None and (part := spellings.part_of_expert(row[3] + row[4])):
            layers.setdefault(row[1], {}).setdefault(part, {})[int(row[2])] = name
    for front, parts in layers.items():
        counts = {len(rows) for rows in parts.values()}
        whole = all(sorted(rows) == list(range(len(rows))) for rows in parts.values())
        if len(counts) != 1 or not whole:
            continue
        (count,) = counts
        for target, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            new = next((name for name in (f"{front}.{target}", f"{front}.{target}.weight") if name in wanted), None)
            if new is None or not all(kind in parts for kind in kinds):
                continue
            olds = [parts[kind][number] for number in range(count) for kind in kinds]
            operations = [Operation("concat")] if len(kinds) > 1 else []
            made = lines.line(olds, [new], [*operations, Operation("stack")], count)
            if made is not None:
                yield made, tuple(olds), (new,)


def _tie(
    checkpoint: Checkpoint, side: MessageSide, current: Mapping[str, str], rest: Sequence[str], left: list[str],
    answer: Answer,
) -> list[str]:
    """Add an output head that the file stores only as the embedding, or the reverse; return the other keys.

    Args:
        rest: keys of the file that the model lacks, and that have no new name: one may be the head itself.
    """
    unused = any(module_of(name) in (*OUTPUT_LAYERS, *EMBEDDINGS) for name in rest if name in side.over)
    if unused or config_beside(checkpoint).get("tie_word_embeddings") is False:
        return left
    tied: dict[str, str] = {}
    for name in left:
        head = module_of(name) in OUTPUT_LAYERS
        mine, others = (OUTPUT_LAYERS, EMBEDDINGS) if head else (EMBEDDINGS, (*EMBEDDINGS, *OUTPUT_LAYERS))
        if module_of(name) not in mine or not name.endswith(".weight"):
            continue
        rows = [new for new in current.values() if module_of(new) in others and new.endswith(".weight")]
        usual = ("embed_tokens", "wte", "word_embeddings", "shared", "lm_head")
        named = [new for new in rows if module_of(new) in usual]
        one = [new for new in named if module_of(new) == "shared"] or named or rows
        if len(one) == 1 and not ODD.search(one[0] + name):
            tied[name] = one[0]
    also = [name for name in left if name not in tied and not no_weights.optional(Slot(name, ()))]
    if len(also) > len(tied):
        return left  # the file is a different model, or its keys are called differently
    for name, source in tied.items():
        answer.lines.append(f"{source} -> {name} | tie")
        answer.say("tied-missing", f"{name} is saved only under the tied key {source}; if your model does not tie "
                   "the two, its file is a different one")  # fmt: skip
    return [name for name in left if name not in tied]


def _drop(
    checkpoint: Checkpoint,
    side: MessageSide,
    names: Listed,
    current: Mapping[str, str],
    rest: list[str],
    left: Sequence[str],
    answer: Answer,
) -> None:
    """Leave out the keys that the model lacks, where its loader insists on that, and they are not all of the file."""
    if not rest:
        return
    coded = [name for name in rest if is_coded(checkpoint, side.at, name)]
    if coded:
        what = f"these keys belong to quantized weights, whose scheme the loader must know: {brief(coded)}"
        answer.say("quantized-keys", f"{what}; {quantized_keys.needs(checkpoint)}", quantized_keys.remedy(checkpoint))
        return
    averages = averaged_keys.find(list(side.shapes))
    kept_twice = {*averages.pairs, *averages.counters} if averages is not None else set()
    if averages is not None and kept_twice.intersection(rest) and not answer.subs and not answer.lines:
        others = [name for name in rest if name not in kept_twice]
        if not others or not STRICT.intersection(names.frameworks or ("",)):
            also = f"; the loader skips {brief(others)} by itself" if others else ""
            answer.say("averaged-keys", contents.averaged_beside(averages) + also, step("extract", ema=True))
            rest[:] = []
            return
    unchanged = [name for name in side.shapes if current[name] == name]
    watched = {name.removeprefix(f"{side.at}/") if side.at else name for name in observers(checkpoint.entries)}
    watched |= {name for name in unchanged if _is_observer(name, side.shapes[name])}
    if watched.intersection(rest):
        rest[:] = [name for name in unchanged if name in watched]
    elif any(map(LORA.search, rest)) and not all(map(LORA.search, side.shapes)):
        rest[:] = [name for name in unchanged if name in rest or LORA.search(name)]
    elif names.shortened and side.over:
        rest[:] = _of_the_same_kind(rest, unchanged)
    weighty = [name for name in rest if not no_weights.optional(Slot(name, side.shapes[name]))]
    if names.shortened and weighty and not any(map(LORA.search, weighty)) and (whole := _trained_whole(side)):
        answer.say("unexpected-keys", f"the adapter has {brief(whole)} beside its LoRA: layers that were trained as a "
                   "whole, which this program takes only as a part of the model",
                   "merge the adapter into its base model (PEFT: merge_and_unload), and convert that")  # fmt: skip
        return
    strict = bool(STRICT.intersection(names.frameworks or ("",)))
    what = f"the model lacks {brief(rest)}"
    kept = len(side.shapes) - len(rest)
    guessed = [name for name in weighty if name in side.first and not LORA.search(name)]
    guessed = [name for name in guessed if module_of(name) != "lm_head"]
    if guessed:
        answer.say("unexpected-keys", f"{what}; the loader stops at the first such key, so others may follow: these "
                   "are the keys of a different implementation, or of a different version", "")  # fmt: skip
        return
    if inner := _of_layers(weighty, rest, side):
        answer.unlike = True
        answer.say("unexpected-keys", f"{what}; {inner} is in a layer that the model has too, or in one more layer: "
                   "the model was built with another configuration, and would not be the same without them",
                   "build the model with the configuration of the file; to leave them out all the same, in Python: "
                   "ckptfix.load_into(model, {source!r}, strict=False)")  # fmt: skip
        return
    if left and weighty:
        answer.say("unexpected-keys", f"{what}; no renaming found accounts for them", "")
        return
    if not kept and strict and not left and side.complete and len(rest) > 1:
        answer.say("model-side", "the message lists all keys of the file as unexpected, and none as missing: the model "
                   "had no parameters yet when it was loaded", "load it after the layers are built (Lightning: build "
                   "them in __init__, or call configure_model() first)")  # fmt: skip
        return
    if not kept or not strict:
        what += "; this loader skips such keys by itself" if kept and not strict else ""
        answer.say("unexpected-keys", what, _OTHER_LORA if all(map(LORA.search, rest)) else "")
        return
    dropped = _drop_lines([current[name] for name in rest], list(current.values()))
    if len(dropped) > MOST_LINES:
        answer.say("unexpected-keys", what, "in Python: ckptfix.load_into(model, {source}, strict=False)")
        return
    answer.lines += dropped
    hint = "" if weighty else ", which hold no weights"
    them = "it" if len(rest) == 1 else "them"
    answer.say("unexpected-keys" if weighty else "optional-buffers", f"{what}{hint}: the command leaves {them} out")


def _trained_whole(side: MessageSide) -> list[str]:
    """Return the keys of an adapter that belong to no LoRA; empty for a model that has LoRA in it."""
    others = [name for name in side.shapes if not LORA.search(name)]
    return others if 2 * len(others) < len(side.shapes) else []


_OTHER_LORA = (
    "load it with the base model that it was trained on, and a recent release of the program, which knows more forms "
    "of LoRA; or write the form that it reads: `ckptfix lora convert {source} OUT --to LAYOUT`, with peft, kohya, "
    "diffusers or comfy"
)


def _of_layers(weighty: Sequence[str], rest: Sequence[str], side: MessageSide) -> str:
    """Return a key without which a layer or a stack of layers is a different one; empty if there is none."""
    gone = set(rest)
    stacks = {stack for name in side.shapes if name not in gone and (stack := _stack(name)) is not None}
    own = (name for name in weighty if _stack(name) in stacks and not LORA.search(name))
    return next((name for name in own if no_weights.kind_of(Slot(name, side.shapes[name])) is None), "")


def _stack(name: str) -> str | None:
    """Return the path of the first numbered layer that a key is in, without its number."""
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    return None if match is None else name[: match.start(1)]


def _of_the_same_kind(names: Sequence[str], have: Sequence[str]) -> list[str]:
    """Return the keys of the file that differ from one of `names` only in numbers."""
    kinds = {solve.kind(name) for name in names}
    return [name for name in have if solve.kind(name) in kinds]


def _is_observer(name: str, shape: Shape) -> bool:
    """Return whether a module of torch.ao has the key that watches values in training for quantization."""
    kind = no_weights.kind_of(Slot(name, shape))
    return kind is not None and kind.id == "observer"


def _drop_lines(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """Return lines that leave out `names`, and no other key: by module where all of it goes."""
    gone = set(names)
    kept = [name for name in all_names if name not in gone]
    stay = {front for name in kept for front in _fronts(name)}
    made: dict[str, None] = {}
    for name in names:
        whole = next((front for front in _fronts(name) if front not in stay), None)
        made[f"{whole}.{{*}}" if whole else name] = None
    grouped = lines.joined([(old, "", "") for old in made])
    safe = [old for old, _, _ in grouped if not _hits(old, kept)]
    rows = safe if len(safe) == len(grouped) else list(made)
    return [f"{old} | drop" for old in rows if not re.search(r"[\s|#]", old)]


def _fronts(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _hits(pattern: str, names: Iterable[str]) -> bool:
    try:
        rule = rules.NameRule(pattern, "x")
    except CkptfixError:
        return True
    return any(rule.apply(name) is not None for name in names)


def _say_left(
    side: MessageSide, left: Sequence[str], of_base: Sequence[str], rest: Sequence[str], answer: Answer
) -> None:
    """Report the missing keys that remain: computed buffers, the base model of an adapter, and the others."""
    optional = [name for name in left if no_weights.optional(Slot(name, ()))]
    others = [name for name in left if name not in optional]
    if of_base:
        answer.say("adapter-only", f"an adapter's file does not have the keys of its base model: {brief(of_base)}; "
                   "load it with strict=False", "")  # fmt: skip
    if optional:
        fix = None if answer.subs or answer.lines else "in Python: ckptfix.load_into(model, {source!r})"
        answer.say("optional-buffers", f"the file lacks {brief(optional)}, which the model computes itself", fix)
    if others:
        near = _nearest(others[0], side.shapes)
        hint = f"; the nearest of its keys is {near}" if near else ""
        answer.say("missing-keys", f"the file has no tensor for {brief(others)}{hint}: it is of a different model or "
                   "configuration, or is only a part", "")  # fmt: skip


def _nearest(name: str, have: Iterable[str]) -> str | None:
    leaf = name.rpartition(".")[2]
    rows = [other for other in have if other.rpartition(".")[2] == leaf][:2000]
    return next(iter(typed.nearest(name, rows, 1)), None)


def settled(findings: Sequence[Finding], told: Sequence[Finding], names: Listed) -> list[Finding]:
    """Return `findings`, with wrapped keys as a note only where the message shows that the model has them too."""
    solved = any(row.steps for row in told)
    known = {row.id for row in told}
    rest = [row for row in findings if row.id != "optimizer-state" or row.id not in known]
    components = {wrapper.component for wrapper in WRAPPERS}
    said = {part for name in names.unexpected for part in name.split(".")[:-1]}
    wanted = {part for name in names.missing for part in name.split(".")[:-1]}
    blamed = not names.unexpected or names.shortened or bool(components & (said - wanted)) or bool(wanted & components)
    if not solved and blamed:
        return rest
    return [replace(row, severity="info", about=BESIDE) if row.id == "wrapped-names" else row for row in rest]


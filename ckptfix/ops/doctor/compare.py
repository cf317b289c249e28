"""Comparison of a file with the keys and shapes that a loader's message lists: what differs, and the command for it.

The message is one side, and the file is the other. A command is proposed only after its effect was verified on all
keys of the message; what it leaves is reported with it. A cause on the model's side is reported as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptfix.checkpoint import Checkpoint
from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.quantization import observers
from ckptfix.errors import CkptfixError
from ckptfix.findings.message_names import Listed, Prefix, Shape, ShapeConflict
from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.steps import Fix, Value, step
from ckptfix.findings.table import found
from ckptfix.io.source import found_as, is_local, open_source
from ckptfix.names import bases, library_names, lines, no_weights, rules, spellings, typed
from ckptfix.names.operations import Operation
from ckptfix.names.slots import Slot, is_transposed
from ckptfix.names.wrappers import WRAPPERS
from ckptfix.ops import choose
from ckptfix.ops.doctor import quantized_keys, solve
from ckptfix.ops.doctor.groups import BESIDE, TOLD
from ckptfix.ops.quantized import quantization_of
from ckptfix.urls import as_path, folder_beside
from ckptfix.words import plural, some

STRICT = frozenset(("torch", "torch before 0.4", "vLLM", "llama.cpp", "Megatron", ""))
"""Frameworks whose loaders refuse a key that the model lacks; the others only list it."""

MOST_LINES = 12
"""Lines of rules in a printed command."""

_ODD = re.compile(r"[\s{}|#=\\]")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared", "token_embedding",
               "embeddings", "tok_emb", "embedding")  # fmt: skip
_HEADS = ("lm_head", "output", "embed_out", "output_layer", "decoder", "head", "score_head")
_POSITIONS = ("pos_embed", "position_embedding", "positional_embedding", "relative_position_bias_table", "wpe")
_LORA = re.compile(r"(?:^|[._])lora_(?:embedding_)?[ABab]\b|[._]lora_(?:down|up)\b")


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


@dataclass(slots=True)
class _Answer:
    """The result for one state dict: the parts of one `rename`, and the sentences about them."""

    subs: tuple[tuple[str, str], ...] = ()
    lines: list[str] = field(default_factory=list)
    rows: list[tuple[str, str, Fix | None]] = field(default_factory=list)
    solved: int = 0

    def say(self, id: str, message: str, fix: Fix | None = None) -> None:
        self.rows.append((id, message, fix))


def scan(checkpoint: Checkpoint, names: Listed) -> list[Finding]:
    """Return the findings about `checkpoint` that follow from the keys and shapes of a message; empty without any."""
    if "DCP" in names.frameworks or not choose.states(checkpoint):
        return list(_scan_whole(checkpoint, names))
    tried: list[tuple[tuple[int, int], MessageSide, _Answer]] = []
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
        message = f"the model lacks {_keys(values)}, which hold no weights: the command leaves them out"
        return [found("optional-buffers", message, where=side.at, fix=fix, about=TOLD)]
    several = bool(side.at) and len(checkpoint.state_dicts) > 1
    return list(_findings(answer, side.at if several else "", side.at))


_STATE = "._extra_state"
"""Values that modules such as Transformer Engine's save beside their weights: nn.Module.get_extra_state."""


def _values(checkpoint: Checkpoint, side: MessageSide) -> list[str]:
    """Return the unexpected keys of values other than tensors, if the message is about nothing else of the file."""
    sites = [site for site in checkpoint.sites if site.at == side.at and site.kind == "state_dict"]
    names = {name for site in sites for name in site.names}
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
        message = f"the checkpoint has {_keys(asked)}: the message is about a different one"
        yield found("other-file", message, about=TOLD, fix="")
        return
    near = _alike(lacking[0], have)
    hint = f"; the nearest is {near}" if near else f"; its keys are like {have[0]}"
    message = f"the checkpoint has no {_keys(lacking)}{hint}"
    advice = ""
    if near and _PLACE.search(lacking[0]) and not _PLACE.search(near):
        message += ": its optimizer's state is by the names of parameters, and the loader asks by their numbers"
        advice = (
            "load it with the function that saved it (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict "
            "gives names), or in Python: ckptfix.load_optimizer(optimizer, {source!r}, model=model)"
        )
    yield found("missing-keys", message, about=TOLD, fix=advice)


_PLACE = re.compile(r"(?:^|\.)state\.\d+\.")
"""An optimizer's state by the number of a parameter."""


def _alike(name: str, have: Sequence[str]) -> str | None:
    """Return the key with the same first and last component, or the most similar one."""
    parts = name.split(".")
    rows = [other for other in have if other.split(".")[0] == parts[0] and other.rpartition(".")[2] == parts[-1]]
    return rows[0] if rows else _nearest(name, have)


def _findings(answer: _Answer, at: str, where: str) -> Iterator[Finding]:
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


_NOTES = frozenset({"training-checkpoint", "quantized-keys"})
"""Findings that do not count as errors of the file, although a command helps."""


def _sided(at: str, shapes: Mapping[str, Shape], names: Listed) -> MessageSide:
    have = list(shapes)
    names = _of_adapter(names, have)
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
    )


def _of_adapter(names: Listed, have: Sequence[str]) -> Listed:
    """Return `names` with keys of the base model, as converters of adapters print them, as those of the adapter."""
    if not names.unexpected or any(name in have for name in names.unexpected):
        return names
    of_base: dict[str, list[str]] = {}
    for name in have:
        if _LORA.search(name):
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


def _answered(checkpoint: Checkpoint, side: MessageSide, names: Listed) -> _Answer:
    answer = _Answer()
    _say_conflicts(checkpoint, side, answer)
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
        answer.say("other-file", f"the message names {_keys(side.foreign)}, which this file does not have: it is about "
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


def _say_there(side: MessageSide, answer: _Answer) -> None:
    count = f"the file has {_keys(side.there)}, which the message calls missing"
    if side.at:
        answer.say("training-checkpoint", f"{count}, at {side.at!r}: pass that state dict to load_state_dict",
                   step("extract", at=side.at))  # fmt: skip
    else:
        answer.say("other-file", f"{count}: the message is about a different file, or the loader changed the keys", "")


def _solve(checkpoint: Checkpoint, side: MessageSide, names: Listed, answer: _Answer) -> None:
    """Find new keys, fused tensors, tied ones and ones to leave out that explain the missing and unexpected keys."""
    have = list(side.shapes)
    adapter = all(_LORA.search(name) or "modules_to_save" in name for name in have)
    of_base = [name for name in side.missing if adapter and not _LORA.search(name) and "modules_to_save" not in name]
    missing = [name for name in side.missing if name not in of_base]
    over = list(side.over)
    wrapped = _without_wrappers(side, missing)
    if wrapped:
        return
    result = solve.solve(have, missing, over, complete=side.complete)
    if not missing and over:
        result = _known_change(have, over, names) or _main_module(side, names) or result
    answer.subs = result.subs
    current = result.names
    left = [name for name in missing if name not in result.made]
    rest = [name for name in (over or have) if current[name] not in result.made and current[name] == name]
    made = {new: side.shapes[old] for old, new in current.items()}
    fused = list(_fused(list(made), left, made)) if left else []
    if fused:
        answer.lines += [f"{old} -> {new} {end}" for old, new, end in lines.joined([row for row, _, _ in fused])]
        used = {name for _, olds, _ in fused for name in olds}
        new = {name for _, _, news in fused for name in news}
        rest = [name for name in rest if current[name] not in used]
        left = [name for name in left if name not in new]
    _say_names(side, result, missing, left, fused, names, answer)
    left = _tie(checkpoint, current, left, answer)
    if over:
        _drop(checkpoint, side, names, current, rest, left, answer)
    _say_left(side, left, of_base, rest if over else [], answer)
    if others := [name for name in left if name.rpartition(".")[2] in _NORM]:
        _say_fused_norm(others, rest, answer)
    answer.solved = len(missing) - len(left) + len(over) - len(rest)


_NORM = ("running_mean", "running_var")


def _say_fused_norm(left: Sequence[str], rest: Sequence[str], answer: _Answer) -> None:
    """Report convolutions that have a bias in the file, and a BatchNorm in the model: they were fused."""
    layers = {name.rpartition(".")[0].rpartition(".")[0] for name in left}
    biases = [name for name in rest if name.endswith(".bias") and name.rpartition(".")[0].rpartition(".")[0] in layers]
    if biases:
        answer.rows[:] = [row for row in answer.rows if row[0] not in ("missing-keys", "unexpected-keys")]
        answer.say("model-side", f"the file was saved after its convolutions were fused with their BatchNorm: it has "
                   f"{biases[0]}, and the model {left[0]}", "fuse the model too before loading (model.fuse()), or use "
                   "a file that was saved before; fused layers cannot be taken apart")  # fmt: skip


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
    known = [subs for framework, subs in _ONE_SIDED if framework in ("", *names.frameworks)]
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


_ONE_SIDED: tuple[tuple[str, library_names.Substitutions], ...] = (
    ("", (("^base_model[.]model[.](?:base_model[.]model[.])+", "base_model.model."),)),
    ("llama.cpp", (("(^|[.])language_model[.]", r"\1"),)),
    ("ComfyUI", (("^transformer[.]base_model[.]model[.]", "transformer."),)),
    ("ComfyUI", (("^transformer[.]", ""),)),
    ("llama.cpp", (("^(embed_tokens|layers|norm)[.]", r"model.\1."),)),
)
"""Framework, or ``""`` for any, and a renaming that the file's own keys show to be right.

PEFT's prefix twice; the level of a model with images, which the converter for text models does not know; a base model
without its prefix; the prefixes with which trainers of diffusers save LoRAs, and which ComfyUI does not always know.
"""


def _say_names(
    side: MessageSide,
    result: solve.Substituted,
    missing: Sequence[str],
    left: Sequence[str],
    fused: Sequence[Fused],
    names: Listed,
    answer: _Answer,
) -> None:
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
        answer.say("library-names", f"{message} ({verified})" if verified else message)
    elif pairs:
        prefix = _prefix(side, result)
        why = f": {verified}" if verified else ""
        if prefix is not None:
            one = prefix.step.having(partial=True) if prefix.in_file and _others(side, prefix) else prefix.step
            answer.say("names-prefixed", f"{prefix.meaning}{why}", (one,))
        else:
            count = sum(old != new for old, new in result.names.items())
            answer.say("other-spelling", f"{count:,} keys are called differently in the model: {example}{why}")
    if fused:
        (old, new, _), _, news = fused[0]
        experts = any(".experts." in name for name in news)
        since = f" (since {library_names.EXPERTS_SINCE})" if experts else ""
        answer.say("other-spelling", f"tensors that the model joins or splits{since}: {old}, there {new}")


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

    def __contains__(self, name: str) -> bool:
        return solve.kind(name) in self._kinds


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


def _tie(checkpoint: Checkpoint, current: Mapping[str, str], left: list[str], answer: _Answer) -> list[str]:
    """Add an output head that the file stores only as the embedding, or the reverse; return the other keys."""
    if _config(checkpoint).get("tie_word_embeddings") is False:
        return left
    tied: dict[str, str] = {}
    for name in left:
        mine, others = (_HEADS, _EMBEDDINGS) if _module(name) in _HEADS else (_EMBEDDINGS, (*_EMBEDDINGS, *_HEADS))
        if _module(name) not in mine or not name.endswith(".weight"):
            continue
        rows = [new for new in current.values() if _module(new) in others and new.endswith(".weight")]
        named = [new for new in rows if _module(new) in ("embed_tokens", "wte", "word_embeddings", "shared", "lm_head")]
        one = [new for new in named if _module(new) == "shared"] or named or rows
        if len(one) == 1 and not _ODD.search(one[0] + name):
            tied[name] = one[0]
    for name, source in tied.items():
        answer.lines.append(f"{source} -> {name} | tie")
        answer.say("tied-missing", f"{name} is saved only under the tied key {source}; if your model does not tie "
                   "the two, its file is a different one")  # fmt: skip
    return [name for name in left if name not in tied]


def _module(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _drop(
    checkpoint: Checkpoint,
    side: MessageSide,
    names: Listed,
    current: Mapping[str, str],
    rest: list[str],
    left: Sequence[str],
    answer: _Answer,
) -> None:
    """Leave out the keys that the model lacks, where its loader insists on that, and they are not all of the file."""
    if not rest:
        return
    coded = [name for name in rest if _is_coded(checkpoint, side.at, name)]
    if coded:
        what = f"these keys belong to quantized weights, whose scheme the loader must know: {_keys(coded)}"
        answer.say("quantized-keys", f"{what}; {quantized_keys.needs(checkpoint)}", quantized_keys.remedy(checkpoint))
        return
    unchanged = [name for name in side.shapes if current[name] == name]
    watched = {name.removeprefix(f"{side.at}/") if side.at else name for name in observers(checkpoint.entries)}
    if watched.intersection(rest):
        rest[:] = [name for name in unchanged if name in watched or ".".join(name.split(".")[:-1]).endswith(_FAKE)]
    elif any(map(_LORA.search, rest)) and not all(map(_LORA.search, side.shapes)):
        rest[:] = [name for name in unchanged if name in rest or _LORA.search(name)]
    elif names.shortened and side.over:
        rest[:] = _of_the_same_kind(rest, unchanged)
    weighty = [name for name in rest if not no_weights.optional(Slot(name, side.shapes[name]))]
    strict = bool(STRICT.intersection(names.frameworks or ("",)))
    what = f"the model lacks {_keys(rest)}"
    kept = len(side.shapes) - len(rest)
    guessed = [name for name in weighty if name in side.first and not _LORA.search(name) and _module(name) != "lm_head"]
    if guessed:
        answer.say("unexpected-keys", f"{what}; the loader stops at the first such key, so others may follow: these "
                   "are the keys of a different implementation, or of a different version", "")  # fmt: skip
        return
    if left and weighty:
        answer.say("unexpected-keys", f"{what}; no renaming found accounts for them", "")
        return
    if not kept or not strict:
        what += "; this loader skips such keys by itself" if kept and not strict else ""
        answer.say("unexpected-keys", what, "")
        return
    dropped = _drop_lines([current[name] for name in rest], list(current.values()))
    if len(dropped) > MOST_LINES:
        answer.say("unexpected-keys", what, "in Python: ckptfix.load_into(model, {source}, strict=False)")
        return
    answer.lines += dropped
    hint = "" if weighty else ", which hold no weights"
    them = "it" if len(rest) == 1 else "them"
    answer.say("unexpected-keys" if weighty else "optional-buffers", f"{what}{hint}: the command leaves {them} out")


def _is_coded(checkpoint: Checkpoint, at: str, name: str) -> bool:
    return join(at, name) in quantization_of(checkpoint).roles


def _of_the_same_kind(names: Sequence[str], have: Sequence[str]) -> list[str]:
    """Return the keys of the file that differ from one of `names` only in numbers."""
    kinds = {solve.kind(name) for name in names}
    return [name for name in have if solve.kind(name) in kinds]


_FAKE = ("_fake_quant", "activation_post_process")
"""Modules of torch.ao that watch values in training for quantization, with scales, zero points and switches."""


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
    side: MessageSide, left: Sequence[str], of_base: Sequence[str], rest: Sequence[str], answer: _Answer
) -> None:
    """Report the missing keys that remain: computed buffers, the base model of an adapter, and the others."""
    optional = [name for name in left if no_weights.optional(Slot(name, ()))]
    others = [name for name in left if name not in optional]
    if of_base:
        answer.say("adapter-only", f"an adapter's file does not have the keys of its base model: {_keys(of_base)}; "
                   "load it with strict=False", "")  # fmt: skip
    if optional:
        fix = None if answer.subs or answer.lines else "in Python: ckptfix.load_into(model, {source!r})"
        answer.say("optional-buffers", f"the file lacks {_keys(optional)}, which the model computes itself", fix)
    if others:
        near = _nearest(others[0], side.shapes)
        hint = f"; the nearest of its keys is {near}" if near else ""
        answer.say("missing-keys", f"the file has no tensor for {_keys(others)}{hint}: it is of a different model or "
                   "configuration, or is only a part", "")  # fmt: skip


def _nearest(name: str, have: Iterable[str]) -> str | None:
    leaf = name.rpartition(".")[2]
    rows = [other for other in have if other.rpartition(".")[2] == leaf][:2000]
    return next(iter(typed.nearest(name, rows, 1)), None)


def _keys(names: Sequence[str]) -> str:
    return some(list(names)) if len(names) <= 2 else f"{len(names):,} keys, such as {names[0]}"


# Shapes.


def _say_conflicts(checkpoint: Checkpoint, side: MessageSide, answer: _Answer) -> None:
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
    coded = [row for row in rows if _is_coded(checkpoint, side.at, row.name)]
    if coded:
        answer.say("quantized-keys", f"{_shapes(coded)}: the file has codes of quantized weights, and the model has "
                   f"plain weights; {quantized_keys.needs(checkpoint)}", quantized_keys.remedy(checkpoint))  # fmt: skip
    rows = [row for row in rows if row not in coded]
    for says in (_say_rows, _say_reshaped, _say_lora, _say_positions):
        rows = says(checkpoint, side, rows, answer)
    if rows:
        answer.say("shape-mismatch", _shapes(rows) + _shape_note(rows))


def _shapes(rows: Sequence[ShapeConflict]) -> str:
    row = rows[0]
    more = f" (and {len(rows) - 1:,} more)" if len(rows) > 1 else ""
    return f"{row.name} is {list(row.saved)} here, {list(row.wanted)} in the model{more}"


def _shape_note(rows: Sequence[ShapeConflict]) -> str:
    if all(is_transposed(row.saved, row.wanted) for row in rows):
        return ": the same sizes in a different order, as of a transposed layer"
    heads = [row for row in rows if row.saved[1:] == row.wanted[1:] and _module(row.name) not in _EMBEDDINGS]
    last = {_module(row.name) or row.name for row in heads}
    if len(heads) == len(rows) and len(last) <= 2 and heads[0].wanted:
        return f": an output layer for {heads[0].saved[0]:,} classes, and the model has {heads[0].wanted[0]:,}"
    return ": the model was built with a different configuration"


Says = list[ShapeConflict]


def _say_rows(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: _Answer) -> Says:
    """Report embeddings and output heads with a different number of rows: a vocabulary that was padded or resized."""
    about = [row for row in rows if _is_vocabulary(row)]
    if not about:
        return rows
    saved, wanted = about[0].saved[0], about[0].wanted[0]
    about = [row for row in about if (row.saved[0], row.wanted[0]) == (saved, wanted)]
    biases = [row for row in rows if row.saved == (saved,) and row.wanted == (wanted,)]
    about += [row for row in biases if row not in about]
    config = _config(checkpoint).get("vocab_size")
    tokens = _tokens(checkpoint)
    evidence = f"; config.json says {config:,}" if isinstance(config, int) else ""
    evidence += f", the tokenizer has {tokens:,} tokens" if tokens else ""
    padded = saved > wanted and (saved % 64 == 0 or saved % 8 == 0) and saved - wanted < 512
    if saved < wanted:
        why = "the model has more: it was resized for new tokens, or padded; new rows are zeros until they are trained"
    elif padded:
        why = "the file's were padded to a round number, and the rows at its end stand for no token"
    else:
        why = (f"the file's were resized for {saved - wanted:,} new tokens: to keep them, {_resize(about[0])}; the "
               "command cuts them off")  # fmt: skip
    for row in about:
        if not _ODD.search(row.name):
            fill = " fill=0" if wanted > saved else ""
            answer.lines.append(f"{row.name} -> {row.name} | rows from={saved} to={wanted}{fill}")
    message = f"the vocabulary has {saved:,} rows here ({about[0].name}), and {wanted:,} in the model{evidence}: {why}"
    answer.say("vocabulary-rows", message)
    return [row for row in rows if row not in about]


def _resize(row: ShapeConflict) -> str:
    return f"call model.resize_token_embeddings({row.saved[0]}) before loading"


def _is_vocabulary(row: ShapeConflict) -> bool:
    parts = row.name.removesuffix(".weight").removesuffix(".default").removesuffix(".modules_to_save").split(".")
    named = parts[-1] in (*_EMBEDDINGS, "lm_head", "embed_out", "output") or "word_embeddings" in parts
    large = min(row.saved[:1] + row.wanted[:1], default=0) >= 16
    position = any(part in row.name for part in _POSITIONS)
    return named and large and not position and len(row.saved) == 2 and row.saved[1:] == row.wanted[1:]


def _say_reshaped(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: _Answer) -> Says:
    """Report a linear layer that is a convolution of size 1 on the other side."""
    kinds: dict[tuple[str, str], Says] = {}
    for row in rows:
        if row.saved != row.wanted and _plain(row.saved) == _plain(row.wanted) and not _ODD.search(row.name):
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


def _say_lora(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: _Answer) -> Says:
    about = [row for row in rows if _LORA.search(row.name)]
    ranks = {(min(row.saved), min(row.wanted)) for row in about if len(row.saved) == 2 == len(row.wanted)}
    if len(ranks) != 1:
        return rows
    ((saved, wanted),) = ranks
    answer.say("model-side", f"the adapter was trained with rank {saved}, and the model was built for rank {wanted}: "
               "the file is whole", f"build the model with r={saved}, as in adapter_config.json")  # fmt: skip
    return [row for row in rows if row not in about]


def _say_positions(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: _Answer) -> Says:
    about = [row for row in rows if any(part in row.name for part in _POSITIONS)]
    if about:
        answer.say("position-embedding", _shapes(about), "interpolate them in the model's code; to load the rest: "
                   "ckptfix.load_into(model, {source}, strict=False)")  # fmt: skip
    return [row for row in rows if row not in about]


def _say_ranks(checkpoint: Checkpoint, side: MessageSide, rows: Says, answer: _Answer) -> Says:
    """Report several tensors that are an exact part of the model's along one dimension: those of one rank."""
    ratios = {_ratio(row) for row in rows}
    if not rows or len(ratios) != 1 or None in ratios or not (len(rows) > 2 or _RANKED.search(checkpoint.path)):
        return rows
    (ratio,) = ratios
    answer.say("one-rank", f"{_shapes(rows)}: 1/{ratio} of each, so the file holds the part of one of {ratio} ranks",
               "join the files of all ranks first")  # fmt: skip
    return []


_RANKED = re.compile(r"consolidated\.\d\d\.|mp_rank_\d|rank_?\d", re.IGNORECASE)


def _ratio(row: ShapeConflict) -> int | None:
    if len(row.saved) != len(row.wanted):
        return None
    ways = {big // small for small, big in zip(row.saved, row.wanted, strict=True) if small and small != big}
    exact = all(small and big % small == 0 for small, big in zip(row.saved, row.wanted, strict=True))
    several = sum(small != big for small, big in zip(row.saved, row.wanted, strict=True)) == 1
    return ways.pop() if exact and several and len(ways) == 1 else None


MOST_JSON = 64 << 20
"""Bytes of the largest JSON file beside a checkpoint that is read."""


def _beside(checkpoint: Checkpoint, name: str) -> object:
    path = checkpoint.path
    if not is_local(path):
        return None
    own = as_path(path) if found_as(path) == "folder" else folder_beside(path)
    try:
        with open_source(str(as_path(str(own), name))) as source:
            return json.loads(bytes(source.read(0, source.size))) if source.size <= MOST_JSON else None
    except (CkptfixError, ValueError, OSError, RecursionError):
        return None


def _config(checkpoint: Checkpoint) -> Mapping[str, object]:
    made = _beside(checkpoint, "config.json")
    if not isinstance(made, dict):
        return {}
    text = made.get("text_config")
    return {**(text if isinstance(text, dict) else {}), **made}


def _tokens(checkpoint: Checkpoint) -> int | None:
    """Return the number of tokens of the tokenizer.json beside the file: the greatest id, and one."""
    made = _beside(checkpoint, "tokenizer.json")
    if not isinstance(made, dict):
        return None
    model, added = made.get("model"), made.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [one for one in vocabulary.values() if isinstance(one, int)] if isinstance(vocabulary, dict) else []
    rows = added if isinstance(added, list) else []
    ids += [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), int)]
    return max(ids) + 1 if ids else None


def settled(findings: Sequence[Finding], told: Sequence[Finding], names: Listed) -> list[Finding]:
    """Return `findings`, with wrapped keys as a note only where the message shows that the model has them too."""
    solved = any(row.steps for row in told)
    components = {wrapper.component for wrapper in WRAPPERS}
    said = {part for name in names.unexpected for part in name.split(".")[:-1]}
    wanted = {part for name in names.missing for part in name.split(".")[:-1]}
    blamed = not names.unexpected or names.shortened or bool(components & (said - wanted)) or bool(wanted & components)
    if not solved and blamed:
        return list(findings)
    return [replace(row, severity="info", about=BESIDE) if row.id == "wrapped-names" else row for row in findings]


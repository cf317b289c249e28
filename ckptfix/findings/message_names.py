"""The keys and shapes that a loader's message lists: one table, with a row for each form in which they are written.

::

    Missing key(s) in state_dict: "0.weight", "0.bias". Unexpected key(s) in state_dict: "model.0.weight", ...   torch
    _IncompatibleKeys(missing_keys=['0.weight'], unexpected_keys=['model.0.weight'])               strict=False
    unexpected key in source state_dict: backbone.conv.weight, backbone.conv.bias                  mmengine
    backbone.res2.0.conv1.norm.{bias, weight}                                                      fvcore, detectron2
    visual.blocks.{0...31}.norm.weight | UNEXPECTED |  |                                           transformers 5

The parser reads text only; `ops.doctor.compare` decides what the names mean for a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from functools import lru_cache
from typing import Literal, get_args

from ckptfix.dataclass import dataclass
from ckptfix.findings.steps import Step

MOST_TEXT = 4 << 20
"""Characters of a pasted message that are searched for keys."""

MOST_KEYS = 100_000
"""Keys that are read from one message."""

Shape = tuple[int, ...]

Role = Literal["missing", "unexpected", "seen", "module", "file", "part", "state", "whole"]
"""The role of a name in a message: only the model has it; only the file has it; a lookup failed, on a side that the
message does not say; the file has keys under it that the model lacks; a file that was not found; a part of the file
that a script asked for; a value of an optimizer's state; a prefix of keys by which a loader recognizes whole models."""


@dataclass(frozen=True, slots=True)
class ShapeConflict:
    """A tensor whose shape in the file, `saved`, differs from its shape in the model, `wanted`."""

    name: str
    saved: Shape
    wanted: Shape


@dataclass(frozen=True, slots=True)
class Listed:
    """The keys that a message lists.

    Attributes:
        missing: keys that only the model has.
        unexpected: keys that only the file has.
        conflicts: tensors whose shapes differ.
        seen: keys that a lookup did not find; the message does not say on which side.
        modules: prefixes of keys that only the file has.
        files: names of files that were not found.
        parts: keys that a script asked the loaded object for.
        states: values that an optimizer asked its state for.
        wholes: prefixes of keys by which a loader recognizes whole models.
        shortened: whether a list ends in an ellipsis, or the message stops at its first problem.
        frameworks: whose forms these are.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    conflicts: tuple[ShapeConflict, ...] = ()
    seen: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    wholes: tuple[str, ...] = ()
    shortened: bool = False
    frameworks: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All keys, each once."""
        conflicts = (row.name for row in self.conflicts)
        return tuple(dict.fromkeys((*self.missing, *self.unexpected, *conflicts, *self.seen)))


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that accounts for all differences.

    Attributes:
        name: path components that the keys begin with.
        in_file: the file's keys have the prefix; otherwise the model's do.
    """

    name: str
    in_file: bool

    @property
    def meaning(self) -> str:
        """The difference in words."""
        if self.in_file:
            return f"the keys in the file have the prefix `{self.name}.`, and the model's keys do not"
        return f"the model's keys have the prefix `{self.name}.`, and the keys in the file do not"

    @property
    def step(self) -> Step:
        """The command that fixes the difference."""
        return Step("strip-module" if self.in_file else "add-module", (("prefix", self.name),))


@dataclass(slots=True)
class _Found:
    """The names found so far, by role, and the shapes."""

    names: dict[Role, dict[str, None]] = field(default_factory=dict)
    conflicts: dict[str, ShapeConflict] = field(default_factory=dict)
    shortened: bool = False
    frameworks: dict[str, None] = field(default_factory=dict)

    def add(self, role: Role, names: Iterable[str]) -> bool:
        """Record `names`; return whether there was any."""
        rows = self.names.setdefault(role, {})
        count = len(rows)
        for name in names:
            if name and len(rows) < MOST_KEYS:
                rows[name] = None
        return len(rows) > count


Reader = Callable[[str, int], tuple[list[str], bool]]
"""Reads a list that begins at an offset: its names, and whether it is shortened."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """A form in which a framework lists keys.

    Attributes:
        framework: who writes it.
        head: the words before the list, as a regular expression; case is ignored.
        role: what it says of the names; None if the first group of `head` is ``missing`` or ``unexpected``.
        read: the reader of the list; None if the group ``name`` of `head` is the only name.
        first_only: the loader stops at the first key that it cannot place.
    """

    framework: str
    head: str
    role: Role | None
    read: Reader | None = None
    first_only: bool = False


_QUOTED = re.compile(r"[\s,]*(?:\"([^\"\n]*)\"|'([^'\n]*)')")
_KEY = r"[A-Za-z_0-9][\w\-/:]*(?:\.[\w\-/:]+)*"
_BARE = re.compile(rf"[\s,]*({_KEY})(?=[\s,.;:]|$)")
_GROUP_LINE = re.compile(r"[ \t]*(?:[\w\]\[:./ -]{0,200}\]:?[ \t]+)?"
                         r"([\w.\-]*\{[\w., *\-]+\}[\w.\-]*|[\w\-]+(?:\.[\w\-]+)+|[A-Za-z_]\w*)"
                         r"[ \t]*(?:\n|$)")  # fmt: skip
_WRAPPED_LINE = re.compile(r"(?<![ \t])[ \t]*\n[ \t]*")
_COMMA = re.compile(r"\s*,")
_BLANK = re.compile(r"\s*")
_OPENING = re.compile(r"\s*(?:dict_keys\(|\"(?=\{))?[\[{(]?\s*")
_MORE = re.compile(r"[\s,]*(?:\.\.\.|…|and \d+ more)")


def _quoted(text: str, start: int) -> tuple[list[str], bool]:
    names = []
    while (name := _QUOTED.match(text, start)) is not None:
        names.append(name[1] if name[1] is not None else name[2])
        start = name.end()
    return names, _MORE.match(text, start) is not None


def _bare(text: str, start: int) -> tuple[list[str], bool]:
    """Read keys between commas, up to a word that is followed by neither a comma nor the end of the paragraph."""
    names = []
    while (name := _BARE.match(text, start)) is not None:
        names.append(name[1].rstrip("."))
        start = name.end()
        if _COMMA.match(text, start) is None:
            break
    return names, _MORE.match(text, start) is not None


def _lines(text: str, start: int) -> tuple[list[str], bool]:
    """Read a key on each line, with groups as fvcore writes them: ``conv.norm.{bias, weight}``."""
    names: list[str] = []
    start = _after(_BLANK, text, start)
    while (name := _GROUP_LINE.match(text, start)) is not None:
        names += _expanded(name[1])
        start = name.end()
    return names, _MORE.match(text, start) is not None


def _any(text: str, start: int) -> tuple[list[str], bool]:
    """Read a list of quoted keys, with or without brackets, or else one of bare keys."""
    start = _after(_OPENING, text, start)
    names, shortened = _quoted(text, start)
    return (names, shortened) if names else _bare(text, start)


def _after(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return start if match is None else match.end()


def _expanded(name: str) -> list[str]:
    """Return the keys of a group: ``a.{bias, weight}``, ``blocks.{0...31}.norm``."""
    match = re.search(r"\{([^{}]*)\}", name)
    if match is None:
        return [name]
    span = re.fullmatch(r"\s*(\d+)\s*\.\.\.?\s*(\d+)\s*", match[1])
    if span is not None and int(span[2]) - int(span[1]) <= 10_000:
        parts = [str(number) for number in range(int(span[1]), int(span[2]) + 1)]
    else:
        parts = [part.strip() for part in match[1].split(",")]
    front, back = name[: match.start()], name[match.end() :]
    return [made for part in parts[:10_000] for made in _expanded(f"{front}{part}{back}")]


def _diffusion_model(text: str, start: int) -> tuple[list[str], bool]:
    """Return the prefix that ComfyUI's loader of checkpoints looks for (comfy/model_detection.py)."""
    return ["model.diffusion_model"], False


_ONE = rf"['\"`]?(?P<name>{_KEY})['\"`]?"

_LOADED = r"(?:state_?dict|checkpoint|ckpt|loaded\w*|weights|torch\.load\([^()\n]{0,200}\))\w*"
"""An expression for the object that was loaded."""

_DOTTED = r"[A-Za-z_]\w*(?:\.[\w\-]+)+"
"""A key of a tensor in a module."""

_RAISED = r"[^\n]*\n(?:[^\n]*\n)?\s*KeyError: ['\"](?P=name)['\"]"
"""The end of a traceback whose last line of code looks `name` up; Python 3.11 underlines the place."""

_PARTS = (r"model|net|network|state_dict|model_state_dict|model_state|module|params|params_ema|ema|model_ema|"
          r"optimizer|optimizer_state_dict|epoch|image_proj|ip_adapter")
"""Keys that scripts look up in a loaded object, and that are hardly asked of anything else."""

_STATES = (r"exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|square_avg|acc_delta|grad_avg|prev|step_size|"
           r"exp_avg_var|exp_inf|state1|state2|qmap1|qmap2|absmax1|absmax2")
"""Values of the states of optimizers (torch/optim, bitsandbytes/optim/optimizer.py)."""

FORMS: tuple[MessageForm, ...] = (
    MessageForm("torch", r"(missing|unexpected) key\(s\)[^:\"'\n]{0,80}:", None, _any),
    MessageForm("torch, strict=False", r"(missing|unexpected)_keys\s*[=:]", None, _any),
    MessageForm("torch before 0.4", r"(missing|unexpected) keys? in state_dict:", None, _any),
    MessageForm("torch before 0.4", rf"(unexpected|missing) key {_ONE} in state_dict", None),
    MessageForm("mmengine", r"(missing|unexpected) keys? in source state_dict:", None, _bare),
    MessageForm("fvcore", r"parameters or buffers are not found in the checkpoint:", "missing", _lines),
    MessageForm("fvcore", r"contains keys that are not used by the model:", "unexpected", _lines),
    MessageForm("transformers", r"were not used when initializing [^:\n]{0,120}:", "unexpected", _any),
    MessageForm("transformers", r"and are newly initialized[^:\n]{0,40}:", "missing", _any),
    MessageForm("PEFT", r"missing adapter keys while loading the checkpoint:?", "missing", _any),
    MessageForm("PEFT", r"led to (unexpected|missing) keys [^:\n]{0,60}:", None, _any),
    MessageForm("MLX", r"received \d+ parameters not in model:", "unexpected", _bare),
    MessageForm("MLX", r"missing \d+ parameters:", "missing", _bare),
    MessageForm("torchtune", rf"missing (?:LoRA )?key {_ONE} from adapter", "missing", first_only=True),
    MessageForm("diffusers", r"because the following keys are missing:", "missing", _bare),
    MessageForm("vLLM", r"weights were not initialized from checkpoint:", "missing", _any),
    MessageForm("InvokeAI", r"meta tensors remain:", "missing", _any),
    MessageForm("vLLM", rf"there is no module or parameter named {_ONE}", "module", first_only=True),
    MessageForm("llama.cpp", rf"can ?not map tensor {_ONE}", "unexpected", first_only=True),
    MessageForm("llama.cpp", rf"could not map tensor name {_ONE}", "unexpected", first_only=True),
    MessageForm("llama.cpp", rf"(?:unexpected tensor name:|unrecognized tensor) {_ONE}", "unexpected", first_only=True),
    MessageForm("llama.cpp", rf"unexpected name {_ONE}: not a lora_A or lora_B tensor", "unexpected", first_only=True),
    MessageForm("ComfyUI", rf"lora key not loaded:? {_ONE}", "unexpected"),
    MessageForm("ComfyUI", r"(?:unet|clip|vae|model|diffusion model|text encoder) (missing|unexpected):", None, _any),
    MessageForm("ComfyUI", r"left over keys:", "unexpected", _any),
    MessageForm("DCP", rf"missing key in checkpoint state_dict: {_ONE}", "missing", first_only=True),
    MessageForm("DeepSpeed", r"checkpoints? paths are missing:", "file", _any),
    MessageForm("Megatron", r"(missing|unexpected) keys? \([^)\n]{0,80}\)[^:\n]{0,60}:", None, _any),
    MessageForm("Megatron", rf"(?<![\w.\-]){_ONE} from model not in state dict", "missing"),
    MessageForm("", r"\b(missing|unexpected)(?: \w{1,20}){0,3}:? ?(?=[\[{(]['\"])", None, _any),
    MessageForm("", r"(missing|unexpected) keys?(?: [\w ]{0,40})?[:=]", None, _any),
    MessageForm("", rf"\b{_LOADED}\[['\"](?P<name>{_DOTTED})['\"]\]{_RAISED}", "missing", first_only=True),
    MessageForm("", rf"KeyError: ['\"](?P<name>{_DOTTED})['\"]", "seen", first_only=True),
    MessageForm("", rf"KeyError: ['\"](?P<name>{_STATES})['\"]", "state", first_only=True),
    MessageForm("", rf"KeyError: ['\"](?P<name>{_PARTS})['\"]", "part", first_only=True),
    MessageForm("", rf"\b{_LOADED}\[['\"](?P<name>\w+)['\"]\]{_RAISED}", "part", first_only=True),
    MessageForm("ComfyUI", r"could not detect model type of\b", "whole", _diffusion_model),
)
"""The forms of lists of keys."""

_SIZE = r"(?:torch\.Size)?[\[(]{1,2}(?P<%s>[\d, ]*)[\])]{1,2}"
_SAVED, _WANTED = _SIZE % "saved", _SIZE % "wanted"

CONFLICTS: tuple[tuple[str, str], ...] = (
    ("torch", rf"size mismatch for (?P<name>[^\s:]+): copying a param with shape {_SAVED} from checkpoint, "
              rf"the shape in current model is {_WANTED}"),
    ("torch", rf"size mismatch for (?P<name>[^\s:]+): copying a param of {_SAVED} from checkpoint, "
              rf"where the shape is {_WANTED} in current model"),
    ("torch", rf"while copying the parameter named [\"']?(?P<name>[^\s\"',]+)[\"']?, whose dimensions in the model are "
              rf"{_WANTED} and whose dimensions in the checkpoint are {_SAVED}"),
    ("transformers", rf"(?<!\S)(?P<name>\S{{1,400}}): found shape {_SAVED} in the checkpoint and {_WANTED} in the "
                     r"model"),
    ("transformers", rf"(?m:^)[ \t]*(?P<name>[\w{{][\w.{{}}, *-]{{0,400}}?)[ \t]*\|[ \t]*MISMATCH[ \t]*\|"
                     rf"[^\n]*?ckpt:? *{_SAVED} vs model:? *{_WANTED}"),
    ("accelerate", rf"Trying to set a tensor of shape {_SAVED} in [\"']?(?P<name>[^\s\"']{{1,400}})[\"']? \(which has "
                   rf"shape {_WANTED}\)"),
    ("MLX", rf"expected shape {_WANTED} but received shape {_SAVED} for parameter (?P<name>[^\s,]{{1,400}})"),
    ("fvcore", rf"'(?P<name>[^'\n]{{1,400}})' has shape {_SAVED} in the checkpoint but {_WANTED} in the model"),
    ("fvcore", rf"skip loading parameter '(?P<name>[^']+)' [^\n]{{0,60}}?{_SAVED} in the checkpoint but {_WANTED}"),
    ("DCP", rf"size mismatch between saved {_SAVED} and current: {_WANTED} for (?P<name>[\w.\-]+\w)"),
    ("mmengine", rf"size mismatch for (?P<name>[^\s:]+): copying a param with shape {_SAVED} [^\n]{{0,40}}?{_WANTED}"),
)  # fmt: skip
"""The forms in which frameworks write that two shapes differ."""

_STATUS = re.compile(
    r"(?:^|\n)[ \t]*(?P<name>[\w{][\w.{}, *\-]{0,400}?)[ \t]*\|[ \t]*(?P<role>UNEXPECTED|MISSING)\b[ \t]*\|"
)
"""A row of the load report of transformers 5."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_HEADS = tuple((form, re.compile(form.head, re.IGNORECASE)) for form in FORMS)
_CONFLICTS = tuple((framework, re.compile(pattern, re.IGNORECASE)) for framework, pattern in CONFLICTS)


@lru_cache(maxsize=1)  # a diagnosis asks for the keys of one message several times
def listed(text: str) -> Listed | None:
    """Return the keys that `text` lists, in whichever forms, also inside a traceback; None if it lists no keys."""
    text = _ANSI.sub("", text[:MOST_TEXT])
    found = _Found()
    taken: set[int] = set()
    for form, pattern in _HEADS:
        for head in pattern.finditer(text):
            role: Role = form.role or ("missing" if head[1].lower() == "missing" else "unexpected")
            place = head.start("name") if form.read is None else head.end()
            if place in taken:
                continue
            names, shortened = ([head["name"]], False) if form.read is None else form.read(text, head.end())
            if not found.add(role, map(_without_dots, names)):
                continue
            taken.add(place)
            found.shortened |= shortened or form.first_only
            found.frameworks.update({form.framework: None} if form.framework else {})
    unwrapped = _WRAPPED_LINE.sub(" ", text)  # a terminal may have broken a sentence into lines
    for framework, pattern in _CONFLICTS:
        for row in (*pattern.finditer(text), *pattern.finditer(unwrapped)):
            for name in _expanded(row["name"].strip()):
                if found.conflicts.setdefault(name, made := _conflict(name, row)) is made:
                    found.frameworks[framework] = None
    if found.conflicts and "Error(s) in loading" not in text and "size mismatch for" in text:
        found.shortened = True  # torch begins with that line, so only a part was pasted
    for row in _STATUS.finditer(text):
        role = "missing" if row["role"] == "MISSING" else "unexpected"
        if found.add(role, (name for name in _expanded(row["name"].strip()) if "*" not in name)):
            found.frameworks["transformers"] = None
    if not any(found.names.values()) and not found.conflicts:
        return None
    return _made(found)


def _without_dots(name: str) -> str:
    return name.strip().rstrip(".")


def _conflict(name: str, row: re.Match[str]) -> ShapeConflict:
    saved, wanted = (tuple(map(int, re.findall(r"\d+", row[side]))) for side in ("saved", "wanted"))
    return ShapeConflict(name, saved, wanted)


def _made(found: _Found) -> Listed:
    missing, unexpected = (found.names.get(role, {}) for role in ("missing", "unexpected"))
    known = {**missing, **unexpected}
    rows = {role: tuple(found.names.get(role, {})) for role in get_args(Role)}
    return Listed(
        tuple(missing),
        tuple(unexpected),
        tuple(found.conflicts.values()),
        tuple(name for name in rows["seen"] if name not in known),
        modules=rows["module"],
        files=rows["file"],
        parts=rows["part"],
        states=rows["state"],
        wholes=rows["whole"],
        shortened=found.shortened,
        frameworks=tuple(found.frameworks),
    )


def prefix(names: Listed | None) -> Prefix | None:
    """Return the prefix that turns every missing key into an unexpected one, or the reverse; None if no prefix does."""
    if names is None or not names.missing or not names.unexpected:
        return None
    for less, more, in_file in ((names.missing, names.unexpected, True), (names.unexpected, names.missing, False)):
        there = set(more)
        # A model whose file lacks BatchNorm's counters creates them, and does not list them as missing.
        less = tuple(name for name in less if not name.endswith("num_batches_tracked")) or less
        fronts = _fronts(less[0], more)
        front = next((front for front in fronts if all(f"{front}.{name}" in there for name in less)), "")
        if front:
            return Prefix(front, in_file)
    return None


def _fronts(name: str, longer: Iterable[str]) -> Iterator[str]:
    return (other.removesuffix(f".{name}") for other in longer if other.endswith(f".{name}") and other != f".{name}")

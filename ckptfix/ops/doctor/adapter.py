"""Detection of an adapter's weights, which a loader of models does not accept, and of what its own loader does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import CkptfixError, printable
from ckptfix.findings.load_errors import LoadError
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Step, Steps, step
from ckptfix.findings.table import found, proposed
from ckptfix.formats.members import ADAPTER, kind_of
from ckptfix.names.adapter_signs import has_signs
from ckptfix.ops import quantized
from ckptfix.ops.doctor.groups import TOLD
from ckptfix.urls import as_path
from ckptfix.words import some

if TYPE_CHECKING:
    from ckptfix.findings.message_names import Listed
    from ckptfix.names.adapters import LayoutName
    from ckptfix.ops.adapter import Adapter
    from ckptfix.ops.lora.layouts import To

LEVEL = ".base_layer."
"""The level that PEFT puts around a layer of the base."""

LOADERS: dict[LoadError, To] = {
    LoadError.PEFT_ADAPTER: "peft", LoadError.COMFY_LORA: "comfy", LoadError.KOHYA_LORA: "kohya",
    LoadError.DIFFUSERS_LORA: "diffusers",
}  # fmt: skip
"""Message of a loader of adapters -> the layout that it reads."""


def scan(
    path: str, checkpoint: Checkpoint, rows: Sequence[LoadError] = (), names: Listed | None = None
) -> Iterator[Finding]:
    """Yield findings about an adapter: what it is, what is missing, and what its loader does not accept.

    Args:
        rows, names: of the message that the user saw.
    """
    place = as_path(path)
    keys = [entry.key for entry in checkpoint.entries]
    if kind_of(place.name) is not ADAPTER and not has_signs(keys):
        yield from _levels(keys)
        return
    # Only such files are worth the import.
    from ckptfix.ops.adapter import CONFIG, MOST_TEXT, glance

    adapter = glance(checkpoint)
    what = "" if adapter is None else f": {adapter.described()}"
    if adapter is not None and adapter.base:
        yield from _with_base(adapter, what)
    elif kind_of(place.name) is ADAPTER:
        base = _text(quantized.json_beside(checkpoint, CONFIG).get("base_model_name_or_path"), MOST_TEXT)
        of = f" of {base}" if base else ""
        yield found("peft-adapter", f"{place.name} is a PEFT adapter{of}, not a whole model{what}")
    elif adapter is not None:
        yield found("adapter", f"an adapter, not a whole model{what}")
    if adapter is None:
        return
    yield from (found("adapter-incomplete", f"missing: {one}" if one.startswith(CONFIG) else one)
                for one in adapter.missing)  # fmt: skip
    if not adapter.base:
        yield from _names(path, adapter, rows, names)


def _names(path: str, adapter: Adapter, rows: Sequence[LoadError], names: Listed | None) -> Iterator[Finding]:
    """Yield what a loader of adapters does not accept, with the command that writes what it reads."""
    from ckptfix.ops.adapter import glance
    from ckptfix.ops.lora.convert import is_convertible

    to = _wanted(rows, names)
    asked = to is not None
    if to is None or (to == "diffusers" and as_path(path).name.startswith("adapter_model.")):
        to = "peft"
    if adapter.layout == "diffusers" and "name" in adapter.wrong:
        to = "diffusers"
    sentences = list(adapter.wrong.values()) if to in ("peft", adapter.layout) else []
    if not sentences:
        if asked:
            yield from _layout(path, adapter, rows)
        return
    usable = glance(adapter.checkpoint, own_ranks=True) or adapter
    fix: Steps | str = _conversion(path, to) if is_convertible(usable, to) else _ADVICE.format(to=to)
    about = TOLD if not isinstance(fix, str) and (asked or _is_about(names)) else ""
    for sentence in sentences:
        yield found("adapter-names", sentence, fix=fix, about=about)


_ADVICE = (
    "`ckptfix lora convert {{source}} OUT --to {to}` writes that form; --alpha states an alpha that is missing, --like "
    "the base whose names it needs"
)


_READ: Mapping[To, tuple[LayoutName, ...]] = {
    "comfy": ("comfy", "kohya", "diffusers-old"), "kohya": ("kohya",), "diffusers": ("diffusers", "diffusers-old"),
}  # fmt: skip
"""Layout of a loader -> the layouts that it reads."""


def _layout(path: str, adapter: Adapter, rows: Sequence[LoadError]) -> Iterator[Finding]:
    """Yield what an adapter has the keys of, and the loader of the message does not read, where a command helps.

    The command is one whose output is known to be what the loader reads.
    """
    from ckptfix.names.adapters import TITLES
    from ckptfix.ops.lora.convert import is_known, written_paths

    loader: To = next((LOADERS[row] for row in rows if row in LOADERS), "peft")
    if loader == "peft" or adapter.layout in _READ[loader]:
        return
    if adapter.layout == "peft" and LoadError.PEFT_ADAPTER in rows:
        return  # PEFT itself has this message too.
    # ComfyUI knows the modules of a U-Net under the names of diffusers only as kohya spells them.
    forms: tuple[To, ...] = (loader, "kohya") if loader == "comfy" else (loader,)
    for to in forms:
        paths = written_paths(adapter, to)
        if paths is not None and is_known(paths, to):
            key = next(entry.key for row in adapter.modules.values() for entry in row.tensors.values())
            message = f"its keys are those of {TITLES[adapter.layout]}, such as {key}: {TITLES[loader]} has others"
            message += "" if to == loader else f", and reads those of {TITLES[to]}"
            yield found("adapter-names", message, fix=_conversion(path, to), about=TOLD)
            return


def _wanted(rows: Sequence[LoadError], names: Listed | None) -> To | None:
    """Return the layout that the loader of the message reads."""
    if names is not None and "PEFT" in names.frameworks:
        return "peft"
    return next((LOADERS[row] for row in rows if row in LOADERS), None)


def _is_about(names: Listed | None) -> bool:
    """Return whether the message lists keys of an adapter."""
    if names is None:
        return False
    listed = (*names.missing, *names.unexpected, *names.seen, *(row.name for row in names.conflicts))
    return has_signs(listed)


def _conversion(path: str, to: To) -> Steps:
    place = as_path(path)
    if to != "peft":
        return (Step("lora convert", (("to", to),), to),)
    whole = place.name.startswith("adapter_model.") and place.parent.name not in ("", ".", "..")
    return (Step("lora convert", (("to", to),), to, dest=proposed(str(place.parent if whole else place), to, "")),)


def _with_base(adapter: Adapter, what: str) -> Iterator[Finding]:
    """Yield the finding about a base and an adapter in one file, with the merge where alpha is known."""
    from ckptfix.ops.lora.merge import refuse_unusable

    advice = "`ckptfix lora merge {source} -o OUT --alpha A` merges it; alpha is in the configuration of the training"
    fix: Steps | str = step("lora merge")
    try:
        refuse_unusable(adapter)
    except CkptfixError:
        fix = advice
    yield found("adapter-base", f"a base model and an adapter that is not merged{what}", fix=fix)


def _levels(keys: Sequence[str]) -> Iterator[Finding]:
    """Yield the finding about keys with PEFT's level in them, in a file without an adapter."""
    over = [key for key in keys if LEVEL in key]
    if not over:
        return
    pairs = [(LEVEL, ".")]
    front = "base_model.model."
    if all(key.startswith(front) for key in keys):
        pairs.append((f"^{front.replace('.', '[.]')}", ""))
    message = f"{some(over, 3)}: base_layer is PEFT's name for a layer that has an adapter, and none is in the file"
    subs = tuple((old.replace(LEVEL, "[.]base_layer[.]"), new) for old, new in pairs)
    yield found("adapter-base", message, fix=step("rename", subs=subs))


def _text(value: object, most: int) -> str:
    if not isinstance(value, str) or not value:
        return ""
    return printable(value if len(value) <= most else f"{value[:most]}...")

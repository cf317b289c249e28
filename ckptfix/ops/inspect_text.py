"""What `inspect` found, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckptfix.words import facts, plural, size

if TYPE_CHECKING:
    from ckptfix.checkpoint import StateDict
    from ckptfix.ops.inspect import Inspection

LINES = 8
"""Lines of one fact in the summary that a terminal gets."""


def summary(inspection: Inspection, most: int = LINES) -> list[str]:
    """What is known about the file, one fact a line; a fact with more lines has at most `most`, 0 for all."""
    rows: list[tuple[str, Sequence[str]]] = [
        ("file", [inspection.path]),
        ("format", [inspection.title]),
        ("traits", [", ".join(_trait(name, value) for name, value in inspection.traits.items())]),
        ("size", [f"{size(inspection.size)} ({inspection.size:,} bytes)"]),
        ("tensors", [f"{inspection.tensors:,} holding {size(inspection.nbytes)}"]),
        ("parameters", [f"{inspection.parameters:,}"]),
        ("dtypes", [_counts(inspection.dtypes)]),
        ("devices", [_counts(inspection.devices)]),
        ("wrappers", _capped([_wrapper(*item) for item in inspection.wrappers.items()], most)),
        ("state dicts", _capped(list(_state_dicts(inspection.state_dicts)), most)),
        ("metadata", _capped([f"{name}: {_short(value)}" for name, value in inspection.metadata.items()], most)),
        ("globals", _capped(_globals(inspection.globals), 5 * most)),
        ("weights_only", [_verdict(inspection)]),
    ]
    return facts([(name, [value for value in values if value]) for name, values in rows])


def _trait(name: str, value: object) -> str:
    label = name.replace("_", " ")
    if value is True:
        return label
    if isinstance(value, list | tuple):
        return f"{label} {', '.join(map(str, value))}"
    return f"no {label}" if value is False or value is None else f"{label} {value}"


def _counts(counts: Any) -> str:
    return ", ".join(f"{name} x {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _wrapper(component: str, found: tuple[int, str]) -> str:
    count, example = found
    return f"{component} on {plural(count, 'key')}, as in {example}"


def _state_dicts(state_dicts: Sequence[StateDict]) -> Iterator[str]:
    """A line a state dict; the many small ones of an optimizer's state are one line together."""
    for state in state_dicts:
        if not state.optimizer:
            extra = f" and {plural(state.extra, 'other value')}" if state.extra else ""
            yield f"{state.at or 'the file itself'}: {plural(state.tensors, 'tensor')}{extra}"
    inner = [state for state in state_dicts if state.optimizer]
    if len(inner) == 1:
        yield f"{inner[0].at or 'the file itself'}: {plural(inner[0].tensors, 'tensor')} of an optimizer"
    elif inner:
        total = sum(state.tensors for state in inner)
        yield f"{inner[0].at} to {inner[-1].at}: {plural(total, 'tensor')} of an optimizer"


def _globals(names: Sequence[tuple[str, bool]]) -> list[str]:
    """Those that weights_only=True refuses first, each on its line; the accepted ones share one."""
    refused = [f"{name} (refused by weights_only=True)" for name, accepted in names if not accepted]
    accepted = ", ".join(name for name, accepted in names if accepted)
    return [*refused, accepted] if accepted else refused


def _verdict(inspection: Inspection) -> str:
    if not inspection.globals and inspection.weights_only is None:
        return ""
    if inspection.weights_only is None:
        return "torch.load(weights_only=True) accepts it"
    return f"torch.load(weights_only=True) refuses it: {inspection.weights_only}"


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _capped(values: list[str], most: int) -> list[str]:
    hidden = len(values) - most
    return values if hidden <= 0 or not most else [*values[:most], f"... {hidden:,} more (--json has all)"]

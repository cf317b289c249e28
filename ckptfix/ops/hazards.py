"""Code that a pickle may run: find the nodes that name it, and refuse a planned output that still does.

Verbs whose output must be clean declare in `Draft.allows` which globals it may name. The planned file is then searched
like a file from a stranger, whichever code planned it. So a global is found even in a place that the verb overlooked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptfix.checkpoint import Plan
from ckptfix.checkpoint.tree import Item, NameValue, TensorValue, Value, identity
from ckptfix.errors import Refused
from ckptfix.formats import FORMATS
from ckptfix.formats.loading import hidden_globals
from ckptfix.formats.torch.dangerous_globals import is_dangerous
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.words import some

Allows = Callable[[str], bool]
"""Function that returns whether an output may name the global ``"module.name"``."""

def is_harmless(name: str) -> bool:
    """Return whether a global, ``"module.name"``, is not known to run code, reach the network or touch files."""
    return not is_dangerous(name)


def globals_below(root: Item) -> list[str]:
    """List the classes and functions that `root` and everything below it name, each once."""
    names = (part.canonical for part in _parts(root) if isinstance(part, NameValue))
    return list(dict.fromkeys(names))


def dangerous_below(root: Item) -> str:
    """Return the first dangerous function that `root`, or anything below it, names; "" without one."""
    named = next(filter(is_dangerous, globals_below(root)), "")
    return named or next(filter(None, map(hidden_globals.dangerous_in, _parts(root))), "")


def _parts(root: Item) -> Iterator[Item]:
    """Yield `root` and everything below it, each object once."""
    seen: set[int] = set()
    begun: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if not isinstance(value, Value) or value.identity in begun:
            continue
        begun.add(value.identity)
        below = [] if isinstance(value, TensorValue) and value.is_plain else list(value.parts())
        for part in (value, *below):
            own = identity(part)
            if own not in seen:
                seen.add(own)
                yield part
        stack += below


def refuse_named(plan: Plan, format: str, allows: Allows, source: str) -> None:
    """Raise `Refused` if a planned output names a global that `allows` rejects.

    Args:
        format: of the output.
        source: the input, which the error is about.

    Raises:
        Refused: it names one. Nothing was written.
    """
    if "objects" not in FORMATS[format].states:
        return
    for file in plan.files:
        if file.along:
            continue
        rows = hidden_globals.look_planned(PlannedFile(file)).hidden
        # torch does not unpickle bytes that are a value, so only functions that run code count there.
        bad = [row for row in rows if not (is_harmless if hidden_globals.TEXT in row.place else allows)(row.name)]
        if bad:
            names = some(list(dict.fromkeys(row.name for row in bad)))
            message = f"the output would still name {names}; nothing was written"
            hint = "do not unpickle this file; `ckptfix convert` to safetensors keeps only the tensors"
            raise Refused(message, path=source, where=bad[0].place or None, hint=hint)

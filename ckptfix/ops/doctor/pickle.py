"""Findings about a pickle: the functions, further pickles and old strings in it. It is read as text, and never run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptfix.checkpoint.tree import ObjectValue, pairs_of
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Fix
from ckptfix.findings.table import found
from ckptfix.formats.loading import on_load
from ckptfix.formats.loading.hidden_globals import Hidden
from ckptfix.formats.loading.on_load import RefusedGlobal
from ckptfix.formats.torch import module as torch_module
from ckptfix.formats.torch.call_classes import UNINITIALIZED
from ckptfix.formats.torch.common import PickledObject
from ckptfix.formats.torch.dangerous_globals import is_dangerous
from ckptfix.ops import tensor_classes
from ckptfix.words import plural, some

_ABOUT = (
    ("numpy._core", "a name that only NumPy 2 has"),
    ("numpy", "a NumPy object"),
    ("pathlib", "a path, which another system cannot build"),
    ("argparse.Namespace", "hyper-parameters"),
    ("pytorch_lightning", "an object of Lightning"),
    ("lightning", "an object of Lightning"),
    ("omegaconf", "a configuration of OmegaConf"),
    *((name, "a placeholder of a lazy module that was never initialized") for name in UNINITIALIZED),
    ("__main__", "a class of the script that saved it"),
)
"""Beginnings of names, and a description of such an object."""

LISTED = 8
"""Names in a message before the rest are counted."""


def scan(parts: PickledObject, where: str, base: int = 0) -> Iterator[Finding]:
    """Yield findings about a parsed pickle.

    Args:
        where: its record.
        base: offset in the file of the first byte that the offsets of the pickle count from.
    """
    refused = on_load.refused_globals(parts)
    known = tensor_classes.libraries(parts.global_names(), lambda: parts.root)
    for row in refused:
        if row.name in UNINITIALIZED:
            message = "the parameters of a lazy module were saved before its first input: they have no values"
            advice = "save the model again after a batch went through it: this file has no weights for them"
            yield found("no-data", message, where=where, severity="warning", fix=advice)
        library = next((library for library in known if library.has(row.name)), None)
        if library is not None:
            yield _tensor_class(row.name, library, where, base + row.offset)
        else:
            yield _global(row, where, base)
    opcode = on_load.refused_opcode(parts)
    if opcode is not None:
        place, what = opcode
        yield found("unsupported-opcode", f"{what}, which weights_only=True refuses", where=where, offset=base + place)
    old = on_load.old_strings(parts)
    if old is not None and old.fails:
        yield found("python2-strings", where=where, offset=base + old.offset)
    elif old is not None:
        message = "it has strings as Python 2 wrote them, all ASCII"
        yield found("python2-strings", message, where=where, offset=base + old.offset, severity="info")
    for place, names in on_load.hidden_in_bytes(parts):
        message = f"a bytes value holds a pickle that contains {listed(names)}"
        yield found("nested-pickle", message, where=where, offset=base + place)


def _global(row: RefusedGlobal, where: str, base: int = 0) -> Finding:
    """Return the finding for a refused global, whose offsets count from `base`."""
    name, offset = row.name, base + row.offset
    called_at = None if row.called is None else base + row.called
    called = "" if called_at is None else f", which would be called at {called_at:#x}"
    if row.text:
        more = f" and {plural(row.calls - 1, 'more call')} of it" if row.calls > 1 else ""
        runs = f"{row.text}{more}"
        message = f"loading this file runs {runs} ({name}, called at {called_at:#x})"
        return replace(found("dangerous-global", message, where=where, offset=offset, about=name), runs=runs)
    if is_dangerous(name):
        message = f"the pickle contains {name}, which can run code or open files"
        return found("dangerous-global", f"{message}{called}", where=where, offset=offset, about=name)
    module = name.partition(".")[0]
    about = next((text for front, text in _ABOUT if name == front or name.startswith(f"{front}.")), "")
    what = f"{name} ({about or f'from the package {module}'})" if about or module else name
    message = f"torch.load refuses this file: weights_only=True does not allow {what}{called}"
    return found("foreign-global", message, where=where, offset=offset, about=name)


def _tensor_class(name: str, library: tensor_classes.Library, where: str, offset: int) -> Finding:
    message = f"torch.load needs {library.name} for this file: it holds tensors of that library ({name})"
    advice = f"run `{library.statement}` before torch.load(..., weights_only=True), which then accepts the file"
    return found("tensor-class", message, where=where, offset=offset, fix=advice, about=name)


def listed(names: Sequence[str]) -> str:
    """Join names in one line, those that run code first."""
    ordered = sorted(names, key=lambda name: not is_dangerous(name))
    return some(ordered, LISTED)


def after_stop(parts: PickledObject, where: str, base: int = 0) -> Iterator[Finding]:
    """Yield a finding about the bytes after the STOP of a pickle that has a record of its own."""
    rest = on_load.after_stop(parts)
    if rest is None:
        return
    if rest.pickled is None:
        message = f"{rest.length:,} bytes follow the end of the pickle"
        yield found("bytes-after-stop", message, where=where, offset=base + rest.offset)
        return
    named = f", and contains {listed(rest.names)}" if rest.names else ""
    message = f"another pickle of {rest.pickled:,} bytes follows the first{named}"
    yield found("stacked-pickles", message, where=where, offset=base + rest.offset)


def hidden(rows: Iterable[Hidden], *, fix: Fix | None = None) -> Iterator[Finding]:
    """Yield a finding for each global that `ops.hidden_globals` found, once per place."""
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (row.place, row.name) not in seen:
            seen.add((row.place, row.name))
            finding = _global(RefusedGlobal(row.name, row.offset, row.called, 0, ""), row.place)
            yield finding.fixed_by(fix) if fix is not None else finding


def whole_module(parts: PickledObject) -> tuple[str, int] | None:
    """Return (class, offset) of the pickled module that is the object or one of its values; None without one."""
    root = parts.root
    for item in (root, *(value for _, value in pairs_of(root) or ())):
        if isinstance(item, ObjectValue) and torch_module.is_module(item):
            cls = item.cls
            return (cls.full if cls is not None else "an unnamed class", item.offset or 0)
    return None

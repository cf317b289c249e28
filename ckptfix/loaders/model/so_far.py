"""The tensors that a model had received before an error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from ckptfix.errors import CkptfixError, LoadMismatch
from ckptfix.io.source import cause_of
from ckptfix.names.groups import collapse, shown
from ckptfix.words import plural


@contextmanager
def telling(so_far: Callable[[], str], path: str, where: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Add to any error what the model had received before it.

    Args:
        where: returns the key of the tensor that is being copied.

    Raises:
        LoadMismatch: in place of an error of torch or of the model's own code.
    """
    try:
        yield
    except CkptfixError as error:
        cause = cause_of(error)
        cause.message = f"{cause.message}; {so_far()}"
        raise cause from error.__cause__
    except Exception as error:
        kind = "" if isinstance(error, RuntimeError) and str(error) else f"{type(error).__name__}: "
        line = next(iter(str(error).splitlines()), "no details")
        raise LoadMismatch(f"{kind}{line}; {so_far()}", path=path, where=where()) from error
    except BaseException as error:
        error.add_note(so_far())
        raise


def copied(names: Sequence[str], loaded: Collection[int], torn: Collection[int]) -> str:
    """Describe what was copied, by the numbers of the tensors: `torn` may be partly overwritten."""

    def those(numbers: Collection[int]) -> str:
        return listed([names[number] for number in sorted(numbers)], names)

    parts = []
    if loaded:
        tensors = plural(len(names), "tensor")
        parts.append(f"{len(loaded)} of {tensors} of the model were loaded before ({those(loaded)})")
    if torn:
        parts.append(f"{those(torn)} may be partly overwritten")
    if not parts:
        return "the model was not changed"
    if len(loaded) == len(names):
        return parts[0]
    return f"{', '.join(parts)}, and {'the others were not' if loaded else 'the rest of the model was not changed'}"


def listed(names: Sequence[str], of: Sequence[str]) -> str:
    """Return all of the names, with layers collapsed; they are some of the names `of`."""
    return shown(collapse(names, of), most=len(of))

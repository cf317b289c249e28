"""Regular expressions of the user, matched against names of an untrusted file, without the risk of a hang.

Python's matcher backtracks, and a pattern such as ``(a+)+$`` has 2^n ways to match a name of n letters. Meanwhile it
holds the interpreter lock, so no other thread can stop it. The number of ways is therefore estimated from the pattern
before a match. If they are few, the match runs here; otherwise it runs in a separate process, which ends itself after
`SECONDS` of CPU time. So an ordinary pattern costs nothing extra, and no pattern takes longer than that.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from ckptfix.errors import Refused
from ckptfix.platform import end_process

if TYPE_CHECKING:
    from subprocess import Popen

SECONDS = 10
"""CPU time that one pattern may take in total in its own process."""

QUICK = 1_000_000
"""Character comparisons allowed for one name in this process: about ten milliseconds."""

QUICK_IN_ALL = 1_000_000_000
"""The same limit for all names together: a few seconds at most, and usually far less."""

LONGEST = 80
"""Characters of a name shown in a message."""

_ENDLESS = 1 << 64

_BEGINNINGS = frozenset(("AT_BEGINNING", "AT_BEGINNING_STRING"))

Operation = Literal["search", "fullmatch", "sub"]

_CHILD = """
import faulthandler, json, re, signal, sys
first = json.loads(sys.stdin.readline())
pattern = re.compile(first["pattern"])
do = {
    "search": lambda name, _: pattern.search(name) is not None,
    "fullmatch": lambda name, _: (lambda found: found and found.groupdict())(pattern.fullmatch(name)),
    "sub": lambda name, new: pattern.subn(new, name),
}
# The matcher never returns to Python meanwhile: the kernel ends the process, or else a thread that is not Python's.
if hasattr(signal, "setitimer"):
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, first["seconds"])
else:
    faulthandler.dump_traceback_later(first["seconds"], exit=True)
for line in sys.stdin:
    operation, new, names = json.loads(line)
    for name in names:
        print(json.dumps(do[operation](name, new)), flush=True)
"""


class Regex:
    """A regular expression that is safe on the names of any file.

    Raises:
        re.error: the pattern is not a regular expression.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._compiled = re.compile(pattern)
        self._spent = 0
        self._child: Popen[bytes] | None = None
        self._lock = Lock()

    def search(self, names: Sequence[str]) -> list[bool]:
        """Return for each of `names` whether the pattern is found in it.

        Raises:
            Refused: it takes more than `SECONDS`; `where` has the name.
        """
        return [bool(found) for found in self._each("search", names, lambda name: self._compiled.search(name))]

    def fullmatch(self, name: str) -> dict[str, str] | None:
        """Return the named groups if the pattern matches the whole of `name`, else None. Raises as `search` does."""

        if self._is_quick(name):
            found = self._compiled.fullmatch(name)
            return None if found is None else found.groupdict()
        groups: dict[str, str] | None = self._elsewhere("fullmatch", "", [name])[0]
        return groups

    def subn(self, replacement: str, names: Sequence[str]) -> list[tuple[str, int]]:
        """Return the result and count of `re.subn` for each of `names`. Raises as `search` does."""
        made = self._each("sub", names, lambda name: self._compiled.subn(replacement, name), replacement)
        return [(name, count) for name, count in made]

    def _each(
        self, operation: Operation, names: Sequence[str], here: Callable[[str], Any], replacement: str = ""
    ) -> list[Any]:
        made = []
        for name in names:
            if not self._is_quick(name):
                break
            made.append(here(name))
        rest = names[len(made) :]
        return made + (self._elsewhere(operation, replacement, rest) if rest else [])

    def _is_quick(self, name: str) -> bool:
        steps = _most_steps(self.pattern, len(name) + 1)
        self._spent += steps
        return steps <= QUICK and self._spent <= QUICK_IN_ALL

    def _elsewhere(self, operation: Operation, replacement: str, names: Sequence[str]) -> list[Any]:
        made: list[Any] = []
        with self._lock:
            try:
                child = self._child or self._started()
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write(json.dumps([operation, replacement, list(names)]).encode() + b"\n")
                child.stdin.flush()
                for line in child.stdout:
                    made.append(json.loads(line))
                    if len(made) == len(names):
                        return made
            except OSError as error:
                message = f"the pattern {self.pattern!r} needs another process, which failed: {error.strerror or error}"
                raise Refused(message) from None
        name = names[len(made)]
        message = f"the pattern {self.pattern!r} did not finish within {SECONDS} seconds of computing"
        hint = "write a+ instead of a repetition inside a repetition such as (a+)+, which has endless ways to match"
        raise Refused(message, where=name if len(name) <= LONGEST else f"{name[:LONGEST]}...", hint=hint)

    def _started(self) -> Popen[bytes]:
        import subprocess
        from weakref import finalize

        words = [sys.executable, "-I", "-S", "-c", _CHILD]
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        finalize(self, end_process, child)
        assert child.stdin is not None
        child.stdin.write(json.dumps({"pattern": self.pattern, "seconds": SECONDS}).encode() + b"\n")
        self._child = child
        return child


@lru_cache(maxsize=1 << 14)
def _most_steps(pattern: str, length: int) -> int:
    """Return an upper bound of the steps of a search in a name of this length; the tables share many patterns."""
    widest, anchored, tries = _bounds(pattern)
    return (1 if anchored else length) * tries(length) * min(widest, length)


@lru_cache(maxsize=1 << 12)
def _bounds(pattern: str) -> tuple[int, bool, Callable[[int], int]]:
    """Return the greatest width of a match, whether it is at the beginning only, and the ways to try it."""
    tree = re._parser.parse(pattern)  # type: ignore[attr-defined]
    return int(tree.getwidth()[1]), len(tree) > 0 and str(tree[0][1]) in _BEGINNINGS, ways(pattern)


def ways(pattern: str) -> Callable[[int], int]:
    """Return a function from the length of a name to an upper bound of the ways to try the pattern at one position."""
    tree = re._parser.parse(pattern)  # type: ignore[attr-defined]
    return lambda length: _ways(tree, length, None)


def _ways(items: Any, length: int, behind: int | None) -> int:
    """Return the ways for a part of a pattern. `behind` is the character that must follow it, None if unknown."""
    made = 1
    rows = list(items)
    for number, (operation, value) in enumerate(rows):
        follows = behind
        if number + 1 < len(rows):
            after, character = rows[number + 1]
            follows = character if str(after) == "LITERAL" else None
        made = min(made * _of_one(str(operation), value, length, follows), _ENDLESS)
    return made


def _of_one(operation: str, value: Any, length: int, behind: int | None) -> int:
    match operation:
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, body = value
            once, times = _ways(body, length, None), min(int(most), length)
            if behind is not None and not _may_take(body, behind):
                return once if once == 1 else _ENDLESS
            lengths = max(times - int(least), 0) + 1
            return lengths if once == 1 else min(once ** min(times, 64) * lengths, _ENDLESS)
        case "BRANCH":
            return sum(_ways(one, length, behind) for one in value[1])
        case "SUBPATTERN":
            return _ways(value[3], length, behind)
        case "ATOMIC_GROUP":
            return _ways(value, length, behind)
        case "ASSERT" | "ASSERT_NOT":
            return _ways(value[1], length, None)
        case "GROUPREF_EXISTS":
            return sum(_ways(one, length, behind) for one in value[1:] if one)
    return 1


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdigit,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda character: character.isalnum() or character == "_",
}


def _may_take(body: Any, character: int) -> bool:
    """Return whether the repeated part may match this character; False only for one character set without it.

    Only then does the repetition have a single length after which the rest of the pattern can begin.
    """
    rows = list(body)
    if len(rows) != 1:
        return True
    operation, value = str(rows[0][0]), rows[0][1]
    if operation == "NOT_LITERAL":
        return bool(value != character)
    if operation == "LITERAL":
        return bool(value == character)
    if operation != "IN":
        return True
    kinds = {str(kind) for kind, _ in value}
    if not kinds <= {"NEGATE", "LITERAL", "RANGE", "CATEGORY"}:
        return True
    inside = any(_is_in(str(kind), one, character) for kind, one in value)
    return inside != ("NEGATE" in kinds)


def _is_in(kind: str, value: Any, character: int) -> bool:
    if kind == "LITERAL":
        return bool(value == character)
    if kind == "RANGE":
        return bool(value[0] <= character <= value[1])
    if kind == "NEGATE":
        return False
    known = _CATEGORIES.get(str(value))
    return known is None or known(chr(character))

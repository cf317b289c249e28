"""Lint of the prose: openings of docstrings, and words that plain English does not use that way.

`make lint` runs it on docstrings, messages, help and the pages. It prints one line for each hit and exits with 1:

    ckptfix/io/write.py:41: docstring of `copy` does not begin with an imperative verb: The bytes of ...

Run it on a part of the tree with `python tests/plain_words.py ckptfix/io`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", ".github/CONTRIBUTING.md", ".github/SECURITY.md", "ckptfix/docs")
CODE = ("ckptfix",)

_VERBS = """
    Abort Accept Acquire Adapt Add Adjust Advance Align Allocate Allow Annotate Answer Append Apply Arrange Ask
    Assemble Assert Assign Attach Average Avoid Await Begin Bind Block Bound Bring Browse Build Cache Calculate
    Call Cancel Carry Cast Catch Change Check Choose Clean Clear Clip Clone Close Collapse Collect Color Combine
    Commit Compare Compile Complete Compose Compress Compute Concatenate Configure Confirm Connect Consume
    Contain Continue Convert Copy Correct Count Cover Create Cut Decide Decode Decompress Decrement Default
    Defer Define Delegate Delete Dequantize Derive Describe Detach Detect Determine Diagnose Disable Discard
    Dispatch Display Divide Do Download Draw Drop Dump Echo Edit Emit Enable Encode End Ensure Enter Enumerate
    Erase Escape Estimate Evaluate Examine Exchange Exclude Execute Exit Expand Expect Explain Export Expose
    Extend Extract Fail Fall Fetch Fill Filter Find Finish Fit Fix Flag Flatten Flush Focus Fold Follow Force
    Forget Fork Format Forward Free Fuse Gather Generate Get Go Group Guard Guess Handle Hash Have Hide
    Highlight Hold Identify Ignore Implement Import Include Increment Index Indicate Infer Inflate Initialize
    Insert Inspect Install Intercept Intern Interpret Intersect Invert Invoke Iterate Join Judge Jump Keep Kill
    Label Launch Leave Let Limit Link List Listen Load Locate Lock Log Look Lower Make Map Mark Mask Match
    Measure Memoize Merge Mirror Modify Move Multiply Name Negate Normalize Note Notify Number Omit Open Order
    Overwrite Pack Pad Pair Parse Partition Pass Patch Pause Peek Perform Permute Pick Place Plan Point Pop
    Prefer Prefix Prepare Preserve Prevent Print Process Produce Propose Protect Prove Provide Publish Pull Push
    Put Quantize Query Quote Raise Rank Read Rebuild Receive Recognize Record Recover Redirect Reduce Refer
    Reformat Refresh Refuse Register Reject Relate Release Reload Remember Remove Rename Render Reopen Reorder
    Repair Repeat Replace Replay Report Represent Request Require Reserve Reset Reshape Resize Resolve Respond
    Restore Restrict Resume Retry Return Reuse Reverse Rewrite Round Route Run Sample Save Scale Scan Schedule
    Score Scroll Search Seek Select Send Separate Serialize Serve Set Share Shorten Show Shrink Shut Sign Signal
    Simplify Skip Slice Solve Sort Spawn Specify Splice Split Stack Start State Stop Store Stream Strip Submit
    Substitute Subtract Suggest Sum Summarize Supply Suppress Survey Suspend Swap Switch Sync Synchronize Tag
    Tell Terminate Test Throw Tokenize Trace Track Train Transform Translate Transpose Traverse Treat Trim
    Truncate Try Turn Unbind Undo Unescape Unlink Unlock Unpack Unwrap Update Upload Use Validate Verify View
    Visit Wait Walk Warn Watch Weigh Widen Wrap Write Yield Zero
"""

VERBS = frozenset(_VERBS.split())
"""Verbs with which a function's docstring may begin (PEP 257). Add one where none of these says it."""

NOT_NOUNS = frozenset((
    "What", "Whether", "How", "Where", "Which", "Why", "When", "Who", "Of", "In", "That", "Those", "These", "As",
    "If", "By",
))
"""Words with which no docstring of a class or a module begins: it is a noun phrase."""


class Pattern(NamedTuple):
    """A way to write that readers stumble over, and a plain one."""

    regex: re.Pattern[str]
    instead: str


def _pattern(regex: str, instead: str) -> Pattern:
    return Pattern(re.compile(regex), instead)


PATTERNS = (
    _pattern(r"(?<!here\s)\b(is|are|was|were) none\b", "say what is missing: 'it has no header', 'is not a number'"),
    _pattern(r"(?<!here\s)\b(is|are|was|were) no (?!longer|more|less|worse|different)\b", "'is not a ...'"),
    _pattern(r"\balike\b", "'the same', 'equal'"),
    _pattern(r"\bof which\b", "'whose', or two sentences"),
    _pattern(r"\b(stands?|stood)\b(?! for\b|-|alone)", "'is', 'are', 'is stored'"),
    _pattern(r"\b(lie|lies|lay)\b", "'is', 'are', 'is stored'"),
    _pattern(r"\btold\b(?! apart)", "'reported', 'named'"),
    _pattern(r"\b(in silence|without a word)\b", "'silently'"),
    _pattern(r"\bto be had\b", "'available'"),
    _pattern(r"\blaw of weights\b", "'weight audit'"),
    _pattern(r"\b[Mm]end(s|ed|ing)?\b", "'fix'"),
    _pattern(r"\bthe like of\b|\bsuch as it is\b", "name it"),
    _pattern(r"(^|[.;] )(What|Whether)\b(?![^.]*\?)", "begin with a verb or a noun"),
    _pattern(r"(^|[.;] )Of (a|an|the|several|all|many|each|two|one)\b", "'For ...', 'With ...'"),
)


class Hit(NamedTuple):
    """A place that does not read as plain English."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.text}"


def hits_of_text(path: Path, line: int, text: str) -> Iterator[Hit]:
    """Yield the patterns found in `text`, which begins on `line`."""
    joined = re.sub(r"[ \t]*\n[ \t]*", "\n", re.sub(r"``?[^`]*``?", "``", text))
    for pattern in PATTERNS:
        for found in pattern.regex.finditer(joined):
            begin = max(0, found.start() - 30)
            shown = " ".join(joined[begin : found.end() + 30].split())
            at = line + joined.count("\n", 0, found.start())
            yield Hit(path, at, f"...{shown}...: write {pattern.instead}")


def _is_noun(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the function reads as an attribute, so that its docstring is a noun phrase."""
    names = {ast.unparse(node).rpartition(".")[2].partition("(")[0] for node in function.decorator_list}
    return bool(names & {"property", "cached_property", "setter", "fixture"})


def hits_of_code(path: Path) -> Iterator[Hit]:
    """Yield the hits in docstrings and strings of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node, clean=False)
        if text is None:
            continue
        docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
        line = node.body[0].lineno
        first = text.split()[0].rstrip(",.:;") if text.split() else ""
        name = getattr(node, "name", path.stem)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_noun(node):
            if first not in VERBS:
                summary = text.strip().splitlines()[0][:60]
                yield Hit(path, line, f"docstring of `{name}` does not begin with an imperative verb: {summary}")
        elif first in NOT_NOUNS:
            yield Hit(path, line, f"docstring of `{name}` begins with {first}: write a noun phrase")
        yield from hits_of_text(path, line, text)
    pieces = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings or id(node) in pieces:
                continue
            text = node.value
        else:
            continue
        if " " in text:
            yield from hits_of_text(path, node.lineno, text)


def hits_of_page(path: Path) -> Iterator[Hit]:
    """Yield the hits in a page of Markdown; code blocks are skipped."""
    fenced = False
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        lines.append("" if fenced or line.lstrip().startswith("```") else line)
    yield from hits_of_text(path, 1, "\n".join(lines))


def all_hits(places: list[Path]) -> Iterator[Hit]:
    """Yield the hits in files, and in all modules and pages of folders."""
    for place in places:
        paths = sorted([*place.rglob("*.py"), *place.rglob("*.md")]) if place.is_dir() else [place]
        for path in paths:
            yield from hits_of_code(path) if path.suffix == ".py" else hits_of_page(path)


def main(arguments: list[str]) -> int:
    """Print the hits, and return 1 if there are any."""
    places = [Path(argument).resolve() for argument in arguments] or [ROOT / name for name in (*CODE, *PAGES)]
    found = list(dict.fromkeys(all_hits(places)))
    for hit in found:
        print(hit)
    if found:
        print(f"{len(found)} hits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

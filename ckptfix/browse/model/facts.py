"""The details of a node beside the tree, as lines with style names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING

from ckptfix.browse.model.contents import ContentItem, Status
from ckptfix.browse.model.node_findings import Marks
from ckptfix.browse.model.outline import OutlineNode
from ckptfix.browse.model.text_drawing import bars, shown, value_text
from ckptfix.checkpoint import TensorEntry
from ckptfix.findings.row import Finding
from ckptfix.words import plural, shape, size

if TYPE_CHECKING:
    from ckptfix.browse.model.summary import TensorSummary
    from ckptfix.elements.pair_sums import ValueDiff
    from ckptfix.ops.diff.result import TensorChange

Line = tuple[str, str]
"""A style name and a line; an empty line separates paragraphs."""

WORDS: dict[Status, str] = {
    "": "",
    "?": "values not compared yet",
    "=": "equal",
    "~": "different",
    "+": "only in B",
    "-": "only in A",
}

STYLES: dict[Status, str] = {"": "", "?": "dim", "=": "dim", "~": "changed", "+": "added", "-": "removed"}

FINDINGS = 20
"""Maximum findings listed for one node."""

LARGEST = 10
"""Number of the largest tensors listed for a module."""

HEIGHT = 6
"""Lines of a histogram."""



def of_file(lines: Sequence[str], marks: Marks, notes: Sequence[Finding] = ()) -> Iterator[Line]:
    """Yield the summary of `inspect`, the findings of `doctor`, and the given ones of its notes."""
    yield from (("", line) for line in lines)
    yield from findings([*(row.finding for row in marks.rows if row.finding.severity != "info"), *notes], marks.fix)


def of_two(node: OutlineNode, paths: Sequence[str], notes: Sequence[Finding] = ()) -> Iterator[Line]:
    """Yield the two files, how many of their tensors differ, and the notes about the choice of state dicts."""
    yield "strong", f"A  {shown(paths[0])}"
    yield "strong", f"B  {shown(paths[1])}"
    yield "", ""
    yield from _counts(node)
    yield from findings(notes)


def of_module(node: OutlineNode, marks: Marks) -> Iterator[Line]:
    """Yield the details of a module or mapping."""
    yield "strong", shown(node.address) or "''"
    counted = [plural(node.tensors, "tensor")] if node.tensors else []
    counted += [plural(node.values, "value")] if node.values else []
    yield "", f"{' and '.join(counted)}, {size(node.nbytes)}" if node.tensors else " and ".join(counted)
    yield from _counts(node)
    held, *largest = _held(node)
    if held:
        yield "", held
    yield from findings(marks.at(node.covers))
    if largest:
        yield "", ""
        yield "dim", "largest:"
        yield from (("", line) for line in largest)


def _held(node: OutlineNode) -> Sequence[str]:
    """Return the dtypes of the tensors in a module, and a line for each of the largest."""
    if node.said is not None:
        return node.said
    dtypes: Counter[str] = Counter()
    numel = 0
    for item in node.items:
        entry = item.shown
        if entry is not None:
            dtypes[entry.dtype] += 1
            numel += entry.numel
    counted = ", ".join(f"{shown(name)} x {count:,}" for name, count in dtypes.most_common(8))
    largest = nlargest(LARGEST, (item for item in node.items if not item.is_value), key=lambda item: item.nbytes)
    names = ((item, shown(item.name[len(node.address) :].lstrip("./"), 200)) for item in largest if len(largest) > 1)
    held = f"{plural(numel, 'element')}: {counted}" if dtypes else ""
    node.said = (held, *(f"{size(item.nbytes):>9}  {name}" for item, name in names))
    return node.said


def _counts(node: OutlineNode) -> Iterator[Line]:
    counts = node.counts()
    for status in ("~", "+", "-", "?", "="):
        if counts[status]:
            yield STYLES[status], f"{status} {counts[status]:,} {WORDS[status]}"


def of_value(item: ContentItem, marks: Marks) -> Iterator[Line]:
    """Yield the details of a value that is not a tensor."""
    yield "strong", shown(item.name)
    if item.status in ("", "="):
        yield "dim", f"{type(item.value).__name__}, not a tensor" + (", equal in both" if item.status else "")
        yield "", value_text(item.value, 4000)
    else:
        yield STYLES[item.status], WORDS[item.status]
        for side, value, there in (("A", item.value, item.status != "+"), ("B", item.other_value, item.status != "-")):
            yield "", f"{side}  {value_text(value, 2000) if there else '(absent)'}"
    yield from findings(marks.at((item.name,)))


def of_tensor(item: ContentItem, marks: Marks) -> Iterator[Line]:
    """Yield the header facts of a tensor, or of a pair of tensors."""
    yield "strong", shown(item.name)
    if item.status:
        yield STYLES[item.status], f"{item.status} {WORDS[item.status]}"
    if item.entry is not None and item.other is not None:
        yield from _side_by_side(item.entry, item.other)
    elif item.shown is not None:
        yield from _properties(item.shown)
    yield from findings(marks.at((item.name,)))


def _properties(entry: TensorEntry) -> Iterator[Line]:
    parts = [f"{shown(entry.dtype)} {shown(shape(entry.shape))}", plural(entry.numel, "element")]
    parts += [size(item_bytes(entry)), f"on {shown(entry.location)}"]
    parts += ["parameter"] if entry.parameter else []
    parts += ["requires grad"] if entry.requires_grad else []
    if entry.kind != "dense":
        parts.append(shown(f"{entry.kind} {entry.detail}".rstrip()))
    yield "", ", ".join(parts)
    storage = entry.storage
    if not entry.is_contiguous:
        yield "dim", f"a view with stride {shape(entry.stride)}"
    if storage is not None and storage.nbytes != item_bytes(entry):
        yield "dim", f"part of the {size(storage.nbytes)} of storage {shown(storage.key, 200)}"
    for part in entry.parts[:8]:
        yield "dim", f"part {shown(part.key, 100)}: {shown(part.dtype)} {shape(part.shape)}"


def number(value: object) -> str:
    """Format a number as `stats` does."""
    from ckptfix.ops.stats import shown as written

    return written(value)


def item_bytes(entry: TensorEntry) -> int:
    """Return the bytes of the elements."""
    return ContentItem(entry.name, (), entry).nbytes


_COMPARED: tuple[tuple[str, Callable[[TensorEntry], object]], ...] = (
    ("name", lambda entry: shown(entry.name, 200)),
    ("dtype", lambda entry: shown(entry.dtype)),
    ("shape", lambda entry: shape(entry.shape)),
    ("size", lambda entry: size(item_bytes(entry))),
    ("device", lambda entry: shown(entry.location)),
    ("requires grad", lambda entry: entry.requires_grad),
    ("kind", lambda entry: shown(f"{entry.kind} {entry.detail}".rstrip())),
)


def _side_by_side(a: TensorEntry, b: TensorEntry) -> Iterator[Line]:
    rows = [(what, str(read(a)), str(read(b))) for what, read in _COMPARED]
    same = [left for what, left, right in rows if left == right and what in ("dtype", "shape", "size")]
    if same:
        yield "", ", ".join(same)
    yield from (("changed", f"{what}: {left} -> {right}") for what, left, right in rows if left != right)


def of_changes(changes: Sequence[TensorChange]) -> Iterator[Line]:
    """Yield lines on how far apart the values of two tensors are."""
    for change in changes:
        if change.values is not None:
            yield "", ""
            yield from _apart(change.values)


def _apart(values: ValueDiff) -> Iterator[Line]:
    if values.reason is not None:
        yield "warning", f"values not compared: {shown(values.reason)}"
        return
    share = values.differing / values.elements if values.elements else 0.0
    part = f"{share:.1%}" if share >= 0.0005 or not share else "less than 0.1%"
    yield "changed", f"{values.differing:,} of {plural(values.elements, 'element')} differ ({part})"
    rows = (
        ("max |a-b|", values.max_abs), ("mean |a-b|", values.mean_abs), ("relative L2", values.rel_l2),
        ("cosine", values.cosine), ("NaN in A only", values.nan_a or None), ("NaN in B only", values.nan_b or None),
        ("infinite on one side", values.infinite or None),
    )  # fmt: skip
    yield from (("", f"{name:<21} {number(value)}") for name, value in rows if value is not None)


Ends = tuple[float, float]
"""The smallest and the largest number of a histogram."""


def of_summary(
    summary: TensorSummary, width: int, title: str = "", ends: Ends | None = None, height: int = HEIGHT
) -> Iterator[Line]:
    """Yield the statistics of a tensor, and its histogram in at most `width` columns, from `ends` if given."""
    if title:
        yield "", ""
        yield "strong", title
    found = summary.moments
    if found is None:
        yield "dim", f"no statistics: {shown(summary.reason or '')}"
        return
    rows: list[tuple[str, object]] = [
        ("min", found.low), ("max", found.high), ("mean", found.mean_value),
        ("std", found.deviation), ("norm", found.norm), ("zeros", found.zeros),
    ]  # fmt: skip
    cells = [f"{name:<4} {number(value):<11}" for name, value in rows if value is not None]
    across = max(min(width // 18, 3), 1)
    for start in range(0, len(cells), across):
        yield "", "  ".join(cells[start : start + across]).rstrip()
    if found.nan or found.infinite:
        yield "error", f"{found.nan:,} NaN, {found.infinite:,} infinite"
    yield from _histogram(summary, width, ends, height)


def ends_of(summaries: Sequence[TensorSummary]) -> Ends | None:
    """Return the common ends of the histograms; None if there are no numbers."""
    found = [ends for summary in summaries if (ends := _ends(summary)) is not None]
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def _ends(summary: TensorSummary) -> Ends | None:
    found, histogram = summary.moments, summary.histogram
    if found is None or histogram is None or histogram.counts is None:
        return None
    return histogram.ends() if found.low is None or found.high is None else (float(found.low), float(found.high))


def _histogram(summary: TensorSummary, width: int, ends: Ends | None, height: int) -> Iterator[Line]:
    found, histogram, own = summary.moments, summary.histogram, _ends(summary)
    if found is None or histogram is None or own is None:
        return
    if found.low is not None and found.low == found.high:
        yield "dim", f"all elements are {number(found.low)}" if found.finite == found.elements else ""
        return
    low, high = ends or own
    columns = max(min(width - 1, 64), 8)
    counts = histogram.columns(columns, low, high)
    yield from (("size", line) for line in bars(counts, height))
    left, right = number(low), number(high)
    what = "|z|" if found.low is None else f"peak {max(counts):,}"
    yield "dim", f"{left}{what.center(max(columns - len(left) - len(right), len(what) + 2))}{right}"


def findings(rows: Sequence[Finding], fix: str | None = None) -> Iterator[Line]:
    """Yield findings, each with its remedy."""
    if not rows:
        return
    yield "", ""
    for finding in rows[:FINDINGS]:
        style = finding.severity if finding.severity != "info" else "dim"
        word = "note" if finding.severity == "info" else finding.severity
        yield style, f"{word}: {shown(finding.message)} [{finding.id}]"
        if finding.fix and fix is None:
            yield "", f"  {shown(finding.fix)}"
    if len(rows) > FINDINGS:
        yield "dim", f"... {len(rows) - FINDINGS:,} more: f lists all"
    if fix is not None:
        yield "added", f"Fix: {shown(fix)}"

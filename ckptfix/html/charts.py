"""Histograms as SVG, and in a compact form, so that thousands of them fit in a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptfix.elements.histogram import Bins
from ckptfix.html.text import Html, number, tag
from ckptfix.ops.histogram import Distribution, ValueBins
from ckptfix.words import short

LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
"""The heights of bars, from zero to the highest bar; each is one of these characters."""

WIDTH, HEIGHT = 240, 64


def heights(bins: Bins | None, peak: int) -> str:
    """Return the bars as characters; every bar with an element is visible."""
    if bins is None or not peak:
        return ""
    top = len(LEVELS) - 1
    return "".join(LEVELS[max(1, round(top * count / peak)) if count else 0] for count in bins.counts)


def packed(found: Distribution) -> list[object]:
    """Return the data for the script: range and bars of both sides and of the difference, and their statistics."""
    peak = _peak(found.a, found.b)
    one = next((values.bins for values in (found.a, found.b) if values is not None and values.bins is not None), None)
    row: list[object] = [*_range(one)]
    row += [heights(values.bins, peak) if values is not None else "" for values in (found.a, found.b)]
    apart = found.difference
    row += [*_range(None if apart is None else apart.bins)]
    row.append("" if apart is None else heights(apart.bins, _peak(apart)))
    row += [_numbers(values) for values in (found.a, found.b, apart)]
    row.append(int(found.absolute))
    return row


def _range(bins: Bins | None) -> tuple[str, str]:
    return ("", "") if bins is None else (number(bins.low), number(bins.high))


def _peak(*sides: ValueBins | None) -> int:
    return max((max(side.bins.counts) for side in sides if side is not None and side.bins is not None), default=0)


COLUMNS = ("min", "max", "mean", "std", "zeros", "NaN", "infinite")
"""The statistics shown for the values of a side."""


def _numbers(values: ValueBins | None) -> list[str] | int:
    """Return the values of `COLUMNS`; 0 if there is no such side."""
    if values is None:
        return 0
    found = values.moments
    mean = None if found.average is None else found.average[0]
    floats = (found.low, found.high, mean, found.deviation)
    counts = (found.zeros, found.nan, found.infinite)
    return [*map(_shown, floats), *(short(count) if count else "" for count in counts)]


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{int(value):,}" if math.isfinite(value) and value == int(value) and abs(value) < 1e6 else f"{value:.4g}"


def drawn(found: Distribution) -> Html:
    """Draw the two charts of a distribution, with their ranges below."""
    row = packed(found)
    a, b, apart = str(row[2]), str(row[3]), str(row[6])
    what = "absolute values, A and B" if found.absolute else "A and B"
    parts = [_chart(((a, "ha"), (b, "hb")), what, row[:2])]
    if found.difference is not None:
        parts.append(_chart(((apart, "hd"),), "B \N{MINUS SIGN} A", row[4:6]))
    return tag("div", *parts, class_="charts")


def _chart(sides: Sequence[tuple[str, str]], what: str, between: Sequence[object]) -> Html:
    paths = [Html(f'<path class="{kind}" d="{path(bars)}"/>') for bars, kind in sides if bars]
    empty = [] if paths else [Html(f'<text x="{WIDTH // 2}" y="{HEIGHT // 2}">nothing to draw</text>')]
    svg = tag(
        "svg", *paths, *empty, class_="hist", viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img",
        aria_label=what,
    )  # fmt: skip
    low, high = between
    axis = tag("div", tag("span", low), tag("span", what, class_="what"), tag("span", high), class_="axis")
    return tag("figure", svg, axis)


def path(bars: str) -> str:
    """Return the SVG outline of bars given as characters."""
    step = WIDTH / len(bars)
    top = len(LEVELS) - 1
    points = [f"M0 {HEIGHT}"]
    for index, bar in enumerate(bars):
        height = HEIGHT - LEVELS.index(bar) * (HEIGHT - 4) / top
        points.append(f"V{height:.4g}H{(index + 1) * step:.5g}")
    return "".join([*points, f"V{HEIGHT}Z"])

"""The heat map: how much each kind of tensor changed in each layer."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from ckptfix.checkpoint import TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.html.text import Html, join, tag, text

LAYERS = 150
KINDS = 30
"""Maximum rows and columns."""

STEPS = 9
"""Number of colors in the scale."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A tensor in the map: `change` is ``||A - B|| / ||B||``, 0 if the values are equal; if it is None, see `sign`."""

    entry: TensorEntry
    change: float | None
    sign: str = ""


class Scale:
    """Colors for changes, on a logarithmic scale from the smallest to the largest, over at least a factor of ten."""

    def __init__(self, changes: Sequence[float]) -> None:
        found = [change for change in changes if change > 0]
        self.low, self.high = (min(found), max(found)) if found else (0.1, 1.0)
        if self.high / self.low < 10 or not math.isfinite(self.high / self.low):
            self.low = self.high / 10
        self.empty = not found

    def mark(self, change: float | None) -> str:
        """Return the class of a cell; empty for no color."""
        if not change:
            return ""
        share = math.log(max(change, self.low) / self.low) / math.log(self.high / self.low)
        return f"h{1 + round(share * (STEPS - 1))}"

    def legend(self) -> Html:
        """Draw the colors with their meaning."""
        if self.empty:
            return Html("")
        steps = [tag("span", class_=f"h{step} step") for step in range(1, STEPS + 1)]
        low, high = f"{self.low:.2g}", f"{self.high:.2g}"
        return tag("p", tag("span", _FORMULA), low, tag("span", *steps, class_="scale"), high, class_="legend")


_BAR, _MINUS = "\N{DOUBLE VERTICAL LINE}", "\N{MINUS SIGN}"
_FORMULA = f"relative change {_BAR}A {_MINUS} B{_BAR} / {_BAR}B{_BAR}"

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")


def placed(entry: TensorEntry) -> tuple[str, str]:
    """Return the layer of a tensor (its name up to the first number) and its kind (the rest of the name).

    Later numbers in the kind become one: ``experts.*.w1``. Numbers in the address of optimizer state do too.
    """
    parts = entry.key.split(".")
    number = next((index for index, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    at = f"{entry.at}/" if entry.at else ""
    if _NUMBER.search(at):
        return _NUMBER.sub("*", at).rstrip("/"), _NUMBER.sub("*", entry.key)
    cut = max(len(parts) - 1, 0) if number is None else number + 1
    return (at + ".".join(parts[:cut])).rstrip("/") or ".", _NUMBER.sub("*", ".".join(parts[cut:]))


def heat_map(spots: Sequence[Spot], scale: Scale) -> tuple[Html, str]:
    """Return the map as a table, and a sentence on what it leaves out."""
    cells: dict[str, dict[str, Spot]] = {}
    common: Counter[str] = Counter()
    for spot in spots:
        layer, kind = placed(spot.entry)
        common[kind] += 1
        row = cells.setdefault(layer, {})
        if kind not in row or _weight(spot) > _weight(row[kind]):
            row[kind] = spot
    kinds = [kind for kind, _ in common.most_common(KINDS)]
    order = {kind: index for index, kind in enumerate(dict.fromkeys(placed(spot.entry)[1] for spot in spots))}
    kinds.sort(key=order.__getitem__)
    layers = list(cells)
    if len(layers) > LAYERS:
        by_change = sorted(layers, key=lambda layer: -max(map(_weight, cells[layer].values())))
        kept = set(by_change[:LAYERS])
        layers = [layer for layer in layers if layer in kept]
    head = tag("tr", tag("th", "layer"), *(tag("th", tag("span", text(kind, 41)), scope="col") for kind in kinds))
    names = {layer: tag("th", tag("span", text(layer, 80)), scope="row") for layer in layers}
    body = [tag("tr", name, *(_cell(cells[layer].get(kind), scale) for kind in kinds)) for layer, name in names.items()]
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="heat"), class_="wide")
    left = []
    if len(cells) > len(layers):
        left.append(f"the {len(layers):,} layers that changed most, of {len(cells):,}")
    if len(common) > len(kinds):
        left.append(f"the {len(kinds):,} most common kinds of tensors, of {len(common):,}")
    return join((scale.legend(), table)), f"The map shows {' and '.join(left)}." if left else ""


def _weight(spot: Spot) -> float:
    return math.inf if spot.sign else spot.change or 0.0


def _cell(spot: Spot | None, scale: Scale) -> Html:
    if spot is None:
        return Html("<td></td>")
    if spot.sign:
        return tag("td", spot.sign, class_="sign", title=spot.entry.name)
    if not spot.change:
        return Html('<td class="same">\N{MIDDLE DOT}</td>')
    return tag("td", _brief(spot.change), class_=scale.mark(spot.change), title=f"{spot.entry.name}: {spot.change:.4g}")


def _brief(change: float) -> str:
    """Format a change with two digits: ``0.012``, ``3.4e-5``."""
    made = f"{change:.2g}"
    return re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1].replace('+', '')}{found[2]}", made)

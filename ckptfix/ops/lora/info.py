"""``ckptfix.lora_info``: what an adapter is, from its keys, shapes and configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.dataclass import dataclass
from ckptfix.errors import StrPath, about
from ckptfix.formats import located, open_checkpoint
from ckptfix.io.source import shares_open_files
from ckptfix.names.adapters import TITLES
from ckptfix.ops import adapter as reading
from ckptfix.ops.adapter import Adapter
from ckptfix.ops.lora.records import recorded
from ckptfix.ops.writing import existing
from ckptfix.shown import html
from ckptfix.words import plural, some


@dataclass(frozen=True, slots=True, repr=False)
class LoraInfo:
    """An adapter in numbers.

    Attributes:
        path: the file.
        adapter: the adapter.
        merged: what was merged into the file before, as its metadata states.
    """

    path: str
    adapter: Adapter
    merged: tuple[Mapping[str, Any], ...] = ()

    def __str__(self) -> str:
        """Return the lines that ``ckptfix lora info`` prints."""
        return "\n".join(self.lines)

    def __repr__(self) -> str:
        return f"<LoraInfo of {self.path!r}: {self.adapter.described()}>"

    def _repr_html_(self) -> str:
        return html(self.lines, [])

    @property
    def lines(self) -> tuple[str, ...]:
        """The description, one fact in a line."""
        one = self.adapter
        rows = [
            ("layout", TITLES[one.layout]),
            ("method", " and ".join(one.methods)),
            ("rank", _counted(one.ranks)),
            ("alpha", _counted(one.alphas)),
            ("scale", _counted(one.scales)),
            ("modules", f"{len(one.modules):,}"),
            ("targets", some([f"{name} ({count})" for name, count in one.targets.items()], 12)),
            ("layers", f"{one.layers:,}" if one.layers else ""),
            ("whole", some(list(one.whole), 6)),
            ("base", f"in the file, {plural(len(one.base), 'tensor')}" if one.base else one.base_model or ""),
            ("adapters", ", ".join(one.names)),
            ("missing", "; ".join((*one.missing, *one.wrong.values()))),
            ("unknown", some([f"{key} ({what})" for key, what in one.unknown.items()], 4)),
        ]
        return tuple(f"{name + ':':9} {value}" for name, value in rows if value)

    def as_dict(self) -> dict[str, Any]:
        """Return the description as a JSON object."""
        one = self.adapter
        return {
            "path": self.path,
            "layout": one.layout,
            "methods": list(one.methods),
            "ranks": [{"rank": rank, "modules": count} for rank, count in one.ranks.items()],
            "alphas": [{"alpha": alpha, "modules": count} for alpha, count in one.alphas.items()],
            "targets": [{"target": name, "modules": count} for name, count in one.targets.items()],
            "modules": [
                {"name": row.name, "method": row.method, "rank": row.rank, "alpha": row.alpha, "scale": row.scale}
                for row in one.modules.values()
            ],
            "layers": one.layers,
            "whole": list(one.whole),
            "base_model": one.base_model,
            "base_tensors": len(one.base),
            "adapters": list(one.names),
            "missing": [*one.missing, *one.wrong.values()],
            "unknown": [{"name": key, "what": what} for key, what in one.unknown.items()],
        }


def _counted(counts: Mapping[Any, int]) -> str:
    if len(counts) == 1:
        return f"{next(iter(counts)):g}"
    return some([f"{value:g} ({plural(count, 'module')})" for value, count in counts.items()], 8)


@checks_types
@shares_open_files()
def lora_info(
    source: StrPath, *, at: str | None = None, adapter: str | None = None, alpha: float | None = None
) -> LoraInfo:
    """Describe the adapter in `source`: layout, method, rank, alpha, targets, layers, base model, what is missing.

    Args:
        source: a file, or a folder with one; adapter_config.json is read beside it.
        at: address of the state dict that holds the adapter.
        adapter: the name of the adapter, in a file with several.
        alpha: the alpha of modules that state none.

    Raises:
        Refused: it holds no adapter, or several.
        CkptfixError: it cannot be read.
    """
    path = located(existing(source))
    with about(path):
        checkpoint = open_checkpoint(path)
        found = reading.read(checkpoint, at=at, name=adapter, alpha=alpha)
        return LoraInfo(path, found, tuple(recorded(checkpoint)))

"""Detection of an adapter's weights, which a loader of models does not accept."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.members import ADAPTER, kind_of
from ckptfix.names.adapter_signs import has_signs
from ckptfix.ops import quantized
from ckptfix.urls import as_path


def scan(path: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings about an adapter: what it is, and what is missing."""
    place = as_path(path)
    if kind_of(place.name) is not ADAPTER and not has_signs(entry.key for entry in checkpoint.entries):
        return
    # Only such files are worth the import.
    from ckptfix.ops.adapter import CONFIG, MOST_TEXT, glance

    adapter = glance(checkpoint)
    what = "" if adapter is None else f": {adapter.described()}"
    if kind_of(place.name) is ADAPTER:
        base = _text(quantized.json_beside(checkpoint, CONFIG).get("base_model_name_or_path"), MOST_TEXT)
        of = f" of {base}" if base else ""
        yield found("peft-adapter", f"{place.name} is a PEFT adapter{of}, not a whole model{what}")
    elif adapter is not None and adapter.base:
        yield found("adapter", f"a base model and an adapter that is not merged{what}")
    elif adapter is not None:
        yield found("adapter", f"an adapter, not a whole model{what}")
    if adapter is not None:
        yield from (found("adapter-incomplete", f"missing: {one}" if one.startswith(CONFIG) and "," in one
                          and "states the rank" not in one else one) for one in adapter.missing)  # fmt: skip


def _text(value: object, most: int) -> str:
    if not isinstance(value, str) or not value:
        return ""
    return printable(value if len(value) <= most else f"{value[:most]}...")

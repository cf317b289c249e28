"""Detection of a PEFT adapter's weights, which a loader of models does not accept."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ckptfix.errors import CkptfixError, printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.members import ADAPTER, kind_of
from ckptfix.io.source import open_source
from ckptfix.urls import as_path

CONFIG = "adapter_config.json"
"""File that PEFT writes beside the weights."""

MOST_CONFIG = 1 << 24
"""Greatest size of that file that is read, in bytes."""

MOST_TEXT = 200
"""Characters of a name in it that are shown."""


def scan(path: str) -> Iterator[Finding]:
    """Yield a finding for the file at `path` if its name is that of a PEFT adapter's weights."""
    place = as_path(path)
    if kind_of(place.name) is not ADAPTER:
        return
    base = _text(_config(str(place.with_name(CONFIG))).get("base_model_name_or_path"))
    of = f" of {base}" if base else ""
    yield found("peft-adapter", f"{place.name} is a PEFT adapter{of}, not a whole model")


def _config(path: str) -> dict[str, object]:
    """Return the contents of adapter_config.json; empty if it cannot be read."""
    try:
        with open_source(path) as source:
            if source.size > MOST_CONFIG:
                return {}
            said = json.loads(source.read(0, source.size))
    except (CkptfixError, OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        return ""
    return printable(value if len(value) <= MOST_TEXT else f"{value[:MOST_TEXT]}...")

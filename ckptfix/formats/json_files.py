"""JSON files beside a checkpoint, such as config.json: they help to describe it, and it can be read without them."""

from __future__ import annotations

import json
from typing import Any

from ckptfix.errors import CkptfixError
from ckptfix.io.source import is_file, open_source


def json_object(path: str, most: int) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file, no object, or more than `most` bytes."""
    try:
        if not is_file(path):
            return {}
        with open_source(path) as source:
            made = json.loads(source.read(0, source.size)) if source.size <= most else None
    except (CkptfixError, OSError, ValueError, RecursionError):
        return {}
    return made if isinstance(made, dict) else {}

"""The syntax trees of the package's modules, each parsed once for all tests of one process that look at it.

Modules of such tests have the mark ``xdist_group("layers")``, so that one process has them.
"""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ckptfix"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a module, which the garbage collector never looks through: it is thousands of objects."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.freeze()
        gc.enable()

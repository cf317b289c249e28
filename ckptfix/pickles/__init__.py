"""Reading and editing pickles as text: nothing is imported, nothing is called.

`parse` turns a stream into inert nodes, which know the bytes that pushed them. `splice` replaces strings in the
stream, and `emit` writes a fresh one.
"""

from ckptfix.pickles.graph import Call, Dict, Global, PersId, Set, Text
from ckptfix.pickles.machine import parse
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.patch import Patch, splice

__all__ = [
    "Call",
    "Dict",
    "Global",
    "Graph",
    "Patch",
    "PersId",
    "Set",
    "Text",
    "parse",
    "splice",
]  # fmt: skip

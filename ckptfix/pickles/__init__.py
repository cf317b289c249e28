"""Reading and editing pickles as text: nothing is imported, nothing is called.

`parse` turns a stream into inert nodes that know the bytes which pushed them, `splice` puts new strings
over the ones it is given, `emit` writes a fresh stream.
"""

from ckptfix.pickles.graph import Call, Dict, Global, PersId, Set, Text
from ckptfix.pickles.machine import parse
from ckptfix.pickles.names import Inner, Seen, Survey, survey
from ckptfix.pickles.parsed import Graph
from ckptfix.pickles.patch import Patch, splice

__all__ = [
    "Call", "Dict", "Global", "Graph", "Inner", "Patch", "PersId", "Seen", "Set", "Survey", "Text", "parse",
    "splice", "survey",
]  # fmt: skip

"""Keys of mappings of plain values: which values can be keys, and when two become equal."""

from __future__ import annotations

from ckptfix.errors import KeyConflict
from ckptfix.formats.plain.report import Made
from ckptfix.formats.torch.weights_only import canonical
from ckptfix.pickles import Call, Global
from ckptfix.pickles.graph import Node, label

PLAIN_KEYS = (str, int, float, type(None))
_HASHED = frozenset({"_codecs.encode", "builtins.complex", "torch.device", "torch.Size"})
"""Calls on torch's allowlist whose results are hashable."""


def hashable(value: Made) -> bool:
    """Return whether an unpickled `value` can be a key."""
    stack = [value]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, PLAIN_KEYS) or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is tuple:
            stack += node
        elif type(node) is Call:
            if not (type(node.func) is Global and canonical(node.func) in _HASHED):
                return False
        elif type(node) is not Global:
            return False
    return True


def refuse_conflicts(rows: list[tuple[Node, Node]], where: str) -> None:
    seen: set[tuple[str, str]] = set()
    for key, _ in rows:
        if not isinstance(key, PLAIN_KEYS):
            continue
        kind = "str" if isinstance(key, str) else "number"
        # Numbers are compared as text, because the text's hash is randomized; 1, 1.0 and True are one key.
        same = (kind, hex(int(key)) if isinstance(key, (int, float)) and _is_whole(key) else str(key))
        if same in seen:
            raise KeyConflict("two keys become one", where=f"{where}/{label(key)}" if where else label(key))
        seen.add(same)


def _is_whole(number: float) -> bool:
    return isinstance(number, int) or number.is_integer()

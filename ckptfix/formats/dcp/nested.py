"""The nested object of a flattened one, as torch rebuilds it: dicts by names, lists by numbers, gaps as None.

Source: torch/distributed/checkpoint/_traverse.py (``set_element``), and the planner of ``dcp_to_torch_save``.
"""

from __future__ import annotations

from itertools import pairwise

from ckptfix.errors import DamagedFile
from ckptfix.formats.dcp.metadata import Path
from ckptfix.pickles import Dict
from ckptfix.pickles.graph import Node

MAX_GAPS = 10_000
"""The limit of unfilled list positions in total: a number in a hostile path could create a list of any length."""


class Nesting:
    """A dict under construction, with the dicts and lists in it."""

    def __init__(self) -> None:
        self.root = Dict()
        self._inside: dict[int, dict[str, Node]] = {id(self.root): {}}
        self._lists: dict[int, list[Node]] = {}
        self._gaps = 0

    def put(self, path: Path, value: Node) -> None:
        """Set the value at `path`.

        Raises:
            DamagedFile: a different value is already there, or on the way.
        """
        at: Dict | list[Node] = self.root
        for key, following in pairwise(path):
            found = self._get(at, key, path)
            if found is None:
                found = self._made(following)
                self._set(at, key, found, path)
            elif id(found) not in self._inside and id(found) not in self._lists:
                raise _conflict(path)
            assert isinstance(found, Dict | list)
            at = found
        if self._get(at, path[-1], path) is not None:
            raise _conflict(path)
        self._set(at, path[-1], value, path)

    def _made(self, key: str | int) -> Dict | list[Node]:
        made: Dict | list[Node]
        if isinstance(key, int):
            made = []
            self._lists[id(made)] = made
        else:
            made = Dict()
            self._inside[id(made)] = {}
        return made

    def _get(self, at: Dict | list[Node], key: str | int, path: Path) -> Node:
        """Return the value at `key`; None if there is no value, since no container holds None otherwise."""
        if isinstance(at, Dict) is isinstance(key, int):
            raise _conflict(path)
        if isinstance(at, Dict):
            return self._inside[id(at)].get(str(key))
        assert isinstance(key, int)
        return at[key] if key < len(at) else None

    def _set(self, at: Dict | list[Node], key: str | int, value: Node, path: Path) -> None:
        if isinstance(at, Dict):
            self._inside[id(at)][str(key)] = value
            at.items.append((key, value))
            return
        assert isinstance(key, int)
        self._gaps += max(key - len(at), 0)
        if self._gaps > MAX_GAPS:
            raise DamagedFile(f"planner_data names item {key} of a list of {len(at)}", where=_shown(path))
        at += [None] * (key + 1 - len(at))
        at[key] = value


def _shown(path: Path) -> str:
    return "/".join(map(str, path))


def _conflict(path: Path) -> DamagedFile:
    return DamagedFile("planner_data has two values at the same path", where=_shown(path))

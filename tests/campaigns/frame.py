"""The frame of a campaign: a table of how its calls ended, and a folder to run in."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Table = tuple[Counter[str], list[str]]
"""How often calls ended in which way, and a line for each fault."""


def report(title: str, table: Table, most: int = 20) -> int:
    """Print a table and the first faults, and return the number of all faults."""
    ends, wrong = table
    print(f"{title}  {dict(sorted(ends.items()))}  {len(wrong)} wrong")
    for line in wrong[:most]:
        print(f"     {line}")
    return len(wrong)


def start(main: Callable[..., int]) -> None:
    """Run `main` in a folder of its own, with the count of the command line, and exit with 1 after a fault."""
    with tempfile.TemporaryDirectory() as name:
        sys.exit(main(Path(name).resolve(), *map(int, sys.argv[1:2])) > 0)

"""Third-party packages, each in a separate virtual environment under ``.bench/venvs``."""

from __future__ import annotations

import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from measure import quietly

ROOT = Path(__file__).resolve().parents[2]
VENVS = ROOT / ".bench" / "venvs"
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
SAME = ("torch", "numpy", "safetensors")
"""Packages that both sides have in the same version, so that a ratio does not compare their releases."""


def pins() -> list[str]:
    """What pip is given: the constraints of this repository, or else the versions of this interpreter."""
    if CONSTRAINTS.exists():
        return ["--constraint", str(CONSTRAINTS)]
    file = VENVS / "same-versions.txt"
    file.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in SAME))
    return ["--constraint", str(file)]


def interpreter(name: str, requirements: Sequence[str]) -> Path:
    """The python of the environment `name`, made and filled at the first call.

    Raises:
        Failed: pip could not install it, with its last words.
    """
    folder = VENVS / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"installing {' '.join(requirements)} in {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        quietly([python, "-m", "pip", "install", "--quiet", *pins(), *requirements])
        done.touch()
    return python

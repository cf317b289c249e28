"""Mutants of our own code that no test can kill, and why."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
"""`Mutant.what` -> why nobody can see the change."""

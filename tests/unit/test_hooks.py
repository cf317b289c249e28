"""Hooks: each that a room declares is registered, and what is registered exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ckptfix.io
from ckptfix import hooks
from ckptfix.command_table import STEPS
from ckptfix.hooks import Hook

pytestmark = pytest.mark.sampled(1_000)  # each row is a rule of its own

PACKAGE = Path(hooks.__file__).parent
SHOWN = {f"{verb}.{how}" for verb, how in (("diff", "page"), ("diff", "text"), ("doctor", "page"))} | {
    *("inspect.page", "inspect.text"),
}
"""Those of `ckptfix.shown`, which makes their names."""


def declared() -> set[str]:
    """The names of all hooks that are written out."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(r" = Hook\((.*)\)", path.read_text(encoding="utf-8")):
            if name == 'f"command.{command}"':
                found |= {f"command.{row.name}" for row in STEPS.values() if row.home or row.chained}
                continue
            written = re.fullmatch(r'"([\w.]+)"', name)
            assert written or path.name == "shown.py", f"{path}: {name}"
            found |= {written[1]} if written else set()
    return found


def test_each_hook_is_registered_and_none_besides() -> None:
    assert ckptfix.io and declared() | SHOWN == {*hooks._registered}


@pytest.mark.parametrize("name", sorted(hooks._registered))
def test_what_is_registered_exists(name: str) -> None:
    found: Hook[object] = Hook(name)
    assert callable(found.get()) or isinstance(found.get(), ModuleType | dict)


def test_what_a_store_answers() -> None:
    """The module is given in place of an object with these methods."""
    from ckptfix import urls

    wanted = {name for name in vars(urls.Stores) if not name.startswith("_")}
    assert wanted == {"kind", "entries", "size", "ahead"}
    assert all(callable(getattr(urls.STORES.get(), name)) for name in wanted)


def test_a_replaced_function_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks._registered, "one", "ckptfix.words:plural")
    one: Hook[object] = Hook("one")
    monkeypatch.setattr("ckptfix.words.plural", "another")
    assert one.get() == "another"
    with pytest.raises(KeyError):
        Hook[object]("unknown").get()


def test_a_hook_imports_nothing_until_it_is_used() -> None:
    script = (
        "import sys, ckptfix.io.source, ckptfix.fleet\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('ckptfix.cli', 'ckptfix.io.remote'))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"

"""Numbers that others say: what is one, and that nothing else reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckptfix
from ckptfix.numbers import MOST, seconds, whole_number

NONE = ["", "-", "+1", " 1", "1 ", "1\n", "1_0", "1.0", "1e3", "0x1", "abc", "\u00b2", "\u0661", "\uff11", "9" * 20,
        "9" * 5000, str(MOST + 1), "-1", -1, MOST + 1, 10**400, True, False, None, 1.0, b"1", [1]]  # fmt: skip


@pytest.mark.parametrize("value", NONE, ids=lambda value: ascii(value)[:20])
def test_what_is_no_number(value: object) -> None:
    assert whole_number(value) is None


@pytest.mark.parametrize("value", [0, 1, 4096, MOST])
def test_numbers_and_their_digits(value: int) -> None:
    assert whole_number(value) == whole_number(str(value)) == value
    assert whole_number(value, most=value) == value
    assert whole_number(value, least=value + 1) is None
    assert whole_number(-value, least=-value) == whole_number(f"-{value}", least=-value) == -value


@pytest.mark.parametrize(("text", "wanted"), [("1", 1.0), ("0.25", 0.25), ("nan", None), ("1e9", None), ("-1", None),
                                              ("inf", None), ("Mon, 01 Jan 2024", None), (None, None)])  # fmt: skip
def test_seconds(text: object, wanted: float | None) -> None:
    assert seconds(text) == wanted


def test_what_servers_and_plans_say_is_read_in_one_place() -> None:
    """Python's `int` and `isdecimal` take digits of all scripts, and as many as there are."""
    package = Path(ckptfix.__file__).parent
    allowed = {"int(job.key[:16], 16)", "int(at * 10**9)", "int(at.timestamp())", "int(changed_at.timestamp())",
               'int(meta["last_modified"].timestamp())', "int(email.utils.parsedate_to_datetime("}  # fmt: skip
    found = []
    for place in ("io/remote", "io/inplace", "fleet", "cli/fleet"):
        for path in (package / place).rglob("*.py"):
            for line in path.read_text().splitlines():
                for call in re.findall(r"(?<![\w.])int\([^()].*|\.is(?:decimal|digit|numeric)\(", line):
                    if not any(call.startswith(known) for known in allowed):
                        found.append(f"{path.name}: {line.strip()}")
    assert not found

"""Globals that run code are named wherever they hide, before anything is proposed; nothing is imported or run."""

from __future__ import annotations

import struct
from pathlib import Path

import hidden
import pytest

from ckptfix.formats.loading import hidden_globals
from ckptfix.io.source import open_source
from ckptfix.ops.doctor import examine as doctor
from ckptfix.ops.doctor.report import Diagnosis

HOW = [*hidden.PAYLOADS, hidden.SIBLING]
NAME = {how: name for how, (name, _) in hidden.PAYLOADS.items()} | {hidden.SIBLING: "posix.system"}


def dangers(done: Diagnosis) -> str:
    ids = ("dangerous-global", "nested-pickle", "hidden-pickle", "stacked-pickles")
    return "\n".join(f"{row.where}: {row.message}" for row in done.findings if row.id in ids)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layer", [*hidden.LAYERS, "folder"])
def test_what_runs_code_is_named_before_anything_is_proposed(layer: str, how: str, tmp_path: Path) -> None:
    path = hidden.wrapped(tmp_path, layer, how)
    done = doctor.examine(path)
    assert NAME[how] in dangers(done), done
    assert done.exit_code() == 1
    assert NAME[how] in done.sentence or done.findings[0].id == "dangerous-global"


@pytest.mark.parametrize("layer", [*hidden.LAYERS, "folder"])
def test_a_harmless_one_is_not_called_dangerous(layer: str, tmp_path: Path) -> None:
    done = doctor.examine(hidden.wrapped(tmp_path, layer, ""))
    assert not dangers(done)
    words = "unpack it first: tar -xf " if layer == "tar" else "ckptfix repair "
    assert done.cause is not None and (done.cause.fix or "").startswith(words)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layer", [*hidden.LAYERS, "folder"])
def test_no_repair_is_proposed_for_a_file_without_a_tensor(layer: str, how: str, tmp_path: Path) -> None:
    done = doctor.examine(hidden.wrapped(tmp_path, layer, how, tensor=False))
    assert NAME[how] in dangers(done)
    assert not [row.fix for row in done.findings if row.fix and "ckptfix repair" in row.fix]


FORMS = {"<f": 4, "<d": 8, "<e": 2, "<q": 8, "<i": 4, "<h": 2, ">f": 4, ">d": 8}


@pytest.mark.sampled(3, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_begin_as_a_pickle_does_are_numbers(form: str, tmp_path: Path) -> None:
    """A tensor full of one number, whose bytes are PROTO and any two that follow: 66565.0 is EXT1 to an unpickler."""
    width = FORMS[form]
    heads = [bytes((0x80, protocol, code, rest)) for protocol in range(2, 6) for code in range(256) for rest in (0, 71)]
    named = []
    for head in heads:
        # Several of the narrow ones together make the bytes; the wide ones have more behind them.
        number = (head + b"\x00" * 8)[: max(width, 4)]
        values = struct.unpack(f"{form[0]}{len(number) // width}{form[1]}", number)
        data = struct.pack(f"{form[0]}{len(values) * 4}{form[1]}", *values * 4)
        with open_source(saved(tmp_path / "x", data)) as reader:
            found = hidden_globals.look_into(reader, "archive/data/0", storage=True)
        named += [(head, found.names)] if found.names else []
    assert not named


def saved(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path

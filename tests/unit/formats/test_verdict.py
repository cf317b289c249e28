"""The verdict on weights_only=True, compared with torch's own unpickler: opcode by opcode, and after every edit."""

from __future__ import annotations

import io
import pickletools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Op, Tensor, assemble, legacy, push, state_dict_ops, torch_zip
from click.testing import CliRunner
from conftest import in_turn

from ckptfix.cli import commands
from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch import weights_only
from ckptfix.formats.torch.common import pickled_object
from ckptfix.ops.doctor.examine import examine
from ckptfix.pickles import parse

DATA = b"\0\0\x80\x3f" * 4
WEIGHT = Tensor("0", (4,), 4, location="cuda:0")

USES: dict[str, list[Op]] = {
    "INT": [("INT", 1)], "LONG": [("LONG", 1)], "LONG1": [("LONG1", 1 << 40)], "LONG4": [("LONG4", 1 << 40)],
    "BININT": [("BININT", 1)], "BININT1": [("BININT1", 1)], "BININT2": [("BININT2", 300)],
    "STRING": [("STRING", "a")], "BINSTRING": [("BINSTRING", "a")], "SHORT_BINSTRING": [("SHORT_BINSTRING", "a")],
    "BINBYTES": [("BINBYTES", b"a")], "SHORT_BINBYTES": [("SHORT_BINBYTES", b"a")],
    "BINBYTES8": [("BINBYTES8", b"a")], "BYTEARRAY8": [("BYTEARRAY8", b"a")],
    "UNICODE": [("UNICODE", "a")], "BINUNICODE": [("BINUNICODE", "a")],
    "SHORT_BINUNICODE": [("SHORT_BINUNICODE", "a")], "BINUNICODE8": [("BINUNICODE8", "a")],
    "NONE": ["NONE"], "NEWTRUE": ["NEWTRUE"], "NEWFALSE": ["NEWFALSE"], "FLOAT": [("FLOAT", 1.5)],
    "BINFLOAT": [("BINFLOAT", 1.5)], "EMPTY_LIST": ["EMPTY_LIST"], "EMPTY_DICT": ["EMPTY_DICT"],
    "EMPTY_TUPLE": ["EMPTY_TUPLE"], "EMPTY_SET": ["EMPTY_SET"], "LIST": ["MARK", "NONE", "LIST"],
    "DICT": ["MARK", "NONE", "NONE", "DICT"], "TUPLE": ["MARK", "NONE", "TUPLE"], "TUPLE1": ["NONE", "TUPLE1"],
    "TUPLE2": ["NONE", "NONE", "TUPLE2"], "TUPLE3": ["NONE", "NONE", "NONE", "TUPLE3"],
    "FROZENSET": ["MARK", "NONE", "FROZENSET"], "ADDITEMS": ["EMPTY_SET", "MARK", "NONE", "ADDITEMS"],
    "APPEND": ["EMPTY_LIST", "NONE", "APPEND"], "APPENDS": ["EMPTY_LIST", "MARK", "NONE", "APPENDS"],
    "APPENDS to a set": ["EMPTY_SET", "MARK", "NONE", "APPENDS"],
    "SETITEM": ["EMPTY_DICT", "NONE", "NONE", "SETITEM"],
    "SETITEMS": ["EMPTY_DICT", "MARK", "NONE", "NONE", "SETITEMS"],
    "SETITEMS on a Counter": [
        ("GLOBAL", "collections", "Counter"), "EMPTY_TUPLE", "REDUCE", "MARK", *push("a"), *push(1), "SETITEMS",
    ],
    "POP": ["NONE", "NONE", "POP"], "POP_MARK": ["NONE", "MARK", "NONE", "POP_MARK"], "DUP": ["NONE", "DUP", "POP"],
    "GET": ["NONE", ("PUT", 0), "POP", ("GET", 0)], "BINPUT": ["NONE", ("BINPUT", 0)],
    "BINGET": ["NONE", ("BINPUT", 0), "TUPLE1", ("BINGET", 0), "TUPLE2"], "PUT": ["NONE", ("PUT", 0)],
    "LONG_BINPUT": ["NONE", ("LONG_BINPUT", 0)], "MEMOIZE": ["NONE", "MEMOIZE"],
    "LONG_BINGET": ["NONE", ("LONG_BINPUT", 0), ("LONG_BINGET", 0), "TUPLE2"],
    "GLOBAL": [("GLOBAL", "collections", "OrderedDict")],
    "STACK_GLOBAL": [*push("collections"), *push("OrderedDict"), "STACK_GLOBAL"],
    "REDUCE": [("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE"],
    "REDUCE of a string": [*push("a"), "EMPTY_TUPLE", "REDUCE"],
    "REDUCE of what was made": [
        ("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE", "EMPTY_TUPLE", "REDUCE",
    ],
    "NEWOBJ": [("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "NEWOBJ"],
    "NEWOBJ of a string": [*push("a"), "EMPTY_TUPLE", "NEWOBJ"],
    "NEWOBJ_EX": [("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "EMPTY_DICT", "NEWOBJ_EX"],
    "OBJ": ["MARK", ("GLOBAL", "collections", "OrderedDict"), "OBJ"],
    "INST": ["MARK", ("INST", "collections", "OrderedDict")],
    "BUILD": [("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE", "EMPTY_DICT", "BUILD"],
    "FRAME": [("FRAME", 1), "NONE"], "PROTO": [("PROTO", 4), "NONE"], "STOP": ["NONE"], "MARK": ["MARK", "TUPLE"],
    "BINPERSID": [],
}  # fmt: skip
"""An opcode, or an opcode and what is odd about its use -> opcodes that push one value by it."""

UNREADABLE = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "PERSID"}
"""Opcodes that no checkpoint can have: ckptfix reads no file with them, or torch gives them no meaning."""


def accepts(data: bytes) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception:
            return False
    return True


def file_of(ops: list[Op], protocol: int = 2) -> bytes:
    body = state_dict_ops({"module.w": WEIGHT, "x": ops} if ops else {"module.w": WEIGHT})
    return torch_zip(assemble(("PROTO", protocol), *body, "STOP"), [DATA])


def test_every_opcode_is_tried() -> None:
    named = {use.partition(" ")[0] for use in USES} | UNREADABLE
    assert {info.name for info in pickletools.opcodes} == named


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("protocol", [2, 4])
def test_the_verdict_is_torchs(use: str, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    path.write_bytes(file_of(USES[use], protocol))
    accepted = accepts(path.read_bytes())
    reason = weights_only.refusal(pickled_object(open_checkpoint(path)).graph)
    assert (reason is None) == accepted, reason
    told = {finding.id for finding in examine(path).findings}
    assert ("unsupported-opcode" in told) == (not accepted)


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("use", [use for use in USES if use.isupper() and use not in ("LONG4",)])
def test_sanitize_really_sanitizes(use: str, tmp_path: Path) -> None:
    """What it writes with exit 0 is accepted."""
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    path.write_bytes(file_of(USES[use], 4))
    done = CliRunner().invoke(commands, ["sanitize", str(path), str(out)])
    assert done.exit_code in (0, 3) or not out.exists(), done.output
    if out.exists():
        assert accepts(out.read_bytes()), done.output


@pytest.mark.parametrize("place", ["sys_info", "keys"])
def test_the_other_pickles_of_a_legacy_file_count(place: str, tmp_path: Path) -> None:
    tensor = Tensor("0", (4,), 4, legacy=True)
    value: Any = [("SHORT_BINUNICODE", "0")]
    parts = {
        "sys_info": assemble(("PROTO", 2), "EMPTY_DICT", *value, "NONE", "SETITEM", "STOP"),
        "keys": assemble(("PROTO", 2), "EMPTY_LIST", *value, "APPEND", "STOP"),
    }
    whole = assemble(("PROTO", 2), *state_dict_ops({"w": tensor}), "STOP")
    path = tmp_path / "in.pth"
    path.write_bytes(legacy(whole, [("0", 4, DATA)], **{place: parts[place]}))
    assert not accepts(path.read_bytes())
    assert weights_only.refusal(pickled_object(open_checkpoint(path)).graph)
    path.write_bytes(legacy(whole, [("0", 4, DATA)]))
    assert accepts(path.read_bytes())
    assert weights_only.refusal(pickled_object(open_checkpoint(path)).graph) is None


VERBS = {
    "strip-module": ["strip-module"], "add-module": ["add-module"], "to-cpu": ["to-cpu"],
    "map-location": ["map-location", "cuda:0=cuda:1"], "slim": ["slim"], "sanitize": ["sanitize"],
    "extract": ["extract"], "legacy": ["convert", "--to", "legacy"], "zip": ["convert", "--to", "zip"],
}  # fmt: skip


EDITS = [(use, verb) for turn, use in enumerate(USES) for verb in in_turn(tuple(VERBS), turn, 3)]
"""Each opcode with each verb in a long run; else with a third of them, the next with others."""


@pytest.mark.campaign
@pytest.mark.parametrize(("use", "verb"), EDITS)
def test_no_edit_makes_an_accepted_file_a_refused_one(use: str, verb: str, tmp_path: Path) -> None:
    """Whatever protocol the stream claims, and wherever it claims it."""
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    for protocol in (2, 3, 4, 5):
        path.write_bytes(file_of(USES[use], protocol))
        if not accepts(path.read_bytes()):
            continue
        out.unlink(missing_ok=True)
        command, *options = VERBS[verb]
        CliRunner().invoke(commands, [command, str(path), str(out), *options])
        if out.exists():
            assert accepts(out.read_bytes()), (protocol, parse(_pickle(out)).rare)
            assert weights_only.refusal(pickled_object(open_checkpoint(out)).graph) is None


def _pickle(path: Path) -> bytes:
    return pickled_object(open_checkpoint(path)).graph.data


@pytest.mark.parametrize("length", [10, 300])
def test_a_python_2_name_stays_accepted_however_long_it_grows(length: int) -> None:
    from ckptfix.pickles import Dict, Text, splice
    from ckptfix.pickles.patch import string_patches

    graph = parse(assemble(("PROTO", 2), "EMPTY_DICT", ("SHORT_BINSTRING", "a"), "NONE", "SETITEM", "STOP"))
    assert isinstance(graph.root, Dict)
    name = graph.root.items[0][0]
    assert isinstance(name, Text)
    new = parse(splice(graph, string_patches(graph, [(name, "n" * length)])))
    assert isinstance(new.root, Dict) and str(new.root.items[0][0]) == "n" * length
    assert weights_only.refusal(new) is None

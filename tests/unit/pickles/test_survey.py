"""`survey` names what the machine names, and goes on where the machine stops."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import hidden
import pytest
from builders import assemble, push

from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.ops.doctor import examine as doctor
from ckptfix.pickles.names import NameSurvey, survey

FIXTURES = Path(__file__).parents[3] / "fixtures"


def named(data: bytes) -> NameSurvey:
    return survey(lambda offset, length: data[offset : offset + length], 0, len(data))


def names(data: bytes) -> list[str]:
    return [f"{row.module}.{row.name}" for row in named(data).seen]


def test_it_names_what_the_machine_names() -> None:
    looked = 0
    for path in sorted(FIXTURES.rglob("*.pth")):
        parts = maybe_pickled_object(open_checkpoint(path))
        if parts is None:
            continue
        graph = parts.graph
        found = named(graph.data[graph.start : graph.end])
        assert {(row.module, row.name) for row in found.seen} == {(row.module, row.name) for row in graph.globals}
        assert found.whole and found.end == graph.end - graph.start
        looked += 1
    assert looked > 3


def test_nothing_behind_its_end_is_looked_at_and_windows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a stream is named as a stream that ends there, however much of it is read at once."""
    value = {"text": "posix" * 9, "numbers": [1, 70_000, 1 << 40, 2.5], "set": {Path}, "code": b"x" * 40}
    for protocol in range(6):
        parts = pickle.dumps(value, protocol) + assemble(*hidden.SYSTEM, "STOP") + P0
        for stop in range(0, len(parts) + 1, 3):
            whole = named(parts[:stop])
            for window, ahead in ((400, 100), (1 << 20, 1 << 12)):
                monkeypatch.setattr("ckptfix.pickles.names.WINDOW", window)
                monkeypatch.setattr("ckptfix.pickles.names.AHEAD", ahead)
                asked: list[int] = []

                def read(at: int, length: int, asked: list[int] = asked, parts: bytes = parts) -> bytes:
                    asked.append(at + length)
                    return parts[at : at + length]

                assert survey(read, 0, stop) == whole
                assert max(asked, default=0) <= stop
            monkeypatch.undo()


P0 = b"cposix\nsystem\n(S'true'\ntR."
LONG = b"S'" + b"a" * 2_500_000 + b"'\n0"
MANY = assemble(("BININT1", 1), "POP") * 700_000
KINDS: dict[str, bytes] = {
    "behind-bytes": assemble(("PROTO", 2), ("BINBYTES", bytes(1_500_000)), "POP", *hidden.SYSTEM, "STOP"),
    "behind-opcodes": assemble(("PROTO", 2)) + MANY + assemble(*hidden.SYSTEM, "STOP"),
    "behind-a-long-line": LONG + P0,
    "string-first": b"S'hello'\n0" + P0,
    "unicode-first": b"Vhello\n0" + P0,
    "int-first": b"I1\n0" + P0,
    "none-first": b"N0" + P0,
    "carriage-returns": b"\x80\x02cposix\r\nsystem\r\n)R.",
    "underflow-first": assemble(("PROTO", 2), "POP", "POP", *hidden.SYSTEM, "STOP"),
    "items-on-a-global": assemble(("PROTO", 2), ("GLOBAL", "a", "b"), *push(1), *push(1), "SETITEM", *hidden.SYSTEM),
    "broken-behind": assemble(("PROTO", 2), *hidden.SYSTEM) + b"\xff\xff",
    "second": assemble(("PROTO", 2), *push(1), "STOP", ("PROTO", 2), *hidden.SYSTEM, "STOP"),
    "memo-of-lines": assemble(
        ("UNICODE", "posix"), ("PUT", 5), "POP", ("STRING", "system"), ("PUT", 6), "POP", ("GET", 5), ("GET", 6),
        "STACK_GLOBAL", ("UNICODE", "true"), "TUPLE1", "REDUCE", "STOP"),
    "nested": pickle.dumps({"a": assemble(("PROTO", 2), *hidden.SYSTEM, "STOP")}, 4),
    "nested-as-latin-1": pickle.dumps({"a": assemble(("PROTO", 2), *hidden.SYSTEM, "STOP")}, 2),
    "nested-of-protocol-0": pickle.dumps({"a": P0}, 4),
    "nested-archive": pickle.dumps({"a": hidden.zipped({"m.pkl": assemble(("PROTO", 2), *hidden.SYSTEM, "STOP")})}, 4),
    **{f"zip-of-method-{how}": hidden.zipped({"a.txt": b"x", "m.pkl": P0}, method=how) for how in (0, 8, 12, 14)},
    "object-array": b"\x93NUMPY\x01\x00\x40\x00"
    + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(64)
    + assemble(("PROTO", 2), *hidden.SYSTEM, "STOP"),
}  # fmt: skip


@pytest.mark.sampled(1_000)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_doctor_names_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(KINDS[kind])
    done = doctor.examine(path)
    rows = [row for row in done.findings if row.id == "dangerous-global"]
    assert rows and all("posix.system" in row.message for row in rows), done.findings
    assert done.exit_code() == 1
    assert not [row.fix for row in done.findings if row.fix and "ckptfix" in row.fix]


def test_a_distributed_checkpoint_too(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(assemble(("PROTO", 2), *hidden.SYSTEM, "STOP"))
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    rows = [row for row in doctor.examine(tmp_path).findings if row.id == "dangerous-global"]
    assert [row.where for row in rows] == [".metadata"]


@pytest.mark.parametrize("ops", [hidden.MEMO, hidden.INST, hidden.OBJ, hidden.VALUE])
def test_names_come_from_the_stack(ops: Sequence[object]) -> None:
    assert names(assemble(("PROTO", 4), *ops, "STOP")) == ["posix.system"]  # type: ignore[arg-type]


@pytest.mark.parametrize("between", [("NONE", "POP"), (("BININT1", 1), "POP"), ("EMPTY_LIST", "DUP", "POP", "POP")])
def test_values_that_come_and_go_leave_the_names_on_the_stack(between: Sequence[object]) -> None:
    ops = (*push("posix"), *between, *push("system"), *between, "STACK_GLOBAL", "STOP")
    assert names(assemble(("PROTO", 4), *ops)) == ["posix.system"]  # type: ignore[arg-type]


def test_text_is_no_pickle(tmp_path: Path) -> None:
    for text in ("class Net(Module):\n  x = 1\n.", "import os\nos.system\n.", "cat\n", "Not Found.\n", "(below)\n."):
        path = tmp_path / "a.txt"
        path.write_text(text)
        assert [row.id for row in doctor.examine(path).findings] == ["text-file"], text


def test_generators_of_numpy_and_lists_of_torchscript_are_harmless() -> None:
    from ckptfix.formats.torch.dangerous_globals import is_dangerous

    for name in ("numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__bit_generator_ctor",
                 "torch.jit._pickle.build_intlist", "joblib.numpy_pickle.NumpyArrayWrapper"):  # fmt: skip
        assert not is_dangerous(name)
    for name in ("posix.system", "posix\r.system", "torch._utils.os.system", "numpy.random._pickle.x.os.system"):
        assert is_dangerous(name)

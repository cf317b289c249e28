"""Calls that are taken whole stand for the same nodes as opcodes that are read one by one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from ckptfix.errors import BadPickle
from ckptfix.pickles import Call, Dict, Global, Graph, PersId, Set, Text, parse
from ckptfix.pickles.folded import Phrases
from ckptfix.pickles.machine import Machine, finish
from ckptfix.pickles.rows import Rows


def step_by_step(data: bytes) -> Graph:
    machine = Machine(Graph(data, 0))
    machine.folds = False
    return finish(machine)


def told(graph: Graph) -> list[object]:
    """The object in words: every node once, with its place in the stream."""
    seen: dict[int, int] = {}
    lines: list[object] = []
    stack: list[Any] = [graph.root, graph.persids, graph.gets]
    kept: list[object] = [graph]
    while stack:
        node = stack.pop()
        if isinstance(node, (Text, Call, PersId, Dict, Set, Global, list)) or (node and isinstance(node, tuple)):
            if id(node) in seen:
                lines.append(seen[id(node)])
                continue
            kept.append(node)
            seen[id(node)] = len(seen)
        match node:
            case Text():
                lines.append((str(node), node.start, node.end))
                stack.append(node.origin)
            case Call():
                lines.append((node.how, node.position))
                stack += [node.func, node.args, node.items, node.state, node.elements, node.kwargs]
            case PersId():
                lines.append((node.position, node.tuple_end))
                stack.append(node.pid)
            case Global():
                lines.append(node.full)
            case Dict():
                stack.append(node.items)
            case Set():
                stack.append(node.elements)
            case list() | tuple():
                lines.append((type(node), len(node)))
                stack += node
            case _:
                lines.append(repr(node))
    return lines


def outcome(read: Callable[[bytes], Graph], data: bytes) -> object:
    try:
        graph = read(data)
    except BadPickle as error:
        return type(error), error.message, error.offset
    return told(graph), graph.end, graph.misuses, graph.rare, [node.start for node in graph.globals]


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Tensors of every rank, tied names, storages with several views, a state dict and an optimizer's state."""
    torch.manual_seed(0)
    shapes = [(3,), (2, 3), (), (2, 1, 3), (1, 2, 1, 2), (300, 2), (0,), (1,) * 6, (70000,)]
    weights = {f"layer.{i}.weight": torch.empty(shapes[i % len(shapes)]) for i in range(90)}
    whole = torch.empty(6, 4)
    weights |= {"tied": weights["layer.60.weight"], "rows": whole[1:], "columns": whole[:, :2], "shape": whole[0]}
    weights |= {f"half.{i}": torch.empty(2, 2, dtype=torch.float16, requires_grad=i % 3 == 0) for i in range(20)}
    state = {i: {"step": torch.tensor(1.0), "exp_avg": torch.empty(5)} for i in range(30)}
    path = tmp_path_factory.mktemp("folded") / "all.pth"
    torch.save({"weights": weights, "again": weights, "state": state, "epoch": 3}, path)
    with ZipFile(path) as file:
        return file.read("all/data.pkl")


@pytest.mark.slow
def test_folded_calls_are_those_of_the_opcodes(stream: bytes) -> None:
    graph = parse(stream)
    assert len(graph.calls) > 90, "most of it is folded"
    assert len(graph.loose_persids) < 60
    assert outcome(parse, stream) == outcome(step_by_step, stream)
    assert graph.persids and not graph.calls and graph.phrases is None


def test_a_mold_is_looked_for_once_for_each_kind_of_call(stream: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives is kept: the calls that follow are compared with it, each by a few of its bytes."""
    looked: list[int] = []
    new = Phrases._new_mold

    def counted(self: Phrases, func: Global, at: int, memo: dict[int, Any]) -> Any:
        looked.append(at)
        return new(self, func, at, memo)

    monkeypatch.setattr(Phrases, "_new_mold", counted)
    graph = parse(stream)
    assert len(graph.calls) > 90 and len(looked) < len(graph.calls) // 2


def test_arguments_that_are_looked_at_are_not_kept_and_those_that_are_asked_for_are(stream: bytes) -> None:
    call = parse(stream).calls[0]
    assert call.peek() is not call.peek()
    assert call.folded is not None
    assert call.args is call.args
    assert call.folded is None
    assert call.peek() is call.args


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
def test_damaged_streams_are_read_alike(stream: bytes, seed: int) -> None:
    pick = random.Random(seed)
    changed = 0
    for _ in range(60):
        data = bytearray(stream)
        for _ in range(pick.choice((1, 1, 2, 5))):
            at = pick.randrange(len(data))
            kind = pick.randrange(4)
            if kind == 0:
                data[at] ^= 1 << pick.randrange(8)
            elif kind == 1:
                data[at] = pick.choice(b"rqhj\x94()tRQKMJX.0\x85\x86")
            elif kind == 2:
                del data[at : at + pick.randrange(1, 6)]
            else:
                start = pick.randrange(len(data))
                data[at:at] = data[start : start + pick.randrange(1, 200)]
        mutant = bytes(data)
        changed += mutant != stream
        assert outcome(parse, mutant) == outcome(step_by_step, mutant)
    assert changed > 50


@pytest.mark.parametrize("seed", range(6))
def test_a_mapping_in_pieces_has_what_was_set_on_it(tmp_path: Path, seed: int) -> None:
    """Its items are set in any number of steps, and what is made between them and thrown away is none of them."""
    torch.save({f"layer.{i}": torch.full((2,), float(i)) for i in range(200)}, tmp_path / "in.pth")
    with ZipFile(tmp_path / "in.pth") as file:
        data = file.read("in/data.pkl")
    pick = random.Random(seed)
    begins = [place.start() for place in re.finditer(rb"X.\0\0\0layer\.", data, re.DOTALL)]
    pieces = [data[start:stop] for start, stop in pairwise([*begins, len(data) - 2])]
    made, kept = data[: begins[0]], []
    number = 0
    while number < len(pieces):
        length = pick.choice((1, 2, 17, 30, 60))
        # The first call of all is kept: what the others fetch from the memo is in it.
        keep = not number or pick.random() < 0.6
        made += b"".join(pieces[number : number + length]) + (b"u(" if keep else b"1(")
        kept += [f"layer.{i}" for i in range(number, min(number + length, len(pieces)))] if keep else []
        number += length
    made += b"u."
    graph = parse(made)
    assert type(graph.root) is Dict and len(kept) < 200
    assert [str(key) for key, _ in graph.root.items] == kept
    assert outcome(parse, made) == outcome(step_by_step, made)


def numbered(number: int, code: bytes = b"r") -> bytes:
    return code + number.to_bytes(4, "little")


@pytest.mark.parametrize("place", range(7))
def test_a_memo_number_that_was_given_before(stream: bytes, place: int) -> None:
    """The key before a call is given a number that the call gives anew; it is fetched behind that."""
    phrases = parse(stream).phrases
    assert isinstance(phrases, Phrases)
    first = phrases.firsts[10]
    data = stream.replace(numbered(first - 1), numbered(first + place), 1)
    data = data[:-1] + numbered(first + place, b"j") + b"0" + numbered(first + place, b"j") + b"."
    assert data != stream
    assert outcome(parse, data) == outcome(step_by_step, data)


@pytest.mark.parametrize("place", range(7))
def test_memo_numbers_that_two_calls_give(stream: bytes, place: int) -> None:
    """A call gives the numbers of the call before it anew."""
    phrases = parse(stream).phrases
    assert isinstance(phrases, Phrases)
    first, after = phrases.firsts[10], phrases.firsts[11]
    data = stream
    for step in range(7):
        data = data.replace(numbered(after + step), numbered(first + step), 1)
    data = data[:-1] + numbered(first + place, b"j") + b"."
    assert outcome(parse, data) == outcome(step_by_step, data)


@pytest.mark.parametrize("every", [1, 2, 3, 16, 17, 40])
def test_numbers_that_were_given_before_a_run_of_calls(stream: bytes, every: int) -> None:
    """Calls are read by the run, and of a run those are given up that give a number which was given before."""
    phrases = parse(stream).phrases
    assert isinstance(phrases, Phrases)
    given = b"".join(b"N" + numbered(first + 4) + b"0" for first in phrases.firsts[3::every])
    data = stream[:2] + given + stream[2:]
    assert outcome(parse, data) == outcome(step_by_step, data)
    again = data[:-1] + b"".join(b"0" + numbered(first + 4, b"j") for first in phrases.firsts[::7]) + b"."
    assert outcome(parse, again) == outcome(step_by_step, again)


def test_where_the_locations_of_calls_stand(stream: bytes) -> None:
    """For each mold the first call of it, and how many there are."""
    phrases = parse(stream).phrases
    assert isinstance(phrases, Phrases)
    wanted = [(phrases.call(list(phrases.of).index(place)).position, list(phrases.of).count(place))
              for place in dict.fromkeys(phrases.of)]  # fmt: skip
    assert len(wanted) > 5
    assert [(position, count) for position, _, count in phrases.locations()] == wanted


def test_numbers_that_are_counted(stream: bytes) -> None:
    """MEMOIZE gives the number of what is in the memo, folded or not."""
    data = stream[:-1] + b"\x940" * 3 + b"h\x05" + b"\x94."
    assert outcome(parse, data) == outcome(step_by_step, data)
    counted = stream[:-1] + b"\x94j" + (2**16).to_bytes(4, "little") + b"."
    assert outcome(parse, counted) == outcome(step_by_step, counted)


def test_an_edit_of_names_leaves_them_folded(stream: bytes, tmp_path: Path) -> None:
    import ckptfix
    from ckptfix.formats import open_checkpoint
    from ckptfix.formats.torch.common import pickled_object
    from ckptfix.formats.torch.edit import patches
    from ckptfix.ops.rename import sites

    source = tmp_path / "source.pth"
    torch.save({f"module.{i}": torch.full((2,), float(i)) for i in range(100)}, source)
    checkpoint = open_checkpoint(source)
    parts = pickled_object(checkpoint)
    assert patches(parts.found, sites.strip(checkpoint).edits)
    assert len(parts.graph.calls) > 40
    assert ckptfix.strip_module(source, tmp_path / "out.pth").account.tensors == 100
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert [float(value[0]) for value in loaded.values()] == list(range(100))


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_calls_are_left_to_the_mapping_behind_other_values(before: int, tmp_path: Path) -> None:
    """Whatever was set first: a mapping in which tensors stand keeps their rows as they are written."""
    state: dict[str, object] = {f"value.{number}": number for number in range(before)}
    torch.save(state | {f"w.{number}": torch.ones(2) for number in range(100)}, tmp_path / "in.pth")
    with ZipFile(tmp_path / "in.pth") as archive:
        data = archive.read("in/data.pkl")
    root = parse(data).root
    assert type(root) is Dict and type(root.rows) is Rows
    assert [str(key) for key, _ in root.items] == [*state, *(f"w.{number}" for number in range(100))]


def test_none_from_the_memo_is_no_call_to_fold() -> None:
    # MEMOIZE ends the folding, and BINGET fetches None.
    assert parse(b"\x80\x04]\x94(N\x94h\x01e.").root == [None, None]


def test_a_search_for_modules_leaves_them_folded(tmp_path: Path) -> None:
    from ckptfix.formats.torch.module import find_modules
    from ckptfix.pickles.graph import children
    from ckptfix.pickles.rows import unfolded_children

    before = {"epoch": {"a": 1}, "net": torch.nn.Linear(2, 2)}
    torch.save(before | {f"w.{number}": torch.ones(2) for number in range(100)}, tmp_path / "in.pth")
    with ZipFile(tmp_path / "in.pth") as archive:
        data = archive.read("in/data.pkl")
    root = parse(data).root
    assert [at for at, _ in find_modules(root)] == ["net"]
    assert type(root) is Dict and type(root.rows) is Rows
    loose = list(unfolded_children(root))
    assert [row for row in children(root) if row in loose] == loose
    assert len(loose) < 50
    assert {name for name, _ in loose} >= {"epoch", "net"}

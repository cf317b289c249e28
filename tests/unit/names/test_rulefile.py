"""Rules files with operations: what a line says, what is refused, and the same run backwards."""

from __future__ import annotations

import pytest

from ckptfix.errors import CkptfixError
from ckptfix.names.rulefile import Rules, read


def rules(*lines: str) -> Rules:
    return read("\n".join(lines), "rules.txt")


def test_names_and_operations_stand_side_by_side() -> None:
    operations = ["q.{n}.qkv -> q.{n}.{q,k,v} | split | transpose", "j | drop"]
    found = rules("# head", "a b", "x.{n} -> y.{n+1} # tail", *operations)
    assert found.names == {"a": "b", "x.{n}": "y.{n+1}"}
    assert [str(rule) for rule in found.tensors] == operations
    assert [rule.line for rule in found.tensors] == [4, 5]
    assert found.tensors[0].new is not None
    assert found.tensors[0].new.names == ("q.{n}.q", "q.{n}.k", "q.{n}.v")


def test_a_number_of_one_side_runs() -> None:
    (rule,) = rules("m.{n}.e.{x}.{a,b} -> m.{n}.{c+2}.w | concat | stack | unstack dim=1").tensors
    assert (rule.old.running, rule.old.start, rule.old.axes) == ("x", 0, 2)
    assert rule.new is not None
    assert (rule.new.running, rule.new.start, rule.new.names) == ("c", 2, ("m.{n}.{c}.w",))


def test_a_line_may_begin_with_a_list() -> None:
    (rule,) = rules("{a,b} -> c | concat").tensors
    assert rule.old.names == ("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "back"),
    [
        ("a -> b | transpose", "b -> a | transpose"),
        ("a -> b | transpose dims=1,2", "b -> a | transpose dims=1,2"),
        ("a -> b | permute dims=2,0,1", "b -> a | permute dims=1,2,0"),
        ("a -> {b,c} | split dim=1 sizes=3,1", "{b,c} -> a | concat dim=1 sizes=3,1"),
        ("a.{n} -> b | stack dim=1", "b -> a.{n} | unstack dim=1"),
        ("{q,k,v} -> w | interleave heads=8 kv=2", "w -> {q,k,v} | deinterleave heads=8 kv=2"),
        ("a -> b | split parts=3 | interleave kv=2 heads=8", "b -> a | deinterleave kv=2 heads=8 | concat parts=3"),
        ("a -> b | reshape from=o,2*i,1 to=o,i,2", "b -> a | reshape from=o,i,2 to=o,2*i,1"),
        ("a -> b | rope heads=8 to=half", "b -> a | rope heads=8 to=interleaved"),
        ("a -> b | rows from=5 to=8 fill=0", "b -> a | rows from=8 to=5 fill=0"),
        ("a -> b | tie", "b -> a | untie"),
        ("l.{n}.qkv -> m.{n+1}.{q,k} | transpose | split", "m.{n}.{q,k} -> l.{n-1}.qkv | concat | transpose"),
    ],
)
def test_every_operation_has_its_inverse(line: str, back: str) -> None:
    found = rules(line)
    assert [str(rule) for rule in found.reversed().tensors] == [back]
    if "rows" not in line:
        assert [str(rule) for rule in found.reversed().reversed().tensors] == [line]


def test_names_are_turned_with_their_numbers() -> None:
    assert rules("a.{n} -> b.{n+1}.w", "x -> y", "h.{*} -> k.{*}").reversed().names == {
        "b.{n}.w": "a.{n-1}",
        "y": "x",
        "k.{*}": "h.{*}",
    }


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a | drop", "`drop` cannot be reversed"),
        ("a -> b | rows to=4", "without the original number of rows"),
        ("a -> b | rows from=8 to=4", "rows 4 to 7 were cut off"),
        ("a.{n}.{m} -> b.{n}", "is not in"),
        ("a.{n} -> b.{n}.{n}", "appears 2 times"),
    ],
)
def test_what_has_no_inverse_is_refused_by_its_line(line: str, why: str) -> None:
    found = rules("x y", line)
    with pytest.raises(CkptfixError, match=why) as caught:
        found.reversed()
    assert caught.value.where == "line 2"


def test_two_names_of_one_are_not_reversed() -> None:
    with pytest.raises(CkptfixError, match="becomes 'c' too"):
        rules("a c", "b c").reversed()


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a -> b | turn", "no operation called 'turn'"),
        ("a -> b |", "a bar has no operation"),
        ("a -> b | transpose size=2", "`transpose` has no option"),
        ("a -> b | transpose dims=1", "swaps two dimensions"),
        ("a -> b | permute", "needs dims="),
        ("a -> b | permute dims=0,2", "names each dimension once"),
        ("a -> b | rope heads=2 to=full", "to=half or to=interleaved"),
        ("a -> b | rope to=half", "needs heads="),
        ("a -> b | rope heads=0 to=half", "must be positive"),
        ("a -> b | rows to=4,5", "is not a number"),
        ("a -> b | rows to=5 fill=1", "pads with zeros"),
        ("a -> b | reshape from=o,i to=o,j", "i, j on one side only"),
        ("a -> b | reshape from=o,i! to=o", "not a list of sizes"),
        ("a -> b | split", "but 'b' stands for one"),
        ("a -> {b,c}", "expected|several"),
        ("{a,b} -> c | transpose", "nothing joins"),
        ("{a,b} -> {c,d} | concat", "nothing makes"),
        ("a -> {b,c} | split sizes=1,2 parts=2", "takes sizes=, or parts="),
        ("a -> {b,c} | split kv=2", "takes sizes="),
        ("{a,b} -> c | interleave", "needs groups="),
        ("{a,b}.{c,d} -> e | concat", "one list"),
        ("{a,a} -> e | concat", "each part once"),
        ("a.{n}.{m} -> b | stack", "are not in"),
        ("a.{*} -> b | transpose", "on both sides"),
        ("a -> b | transpose | drop", "must be the only operation"),
        ("a -> b | drop", "expected `name"),
        ("a -> b | tie | tie", "must be the only operation"),
        ("{a,b} -> c | tie", "single name on each side"),
        ("a b c | transpose", "found 3 words"),
        ("a -> b | transpose dims=0,1 dims=0,1", "appears twice"),
    ],
)
def test_bad_lines_are_refused_by_number(line: str, why: str) -> None:
    if "several" in why:
        assert rules(line).names == {"a": "{b,c}"}  # without an operation a list is a name, as it always was
        return
    with pytest.raises(CkptfixError, match=why) as caught:
        rules("# head", line)
    assert (caught.value.path, caught.value.where) == ("rules.txt", "line 2")

from __future__ import annotations

import pytest

from ckptfix import words
from ckptfix.cli.shared import tables


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_995, "10.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (44_700_000, "44.7 MB"),
        (2 * 10**12, "2.00 TB"),
        (2**63, "9.22 EB"),
        (2**80, "1208926 EB"),
    ],
)
def test_sizes_have_three_digits(nbytes: int, text: str) -> None:
    assert tables.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"), (7260, "2 h 01 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def test_a_table_keeps_numbers_and_text_as_they_are_and_shows_escapes() -> None:
    text = tables.table([("1e5", "007"), ("a\x1b[31m", "12")], ["name", "n"], right=[1])
    assert text.splitlines()[2:] == ["1e5        007", "a\\x1b[31m   12"]


def test_no_rows_no_table() -> None:
    assert tables.table([], ["name"]) == ""


def test_facts_line_up_and_leave_out_what_is_empty() -> None:
    assert tables.facts([("a", ["1"]), ("none", []), ("long", ["2", "3\n"])]) == ["a     1", "long  2", "      3\\n"]


def test_more_says_how_to_see_the_rest() -> None:
    assert tables.more(0) == ""
    assert tables.more(1234, "lines") == "... 1,234 more lines (--limit 0 shows all)"


def test_natural_order() -> None:
    huge = "l." + "9" * 5000
    ordered = ["l", "l.2.w", "l.02.w", "l.10.w", huge, "l.w"]
    assert sorted(["l.10.w", huge, "l.2.w", "l.02.w", "l.w", "l"], key=tables.natural) == ordered


def test_shapes() -> None:
    assert tables.shape(()) == "[]"
    assert tables.shape((64, 3, 7, 7)) == "[64, 3, 7, 7]"


def test_a_long_account_keeps_both_ends() -> None:
    lines = [str(number) for number in range(20)]
    assert tables.middle_cut(lines, 0) == lines
    assert tables.middle_cut(lines[:8], 8) == lines[:8]
    cut = tables.middle_cut(lines, 8)
    assert cut == ["0", "1", "2", "3", "4", "5", "... 12 more lines (a pipe gets all)", "18", "19"]


def test_a_shape_of_millions_of_dimensions_is_one_short_cell() -> None:
    assert words.shape([2] * 64).count("2") == 64
    assert words.shape(range(1, 2_000_001)) == "[1, 2, 3, 4, 5, 6, 7, 8, ... 2,000,000 dimensions]"


def test_columns_line_up() -> None:
    """Headers are on the left, and characters of two columns and of none are counted as such."""
    rows = [("layer.1", "7", "", "{}%s"), ("\u6f22\u5b57", "77777777", "", "e\u0301")]
    assert tables.table(rows, ["n", "long", "empty", "b"], right=[1]).splitlines() == [
        "n        long      empty    b",
        "-------  --------  -------  ----",
        "layer.1         7           {}%s",
        "\u6f22\u5b57     77777777           e\u0301",
    ]


def test_a_column_is_hidden_before_two_names_look_the_same() -> None:
    rows = [(f"model.a_layer_{n}_of_them.self_attention.weight", "1.234567890", "2.345678901") for n in range(3)]
    headers = ("name", "mean", "largest")
    drawn = tables.table(rows, headers, spare=("mean",), width=64).splitlines()
    assert rows[1][0] in drawn[3] and "2.345678901" in drawn[3]
    assert drawn[-1].startswith("... hidden to fit: mean")
    assert max(map(len, drawn)) <= 58
    whole = tables.table([("a" * 60, *rows[0][1:])], headers, spare=("mean",), width=64)
    assert "hidden" not in whole and "1.234567890" in whole

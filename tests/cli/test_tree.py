from __future__ import annotations

from ckptfix.checkpoint import Storage, TensorEntry, contiguous_stride
from ckptfix.cli.shared.tree import lines


def tensor(name: str, *shape: int, dtype: str = "float32", location: str = "cpu") -> TensorEntry:
    at, _, key = name.rpartition("/")
    storage = Storage("0", dtype, 0, location, None)
    return TensorEntry(key, at, storage, dtype, shape, contiguous_stride(shape))


def test_modules_hold_what_is_below_them() -> None:
    shown = list(lines([tensor("net/fc.weight", 2, 3), tensor("net/fc.bias", 2), tensor("step", dtype="int64")]))
    assert shown == [
        "net/fc    2 tensors, 32 B",
        "  weight  float32 [2, 3]",
        "  bias    float32 [2]",
        "step      int64 []",
    ]


def test_only_what_is_alike_and_in_a_row_folds() -> None:
    entries = [tensor(f"l.{index}.w", 4 if index == 3 else 2) for index in (0, 1, 3, 4, 5, 7)]
    assert list(lines(entries)) == [
        "l        6 tensors, 56 B",
        "  0-1.w  2 x float32 [2]",
        "  3.w    float32 [4]",
        "  4-5.w  2 x float32 [2]",
        "  7.w    float32 [2]",
    ]


def test_a_device_is_a_difference() -> None:
    entries = [tensor("l.0.w", 2, location="cuda:0"), tensor("l.1.w", 2, location="cuda:1")]
    assert list(lines(entries))[1:] == ["  0.w  float32 [2]  cuda:0", "  1.w  float32 [2]  cuda:1"]


def test_a_key_may_be_a_tensor_and_a_module() -> None:
    assert list(lines([tensor("a", 1), tensor("a.b", 2)])) == ["a    float32 [1]", "a.b  float32 [2]"]


def test_folded_modules_count_all_of_them() -> None:
    entries = [tensor(f"h.{index}.{name}", 8) for index in range(12) for name in ("w", "b")]
    assert list(lines(entries)) == ["h.0-11  24 tensors, 768 B", "  w     float32 [8]", "  b     float32 [8]"]


def test_odd_names() -> None:
    names = [".".join("a" * 50_000), "", "...", "9" * 5000, "²", "x\x1b"]
    shown = list(lines(tensor(name, 1) for name in names))
    assert len(shown) >= 6
    assert not any("\x1b" in line for line in shown)
    assert list(lines([])) == []


def test_levels_below_the_depth_are_counted() -> None:
    entries = [tensor(f"net.h.{index}.{name}", 8) for index in range(3) for name in ("w", "b")] + [tensor("net.x", 1)]
    assert list(lines(entries, depth=1)) == ["net  7 tensors, 196 B"]
    two = ["net      7 tensors, 196 B", "  h.0-2  6 tensors, 192 B", "  x      float32 [1]"]
    assert list(lines(entries, depth=2)) == two
    assert len(list(lines(entries, depth=3))) == 5


def test_a_line_fits_its_width() -> None:
    entries = [tensor(f"{'encoder' * 9}.layer.{'x' * 70}.weight", 8, 1024, 1024), tensor("a.b.c", 2)]
    for width in (40, 60, 80):
        shown = list(lines(entries, width=width))
        assert max(map(len, shown)) <= width
        assert any(line.startswith("a.b.c ") for line in shown)
    assert max(map(len, lines(entries))) > 100, "a pipe gets all of it"

"""What is browsed, without a screen: the tree, the search, the numbers, the findings, two files, and the commands."""

from __future__ import annotations

import math
import os
import random
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import rank_writer
import torch
from browsed import HOSTILE, floats, hostile, tensors, training
from builders import safetensors, written
from click.testing import CliRunner

from ckptfix.browse.model import facts, jobs, node_findings, pairs, search, summary
from ckptfix.browse.model.contents import ContentItem, Contents, Status, parts_of, read
from ckptfix.browse.model.grid import grid_of, window
from ckptfix.browse.model.outline import Outline, OutlineNode, leaf
from ckptfix.browse.model.shown_commands import OpenCommands, literal
from ckptfix.browse.model.text_drawing import bars, shown
from ckptfix.checkpoint import TensorEntry
from ckptfix.cli import commands
from ckptfix.elements.histogram import MOST_BINS, Histogram
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.io.read import read_chunks
from ckptfix.ops.diff.result import TensorChange


def quiet(done: int, total: int) -> None:
    """No progress."""


def rows(outline: Outline) -> list[tuple[int, str]]:
    return [(node.level, node.label) for node in outline.rows]


def entry_of(contents: Contents, name: str) -> TensorEntry:
    entry = next(item.entry for item in contents.items if item.name == name)
    assert entry is not None
    return entry


def test_a_folder_of_ranks_is_browsed_as_one_model(tmp_path: Path) -> None:
    model = rank_writer.qwen()
    rank_writer.write_megatron(model, tmp_path / "g", rank_writer.Sizes(2, 2))
    contents = read(str(tmp_path / "g"))
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    entries = {item.entry.key: item.entry for item in contents.items if item.entry is not None}
    assert set(entries) == set(model.tensors)
    assert entries[name].shape == tuple(model.tensors[name].shape)
    assert b"".join(read_chunks(entries[name].data)) == model.tensors[name].view(torch.uint8).numpy().tobytes()
    outline = Outline(contents.items)
    assert "model" in [label for _, label in rows(outline)]


class TestTree:
    def test_children_are_made_when_a_node_is_opened(self, tmp_path: Path) -> None:
        outline = Outline(read(str(training(tmp_path))).items)
        assert rows(outline) == [(0, ""), (1, "model"), (1, "epoch"), (1, "args")]
        assert outline.expand(1) == 2
        assert rows(outline)[1:4] == [(1, "model"), (2, "layers"), (2, "norm.bias")]
        assert outline.expand(2) == 2 and outline.expand(3) == 2
        assert [label for _, label in rows(outline)[3:6]] == ["0", "attn.weight", "mlp.weight"]
        node = outline.rows[2]
        assert (node.address, node.tensors, node.nbytes) == ("model/layers", 4, 96)
        assert outline.parent(4) == 3 and outline.collapse(2) == 4 and len(outline.rows) == 6

    def test_what_was_open_stays_open_when_it_is_sorted(self, tmp_path: Path) -> None:
        outline = Outline(read(str(training(tmp_path))).items)
        assert outline.expand_all(100)
        count = len(outline.rows)
        outline.sort("size")
        assert len(outline.rows) == count
        top = [node.label for node in outline.rows if node.level == 1]
        outline.sort("name")
        assert top == ["model", "epoch", "args"]
        assert [node.label for node in outline.rows if node.level == 1] == ["args", "epoch", "model"]

    def test_numbers_are_sorted_as_numbers(self) -> None:
        names = [f"l.{number}.w" for number in (10, 9, 100, 1)]
        outline = Outline([ContentItem(name, parts_of("", name), pending=True) for name in names])
        outline.sort("name")
        assert [node.label for node in outline.rows[2:]] == ["1.w", "9.w", "10.w", "100.w"]

    def test_parts_joined_are_the_name(self, tmp_path: Path) -> None:
        for item in read(str(hostile(tmp_path / "h.pth"))).items:
            assert "".join(item.parts) == item.name and len(item.parts) <= 100

    def test_a_name_of_ten_thousand_components(self) -> None:
        deep = ContentItem(name := ".".join(["a"] * 10_000), parts_of("", name), pending=True)
        other = ContentItem(name := ".".join(["a"] * 9_999 + ["b"]), parts_of("", name), pending=True)
        outline = Outline([deep, other])
        assert outline.expand_all(10) and len(outline.rows) == 4
        assert outline.show(deep) == 2

    def test_an_item_is_shown_wherever_it_is(self, tmp_path: Path) -> None:
        items = read(str(training(tmp_path))).items
        for item in items:
            outline = Outline(items)
            assert outline.rows[outline.show(item)].item is item


class TestSearch:
    NAMES = ("model.Layers.0.weight", "model.layers.1.bias", "opt/state/0/exp_avg", "a[1]")

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("layers", [0, 1]), ("Layers", [0]), ("*.weight", [0]), ("/\\d+$|bias/", [1]), ("exp_avg", [2]),
            ("exp*", [2]), ("a[[]1]", [3]), ("zzz", []), ("/avg|bias/", [1, 2]),
        ],
    )  # fmt: skip
    def test_as_it_is_typed(self, text: str, found: list[int]) -> None:
        items = [ContentItem(name, parts_of(*name.rpartition("/")[::2]), pending=True) for name in self.NAMES]
        assert [item for batch in search.find(items, text) for item in batch] == [items[row] for row in found]


class TestNumbers:
    def test_a_histogram_counts_every_element_whatever_the_order(self) -> None:
        import numpy

        chance = random.Random(7)
        for _ in range(60):
            scale = 10.0 ** chance.uniform(-300, 300)
            middle = chance.choice([0.0, 1e9, -1e300, 5e-324])
            values = [middle + scale * chance.gauss(0, 1) for _ in range(chance.randrange(1, 400))]
            values = [value for value in values if math.isfinite(value)] or [0.0]
            whole, left, right = Histogram(), Histogram(), Histogram()
            for start in range(0, len(values), 50):
                whole.add(numpy.array(values[start : start + 50]))
                (left if start % 100 else right).add(numpy.array(values[start : start + 50]))
            left.join(right)
            for made in (whole, left):
                assert made.counts is not None
                assert int(made.counts.sum()) == len(values) and len(made.counts) <= MOST_BINS + 1
                low, high = made.ends()
                assert low <= min(values) and max(values) <= high
                assert sum(made.columns(40, min(values), max(values))) == len(values)

    def test_columns_are_those_of_numpy(self) -> None:
        import numpy

        values = numpy.random.default_rng(3).normal(size=10_000)
        made = Histogram()
        made.add(values)
        expected, _ = numpy.histogram(values, 20, (values.min(), values.max()))
        found = made.columns(20, float(values.min()), float(values.max()))
        assert sum(abs(x - y) for x, y in zip(found, expected.tolist(), strict=True)) < 100

    def test_the_whole_range_of_float64(self) -> None:
        import numpy

        made = Histogram()
        made.add(numpy.array([-1.7e308, 1.7e308, 5e-324, 0.0]))
        assert sum(made.columns(8, -1.7e308, 1.7e308)) == 4

    def test_statistics_are_those_of_stats(self, tmp_path: Path) -> None:
        from ckptfix.ops.stats import stats

        path = tensors(tmp_path / "a.safetensors", {"w": (1.0, -2.0, 0.0, math.nan, math.inf)})
        contents = read(str(path))
        made = summary.summarise(contents, entry_of(contents, "w"), quiet)
        assert made.moments == stats(path).rows[0].moments
        assert made.histogram is not None and sum(made.histogram.columns(4, -2, 1)) == 3

    def test_it_stops_where_it_is(self, tmp_path: Path) -> None:
        path = written(tmp_path / "big.safetensors", safetensors([("w", "F32", [1 << 24], bytes(1 << 26))]))
        contents = read(str(path))
        seen: list[int] = []

        def progress(done: int, total: int) -> None:
            seen.append(done)
            if done:
                raise jobs.Cancelled

        with pytest.raises(jobs.Cancelled):
            summary.summarise(contents, entry_of(contents, "w"), progress)
        assert len(seen) == 2 and seen[-1] < 1 << 26

    def test_bars(self) -> None:
        assert bars([0, 1, 4], 2) == ["  █", " ▄█"]
        assert bars([1, 10_000], 1) == ["▁█"] and bars([0, 0], 3) == []


class TestGrid:
    def test_rows_of_a_matrix_and_of_a_vector(self, tmp_path: Path) -> None:
        contents = read(str(training(tmp_path)))
        matrix = entry_of(contents, "model/layers.1.attn.weight")
        assert window(contents, matrix, range(5), range(1, 3)) == {0: [3.0, 4.0], 1: [6.0, 7.0]}
        vector = entry_of(contents, "model/norm.bias")
        grid = grid_of(vector)
        assert (grid.rows, grid.columns, grid.width(2), grid.index(2)) == (3, 10, 5, "20")
        assert window(contents, vector, range(1, 3), range(4, 10)) == {1: [14, 15, 16, 17, 18, 19], 2: [24]}
        assert grid.row_of((23,)) == (2, 3)
        with pytest.raises(IndexError):
            grid.row_of((25,))

    def test_indices_of_many_dimensions(self, tmp_path: Path) -> None:
        raw = floats(*range(24))
        made = [("w", "F32", [2, 3, 4], raw), ("s", "F32", [], floats(5))]
        path = written(tmp_path / "a.safetensors", safetensors(made))
        contents = read(str(path))
        grid = grid_of(entry_of(contents, "w"))
        assert [grid.index(row) for row in range(grid.rows)] == ["0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
        assert grid.row_of((1, 2, 3)) == (5, 3)
        assert window(contents, entry_of(contents, "w"), range(4, 6), range(4)) == {
            4: [16, 17, 18, 19], 5: [20, 21, 22, 23],
        }  # fmt: skip
        assert window(contents, entry_of(contents, "s"), range(9), range(9)) == {0: [5.0]}

    @pytest.mark.slow
    def test_every_view_and_dtype_as_torch_has_them(self, tmp_path: Path) -> None:
        import torch

        base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
        made: dict[str, torch.Tensor] = {
            "turned": base.transpose(0, 2), "stepped": base[:, ::2, 1:4], "wide": torch.zeros(1).expand(3, 4),
            "column": base[..., 2], "far": torch.arange(200_000)[::50_000], "flag": base > 30,
            **{str(dtype)[6:]: base.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.float64)},
            "fp8": base.to(torch.float8_e4m3fn), "complex": torch.complex(base, -base),
        }  # fmt: skip
        torch.save(made, tmp_path / "views.pth")
        contents = read(str(tmp_path / "views.pth"))
        for name, tensor in made.items():
            entry = entry_of(contents, name)
            grid = grid_of(entry)
            found = window(contents, entry, range(grid.rows), range(grid.columns))
            expected = tensor.to(torch.float64).flatten() if name == "fp8" else tensor.flatten()
            assert [value for row in range(grid.rows) for value in found[row]] == expected.tolist(), name

    def test_only_the_rows_that_are_shown_are_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = written(tmp_path / "a.safetensors", safetensors([("w", "F32", [1000, 1000], bytes(4_000_000))]))
        contents = read(str(path))
        read_bytes: list[int] = []
        pread = os.pread

        def counted(fd: int, count: int, at: int) -> bytes:
            read_bytes.append(count)
            return pread(fd, count, at)

        monkeypatch.setattr(os, "pread", counted)
        window(contents, entry_of(contents, "w"), range(500, 540), range(100, 110))
        assert 0 < sum(read_bytes) <= 40 * 1000 * 4

    def test_what_has_no_numbers_says_why(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.safetensors", safetensors([("w", "F4", [4], bytes(2)), ("none", "F32", [0], b"")]))
        contents = read(str(path))
        with pytest.raises(Unsupported, match="no elements"):
            grid_of(entry_of(contents, "none"))
        assert window(contents, entry_of(contents, "w"), range(1), range(2)) == {0: [0, 0]}  # the bytes of the pairs


class TestChanged:
    def test_nothing_is_read_of_a_file_that_changed(self, tmp_path: Path) -> None:
        path = tensors(tmp_path / "a.safetensors", {"w": (1.0, 2.0)})
        contents = read(str(path))
        entry = entry_of(contents, "w")
        assert window(contents, entry, range(1), range(2)) == {0: [1.0, 2.0]}
        os.utime(path, ns=(1, 1))
        for call in (
            lambda: window(contents, entry, range(1), range(2)),
            lambda: summary.summarise(contents, entry, quiet),
            lambda: node_findings.of_contents(contents, quiet),
        ):
            with pytest.raises(DamagedFile, match="changed"):
                call()


class TestFindings:
    def test_they_are_on_what_they_concern_and_on_all_above(self, tmp_path: Path) -> None:
        found = node_findings.of_contents(read(str(training(tmp_path, prefix="module."))), quiet)
        assert found.severities == {"": "warning", "model": "warning"}
        node = Outline(read(str(training(tmp_path, prefix="module."))).items).rows[1]
        assert node.label == "model/module" and found.severity(node.covers) == "warning"
        assert found.fix is not None and found.fix.startswith("ckptfix strip-module ")
        assert "wrapped-names" in [finding.id for finding in found.at(node.covers)]

    def test_of_a_tensor_that_is_cut_off(self, tmp_path: Path) -> None:
        whole = tensors(tmp_path / "a.safetensors", {"a.x": (1.0, 2.0), "a.y": (3.0,) * 9}).read_bytes()
        found = node_findings.of_contents(read(str(written(tmp_path / "cut.safetensors", whole[:-8]))), quiet)
        assert found.severities == {"": "error", "a": "error", "a.y": "error"}

    def test_of_a_file_that_cannot_be_opened(self, tmp_path: Path) -> None:
        found = node_findings.of_path(str(written(tmp_path / "page.pth", b"<!DOCTYPE html><html></html>")), quiet)
        assert [row.finding.id for row in found.rows] == ["web-page"]


class TestPairs:
    def test_they_are_what_diff_says(self, tmp_path: Path) -> None:
        common = {"same": (1.0,), "other": (1.0, 2.0), "size": (1.0,)}
        a = tensors(tmp_path / "a.safetensors", {**common, "gone": (1.0,)})
        b = tensors(tmp_path / "b.safetensors", {**common, "other": (1.0, 3.0), "size": (1.0, 2.0), "new": (1.0,)})
        both = pairs.read_pairs(str(a), str(b))
        assert {item.name: item.status for item in both.items} == {
            "same": "?", "other": "?", "gone": "-", "new": "+", "size": "~"
        }  # fmt: skip
        told: dict[str, tuple[str, tuple[TensorChange, ...]]] = {}

        def tell(item: ContentItem, status: Status, changes: tuple[TensorChange, ...]) -> None:
            told[item.name] = status, changes

        pairs.compare(both, both.items, tell, quiet)
        assert {name: status for name, (status, _) in told.items()} == {"same": "=", "other": "~", "size": "~"}
        change = told["other"][1][0]
        assert change.values is not None and change.values.differing == 1
        assert ("changed", "1 of 2 elements differ (50.0%)") in facts.of_changes([change])

    def test_across_wrappers_nestings_and_values(self, tmp_path: Path) -> None:
        a = training(tmp_path, "a.pth", prefix="module.", epoch=3)
        b = training(tmp_path, "b.pth", epoch=4)
        both = pairs.read_pairs(str(a), str(b))
        found = {item.name: item.status for item in both.items}
        assert found["model/module.norm.bias"] == "?" and found["epoch"] == "~" and found["args/lr"] == "="
        assert "+" not in found.values() and "-" not in found.values()

    def test_it_stops(self, tmp_path: Path) -> None:
        a = training(tmp_path, "a.pth")
        both = pairs.read_pairs(str(a), str(training(tmp_path, "b.pth")))

        def stop(done: int, total: int) -> None:
            raise jobs.Cancelled

        told: list[ContentItem] = []
        with pytest.raises(jobs.Cancelled):
            pairs.compare(both, both.items, lambda item, status, changes: told.append(item), stop)
        assert not told


class TestJobs:
    def test_one_that_was_stopped_tells_nothing(self) -> None:
        going, go = threading.Event(), threading.Event()
        said: list[object] = []

        def call(progress: object) -> int:
            going.set()
            go.wait(60)
            return 1

        job = jobs.start(call, said.append, said.append, lambda then: then())
        assert going.wait(60)
        job.stop()
        go.set()
        for thread in threading.enumerate():
            if thread.name == "ckptfix browse":
                thread.join(60)
        assert not said

    def test_errors_are_sentences(self) -> None:
        assert jobs.described(DamagedFile("it is cut", path="a", hint="copy it")) == ("a: it is cut", "copy it")
        assert jobs.described(RecursionError()) == ("nested too deeply", "")


class TestHostile:
    def test_no_name_reaches_the_terminal_as_it_is(self, tmp_path: Path) -> None:
        path = hostile(tmp_path / "\x1b[31mh.pth")
        contents = read(str(path))
        outline = Outline(contents.items)
        assert outline.expand_all(1000)
        found = node_findings.of_contents(contents, quiet)
        lines = [shown(node.label) for node in outline.rows]
        for item in contents.items:
            about = facts.of_value(item, found) if item.is_value else facts.of_tensor(item, found)
            lines += [line for _, line in about]
        for node in outline.rows:
            lines += [line for _, line in facts.of_module(node, found)]
        assert len(lines) > 60
        assert all(line.isprintable() and len(line) < 5000 for line in lines)

    def test_a_glob_of_a_name_matches_it_alone(self) -> None:
        from ckptfix.names.globs import pattern

        for name in HOSTILE:
            match = pattern(literal(name))
            assert [other for other, fits in zip(HOSTILE, match(HOSTILE), strict=True) if fits] == [name]


def ran(line: str) -> tuple[int, str]:
    """What the command that was copied prints."""
    split = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout
    words = [os.fsdecode(word) for word in split.split(b"\0")[:-1]]
    assert words[0] == "ckptfix"
    result = CliRunner().invoke(commands, words[1:])
    return result.exit_code, result.output


class TestCommands:
    @pytest.mark.parametrize("which", ["training", "hostile"])
    def test_each_runs_and_is_about_what_is_shown(self, tmp_path: Path, which: str) -> None:
        path = training(tmp_path) if which == "training" else hostile(tmp_path / "hostile names.pth")
        contents = read(str(path))
        outline = Outline(contents.items)
        outline.expand_all(100)
        made = OpenCommands(str(path), contents=contents)
        lines = [made.everything("size"), *(made.of(node, "name") for node in outline.rows[1:])]
        lines += [made.of(leaf(item), "file") for item in contents.items]
        for line in dict.fromkeys(lines):
            code, output = ran(line)
            assert code == 0, f"{line}\n{output}"
        assert any(line.startswith("ckptfix stats ") for line in lines)
        assert ran(made.findings())[0] in (0, 1)

    def test_a_search(self, tmp_path: Path) -> None:
        path = tensors(tmp_path / "a.safetensors", {"Layer.w": (1.0,), "layer.w": (2.0,), "norm": (1.0,)})
        for text, count in (("layer", 2), ("Layer", 1), ("*.w", 2), ("/norm$/", 1), ("er.", 2)):
            _, output = ran(f"{OpenCommands(str(path)).search(text, 'name')} --tensors")
            assert len(output.splitlines()) == count + 2, output

    def test_two_files(self, tmp_path: Path) -> None:
        a = tensors(tmp_path / "a.safetensors", {"Layer.w": (1.0,), "x": (1.0,)})
        b = tensors(tmp_path / "b.safetensors", {"Layer.w": (2.0,), "y": (1.0,)})
        made = OpenCommands(str(a), str(b))
        both = pairs.read_pairs(str(a), str(b))
        for item in both.items:
            code, output = ran(made.of(leaf(item), "file"))
            assert code == 1 and item.name in output
        assert ran(made.search("layer", "file"))[0] == 0  # keys alone
        assert ran(made.everything())[0] == 1
        made.at = ("", "")
        assert shlex.split(made.everything())[-4:] == ["--at", "", "--at", ""]

    def test_stats_refuses_a_damaged_file_so_inspect_is_given(self, tmp_path: Path) -> None:
        whole = tensors(tmp_path / "a.safetensors", {"a": (1.0, 2.0), "b": (3.0,) * 9}).read_bytes()
        path = written(tmp_path / "cut.safetensors", whole[:-8])
        contents = read(str(path))
        line = OpenCommands(str(path), contents=contents).of(leaf(contents.items[0]), "file")
        assert line.startswith("ckptfix inspect ") and ran(line)[0] == 0


def test_the_model_needs_no_textual() -> None:
    script = (
        "import sys, ckptfix.browse.model.session, ckptfix.browse.model.screen_text, ckptfix.browse.model.pairs; "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"textual", "rich", "torch", "numpy"} & set(loaded)


def test_a_module_of_one_tensor_is_one_row() -> None:
    item = ContentItem("norm.weight", parts_of("", "norm.weight"), pending=True)
    other = ContentItem("head", ("head",), pending=True)
    assert [node.label for node in OutlineNode("", "", [item, other], 0, 0).children()] == ["norm.weight", "head"]


def test_layers_that_are_alike_are_one_row(tmp_path: Path) -> None:
    rows = {f"model.layers.{layer}.{part}": (1.0,) * (2 if layer != 5 else 3) for layer in range(12) for part in "ab"}
    items = read(str(tensors(tmp_path / "a.safetensors", rows))).items
    outline = Outline(items)
    outline.fold = True
    outline.rebuild()
    assert [node.label for node in outline.rows] == ["", "model.layers", "0-4", "5", "6-11"]
    folded = outline.rows[4]
    assert (folded.tensors, len(folded.kids or ()), folded.level) == (12, 6, 2)
    assert outline.expand(2) == 5 and [node.label for node in outline.rows[3:5]] == ["0", "1"]
    assert outline.rows[3].level == 3 and outline.collapse(2) == 5
    assert outline.rows[outline.show(items[-1])].item is items[-1]
    code, output = ran(OpenCommands(str(tmp_path / "a.safetensors")).of(folded, "file"))
    assert code == 0 and "model.layers.7.a" in output
    outline.fold = False
    outline.rebuild()
    assert len([node for node in outline.rows if node.level == 2]) == 12
